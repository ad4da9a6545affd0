"""Threads of each rank that notice what a blocked rank cannot: a peer that failed, died or froze.

It also asks torch for errors of NCCL, which torch only logs while this rank waits for ever.
Ranks meet in a key-value store, not in collectives. Each rank beats, and watches the next one; so
the traffic per rank does not grow with the world. On its own host it also looks whether its
neighbour's process still exists, which tells of a kill in half a second; a rank on another host is
missed once it gives no sign of life. What follows from what it sees stands in verdict.py. The first
failure is written to the store once; every watchdog that sees it gives its own rank a few seconds
to end in order, then ends it. One rank prints the failure; it is also what torchrun shows last.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from spmdrl.config.words import counted
from spmdrl.distributed.exit import FAILED, format_failure, is_of_this_start, say, write_failure
from spmdrl.distributed.faults.shared_page import Page
from spmdrl.distributed.faults.verdict import (
    FailureCause,
    RanksSeen,
    StoreSeen,
    store_verdict,
    verdict,
)
from spmdrl.distributed.limits import kills_for_memory, memory_limits
from spmdrl.distributed.torch_compat import nccl_errors

logger = logging.getLogger(__name__)

PERIOD_S = 0.5
STALLED = "no progress"
GONE, STOPPED = ("", "Z", "X"), ("T", "t")  # states of a process, proc_pid_stat(5)
NCCL_FAILED = (
    "NCCL reports {}, and no rank has been missed for {:.0f} s since: a GPU, a network adapter or "
    "the way between two hosts failed. What torch logged of it stands above; NCCL_DEBUG=WARN has "
    "NCCL say more"
)
DIED = "its process {} ended without a word: {}"
LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection was likely closed",
)  # the last by a store
# by gloo or a store, and not by a reward's service or a pipe
OF_A_RANK = (LOST_PEER[0], ("RuntimeError", "DistNetworkError"))
GRACE_S = 3.0  # from the first word of a failure until a rank that is still blocked is ended


def wait_for(happened: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not happened() and time.monotonic() < end:
        time.sleep(0.05)


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life, as it stands in the store."""

    count: int
    pid: int
    host: str
    phase: str
    page: int = -1  # file descriptor of the rank's Page; -1: it has none

    @classmethod
    def read(cls, text: str) -> Beat | None:
        if text in ("", "bye"):
            return None
        count, pid, page, host, phase = text.split(" ", 4)
        return cls(int(count), int(pid), host, phase, int(page))

    def __str__(self) -> str:
        return f"{self.count} {self.pid} {self.page} {self.host} {self.phase}"


