"""Epochs in place of steps: how many steps they are, what follows from it, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_configs import ppo_config

from spmdrl.cli.arguments import as_source, changed_fields
from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    DataConfig,
    DerivedCount,
    OptimConfig,
    PpoConfig,
    ProfileConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.engines.lr_schedule import learning_rate
from spmdrl.training.checks.length import check_steps
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.supervised import check_sft
from spmdrl.training.run_length import is_known, known_updates, with_length


def test_epochs_are_as_many_steps_as_whole_batches_are_in_them() -> None:
    data = DataConfig("t", prompts_per_step=8)
    for epochs, rows, steps in (
        (1, 80, 10),
        (2, 87, 20),
        (0.7, 80, 7),
        (0.01, 80, 1),
        (2.5, 16, 5),
    ):
        found = with_length(PpoConfig("m", data, "math", epochs=epochs), rows)
        assert found.steps == steps and is_known(found), (epochs, rows)
    supervised = SftConfig("m", SftDataConfig("t", batch_size=10), "out", epochs=3)
    assert not is_known(supervised) and known_updates(supervised) is None
    assert with_length(supervised, 25).steps == 6
    given = PpoConfig("m", data, "math", steps=7)
    assert with_length(given, 80) is not given and with_length(given, 80) == given


def test_schedules_see_the_real_length() -> None:
    optim = OptimConfig(lr=1.0, warmup_ratio=0.1, schedule="linear")
    algo = AlgoConfig(epochs=2, mini_batches=3)
    asked = PpoConfig(
        "m", DataConfig("t", prompts_per_step=6), "math", epochs=1, algo=algo,
        actor=TrainConfig(optim=optim), critic=TrainConfig(optim=replace(optim, decay_steps=7)),
    )  # fmt: skip
    found = with_length(asked, 60)
    rates = [learning_rate(found.actor.optim, update) for update in range(60)]
    assert rates.index(max(rates)) in (5, 6) and rates[0] == pytest.approx(1 / 6)
    assert rates[-1] == pytest.approx(1 / 54) and min(rates[6:]) == rates[-1]
    assert found.critic is not None and found.critic.optim.decay_steps == 7
    in_steps = with_length(replace(asked, epochs=0.0, steps=100), 60)
    assert (in_steps.actor.optim.warmup_steps, in_steps.actor.optim.decay_steps) == (60, 0)


def test_what_follows_is_shown_and_not_written_into_config_py() -> None:
    asked = SftConfig("m", SftDataConfig("t", batch_size=10), "out", epochs=3)
    found = with_length(asked, 40)
    assert "steps=12" in changed_fields(found)
    text = as_source(found)
    assert "    epochs=3,\n" in text and "\n    steps=" not in text
    assert isinstance(found.steps, DerivedCount) and as_source(asked).count("steps=100") == 1
    assert eval(text, {**globals(), **vars(__import__("spmdrl.config").config)}) == asked


def test_both_ways_to_say_it_are_refused(qwen3: Path) -> None:
    check(ppo_config(qwen3, epochs=2.0), 1)
    check(ppo_config(qwen3, epochs=2.0, steps=0), 1)  # of a config that had said steps
    with pytest.raises(ConfigError, match="steps=0 is out of range"):
        check(ppo_config(qwen3, steps=0), 1)
    check(ppo_config(qwen3, epochs=2.0, profile=ProfileConfig(steps="2-3")), 1)
    cosine = TrainConfig(optim=OptimConfig(schedule="cosine"))
    check(ppo_config(qwen3, epochs=2.0, actor=cosine), 1)
    with pytest.raises(ConfigError, match="steps=100 and epochs=2 both say"):
        check(ppo_config(qwen3, epochs=2.0, steps=100), 1)
    both = TrainConfig(optim=OptimConfig(warmup_steps=5, warmup_ratio=0.1))
    with pytest.raises(ConfigError, match=r"actor\.optim\.warmup_ratio=0\.1 and warmup_steps=5"):
        check(ppo_config(qwen3, actor=both), 1)
    data = SftDataConfig("t", max_tokens=512)
    with pytest.raises(ConfigError, match="give one of them, and 0 for the other"):
        check_sft(SftConfig(str(qwen3), data, "o", steps=3, epochs=1), 1)


def test_what_depends_on_the_steps_is_checked_once_they_are_known(qwen3: Path) -> None:
    late = TrainConfig(optim=OptimConfig(schedule="linear", decay_steps=5, warmup_ratio=0.9))
    asked = ppo_config(qwen3, epochs=1.0, actor=late)
    check(asked, 1)
    with pytest.raises(ConfigError, match=r"decay_steps above warmup_steps=9, e\.g\. 10"):
        check_steps(with_length(asked, 10 * asked.data.prompts_per_step), 1)
    asked = ppo_config(qwen3, epochs=1.0, profile=ProfileConfig(steps="2-30"))
    with pytest.raises(ConfigError, match="names step 30, but the run has steps=10"):
        check_steps(with_length(asked, 10 * asked.data.prompts_per_step), 1)
