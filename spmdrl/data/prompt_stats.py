"""Keeps what a run knows of each prompt that it may ask: how often it was asked, and its success
rate.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from spmdrl.config import ConfigError, SamplerConfig
from spmdrl.config.words import counted

BUCKETS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # edges of the histogram of success rates
STORED = {"asked": "<i8", "answered_in": "<i8", "solved_in_a_row": "<i8", "successes": "<f8",
          "answers": "<f8"}  # fmt: skip


class PromptAnswers(NamedTuple):
    """The answers to one prompt in a step, as a sampler hears of them."""

    place: int  # of the prompt in the data set
    successes: int  # of the answers that have a reward
    total: int  # of these


@dataclass(frozen=True)
class PromptRows:
    """Holds what the rows of a data set say of each prompt; the same on every rank."""

    names: tuple[str, ...]  # of the data sources
    source: np.ndarray  # (num_prompts,) int64, a place in `names`
    difficulty: np.ndarray | None  # (num_prompts,) float64, where the config names a column
    ids: np.ndarray  # (num_prompts,) int64, ascending: Prompt.id


@dataclass
class PromptStats:
    """Holds what the answers so far say of each prompt; the same on every rank. Your own sampler is
    given it, to read.

    Arithmetic is that of float64 without functions of a library, so that it is the same in every
    bit on every machine.
    """

    rows: PromptRows
    config: SamplerConfig
    asked: np.ndarray = field(init=False)  # (num_prompts,) int64, times
    waiting: np.ndarray = field(init=False)  # (num_prompts,) bool: asked, its answers not counted
    answered_in: np.ndarray = field(init=False)  # (num_prompts,) int64, the last step; 0: none
    solved_in_a_row: np.ndarray = field(init=False)  # (num_prompts,) int64, times
    # (num_prompts,) float64, both less with each time that the prompt is asked (rate_decay)
    successes: np.ndarray = field(init=False)
    answers: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        for name, kind in STORED.items():
            setattr(self, name, np.zeros(len(self), dtype=kind[1:]))
        self.waiting = np.zeros(len(self), dtype=bool)

    def __len__(self) -> int:
        return len(self.rows.source)

    @property
    def rates(self) -> np.ndarray:
        """(num_prompts,) float64: the success rate of each prompt, nan where it is unknown."""
        known = self.answers > 0
        return np.where(known, self.successes / np.where(known, self.answers, 1.0), np.nan)

    def dropped(self, step: int) -> np.ndarray:
        """(num_prompts,) bool: solved so often that it is not to be asked in this step."""
        often, pause = self.config.drop_solved, self.config.return_after
        if not often:
            return np.zeros(len(self), dtype=bool)
        rests = np.ones(len(self), dtype=bool) if not pause else step - self.answered_in <= pause
        return (self.solved_in_a_row >= often) & rests

    def count(self, answers: Sequence[PromptAnswers], step: int) -> None:
        """Counts the answers of a step. Those without a reward say nothing."""
        for place, successes, total in answers:
            self.waiting[place] = False
            if total == 0:
                continue
            decay = self.config.rate_decay
            self.successes[place] = decay * self.successes[place] + successes
            self.answers[place] = decay * self.answers[place] + total
            solved = successes == total
            self.solved_in_a_row[place] = self.solved_in_a_row[place] + 1 if solved else 0
            self.answered_in[place] = step

    def copy(self) -> PromptStats:
        """Returns what is known now, to count further answers in."""
        found = PromptStats(self.rows, self.config)
        for name in (*STORED, "waiting"):
            setattr(found, name, getattr(self, name).copy())
        return found

    def metrics(self, step: int) -> dict[str, float]:
        """Returns how many prompts are known and dropped, and the histogram of known rates."""
        rates = self.rates
        known = rates[~np.isnan(rates)]
        found = {
            "prompts/known": len(known) / len(self),
            "prompts/dropped": float(self.dropped(step).mean()),
        }
        for name, share in histogram(known).items():
            found[f"success_rates/{name}"] = share
        return found

    def state_dict(self) -> dict[str, str]:
        """Returns the arrays as text, which JSON can hold."""
        packed = {name: packed_array(getattr(self, name), kind) for name, kind in STORED.items()}
        return {**packed, "waiting": packed_array(self.waiting, "|b1")}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Raises ConfigError where the state is of another number of prompts."""
        for name, kind in {**STORED, "waiting": "|b1"}.items():
            values = unpacked_array(state[name], kind)
            if len(values) != len(self):
                raise ConfigError(
                    f"the checkpoint knows of {counted(len(values), 'prompt')}, and the data has "
                    f"{len(self)}"
                )
            setattr(self, name, values)


def histogram(rates: np.ndarray) -> dict[str, float]:
    """Returns the share of the rates in each bucket: at 0, between two edges (the upper one is in
    it), and at 1; {} where there are no rates.
    """
    if not len(rates):
        return {}
    inside = rates[(rates > 0) & (rates < 1)]
    shares = {"0": float((rates == 0).mean())}
    for low, high in pairwise(BUCKETS):
        name = f"{100 * low:.0f}_{100 * high:.0f}"
        shares[name] = float(((inside > low) & (inside <= high)).sum() / len(rates))
    return {**shares, "100": float((rates == 1).mean())}


def packed_array(values: np.ndarray, kind: str) -> str:
    return base64.b64encode(zlib.compress(values.astype(kind).tobytes())).decode()


def unpacked_array(text: str, kind: str) -> np.ndarray:
    raw = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=kind)
    return raw.astype(kind[1:] if kind[0] == "<" else bool)


def needs_difficulty(config: SamplerConfig) -> bool:
    return config.curriculum == "difficulty"


def walks_in_order(config: SamplerConfig) -> bool:
    """Whether the data is walked through epoch by epoch, as without a sampler."""
    mixes = bool(config.weights) or config.temperature != 1
    chooses = config.curriculum or config.drop_solved or config.function
    return not mixes and not chooses


def checked_state(state: Any) -> Any:
    """Returns the state of an object of the user's as JSON gives it back. Raises ConfigError."""
    try:
        return json.loads(json.dumps(state))
    except TypeError as error:
        raise ConfigError(
            f"data.sampler.function: its state_dict() is not JSON: {error}"
        ) from error
