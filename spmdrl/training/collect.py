"""The sampling half of a step: prompts -> scored samples, on the ranks of rollout and reward."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from spmdrl.algo.pass_at_k import Attempts, metrics_at_k
from spmdrl.algo.selection import overlong_penalty, unequal
from spmdrl.config import AlgoConfig, PpoConfig, require
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.topology import Topology
from spmdrl.rewards.runner import check_invalid
from spmdrl.rollout.demonstrations import demonstration_samples, without_demonstrated
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.rollout.sampling import (
    evaluation_params,
    greedy_params,
    questions_of,
    sample_questions,
    seed_of,
    training_params,
)
from spmdrl.training.logs.metrics import sample_metrics
from spmdrl.training.partial_rollouts import PartialRollouts
from spmdrl.training.push_weights import new_weights, transfer
from spmdrl.training.remote_scoring import ScoringContext, score
from spmdrl.training.roles import Roles
from spmdrl.types import Prompt, Sample


@dataclass
class RolloutResult:
    """The samples of a step, as this rank has made them. `samples` are to be trained on, groups 0
    .. num_groups - 1.

    Both lists hold what this rank made; `all_samples` has more where dynamic sampling left groups
    out.
    """

    samples: list[Sample]
    num_groups: int  # the same on every rank
    all_samples: list[Sample]
    rounds: int = 0
    num_sampled: int = 0  # groups, in all rounds; the same on every rank
    num_equal: int = 0  # those of them whose answers have the same rewards
    metrics: dict[str, float] = field(default_factory=dict)  # of the prompts; the same on each rank
    step_info: dict[str, Any] = field(default_factory=dict)  # JSON-able, for the ranks that train


@dataclass(frozen=True)
class PromptSource:
    """A source of prompts. All functions do the same on every rank."""

    take: Callable[[int, int], list[Prompt]]  # the next k prompts, for a step
    by_id: Callable[[int], Prompt]
    # the rewards of a step's answers to each prompt, by its id; those that are invalid left out
    hear: Callable[[int, list[tuple[int, list[float]]]], None] = lambda step, rewards: None


def collect(roles: Roles, source: PromptSource, step: int) -> RolloutResult:
    """Asks every prompt n times, less the demonstrations that it has, and scores all answers. On
    the ranks that sample or score.

    With dynamic sampling a group whose rewards are all equal is left out, and more prompts are
    asked until the step is full or algo.dynamic_sampling rounds are over (DAPO).
    """
    config = roles.config
    wanted = config.data.prompts_per_step
    most_rounds = max(config.algo.dynamic_sampling, 1)
    result = RolloutResult([], 0, [], 0)
    num_sampled = 0
    if roles.leftover is None:
        prompts = take(roles, source, wanted, step)
    while True:
        result.rounds += 1
        if roles.leftover is not None:
            samples = ask_for_some(roles, roles.leftover, source, step)
        else:
            samples = ask(roles, list(enumerate(prompts, start=num_sampled)), step, result.rounds)
            num_sampled += len(prompts)
        samples = scored(roles, samples, source)
        result.all_samples += samples
        source.hear(step, keep_groups(result, samples, wanted, roles))
        missing = wanted - result.num_groups
        if missing == 0 or result.rounds == most_rounds:
            break
        # as many as will do at the rate so far
        share = max(result.num_groups, 1) / num_sampled
        prompts = take(roles, source, min(wanted, math.ceil(missing / share)), step)
    if roles.sampler.here and roles.sleeps:
        with roles.phases("rollout", roles.sampler.topology):
            roles.sampler.engine.sleep()
    return result


def take(roles: Roles, source: PromptSource, count: int, step: int) -> list[Prompt]:
    """The next prompts. Raises ConfigError where a function of the user's chose others on another
    rank. Collective over the ranks that sample.
    """
    with roles.phases("data", roles.sampling):
        prompts = source.take(count, step)
    if roles.config.data.sampler.function is not None:
        with roles.phases("data", roles.sampling):
            require_same_prompts(prompts, roles.sampling, step)
    return prompts


def require_same_prompts(prompts: list[Prompt], sampling: Topology, step: int) -> None:
    """Raises ConfigError where a user's function chose others on another rank. Collective."""
    chosen = gather_to_all([prompt.id for prompt in prompts], sampling.control)
    require(
        all(each == chosen[0] for each in chosen),
        f"data.sampler.function chose other prompts on some ranks in step {step}: it must depend "
        "on its arguments alone, and draw by `rng`",
    )


