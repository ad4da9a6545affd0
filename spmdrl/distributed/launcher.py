"""Runs torchrun in this process for spmdrl.launch: what torchrun would overlook, and exit codes."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import DistNetworkError
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.run import main as torchrun

from spmdrl.distributed import elastic_compat
from spmdrl.distributed import exit as exits
from spmdrl.distributed.exit import BAD_CONFIG, FAILED, INTERRUPTED, REQUEUE
from spmdrl.distributed.faults.network import address_towards, addresses_of, interface_of
from spmdrl.distributed.faults.rendezvous import owner_of, reason_of
from spmdrl.distributed.membership import RENDEZVOUS, Membership, forget_other_job
from spmdrl.distributed.runs import RUNS
from spmdrl.distributed.signals import STOPPING, is_ignored

FINAL = (BAD_CONFIG, REQUEUE, INTERRUPTED)
HEAD_S = 600.0  # as long as torchrun waits for the nodes to meet
LAST_WORDS_S = 30.0  # for ranks whose peers on another node have ended: to notice it, and say so
HELD_UP_S = 4.0  # a launcher looks after its ranks ten times a second


class Watch:
    """Watches what torchrun's agent sees of its ranks, and what it would overlook."""

    def __init__(self) -> None:
        self.seen_at = time.monotonic()
        self.closed_at = 0.0
        self.agent: Any = None
        self.guard: threading.Thread | None = None
        self.folder: str | None = None  # see own_folder; None: there is none any more
        self.membership: Membership | None = None  # of a job whose ranks may be started again

    def __call__(self, agent: Any, group: Any) -> Any:
        """Stands in place of the agent's own monitor. What no restart cures takes restarts away.

        Raises RendezvousClosedError where another node's launcher ended some time ago: ranks that
        still wait to meet its ranks would wait for ever.
        """
        self.agent = agent
        if self.guard is None:
            self.guard = threading.Thread(target=self._guard, args=(agent, group), daemon=True)
            self.guard.start()
        self.seen_at = now = time.monotonic()
        seen = elastic_compat.observe_ranks(agent, group)
        self.seen_at = time.monotonic()  # it waits for the ranks beside one that has ended
        self._decide_restart(agent, exit_code_of(seen.failures))
        if seen.state == WorkerState.SUCCEEDED and self.membership is not None:
            self.membership.ends_job = True
        several = seen.state == WorkerState.HEALTHY and group.group_world_size > 1
        if several and group.spec.rdzv_handler.is_closed():
            self.closed_at = self.closed_at or now
            if now - self.closed_at > LAST_WORDS_S:
                raise RendezvousClosedError
        return seen

    def _decide_restart(self, agent: Any, code: int) -> None:
        """code: of the rank that failed first; 0: none has. Hosts that join or leave cost none of
        the restarts, and neither do those that come with a mistake and leave again.
        """
        member = self.membership
        if member is not None and (
            (code == REQUEUE and member.goes_on())
            or (code == BAD_CONFIG and member.refuses_newcomers())
        ):
            elastic_compat.allow_restart(agent)
            self.seen_at = time.monotonic()
        elif code == BAD_CONFIG and member is not None and member.is_new:
            say("this host leaves the job that it came to, which does not start with it (code 2)")
            elastic_compat.forbid_restarts(agent)
        elif code in FINAL:
            elastic_compat.forbid_restarts(agent)
            if member is not None:
                member.ends_job = True
        elif code and member is not None:
            member.failed = True

    def code_after(self, number: signal.Signals) -> int:
        """Returns the exit code of ranks that torchrun has told of the signal, and given time to
        end.
        """
        ranks = elastic_compat.rank_processes(self.agent) if self.agent is not None else []
        codes = [rank.poll() for rank in ranks]
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
            codes = [exit_status(pid) for pid in elastic_compat.rank_pids(agent)]
            if not held_up or None in codes or not any(codes):
                gone_at = None
            elif gone_at is None:
                gone_at = time.monotonic()
            elif time.monotonic() - gone_at > HELD_UP_S:
                say("all ranks here have ended, and the rendezvous does not answer")
                self._clean_up()
                os._exit(next((code for code in FINAL if code in codes), FAILED))

    def quit(self, why: str, code: int) -> None:
        """Ctrl-C before torchrun listens for it: while hosts meet."""
        say(f"stopped by {why}")
        self._clean_up()

    def _clean_up(self) -> None:
        if self.membership is not None:
            self.membership.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def exit_status(pid: int) -> int | None:
    """Returns how a child ended, which is left for torchrun to see; None if it runs."""
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torchrun has seen it already, and was held up later
        return FAILED
    if seen is None:
        return None
    return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def say(what: str) -> None:
    exits.say(f"\nspmdrl: {socket.gethostname()}: {what}")


