"""Full tensors from shards, by all-gathers of bounded size."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


class _Piece(NamedTuple):
    """One weight's place in a bucket."""

    name: str
    weight: DTensor
    rows: int  # of the largest shard; every rank sends so many
    offset: int  # in elements, in each rank's part of the bucket
    numel: int  # of one rank's part


def gathered(
    named: list[tuple[str, Tensor]], dtype: torch.dtype, bucket_bytes: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor in `dtype`) for every weight, in order, on every rank.

    Weights are plain tensors, or DTensors sharded on dimension 0 over one mesh axis (and possibly
    replicated over others). Consecutive shards are cast while they are packed into one buffer and
    gathered together; a bucket and its gathered form are at most `bucket_bytes`, or one weight.
    A yielded tensor may be a view of the bucket: it is valid until the next one is asked for.
    """
    bucket: list[_Piece] = []
    filled = 0
    for name, weight in named:
        if not isinstance(weight, DTensor) or shard_axis(weight) is None:
            yield from _flush(bucket, dtype, device)
            bucket, filled = [], 0
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            yield name, local.to(device, dtype)
            continue
        ranks = weight.device_mesh.size(shard_axis(weight))
        rows = -(-weight.shape[0] // ranks)  # torch.chunk's size; the last shards may be shorter
        numel = rows * prod(weight.shape[1:])
        size = (ranks + 1) * numel * dtype.itemsize
        if bucket and filled + size > bucket_bytes:
            yield from _flush(bucket, dtype, device)
            bucket, filled = [], 0
        offset = bucket[-1].offset + bucket[-1].numel if bucket else 0
        bucket.append(_Piece(name, weight, rows, offset, numel))
        filled += size
    yield from _flush(bucket, dtype, device)


def _flush(
    bucket: list[_Piece], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    if not bucket:
        return
    mesh, axis = bucket[0].weight.device_mesh, shard_axis(bucket[0].weight)
    assert axis is not None
    group, ranks = mesh.get_group(axis), mesh.size(axis)
    mine = torch.zeros(sum(p.numel for p in bucket), dtype=dtype, device=device)
    for piece in bucket:
        local = piece.weight.to_local().reshape(-1)
        mine[piece.offset : piece.offset + len(local)].copy_(local)
    everyone = torch.empty(ranks, len(mine), dtype=dtype, device=device)
    dist.all_gather_into_tensor(everyone.view(-1), mine, group=group)
    del mine
    for piece in bucket:
        full = everyone[:, piece.offset : piece.offset + piece.numel]
        shape = (ranks * piece.rows, *piece.weight.shape[1:])
        yield piece.name, full.reshape(shape)[: piece.weight.shape[0]]


def shard_axis(weight: DTensor) -> int | None:
    """The mesh axis over which dimension 0 is split; None where the weight is whole everywhere."""
    split = [
        (axis, placement.dim)
        for axis, placement in enumerate(weight.placements)
        if isinstance(placement, Shard) and weight.device_mesh.size(axis) > 1
    ]
    if not split:
        return None
    assert len(split) == 1 and split[0][1] == 0, weight.placements
    return split[0][0]
