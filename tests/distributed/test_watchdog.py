"""Which rank a watchdog says has stopped; what it does when one dies stands in test_faults."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from spmdrl.distributed.exit import FAILED
from spmdrl.distributed.faults import verdict, watchdog
from spmdrl.distributed.faults.network import address_towards, addresses_of
from spmdrl.distributed.faults.watchdog import LOST_PEER, Watchdog

STALL_S = 1.6
PHASES = ("rollout", "update_actor")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.02)
    monkeypatch.setattr(verdict, "LAST_WORD_S", 0.1)
    monkeypatch.setattr(watchdog, "GRACE_S", 1e9)  # the process that would be ended is this one


@pytest.fixture
def watchdogs() -> Iterator[list[Watchdog]]:
    """To be closed, whatever becomes of the test."""
    made: list[Watchdog] = []
    yield made
    for each in made:
        each.close()


def wait_until(happened: Callable[[], bool], limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def failure_of(watched: Watchdog, end: float) -> dict[str, Any]:
    while (failure := watched.first) is None:
        assert time.monotonic() < end, "nobody has noticed"
        time.sleep(0.02)
    return failure


def test_a_rank_is_known_before_it_looks_for_others(
    tmp_path: Path, watchdogs: list[Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that freezes before its thread has beaten can be named by its neighbour."""
    monkeypatch.setattr(watchdog, "PERIOD_S", 60.0)
    store = dist.HashStore()
    watchdogs.append(Watchdog(store, 0, 2, tmp_path, 1e9))
    assert store.check(["beat/0"])


@pytest.mark.clock
def test_a_rank_that_waits_has_not_stalled_and_who_stopped_first_is_named(
    tmp_path: Path, watchdogs: list[Watchdog]
) -> None:
    """Three jobs. In jobs 0 and 1 of two ranks that rank waits; the other gets on for longer than
    the limit and then stops too: only then has the job stalled, and who waited has stood still
    longest. Job 2 is one rank that gets on and stops."""
    jobs = []  # (who is named, who stops last, its phase, folder)
    for number, first, last, world in ((0, 0, 1, 2), (1, 1, 0, 2), (2, 0, 0, 1)):
        store, folder = dist.HashStore(), tmp_path / str(number)
        ranks = [Watchdog(store, rank, world, folder, STALL_S) for rank in range(world)]
        watchdogs += ranks
        ranks[first].progress(PHASES[first])
        jobs.append((first, ranks[last], PHASES[last], folder))
    end = time.monotonic() + 1.5 * STALL_S
    while time.monotonic() < end:
        for _, busy, phase, _ in jobs:
            busy.progress(phase)
            assert not busy.heard
        time.sleep(0.02)
    stopped = time.monotonic()
    for first, busy, _, folder in jobs:
        failure = failure_of(busy, stopped + 3 * STALL_S)
        assert time.monotonic() - stopped > 0.4 * STALL_S  # not as soon as all are silent
        assert (failure["rank"], failure["phase"]) == (first, PHASES[first])
        assert failure["cause"].startswith("no progress for ")
        written = Path(folder, f"rank_{first}.json")
        while not written.exists():  # the others hear of it before it is on disk
            assert time.monotonic() < stopped + 4 * STALL_S
            time.sleep(0.02)


