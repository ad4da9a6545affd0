"""The sampling half of a step: prompts in, scored samples out; and evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.algo.selection import overlong_penalty, unequal
from spmdrl.collectives import all_gather_rows
from spmdrl.metrics import sample_metrics
from spmdrl.roles import Roles
from spmdrl.rollout.sampling import greedy_params, sample_prompts, training_params
from spmdrl.types import Prompt, Sample


@dataclass
class Collected:
    """What a step sampled. `samples` are to be trained on, groups 0 .. num_groups - 1.

    Both lists hold what this rank made; `asked` is more where dynamic sampling left groups out.
    """

    samples: list[Sample]
    num_groups: int  # the same on every rank
    asked: list[Sample]
    rounds: int = 0


def collect(
    roles: Roles, prompts: list[Prompt], step: int, more: Callable[[int], list[Prompt]]
) -> Collected:
    """Asks every prompt n times and scores the answers.

    prompts: of the whole step, the same on every rank; more(k): the k prompts after those. With
    dynamic sampling a group whose rewards are all equal is left out, and more prompts are asked
    until the step is full or algo.dynamic_sampling rounds are over (DAPO).
    """
    rounds = max(roles.config.algo.dynamic_sampling, 1)
    result = Collected([], 0, [], 0)
    wanted, num_asked = len(prompts), 0
    while True:
        result.rounds += 1
        asked = list(enumerate(prompts, start=num_asked))
        num_asked += len(prompts)
        samples = ask(roles, asked, step, result.rounds)
        result.asked += samples
        keep_groups(result, samples, wanted, roles)
        missing = wanted - result.num_groups
        if missing == 0 or result.rounds == rounds:
            break
        # as many as will do at the rate so far
        share = max(result.num_groups, 1) / num_asked
        prompts = more(min(wanted, math.ceil(missing / share)))
    if roles.config.rollout.sleep:
        with roles.phases("rollout"):
            roles.rollout.sleep()
    return result


def ask(
    roles: Roles, prompts: list[tuple[int, Prompt]], step: int, sampling_round: int
) -> list[Sample]:
    """Scored answers to (group, prompt) of the whole step, those that this rank made."""
    config, algo = roles.config, roles.config.algo
    where: dict[str, Any] = {
        "run_seed": config.seed, "step": step, "policy_version": roles.policy_version,
        "tokenizer": roles.tokenizer,
    }  # fmt: skip
    with roles.phases("rollout"):
        # a later round may ask a prompt again, after the end of an epoch: other seeds
        purpose = "train" if sampling_round == 1 else f"train round {sampling_round}"
        samples = sample_prompts(
            roles.scheduler, prompts, training_params(config.rollout), config.rollout.n,
            purpose=purpose, **where,
        )  # fmt: skip
        greedy: list[Sample] = []
        if config.rollout.greedy_baseline:
            greedy = sample_prompts(
                roles.scheduler,
                prompts,
                greedy_params(config.rollout),
                1,
                purpose="greedy",
                **where,
            )
    with roles.phases("reward"):
        roles.rewards.score(samples + greedy, roles.phases.still_going)
        check_reward_keys(samples, tuple(algo.reward_keys))
        for sample in samples + greedy if algo.overlong_buffer else ():
            sample.penalty = overlong_penalty(
                len(sample.response_ids), config.rollout.max_tokens, algo.overlong_buffer,
                algo.overlong_penalty,
            )  # fmt: skip
        add_greedy_rewards(samples, greedy)
    return samples


def add_greedy_rewards(samples: list[Sample], greedy: list[Sample]) -> None:
    """A sample whose greedy answer has no valid reward has no baseline, so it is invalid too."""
    baseline = {g.group: g for g in greedy}
    for sample in samples if greedy else ():
        other = baseline[sample.group]
        if other.reward is None and sample.invalid is None:
            sample.reward, sample.invalid = None, f"the greedy answer is invalid: {other.invalid}"
        sample.greedy_reward = 0.0 if other.reward is None else other.reward + other.penalty


def check_reward_keys(samples: list[Sample], keys: tuple[str, ...]) -> None:
    """Makes samples invalid whose reward function did not give all of algo.reward_keys."""
    for sample in samples:
        missing = [key for key in keys if key not in sample.rewards_by_key]
        if missing and sample.invalid is None:
            got = sorted(sample.rewards_by_key)
            sample.reward = None
            sample.invalid = f"algo.reward_keys asks for {missing}, the reward function gave {got}"


def keep_groups(result: Collected, samples: list[Sample], wanted: int, roles: Roles) -> None:
    """Takes the groups of this round that are to be trained on, at most `wanted` altogether.

    All of them, or with dynamic sampling those with unequal rewards, in order of their number.
    """
    with roles.phases("reward"):
        groups: dict[int, list[Sample]] = {}
        for sample in samples:
            groups.setdefault(sample.group, []).append(sample)
        good = list(groups)
        if roles.config.algo.dynamic_sampling:
            good = [
                g for g in good if unequal([s.reward for s in groups[g] if s.reward is not None])
            ]
        everyone = torch.cat(all_gather_rows(torch.tensor(good).long(), roles.topology))
        taken = sorted(everyone.tolist())[: wanted - result.num_groups]
        for number, group in enumerate(taken, start=result.num_groups):
            for sample in groups.get(group, ()):
                sample.group = number
                result.samples.append(sample)
        result.num_groups += len(taken)


def evaluate(
    roles: Roles, prompts: list[tuple[int, Prompt]], step: int
) -> tuple[list[Sample], dict[str, float]]:
    """Greedy answers to held-out prompts and their mean reward, per data_source where several."""
    with roles.phases("evaluate"):
        samples = sample_prompts(
            roles.scheduler, prompts, greedy_params(roles.config.rollout), n=1,
            run_seed=roles.config.seed, step=step, policy_version=roles.policy_version,
            tokenizer=roles.tokenizer, purpose="eval",
        )  # fmt: skip
        roles.rewards.score(samples, roles.phases.still_going)
    with roles.phases("evaluate"):
        metrics = sample_metrics(samples, roles.topology, by_source=True)
    picked = {
        name.replace("reward/mean", "accuracy"): value
        for name, value in metrics.items()
        if "reward/mean" in name or name in ("reward/invalid", "response/mean_tokens")
    }
    return samples, {f"eval/{name}": value for name, value in picked.items()}
