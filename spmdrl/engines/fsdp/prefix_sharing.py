"""Prefixes that are computed once: which sequences are computed together, and the copies of keys
and values that the sequences behind a prefix are given (attention.py). layer_kinds.py says which
models can.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spmdrl.data.packing import micro_batches
from spmdrl.data.shared_prefix import Unit, single_units, units_by_prefix
from spmdrl.segments import to_device
from spmdrl.types import Batch


def units_for(batch: Batch, max_tokens: int) -> list[Unit]:
    """Returns what is to stay together in micro-batches of max_tokens: sequences with the prefix
    that they share, or one by one, where groups would fill more micro-batches than sequences do.
    """
    units, lens = units_by_prefix(batch, max_tokens), batch.seq_lens.tolist()
    shared = micro_batches([unit.num_tokens(lens) for unit in units], max_tokens)
    return units if len(shared) <= len(micro_batches(lens, max_tokens)) else single_units(batch)


@dataclass(frozen=True)
class PrefixCopies:
    """Copies rows, some of them several times. In the backward pass the gradients of a row's copies
    are summed, in the copies' order.
    """

    sources: Tensor  # (n,) int64: which row each copy is of
    # by the number of copies: the rows (m,) that have so many, and the copies' places (m, number)
    by_count: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, sources: Tensor, places: Tensor, device: torch.device) -> PrefixCopies:
        """sources, places: (n,) int64 on the CPU, places ascending: where each copy lies."""
        order = torch.argsort(sources, stable=True)
        rows, counts = sources[order].unique_consecutive(return_counts=True)
        parts, numbers = [sources], counts.unique().tolist()
        for number in numbers:
            chosen = counts == number
            lying = places[order][torch.repeat_interleave(chosen, counts)].view(-1, number)
            parts += [rows[chosen], lying]
        sources, *pairs = to_device(parts, device)
        return cls(sources, tuple(zip(pairs[0::2], pairs[1::2], strict=True)))

    def summed(self, copies: Tensor, num_rows: int) -> Tensor:
        """copies: (places, ...), gradients -> (num_rows, ...): 0 for rows without a copy."""
        out = copies.new_zeros(num_rows, *copies.shape[1:])
        for rows, places in self.by_count:
            found = copies.index_select(0, places.flatten())
            if places.shape[1] > 1:
                found = found.unflatten(0, places.shape).sum(1)
            out.index_copy_(0, rows, found)
        return out


class CopyRows(torch.autograd.Function):
    """(num_tokens, ...) -> (num_keys, ...) by `PrefixCopies`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: PrefixCopies) -> Tensor:
        ctx.copies, ctx.num_rows = copies, len(rows)
        return rows.index_select(0, copies.sources)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.copies.summed(grads[0], ctx.num_rows), None
