"""Collectives that more than one module needs, and the agreement that ends a phase."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.topology import Topology

T = TypeVar("T")


class PhaseError(RuntimeError):
    """A phase failed on at least one rank; raised with the same text on every rank."""

    def __init__(self, rank: int, host: str, phase: str, cause: str, details: str) -> None:
        super().__init__(f"rank {rank} on {host} failed in phase '{phase}': {cause}")
        self.rank, self.host, self.phase = rank, host, phase
        self.cause, self.details = cause, details


def run_phase(name: str, topology: Topology, work: Callable[[], T]) -> T:
    """Runs `work` on this rank, then agrees with all ranks that it went well everywhere.

    `work` may end differently on different ranks, so it must not contain a collective that another
    rank could be left alone in; where it does (training), the watchdog ends the run instead.
    Costs one all-reduce of one integer. Raises PhaseError on every rank if any rank failed.
    """
    failure: BaseException | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  re-raised on every rank below
        failure = error
    agree(name, topology, failure)
    return result


def agree(phase: str, topology: Topology, failure: BaseException | None) -> None:
    """Raises PhaseError on every rank where `failure` is set on any; names the lowest such rank."""
    failed = torch.tensor([topology.world if failure is None else topology.rank])
    dist.all_reduce(failed, dist.ReduceOp.MIN, group=topology.group)
    if failed.item() == topology.world:
        return
    story: list[Any] = [None]
    if failure is not None and failed.item() == topology.rank:
        if isinstance(failure, PhaseError):
            story = [vars(failure)]
        else:
            cause = f"{type(failure).__name__}: {failure}"
            details = "".join(traceback.format_exception(failure))
            story = [
                {"rank": topology.rank, "host": topology.host, "phase": phase, "cause": cause,
                 "details": details}
            ]  # fmt: skip
    dist.broadcast_object_list(story, src=int(failed.item()), group=topology.group)
    raise PhaseError(**story[0]) from failure


def all_gather_rows(rows: Tensor, topology: Topology) -> list[Tensor]:
    """Gathers (n_r, ...) CPU tensors whose first size differs by rank: one tensor per rank."""
    count = torch.tensor([len(rows)])
    counts = [torch.empty_like(count) for _ in range(topology.world)]
    dist.all_gather(counts, count, group=topology.group)
    most = max(int(c) for c in counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(topology.world)]
    dist.all_gather(gathered, padded, group=topology.group)
    return [g[: int(c)] for g, c in zip(gathered, counts, strict=True)]


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
