"""The line that a run prints for a step: what the model does and where the time goes.

step 12/120 | reward 0.41 (correct 0.31) | length 212 | 571 tok/s | 8.2 s (rollout 61%) | 1:02 left

It has at most 100 columns; with `log_lines="full"` it has all that there is, as long as that is.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

COLUMNS = 100
UNBOUNDED = 1_000_000  # columns of a line that is never cut
LEAST_SHARE = 0.005  # of a step's time: phases with less are not named, even in full lines
MORE = "..."  # in place of the end of a line that is still too long
# reward/... metrics of our own, which no reward function may report; no parts of the reward
RESERVED = ("mean", "std", "invalid", "kl", "frac_reward_zero_std")
NAMES = {"response/mean_tokens": "length", "tools/calls": "tools"}  # others: their last part
PHASES = {"update_actor": "update"}  # others: by their name

Metrics = Mapping[str, float]


class Shown(NamedTuple):
    """The texts that a line shows of a step, as in "reward 0.41"."""

    first: str
    parts: list[str]  # what `first` is made of; the last are left out where the line is too long
    fields: list[str]  # then the last of these


class Timed(NamedTuple):
    """The texts that a line shows of a step's time."""

    seconds: str  # of the step, as in "8.2 s"; "" where it is not known
    phases: list[str]  # longest first; the last are left out where the line is too long


def of_sampling(metrics: Metrics, with_tools: bool) -> Shown:
    """The reward and its parts; tokens of an answer; where there are any, the share that was cut at
    the token limit and the samples without a reward; tool calls of an answer where the policy has
    tools."""
    fields = [field_of("response/mean_tokens", metrics)]
    if metrics.get("response/truncated"):
        fields.append(f"cut {percent(metrics['response/truncated'])}")
    if metrics.get("reward/invalid"):
        fields.append(f"without reward {short(metrics['reward/invalid'])}")
    if with_tools:
        fields.append(field_of("tools/calls", metrics))
    return Shown(field_of("reward/mean", metrics), reward_parts(metrics), [*filter(None, fields)])


def of_evaluation(metrics: Metrics) -> Shown:
    """The mean reward, and that of each data source where there are several."""
    sources = [
        f"{plain(name[len('eval/') : -len('/reward')])} {short(value)}"
        for name, value in metrics.items()
        if name.endswith("/reward") and name != "eval/reward"
    ]
    return Shown(field_of("eval/reward", metrics) or "no reward", sources, [])


def of_rows(metrics: Metrics, names: Sequence[str]) -> Shown:
    first, *fields = [field_of(name, metrics) for name in names if name in metrics] or [""]
    return Shown(first, [], fields)


def reward_parts(metrics: Metrics) -> list[str]:
    """Returns texts as in "correct 0.31": the means of the numbers that the reward reports."""
    names = [name.removeprefix("reward/") for name in metrics if name.startswith("reward/")]
    return [
        f"{plain(name)} {short(metrics[f'reward/{name}'])}"
        for name in names
        if name not in RESERVED
    ]


def field_of(name: str, metrics: Metrics) -> str:
    """Returns a text as in "entropy 1.2", of the metric actor/entropy; "" where there is none."""
    if name not in metrics:
        return ""
    first, _, last = name.rpartition("/")
    label = NAMES.get(name) or (first if last == "mean" and first else last)
    return f"{plain(label)} {short(metrics[name])}"


def step_line(
    step: int, steps: int, shown: Shown, metrics: Metrics, left_s: float, columns: int = COLUMNS
) -> str:
    """The whole line. metrics: of the step, for its speed and its time."""
    speed = f"{short(metrics['throughput/tokens_per_s'])} tok/s"
    left = f"{remaining(left_s)} left"
    return fitted(f"step {step}/{steps}", shown, [speed], columns, step_time(metrics), [left])


def step_time(metrics: Metrics) -> Timed:
    """The seconds of a step and its phases, longest first, as in "rollout 61%"."""
    total = metrics.get("time/step_s", 0.0)
    if not 0 < total < math.inf:
        return Timed("", [])
    shares = [
        (value / total, name.removeprefix("time/").removesuffix("_s"))
        for name, value in metrics.items()
        if name.startswith("time/") and name != "time/step_s" and value / total >= LEAST_SHARE
    ]
    longest = sorted(shares, reverse=True)
    named = [f"{plain(PHASES.get(name, name))} {percent(share)}" for share, name in longest]
    return Timed(f"{short(total)} s", named)


def fitted(
    head: str,
    shown: Shown,
    speed: Sequence[str],
    columns: int = COLUMNS,
    timed: Timed | None = None,
    end: Sequence[str] = (),
) -> str:
    """All of it in at most `columns` columns, or as much as fits.

    What gives way, in this order: the phases but the longest, the parts of the reward but the
    first, the longest phase, the last fields, the first part.
    """
    time = timed or Timed("", [])
    for parts, fields, phases in choices(len(shown.parts), len(shown.fields), len(time.phases)):
        middle = [shown.first + in_brackets(shown.parts[:parts]), *shown.fields[:fields]]
        took = time.seconds + in_brackets(time.phases[:phases])
        line = " | ".join([head, *filter(None, [*middle, *speed, took]), *end])
        if cell_len(line) <= columns:
            return line
    return cut(line, columns)


def choices(parts: int, fields: int, phases: int) -> Iterator[tuple[int, int, int]]:
    """Yields how many parts, fields and phases a line may have, the longest line first."""
    first_part = min(parts, 1)
    yield from ((parts, fields, count) for count in range(phases, 0, -1))
    yield from ((count, fields, min(phases, 1)) for count in range(parts - 1, 0, -1))
    yield from ((first_part, count, 0) for count in range(fields, -1, -1))
    yield 0, 0, 0


def in_brackets(texts: Sequence[str]) -> str:
    return f" ({', '.join(texts)})" if texts else ""


def cut(line: str, columns: int) -> str:
    """Cuts a line to at most so many columns."""
    if cell_len(line) <= columns:
        return line
    return set_cell_size(line, columns - len(MORE)).rstrip() + MORE


def short(value: float) -> str:
    """Writes a number in at most 10 columns."""
    if not math.isfinite(value) or abs(value) >= 1e6:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def percent(share: float) -> str:
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def remaining(seconds: float) -> str:
    """Writes a duration as in "0:07", "1:02:03", "2 days"."""
    if not seconds < 100 * 86400:
        return "over 100 days"
    whole = int(seconds)
    if whole >= 2 * 86400:
        return f"{whole // 86400} days"
    minutes, clock = whole // 60, f"{whole % 60:02d}"
    return f"{minutes}:{clock}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{clock}"


def plain(name: str) -> str:
    """A name on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


def unknown(wanted: Sequence[str], metrics: Metrics) -> list[str]:
    """Returns what is to be said of names in config.show_metrics that a step has no metric of."""
    said = []
    for name in wanted:
        if name not in metrics:
            near = difflib.get_close_matches(name, metrics, n=3) or sorted(metrics)[:5]
            near_ones = ", ".join(near)
            said.append(f"show_metrics: this step has no metric {name!r}; nearest: {near_ones}")
    return said
