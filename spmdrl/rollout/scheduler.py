"""Rounds of requests, shared out over engines while they run. No server: a key-value store.

Every rank knows the whole list of a round. What is agreed on are counters in the store that
torch.distributed has anyway:

    next      how many requests have been taken beyond the first share of every engine, which is a
              consecutive part of the list; an engine adds to it, and what it added is its
    done      how many have ended
    log       2 * (number of changes of weights) + (1 once the round is over)
    load/E    requests inside engine E, once all are taken
    ask/E     what another engine asks of E: "thief:number:load"; "" when it is free to be asked
    gift/T/N  what engine T got for its ask number N: half of the difference, as handover.pack

An engine runs in bursts of a few steps. Between two of them its leader (tensor-parallel rank 0)
reads the log, takes requests, gives, or asks the engine with the most left when it has little
itself. The decision goes to the other ranks of the group as one broadcast. Requests move as
continuations, so whoever ends an answer, it is the same answer.

Only engine 0 writes to the log, and an engine leaves the round only when the log says so. So all
engines change weights at the same point of the log, whenever each of them gets there.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.answer_codec import pack, pick, resume, unpack
from spmdrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams
from spmdrl.rollout.rng import preserved_rng
from spmdrl.rollout.scheduler_messages import (
    Decision,
    NoReplies,
    ReplyHandler,
    RoundResult,
    StopCondition,
)

BURST_S = 0.06  # between two decisions
MAX_STEPS = 32  # per burst
IDLE_S = 0.004  # between two looks into the store with nothing to do
FAILED = 1 << 40  # in the log: an engine raised
WITHDRAWN = "withdrawn"  # in a mailbox: the engine that asked has left the round
MOST_ASKED = 8  # engines whose load is looked up, however many there are


class Scheduler:
    """One per rank and run; `run` is called any number of times."""

    def __init__(self, engine: RolloutEngine, topology: Topology, static: bool = False) -> None:
        """Collective over `topology`, whose axes are dp (engines) and tp.

        static: every engine keeps its part of the list, so that what else is in a batch does not
        depend on how fast each engine is. vLLM on CPUs gives every answer bit for bit whatever else
        is in a batch; elsewhere the last bits of a logprob depend on it.
        """
        self.engine, self.topology, self.static = engine, topology, static
        self.tp_group = topology.mesh.get_group("tp")
        self.tp_size, self.is_leader = topology.axis_size("tp"), topology.axis_rank("tp") == 0
        self.number, self.num_engines = topology.axis_rank("dp"), topology.axis_size("dp")
        self.rounds, self.num_stolen = 0, 0  # so far; requests that this engine took over
        # torchrun's store outlives a crash: what an earlier attempt left there has another name
        nonce = torch.tensor(list(secrets.token_bytes(8)))
        dist.broadcast(nonce, group=topology.control, group_src=0)
        self.prefix = f"rollout/{bytes(nonce.tolist()).hex()}"
        self.store: Any = dist.HashStore()
        if self.num_engines > 1:
            # a connection of its own, since calls on a store block each other
            shared: Any = dist.distributed_c10d._get_default_store()
            self.store = shared.clone()

    def run(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        goal: StopCondition | None = None,
        *,
        others: ReplyHandler | None = None,
        between_bursts: Callable[[], None] = lambda: None,
        new_weights: Callable[[], bool] = lambda: False,
        load_weights: Callable[[], None] = lambda: None,
        until: Callable[[], bool] | None = None,
    ) -> RoundResult:
        """Completes the requests, the same list on every rank. Collective over the topology.

        until: asked on the leaders between bursts; once it has been True on each of them the round
        ends, and what is not finished is in Outcome.unfinished.

        others: on leaders; None: an answer has one turn.
        between_bursts: called on every rank after each burst that got on. new_weights: on rank 0
        at each of its boundaries; where it returns True, load_weights is called on every rank of
        every engine, at its next boundary and before the round is over. It replaces the weights,
        which makes the engine forget_prefixes, and sets engine.policy_version.
        """
        self.rounds += 1
        store = dist.PrefixStore(f"{self.prefix}/{self.rounds}", self.store)
        desk = None
        if self.is_leader:
            desk = EngineCoordinator(
                self,
                store,
                len(requests),
                goal or StopCondition(),
                new_weights,
                NoReplies() if others is None else others,
                until,
            )
        over = False
        try:
            outcome = self.work(desk, requests, params, between_bursts, load_weights)
            over = True
        finally:
            if desk is not None and not over:
                desk.raise_alarm()
        check_each_once(outcome, len(requests), self.topology)
        if desk is not None:
            self.num_stolen += desk.num_stolen
            desk.clear()
        return outcome

    def work(
        self,
        desk: EngineCoordinator | None,
        requests: Sequence[Request],
        params: SamplingParams,
        between_bursts: Callable[[], None],
        load_weights: Callable[[], None],
    ) -> RoundResult:
        """This engine's part of a round."""
        engine = self.engine
        positions: dict[int, int] = {}  # by engine id, of what is inside
        assert not engine.num_running + engine.num_waiting, "requests are still in the engine"
        engine.forget_prefixes()
        while True:
            decision = self.agree(None if desk is None else desk.decide(list(positions)))
            for _ in range(decision.loads):
                load_weights()
            give = list(positions) if decision.stop else decision.give
            aborted = engine.abort(give)
            partial = {positions.pop(id): c for id, c in zip(give, aborted, strict=True)}
            if decision.stop:
                return RoundResult() if desk is None else desk.leave(partial, requests)
            if desk is not None:
                desk.hand_over(partial)
            fresh = range(decision.first, decision.first + decision.count)
            asked = {i: requests[i] for i in fresh}
            for i, begun in decision.taken.items():
                asked[i] = resume(requests[i], begun)
            waiting = [i for i, request in asked.items() if request.awaits_reply]
            if desk is not None:
                desk.turns_ended({i: asked[i].begun() for i in waiting})
            for i in waiting:
                del asked[i]
            if asked:
                positions |= zip(engine.add(list(asked.values()), params), asked, strict=True)
            if not positions:
                if desk is not None:
                    if desk.heard:
                        between_bursts()  # others get on
                    time.sleep(IDLE_S * (1 + self.num_engines / 8))  # one server answers them all
                continue
            started_at = time.perf_counter()
            num_steps, ended = self.burst(decision, positions)
            if num_steps:
                between_bursts()
            if desk is not None:
                desk.took(num_steps, time.perf_counter() - started_at)
                desk.turns_ended(ended)

    def burst(
        self, decision: Decision, positions: dict[int, int]
    ) -> tuple[int, dict[int, Completion]]:
        """Runs at most decision.num_steps engine steps; returns how many, and what ended, taken
        from `positions`.
        """
        ended: dict[int, Completion] = {}
        num_steps, fewest = 0, max(decision.refill_below, 1)
        with preserved_rng():
            while num_steps < decision.num_steps and len(positions) >= fewest:
                for id, completion in self.engine.step():
                    ended[positions.pop(id)] = completion
                num_steps += 1
        return num_steps, ended

    def agree(self, decision: Decision | None) -> Decision:
        """The leader's decision, on every rank of its engine."""
        if self.tp_size == 1:
            assert decision is not None
            return decision
        words = torch.zeros(64, dtype=torch.int64)  # long enough for nearly every decision
        packed = None if decision is None else torch.from_numpy(decision.to_words())
        if packed is not None:
            words[: len(packed)] = packed[:64]
        dist.broadcast(words, group=self.tp_group, group_src=0)
        length = int(words[0])
        if length > 64:
            words = torch.empty(length, dtype=torch.int64) if packed is None else packed
            dist.broadcast(words, group=self.tp_group, group_src=0)
        return Decision.from_words(words[:length].numpy())


