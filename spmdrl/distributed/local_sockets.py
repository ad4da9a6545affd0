"""Notes of a few bytes between ranks of one host, each pair's through a Unix socket of its own.

gloo's messages pass through a thread at either end, which for a few bytes costs more than all else:
0.15 ms of a processor on ours. A note costs a tenth. Ranks on other hosts have no line.

A socket takes some 280 notes that nobody has looked at. So that ranks which wait for each other in
a circle get on, one that waits looks at all of its lines, also those of other topologies.
"""

from __future__ import annotations

import errno
import os
import secrets
import select
import socket
import struct
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch.distributed as dist

T = TypeVar("T")
Host = tuple[str, str] | None
Note = tuple[int, int, int]  # kind, tag, number

# kinds of notes: a message lies ready in the sender's memory, was read, a rank's word for `lowest`
SHOWN, READ, AGREED = 1, 2, 3
NOTE = struct.Struct("=iiqq")  # kind, tag, number, value
HELLO = struct.Struct("=iq")  # caller's rank, the secret of the one called
PEER = struct.Struct("=iII")  # process, user and group at the other end (unix(7), SO_PEERCRED)
CALL_S = 5.0  # for what is there already
MOST_S = 24 * 24 * 3600.0  # poll(2) counts milliseconds in 32 bits


class Switchboard:
    """All lines of a process, of which any may have something to be heard while one is awaited."""

    def __init__(self) -> None:
        self.lines: WeakValueDictionary[int, Line] = WeakValueDictionary()  # by their socket
        self.ready = select.poll()

    def add(self, line: Line) -> None:
        self.lines[line.sock.fileno()] = line
        self.ready.register(line.sock, select.POLLIN)

    def wait(self, line: Line, until: float, room: bool = False) -> None:
        """Waits until any line has something to be heard, or this one has room for more.

        until: of time.monotonic(). Raises TimeoutError past it.
        """
        left = until - time.monotonic()
        if left < 0:
            raise TimeoutError(f"rank {line.rank} has said nothing for {line.limit_s:.0f} s")
        self.ready.register(line.sock, select.POLLIN | (select.POLLOUT if room else 0))
        for number, events in self.ready.poll(min(left, MOST_S) * 1e3):
            other = self.lines.get(number)
            if other is None:
                self.ready.unregister(number)  # nobody's any more
            elif events & ~select.POLLOUT:
                other.listen()
        if room and not line.ended:
            self.ready.register(line.sock, select.POLLIN)


BOARD = Switchboard()


class Line:
    """Between this rank and another of its host."""

    def __init__(
        self, sock: socket.socket, rank: int, limit_s: float, board: Switchboard = BOARD
    ) -> None:
        """limit_s: for how long to wait for a note, at most."""
        self.sock, self.rank, self.limit_s, self.board = sock, rank, limit_s, board
        self.heard: dict[Note, int] = {}  # values of notes that nobody here has asked for
        self.shown: Counter[int] = Counter()  # messages so far, by tag (spmdrl.distributed.p2p)
        self.told: Counter[int] = Counter()
        self.rest = b""  # of a note
        self.ended = False
        sock.setblocking(False)
        board.add(self)

    def say(self, kind: int, tag: int, number: int, value: int = 0) -> None:
        """Returns before the other rank has looked at it, unless hundreds are waiting for that.

        Raises as `hear`.
        """
        left, until = memoryview(NOTE.pack(kind, tag, number, value)), 0.0
        while left:
            try:
                left = left[self.sock.send(left) :]
            except BlockingIOError:
                until = until or time.monotonic() + self.limit_s
                self.board.wait(self, until, room=True)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self.lost() from error

    def hear(self, kind: int, tag: int, number: int) -> int:
        """The note's value. Raises TimeoutError, or ConnectionResetError where the rank ended."""
        note, until = (kind, tag, number), 0.0
        while note not in self.heard:
            if self.ended:
                raise self.lost()
            if not self.listen():
                until = until or time.monotonic() + self.limit_s
                self.board.wait(self, until)
        return self.heard.pop(note)

    def listen(self) -> bool:
        """Whether there was something to be heard, if only an end."""
        try:
            data = self.sock.recv(1 << 14)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:
            if not self.ended:
                self.board.ready.unregister(self.sock)  # it would be ready for ever
            self.ended = True
            return True
        data = self.rest + data
        whole = len(data) - len(data) % NOTE.size
        self.rest = data[whole:]
        for kind, tag, number, value in NOTE.iter_unpack(data[:whole]):
            self.heard[kind, tag, number] = value
        return True

    def lost(self) -> ConnectionResetError:
        # the watchdog knows such words from gloo
        return ConnectionResetError(
            errno.ECONNRESET, f"Connection closed by peer: rank {self.rank}"
        )


