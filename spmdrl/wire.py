"""Messages of CPU tensors between two ranks: over gloo, or read where they lie.

On one host gloo's socket copies everything twice and keeps both ends at it. A rank may read another
process's memory instead (process_vm_readv(2), cross-memory attach in MPI libraries): the sender
says where a message lies, the receiver reads it, which is one copy, and says that it has. Where the
kernel refuses, as between containers or where Yama lets only root trace, messages go over gloo.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.topology import Topology

READ_BYTES = 256 << 10  # shorter messages take the socket: two notes cost as much
READ_TAG = 1 << 16  # beside a message's own
ACKS = 16  # under way at most
IOV_MAX = 1024
MOST_BYTES = 1 << 30  # of a call: the kernel stops short of 2 GiB
LIBC = ctypes.CDLL(None, use_errno=True)


class Work(Protocol):
    def wait(self) -> Any: ...


class Wire:
    """Messages among the ranks of a topology, which are named by their numbers in the job.

    Both ends of a message are of one size, contiguous, and called in the same order for each tag;
    a rank waits for those from one source with one tag in that order. What was sent is there to be
    reused when the receiver has waited for it: ranks that send each other something wait for what
    comes before they wait for what goes.
    """

    def __init__(self, topology: Topology) -> None:
        """Collective over the topology."""
        self.group = topology.group
        self.readable, self.readers = neighbours(topology)
        self.acks: deque[dist.Work] = deque()
        self.told: Counter[tuple[int, int]] = Counter()  # messages by source and tag
        self.read: Counter[tuple[int, int]] = Counter()

    def isend(self, values: Tensor, to: int, tag: int = 0) -> Work:
        """`values` must not change before the result was waited for."""
        if to not in self.readers or values.nbytes < READ_BYTES:
            return some(dist.isend(values, to, self.group, tag))
        note, ack = torch.tensor([values.data_ptr()]), torch.zeros(1, dtype=torch.uint8)
        read = some(dist.irecv(ack, to, self.group, tag + READ_TAG))
        return _Shown(some(dist.isend(note, to, self.group, tag)), read, (values, note, ack))

    def irecv(self, place: Tensor | Spans, source: int, tag: int = 0) -> Work:
        """The message lies in `place` when the result was waited for.

        Spans are for a message that `reads` says is read.
        """
        if not self.reads(source, place.nbytes):
            assert isinstance(place, Tensor)
            return some(dist.irecv(place, source, self.group, tag))
        note = torch.zeros(1, dtype=torch.int64)
        told = some(dist.irecv(note, source, self.group, tag))
        number = self.told[source, tag]
        self.told[source, tag] += 1

        def read() -> None:
            assert self.read[source, tag] == number, f"message {number} of {source} out of turn"
            self.read[source, tag] += 1
            spans = Spans([place]) if isinstance(place, Tensor) else place
            read_memory(self.readable[source], int(note), spans)
            ack = torch.zeros(1, dtype=torch.uint8)
            self.acks.append(some(dist.isend(ack, source, self.group, tag + READ_TAG)))
            self.settle(ACKS)

        return _ToRead(told, read)

    def settle(self, left: int = 0) -> None:
        """Until what this rank has read is known to be, but for the last few messages. To be called
        before a wire is dropped: gloo would lose what is under way, and what comes after it."""
        while len(self.acks) > left:
            self.acks.popleft().wait()

    def reads(self, source: int, num_bytes: int) -> bool:
        """Whether a message of that size from that rank is read where it lies."""
        return source in self.readable and num_bytes >= READ_BYTES


@dataclass
class _Shown:
    said: dist.Work
    read: dist.Work
    kept: tuple[Tensor, ...]

    def wait(self) -> None:
        self.said.wait()
        self.read.wait()


@dataclass
class _ToRead:
    told: dist.Work
    read: Callable[[], None]
    done: bool = False

    def wait(self) -> None:
        if not self.done:
            self.told.wait()
            self.read()
            self.done = True


def some(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is in the group
    return work


def neighbours(topology: Topology) -> tuple[dict[int, int], set[int]]:
    """(process ids of ranks whose memory this one can read, ranks that can read this one's).

    Found by trying. Collective.
    """
    word = torch.randint(1 << 62, (1,), generator=_unseeded())
    mine = (machine(), os.getpid(), word.data_ptr(), int(word))
    everyone: list[Any] = [None] * topology.world
    dist.all_gather_object(everyone, mine, group=topology.control)
    readable = {}
    for rank, (where, pid, address, value) in zip(topology.ranks, everyone, strict=True):
        if pid != os.getpid() and where == mine[0] and where is not None:
            found = torch.zeros(1, dtype=torch.int64)
            try:
                read_memory(pid, address, Spans([found]))
            except OSError:
                continue
            if int(found) == value:
                readable[rank] = pid
    can_read: list[Any] = [None] * topology.world
    dist.all_gather_object(can_read, sorted(readable), group=topology.control)
    me = dist.get_rank()
    return readable, {r for r, them in zip(topology.ranks, can_read, strict=True) if me in them}


def machine() -> tuple[str, str] | None:
    """Where process ids mean the same; None where memory cannot be read."""
    if not hasattr(LIBC, "process_vm_readv"):
        return None
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:  # a container that hides them
        return None


class _Span(ctypes.Structure):
    """struct iovec of process_vm_readv(2)."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class Spans:
    """Contiguous CPU tensors that one message fills, one after the other. They must not move."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert all(t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        self.tensors = tensors
        self.nbytes = sum(tensor.nbytes for tensor in tensors)
        pieces = [
            (t.data_ptr() + first, min(MOST_BYTES, t.nbytes - first))
            for t in tensors for first in range(0, t.nbytes, MOST_BYTES)
        ]  # fmt: skip
        self.runs: list[tuple[int, int, Any]] = []  # (bytes, number, array) of a call
        run: list[tuple[int, int]] = []
        size = 0
        for piece in pieces:
            if len(run) == IOV_MAX or size + piece[1] > MOST_BYTES:
                self.runs.append((size, len(run), array_of(run)))
                run, size = [], 0
            run.append(piece)
            size += piece[1]
        self.runs.append((size, len(run), array_of(run)))


def array_of(run: list[tuple[int, int]]) -> ctypes.Array[_Span]:
    return (_Span * len(run))(*(_Span(address, num_bytes) for address, num_bytes in run))


def read_memory(pid: int, address: int, place: Spans) -> None:
    """place.nbytes of another process, from `address` on. Raises OSError."""
    for num_bytes, number, array in place.runs:
        source = _Span(address, num_bytes)
        count = LIBC.process_vm_readv(
            pid, array, ctypes.c_ulong(number), ctypes.byref(source), ctypes.c_ulong(1),
            ctypes.c_ulong(0),
        )  # fmt: skip
        address += num_bytes
        if count == num_bytes:
            continue
        code = ctypes.get_errno() if count < 0 else errno.EFAULT
        if code == errno.ESRCH:  # the watchdog knows such words from gloo
            raise ConnectionResetError(code, f"Connection closed by peer: no process {pid}")
        raise OSError(code, f"cannot read the memory of process {pid}: {os.strerror(code)}")


def _unseeded() -> torch.Generator:
    """The run's own random numbers are left alone."""
    generator = torch.Generator()
    generator.seed()
    return generator