class Watchdog:
    """Runs until `close`. A failure is a dict with the fields of phases.FailureReport.

    store: a connection of its own (Store.clone), since calls on a store block each other.
    folder: for errors/rank_R.json. neighbour: a rank on this host, if there is another.
    lost_s: a rank without a beat for so long is lost. stall_s: no new phase for so long is a hang,
    unless another rank gets on, for which this one may be waiting. near_store: rank 0, which may
    host the store, is on this host. first_here: the first rank of this host, whose page says if a
    failure has been told on it. at_once: a failure of this rank is printed when it is reported, not
    when the rank ends.
    """

    def __init__(
        self, store: dist.Store, rank: int, world: int, folder: Path, stall_s: float,
        lost_s: float = 10.0, neighbour: int | None = None, near_store: bool = False,
        first_here: int | None = None, at_once: bool = False,
    ) -> None:  # fmt: skip
        self.store, self.rank, self.world, self.folder = store, rank, world, folder
        self.stall_s, self.lost_s, self.neighbour = stall_s, lost_s, neighbour
        self.near_store, self.at_once = near_store, at_once
        self.host = socket.gethostname()
        self.phase, self.phase_since = "start", time.monotonic()
        self.page = Page()
        self.page.write_phase(self.phase)
        self.first_here = rank if first_here is None else first_here
        self.pages = {rank: self.page}  # by rank: of the neighbour and of first_here as well
        self.beating = threading.Lock()  # a beat with an older phase must not come after a newer
        self.count = 0  # of beats
        self.known: set[int] = set()  # ranks that have given a sign of life
        self.reached = time.monotonic()  # the last time the store answered
        self.broken = 0  # how often in a row it was not there
        self.woke = time.monotonic()
        self.first: dict[str, Any] | None = None  # the job's first failure, once it is known here
        self.own: dict[str, Any] | None = None  # why this rank is about to end by itself
        self.has_announced = False  # this rank has printed the failure, or has left that to another
        self.was_told = False  # some rank has printed it, as the store said when it last answered
        self.kills = kills_for_memory()  # before this run
        self.felt = False  # a connection broke
        self.nccl_errors: list[str] = []
        self.nccl_failed_at = 0.0  # time.monotonic()
        self.beside: Beat | None = None  # the neighbour's last
        self.head: Beat | None = None  # rank 0's last, on other hosts
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self.guard = threading.Thread(target=self._guard, name="watchdog-guard", daemon=True)
        with suppress(RuntimeError):  # a store that is gone is the guard's to tell
            self.beat()  # so that the others' first look finds which process this is
        self.thread.start()
        self.guard.start()

    def progress(self, phase: str) -> None:
        """This rank gets on. The name of a new phase is written at once: it may die of it."""
        is_new, self.phase, self.phase_since = phase != self.phase, phase, time.monotonic()
        if not is_new:
            return
        self.page.write_phase(phase)
        if self.neighbour is None and self.world > 1:  # nobody on this host reads the page
            with suppress(RuntimeError):  # a store that is gone is the guard's to tell
                self.beat()

    def beat(self) -> Beat:
        """Gives a sign of life."""
        with self.beating:
            self.count += 1
            own = Beat(self.count, os.getpid(), self.host, self.phase, self.page.fd)
            self.store.set(f"beat/{self.rank}", str(own))
        return own

    @property
    def heard(self) -> bool:
        """Returns True once this rank has heard of a failure anywhere."""
        return self.first is not None

    def report(self, failure: dict[str, Any]) -> dict[str, Any]:
        """Makes this rank's failure known: errors/rank_R.json, and the store if it is the first.
        The failure to be told: another's, where that came first."""
        if any(words in failure["cause"] for words in LOST_PEER):
            # this rank only feels another's end: give it, its neighbour or torchrun time to tell;
            # who watches a rank that is alone on its host need not wait as long as usual
            if OF_A_RANK[0] in failure["cause"] or failure["cause"].startswith(OF_A_RANK[1]):
                self.felt = True
                with suppress(RuntimeError):  # it may be the store's rank that is gone
                    self.store.set("felt", "1")
                    self.store.set("news", "1")
            wait_for(lambda: self.heard or self.done.is_set(), self.lost_s + 2 * PERIOD_S)
            if self.first:
                return self.first
        self.own = failure
        with suppress(RuntimeError):
            self.first = json.loads(self.store.compare_set("failure", "", json.dumps(failure)))
            self.store.set("news", "1")
        own = failure["rank"] == self.rank  # who has ended may have written more than others know
        path = Path(self.folder, f"rank_{failure['rank']}.json")
        if own or not (path.exists() and is_of_this_start(path)):
            write_failure(failure, self.folder)
        if self.at_once and self.first in (None, failure):
            self.announce(failure)
        return self.first or failure  # the store's rank may have left since: what was heard counts

    def announce(self, failure: dict[str, Any]) -> None:
        """Prints the failure unless another rank has, and leaves it where torchrun looks for it.
        A second call does nothing: the store that knew of the first may have gone since."""
        if self.has_announced:
            return
        self.has_announced = True
        text = format_failure(failure, self.folder)
        try:
            first = self.store.add("claims", 1) == 1
        except RuntimeError:  # no store any more: better told once on each host than not at all
            first = not self.was_told and self._claim()
        else:
            if first:
                self._claim()
        if first:
            say(text)
            with suppress(RuntimeError):
                self.store.set("told", "1")

    def announce_and_wait(self, failure: dict[str, Any]) -> None:
        """Announces the failure, and waits until it has been said."""
        self.announce(failure)
        with suppress(RuntimeError):
            wait_for(lambda: self.store.check(["told"]), 2.0)
            # others may be about to tell it too, and this rank may take the store along
            wait_for(lambda: self.store.add("claims", 0) >= self.world, 1.0)

    def close(self) -> None:
        """Says goodbye, so that the rank that watches this one does not miss it."""
        self.done.set()
        self.thread.join(timeout=5)
        self.store.set(f"beat/{self.rank}", "bye")
        for page in self.pages.values():
            page.close()

    def _watch(self) -> None:
        reported_since = None
        told, others, others_since = self.phase_since, b"", time.monotonic()
        peer = (self.rank + 1) % self.world
        peer_text, peer_since = "", time.monotonic()
        while not self.done.wait(PERIOD_S):
            try:
                own = self.beat()
                has_news = self.store.check(["news"])  # one question for both
                if self.first is None and has_news and self.store.check(["failure"]):
                    self.first = json.loads(self.store.get("failure"))
                if self.first is not None:
                    self.was_told = self.store.check(["told"])
                text = self._beat_of(peer)
                felt = has_news and self.store.check(["felt"])
                if not self.near_store and (self.count % 2 or self.head is None):
                    self.head = Beat.read(self._beat_of(0)) or self.head
                self._ask_nccl()
                self._look_beside()
                self._open_pages()
                if self.phase_since != told and self.count % 8 == 0:
                    told = self.phase_since
                    self.store.set("progress", f"{self.rank} {told}")
                elif time.monotonic() - self.phase_since > self.stall_s / 2:
                    seen = self.store.get("progress") if self.store.check(["progress"]) else b""
                    if seen != others:
                        others, others_since = seen, time.monotonic()
            except RuntimeError as error:  # the store's host is gone, or slow: the guard decides
                self.broken += "imed out" not in str(error)
                if self.beside is not None and self._state(self.beside) in GONE:
                    died = DIED.format(self.beside.pid, self._why_killed())
                    self._end_alone(self._lost(self.neighbour, self.beside, died))
                continue
            before, now = self.reached, time.monotonic()
            self.reached, self.broken = now, 0
            if now - before > self.lost_s / 2:  # this process was stopped itself, maybe all were
                self.woke = now
            peer_since = max(peer_since, self.woke)
            if self.first is not None:
                reported_since = reported_since or now
                if now - reported_since > GRACE_S:
                    self._end(self.first)
                continue
            if text != peer_text or text in ("", "bye"):
                peer_text, peer_since = text, now
            beat, silent_s, phase_s = Beat.read(peer_text), now - peer_since, now - self.phase_since
            gone = self.beside is not None and self._state(self.beside) in GONE
            mine = others.startswith(f"{self.rank} ".encode())
            nccl_s = now - self.nccl_failed_at if self.nccl_errors else 0.0
            ranks = RanksSeen(gone, silent_s, felt, phase_s, now - others_since, mine, nccl_s)
            found = verdict(ranks, self.lost_s, self.stall_s)
            if found is FailureCause.NEIGHBOUR_DIED and self.beside is not None:
                died = DIED.format(self.beside.pid, self._why_killed())
                self.report(self._lost(self.neighbour, self.beside, died))
            elif found is FailureCause.PEER_SILENT:
                silent = f"no sign of life for {silent_s:.0f} s"
                self.report(self._lost(peer, beat, silent))
            elif found is FailureCause.NCCL_FAILED:
                failed = NCCL_FAILED.format("; ".join(self.nccl_errors), nccl_s)
                self.report(self._lost(self.rank, own, failed))
            elif found is FailureCause.STALLED:
                stalled = f"{STALLED} for {phase_s:.0f} s (stall_timeout_s)"
                self.report(self._lost(self.rank, own, stalled))

    def _beat_of(self, rank: int) -> str:
        key = f"beat/{rank}"
        if rank not in self.known and not self.store.check([key]):
            return ""
        self.known.add(rank)  # the key stays: a get alone does not wait any more
        return self.store.get(key).decode()

    def _ask_nccl(self) -> None:
        """Notes the first errors that NCCL reports to this rank. They may be of a rank that ended,
        so that the others hear that a connection broke, and look.
        """
        if not self.nccl_errors and (errors := nccl_errors()):
            self.nccl_errors, self.nccl_failed_at, self.felt = errors, time.monotonic(), True
            self.store.set("felt", "1")
            self.store.set("news", "1")

    def _look_beside(self) -> None:
        """Reads the neighbour's beat once, for its process, and again where that has ended: a rank
        that said goodbye may end."""
        if self.neighbour is None:
            return
        if self.beside is None or self._state(self.beside) in GONE:
            self.beside = Beat.read(self._beat_of(self.neighbour))

    def _open_pages(self) -> None:
        for rank in {self.neighbour, self.first_here} - self.pages.keys() - {None}:
            assert rank is not None
            beat = Beat.read(self._beat_of(rank))
            page = Page.of(beat.pid, beat.page) if beat and beat.host == self.host else None
            if page is not None:
                self.pages[rank] = page

    def _why_killed(self) -> str:
        kills = kills_for_memory() - self.kills
        if kills > 0:
            in_all = f"{counted(kills, 'process')} in all"
            known = f"killed by the kernel, which ran out of memory ({in_all})"
        else:
            known = "killed, or out of memory (see dmesg)"
        return "; ".join([known, *memory_limits()])

    def _state(self, beat: Beat) -> str:
        """Returns the state of a rank's process on this host, as ps has it; "" where there is none,
        ? elsewhere.
        """
        if beat.host != self.host:
            return "?"
        try:
            stat = Path(f"/proc/{beat.pid}/stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return stat.rpartition(")")[2].split()[0]

    def _lost(self, rank: int | None, beat: Beat | None, cause: str) -> dict[str, Any]:
        host, phase, pid = (beat.host, beat.phase, beat.pid) if beat else ("?", "start", 0)
        if rank in self.pages and beat is not None:
            phase = self.pages[rank].phase
        return {"rank": rank, "host": host, "phase": phase, "cause": cause, "exit_code": FAILED,
                "pid": pid, "by": self.host,
                "details": f"noticed by rank {self.rank} on {self.host}"}  # fmt: skip

    def _guard(self) -> None:
        """Reads from a store whose host vanished may block for ever; this thread never reads it."""
        looked = time.monotonic()
        while not self.done.wait(PERIOD_S):
            now = time.monotonic()
            if now - looked > self.lost_s / 2:  # this process was stopped itself, maybe all were
                self.reached = self.woke = now
            looked = now
            silent_s = now - self.reached
            beside = self.beside
            stopped = beside is not None and self._state(beside) in STOPPED
            seen = StoreSeen(silent_s, self.broken * PERIOD_S, self.felt, self.near_store, stopped)
            found = store_verdict(seen, self.lost_s, GRACE_S)
            if found is FailureCause.NEIGHBOUR_FROZEN and beside is not None:
                # the neighbour is the store's rank
                frozen = f"its process {beside.pid} is stopped, for {silent_s:.0f} s as it seems"
                self._end_alone(self._lost(self.neighbour, beside, frozen))
            elif found is FailureCause.STORE_ENDED:
                ended = "it has hung up, and its rendezvous store is gone: it or its host ended"
                self._end_alone(self._lost(0, self.head, ended))
            elif found is FailureCause.STORE_GONE:
                gone = f"no rendezvous store for {silent_s:.0f} s: its host is gone, or cut off"
                own = Beat(0, os.getpid(), self.host, self.phase)
                self._end_alone(self._lost(self.rank, own, gone))

    def _end_alone(self, failure: dict[str, Any]) -> NoReturn:
        """Without a store a rank says what it knows, unless one of this host has spoken: then the
        failure is told, and that rank's end is no failure of its own. Nor is the store's end one to
        a rank that is ending: with a second Ctrl-C the store's rank may just be the first to go.
        """
        known = self.first or self.own
        if known:
            os._exit(known["exit_code"])
        if not self._claim():
            os._exit(FAILED)
        write_failure(failure, self.folder)
        say(format_failure(failure, self.folder))
        self._end_frozen(failure)
        os._exit(FAILED)

    def _claim(self) -> bool:
        """Whether this rank is the first of its host that tells a failure of this attempt."""
        page = self.pages.get(self.first_here)
        return page is None or page.claim()

    def _end(self, failure: dict[str, Any]) -> None:
        if STALLED in failure["cause"]:
            faulthandler.dump_traceback(sys.stderr)  # every rank's, to see who waits for whom
        self.announce_and_wait(failure)
        self._end_frozen(failure)
        # the main thread may be blocked in a collective that never returns
        os._exit(failure["exit_code"])

    def _end_frozen(self, failure: dict[str, Any]) -> None:
        """A stopped process does not hear torchrun's SIGTERM, for which torchrun waits 30 s."""
        pid = failure.get("pid", 0)
        if not pid or failure["host"] != self.host or failure["rank"] == self.rank:
            return
        if STALLED in failure["cause"]:  # it hears, and is to show its stack
            return
        with suppress(OSError):
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={failure['rank']}".encode() in environ:
                os.kill(pid, signal.SIGKILL)
