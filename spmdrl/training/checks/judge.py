"""Checks before anything is built whether the judge of a run (PpoConfig.judge) can do its work."""

from __future__ import annotations

from typing import Any

from spmdrl.config import ConfigError, JudgeConfig, PpoConfig, require
from spmdrl.distributed.placement import Ranks, show_ranks
from spmdrl.distributed.topology import resolve_degrees
from spmdrl.engines.megatron.layout import divisors
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.hub.model_files import check_model_files, eos_token_ids
from spmdrl.rewards.judge import check_words
from spmdrl.rewards.runner import asks_judge, rewards_of
from spmdrl.rollout.build import ENGINES, check_engine
from spmdrl.training.language_judge import engine_config


def check_judge(config: PpoConfig, sampling: Ranks, scoring: Ranks, training: Ranks = ()) -> None:
    """Raises ConfigError for a judge that cannot be asked, or that nobody asks. sampling, scoring,
    training: the ranks of rollout, of reward, and of the roles that are trained.
    """
    asked, judge = asks_judge(rewards_of(config)), config.judge
    require(
        judge is not None or not asked,
        "the reward asks for judge_score, but there is no judge: set it, "
        "e.g. judge=JudgeConfig('Qwen/Qwen3-8B')",
    )
    if judge is None:
        return
    require(
        asked,
        "judge has no effect: no reward function has a parameter judge_score or judge_verdicts. "
        'reward="judge" is its score and nothing else',
    )
    require(judge.model != "", "judge.model is not set: which model is to be asked?")
    check_words(judge)
    check_comparisons(judge, config)
    check_sampling(judge, config)
    check_judge_model(judge, config)
    check_judge_ranks(judge, config, sampling, scoring)
    if judge.sleep and not {*sampling, *training}.isdisjoint(scoring):
        spec = ENGINES[judge.engine or config.rollout.engine]
        spec.check_frozen_sleep(load_hf_config(judge.model).get_text_config())


def check_comparisons(judge: JudgeConfig, config: PpoConfig) -> None:
    """Raises ConfigError where there is nobody to compare an answer with."""
    others = config.rollout.n - 1 + config.rollout.greedy_baseline
    if judge.compare == "each":
        require(
            judge.opponents == 0,
            f"judge.opponents={judge.opponents} has no effect: judge.compare='each' compares "
            "nothing; set judge.compare='pairs'",
        )
        return
    require(
        others > 0,
        f"judge.compare='pairs' compares the answers to a prompt, but rollout.n={config.rollout.n}",
    )
    require(
        judge.opponents <= others,
        f"judge.opponents={judge.opponents}, but an answer has {others} others in its group: use 0 "
        "for all of them",
    )


def check_sampling(judge: JudgeConfig, config: PpoConfig) -> None:
    spec = ENGINES[judge.engine or config.rollout.engine]
    require(
        spec.holds_frozen,
        f"rollout.engine={spec.name!r} cannot be the judge's engine as well: set judge.engine to "
        f"{' or '.join(repr(name) for name, each in ENGINES.items() if each.holds_frozen)}",
    )
    spec.check(engine_config(judge, config.rollout, sleeps=False))
    least = spec.least_temperature
    require(
        not 0 < judge.temperature < least,
        f"judge.temperature={judge.temperature:g}: {spec.title} would raise it to {least}; use 0 "
        "(greedy) or more",
    )
    require(
        judge.temperature > 0 or judge.top_p == 1,
        f"judge.top_p={judge.top_p} has no effect on greedy verdicts: set judge.temperature",
    )
    for key in ("tokenize", "add_generation_prompt"):
        require(
            key not in judge.chat_template_kwargs,
            f"judge.chat_template_kwargs: {key!r} is not yours to set; leave it out",
        )


def check_judge_model(judge: JudgeConfig, config: PpoConfig) -> None:
    """Looks at the model's config and its tokenizer."""
    hf = load_hf_config(judge.model)
    text: Any = hf.get_text_config()
    longest = judge.max_prompt_tokens + judge.max_tokens
    limit = getattr(text, "max_position_embeddings", None)
    require(
        limit is None or longest <= limit,
        f"judge.max_prompt_tokens={judge.max_prompt_tokens} + judge.max_tokens={judge.max_tokens} "
        f"= {longest} tokens, but the judge's max_position_embeddings is {limit}",
    )
    heads, degree = text.num_attention_heads, judge.tensor_parallel
    require(
        heads % degree == 0,
        f"judge.tensor_parallel={degree} does not divide the judge's {heads} attention heads; use "
        f"one of {divisors(heads)}",
    )
    try:
        check_engine(judge.model, hf, engine_config(judge, config.rollout, sleeps=False), False)
    except ConfigError as error:
        raise ConfigError(f"judge, as the model of an engine: {error}") from error
    require(
        load_tokenizer(judge.model).chat_template is not None,
        f"judge.model={judge.model!r} has no chat template, by which a judge is asked; use an "
        "instruction-tuned model, or add a chat_template.jinja to its folder",
    )
    require(
        bool(eos_token_ids(judge.model)),
        f"judge.model={judge.model!r}: neither generation_config.json nor config.json has an "
        "eos_token_id, so no verdict would end; set it there",
    )


def check_judge_ranks(
    judge: JudgeConfig, config: PpoConfig, sampling: Ranks, scoring: Ranks
) -> None:
    """Raises ConfigError where the ranks of reward make no engines, or two engines of one library
    would have other groups on the same ranks: a library has one set of groups in a process.
    """
    degree, rollout = judge.tensor_parallel, config.rollout
    try:
        resolve_degrees({"dp": -1, "tp": degree}, len(scoring))
    except ConfigError as error:
        raise ConfigError(
            f"judge.tensor_parallel on ranks {show_ranks(scoring)} of reward: {error}"
        ) from error
    if (judge.engine or rollout.engine) != rollout.engine:
        return
    policy, own = groups_of(sampling, rollout.tensor_parallel), groups_of(scoring, degree)
    differ = [rank for rank in policy.keys() & own.keys() if policy[rank] != own[rank]]
    require(
        not differ,
        f"judge.tensor_parallel={degree} and rollout.tensor_parallel={rollout.tensor_parallel} "
        f"make other groups of rank {min(differ, default=0)}, which has an engine of both: set "
        f"judge.tensor_parallel={rollout.tensor_parallel}, judge.engine to another than "
        f"{rollout.engine!r}, or place 'reward' on ranks of its own",
    )


def groups_of(ranks: Ranks, degree: int) -> dict[int, Ranks]:
    """Returns the tensor-parallel group of each rank."""
    ordered = sorted(ranks)
    starts = range(0, len(ordered) - degree + 1, degree)
    groups = [tuple(ordered[start : start + degree]) for start in starts]
    return {rank: group for group in groups for rank in group}


def check_judge_files(config: PpoConfig) -> None:
    """Raises ConfigError where the judge's files cannot make the model that its config says."""
    if config.judge is not None:
        name = config.judge.model
        check_model_files("judge.model", name, load_hf_config(name))
