"""Ranks that work on the same sequences: what one of them is given or finds, on all of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.packing import empty_batch
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.types import Batch


@dataclass(frozen=True)
class Header:
    """A field of a Batch on its way."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def broadcast_batch(
    batch: Batch, group: dist.ProcessGroup, source: int, device: torch.device
) -> Batch:
    """The Batch of the group's rank `source`, on the CPU. Collective over the group."""
    me = dist.get_rank(group)
    fields = {"cu_seqlens": batch.cu_seqlens, **dict(batch.tensors())}
    headers = [Header(name, t.dtype, tuple(t.shape)) for name, t in fields.items()]
    headers = broadcast_object(headers, group, source, device)
    size = sum(math.prod(h.shape) * h.dtype.itemsize for h in headers)
    row = torch.empty(size, dtype=torch.uint8)
    if me == source:
        parts = [fields[h.name].contiguous().view(-1).view(torch.uint8) for h in headers]
        torch.cat(parts, out=row)
    row = row.to(device)
    dist.broadcast(row, group=group, group_src=source)
    if me == source:
        return batch
    row, start, found = row.cpu(), 0, {}
    for h in headers:
        end = start + math.prod(h.shape) * h.dtype.itemsize
        part = row[start:end].clone()  # so that it lies where its dtype may lie
        found[h.name] = part.view(h.dtype).view(h.shape)
        start = end
    received = empty_batch(found["cu_seqlens"].diff(), found["reward_components"].shape[1])
    for name, tensor in found.items():
        setattr(received, name, tensor)
    return received


class SumForward(torch.autograd.Function):
    """The sum over a group whose ranks then all do the same: each keeps its part's gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
