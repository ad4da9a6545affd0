"""The line of a step: what it says, and that it has 100 columns at most."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.step_line import (
    COLUMNS,
    UNBOUNDED,
    Shown,
    field_of,
    fitted,
    of_evaluation,
    of_rows,
    of_sampling,
    remaining,
    short,
    step_line,
)

METRICS = {
    "reward/mean": 0.4125, "reward/std": 0.3, "reward/correct": 0.31, "reward/format": 0.9,
    "reward/invalid": 0.0, "reward/frac_reward_zero_std": 0.25,
    "response/mean_tokens": 211.7, "response/truncated": 0.03125, "tools/calls": 1.25,
    "throughput/tokens_per_s": 4571.2, "actor/entropy": 1.234, "time/step_s": 8.2,
    "time/rollout_s": 5.0, "time/update_actor_s": 1.8, "time/sync_s": 0.4, "time/data_s": 0.01,
    "time_max/reward_s": 5.0,
}  # fmt: skip


def test_it_says_what_the_model_does_and_where_the_time_goes():
    line = step_line(12, 120, of_sampling(METRICS, with_tools=False), METRICS, 62)
    assert line == (
        "step 12/120 | reward 0.412 (correct 0.31) | length 212 | cut 3% | 4,571 tok/s | 8.2 s | "
        "1:02 left"
    )
    one_reward = {n: v for n, v in METRICS.items() if n not in ("reward/correct", "reward/format")}
    line = step_line(12, 120, of_sampling(one_reward, with_tools=False), one_reward, 3723)
    assert line == (
        "step 12/120 | reward 0.412 | length 212 | cut 3% | 4,571 tok/s | 8.2 s (rollout 61%) | "
        "1:02:03 left"
    )
    line = step_line(1, 9, of_sampling(one_reward, False), one_reward | {"time/wait_s": 1.0}, 62)
    assert line.endswith("tok/s | 8.2 s (rollout 61%) | 1:02 left")
    few = {"reward/mean": 0.4, "response/mean_tokens": 9.0, "throughput/tokens_per_s": 90.0}
    line = step_line(1, 9, of_sampling(few, False), METRICS | few, 62)
    assert line.endswith("90 tok/s | 8.2 s (rollout 61%, update 22%, sync 5%) | 1:02 left")
    untimed = one_reward | {"time/step_s": 0.0}
    assert "tok/s | 1:02 left" in step_line(1, 9, of_sampling(untimed, False), untimed, 62)
    no_tools = of_sampling(METRICS | {"reward/invalid": 3.0}, with_tools=False)
    assert no_tools.fields == ["length 212", "cut 3%", "without reward 3"]
    assert of_sampling(METRICS | {"response/truncated": 0.0}, False).fields == ["length 212"]
    means = {"eval/reward": 0.5, "eval/a/b/reward": 0.25, "eval/math/reward": 1.0, "eval/x": 1.0}
    assert of_evaluation(means) == Shown("reward 0.5", ["a/b 0.25", "math 1"], [])
    assert of_evaluation({"eval/reward/invalid": 9.0}).first == "no reward"
    rows = of_rows({"sft/loss": 1.5}, ("sft/loss", "sft/grad_norm"))  # a step passed over has less
    assert rows == Shown("loss 1.5", [], []) and of_rows({}, ("sft/loss",)).first == ""


def test_a_full_line_has_everything():
    parts = {f"reward/part_{i}": i / 10 for i in range(9)}
    metrics = METRICS | parts
    line = step_line(12, 120, of_sampling(metrics, True), metrics, 62, UNBOUNDED)
    assert all(f"part_{i} {i / 10:.3g}" in line for i in range(9))
    assert "(rollout 61%, update 22%, sync 5%)" in line and "| tools 1.25 |" in line
    assert len(line) > COLUMNS
    short_line = step_line(12, 120, of_sampling(metrics, True), metrics, 62)
    assert "reward 0.412 (correct 0.31) | length 212" in short_line
    assert short_line.endswith("| 4,571 tok/s | 8.2 s | 1:02 left")


numbers = (
    st.floats(-1e300, 1e300)
    | st.floats(-10, 10)
    | st.sampled_from([math.nan, math.inf, -math.inf])
    | st.integers(0, 10**18).map(float)
)
names = st.text(min_size=1, max_size=40)


@settings(deadline=None)  # the first example draws for long where others compute beside it
@given(
    st.integers(1, 10**7), st.integers(1, 10**9), st.dictionaries(names, numbers, max_size=30),
    numbers, numbers, st.floats(0), st.lists(names, max_size=9),
)  # fmt: skip
def test_it_never_has_over_100_columns(step, steps, parts, value, speed, left_s, show):
    metrics = {f"reward/{name}": number for name, number in parts.items()}
    metrics |= {f"{name}/{name}": value for name in show} | dict.fromkeys(METRICS, value)
    metrics["throughput/tokens_per_s"] = speed
    metrics |= {f"time/{name}_s": number for name, number in parts.items()}
    shown = of_sampling(metrics, with_tools=True)
    shown = shown._replace(fields=[*shown.fields, *(field_of(f"{n}/{n}", metrics) for n in show)])
    for line in (
        step_line(step, steps, shown, metrics, left_s),
        fitted(f"step {step}/{steps}", shown, ["100 prompts"]),
    ):
        assert cell_len(line) <= COLUMNS
        assert line.isprintable()
        assert line.startswith(f"step {step}/{steps} |")
    if not show and not parts:
        assert line.endswith("prompts")


@settings(deadline=None)
@given(numbers)
def test_numbers_are_short(value):
    text = short(value)
    assert len(text) <= 10
    if math.isfinite(value):
        assert float(text.replace(",", "")) == pytest.approx(value, rel=0.006)


def test_time_left():
    times = [remaining(s) for s in (7, 62, 3723, 3 * 86400, 1e9, math.inf, math.nan)]
    assert times[:4] == ["0:07", "1:02", "1:02:03", "3 days"]
    assert times[4:] == ["over 100 days"] * 3


def test_more_metrics_are_shown_where_they_are_asked_for(tmp_path, capsys):
    log = RunLog(tmp_path, True, 9, show=("actor/entropy", "actor/entropie"))
    for step in (1, 2):
        log.step_line(step, METRICS, of_sampling(METRICS, with_tools=False))
    log.close()
    said, first, second = capsys.readouterr().out.splitlines()
    assert said == (
        "show_metrics: this step has no metric 'actor/entropie'; nearest: actor/entropy"
    )
    assert "| length 212 | entropy 1.23 | 4,571 tok/s |" in first
    log = RunLog(tmp_path, True, 9, show=("actor/entropy",), lines="full")
    log.step_line(3, METRICS, of_sampling(METRICS, with_tools=False))
    log.close()
    full = capsys.readouterr().out
    assert "(correct 0.31, format 0.9) | length 212" in full and "sync 5%" in full
    assert second.startswith("step 2/9 | reward 0.412") and "entropy" in second
