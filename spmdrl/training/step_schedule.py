"""Says what kind of step an iteration of another program's loop is: one of RL, or its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmdrl.config import require


@dataclass(frozen=True)
class Schedule:
    """Says by its number, from 1, what kind of step an iteration is.

    kind_of: any function of the number alone, so that a program that goes on from a checkpoint has
    nothing to restore: Schedule(lambda n: "sft" if n <= 200 or n % 4 else "rl").
    """

    kind_of: Callable[[int], str]

    def kind(self, iteration: int) -> str:
        return self.kind_of(iteration)

    def count(self, kind: str, iteration: int) -> int:
        """Returns how many of the iterations up to this one are of the kind: its step's number."""
        return sum(self.kind_of(number) == kind for number in range(1, iteration + 1))


def interleave(**counts: int) -> Schedule:
    """Returns the schedule that has so many iterations of each kind in turn, over and over.

    interleave(sft=3, rl=1): sft, sft, sft, rl, sft, ... Raises ConfigError for a count below 0, and
    where all are 0.
    """
    require(
        min(counts.values(), default=0) >= 0 and any(counts.values()),
        f"interleave({counts}): say how many iterations of each kind come in turn, 0 or more, and "
        "at least one of them more",
    )
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    return Schedule(lambda iteration: kinds[(iteration - 1) % len(kinds)])
