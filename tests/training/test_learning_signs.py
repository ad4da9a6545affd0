"""Warnings where nothing can be learnt: what begins them, and how often they come."""

from __future__ import annotations

import dataclasses

import pytest

from spmdrl.config import AlgoConfig, DataConfig, PpoConfig, RolloutConfig
from spmdrl.training.logs.learning_signs import (
    AGAIN,
    CUT_WINDOW,
    EVALUATIONS,
    WINDOW,
    LearningSigns,
    Row,
    signs_of_rl,
    signs_of_supervised,
)

CONFIG = PpoConfig(
    model="m", data=DataConfig(train="t"), reward=len, rollout=RolloutConfig(n=4, max_tokens=100)
)
GOOD = {
    "reward/mean": 0.5, "reward/std": 0.5, "reward/frac_reward_zero_std": 0.25,
    "response/truncated": 0.1, "advantage/all_zero": 0.0, "actor/grad_norm": 1.0,
    "actor/lr": 1e-6, "tools/calls": 0.5,
}  # fmt: skip


SAME = {"reward/std": 1e-9, "reward/frac_reward_zero_std": 1.0}  # rewards


def warnings(config: PpoConfig, row: Row, steps: int = WINDOW) -> list[str]:
    """What is said in so many steps with such a row."""
    signs = signs_of_rl(config)
    return [text for step in range(1, steps + 1) for text in signs.after_step(step, row)]


def test_a_run_that_learns_is_told_nothing() -> None:
    assert warnings(CONFIG, GOOD, 3 * AGAIN) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (SAME | {"reward/mean": 0.0}, "every answer of the last 10 steps got the reward 0, so"),
        (SAME | {"reward/mean": -2.5}, "got the reward -2.5, so none is better"),
        (
            {"reward/mean": 2e-4, "reward/std": 0.014, "reward/frac_reward_zero_std": 0.99},
            "the reward was near 0 in the last 10 steps (its mean is 0.0002)",
        ),
        (
            {"reward/mean": 0.95, "reward/frac_reward_zero_std": 0.9},
            "in 90% of the groups of the last 10 steps all 4 answers to the prompt got the same "
            "reward (the mean reward is 0.95)",
        ),
        (
            {"response/truncated": 0.66},
            "66% of the answers of the last 3 steps were cut at rollout.max_tokens=100, so they "
            "have no end and most rewards find no result in them. Raise --rollout.max_tokens (to "
            "200, say)",
        ),
        ({"actor/lr": 0.0}, "the learning rate was 0 in the last 10 steps"),
        (
            {"advantage/all_zero": 1.0, "actor/grad_norm": 0.0},
            "every advantage of step 1 is 0, and the actor was updated all the same",
        ),
    ],
)
def test_each_sign_is_told_once(change: Row, told: str) -> None:
    found = warnings(CONFIG, GOOD | change)
    assert len(found) == 1 and told in found[0], found


def test_a_small_reward_in_which_groups_differ_is_a_signal() -> None:
    small = {"reward/mean": 1e-3, "reward/std": 1e-3}
    assert warnings(CONFIG, GOOD | small) == []
    no_groups = {k: v for k, v in GOOD.items() if k != "reward/frac_reward_zero_std"}
    assert len(warnings(CONFIG, no_groups | small)) == 1


def test_rewards_that_cancel_are_a_signal() -> None:
    assert warnings(CONFIG, GOOD | {"reward/mean": 0.0, "reward/std": 1.0}) == []


def test_equal_rewards_with_other_things_that_differ_are_a_signal() -> None:
    """Penalties for length, say, or the several rewards of gdpo."""
    assert warnings(CONFIG, GOOD | {"reward/mean": 0.0, "reward/std": 0.0}) == []


def test_rewards_that_have_no_say_are_not_judged() -> None:
    config = dataclasses.replace(CONFIG, algo=AlgoConfig(reward_coef=0.0))
    assert warnings(config, GOOD | SAME) == [] != warnings(CONFIG, GOOD | SAME)


