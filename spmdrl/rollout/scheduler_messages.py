"""The messages of the scheduler: what a round is asked, decides and gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spmdrl.rollout.answer_codec import pack, unpack
from spmdrl.rollout.base import Completion


@dataclass
class RoundResult:
    """The result of a round's requests on this engine, by position in the list.

    Each position is in one of the two on exactly one leader; both are empty on other ranks.
    """

    finished: dict[int, Completion] = field(default_factory=dict)
    unfinished: dict[int, Completion] = field(default_factory=dict)  # only after an early stop


@dataclass
class StopCondition:
    """When a round ends. `groups[i]` is the group of request i; enough None: with the last."""

    groups: Sequence[int] = ()
    enough: int | None = None  # complete groups, over all engines

    def __post_init__(self) -> None:
        self.missing: dict[int, int] = {}  # requests of each group
        for group in self.groups:
            self.missing[group] = self.missing.get(group, 0) + 1
        if self.enough is not None and not 0 < self.enough <= len(self.missing):
            raise ValueError(f"{self.enough} of {len(self.missing)} groups cannot be complete")


class ReplyHandler(Protocol):
    """A ReplyHandler answers when a turn has ended: tools, an environment. Asked on an engine's
    leader.
    """

    def ask(self, position: int, turn: Completion) -> bool:
        """Whether a reply to it will come; if not, the answer is over."""
        ...

    def came(self) -> dict[int, Completion]:
        """Answers with the replies that have come since: to go on where they say "abort"."""
        ...

    def give_up(self) -> dict[int, Completion]:
        """Returns the answers whose replies have not come, unchanged; a later round asks again."""
        ...

    def __len__(self) -> int:
        """Returns how many replies have not come."""
        ...


class NoReplies:
    """A ReplyHandler for answers of one turn: nobody replies."""

    def ask(self, position: int, turn: Completion) -> bool:
        return False

    def came(self) -> dict[int, Completion]:
        return {}

    def give_up(self) -> dict[int, Completion]:
        return {}

    def __len__(self) -> int:
        return 0


@dataclass
class Decision:
    """A decision about what all ranks of an engine do next, in this order."""

    loads: int = 0  # changes of weights
    give: list[int] = field(default_factory=list)  # engine ids to be aborted
    stop: bool = False
    first: int = 0  # fresh requests first .. first + count - 1
    count: int = 0
    taken: dict[int, Completion] = field(default_factory=dict)  # continuations
    num_steps: int = 0
    refill_below: int = 0  # requests inside: then the burst ends early

    def to_words(self) -> np.ndarray:
        """int64; to_words()[0] is its length."""
        head = [self.loads, self.stop, self.first, self.count, self.num_steps, self.refill_below]
        taken = np.frombuffer(pack(self.taken), np.int32).tolist()
        words = [*head, len(self.give), *self.give, *taken]
        return np.array([1 + len(words), *words], np.int64)

    @classmethod
    def from_words(cls, words: np.ndarray) -> Decision:
        loads, stop, first, count, num_steps, refill_below, num_given = words[1:8].tolist()
        give, taken = words[8 : 8 + num_given].tolist(), words[8 + num_given :].astype(np.int32)
        begun = unpack(taken.tobytes())
        return cls(loads, give, bool(stop), first, count, begun, num_steps, refill_below)