def exit_code_of(failures: Mapping[int, ProcessFailure]) -> int:
    """Returns the exit code of the rank that failed first: the others are ended with it."""
    if not failures:
        return 0
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return first.exitcode if first.exitcode in FINAL else FAILED


def told_of(failures: Mapping[int, ProcessFailure]) -> str:
    """Returns what is left to say of the failures: of ranks that said why they ended, nothing.

    What a rank leaves for torchrun in its error file it, or another, has printed.
    """
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    if any(Path(failure.error_file).is_absolute() for failure in failures.values()):
        return ""
    how = f"ended with exit code {first.exitcode}"
    if first.exitcode < 0:
        how = f"was ended by signal {-first.exitcode} ({first.signal_name()})"
    rank = next(rank for rank, failure in failures.items() if failure is first)
    return f"rank {rank} (process {first.pid}) {how}, and left no word but what stands above"


@contextmanager
def own_folder(watch: Watch) -> Iterator[None]:
    """Gives torchrun a folder for what it makes in the temporary folder, and would leave there.
    Sets watch.folder.
    """
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="spmdrl_launch_", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = folder  # of this process; ranks have TMPDIR as it is
        watch.folder = folder
        try:
            yield
        finally:
            tempfile.tempdir, watch.folder = before, None


@contextmanager
def member_of_job(arguments: list[str], watch: Watch) -> Iterator[None]:
    """Lets ranks that are started again go on from memory, and hosts of an elastic job join and
    leave. Sets watch.membership. watch.folder must stand.
    """
    options = elastic_compat.parse_options(arguments)
    nnodes = elastic_compat.parse_num_nodes(options.nnodes)
    forget_other_job()
    if nnodes[0] == nnodes[1] and not options.max_restarts:
        yield
        return
    assert watch.folder is not None
    watch.membership = member = Membership(nnodes, Path(watch.folder))
    elastic_compat.announce_starts(member.before_start)
    elastic_compat.announce_stops(member.before_stop, member.is_done)
    elastic_compat.replace_shutdown(member.shut_down)
    try:
        yield
    except SignalException:
        with suppress(RendezvousError):  # it may be gone already
            member.leave()
        raise
    except elastic_compat.JobDone:
        pass  # a host has come too late
    finally:
        watch.membership = None
        member.close()


def why_not_elastic(arguments: list[str]) -> str:
    """Says why hosts cannot come and go as --nnodes MIN:MAX asks; "" where they can, or need not.

    The other kinds of rendezvous wait for MAX hosts, and cannot say later who has left.
    """
    options = elastic_compat.parse_options(arguments)
    least, most = elastic_compat.parse_num_nodes(options.nnodes)
    if least == most or options.standalone or options.rdzv_backend in ("c10d", "etcd-v2"):
        return ""
    return (
        f"--nnodes {options.nnodes} is for hosts that come and go, which --rdzv-backend "
        f"{options.rdzv_backend} cannot do: add --rdzv-backend c10d --rdzv-endpoint HOST:29400 "
        "--rdzv-id NAME, the same on each host, or give one number of hosts"
    )


def listens_at_once(arguments: list[str]) -> bool:
    """Whether the ranks are a program that listens for Ctrl-C as soon as Python has started."""
    options = elastic_compat.parse_options(arguments)
    return options.module and options.training_script in [f"spmdrl.{run}" for run in RUNS]


def signals_to_handle() -> list[str]:
    """Returns options for torchrun, which would take SIGHUP from nohup as well, and end the run
    when its terminal is gone.
    """
    return ["--signals-to-handle", "SIGTERM,SIGINT,SIGQUIT"] if is_ignored(signal.SIGHUP) else []


def pass_on(watch: Watch, number: signal.Signals) -> None:
    """Has ranks hear a signal that torchrun would die of, unless this process is to ignore it."""

    def tell_ranks(*_: Any) -> None:
        for pid in elastic_compat.rank_pids(watch.agent) if watch.agent is not None else ():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    if not is_ignored(number):
        signal.signal(number, tell_ranks)


def be_quiet() -> None:
    """torchrun's own log tells of processes and signals: for those who ask for it by LOGLEVEL."""
    for name in list(logging.root.manager.loggerDict) if "LOGLEVEL" not in os.environ else ():
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


class HeldPorts:
    """Ports for the stores that rank 0 opens, seconds later, when it has imported all it needs.

    A socket that is bound and does not listen keeps the system from giving the port to others; the
    store may bind it too, since both set SO_REUSEADDR.
    """

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []  # one for each start of the ranks

    def __call__(self) -> int:
        """Stands in place of torchrun's get_free_port, which lets go of the port again."""
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        held = socket.socket(family, socket.SOCK_STREAM)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", 0))
        self.sockets.append(held)
        return int(held.getsockname()[1])


