"""Copies of many tensors at once, with a cast on the way, and of ragged rows.

On a GPU thousands of small tensors, or boxes of tensors, are copied by one launch; elsewhere, and
what the kernels do not know, by PyTorch. A cast has the bits of torch's: rounded to nearest, ties
to even. One read and one write of memory each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from spmdrl_kernels import fp8, switch
from spmdrl_kernels.copies_common import Offset, check_shapes, plain_copies


def on_triton(*tensors: Tensor) -> bool:
    """Whether a kernel copies these: as switch.on_triton, of any dtypes."""
    return (
        switch.enabled
        and all(t.is_cuda for t in tensors)
        and len({t.device for t in tensors}) == 1
        and switch.can_run(tensors[0].device)
    )


@dataclass
class Copies:
    """Copies that are made again and again between tensors of the same shapes.

    The tensors are passed each time and none is kept: if all lie where they lay, the table of
    addresses on the device is used again, else it is made anew. To be used on one stream.

    via: each element is cast to this dtype first, as if it were sent over a wire of it.
    """

    via: torch.dtype | None = None
    table: Any = None  # copies_triton.CopyTable, once there is one

    @torch.no_grad()
    def run(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        """to[i] = source[i]. Any shapes, strides and dtypes; no destination overlaps another.

        Raises ValueError where the shapes of a pair differ.
        """
        if len(to) < 2 or not on_triton(*to, *source):  # one is copied by one launch anyway
            check_shapes(to, source)
            plain_copies(to, source, self.via)
            return
        from spmdrl_kernels import copies_triton

        if self.table is None:
            self.table = copies_triton.CopyTable(self.via)
        self.table.run(to, source)


class Part(NamedTuple):
    """Of a matrix in FP8 whose scales are known."""

    tensor: Tensor  # (rows, columns) float
    first: Offset  # in the matrix
    scale_inv: Tensor  # of all blocks of the matrix, float32

    def quantize(self, to: Tensor) -> None:
        fp8.quantize_part(self.tensor, self.first, self.scale_inv, to)


@dataclass
class Quantized:
    """As Copies: parts of matrices to e4m3, all in one launch."""

    tables: dict[torch.dtype, Any] = field(default_factory=dict)  # copies_triton.BlockTable

    @torch.no_grad()
    def run(self, to: Sequence[Tensor], parts: Sequence[Part]) -> None:
        """to[i]: as parts[i].tensor, float8_e4m3fn."""
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Part]]] = {}
        for out, part in zip(to, parts, strict=True):
            if fp8.by_kernel(part.tensor, out):
                by_dtype.setdefault(part.tensor.dtype, []).append((out, part))
            else:
                part.quantize(out)
        for dtype, jobs in by_dtype.items():
            from spmdrl_kernels import copies_triton

            table = self.tables.setdefault(dtype, copies_triton.BlockTable("given"))
            table.run([p.tensor for _, p in jobs], [p.first for _, p in jobs],
                      [p.scale_inv for _, p in jobs], [out for out, _ in jobs])  # fmt: skip


def gather_rows(rows: Tensor, index: Tensor, distinct: bool = False) -> Tensor:
    """rows: (num_rows, ...) of any dtype, index: (n,) int64 -> (n, ...); differentiable.

    distinct: no row is taken twice, so that the gradient is copied instead of added up. Indices
    are not checked on a GPU.
    """
    return _Gather.apply(rows, index, None, len(index), distinct)


def scatter_rows(rows: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """rows: (n, ...), index: (n,) int64 without repetition -> (num_rows, ...), elsewhere zero.

    The transpose of gather_rows; differentiable.
    """
    return _Scatter.apply(rows, index, None, num_rows)


def gather_ragged(
    rows: Tensor, starts: Tensor, cu_seqlens: Tensor, num_tokens: int, distinct: bool = False
) -> Tensor:
    """Sequences that lie in `rows` (num_rows, ...) from starts (num_seqs,), end to end.

    cu_seqlens: (num_seqs + 1,), of the result, which has num_tokens = cu_seqlens[-1] rows; int64,
    on the device of the rows. From padded rows (num_seqs, length, ...): flatten the first two
    dimensions, starts = length * arange(num_seqs). Differentiable; distinct: as of gather_rows.
    """
    return _Gather.apply(rows, starts, cu_seqlens, num_tokens, distinct)


def scatter_ragged(rows: Tensor, starts: Tensor, cu_seqlens: Tensor, num_rows: int) -> Tensor:
    """The transpose of gather_ragged: (num_tokens, ...) -> (num_rows, ...), elsewhere zero.

    Sequences do not overlap.
    """
    return _Scatter.apply(rows, starts, cu_seqlens, num_rows)


def ragged_index(starts: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Rows of sequences end to end, (num_tokens,) int64."""
    shift = starts - cu_seqlens[:-1]
    shift = shift.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    return shift + torch.arange(num_tokens, device=starts.device)


def _gather(rows: Tensor, starts: Tensor, cu_seqlens: Tensor | None, number: int) -> Tensor:
    if on_triton(rows, starts):
        from spmdrl_kernels import copies_triton

        return copies_triton.gather(rows, starts, cu_seqlens, number)
    index = starts if cu_seqlens is None else ragged_index(starts, cu_seqlens, number)
    return rows.index_select(0, index)


def _scatter(rows: Tensor, starts: Tensor, cu_seqlens: Tensor | None, number: int) -> Tensor:
    out = rows.new_zeros(number, *rows.shape[1:])
    if on_triton(rows, starts):
        from spmdrl_kernels import copies_triton

        return copies_triton.scatter(rows, starts, cu_seqlens, out)
    index = starts if cu_seqlens is None else ragged_index(starts, cu_seqlens, len(rows))
    return out.index_copy_(0, index, rows)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, starts: Tensor, cu_seqlens: Tensor | None, number: int,
        distinct: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(starts, cu_seqlens)
        ctx.num_rows, ctx.distinct = len(rows), distinct
        return _gather(rows, starts, cu_seqlens, number)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        starts, cu_seqlens = ctx.saved_tensors
        (grad,) = grads
        if ctx.distinct:
            return _scatter(grad, starts, cu_seqlens, ctx.num_rows), None, None, None, None
        if cu_seqlens is not None:
            starts = ragged_index(starts, cu_seqlens, len(grad))
        zeros = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return zeros.index_add_(0, starts, grad), None, None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, starts: Tensor, cu_seqlens: Tensor | None, number: int
    ) -> Tensor:
        ctx.save_for_backward(starts, cu_seqlens)
        ctx.number = len(rows)
        return _scatter(rows, starts, cu_seqlens, number)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        starts, cu_seqlens = ctx.saved_tensors
        return _gather(grads[0], starts, cu_seqlens, ctx.number), None, None, None
