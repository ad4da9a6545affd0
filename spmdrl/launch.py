"""torchrun, with an exit code that says what to do next.

    python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

takes torchrun's options and does what it does; but torchrun exits with 1 whatever its ranks said.
This exits with the code of the rank that failed first: 1 a failure that a restart may cure, 2 a
mistake in the config or the data, 75 stopped by a signal after a checkpoint: start it again. With
--max-restarts, only failures are started again. On several nodes it also finds the address under
which the others reach this one, which host names often do not say, and ends where another node's
launcher has ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousConnectionError
from torch.distributed.elastic.rendezvous.utils import (
    _parse_rendezvous_config,
    parse_rendezvous_endpoint,
)
from torch.distributed.run import main as torchrun
from torch.distributed.run import parse_args, parse_min_max_nnodes

from spmdrl.addresses import address_towards, addresses_of, interface_of
from spmdrl.exits import BAD_CONFIG, FAILED, INTERRUPTED, REQUEUE

FINAL = (BAD_CONFIG, REQUEUE, INTERRUPTED)
HEAD_S = 600.0  # as long as torchrun waits for the nodes to meet
LAST_WORDS_S = 30.0  # for ranks whose peers on another node have ended: to notice it, and say so
HELD_UP_S = 4.0  # a launcher looks after its ranks ten times a second
watch_ranks = LocalElasticAgent._monitor_workers


class Watch:
    """What torchrun's agent sees of its ranks, and what it would overlook."""

    def __init__(self) -> None:
        self.seen_at = time.monotonic()
        self.closed_at = 0.0
        self.agent: Any = None
        self.guard: threading.Thread | None = None

    def __call__(self, agent: Any, group: Any) -> Any:
        """In place of LocalElasticAgent._monitor_workers. What no restart cures takes them away.

        Raises RendezvousClosedError where another node's launcher ended some time ago: ranks that
        still wait to meet its ranks would wait for ever.
        """
        self.agent = agent
        if self.guard is None:
            self.guard = threading.Thread(target=self._guard, args=(agent, group), daemon=True)
            self.guard.start()
        self.seen_at = now = time.monotonic()
        seen = watch_ranks(agent, group)
        if exit_code_of(seen.failures) in FINAL:
            agent._remaining_restarts = 0
        several = seen.state == WorkerState.HEALTHY and group.group_world_size > 1
        if several and group.spec.rdzv_handler.is_closed():
            self.closed_at = self.closed_at or now
            if now - self.closed_at > LAST_WORDS_S:
                raise RendezvousClosedError
        return seen

    def code_after(self, number: signal.Signals) -> int:
        """Of ranks that torchrun has told of the signal, and given time to end."""
        context = self.agent._pcontext if self.agent is not None else None
        ranks = context.subprocess_handlers.values() if context is not None else ()
        codes = [rank.proc.poll() for rank in ranks]
        for code in (BAD_CONFIG, FAILED, REQUEUE, INTERRUPTED):
            if code in codes:
                return code
        if codes and all(code == 0 for code in codes):  # None: it still runs
            return 0  # they were done
        return INTERRUPTED if number == signal.SIGINT else REQUEUE

    def _guard(self, agent: Any, group: Any) -> None:
        """Ends a launcher whose ranks have all ended, but which is held up by a store that is cut
        off, each call on which takes a minute to fail."""
        running = (WorkerState.HEALTHY, WorkerState.UNHEALTHY, WorkerState.FAILED)
        gone_at = None
        while True:
            time.sleep(1.0)
            held_up = time.monotonic() - self.seen_at > HELD_UP_S and group.state in running
            ranks = agent._pcontext.pids().values() if agent._pcontext else ()
            codes = [exit_status(pid) for pid in ranks]
            if not held_up or None in codes or not any(codes):
                gone_at = None
            elif gone_at is None:
                gone_at = time.monotonic()
            elif time.monotonic() - gone_at > HELD_UP_S:
                say("all ranks here have ended, and the rendezvous does not answer")
                os._exit(next((code for code in FINAL if code in codes), FAILED))


def exit_status(pid: int) -> int | None:
    """How a child ended, which is left for torchrun to see; None: it runs."""
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torchrun has seen it already, and was held up later
        return FAILED
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def say(what: str) -> None:
    print(f"\nspmdrl: {socket.gethostname()}: {what}", file=sys.stderr, flush=True)


def exit_code_of(failures: Mapping[int, ProcessFailure]) -> int:
    """Of the rank that failed first: the others are ended with it."""
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode in FINAL else FAILED


def wait_for_head(host: str, port: int) -> None:
    """Until the head listens. Raises RendezvousConnectionError where it does not in HEAD_S."""
    end = time.monotonic() + HEAD_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                late = f"nobody listens at {host}:{port} after {HEAD_S:.0f} s: {error}"
                raise RendezvousConnectionError(late) from error
        time.sleep(0.2)


def meet_other_nodes(arguments: list[str]) -> list[str]:
    """Options for torchrun, and the environment for gloo, by which other nodes find this one.

    Waits for the node that the rendezvous is on: torchrun would give it a minute, which machines
    that are started by hand, or that pull an image first, do not keep.
    """
    options = parse_args(arguments)
    if parse_min_max_nnodes(options.nnodes)[1] == 1 and options.rdzv_backend != "c10d":
        return []  # torchrun takes 127.0.0.1
    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    host, port = parse_rendezvous_endpoint(endpoint, 29400)
    own = options.local_addr or address_towards(host, port)
    interface = interface_of(own) if own else None
    if interface:  # else gloo takes the address of the host's name, which may be a loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    known = ["--local-addr", own] if own else []
    if options.rdzv_backend != "c10d":
        return known
    said = _parse_rendezvous_config(options.rdzv_conf).get("is_host")
    is_head = host == socket.gethostname() or any(map(interface_of, addresses_of(host)))
    if said is not None:
        is_head = said.lower() in ("1", "true", "t", "yes", "y")
    elif not options.rdzv_conf and not addresses_of(socket.gethostname()):
        known += ["--rdzv-conf", f"is_host={int(is_head)}"]  # torchrun fails to find out itself
    if not is_head:
        wait_for_head(host, port)
    return known


def main(arguments: list[str] | None = None) -> int:
    watch = Watch()
    LocalElasticAgent._monitor_workers = lambda *args: watch(*args)  # type: ignore[method-assign]
    arguments = sys.argv[1:] if arguments is None else arguments
    # else ranks that are started again read the addresses of those before them
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        torchrun([*meet_other_nodes(arguments), *arguments])
    except ChildFailedError as error:
        print(error, file=sys.stderr, flush=True)
        return exit_code_of(error.failures)
    except SignalException as error:
        return watch.code_after(error.sigval)
    except (RendezvousClosedError, RendezvousConnectionError) as error:
        say(str(error) or "the launcher of another node has ended; its output says why")
        return FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