def ask(
    roles: Roles, prompts: list[tuple[int, Prompt]], step: int, sampling_round: int
) -> list[Sample]:
    """Answers to (group, prompt) of the whole step, those that this rank made.

    Demonstrations are among them, and with a greedy baseline the greedy answers, with index -1.
    """
    sampler, config = roles.sampler, roles.config
    if not sampler.here:
        return []
    with roles.phases("rollout", sampler.topology):
        # a later round may ask a prompt again, after the end of an epoch: other seeds
        purpose = "train" if sampling_round == 1 else f"train round {sampling_round}"
        questions = questions_of(
            prompts, config.rollout.n, run_seed=config.seed, step=step, purpose=purpose
        )
        if config.algo.demonstrations:
            questions = without_demonstrated(questions, config)
        samples, _ = sample_questions(
            sampler.scheduler, questions, training_params(config.rollout), **hooks(roles)
        )
        if config.algo.demonstrations:
            samples += demonstration_samples(
                prompts, config, step, sampler.topology, roles.tokenizer
            )
        if config.rollout.greedy_baseline:
            samples += greedy_samples(roles, prompts, step)
    return samples


GREEDY = -1  # index of a group's greedy answer


def greedy_samples(roles: Roles, prompts: list[tuple[int, Prompt]], step: int) -> list[Sample]:
    """Returns the greedy answers to each (group, prompt) that this rank made."""
    config = roles.config
    firsts = questions_of(prompts, 1, run_seed=config.seed, step=step, purpose="greedy")
    samples, _ = sample_questions(
        roles.sampler.scheduler, [replace(question, index=GREEDY) for question in firsts],
        greedy_params(config.rollout), **hooks(roles),
    )  # fmt: skip
    return samples


def ask_for_some(
    roles: Roles, leftover: PartialRollouts, source: PromptSource, step: int
) -> list[Sample]:
    """Asks more prompts than a step trains on, and stops when enough groups are complete.

    What is not used stays in `leftover`, unfinished answers too, and comes first in the next step.
    """
    sampler, config = roles.sampler, roles.config
    wanted = config.data.prompts_per_step
    more = math.ceil(wanted * config.rollout.oversample) - len(leftover.prompts)
    fresh = take(roles, source, more, step) if more > 0 else []
    prompts = leftover.renumbered() + list(enumerate(fresh, start=len(leftover.prompts)))
    with roles.phases("rollout", sampler.topology):
        asked = prompts[len(leftover.prompts) :]
        new = questions_of(asked, config.rollout.n, run_seed=config.seed, step=step)
        questions = leftover.questions + without_demonstrated(new, config)
        unanswered = {question.group for question in questions}
        enough = wanted - (len(prompts) - len(unanswered))  # some were complete before
        samples = leftover.samples
        if enough > 0:
            made, questions = sample_questions(
                sampler.scheduler, questions, training_params(config.rollout), enough=enough,
                **hooks(roles),
            )  # fmt: skip
            samples = samples + made
            unanswered = {question.group for question in questions}
        taken = set([group for group, _ in prompts if group not in unanswered][:wanted])
        leftover.prompts = [each for each in prompts if each[0] not in taken]
        leftover.questions = questions
        leftover.samples = [s for s in samples if s.group not in taken]
        complete = [each for each in prompts if each[0] in taken]
        found = demonstration_samples(complete, config, step, sampler.topology, roles.tokenizer)
    return [s for s in samples if s.group in taken] + found


def hooks(roles: Roles) -> dict[str, Any]:
    """Returns who else takes part in a rollout, and what is done between two bursts of engine
    steps: say that this rank lives, look for new weights.
    """
    found = participants(roles)
    if roles.mailbox is not None:
        found["new_weights"] = lambda: new_weights(roles)
        found["load_weights"] = lambda: transfer(roles, roles.policy_version + 1)
    return found


def participants(roles: EvalContext) -> dict[str, Any]:
    """Returns who else takes part in sampling, and the sign of life between two bursts."""
    return {
        "tokenizer": roles.tokenizer, "dialogue": roles.sampler.dialogue,
        "by_agents": roles.config.agent is not None, "agents": roles.sampler.agents,
        "between_bursts": roles.phases.still_going, "lora": roles.config.actor.lora,
    }  # fmt: skip