@pytest.mark.clock
def test_an_error_of_nccl_is_told_where_no_rank_is_missed(
    tmp_path: Path, watchdogs: list[Watchdog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch only logs it, and the rank would wait for its GPU for ever. Rank 1 has the error; both
    hear that a connection broke, and are alive."""
    store, lost_s = dist.HashStore(), 0.5
    error = "COMM_ERROR in the group of ranks 0, 1"
    ranks = [Watchdog(store, rank, 2, tmp_path, 1e9, lost_s) for rank in range(2)]
    watchdogs += ranks
    ranks[1].progress("update_actor")
    thread = ranks[1].thread
    began = time.monotonic()
    monkeypatch.setattr(
        watchdog, "nccl_errors", lambda: [error] if threading.current_thread() is thread else []
    )
    wait_until(lambda: ranks[1].felt and store.check(["felt"]), 10)
    for rank in ranks:
        failure = failure_of(rank, began + 10)
        assert (failure["rank"], failure["phase"]) == (1, "update_actor")
        assert failure["cause"].startswith(f"NCCL reports {error}, and no rank has been missed")
    assert time.monotonic() - began > lost_s


@pytest.mark.clock
@pytest.mark.parametrize("told", [True, False])
def test_a_failure_that_was_heard_stays_the_failure_when_its_store_has_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], told: bool
) -> None:
    """Rank 0 tells and leaves with its store; ranks 1 and 2 then feel that and have no failure of
    their own. Where rank 0 has ended before it could tell, one of them does."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(3)
    ]  # fmt: skip
    fields = {"host": socket.gethostname(), "phase": "rollout", "details": "", "exit_code": FAILED}
    first = {"rank": 0, "cause": "OSError: disk on fire", **fields}
    ranks = [
        Watchdog(clients[r], r, 3, tmp_path, STALL_S, lost_s=1e9, first_here=0) for r in range(3)
    ]
    try:
        wait_until(lambda: all(0 in rank.pages for rank in ranks), 10)
        assert ranks[0].report(first) == first
        if told:
            ranks[0].announce_and_wait(first)
        end = time.monotonic() + 10
        while not all(rank.heard for rank in ranks):
            assert time.monotonic() < end
            time.sleep(0.02)
        del server
        while not all(rank.broken for rank in ranks):
            assert time.monotonic() < end
            time.sleep(0.02)
        for rank in ranks[1:]:
            felt = {"cause": f"ConnectionResetError: {LOST_PEER[0]}: rank 0", "rank": rank.rank}
            failure = rank.report(felt | fields)
            assert failure == first
            rank.announce_and_wait(failure)
    finally:
        for rank in ranks:
            rank.done.set()
            rank.thread.join()
            rank.guard.join()
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.json"]
    assert capfd.readouterr().err.count("disk on fire") == 1


@pytest.mark.clock
def test_a_failure_told_at_once_is_not_told_again_when_its_store_has_left(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 fails before any rank has opened rank 0's page. The store's rank ends next; ranks 1
    and 2 end after it and can ask nobody who has spoken."""
    monkeypatch.setattr(Watchdog, "_open_pages", lambda self: None)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    clients = [
        dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(3)
    ]  # fmt: skip
    failure = {"rank": 1, "cause": "OSError: disk on fire", "host": socket.gethostname(),
             "phase": "update_actor", "details": "", "exit_code": FAILED}  # fmt: skip
    ranks = [
        Watchdog(clients[r], r, 3, tmp_path, STALL_S, lost_s=1e9, first_here=0, at_once=True)
        for r in range(3)
    ]
    try:
        assert ranks[1].report(failure) == failure
        wait_until(lambda: all(rank.heard and rank.was_told for rank in ranks), 10)
        ranks[0].announce(failure)
        del server
        wait_until(lambda: all(rank.broken for rank in ranks), 10)
        for rank in ranks[1:]:
            rank.announce_and_wait(failure)
    finally:
        for rank in ranks:
            rank.done.set()
            rank.thread.join()
            rank.guard.join()
    assert capfd.readouterr().err.count("disk on fire") == 1


def test_the_store_s_rank_is_named_though_it_ended_before_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1, alone on its host, has felt that rank 0 hung up, and then its store is gone too."""
    monkeypatch.setattr(watchdog, "GRACE_S", 0.2)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(Watchdog, "_end_alone", lambda self, failure: told.append(failure))
    rank = Watchdog(client, 1, 2, tmp_path, 1e9, lost_s=1e9)
    try:
        rank.felt = True
        del server
        end = time.monotonic() + 10
        while not told:
            assert time.monotonic() < end
            time.sleep(0.02)
    finally:
        rank.done.set()
        rank.thread.join()
        rank.guard.join()
    assert (told[0]["rank"], told[0]["phase"]) == (0, "start")
    assert "it has hung up, and its rendezvous store is gone" in told[0]["cause"]


@contextmanager
def forked(
    work: Callable[..., None], *args: Any
) -> Iterator[tuple[BaseProcess, Connection, dist.Store]]:
    """A fork that does work(pipe, *args), the pipe to it, which has told it the port of the store's
    server, and that server. This is made after the fork, which would have its sockets otherwise.
    """
    fork, (ours, theirs) = multiprocessing.get_context("fork"), multiprocessing.Pipe()
    process = fork.Process(target=work, args=(theirs, *args))
    process.start()
    try:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ours.send(server.port)
        yield process, ours, server
    finally:
        process.kill()
        process.join()


def leaving(pipe: Connection, folder: Path) -> None:
    os.dup2(os.open(folder / "said", os.O_WRONLY | os.O_CREAT), 2)
    watchdog.GRACE_S = 0.2
    store = dist.TCPStore("127.0.0.1", pipe.recv(), wait_for_workers=False)
    rank = Watchdog(store, 1, 2, folder, 1e9, lost_s=1e9)
    rank.report({"rank": 1, "host": "here", "phase": "reward", "cause": "a second signal, SIGTERM",
                 "details": "", "exit_code": 130})  # fmt: skip
    pipe.send("reported")
    time.sleep(60)


def test_a_rank_that_was_leaving_does_not_say_that_the_store_left_first(tmp_path: Path) -> None:
    with forked(leaving, tmp_path) as (rank, pipe, server):
        assert pipe.recv() == "reported"
        del server
        rank.join(30)
        assert rank.exitcode == 130
    assert b"no rendezvous store" not in Path(tmp_path, "said").read_bytes()


def struck(pipe: Connection, neighbour: int | None, folder: Path) -> None:
    store = dist.TCPStore("127.0.0.1", pipe.recv(), wait_for_workers=False)
    rank = Watchdog(store, 1, 2, folder, 1e9, lost_s=1e9, neighbour=neighbour)
    pipe.recv()
    for phase in PHASES:
        rank.progress(phase)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("alone", [False, True])
def test_a_rank_that_is_killed_as_a_phase_begins_is_told_with_that_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """It has given no sign of life since. A neighbour on its host reads it from the page, one on
    another host from the store."""
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.5)
    beside = None if alone else 1
    with forked(struck, None if alone else 0, tmp_path) as (peer, pipe, server):
        client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        rank = Watchdog(client, 0, 2, tmp_path, 1e9, lost_s=3.0 if alone else 1e9, neighbour=beside)
        try:
            wait_until(lambda: client.check(["beat/1"]) and (alone or 1 in rank.pages), 30)
            pipe.send("go on")
            peer.join(10)
            failure = failure_of(rank, time.monotonic() + 10)
            assert (failure["rank"], failure["phase"]) == (1, "update_actor"), failure
        finally:
            rank.done.set()
            rank.thread.join()
            rank.close()


def test_names_that_no_host_has_are_no_failure() -> None:
    assert addresses_of("n" * 64) == addresses_of("a..b") == set()
    assert address_towards("x" * 64, 1) == address_towards(socket.gethostname(), 1)
