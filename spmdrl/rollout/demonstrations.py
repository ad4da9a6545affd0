"""Demonstrations among the answers to a prompt: how many are left to be sampled, and Samples of
those that the data has.
"""

from __future__ import annotations

import random
from typing import Any

from spmdrl.config import PpoConfig
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Completion
from spmdrl.rollout.sampling import SampleRequest, as_samples
from spmdrl.rollout.seeds import seed_of
from spmdrl.types import DEMONSTRATED, Prompt, Sample


def without_demonstrated(questions: list[SampleRequest], config: PpoConfig) -> list[SampleRequest]:
    """Leaves out the samples whose places demonstrations take, the last of each group's."""
    n = config.rollout.n
    return [q for q in questions if q.index < n - num_demonstrations(q.prompt, config)]


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