class Lines:
    """The lines of this rank, by the other's number in the job."""

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
    """The facts that a rank tells of itself when lines are laid."""

    where: Host
    pid: int
    secret: int
    door: str  # name of its socket


def lay_lines(ranks: Sequence[int], group: dist.ProcessGroup, limit_s: float) -> Lines:
    """Between all of the ranks that share a host. Collective over `group`, which are the ranks.

    limit_s: for how long to wait for a note, at most.
    """
    me = dist.get_rank()
    with socket.socket(socket.AF_UNIX) as door:
        here, name = machine(), open_door(door, len(ranks))
        mine = _Word(here if name else None, os.getpid(), secrets.randbits(62), name)
        words = all_say(mine, ranks, group)
        beside = {
            rank: word for rank, word in words.items()
            if rank != me and mine.where is not None and word.where == mine.where
        }  # fmt: skip
        called = {rank: call(word, me) for rank, word in beside.items() if rank > me}
        socks = {rank: sock for rank, sock in called.items() if sock is not None}
        reached = all_say(set(socks), ranks, group)
        callers = {rank: beside[rank].pid for rank in beside if me in reached[rank]}
        socks |= answer(door, callers, mine.secret)
    both = all_say(set(socks), ranks, group)  # a line has two ends
    lines = {r: Line(sock, r, limit_s) for r, sock in socks.items() if me in both[r]}
    complete = all(a in both[b] and b in both[a] for a in ranks for b in ranks if a < b)
    return Lines(ranks, lines, complete)


def all_say(mine: T, ranks: Sequence[int], group: dist.ProcessGroup) -> dict[int, T]:
    """Returns what every rank says, by rank. Collective."""
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


def open_door(door: socket.socket, callers: int) -> str:
    """Its name; "" where the system or its policy has no such sockets."""
    name = f"\0spmdrl-{secrets.token_hex(16)}"  # abstract: needs no file
    try:
        door.bind(name)
        door.listen(callers)
    except OSError:
        return ""
    return name


def call(word: _Word, me: int) -> socket.socket | None:
    """A connection to a rank's door; None where it is of another network namespace, or somebody
    else on this host keeps it busy."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        sock.connect(word.door)
        if at_the_other_end(sock) == word.pid:
            sock.sendall(HELLO.pack(me, word.secret))
            return sock
    except OSError:
        pass
    sock.close()
    return None


def answer(door: socket.socket, callers: dict[int, int], secret: int) -> dict[int, socket.socket]:
    """Connections by rank. callers: processes by rank, which have called; any other is not let in.

    Where somebody else was quicker and the door is full, callers may be missing.
    """
    found: dict[int, socket.socket] = {}
    until = time.monotonic() + CALL_S
    while callers.keys() - found.keys() and time.monotonic() < until:
        door.settimeout(max(0.001, until - time.monotonic()))
        with suppress(OSError):
            sock, _ = door.accept()
            rank = caller(sock, callers, secret)
            if rank is None:
                sock.close()
            else:
                found[rank] = sock
    return found


def caller(sock: socket.socket, callers: dict[int, int], secret: int) -> int | None:
    """Its rank; None where it is none of the callers, or says nothing."""
    try:
        if at_the_other_end(sock) not in callers.values():
            return None
        sock.settimeout(CALL_S)
        said = sock.recv(HELLO.size)
    except OSError:
        return None
    rank, word = HELLO.unpack(said) if len(said) == HELLO.size else (-1, 0)
    return rank if rank in callers and word == secret else None


def at_the_other_end(sock: socket.socket) -> int:
    """A process."""
    return PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[0]
