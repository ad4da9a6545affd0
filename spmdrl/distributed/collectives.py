"""Collectives that more than one module needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.distributed.agreement import gather_to_all, lowest
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import (
    default_group,
    default_time_limit,
    group_count,
    set_default_group,
    set_group_count,
    timeout_of,
)

T = TypeVar("T")
TREE_BYTES = 16 << 20


class FailedElsewhere(RuntimeError):
    """Another rank's share of common work failed; there the cause is raised."""


def all_gather_rows(rows: Tensor, topology: Topology) -> list[Tensor]:
    """Gathers (n_r, ...) CPU tensors whose first size differs by rank: one tensor per rank.

    Of at most TREE_BYTES in all they go along a tree, in 2 * log2(ranks) steps, else round a ring,
    where each rank passes all of it on but once.
    """
    counts = gather_to_all(len(rows), topology.control)
    row_bytes = rows.element_size() * prod(rows.shape[1:])
    if sum(counts) * row_bytes <= TREE_BYTES:
        data = rows.contiguous().view(torch.uint8).numpy()
        gathered = gather_to_all(data, topology.control)
        return [torch.from_numpy(part).view(rows.dtype) for part in gathered]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded, group=topology.group)
    return [part[:count] for part, count in zip(found, counts, strict=True)]


def all_to_all_rows(rows: Tensor, send_counts: list[int], topology: Topology) -> Tensor:
    """Sends consecutive runs of rows to the ranks in order; returns what they sent, in rank order.

    rows: (n, ...) on the CPU, sum(send_counts) == n.
    """
    send = torch.tensor(send_counts, dtype=torch.int64)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send, group=topology.group)
    result = rows.new_empty((int(receive.sum()), *rows.shape[1:]))
    dist.all_to_all_single(
        result, rows.contiguous(), receive.tolist(), send_counts, group=topology.group
    )
    return result


def sum_over_ranks(value: float, topology: Topology) -> float:
    """The float64 sum of one number over all ranks."""
    total = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(total, group=topology.group)
    return float(total)


def kth_largest(values: Tensor, k: int, topology: Topology) -> float:
    """The k-th largest of all ranks' (n_r,) float64 values; -inf where there are fewer than k.

    A radix search, one byte at a time: eight all-reduces of 256 counts whatever the sizes.
    """
    bits = values.contiguous().view(torch.int64)
    # float order as unsigned order, shifted into int64: negative floats run backwards
    keys = torch.where(bits < 0, ~bits, bits ^ torch.iinfo(torch.int64).min)
    prefix, left = 0, k
    for shift in range(56, -8, -8):
        digit = (keys >> shift) & 255
        same = torch.ones_like(keys, dtype=torch.bool)
        if shift < 56:
            same = (keys >> (shift + 8)) & ((1 << (56 - shift)) - 1) == prefix
        counts = torch.bincount(digit[same], minlength=256)
        dist.all_reduce(counts, group=topology.group)
        above = counts.flip(0).cumsum(0)
        if int(above[-1]) < left:
            return -float("inf")
        found = int((above >= left).nonzero()[0])
        left -= int(above[found] - counts.flip(0)[found])
        prefix = (prefix << 8) | (255 - found)
    key = torch.tensor(prefix - (1 << 64) if prefix >= 1 << 63 else prefix)
    bits = torch.where(key >= 0, ~key, key ^ torch.iinfo(torch.int64).min)
    return float(bits.view(torch.float64))


def together(group: dist.ProcessGroup, work: Callable[[], T]) -> T:
    """Does the work on every rank, and returns when all have done theirs. Collective.

    A failure is raised where it happened, FailedElsewhere on the group's other ranks: none is left
    alone in what follows. Safe in a thread whose group no other thread uses: it asks nothing of
    torch.distributed's global state, which the main thread may be changing (world_of).
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised again below
        failure = error
    try:
        failed = lowest(group.size() if failure is None else group.rank(), group)
    except RuntimeError as lost:  # a rank has gone: this one's own failure may be why
        raise failure or lost from lost
    if failure is not None:
        raise failure
    if failed < group.size():
        raise FailedElsewhere(f"rank {failed} of {group.size()} failed")
    return result


def broadcast_object(
    value: Any, group: dist.ProcessGroup, source: int = 0, device: torch.device | None = None
) -> Any:
    """Returns the value that the group's rank number `source` gives, on every rank. Collective.

    device: where the group's tensors can travel; None: on the CPU of a gloo group.
    """
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=source, device=device)
    return values[0]


def first_of(value: T | None, topology: Topology) -> tuple[int, T] | None:
    """Returns (rank, value) of the first rank of the topology that has a value, on all its ranks;
    None where none has one. Collective.
    """
    first = topology.lowest(topology.world if value is None else topology.rank)
    if first == topology.world:
        return None
    return first, broadcast_object(value, topology.control, first)


def level_group_count(group: dist.ProcessGroup | None = None) -> None:
    """After some ranks made process groups among themselves. Collective over the job.

    group: all its ranks, where CPU tensors can travel; None: torch.distributed's own.

    torch names a group by a counter, and ranks that disagree on the name of their next common group
    wait for each other for ever.
    """
    count = torch.tensor([group_count()])
    dist.all_reduce(count, op=dist.ReduceOp.MAX, group=group)
    set_group_count(int(count))


@contextmanager
def world_of(group: dist.ProcessGroup) -> Iterator[None]:
    """Meanwhile the group is all that torch.distributed knows: its ranks are numbered from 0.

    For libraries that take the default group for their world: they see the group's ranks alone,
    and make their own groups among them, whatever other ranks the job has and whatever they do.
    Those get the time limit of the group where the library gives none.
    """
    world = default_group()
    set_default_group(group)
    try:
        with default_time_limit(timeout_of(group)):
            yield
    finally:
        set_default_group(world)
