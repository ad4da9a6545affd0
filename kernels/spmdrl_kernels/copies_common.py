"""What copies, their kernels and FP8 share: the plain form, and the address of a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl_kernels.torch_compat import copy_tensors_

FP8_BLOCK = 128  # rows and columns of a matrix in FP8 that have a scale in common

Offset = tuple[int, int]  # of a part's first element, (row, column) in the matrix


def plain_copies(
    to: Sequence[Tensor], source: Sequence[Tensor], via: torch.dtype | None = None
) -> None:
    """The reference; shapes are the caller's to check."""
    if to:
        copy_tensors_(
            list(to),
            [
                s if via is None or via in (s.dtype, t.dtype) else s.to(via)
                for t, s in zip(to, source, strict=True)
            ],
        )


def check_shapes(to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    if len(to) != len(source):
        raise ValueError(f"{len(source)} tensors are to be copied into {len(to)}")
    for t, s in zip(to, source, strict=True):
        if t.shape != s.shape:
            raise ValueError(f"a tensor of shape {tuple(s.shape)} does not fit {tuple(t.shape)}")
