"""Demonstrations among the answers to a prompt: how many are left to be sampled, and Samples of
those that the data has.
"""

from __future__ import annotations

import random
from typing import Any

from spmdrl.config import PpoConfig
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Completion
from spmdrl.rollout.sampling import SampleRequest, as_samples, questions_of
from spmdrl.rollout.seeds import seed_of
from spmdrl.types import DEMONSTRATED, Prompt, Sample


def training_questions(
    prompts: list[tuple[int, Prompt]], config: PpoConfig, step: int, purpose: str = "train"
) -> list[SampleRequest]:
    """Each (group, Prompt) rollout.n times, less the demonstrations that it has."""
    return [
        question
        for group, prompt in prompts
        for question in questions_of(
            [(group, prompt)], config.rollout.n - num_demonstrations(prompt, config),
            run_seed=config.seed, step=step, purpose=purpose,
        )
    ]  # fmt: skip


def num_demonstrations(prompt: Prompt, config: PpoConfig) -> int:
    return min(len(prompt.demonstrations), config.algo.demonstrations)


def demonstration_samples(
    prompts: list[tuple[int, Prompt]], config: PpoConfig, step: int, topology: Topology,
    tokenizer: Any,
) -> list[Sample]:  # fmt: skip
    """Returns this rank's part of the demonstrations of each (group, Prompt), not scored yet.

    Their indices are the last of the group's, so that the seeds of the others are those of a run
    without demonstrations. Where a row has more than are wanted, they are drawn anew in each step.
    """
    questions, answers = [], []
    for group, prompt in prompts:
        count = num_demonstrations(prompt, config)
        if count == 0 or group % topology.world != topology.rank:
            continue
        seed = seed_of(config.seed, step, prompt.id, 0, "demonstrations")
        drawn = sorted(random.Random(seed).sample(range(len(prompt.demonstrations)), count))
        for index, chosen in enumerate(drawn, start=config.rollout.n - count):
            questions.append(SampleRequest(prompt, group, index, seed))
            answers.append(given(prompt.demonstrations[chosen]))
    return as_samples(questions, answers, tokenizer)


def given(token_ids: list[int]) -> Completion:
    """Returns the answer as if a policy that is certain of it had said it."""
    count = len(token_ids)
    return Completion(token_ids, [0.0] * count, "stop", [DEMONSTRATED] * count)
