"""The private APIs of torch.distributed.elastic (torchrun) that the launcher uses.

Checked with torch 2.13.0. When torch moves, tests/distributed/test_elastic_compat.py says
which of these broke.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous import api as rendezvous_api
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    _RendezvousExitOp,
)
from torch.distributed.elastic.rendezvous.utils import (
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import parse_args, parse_min_max_nnodes

# torchrun's own, before they are replaced
_monitor_workers = LocalElasticAgent._monitor_workers
_start_workers = LocalElasticAgent._start_workers
_run = LocalElasticAgent.run
_shutdown = DynamicRendezvousHandler.shutdown

LEAVE_S = 5.0  # for the rendezvous to note that a host leaves


def observe_ranks(agent: Any, group: Any) -> Any:
    """Returns what torchrun's agent sees of its ranks: a RunResult. Calls the original
    LocalElasticAgent._monitor_workers.
    """
    return _monitor_workers(agent, group)


def replace_monitor(monitor: Callable[[Any, Any], Any]) -> None:
    """Has every agent ask monitor(agent, group) how its ranks are, ten times a second. Replaces
    LocalElasticAgent._monitor_workers.
    """
    agent: Any = LocalElasticAgent
    agent._monitor_workers = lambda *args: monitor(*args)


def forbid_restarts(agent: Any) -> None:
    """Makes the agent end the job at the next failure. Writes its _remaining_restarts."""
    agent._remaining_restarts = 0


def allow_restart(agent: Any) -> None:
    """Lets the agent start its ranks once more than before. Writes its _remaining_restarts."""
    agent._remaining_restarts += 1


def announce_starts(hear: Callable[[Any, Any], None]) -> None:
    """Has every agent call hear(agent, group) when the hosts have met, before it starts its ranks.
    Replaces LocalElasticAgent._start_workers.
    """

    def start(agent: Any, group: Any) -> Any:
        hear(agent, group)
        return _start_workers(agent, group)

    replaced: Any = LocalElasticAgent
    replaced._start_workers = start


def block_signal_in_ranks(number: signal.Signals) -> None:
    """Has every agent start its ranks with the signal blocked: it waits until they unblock it.
    Replaces LocalElasticAgent._start_workers.
    """
    replaced: Any = LocalElasticAgent
    start_before = replaced._start_workers  # announce_starts may have replaced it, too

    def start(agent: Any, group: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])  # of this thread; a child inherits it
        try:
            return start_before(agent, group)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])

    replaced._start_workers = start


class JobDone(Exception):
    """The ranks that were to be stopped have done all that they had to do."""


def announce_stops(hear: Callable[[], None], is_done: Callable[[list[int | None]], bool]) -> None:
    """Has every agent call hear() before it stops its ranks to start them again, for which they
    have the time of --shutdown-timeout; torchrun would kill them after 30 s. Where is_done(their
    exit codes) it raises JobDone, as soon as the other hosts' ranks are done too. Replaces
    LocalElasticAgent._stop_workers, which calls _shutdown; reads _shutdown_timeout, and calls
    _exit_barrier.
    """

    def stop(agent: Any, _: Any) -> None:
        hear()
        agent._shutdown(timeout=agent._shutdown_timeout)
        if is_done([rank.poll() for rank in rank_processes(agent)]):
            agent._exit_barrier()
            raise JobDone

    replaced: Any = LocalElasticAgent
    replaced._stop_workers = stop


class NotNeeded(Exception):
    """The job has ended while this host waited for a place in it, beyond the most that it takes."""


def tell_hosts_that_are_not_needed() -> None:
    """Has agents raise NotNeeded, where torchrun's would end with an AttributeError of its own.
    Replaces LocalElasticAgent.run, which then returns None in place of a RunResult.
    """

    def run(agent: Any, *args: Any) -> Any:
        result = _run(agent, *args)
        if result is None:
            raise NotNeeded
        return result

    replaced: Any = LocalElasticAgent
    replaced.run = run


def is_dynamic(handler: Any) -> bool:
    """Whether hosts may meet more than once, as with --rdzv-backend c10d."""
    return isinstance(handler, DynamicRendezvousHandler)


def rendezvous_round(handler: Any) -> int:
    """Returns how often the hosts had met before they met the last time. Reads the handler's
    _state_holder.
    """
    return int(handler._state_holder.state.round)


def members(handler: Any) -> frozenset[Any]:
    """Returns the hosts that have met and have not left, as the handler knew when it last asked the
    rendezvous; num_nodes_waiting asks it. A launcher is the same member for as long as it lives.
    Reads the handler's _state_holder.
    """
    return frozenset(handler._state_holder.state.participants)


def name_job(handler: Any) -> str:
    """Returns a name that all hosts of this rendezvous agree on, now and later: what the first that
    asks draws. Uses the handler's _store, of which every kind has these methods; that of etcd-v2
    has no compare_set.
    """
    key, store = f"spmdrl/job/{handler.get_run_id()}", handler._store
    if store.add(f"{key}/asked", 1) == 1:
        store.set(key, secrets.token_hex(8))
    return bytes(store.get(key)).decode()


def leave_rendezvous(handler: Any) -> None:
    """Takes this host off those that have met. Runs a _RendezvousExitOp on the _op_executor.

    Raises RendezvousError where the rendezvous does not answer.
    """
    handler._stop_heartbeats()
    handler._op_executor.run(_RendezvousExitOp(), time.monotonic() + LEAVE_S)


def replace_shutdown(shut_down: Callable[[Any], bool]) -> None:
    """Has the launcher call shut_down(handler) when it ends, except by a signal. Replaces
    DynamicRendezvousHandler.shutdown.
    """
    replaced: Any = DynamicRendezvousHandler
    replaced.shutdown = lambda handler: shut_down(handler)


def close_rendezvous(handler: Any) -> bool:
    """Closes the rendezvous for all hosts, as torchrun does when a launcher ends. Calls the
    original DynamicRendezvousHandler.shutdown.
    """
    return _shutdown(handler)


def rank_processes(agent: Any) -> list[Any]:
    """Returns the subprocess.Popen of each rank that this agent has started; none before it has.
    Reads the agent's _pcontext, a SubprocessContext, and its subprocess_handlers.
    """
    context = agent._pcontext
    return [] if context is None else [rank.proc for rank in context.subprocess_handlers.values()]


def rank_pids(agent: Any) -> list[int]:
    """Returns the process ids of the ranks that this agent has started; none before it has. Reads
    the agent's _pcontext.
    """
    return list(agent._pcontext.pids().values()) if agent._pcontext else []


def replace_free_port(choose: Callable[[], int]) -> None:
    """Has torchrun ask `choose` for the port of the job's store. Replaces get_free_port in
    elastic.rendezvous.api.
    """
    rendezvous_api.get_free_port = choose


def parse_rendezvous_config(text: str) -> dict[str, str]:
    """Reads torchrun's --rdzv-conf: "a=1,b=2" -> {"a": "1", "b": "2"}. Calls
    elastic.rendezvous.utils._parse_rendezvous_config.
    """
    return _parse_rendezvous_config(text)


def parse_endpoint(text: str, default_port: int) -> tuple[str, int]:
    """Reads torchrun's --rdzv-endpoint: "host:29400" -> (host, port). Calls
    elastic.rendezvous.utils.parse_rendezvous_endpoint.
    """
    return parse_rendezvous_endpoint(text, default_port)


def parse_options(arguments: list[str]) -> Any:
    """Reads torchrun's command line into a namespace. Calls torch.distributed.run.parse_args."""
    return parse_args(arguments)


def parse_num_nodes(text: str) -> tuple[int, int]:
    """Reads torchrun's --nnodes, "2" or "1:4", into the fewest and the most. Calls
    torch.distributed.run.parse_min_max_nnodes.
    """
    return parse_min_max_nnodes(text)