def scored(roles: Roles, samples: list[Sample], source: PromptSource) -> list[Sample]:
    """Gives this rank's samples their rewards; greedy answers become baselines."""
    config = roles.config
    score(samples, roles, source.by_id, phase="reward")
    with roles.phases("reward", roles.sampling):
        check_scores(roles, samples)
        if config.rollout.greedy_baseline:
            samples = take_greedy_rewards(samples, roles.sampling)
    return samples


def check_scores(roles: Roles, samples: list[Sample]) -> None:
    """Makes samples invalid that lack a reward which the algorithm needs; sets their penalties."""
    config, algo = roles.config, roles.config.algo
    if roles.algorithm.asked_keys:
        check_reward_keys(samples, roles.algorithm.asked_keys)
    for sample in samples if algo.overlong_buffer else ():
        sample.penalty = overlong_penalty(
            len(sample.response_ids), config.rollout.max_tokens, algo.overlong_buffer,
            algo.overlong_penalty,
        )  # fmt: skip


def take_greedy_rewards(samples: list[Sample], topology: Topology) -> list[Sample]:
    """The samples without the greedy answers, which become their baselines.

    The two may have been made on different ranks. Collective.
    """
    rows = [
        [s.group, s.reward is not None, 0.0 if s.reward is None else s.reward + s.penalty]
        for s in samples
        if s.index == GREEDY
    ]
    table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)
    baseline = {
        int(group): (bool(valid), reward)
        for group, valid, reward in torch.cat(all_gather_rows(table, topology)).tolist()
    }
    sampled = [s for s in samples if s.index != GREEDY]
    add_greedy_rewards(sampled, baseline)
    return sampled


def add_greedy_rewards(samples: list[Sample], baseline: dict[int, tuple[bool, float]]) -> None:
    """baseline: by group, whether the greedy answer has a reward, and which.

    A sample whose greedy answer has none has no baseline, so it is invalid too.
    """
    for sample in samples:
        valid, reward = baseline[sample.group]
        if not valid and sample.invalid is None:
            sample.reward, sample.invalid = None, "the greedy answer to the prompt is invalid"
        sample.greedy_reward = reward


def check_reward_keys(samples: list[Sample], keys: tuple[str, ...]) -> None:
    """Makes samples invalid whose reward function did not give all that the estimator reads."""
    for sample in samples:
        missing = [key for key in keys if key not in sample.rewards_by_key]
        if missing and sample.invalid is None:
            got = sorted(sample.rewards_by_key)
            sample.reward = None
            sample.invalid = (
                f"algo's reward_keys or dynamic_sampling_metric asks for {missing}, the reward "
                f"function gave {got}"
            )


def keep_groups(
    result: RolloutResult, samples: list[Sample], wanted: int, roles: Roles
) -> list[tuple[int, list[float]]]:
    """Takes the groups of this round that are to be trained on, at most `wanted` altogether.

    All of them, or with dynamic sampling those with unequal rewards, or values of
    algo.dynamic_sampling_metric, in order of their number. A group's samples may lie on several
    ranks. Returns the valid rewards of every group, also of those that are left out, as the reward
    function gave them, with the id of its prompt; those of demonstrations are not among them.
    """
    with roles.phases("reward", roles.sampling):
        keys = roles.algorithm.reward_keys
        rows = [
            [s.group, s.prompt.id, success_of(s), *rewards_of(s, keys, roles.config.algo)]
            for s in samples
        ]
        table = torch.tensor(rows, dtype=torch.float64).reshape(-1, 4 + max(len(keys), 1))
        groups: dict[int, list[float]] = {}
        compared: dict[int, list[list[float]]] = {}  # what the estimator compares
        heard: dict[int, tuple[int, list[float]]] = {}  # the prompt, and its rewards
        everyone = torch.cat(all_gather_rows(table, roles.sampling)).tolist()
        for group, prompt_id, given, reward, *others in everyone:
            valid = not math.isnan(reward)
            counts = not math.isnan(given)
            heard.setdefault(int(group), (int(prompt_id), []))[1].extend([given] * counts)
            groups.setdefault(int(group), []).extend([reward] * valid)
            compared.setdefault(int(group), []).extend([others] * valid)
        result.num_sampled += len(groups)
        result.num_equal += sum(not unequal(rewards) for rewards in compared.values())
        good = sorted(groups)
        if roles.config.algo.dynamic_sampling:
            good = [g for g in good if unequal(groups[g])]
        taken = good[: wanted - result.num_groups]
        number = {group: i for i, group in enumerate(taken, start=result.num_groups)}
        for sample in samples:
            if sample.group in number:
                sample.group = number[sample.group]
                result.samples.append(sample)
        result.num_groups += len(taken)
    return [heard[group] for group in sorted(heard)]


