"""Checks before anything is built whether agents can make the samples of a run."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from spmdrl.algo.advantages import estimator_of
from spmdrl.config import AgentConfig, ConfigError, PpoConfig, ServeConfig, require
from spmdrl.config.words import counted
from spmdrl.data.prompts import PromptDataset
from spmdrl.rewards.runner import resolve_rewards, rewards_of
from spmdrl.rewards.workers.caller import arguments_of, check_shared
from spmdrl.rewards.workers.caller import check as check_limits
from spmdrl.rollout.agents.command import CONTAINERS, CommandAgent, filled, missing_program
from spmdrl.rollout.agents.pool import ARGUMENTS, agents_of, check_agent_sources
from spmdrl.rollout.multi_turn.tools import PROBE, CallParser

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HIGHEST_PORT = 65535
GRACE_S = 10.0  # beyond the time limit, for an agent to be ended


def check_agents(config: PpoConfig, engines: int) -> None:
    """Raises ConfigError where agents cannot run, or do not go with the rest of the config.

    engines: how many share the limits of agents.
    """
    rewards = resolve_rewards(rewards_of(config)).values()
    reads = any("agent_output" in reward.arguments for reward in rewards)
    if config.agent is None:
        for name, usual in (("agents", AgentConfig()), ("serve", ServeConfig())):
            require(
                getattr(config, name) == usual, f"{name} has no effect: the config has no agent"
            )
        require(not reads, "the reward asks for agent_output, but the config has no agent")
        return
    check_options(config)
    check_limits(config.agents)
    check_shared(config.agents, engines)
    for agent in agents_of(config).values():
        require(
            callable(agent),
            f"agent={agent!r}: expected a function, a command line as a list of words, or one of "
            "them per data_source",
        )
        arguments_of(agent, ARGUMENTS, "agent")
        if isinstance(agent, CommandAgent):
            check_command(agent)
    silent_s = (1 + config.agents.retries) * (config.agents.timeout_s + GRACE_S)
    require(
        silent_s < config.stall_timeout_s,
        f"agents.timeout_s={config.agents.timeout_s:g} with agents.retries="
        f"{config.agents.retries} may take {silent_s:g} s, which is not below stall_timeout_s="
        f"{config.stall_timeout_s:g}: a rank that waits for its agents would be taken for stalled",
    )
    serve = config.serve
    require(
        serve.port >= 0 and serve.port + engines - 1 <= HIGHEST_PORT,
        f"serve.port={serve.port}: the {engines} engines take this port and those behind it, up to "
        f"{HIGHEST_PORT}",
    )


class AnyKey(dict):
    """Stands for a row's extra_info, which may have any key."""

    def __missing__(self, key: str) -> str:
        return ""


def check_command(agent: CommandAgent) -> None:
    """Raises ConfigError for a command line that cannot be run on this host."""
    config = agent.config
    missing = missing_program(agent)
    row = {"prompt": "", "sample_index": 0, "data_source": "", "extra_info": AnyKey()}
    try:
        for word in agent.words:
            filled(word, row, "", "", "")
    except (KeyError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"agent: {word!r} has a name in braces that a row has not ({error}); double braces "
            "stand for themselves"
        ) from error
    require(
        missing is None,
        f"agent: there is no program {missing!r} on this host (agents.runner={config.runner!r})",
    )
    require(
        config.runner not in CONTAINERS or bool(config.runner_args),
        f"agents.runner={config.runner!r} needs an image: agents.runner_args=('my/image',)",
    )


