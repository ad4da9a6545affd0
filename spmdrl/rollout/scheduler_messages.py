"""The types around a round of the scheduler: when it ends, replies, decisions and the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.rollout.answer_codec import pack, resume, unpack
from spmdrl.rollout.base import Completion, Request


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
    """Says what all ranks of an engine do next, in the order of the fields."""

    loads: int = 0  # changes of weights
    stop: bool = False
    resumed: dict[int, Completion] = field(default_factory=dict)  # answers that got a reply
    first: int = 0  # fresh requests first .. first + count - 1
    count: int = 0
    num_steps: int = 0  # at most, of the burst
    refill_below: int = 0  # the burst ends early with fewer requests than this in the engine

    def requests_from(
        self, requests: Sequence[Request]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        """Returns the requests to be added to the engine, and the turns that await a reply, by
        their positions in the round's list.
        """
        fresh = {i: requests[i] for i in range(self.first, self.first + self.count)}
        waiting = {i: request.begun() for i, request in fresh.items() if request.awaits_reply}
        ready = {i: request for i, request in fresh.items() if i not in waiting}
        return ready | {i: resume(requests[i], c) for i, c in self.resumed.items()}, waiting

    def to_words(self) -> np.ndarray:
        """int64; to_words()[0] is its length."""
        head = [self.loads, self.stop, self.first, self.count, self.num_steps, self.refill_below]
        resumed = np.frombuffer(pack(self.resumed), np.int32).tolist()
        return np.array([7 + len(resumed), *head, *resumed], np.int64)

    @classmethod
    def from_words(cls, words: np.ndarray) -> Decision:
        loads, stop, first, count, num_steps, refill_below = words[1:7].tolist()
        resumed = unpack(words[7:].astype(np.int32).tobytes())
        return cls(loads, bool(stop), resumed, first, count, num_steps, refill_below)


def broadcast_decision(
    decision: Decision | None, tp_group: dist.ProcessGroup, tp_size: int
) -> Decision:
    """Returns the leader's decision on every rank of its engine. decision: None but on the leader.

    Collective over the engine's tensor-parallel group.
    """
    if tp_size == 1:
        assert decision is not None
        return decision
    words = torch.zeros(64, dtype=torch.int64)  # long enough for nearly every decision
    packed = None if decision is None else torch.from_numpy(decision.to_words())
    if packed is not None:
        words[: len(packed)] = packed[:64]
    dist.broadcast(words, group=tp_group, group_src=0)
    length = int(words[0])
    if length > 64:
        words = torch.empty(length, dtype=torch.int64) if packed is None else packed
        dist.broadcast(words, group=tp_group, group_src=0)
    return Decision.from_words(words[:length].numpy())
