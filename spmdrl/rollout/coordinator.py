"""Agrees with the other engines of a round, through the key-value store of torch.distributed.

Each engine begins with a consecutive part of the round's list, so that the samples of one prompt,
which are neighbours in the list, share their cached prefix. The rest is taken from a counter by the
engines that have room. The keys of a round:

    next      the number of requests that were taken beyond the first shares; an engine adds to it,
              and what it added is its own
    done      the number of requests that have ended
    log       2 * (number of changes of weights) + (1 once the round is over)
    complete  the number of complete groups; group/G is the number of ended requests of group G
    until     the number of engines on which `until` has been True

Only engine 0 writes to the log, and an engine leaves the round only when the log says so. So all
engines change weights at the same point of the log, whenever each of them gets there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from spmdrl.distributed.progress import PROGRESS
from spmdrl.rollout.base import Completion, Request, RolloutEngine
from spmdrl.rollout.scheduler_messages import (
    Decision,
    ReplyHandler,
    RoundResult,
    StopCondition,
    free_positions,
)

BURST_S = 0.06  # between two decisions
BURST_ENGINES = 16  # with more, bursts are longer: the store has as many operations a second
MAX_STEPS = 32  # per burst
FAILED = 1 << 40  # in the log: an engine raised
SPARE = 0.25  # requests that wait in an engine, as a part of those that it decodes at once


@dataclass
class EngineCoordinator:
    """Decides for one engine and one round. It is on the engine's leader."""

    store: Any  # of this round; its stub knows no bytes
    engine: RolloutEngine
    number: int  # of the engine
    num_engines: int
    requests: Sequence[Request]  # the list of the round
    stop_condition: StopCondition
    reply_handler: ReplyHandler
    new_weights: Callable[[], bool]  # see Scheduler.run, also for `until`
    until: Callable[[], bool] | None = None
    static: bool = False  # the first share is all that the engine takes

    def __post_init__(self) -> None:
        self.free = free_positions(self.requests)
        self.at_home = [i for i, r in enumerate(self.requests) if r.home == self.number]
        self.num_requests = self.capacity = len(self.free)
        if self.num_engines > 1 and not self.static:
            # a few requests wait in the engine, so that a place that becomes free in a burst is
            # taken at once; what waits here cannot go to an engine that is done earlier
            self.capacity = math.ceil((1 + SPARE) * self.engine.max_num_seqs)
        share = min(math.ceil(self.num_requests / self.num_engines), self.capacity)
        self.num_first = min(share * self.num_engines, self.num_requests)  # in all first shares
        start = min(share * self.number, self.num_requests)
        self.first_share = range(start, min(start + share, self.num_requests))
        self.done = 0  # over all engines, when the store was last read
        self.unreported = 0  # requests that ended here and are not yet in the store's `done`
        self.all_taken = False  # as far as is known here
        self.num_loads = 0  # changes of weights so far
        self.num_steps = 1  # of the next burst
        self.until_was_true = self.got_replies = False
        self.resumed: dict[int, Completion] = {}  # answers that go on behind a reply
        self.result = RoundResult()

    def decide(self, inside: int) -> Decision:
        """Returns what the engine does next. inside: the number of requests in it."""
        decision = Decision(num_steps=self.num_steps)
        if self.at_home:  # their agents go on
            self.finish_turns({i: self.requests[i].begun() for i in self.at_home})
            self.at_home = []
        self.receive_replies()
        if self.unreported or self.number == 0 or not self.all_taken:
            self.done = self.store.add("done", self.unreported)
            self.unreported = 0
            PROGRESS.count(self.done, len(self.requests), "answers")
        log = self.read_log()
        decision.loads, self.num_loads = log // 2 - self.num_loads, log // 2
        decision.stop = bool(log & 1)
        if decision.stop:
            return decision
        decision.resumed, self.resumed = self.resumed, {}
        decision.calls = self.reply_handler.calls()
        if not self.all_taken:
            inside += len(decision.resumed)
            fresh = self.take(inside, len(self.reply_handler))
            decision.first, decision.count = fresh.start, len(fresh)
            inside += len(fresh)
        if not self.all_taken:
            decision.refill_below = min(self.engine.max_num_seqs, math.ceil(0.8 * inside))
        return decision

    def set_burst_length(self, num_steps: int, seconds: float) -> None:
        """Sets the number of steps of the next burst from the time that the last one took."""
        if num_steps:
            burst_s = BURST_S * max(1.0, self.num_engines / BURST_ENGINES)
            wanted = int(burst_s * num_steps / max(seconds, 1e-6))
            self.num_steps = min(max(wanted, 1), 2 * self.num_steps, MAX_STEPS)

    def read_log(self) -> int:
        """Returns the log; engine 0 first writes to it. Raises where another engine failed."""
        if self.until is not None and not self.until_was_true and self.until():
            self.until_was_true = True
            self.store.add("until", 1)
        if self.number == 0:
            if self.is_over():
                self.store.add("log", 1)
            elif self.new_weights():
                self.store.add("log", 2)
        log = self.store.add("log", 0)
        if log >= FAILED:
            raise RuntimeError("another rollout engine failed; its own rank says why")
        return log

    def is_over(self) -> bool:
        """Returns whether the round ends: the last request, enough groups, or `until`."""
        if self.until_was_true and self.store.add("until", 0) == self.num_engines:
            return True
        if self.stop_condition.enough is None:
            return self.done == len(self.requests)
        return self.store.add("complete", 0) >= self.stop_condition.enough

    def take(self, inside: int, awaiting: int = 0) -> range:
        """Takes fresh requests, by their places in `free`.

        The first call returns the engine's first share. Later ones fill the engine from the
        counter, but with no more than a fair share of what is not done, so that the engines end at
        about the same time. awaiting: the answers of this engine that wait for a reply. They leave
        their places to others, and are part of its fair share.
        """
        if self.first_share:
            fresh, self.first_share = self.first_share, range(0)
            self.all_taken = self.num_first == self.num_requests
            return fresh
        share = math.ceil((len(self.requests) - self.done) / self.num_engines)
        wanted = max(min(self.capacity, share - awaiting) - inside, 0)
        # also where nothing is wanted, since a full engine is to learn that the list is empty
        end = self.num_first + self.store.add("next", wanted)
        self.all_taken = end >= self.num_requests
        return range(min(end - wanted, self.num_requests), min(end, self.num_requests))

    def receive_replies(self) -> None:
        """Takes the replies that have come: an answer goes on behind its reply, or is finished."""
        finished: dict[int, Completion] = {}
        answers = self.reply_handler.came()
        self.got_replies = bool(answers)
        for position, answer in answers.items():
            goes_on = answer.finish_reason == "abort"
            (self.resumed if goes_on else finished)[position] = answer
        self.record(finished)

    def finish_turns(self, turns: dict[int, Completion]) -> None:
        """Records the answers to which no reply will come; the others wait for their reply."""
        self.record({i: turn for i, turn in turns.items() if not self.reply_handler.ask(i, turn)})

    def record(self, answers: dict[int, Completion]) -> None:
        """Adds finished answers to the result, and counts the groups that they complete."""
        self.result.finished |= answers
        self.unreported += len(answers)
        if self.stop_condition.enough is None:
            return
        for position in answers:
            group = self.stop_condition.groups[position]
            if self.store.add(f"group/{group}", 1) == self.stop_condition.missing[group]:
                self.store.add("complete", 1)

    def end_calls(self, answers: dict[int, Completion]) -> None:
        """Gives agents the answers to their calls, by the calls' numbers."""
        for number, answer in answers.items():
            self.reply_handler.end_call(number, answer)

    def pause_calls(self, answers: dict[int, Completion]) -> None:
        """Keeps agents' calls that the round's end has interrupted, by the calls' numbers."""
        for number, answer in answers.items():
            self.reply_handler.pause_call(number, answer)

    def end(self, partial: dict[int, Completion]) -> RoundResult:
        """Returns the result of the round on this engine.

        partial: what was inside the engine. These are unfinished too: a first share that was never
        added; on engine 0, the requests that no engine took; and the answers that wait for a reply
        or have just got one.
        """
        untaken = list(self.first_share)
        if self.number == 0:
            end = self.num_first + self.store.add("next", self.num_requests)
            untaken += range(end - self.num_requests, self.num_requests)
        begun = {
            i: self.requests[i].begun() for i in [*self.at_home, *(self.free[k] for k in untaken)]
        }
        self.result.unfinished = partial | begun | self.resumed | self.reply_handler.give_up()
        return self.result

    def raise_alarm(self) -> None:
        """Tells the other engines that this one failed."""
        with suppress(dist.DistNetworkError, dist.DistStoreError):  # the store may be what failed
            self.store.add("log", FAILED)

    def clear(self) -> None:
        """Deletes the round's keys. No engine reads them any more, and engine 0 deletes them."""
        if self.number != 0:
            return
        groups = self.stop_condition.missing if self.stop_condition.enough is not None else ()
        keys = ["next", "done", "log", "complete", "until", *(f"group/{g}" for g in groups)]
        for key in keys:
            self.store.delete_key(key)
