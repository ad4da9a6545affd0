"""A trajectory that is trained on as several rows counts once: it has the advantages and weights of
one sequence.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spmdrl.algo.algorithm import Algorithm
from spmdrl.config import AlgoConfig, DataConfig, PpoConfig, RewardConfig, RolloutConfig
from spmdrl.data.packing import pack_samples
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.agents.samples import training_rows
from spmdrl.training.credit import add_advantages
from spmdrl.types import Batch, Prompt, Sample

N = 4
CONFIG = PpoConfig(
    model="-", data=DataConfig(train="-"), reward="agent", rollout=RolloutConfig(n=N, max_tokens=12)
)
ALGORITHMS: list[dict[str, Any]] = [
    {"advantage": advantage, "aggregation": aggregation}
    for advantage in ("grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk",
                      "reinforce_plus_plus_baseline")
    for aggregation in ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum",
                        "seq_mean_token_sum_norm")
    if advantage in ("grpo", "opo") or aggregation == "token_mean"
]  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> Iterator[Topology]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1)
        yield Topology.build(torch.device("cpu"), dp=1)
        dist.destroy_process_group()


def sequence(draw: random.Random, prompt: Prompt, index: int, size: int) -> Sample:
    mask = [1, *(draw.randint(0, 1) for _ in range(size - 1))]
    return Sample(
        prompt, prompt.id, index, [draw.randint(3, 9) for _ in mask],
        [-0.5 * each for each in mask], mask, [0] * size, "stop",
    )  # fmt: skip


def trajectories(seed: int) -> list[Sample]:
    """Three groups of four, of one to three rows each; one of them is invalid."""
    draw = random.Random(seed)
    found = []
    for group in range(3):
        prompt = Prompt(group, [1, 2], "d", "t", "p")
        for index in range(N):
            rows = [sequence(draw, prompt, index, draw.randint(1, 5)) for _ in range(index % 3 + 1)]
            reward = draw.uniform(0, 2)
            found.append(replace(rows[-1], rows=rows, reward=reward))
    found[5].reward, found[5].invalid = None, "it failed"
    return found


def whole(sample: Sample) -> Sample:
    """The trajectory as one sequence."""
    lists = {
        name: [x for row in sample.rows for x in getattr(row, name)]
        for name in ("response_ids", "rollout_logprobs", "loss_mask", "policy_version")
    }
    return replace(sample, rows=[], **lists)


def credited(
    samples: list[Sample], config: PpoConfig, alone: Topology, per_turn: bool = False
) -> Batch:
    batch = pack_samples(samples, per_turn=per_turn)
    batch.old_logprobs = batch.rollout_logprobs
    add_advantages([batch], config, Algorithm.of(config.algo), 0.0, alone)
    return batch


@pytest.mark.parametrize("algo", ALGORITHMS, ids=lambda a: f"{a['advantage']} {a['aggregation']}")
def test_rows_have_the_advantages_and_weights_of_their_trajectory(
    algo: dict[str, Any], alone: Topology
) -> None:
    plain = replace(CONFIG, algo=AlgoConfig(**algo))
    for seed in range(3):
        samples = trajectories(seed)
        valid = [sample for sample in samples if sample.invalid is None]
        one = credited([whole(sample) for sample in valid], plain, alone)
        rows = training_rows(samples, N)
        random.Random(seed).shuffle(rows)  # ranks have them in any order
        several = credited(rows, replace(plain, agent=len), alone)
        order = sorted(range(len(rows)), key=lambda i: (rows[i].group, rows[i].index % N,
                                                        rows[i].index))  # fmt: skip
        sorted_rows = several.select(order)
        assert one.advantages is not None and float(one.advantages.abs().sum()) > 0
        for name in ("advantages", "loss_weights"):
            mine, right = getattr(sorted_rows, name), getattr(one, name)
            masked, right = mine[sorted_rows.loss_mask > 0], right[one.loss_mask > 0]
            torch.testing.assert_close(masked, right, rtol=1e-6, atol=1e-7)


def test_rewards_of_turns_are_of_their_row_and_of_the_trajectory(alone: Topology) -> None:
    """By estimators that look at tokens a token has what its own row earns from it on, and the
    outcome; others see all that the trajectory has earned.
    """
    samples = [sample for sample in trajectories(2) if sample.invalid is None]
    draw = random.Random(1)
    for sample in samples:
        number = 0
        for row in sample.rows:
            runs = sum(a > b for a, b in pairwise([*row.loss_mask, 0]))
            row.turn_numbers = list(range(number, number + runs))
            number += runs
        sample.turn_rewards = [draw.uniform(-1, 1) for _ in range(number)]
        sample.reward = draw.uniform(0, 1) + sum(sample.turn_rewards)
    config = replace(CONFIG, agent=len, rewards=RewardConfig(per_turn=True))
    rows = training_rows(samples, N)
    by_token = credited(rows, replace(config, algo=AlgoConfig(advantage="reinforce")), alone, True)
    assert by_token.advantages is not None
    at = 0
    for sample in samples:
        outcome = sample.reward - sum(sample.turn_rewards)
        for row in sample.rows:
            own = [sample.turn_rewards[i] for i in row.turn_numbers]
            want, turn = [], 0
            for mask, behind in pairwise([*row.loss_mask, 0]):
                want.append(mask * (outcome + sum(own[turn:])))
                turn += mask > behind
            at += len(row.prompt.token_ids)
            got = by_token.advantages[at : at + len(want)].tolist()
            assert got == pytest.approx(want, abs=1e-5)
            at += len(want)
    outcomes = replace(config, algo=AlgoConfig(advantage="dr_grpo"))
    of_rows = credited(rows, outcomes, alone, True)
    alone_config = replace(CONFIG, algo=outcomes.algo)
    whole_ones = credited([whole(sample) for sample in samples], alone_config, alone)
    assert of_rows.advantages is not None and whole_ones.advantages is not None
    torch.testing.assert_close(
        of_rows.advantages[of_rows.loss_mask > 0],
        whole_ones.advantages[whole_ones.loss_mask > 0], rtol=1e-6, atol=1e-6,
    )  # fmt: skip


def test_a_row_that_counted_for_itself_would_be_seen(alone: Topology) -> None:
    """Without an agent in the config the same rows are samples of their own."""
    rows = training_rows(trajectories(0), N)
    plain = replace(CONFIG, algo=AlgoConfig(advantage="grpo"))
    by_row = credited(rows, plain, alone)
    by_trajectory = credited(rows, replace(plain, agent=len), alone)
    assert by_row.advantages is not None and by_trajectory.advantages is not None
    assert not torch.allclose(by_row.advantages, by_trajectory.advantages, atol=1e-3)
