"""The private operators of torch that the kernels call, each behind one function.

Checked with torch 2.13.0. When torch moves, tests/distributed/test_torch_compat.py says
which of these broke.
"""

from __future__ import annotations

import torch
from torch import Tensor


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b by oneDNN, for float32 tensors on a CPU; it has no gradient. Calls
    torch.ops.mkldnn._linear_pointwise.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def copy_tensors_(to: list[Tensor], source: list[Tensor]) -> None:
    """to[i] = source[i] in as few launches as torch knows. Calls torch._foreach_copy_."""
    torch._foreach_copy_(to, source)
