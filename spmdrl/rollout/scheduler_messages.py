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
from spmdrl.rollout.engine_calls import NO_CALLS, EngineCalls


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
    """A ReplyHandler answers when a turn has ended: tools, an environment. Or it runs an agent,
    which asks the engine for turns until its sample is over. Asked on an engine's leader.
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

    def has_calls(self) -> bool:
        """Whether `calls` would return any. Asked between two steps of a burst."""
        ...

    def calls(self) -> EngineCalls:
        """Returns the calls of agents that have come since, and those that were given up."""
        ...

    def end_call(self, number: int, answer: Completion) -> None:
        """Takes the answer to a call."""
        ...

    def pause_call(self, number: int, answer: Completion) -> None:
        """Takes what there is of the answer to a call when the round ends: a later one goes on."""
        ...


class NoCalls:
    """The part of a ReplyHandler that has no agents."""

    def has_calls(self) -> bool:
        return False

    def calls(self) -> EngineCalls:
        return NO_CALLS

    def end_call(self, number: int, answer: Completion) -> None:
        raise AssertionError(f"nobody made the call {number}")

    pause_call = end_call


class NoReplies(NoCalls):
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
    first: int = 0  # fresh requests first .. first + count - 1 of those without a home
    count: int = 0
    num_steps: int = 0  # at most, of the burst
    refill_below: int = 0  # the burst ends early with fewer requests than this in the engine
    calls: EngineCalls = NO_CALLS  # of agents

    def requests_from(
        self, requests: Sequence[Request], free: Sequence[int]
    ) -> tuple[dict[int, Request], dict[int, Completion]]:
        """Returns the requests to be added to the engine, and the turns that await a reply, by
        their positions in the round's list. free: see free_positions.
        """
        fresh = {i: requests[i] for i in free[self.first : self.first + self.count]}
        waiting = {i: request.begun() for i, request in fresh.items() if request.awaits_reply}
        ready = {i: request for i, request in fresh.items() if i not in waiting}
        return ready | {i: resume(requests[i], c) for i, c in self.resumed.items()}, waiting

    def to_words(self) -> np.ndarray:
        """int64; to_words()[0] is its length."""
        resumed = np.frombuffer(pack(self.resumed), np.int32).tolist()
        calls = self.calls.to_bytes() if self.calls else b""
        head = [self.loads, self.stop, self.first, self.count, self.num_steps, self.refill_below,
                len(resumed), len(calls)]  # fmt: skip
        words = np.frombuffer(calls + bytes(-len(calls) % 8), np.int64).tolist()
        return np.array([9 + len(resumed) + len(words), *head, *resumed, *words], np.int64)

    @classmethod
    def from_words(cls, words: np.ndarray) -> Decision:
        loads, stop, first, count, num_steps, refill_below, size, num_bytes = words[1:9].tolist()
        resumed = unpack(words[9 : 9 + size].astype(np.int32).tobytes())
        packed = words[9 + size :].tobytes()[:num_bytes]
        calls = EngineCalls.from_bytes(packed) if packed else NO_CALLS
        return cls(loads, bool(stop), resumed, first, count, num_steps, refill_below, calls)


def free_positions(requests: Sequence[Request]) -> list[int]:
    """Returns the positions of the requests that any engine may take: those without a home."""
    return [i for i, request in enumerate(requests) if request.home is None]


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