def why_not_open(error: DistNetworkError, arguments: list[str]) -> str:
    """Says why this launcher could not open a store; else what torch said."""
    options = elastic_compat.parse_options(arguments)
    said = f" ({reason_of(error) or error})"
    if "failed to listen" not in str(error):
        return f"the store of the job cannot be reached{said}"
    port = options.master_port or 29500  # torchrun's own
    if options.rdzv_backend != "static":
        port = elastic_compat.parse_endpoint(options.rdzv_endpoint, 29400)[1]
    return (
        f"port {port} (--master-port, or that of --rdzv-endpoint) is taken{owner_of(port)}: choose "
        f"another, or name none for a run on this machine alone, which takes a free one{said}"
    )


def why_not_met(error: RendezvousError, watch: Watch, arguments: list[str]) -> str:
    """Says why the hosts did not meet, or not again; torch's errors are often without a word."""
    options = elastic_compat.parse_options(arguments)
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer hosts came to the rendezvous than --nnodes {options.nnodes} asks for, within "
            "the time limit (600 s, or join_timeout of --rdzv-conf)"
        )
    if isinstance(error, RendezvousClosedError) and watch.agent is None:
        return (
            "the rendezvous was closed when this host came: the job has ended, or an earlier one "
            f"has used the same store with the same --rdzv-id ({options.rdzv_id}). Give another "
            "--rdzv-id on all hosts, or start the store anew"
        )
    if isinstance(error, RendezvousConnectionError) and "inner exception" in str(error):
        return (
            f"the store of the rendezvous ({options.rdzv_endpoint or 'of this host'}) does not "
            "answer any more: the job has ended, or the host that has the store is lost"
        )
    return str(error) or "the launcher of another node has ended; its output says why"


def wait_for_head(host: str, port: int) -> None:
    """Waits until the head listens. Raises RendezvousConnectionError after HEAD_S."""
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
    options = elastic_compat.parse_options(arguments)
    if elastic_compat.parse_num_nodes(options.nnodes)[1] == 1 and options.rdzv_backend != "c10d":
        return []  # torchrun takes 127.0.0.1
    endpoint = options.rdzv_endpoint or f"{options.master_addr}:{options.master_port}"
    host, port = elastic_compat.parse_endpoint(endpoint, 29400)
    own = options.local_addr or address_towards(host, port)
    interface = interface_of(own) if own else None
    if interface:  # else gloo takes the address of the host's name, which may be a loopback
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    known = ["--local-addr", own] if own else []
    if options.rdzv_backend != "c10d":
        return known
    least, most = elastic_compat.parse_num_nodes(options.nnodes)
    settings = dict(RENDEZVOUS) if least < most else {}
    said = elastic_compat.parse_rendezvous_config(options.rdzv_conf).get("is_host")
    is_head = host == socket.gethostname() or any(map(interface_of, addresses_of(host)))
    if said is not None:
        is_head = said.lower() in ("1", "true", "t", "yes", "y")
    elif not options.rdzv_conf and not addresses_of(socket.gethostname()):
        settings["is_host"] = int(is_head)  # torchrun fails to find out itself
    if settings and not options.rdzv_conf:
        known += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())]
    if not is_head:
        wait_for_head(host, port)
    return known


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if problem := why_not_elastic(arguments):
        say(problem)
        return BAD_CONFIG
    watch = Watch()
    STOPPING.shares = True  # torchrun tells the ranks of a signal, once it has any
    STOPPING.on_quit = watch.quit
    elastic_compat.replace_monitor(watch)
    elastic_compat.replace_free_port(HeldPorts())
    elastic_compat.tell_hosts_that_are_not_needed()
    be_quiet()
    pass_on(watch, signal.SIGUSR1)
    # a locale that lacks a letter of a path or a prompt must not matter to the ranks
    os.environ.setdefault("PYTHONUTF8", "1")
    # else ranks that are started again read the addresses of those before them
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    try:
        with own_folder(watch), member_of_job(arguments, watch):
            if listens_at_once(arguments):
                elastic_compat.block_signal_in_ranks(signal.SIGINT)
            torchrun([*signals_to_handle(), *meet_other_nodes(arguments), *arguments])
    except ChildFailedError as error:
        if told := told_of(error.failures):
            say(told)
        return exit_code_of(error.failures)
    except SignalException as error:
        for rank in psutil.Process().children():  # torchrun has lost those that it was starting
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(error.sigval)
        return watch.code_after(error.sigval)
    except RendezvousError as error:
        say(why_not_met(error, watch, arguments))
        return FAILED
    except elastic_compat.NotNeeded:
        say("the job has ended; this host waited for a place in it, and none became free")
    except DistNetworkError as error:
        say(why_not_open(error, arguments))
        return FAILED
    except OSError as error:  # of the temporary folder, a script or a log folder that is not there
        say(f"the ranks cannot be started: {error}")
        return FAILED
    return 0