class EngineCoordinator:
    """Coordinates the engines for one round: here an engine's leader meets the others."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: dist.Store,
        num_requests: int,
        goal: StopCondition,
        new_weights: Callable[[], bool],
        others: ReplyHandler,
        until: Callable[[], bool] | None = None,
    ) -> None:
        self.until, self.has_said = until, False  # that `until` is True here
        self.store: Any = store  # its stub knows no bytes
        self.num_requests, self.goal = num_requests, goal
        self.engine, self.me = scheduler.engine, scheduler.number
        self.num_engines, self.new_weights = scheduler.num_engines, new_weights
        self.steals = self.num_engines > 1 and not scheduler.static
        most = self.engine.max_num_seqs
        # as many wait as run, so that a free place is taken without a look into the store; what
        # waits is the first to be given away. All of them where there is no one to share with.
        self.capacity = 2 * most if self.steals else num_requests
        share = min(math.ceil(num_requests / self.num_engines), self.capacity)
        self.first_taken = min(share * self.num_engines, num_requests)
        start = min(share * self.me, num_requests)
        self.own = range(start, min(start + share, num_requests))
        self.done = 0  # over all engines, as last seen
        self.unreported = 0  # ended here, and not yet added to it
        self.all_taken = False  # as far as is known here
        self.num_loads = 0
        self.load = 0  # as the others know it
        self.num_looks = 0  # for an engine to ask
        self.num_asks, self.asked = 0, ""  # the ask that is open: its key and value
        self.asked_of = 0
        self.gift = ""
        self.num_steps = 1  # of the next burst
        self.others = others
        self.heard = False  # of one of them, since the last look
        self.resumed: dict[int, Completion] = {}  # to go on, with replies
        self.outcome = RoundResult()
        self.num_stolen = 0

    def decide(self, ids: list[int]) -> Decision:
        """ids: of what is inside the engine, in the order it was added."""
        decision = Decision(num_steps=self.num_steps)
        self.hear()
        if self.unreported or self.me == 0 or not self.all_taken:
            self.done = self.store.add("done", self.unreported)
            self.unreported = 0
            PROGRESS.count(self.done, self.num_requests, "answers")
        log = self.read_log()
        decision.loads, self.num_loads = log // 2 - self.num_loads, log // 2
        decision.stop = bool(log & 1)
        if decision.stop:
            return decision
        taken, self.resumed = self.resumed, {}
        inside = len(ids) + len(taken)
        if not self.all_taken:
            fresh = self.take(inside, len(self.others))
            decision.first, decision.count = fresh.start, len(fresh)
            inside += len(fresh)
        if self.all_taken and self.steals:
            gift = self.collect()
            self.num_stolen += len(gift)
            taken |= gift
            inside += len(gift)
            self.publish(inside)
            decision.give = self.serve(ids)
            if self.asked == "":
                self.ask()
        decision.taken = taken
        if not self.all_taken:
            decision.refill_below = min(self.engine.max_num_seqs, math.ceil(0.8 * inside))
        return decision

    def took(self, num_steps: int, seconds: float) -> None:
        """Sets the length of the next burst by that of the last one."""
        if num_steps:
            wanted = int(BURST_S * num_steps / max(seconds, 1e-6))
            self.num_steps = min(max(wanted, 1), 2 * self.num_steps, MAX_STEPS)

    def read_log(self) -> int:
        """Engine 0 first writes what there is to be told. Raises where another engine failed."""
        if self.until is not None and not self.has_said and self.until():
            self.has_said = True
            self.store.add("until", 1)
        if self.me == 0:
            if self.is_over():
                self.store.add("log", 1)
            elif self.new_weights():
                self.store.add("log", 2)
        log = self.store.add("log", 0)
        if log >= FAILED:
            raise RuntimeError("another rollout engine failed; its own rank says why")
        return log

    def is_over(self) -> bool:
        if self.has_said and self.store.add("until", 0) == self.num_engines:
            return True
        if self.goal.enough is None:
            return self.done == self.num_requests
        return self.store.add("complete", 0) >= self.goal.enough

    def take(self, inside: int, awaiting: int = 0) -> range:
        """Fresh requests: at first this engine's share, neighbours in the list, which are samples
        of one prompt. Then as many as fit, and no more than a fair share of what is left."""
        if self.own:
            fresh, self.own = self.own, range(0)
            self.all_taken = self.first_taken == self.num_requests
            return fresh
        share = math.ceil((self.num_requests - self.done) / self.num_engines)
        # what awaits a reply leaves its place to others, and is part of this engine's share
        wanted = max(min(self.capacity, share - awaiting) - inside, 0)
        # also where nothing is wanted: a full engine that did not hear that the list is empty
        # would never be asked for what it has
        end = self.first_taken + self.store.add("next", wanted)
        self.all_taken = end >= self.num_requests
        return range(min(end - wanted, self.num_requests), min(end, self.num_requests))

    def hear(self) -> None:
        """Takes the replies that have come."""
        over: dict[int, Completion] = {}
        came = self.others.came()
        self.heard = bool(came)
        for position, answer in came.items():
            goes_on = answer.finish_reason == "abort"
            (self.resumed if goes_on else over)[position] = answer
        self.ended(over)

    def turns_ended(self, turns: dict[int, Completion]) -> None:
        """Answers that are over, unless the others have something to say to them."""
        self.ended({i: turn for i, turn in turns.items() if not self.others.ask(i, turn)})

    def ended(self, answers: dict[int, Completion]) -> None:
        self.outcome.finished |= answers
        self.unreported += len(answers)
        if self.goal.enough is None:
            return
        for position in answers:
            group = self.goal.groups[position]
            if self.store.add(f"group/{group}", 1) == self.goal.missing[group]:
                self.store.add("complete", 1)

    # stealing

    def publish(self, load: int) -> None:
        if load != self.load:
            self.store.add(f"load/{self.me}", load - self.load)
            self.load = load

    def ask(self) -> None:
        """Asks the engine with the most left, if that is more than twice as much as here."""
        others = [e for e in range(self.num_engines) if e != self.me]
        # a sample of a large job will do; drawn from a generator of its own
        self.num_looks += 1
        others = random.Random(self.num_looks * self.num_engines + self.me).sample(
            others, min(len(others), MOST_ASKED)
        )
        loads = {e: self.store.add(f"load/{e}", 0) for e in others}
        most = max(others, key=loads.__getitem__)
        if loads[most] <= 2 * self.load + 1:
            return
        wish = f"{self.me}:{self.num_asks + 1}:{self.load}"
        if self.store.compare_set(f"ask/{most}", "", wish).decode() == wish:
            self.num_asks += 1
            self.asked, self.asked_of = wish, most

    def collect(self) -> dict[int, Completion]:
        """Returns what came for the ask that is open, if it has come."""
        key = f"gift/{self.me}/{self.num_asks}"
        if self.asked == "" or not self.store.check([key]):
            return {}
        gift = self.store.get(key)
        self.store.delete_key(key)
        self.asked = ""
        return unpack(gift)

    def serve(self, ids: list[int]) -> list[int]:
        """Returns what to give to the engine that asks: half of the difference."""
        mailbox = f"ask/{self.me}"
        wish = self.store.compare_set(mailbox, "", "").decode()
        if wish in ("", WITHDRAWN):
            return []
        if self.store.compare_set(mailbox, wish, "served").decode() != "served":
            return []
        thief, number, load = wish.split(":")
        self.gift = f"gift/{thief}/{number}"
        return pick(ids, max(len(ids) - int(load), 0) // 2, self.engine.num_waiting)

    def hand_over(self, partial: dict[int, Completion]) -> None:
        """Sends what `serve` chose, also where it is nothing: the other may then ask elsewhere."""
        if self.gift:
            self.store.set(self.gift, pack(partial))
            self.store.set(f"ask/{self.me}", "")
            self.gift = ""

    # the end

    def leave(self, partial: dict[int, Completion], requests: Sequence[Request]) -> RoundResult:
        """partial: what was inside the engine. What never got into it is unfinished too: fresh
        requests, to engine 0 those that nobody took; a gift that is on its way; and what waits for
        a reply, or has just got one."""
        untaken, gift = list(self.own), {}
        if self.me == 0:
            end = self.first_taken + self.store.add("next", self.num_requests)
            untaken += range(end - self.num_requests, self.num_requests)
        if self.asked:
            mailbox = f"ask/{self.asked_of}"
            if self.store.compare_set(mailbox, self.asked, WITHDRAWN).decode() != WITHDRAWN:
                self.store.wait([f"gift/{self.me}/{self.num_asks}"])
                gift = self.collect()
        begun = {i: requests[i].begun() for i in untaken}
        self.outcome.unfinished = partial | gift | begun | self.resumed | self.others.give_up()
        return self.outcome

    def raise_alarm(self) -> None:
        with suppress(dist.DistNetworkError, dist.DistStoreError):  # the store may be what failed
            self.store.add("log", FAILED)

    def clear(self) -> None:
        """Deletes the round's keys, once nobody reads them any more."""
        if self.num_engines == 1 or self.me == 0:
            groups = self.goal.missing if self.goal.enough is not None else ()
            for key in (
                "next",
                "done",
                "log",
                "complete",
                "until",
                *(f"group/{g}" for g in groups),
            ):
                self.store.delete_key(key)
        self.store.delete_key(f"load/{self.me}")
        self.store.delete_key(f"ask/{self.me}")


def check_each_once(outcome: RoundResult, num_requests: int, topology: Topology) -> None:
    """Checks that no request was lost and none answered twice. Collective: the round's last
    meeting.
    """
    counts = torch.zeros(num_requests, dtype=torch.int32)
    for position in [*outcome.finished, *outcome.unfinished]:
        counts[position] += 1
    dist.all_reduce(counts, group=topology.control)
    wrong = (counts != 1).nonzero().flatten().tolist()
    assert not wrong, f"requests {wrong[:8]} came out {counts[wrong[:8]].tolist()} times, not once"
