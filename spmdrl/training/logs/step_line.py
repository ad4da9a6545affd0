"""The line that a run prints for a step: what the model does, in at most 110 columns.

step 12/120 | reward 0.4 (correct 0.3, format 0.9) | length 212 | cut 3% | 571 tok/s | 1:02 left
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

COLUMNS = 110
MORE = "..."  # in place of what does not fit
# reward/... metrics of our own, which no reward function may report; no parts of the reward
RESERVED = ("mean", "std", "invalid", "kl", "frac_reward_zero_std")
NAMES = {"response/mean_tokens": "length", "tools/calls": "tools"}  # others: their last part

Metrics = Mapping[str, float]


class Shown(NamedTuple):
    """The texts that a line shows of a step, as in "reward 0.41"."""

    first: str
    parts: list[str]  # what `first` is made of; the last are left out where the line is too long
    fields: list[str]  # then the last of these


def of_sampling(metrics: Metrics, with_tools: bool) -> Shown:
    """The reward and its parts; tokens of an answer, share cut at the token limit, samples without
    a reward if there are any, tool calls of an answer where the policy has tools."""
    fields = [field_of("response/mean_tokens", metrics)]
    if "response/truncated" in metrics:
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


def step_line(step: int, steps: int, shown: Shown, metrics: Metrics, left_s: float) -> str:
    speed = f"{short(metrics['throughput/tokens_per_s'])} tok/s"
    return fitted(f"step {step}/{steps}", shown, [speed, f"{remaining(left_s)} left"])


def fitted(head: str, shown: Shown, end: Sequence[str]) -> str:
    """All of it in at most COLUMNS columns, or as much as fits."""
    for num_fields in range(len(shown.fields), -1, -1):
        left_out = [MORE] if num_fields < len(shown.fields) else []
        for num_parts in range(len(shown.parts), -1, -1):
            first = shown.first + in_brackets(shown.parts, num_parts)
            middle = [first, *shown.fields[:num_fields], *left_out]
            line = " | ".join([head, *filter(None, middle), *end])
            if cell_len(line) <= COLUMNS:
                return line
    return cut(line)


def in_brackets(parts: Sequence[str], count: int) -> str:
    """The first `count` parts, behind what they are parts of."""
    if not parts:
        return ""
    return f" ({', '.join([*parts[:count], *([MORE] if count < len(parts) else [])])})"


def cut(line: str) -> str:
    """Cuts a line to at most COLUMNS columns."""
    if cell_len(line) <= COLUMNS:
        return line
    return set_cell_size(line, COLUMNS - len(MORE)).rstrip() + MORE


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