def success_of(sample: Sample) -> float:
    """Returns what the reward function says of the policy's answer; nan where it is invalid, or the
    answer is not the policy's.
    """
    return math.nan if sample.reward is None or sample.is_demonstration else sample.reward


def rewards_of(sample: Sample, keys: tuple[str, ...], algo: AlgoConfig) -> list[float]:
    """Returns what dynamic sampling compares, nan where the sample is invalid; then what an
    estimator compares: the rewards by these keys, or without keys the reward with the penalty.
    """
    if sample.reward is None:
        return [math.nan] * (1 + max(len(keys), 1))
    metric, low, high = algo.dynamic_sampling_metric, *(algo.reward_clip or (-math.inf, math.inf))
    reward = min(max(sample.reward, low), high)
    by_key = [sample.rewards_by_key[key] for key in keys]
    compared = reward if metric is None else sample.rewards_by_key[metric]
    return [compared, *(by_key or [min(max(sample.reward + sample.penalty, low), high)])]


class EvalContext(ScoringContext, Protocol):
    """An EvalContext answers and scores held-out prompts: the Roles of a run, or less."""

    config: PpoConfig


def evaluate(
    roles: EvalContext,
    prompts: list[tuple[int, Prompt]],
    step: int,
    show: Callable[[list[Sample]], None] = lambda samples: None,
) -> dict[str, float]:
    """Answers to held-out prompts, greedy ones or config.eval_samples of each; their metrics.

    eval/reward is the mean reward, eval/reward/<name> the mean of what reward functions report
    beside it; with several samples there is also what metrics_at_k gives; per data_source where
    several. On the ranks that sample or score. show: is given this rank's samples. Raises
    TooManyInvalid as a step does.
    """
    sampler, config, sampling = roles.sampler, roles.config, roles.sampling
    samples: list[Sample] = []
    if sampler.here:
        with roles.phases("evaluate", sampler.topology):
            questions = questions_of(
                prompts, config.eval_samples, run_seed=config.seed, step=step, purpose="eval"
            )
            samples, _ = sample_questions(
                sampler.scheduler, questions, evaluation_params(config), **participants(roles)
            )
    held_out = {prompt.id: prompt for _, prompt in prompts}
    score(samples, roles, held_out.__getitem__, phase="evaluate")
    show(samples)
    with roles.phases("evaluate", sampling):
        check_invalid(samples, config.rewards, sampling)
        metrics = sample_metrics(samples, sampling, replies=has_replies(config))
        picked = {
            name.removesuffix("/mean") if name.endswith("reward/mean") else name: value
            for name, value in metrics.items()
            if name.endswith("/reward/mean")
            or name == "response/mean_tokens"
            or (name.startswith(("reward/", "turns/", "tools/")) and name != "reward/std")
        }
        if config.eval_samples > 1:
            attempts = gather_attempts(prompts, samples, config.seed, sampling)
            picked |= metrics_at_k(attempts, config.eval_samples)
    return {f"eval/{name}": value for name, value in picked.items()}


def gather_attempts(
    prompts: list[tuple[int, Prompt]], samples: list[Sample], run_seed: int, topology: Topology
) -> list[Attempts]:
    """Gathers the attempts at each prompt from all ranks, in the order of the prompts: which rank
    made a sample does not show.

    Collective.
    """
    mine = [(s.group, s.index, s.reward, s.pred) for s in samples if s.reward is not None]
    everyone = gather_to_all(mine, topology.control)
    by_group: dict[int, list[tuple[int, float, str | None]]] = {group: [] for group, _ in prompts}
    for group, index, reward, pred in itertools.chain.from_iterable(everyone):
        by_group[group].append((index, reward, pred))
    attempts = []
    for group, prompt in prompts:
        answers = sorted(by_group[group], key=lambda answer: answer[0])
        seed = seed_of(run_seed, 0, prompt.id, 0, "vote")
        rewards, preds = [reward for _, reward, _ in answers], [pred for *_, pred in answers]
        attempts.append(Attempts(prompt.data_source, seed, rewards, preds))
    return attempts
