"""Shares a round of requests out over the rollout engines.

Every rank knows the whole list of a round. An engine runs in bursts of a few steps. Between two
bursts the coordinator on its leader (tensor-parallel rank 0) decides which requests it takes,
whether it loads new weights, and whether the round is over. The decision is broadcast to the other
ranks of the engine. A request stays in the engine that took it. A single engine on one rank, whose
answers end with their first turn, has nothing to agree on: it takes all requests at once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import default_store
from spmdrl.rollout.base import Completion, Request, RolloutEngine, SamplingParams
from spmdrl.rollout.coordinator import EngineCoordinator
from spmdrl.rollout.engine_calls import EngineCalls
from spmdrl.rollout.rng import preserved_rng
from spmdrl.rollout.scheduler_messages import (
    Decision,
    NoReplies,
    ReplyHandler,
    RoundResult,
    StopCondition,
    broadcast_decision,
    free_positions,
)

IDLE_S = 0.004  # between two decisions of an engine that has nothing to do


class Scheduler:
    """One per rank and run; `run` is called any number of times."""

    def __init__(self, engine: RolloutEngine, topology: Topology, static: bool = False) -> None:
        """Collective over `topology`, whose axes are dp (engines) and tp.

        static: each engine answers a fixed part of the list, so that what else is in a batch does
        not depend on how fast each engine is. vLLM on CPUs gives every answer bit for bit whatever
        else is in a batch; elsewhere the last bits of a logprob depend on it.
        """
        self.engine, self.topology, self.static = engine, topology, static
        self.tp_group = topology.mesh.get_group("tp")
        self.tp_size, self.is_leader = topology.axis_size("tp"), topology.axis_rank("tp") == 0
        self.number, self.num_engines = topology.axis_rank("dp"), topology.axis_size("dp")
        self.rounds = 0  # so far
        # torchrun's store outlives a crash: what an earlier attempt left there has another name
        nonce = torch.tensor(list(secrets.token_bytes(8)))
        dist.broadcast(nonce, group=topology.control, group_src=0)
        self.prefix = f"rollout/{bytes(nonce.tolist()).hex()}"
        self.store: Any = dist.HashStore()
        if self.num_engines > 1:
            # a connection of its own, since calls on a store block each other
            self.store = default_store().clone()

    def run(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        stop_condition: StopCondition | None = None,
        *,
        reply_handler: ReplyHandler | None = None,
        between_bursts: Callable[[], None] = lambda: None,
        new_weights: Callable[[], bool] | None = None,
        load_weights: Callable[[], None] = lambda: None,
        until: Callable[[], bool] | None = None,
    ) -> RoundResult:
        """Completes the requests, the same list on every rank. Collective over the topology.

        until: asked on the leaders between bursts. Once it has been True on each of them the round
        ends, and what is not finished is in RoundResult.unfinished.

        reply_handler: on leaders; None: an answer has one turn. stop_condition: None: the round
        ends with the last request.
        between_bursts: called on every rank after each burst in which a step was made, and by an
        engine that completes its requests alone after each step; it draws no random numbers.
        new_weights: on rank 0 at each of its boundaries; where it returns True, load_weights is
        called on every rank of every engine, at its next boundary and before the round is over. It
        replaces the weights, which makes the engine forget_prefixes, and sets
        engine.policy_version.
        """
        interventions = stop_condition, reply_handler, new_weights, until
        if self.topology.world == 1 and all(each is None for each in interventions):
            return complete_alone(self.engine, requests, params, between_bursts)
        self.rounds += 1
        store = dist.PrefixStore(f"{self.prefix}/{self.rounds}", self.store)
        coordinator = None
        if self.is_leader:
            coordinator = EngineCoordinator(
                store,
                self.engine,
                self.number,
                self.num_engines,
                requests,
                stop_condition or StopCondition(),
                NoReplies() if reply_handler is None else reply_handler,
                new_weights or (lambda: False),
                until,
                self.static,
            )
        over = False
        try:
            result = self.work(coordinator, requests, params, between_bursts, load_weights)
            over = True
        finally:
            if coordinator is not None and not over:
                coordinator.raise_alarm()
        check_each_once(result, len(requests), self.topology)
        if coordinator is not None:
            coordinator.clear()
        return result

    def work(
        self,
        coordinator: EngineCoordinator | None,
        requests: Sequence[Request],
        params: SamplingParams,
        between_bursts: Callable[[], None],
        load_weights: Callable[[], None],
    ) -> RoundResult:
        """Runs this engine's part of a round. coordinator: on the leader."""
        engine = self.engine
        positions: dict[int, int] = {}  # by engine id, of the requests inside the engine
        calls: dict[int, int] = {}  # by engine id, the numbers of agents' calls inside the engine
        free = free_positions(requests)
        assert not engine.num_running + engine.num_waiting, "requests are still in the engine"
        engine.forget_prefixes()
        while True:
            decision = None if coordinator is None else coordinator.decide(len(positions))
            decision = broadcast_decision(decision, self.tp_group, self.tp_size)
            for _ in range(decision.loads):
                load_weights()
            if decision.stop:
                aborted = engine.abort([*positions, *calls])
                if coordinator is None:
                    return RoundResult()
                partial, paused = aborted[: len(positions)], aborted[len(positions) :]
                coordinator.pause_calls(dict(zip(calls.values(), paused, strict=True)))
                return coordinator.end(dict(zip(positions.values(), partial, strict=True)))
            self.take_calls(decision.calls, calls)
            ready, waiting = decision.requests_from(requests, free)
            if coordinator is not None:
                coordinator.finish_turns(waiting)
            if ready:
                positions |= zip(engine.add(list(ready.values()), params), ready, strict=True)
            if not positions and not calls:
                if coordinator is not None:
                    if coordinator.got_replies:
                        between_bursts()
                    time.sleep(IDLE_S * (1 + self.num_engines / 8))  # one server answers them all
                continue
            started_at = time.perf_counter()
            interrupted = self.interruption(coordinator)
            num_steps, ended, ended_calls = self.burst(decision, positions, calls, interrupted)
            if num_steps:
                between_bursts()
            if coordinator is not None:
                coordinator.set_burst_length(num_steps, time.perf_counter() - started_at)
                coordinator.finish_turns(ended)
                coordinator.end_calls(ended_calls)

    def take_calls(self, new: EngineCalls, calls: dict[int, int]) -> None:
        """Takes agents' calls out of the engine that were given up, and adds new ones to it."""
        lost = [id for id, number in calls.items() if number in new.given_up]
        self.engine.abort(lost)
        for id in lost:
            del calls[id]
        for number, call in new.begun.items():
            (id,) = self.engine.add([call.request], call.params)
            calls[id] = number

    def interruption(self, coordinator: EngineCoordinator | None) -> Callable[[], bool]:
        """Returns what ends a burst early: a call of an agent, where this rank decides alone."""
        if coordinator is None or self.tp_size > 1:
            return lambda: False
        return coordinator.reply_handler.has_calls

    def burst(
        self, decision: Decision, positions: dict[int, int], calls: dict[int, int],
        interrupted: Callable[[], bool],
    ) -> tuple[int, dict[int, Completion], dict[int, Completion]]:  # fmt: skip
        """Runs at most decision.num_steps engine steps.

        Returns the number of steps, the turns that ended by position, and the calls that ended by
        number; they are taken out of `positions` and `calls`.
        """
        ended: dict[int, Completion] = {}
        ended_calls: dict[int, Completion] = {}
        num_steps, fewest = 0, max(decision.refill_below, 1)
        with preserved_rng():
            while num_steps < decision.num_steps and len(positions) + len(calls) >= fewest:
                for id, completion in self.engine.step():
                    if id in positions:
                        ended[positions.pop(id)] = completion
                    else:
                        ended_calls[calls.pop(id)] = completion
                num_steps += 1
                if interrupted():
                    break
        return num_steps, ended, ended_calls