def test_tools_that_nobody_calls() -> None:
    row = GOOD | {"tools/calls": 0.0}
    assert warnings(CONFIG, row) == []  # none are there
    with_tools = dataclasses.replace(CONFIG, tools=("python",))
    (text,) = warnings(with_tools, row)
    assert "called one of the tools" in text and "Read samples/step_10.jsonl" in text
    kept_none = dataclasses.replace(CONFIG, tools=("python",), log_samples=0)
    assert "--log_samples 16" in warnings(kept_none, row)[0]
    assert "max_reply_tokens" not in text
    unread = GOOD | {"tools/calls": 0.5, "tools/unread": 1.0}
    assert "lower --multi_turn.max_reply_tokens" in warnings(with_tools, unread)[0]
    assert warnings(with_tools, unread | {"tools/unread": 0.9}) == []


def test_answers_that_are_meant_to_fill_max_tokens_are_not_cut() -> None:
    for rollout in (RolloutConfig(ignore_eos=True), RolloutConfig(min_tokens=64, max_tokens=64)):
        config = dataclasses.replace(CONFIG, rollout=rollout)
        assert warnings(config, GOOD | {"response/truncated": 1.0}) == []
    assert len(warnings(CONFIG, GOOD | {"response/truncated": 1.0}, CUT_WINDOW - 1)) == 0


def test_what_dynamic_sampling_does_is_not_advised_again() -> None:
    row = GOOD | {"reward/frac_reward_zero_std": 0.9}
    assert "--algo.dynamic_sampling 4 asks" in warnings(CONFIG, row)[0]
    config = dataclasses.replace(CONFIG, algo=AlgoConfig(dynamic_sampling=3))
    assert "What algo.dynamic_sampling asks in their place takes time." in warnings(config, row)[0]


def test_a_step_without_an_update_or_with_invalid_samples_alone_has_no_sign() -> None:
    assert warnings(CONFIG, {"rollout/loss_tokens": 0.0, "reward/invalid": 8.0}) == []


def test_a_sign_is_repeated_rarely_and_not_when_it_comes_and_goes() -> None:
    signs = signs_of_rl(CONFIG)
    bad = GOOD | {"response/truncated": 1.0}
    steps = [step for step in range(1, 201) if signs.after_step(step, bad)]
    assert steps == [3, 3 + AGAIN, 3 + 2 * AGAIN, 3 + 3 * AGAIN]
    signs = signs_of_rl(CONFIG)
    said = [s for s in range(1, 51) if signs.after_step(s, bad if s // 5 % 2 == 0 else GOOD)]
    assert said == [3]


def test_held_out_results_that_never_change() -> None:
    signs = signs_of_rl(CONFIG)
    values = [0.5] * (EVALUATIONS + 1)
    steps = [10 * i for i in range(len(values))]
    found = [
        signs.after_step(step, GOOD | {"eval/reward": value})
        for step, value in zip(steps, values, strict=True)
    ]
    assert found[:3] == [[], [], []] and found[4] == []
    assert found[3][0].startswith("eval/reward was 0.5 in each of the last 4 evaluations, since s")
    perfect = signs_of_rl(CONFIG)
    assert not any(perfect.after_step(s, GOOD | {"eval/reward": 1.0}) for s in steps)


def test_a_loss_that_is_one_number_or_a_rate_of_zero() -> None:
    def told(signs: LearningSigns, losses: list[float], rate: float) -> list[str]:
        rows = [{"sft/loss": loss, "sft/lr": rate} for loss in losses]
        return [text for i, row in enumerate(rows, 1) for text in signs.after_step(i, row)]

    same = told(signs_of_supervised("sft"), [0.693147] * WINDOW, 1e-3)
    assert len(same) == 1 and same[0].startswith("the loss was 0.693147 in each of the last 10")
    falling = [1.0 - 0.01 * i for i in range(WINDOW)]
    assert told(signs_of_supervised("sft"), falling, 1e-3) == []
    (rate,) = told(signs_of_supervised("sft"), falling, 0.0)
    assert "decay_steps" in rate
