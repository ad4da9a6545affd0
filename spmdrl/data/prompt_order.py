"""The order in which a run asks the prompts of a data set."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from spmdrl.config import ConfigError

WORDS = {"length": "usable rows:", "seed": "seed", "shuffle": "data.shuffle"}


class PromptOrder:
    """Says which prompts each step asks: a permutation per epoch, walked `prompts_per_step` at a
    time.

    What is left at the end of an epoch and does not fill a step is not visited in that epoch:
    filling up from the next epoch could put one prompt into a step twice, with the same seeds. The
    permutation depends on (seed, epoch, length) alone, not on the world size.
    """

    def __init__(self, length: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= prompts_per_step <= length:
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} does not fit the data: {length} usable "
                f"prompts, and a step asks no prompt twice. Use 1 <= prompts_per_step <= {length}, "
                "add data, or raise max_prompt_tokens if prompts were filtered."
            )
        self.length, self.prompts_per_step = length, prompts_per_step
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.offset = 0  # prompts already asked in this epoch
        self._permutation = epoch_permutation(length, seed, 0, shuffle)

    def next_step(self) -> list[int]:
        """`prompts_per_step` different dataset indices; moves the position on."""
        return self.take(self.prompts_per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` different dataset indices, from a new epoch if this one has fewer."""
        if self.offset + count > self.length:
            self.epoch, self.offset = self.epoch + 1, 0
            self._permutation = epoch_permutation(self.length, self.seed, self.epoch, self.shuffle)
        taken = self._permutation[self.offset : self.offset + count]
        self.offset += count
        return taken.tolist()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the position, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any], may_differ: bool = False) -> bool:
        """Goes on exactly where `state` was taken; prompts_per_step may have changed since.

        Where the number of rows, the seed or `shuffle` differ, the rest of the epoch would be other
        rows than those not yet asked: a ConfigError, or with may_differ the next epoch begins.
        Returns whether it goes on where it was.
        """
        own = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        differ = [name for name in own if state[name] != own[name]]
        if differ and not may_differ:
            changes = "; ".join(
                f"{WORDS[name]} {state[name]}, this run has {own[name]}" for name in differ
            )
            raise ConfigError(
                f"the checkpoint's data position was taken with {changes}. "
                "Use the same data and seed, begin a new epoch of these rows with "
                "--checkpoint.accept_changes data, or start anew with --resume never."
            )
        epoch, offset = (state["epoch"] + 1, 0) if differ else (state["epoch"], state["offset"])
        if epoch != self.epoch:
            self._permutation = epoch_permutation(self.length, self.seed, epoch, self.shuffle)
        self.epoch, self.offset = epoch, offset
        return not differ


def epoch_permutation(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """(length,) int64: sorts raw PCG64 words, a stream that numpy never changes, unlike shuffle."""
    if not shuffle:
        return np.arange(length)
    digest = hashlib.sha256(f"prompt order, seed {seed}, epoch {epoch}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return np.argsort(words, kind="stable")
