"""Tries the reward on answers that are known to be right, wrong or empty."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Any

from spmdrl.rewards.runner import RewardRunner, runs_programs
from spmdrl.training.dry_run import ASKED, answered, last_line
from spmdrl.types import Prompt, Sample

MOST_PROMPTS = 16
# How an answer is written out: name, text, and what a prompt that asks for it has in its text.
FORMS = (
    ("the bare answer", "{}", ""),
    ("\\boxed{...}", "So the result is \\boxed{{{}}}.", "boxed"),
    ("#### ...", "So we have it.\n#### {}", "####"),
    ("<answer>...</answer>", "<think>I see.</think>\n<answer>{}</answer>", "<answer>"),
    ("The answer is ...", "The answer is {}.", "answer is"),
    ("```python", "```python\n{}\n```", "```"),
)


@dataclass
class Probes:
    """Holds what the reward said. right: by the name of a form, for each ground truth in it."""

    right: dict[str, list[float]] = field(default_factory=dict)
    wrong: dict[str, list[float]] = field(default_factory=dict)  # another prompt's ground truth
    empty: list[float] = field(default_factory=list)  # ""
    failed: list[str] = field(default_factory=list)  # last lines of what was raised
    tried: int = 0
    seconds: float = 0.0  # of one call, on average, by one worker
    skipped: str = ""  # why nothing was tried
    reads_truth: bool = True  # whether the reward asks for ground_truth

    @property
    def best(self) -> str:
        """Returns the form whose right answers have the largest mean reward; the first of equal."""
        return max(self.right, key=lambda name: fmean(self.right[name]))

    @property
    def all(self) -> list[float]:
        return [*chain(*self.right.values(), *self.wrong.values(), self.empty)]


def probe(rewards: RewardRunner, prompts: Sequence[Prompt], workers: int) -> Probes:
    """Scores each ground truth in all forms, that of the next prompt, and an empty answer."""
    prompts = [prompt for prompt in prompts if prompt.ground_truth is not None][:MOST_PROMPTS]
    found = [rewards.reward_of(prompt.data_source) for prompt in prompts]
    asks = {name for reward in found for name in reward.arguments}
    asked = [ASKED[name] for name in ASKED if name in asks]
    if not prompts or asked:
        return Probes(skipped=f"it asks {asked[0]}" if asked else "no row has a ground truth")
    if any(runs_programs(reward.function) for reward in found):
        return Probes(skipped="its ground truths are tests of programs, and no answers")
    if any(isinstance(prompt.ground_truth, Mapping) for prompt in prompts):
        return Probes(skipped="its ground truths are records, and no answers")
    samples: dict[tuple[str, str], list[Sample]] = {("empty", ""): []}
    for number, prompt in enumerate(prompts):
        other = prompts[(number + 1) % len(prompts)]
        samples["empty", ""].append(answered(prompt, ""))
        for name, form, _ in FORMS:
            own = samples.setdefault(("right", name), [])
            own.append(answered(prompt, form.format(as_text(prompt.ground_truth))))
            if str(other.ground_truth) != str(prompt.ground_truth):
                samples.setdefault(("wrong", name), []).append(
                    answered(prompt, form.format(as_text(other.ground_truth)))
                )
    every = [*chain(*samples.values())]
    begun = time.monotonic()
    rewards.score(every)
    spent = (time.monotonic() - begun) * workers / len(every)
    probes = Probes(tried=len(every), seconds=spent, reads_truth="ground_truth" in asks)
    for (kind, name), group in samples.items():
        given = [sample.reward for sample in group if sample.reward is not None]
        probes.failed += [last_line(sample.invalid) for sample in group if sample.invalid]
        if kind == "empty":
            probes.empty = given
        elif given:
            getattr(probes, kind)[name] = given
    return probes


def as_text(truth: Any) -> str:
    return str(truth[0] if isinstance(truth, list | tuple) and truth else truth)
