"""Messages of CPU tensors between two ranks: over gloo, or read where they lie.

On one host gloo's socket copies everything twice and keeps both ends at it. A rank may read another
process's memory instead (process_vm_readv(2), cross-memory attach in MPI libraries): the sender
says where a message lies, the receiver reads it, which is one copy, and says that it has
(local_sockets.py). Where the kernel refuses, as between containers or where Yama lets only root
trace, messages go over gloo.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.distributed.local_sockets import READ, SHOWN, Line, all_say
from spmdrl.distributed.topology import Topology

READ_BYTES = 64 << 10  # shorter messages take gloo's socket
IOV_MAX = 1024
MOST_BYTES = 1 << 30  # of a call: the kernel stops short of 2 GiB
LIBC = ctypes.CDLL(None, use_errno=True)


class Work(Protocol):
    def wait(self) -> Any: ...


class P2PTransport:
    """Messages among the ranks of a topology, which are named by their numbers in the job.

    Both ends of a message are of one size, contiguous, and called in the same order for each tag.
    What was sent is there to be reused when the receiver has waited for it: ranks that send each
    other something wait for what comes before they wait for what goes.
    """

    def __init__(self, topology: Topology) -> None:
        """Collective over the topology."""
        self.group, self.lines = topology.group, topology.lines.by_rank
        self.readable, self.readers = neighbours(topology)

    def isend(
        self, values: Tensor | Spans, to: int, tag: int = 0, number: int | None = None
    ) -> Work:
        """`values` must not change before the result was waited for.

        Spans are for a receiver that has an Apart for the message. number: see `number`.
        """
        if isinstance(values, Tensor) and not self.shows(to, values.nbytes):
            return some(dist.isend(values, to, self.group, tag))
        line = self.lines[to]
        number = self.number(to, tag) if number is None else number
        if isinstance(values, Spans):
            assert len(values.table) == len(values.tensors)
            address = -values.address
        else:
            assert values.is_contiguous() and values.device.type == "cpu"
            address = values.data_ptr()
        line.say(SHOWN, tag, number, address)
        return _Shown(line, tag, number, values)

    def number(self, to: int, tag: int) -> int:
        """Returns the number of the next message that `shows`, where it may leave after those that
        come after it.
        """
        line = self.lines[to]
        line.shown[tag] += 1
        return line.shown[tag] - 1

    def irecv(
        self,
        place: Tensor | Spans,
        source: int,
        tag: int = 0,
        apart: Callable[[], Apart] | None = None,
    ) -> Work:
        """The message lies in `place` when the result was waited for.

        Spans are for a message that `reads` says is read. apart: what to do where it lies in many
        places at the sender too.
        """
        if not self.reads(source, place.nbytes):
            assert isinstance(place, Tensor)
            return some(dist.irecv(place, source, self.group, tag))
        line = self.lines[source]
        number = line.told[tag]
        line.told[tag] += 1
        spans = Spans([place]) if isinstance(place, Tensor) else place
        return _ToRead(line, self.readable[source], tag, number, spans, apart)

    def reads(self, source: int, num_bytes: int) -> bool:
        """Whether a message of that size from that rank is read where it lies."""
        return source in self.readable and num_bytes >= READ_BYTES

    def shows(self, to: int, num_bytes: int) -> bool:
        """Whether a message of that size is read by that rank where it lies."""
        return to in self.readers and num_bytes >= READ_BYTES


@dataclass
class Apart:
    """Takes the tensors of a message that lie apart at the sender: a run at a time."""

    row: Tensor  # where a run lies, one tensor after the other; of the sender's dtype
    runs: list[tuple[list[int], Callable[[], object]]]  # (elements of each, what takes them)


@dataclass
class _Shown:
    line: Line
    tag: int
    number: int
    values: Tensor | Spans | None

    def wait(self) -> None:
        if self.values is not None:
            self.line.hear(READ, self.tag, self.number)
            self.values = None


@dataclass
class _ToRead:
    line: Line
    pid: int
    tag: int
    number: int
    spans: Spans | None
    apart: Callable[[], Apart] | None

    def wait(self) -> None:
        if self.spans is None:
            return
        address = self.line.hear(SHOWN, self.tag, self.number)
        if address > 0:
            read_memory(self.pid, address, self.spans)
        else:
            assert self.apart is not None
            read_apart(self.pid, -address, self.apart())
        self.line.say(READ, self.tag, self.number)
        self.spans = None


def some(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


def neighbours(topology: Topology) -> tuple[dict[int, int], set[int]]:
    """(process ids of ranks whose memory this one can read, ranks that can read this one's).

    Found by trying, among those with a line. Collective.
    """
    secret = torch.tensor([secrets.randbits(62)])
    mine = (os.getpid(), secret.data_ptr(), int(secret))
    found = all_say(mine, topology.ranks, topology.control)
    lines = topology.lines.by_rank
    readable = {rank: found[rank][0] for rank in lines if can_read(*found[rank])}
    theirs = all_say(set(readable), topology.ranks, topology.control)
    me = dist.get_rank()
    return readable, {rank for rank in lines if me in theirs[rank]}


def can_read(pid: int, address: int, secret: int) -> bool:
    if not hasattr(LIBC, "process_vm_readv"):
        return False
    found = torch.zeros(1, dtype=torch.int64)
    try:
        read_memory(pid, address, Spans([found]))
    except OSError:
        return False
    return int(found) == secret


class _Span(ctypes.Structure):
    """struct iovec of process_vm_readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Spans:
    """Contiguous CPU tensors of a message, one after the other. They must not move."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        self.tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        pieces = [
            (t.data_ptr() + first, min(MOST_BYTES, t.nbytes - first))
            for t in tensors for first in range(0, t.nbytes, MOST_BYTES)
        ]  # fmt: skip
        self.table = (_Span * len(pieces))(*(_Span(*piece) for piece in pieces))
        self.address = ctypes.addressof(self.table)
        self.runs: list[tuple[int, int, int]] = []  # (bytes, first, number) of a call
        first = size = 0
        for at, (_, num_bytes) in enumerate(pieces):
            if at - first == IOV_MAX or size + num_bytes > MOST_BYTES:
                self.runs.append((size, first, at - first))
                first, size = at, 0
            size += num_bytes
        self.runs.append((size, first, len(pieces) - first))


def read_memory(pid: int, address: int, place: Spans) -> None:
    """place.nbytes of another process, from `address` on. Raises OSError."""
    for num_bytes, first, number in place.runs:
        read(pid, span_of(place.table, first), number, _Span(address, num_bytes), 1, num_bytes)
        address += num_bytes


def read_apart(pid: int, address: int, apart: Apart) -> None:
    """Tensors of another process that its Spans' table at `address` tells of. Raises OSError."""
    table = (_Span * sum(len(lengths) for lengths, _ in apart.runs))()
    num_bytes = ctypes.sizeof(table)
    here = _Span(ctypes.addressof(table), num_bytes)
    read(pid, here, 1, _Span(address, num_bytes), 1, num_bytes)
    first = 0
    for lengths, take in apart.runs:
        num_bytes = sum(lengths) * apart.row.itemsize
        here = _Span(apart.row.data_ptr(), num_bytes)
        read(pid, here, 1, span_of(table, first), len(lengths), num_bytes)
        take()
        first += len(lengths)


def span_of(table: Any, number: int) -> Any:
    return _Span.from_buffer(table, number * ctypes.sizeof(_Span))


def read(pid: int, to: _Span, num_to: int, source: _Span, num_source: int, num_bytes: int) -> None:
    """to, source: the first of as many, one after the other. Raises OSError."""
    count = LIBC.process_vm_readv(
        pid, ctypes.byref(to), ctypes.c_ulong(num_to), ctypes.byref(source),
        ctypes.c_ulong(num_source), ctypes.c_ulong(0),
    )  # fmt: skip
    if count == num_bytes:
        return
    code = ctypes.get_errno() if count < 0 else errno.EFAULT
    if code == errno.ESRCH:  # the watchdog knows such words from gloo
        raise ConnectionResetError(code, f"Connection closed by peer: no process {pid}")
    raise OSError(code, f"cannot read the memory of process {pid}: {os.strerror(code)}")