def check_options(config: PpoConfig) -> None:
    """Raises ConfigError for options that are of one answer to one prompt, or of another way to
    have several turns.
    """
    algo, rollout, estimator = config.algo, config.rollout, estimator_of(config.algo)
    refused = {
        "tools": bool(config.tools),
        "environment": config.environment is not None,
        "algo.sample_filter": algo.sample_filter is not None,
        "algo.overlong_buffer": algo.overlong_buffer > 0,
        "rollout.greedy_baseline": rollout.greedy_baseline,
        "rollout.static_split": rollout.static_split,
        "actor.router_replay": config.actor.router_replay is not None,
        "prm": config.prm is not None,
        f"algo.advantage={algo.advantage!r}": estimator.token_sums,
        "algo.aggregation, a function": callable(algo.aggregation),
        "reward_model": config.reward_model is not None, "judge": config.judge is not None,
    }  # fmt: skip
    reasons = {
        "tools": "an agent runs its own tools",
        "environment": "an agent is its own environment",
    }
    usual = "it is of single answers, and a trajectory may be trained on as several sequences"
    for name, is_on in refused.items():
        require(not is_on, f"{name} does not go with agent: {reasons.get(name, usual)}")
    given = {f.name for f in fields(AgentConfig) if f.name.startswith("runner")}
    changed = {
        name for name in given if getattr(config.agents, name) != getattr(AgentConfig(), name)
    }
    require(
        runs_commands(config) or not changed,
        f"agents.{min(changed, default='')} has no effect: the agent is no command line",
    )
    require(
        config.agents.max_staleness is None or rollout.oversample > 1,
        f"agents.max_staleness={config.agents.max_staleness} has no effect: with "
        "rollout.oversample=1 no trajectory goes on from step to step",
    )


def runs_commands(config: PpoConfig) -> bool:
    """Whether an agent is a command line."""
    return any(isinstance(agent, CommandAgent) for agent in agents_of(config).values())


def check_agent_data(config: PpoConfig, dataset: PromptDataset) -> None:
    """Raises ConfigError for data whose rows agents cannot be given."""
    if config.agent is None:
        return
    check_agent_sources(config, dataset.data_sources)
    shown, limits = dataset.images, config.agents
    require(
        shown.per_prompt <= limits.max_images,
        f"data: a prompt has {counted(shown.per_prompt, 'image')}, and "
        f"agents.max_images={limits.max_images} "
        "is the most that an agent's messages may show",
    )
    require(
        not shown.per_prompt or shown.largest[0] <= limits.max_image_tokens,
        f"data: an image of the prompts has {shown.largest[0]} tokens, more than "
        f"agents.max_image_tokens={limits.max_image_tokens}",
    )
    require(
        not (shown.per_prompt and runs_commands(config)),
        "data: prompts have images, and a command line is told of its row in its environment, "
        "which has no room for them: let the agent be a function",
    )


def check_parser(config: PpoConfig, tokenizer: Any) -> None:
    """Raises ConfigError where agents.parser is set, and cannot read this tokenizer's calls."""
    if config.agents.parser != AgentConfig().parser:
        CallParser(config.agents.parser, tokenizer, [PROBE], "agents.parser")


def agent_lines(config: PpoConfig) -> list[str]:
    """Returns lines for --dry-run: who makes the samples, and by what limits."""
    names = [getattr(agent, "__qualname__", repr(agent)) for agent in agents_of(config).values()]
    limits, serve = config.agents, config.serve
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    where = f"port {serve.port} and up" if serve.port else "free ports"
    return [
        f"agents: {', '.join(names)}; a trajectory has at most "
        f"{counted(limits.max_turns, 'turn')} and "
        f"{limits.timeout_s:g} s, and {limits.retries} retries",
        f"  endpoint of each engine: {serve.host}, {where}; a turn has at most "
        f"{config.rollout.max_tokens} tokens, with its prompt at most {longest}",
    ] + [
        f"  images: at most {limits.max_images} in a prompt, of at most "
        f"{limits.max_image_tokens} tokens each"
    ] * (limits.max_images > 0)


def warnings_of_agents(config: PpoConfig) -> list[str]:
    """Returns warnings about what may be meant, and mostly is not."""
    if config.agent is None or config.serve.host in LOOPBACK:
        return []
    return [
        f"serve.host={config.serve.host!r}: whoever reaches this address can use the model with "
        "the run's key, which is sent without encryption"
    ]
