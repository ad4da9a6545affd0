"""Tensors of packed sequences: offsets, sums and repetitions by sequence, and the way to a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def lengths_to_cu_seqlens(lengths: Tensor) -> Tensor:
    """(n,) int64 lengths -> (n + 1,) int64 offsets, starting at 0."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


ALIGNED = 256  # bytes, at which a tensor in common memory begins


def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copies CPU tensors to a GPU in one piece and without waiting for what it does; they share
    memory there. On a CPU they are what they were.
    """
    if device.type == "cpu":
        return list(tensors)
    ends = list(accumulate(-(-t.nbytes // ALIGNED) * ALIGNED for t in tensors))
    # pinned, or the host would wait until the GPU comes to the copy
    row = torch.empty(ends[-1] if ends else 0, dtype=torch.uint8, pin_memory=True)
    starts = [0, *ends[:-1]]
    for t, start in zip(tensors, starts, strict=True):
        row[start : start + t.nbytes].view(t.dtype).view(t.shape).copy_(t)
    there = row.to(device, non_blocking=True)
    return [
        there[start : start + t.nbytes].view(t.dtype).view(t.shape)
        for t, start in zip(tensors, starts, strict=True)
    ]


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sums (num_tokens,) over consecutive segments: -> (num_seqs,). lengths: on the CPU."""
    (lengths,) = to_device([lengths], values.device)
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def segment_expand(values: Tensor, lengths: Tensor) -> Tensor:
    """Repeats (num_seqs,) over the tokens of each sequence, whose lengths are on the CPU: ->
    (num_tokens,).
    """
    num_tokens = int(lengths.sum())  # known on the host, which need not ask the device
    (lengths,) = to_device([lengths], values.device)
    return torch.repeat_interleave(values, lengths, output_size=num_tokens)
