"""Copies of many tensors at once, with a cast on the way.

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
        and switch.is_current(tensors[0].device)
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