def complete_alone(
    engine: RolloutEngine,
    requests: Sequence[Request],
    params: SamplingParams,
    between_steps: Callable[[], None],
) -> RoundResult:
    """Completes the requests on the only engine, of one rank, with nobody to reply or to stop it.

    between_steps: called after each engine step. It draws no random numbers, as those of the
    process are set back behind the last step.
    """
    assert not engine.num_running + engine.num_waiting, "requests are still in the engine"
    engine.forget_prefixes()
    result = RoundResult()
    positions = {id: i for i, id in enumerate(engine.add(requests, params))}
    with preserved_rng():
        while positions:
            for id, completion in engine.step():
                result.finished[positions.pop(id)] = completion
            PROGRESS.count(len(result.finished), len(requests), "answers")
            between_steps()
    return result


def check_each_once(result: RoundResult, num_requests: int, topology: Topology) -> None:
    """Checks that no request was lost and none answered twice. Collective; it ends the round."""
    counts = torch.zeros(num_requests, dtype=torch.int32)
    for position in [*result.finished, *result.unfinished]:
        counts[position] += 1
    dist.all_reduce(counts, group=topology.control)
    wrong = (counts != 1).nonzero().flatten().tolist()
    assert not wrong, f"requests {wrong[:8]} came out {counts[wrong[:8]].tolist()} times, not once"
