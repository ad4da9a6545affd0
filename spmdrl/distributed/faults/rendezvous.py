"""Ranks find each other, or say who is missing: until the watchdog runs, nobody else would.

    hello     every rank leaves a word that is new, in the store that torchrun names
    answer    rank 0 finds it and answers with this start's own prefix
    here      the rank says that it has the prefix; when all have, rank 0 lets everyone go on

torchrun may keep its store over restarts, and its nodes count restarts each for itself: what stands
there may be of processes that are long gone. These cannot answer.
"""

from __future__ import annotations

import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist

from spmdrl.distributed.exit import FAILED, format_failure, leave, say, write_failure

PERIOD_S = 0.05
TAKEN_S = 3.0  # a port may be that of another's connection, which may soon be closed
LINGER_S = 3.0  # rank 0 may be the store's host: the others are to read why first
# A rank may wait for others as long as these get on: the watchdog knows that, a group does not.
FOREVER = timedelta(days=7)


class StartupBarrier:
    """A job's start: ranks meet within `limit_s`, and then connect within it, or the process ends.

    torch.distributed waits for as long as a collective may take, which here is days.
    """

    def __init__(self, limit_s: float, folder: Path) -> None:
        self.limit_s, self.folder = limit_s, folder
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.at_host: dist.Store | None = None  # the job's
        self.store: dist.Store | None = None  # this start's own keys in it
        self.lookout: dist.Store | None = None  # the same by a connection of its own
        self.met = False
        self.told_before = 0  # how many ranks of earlier starts have told that rank 0 did not come
        self.deciding = threading.Lock()
        self.timer: threading.Timer | None = None  # the one that may end the process
        self._limit(True)

    def meet(self) -> dict[str, Any]:
        """Returns when all ranks are here, what torch.distributed is to be given."""
        at_host = self._open_store()
        lookout = self.at_host = at_host.clone()
        word = secrets.token_hex(8)
        if self.rank == 0:
            self._meet_as(word, at_host, lookout)
            self._answer(at_host)
        else:
            self.told_before = lookout.add("no rank 0", 0)
            at_host.set(f"hello/{self.rank}", word)
            self._meet_as(at_host.get(f"answer/{word}").decode(), at_host, lookout)
            assert self.store is not None
            self.store.set(f"here/{self.rank}", "")
            self.store.wait(["all here"])
        self._limit(True, met=True)
        return {"store": self.store, "rank": self.rank, "world_size": self.world}

    def _open_store(self) -> Any:
        """The job's. Port 0, of a rank that is alone, is any free one."""
        agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port, end = int(os.environ["MASTER_PORT"]), time.monotonic() + TAKEN_S
        store = None
        while store is None:
            try:
                store = dist.TCPStore(
                    os.environ["MASTER_ADDR"], port, is_master=self.rank == 0 and not agents,
                    timeout=FOREVER, wait_for_workers=False,
                )  # fmt: skip
            except dist.DistNetworkError as error:
                self._check_port(error, port, end)
                time.sleep(PERIOD_S)
        os.environ["MASTER_PORT"] = str(store.port)
        return store

    def _check_port(self, error: dist.DistNetworkError, port: int, end: float) -> None:
        """Ends the process where the store's port is still taken at `end`; raises another error."""
        if "failed to listen" not in str(error):
            raise error
        if time.monotonic() > end:
            self._limit(False)
            self._report_failure(
                f"rank 0 cannot open the job's store at port {port} (MASTER_PORT){owner_of(port)}: "
                f"choose another, or start again when it is free ({reason_of(error)})"
            )
            leave(FAILED)

    def done(self) -> None:
        """Connected; from now on the watchdog looks."""
        self._limit(False)
        assert self.store is not None
        self.store.set(f"connected/{self.rank}", "")
        self.lookout = self.at_host = None  # the store has one connection less for each rank

    def _limit(self, another: bool, met: bool = False) -> None:
        """Begins another limit: what was to be done has been, in time."""
        with self.deciding:
            self.met = met
            if self.timer is not None:
                self.timer.cancel()
            self.timer = threading.Timer(self.limit_s, self._over) if another else None
            if self.timer is not None:
                self.timer.daemon = True
                self.timer.start()

    def _meet_as(self, word: str, at_host: dist.Store, lookout: dist.Store) -> None:
        self.store = dist.PrefixStore(f"start/{word}", at_host)
        self.lookout = dist.PrefixStore(f"start/{word}", lookout)
        self.word = word

    def _answer(self, at_host: dist.Store) -> None:
        assert self.store is not None
        missing = list(range(1, self.world))
        answered: dict[int, bytes] = {}
        while missing:
            for rank in missing:
                if not at_host.check([f"hello/{rank}"]):
                    continue
                hello = at_host.get(f"hello/{rank}")
                if answered.get(rank) != hello:  # else it has its answer, and is on its way
                    at_host.set(f"answer/{hello.decode()}", self.word)
                    answered[rank] = hello
            missing = [rank for rank in missing if not self.store.check([f"here/{rank}"])]
            time.sleep(PERIOD_S if missing else 0)
        self.store.set("all here", "")

    def _over(self) -> None:
        """The main thread is blocked, and stays so."""
        with self.deciding:
            if self.timer is not threading.current_thread():
                return  # the limit was kept at the last moment
            try:
                self._tell()
            finally:
                time.sleep(LINGER_S if self.rank == 0 else 0)
                leave(FAILED)

    def _tell(self) -> None:
        within = f"within {self.limit_s:.0f} s (start_timeout_s)"
        where = "{MASTER_ADDR}:{MASTER_PORT}".format(**os.environ)
        found = [(f"the store at {where} did not answer {within}", True)]
        # a store whose host is frozen or cut off answers nobody, and has no time limit
        asking = threading.Thread(target=lambda: found.append(self._why(within)), daemon=True)
        if self.at_host is not None:
            asking.start()
            asking.join(LINGER_S)
        if self.met:
            faulthandler.dump_traceback(sys.stderr)
        self._report_failure(*found[-1])

    def _report_failure(self, cause: str, tells: bool = True) -> None:
        failure = {"rank": self.rank, "host": socket.gethostname(), "phase": "start",
                 "cause": cause, "details": "", "exit_code": FAILED}  # fmt: skip
        if tells:
            write_failure(failure, self.folder)
        text = format_failure(failure, self.folder)  # names the file, if it is there
        if tells:
            say(text)

    def _why(self, within: str) -> tuple[str, bool]:
        """And whether it is this rank that says so: of those that know as much, the first."""
        assert self.at_host is not None
        key = "connected" if self.met else "here"
        try:
            if self.lookout is None:
                return f"rank 0 did not start {within}", self._is_first_since()
            tells = self.lookout.add("told", 1) == 1
            known = {r for r in range(self.world) if self.lookout.check([f"{key}/{r}"])}
        except RuntimeError:  # the store's host has gone already, and has told
            return "the others were gone", False
        if not self.met:
            missing = sorted(set(range(1, self.world)) - known)
            return f"ranks {missing} of {self.world} did not start {within}", tells
        lone = sorted(set(range(self.world)) - known)
        return (
            f"ranks {lone} of {self.world} found no connection to all others {within}: "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME must name a network that all hosts share"
        ), tells

    def _is_first_since(self) -> bool:
        """Without rank 0 there is no word for this start: who tells is the first since it came."""
        assert self.at_host is not None
        return self.at_host.add("no rank 0", 1) == self.told_before + 1


def owner_of(port: int) -> str:
    """Names the process that listens there, of those on this host that this user may look at."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        with suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    command = " ".join(process.info["cmdline"])[:200]
                    return f", where process {process.pid} listens ({command})"
    return ""


def reason_of(error: Exception) -> str:
    """Returns what the system said: the store puts its own names before it."""
    return str(error).rpartition("message: ")[2]
