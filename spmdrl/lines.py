"""Notes of a few bytes between ranks of one host, each pair's through a Unix socket of its own.

gloo's messages pass through a thread at either end, which for a few bytes costs more than all else:
0.15 ms of a processor on ours. A note costs a tenth. Ranks on other hosts have no line.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
Host = tuple[str, str] | None
Note = tuple[int, int, int]  # kind, tag, number

# kinds of notes: a message lies ready in the sender's memory, was read, a rank's word for `lowest`
SHOWN, READ, AGREED = 1, 2, 3
NOTE = struct.Struct("=iiqq")  # kind, tag, number, value
HELLO = struct.Struct("=iq")  # caller's rank, the secret of the one called
CALL_S = 5.0  # for what is there already
MOST_S = 14 * 24 * 3600.0  # that poll(2) takes


class Line:
    """Between this rank and another of its host."""

    def __init__(self, sock: socket.socket, rank: int, limit_s: float) -> None:
        """limit_s: for how long to wait for a note, at most."""
        self.sock, self.rank, self.limit_s = sock, rank, min(limit_s, MOST_S)
        self.heard: dict[Note, int] = {}  # values of notes that nobody here has asked for
        self.said: Counter[tuple[int, int]] = Counter()  # notes by kind and tag
        self.asked: Counter[tuple[int, int]] = Counter()
        self.rest = b""  # of a note
        self.ready = select.poll()
        sock.setblocking(False)

    def say(self, kind: int, tag: int, number: int, value: int = 0) -> None:
        """The socket takes hundreds of notes that the other rank has not looked at."""
        left = memoryview(NOTE.pack(kind, tag, number, value))
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                self.wait(select.POLLIN | select.POLLOUT)
            except BrokenPipeError as error:
                raise self.lost() from error

    def hear(self, kind: int, tag: int, number: int) -> int:
        """The note's value. Raises TimeoutError, or ConnectionResetError where the rank ended."""
        while (kind, tag, number) not in self.heard:
            if not self.listen():
                self.wait(select.POLLIN)
        return self.heard.pop((kind, tag, number))

    def listen(self) -> bool:
        """Whether there was something to be heard."""
        try:
            data = self.sock.recv(1 << 14)
        except BlockingIOError:
            return False
        except ConnectionResetError as error:
            raise self.lost() from error
        if not data:
            raise self.lost()
        data = self.rest + data
        whole = len(data) - len(data) % NOTE.size
        self.rest = data[whole:]
        for kind, tag, number, value in NOTE.iter_unpack(data[:whole]):
            self.heard[kind, tag, number] = value
        return True

    def wait(self, events: int) -> None:
        self.ready.register(self.sock, events)
        found = self.ready.poll(self.limit_s * 1e3)
        if not found:
            raise TimeoutError(f"rank {self.rank} has said nothing for {self.limit_s:.0f} s")
        if events & select.POLLOUT and found[0][1] & select.POLLIN:
            self.listen()  # it may be waiting for room as well

    def lost(self) -> ConnectionResetError:
        # the watchdog knows such words from gloo
        return ConnectionResetError(
            errno.ECONNRESET, f"Connection closed by peer: rank {self.rank}"
        )


class Lines:
    """Of this rank, by the other's number in the job."""

    def __init__(self, ranks: Sequence[int], by_rank: dict[int, Line], complete: bool) -> None:
        self.ranks, self.by_rank, self.complete = ranks, by_rank, complete  # all have one to all
        self.agreements = 0

    def lowest(self, value: int) -> int:
        """The least that any of the ranks says. Collective; the lines must be complete.

        In round k everyone knows of 2^k ranks (the dissemination barrier of Hensgen, Finkel and
        Manber, 1988).
        """
        world, me = len(self.ranks), self.ranks.index(dist.get_rank())
        self.agreements += 1
        step = 1
        while step < world:
            to, source = self.ranks[(me + step) % world], self.ranks[(me - step) % world]
            self.by_rank[to].say(AGREED, step, self.agreements, value)
            value = min(value, self.by_rank[source].hear(AGREED, step, self.agreements))
            step *= 2
        return value


@dataclass(frozen=True)
class _Word:
    """What a rank says of itself when lines are laid."""

    where: Host
    secret: int
    door: bytes  # name of its socket


def lay_lines(ranks: Sequence[int], group: dist.ProcessGroup, limit_s: float) -> Lines:
    """Between all of the ranks that share a host. Collective over `group`, which are the ranks.

    limit_s: for how long to wait for a note, at most.
    """
    me, here = dist.get_rank(), machine()
    secret = unseeded_number()
    with socket.socket(socket.AF_UNIX) as door:
        if here is not None:
            door.bind("")  # a free name of Linux's abstract namespace, which needs no file
            door.listen(len(ranks))
        mine = _Word(here, secret, door.getsockname() if here is not None else b"")
        words = all_say(mine, ranks, group)
        beside = {r for r, word in words.items() if r != me and here and word.where == here}
        called = {rank: call(words[rank], me) for rank in sorted(beside) if rank > me}
        socks = {rank: sock for rank, sock in called.items() if sock is not None}
        reached = all_say(set(socks), ranks, group)
        callers = {rank for rank, theirs in reached.items() if me in theirs}
        while callers - socks.keys():
            rank, sock = answer(door, callers, secret)
            socks[rank] = sock
    complete = all(b in reached[a] for i, a in enumerate(ranks) for b in ranks[i + 1 :])
    return Lines(ranks, {r: Line(sock, r, limit_s) for r, sock in socks.items()}, complete)


def all_say(mine: T, ranks: Sequence[int], group: dist.ProcessGroup) -> dict[int, T]:
    """What every rank says, by rank. Collective."""
    everyone: list[Any] = [None] * len(ranks)
    dist.all_gather_object(everyone, mine, group=group)
    return dict(zip(ranks, everyone, strict=True))


def machine() -> Host:
    """Equal where process ids mean the same; None where there is no telling."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:  # another system, or a container that hides them
        return None


def unseeded_number() -> int:
    """The run's own random numbers are left alone."""
    generator = torch.Generator()
    generator.seed()
    return int(torch.randint(1 << 62, (1,), generator=generator))


def call(word: _Word, me: int) -> socket.socket | None:
    """A connection to a rank's door; None where it is of another network namespace."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(word.door)
    except OSError:
        sock.close()
        return None
    sock.sendall(HELLO.pack(me, word.secret))
    return sock


def answer(door: socket.socket, callers: set[int], secret: int) -> tuple[int, socket.socket]:
    """The next of the callers, which are all there. Others on this host may have found the door."""
    door.settimeout(CALL_S)
    while True:
        sock, _ = door.accept()
        sock.settimeout(CALL_S)
        with suppress(OSError):
            said = sock.recv(HELLO.size)
            rank, word = HELLO.unpack(said) if len(said) == HELLO.size else (-1, 0)
            if rank in callers and word == secret:
                return rank, sock
        sock.close()
