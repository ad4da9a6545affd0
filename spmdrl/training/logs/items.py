"""Results of an evaluation for each prompt, and how sure its mean is."""

from __future__ import annotations

import json
import math
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any


def items_of(path: Path) -> list[dict[str, Any]]:
    """Returns a row for each prompt of a file in samples/: the rewards of its answers, in order,
    and their mean; null where an answer has none.
    """
    with path.open(encoding="utf-8") as file:
        samples = [json.loads(line) for line in file]
    items = []
    for _, group in groupby(samples, key=lambda sample: sample["group"]):
        answers = list(group)
        rewards = [answer["reward"] for answer in answers]
        valid = [reward for reward in rewards if reward is not None]
        first = {name: answers[0][name] for name in ("prompt_id", "data_source", "ground_truth")}
        items.append(first | {
            "mean": fmean(valid) if valid else None, "rewards": rewards,
            "preds": [answer.get("pred") for answer in answers],
            "response_tokens": [answer["response_tokens"] for answer in answers],
        })  # fmt: skip
    return items


def interval(items: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the 95 % confidence interval of the mean reward over prompts such as these.

    The standard error is that of the prompts' means, so several answers to a prompt do not count as
    independent (Miller 2024, arXiv 2411.00640, sections 2.1 and 2.2). Empty for fewer than two.
    """
    means = [item["mean"] for item in items if item["mean"] is not None]
    if len(means) < 2:
        return {}
    half = 1.96 * stdev(means) / math.sqrt(len(means))
    return {"ci95/low": fmean(means) - half, "ci95/high": fmean(means) + half}
