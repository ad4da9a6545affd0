"""Seeds, and how the policy samples."""

from __future__ import annotations

from spmdrl.config import DataConfig, PpoConfig, RolloutConfig
from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.sampling import (
    evaluation_params,
    greedy_params,
    seed_of,
    training_params,
)


def test_seeds_are_addresses() -> None:
    seeds = {seed_of(a, b, c, d) for a in range(3) for b in range(4) for c in range(5)
             for d in range(6)}  # fmt: skip
    assert len(seeds) == 3 * 4 * 5 * 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    assert seed_of(1, 23, 4, 5) != seed_of(12, 3, 4, 5)
    assert seed_of(0, 0, 0, 0) == 9175755425211827508


def test_params_come_from_the_config() -> None:
    config = RolloutConfig(temperature=0.6, top_p=0.9, top_k=3, min_tokens=2, max_tokens=9,
                           stop=("x",), stop_token_ids=(7,), ignore_eos=True, min_p=0.1,
                           repetition_penalty=1.2)  # fmt: skip
    drawn = SamplingParams(0.6, 0.9, 3, 2, 9, ("x",), (7,), True, 0.1, 1.2)
    assert training_params(config) == drawn
    held_out = PpoConfig(
        "m", DataConfig("t"), "gsm8k", rollout=config, eval_temperature=0.7, eval_top_p=0.8,
        eval_top_k=5, eval_min_p=0.2, eval_repetition_penalty=1.1,
    )  # fmt: skip
    asked = SamplingParams(0.7, 0.8, 5, 2, 9, ("x",), (7,), True, 0.2, 1.1)
    assert evaluation_params(held_out) == asked
    assert greedy_params(config) == SamplingParams(0.0, 1.0, 0, 2, 9, ("x",), (7,), True)
