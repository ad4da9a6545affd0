"""Linear layers on CPUs through oneDNN.

For float32 torch calls MKL, which takes a slow path on processors that are not Intel's: on a Zen 5
core 95 GFLOP/s where oneDNN reaches 220 (kernels/bench/cpu.py measures it). oneDNN's operator
has no autograd formula, so this adds one. Everywhere else this is torch's own linear.

`product`, `write_product` and `add_product` are for code that makes its gradients itself and reuses
its memory, the LM head: on Intel's processors, where both are as fast, they take MKL, which writes
where it is told to; oneDNN's operator does not.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl_kernels.torch_compat import onednn_linear

ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. x: (..., in), weight: (out, in), bias: (out,) -> (..., out)."""
    if ONEDNN and x.is_cpu and x.dtype == torch.float32 and x.numel():
        if torch.is_grad_enabled():
            rows = _OneDnnLinear.apply(x.reshape(-1, x.shape[-1]), weight, bias)
            return rows.view(*x.shape[:-1], len(weight))  # here, or nobody could write into it
        return onednn(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def matmul_nt(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a b^T + bias for 2-D float32 CPU tensors of any strides."""
    if torch.compiler.is_compiling():
        return _traced_matmul_nt(a, b, bias)
    return onednn_linear(a, b, bias)


# inductor has a rule of its own for oneDNN's operator, which fails where weights are not constants
@torch.library.custom_op("spmdrl::matmul_nt", mutates_args=())
def _traced_matmul_nt(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return onednn_linear(a, b, bias)


@_traced_matmul_nt.register_fake
def _(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0])


def product(a: Tensor, b: Tensor, bias: Tensor | None, buffer: Tensor) -> Tensor:
    """a b^T + bias: (rows, columns). It may lie in buffer, a flat tensor of as many or more."""
    if _by_onednn(a):
        return matmul_nt(a, b, bias)
    out = buffer[: len(a) * len(b)].view(len(a), len(b))
    if bias is None:
        return torch.mm(a, b.T, out=out)
    return torch.addmm(bias, a, b.T, out=out)


def write_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """out[...] = a b."""
    if not _by_onednn(a):
        torch.mm(a, b, out=out)
        return
    for part in _pieces(out):
        out[part] = matmul_nt(a[part], b.T)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b. total may be of a wider dtype: then each product is rounded to a's, but small
    ones, where that is cheap, are not."""
    if total.dtype != a.dtype:
        small = len(a) * a.shape[1] * b.shape[1] < 1 << 24
        total += a.float() @ b.float() if small else a @ b
    elif not _by_onednn(a):
        total.addmm_(a, b)
    else:
        for part in _pieces(total):
            total[part] += matmul_nt(a[part], b.T)


def _pieces(matrix: Tensor) -> list[slice]:
    """Of rows, of a megabyte each, so that the copies that oneDNN's operator makes stay small."""
    size = max(64, (1 << 20) // max(1, 4 * matrix.shape[1]))
    return [slice(first, first + size) for first in range(0, len(matrix), size)]


def _by_onednn(a: Tensor) -> bool:
    if not (a.is_cpu and a.dtype == torch.float32 and torch.backends.mkldnn.is_available()):
        return False
    return not (torch.backends.mkl.is_available() and is_intel())


@cache
def is_intel() -> bool:
    """Whether MKL takes its fast path: the processor says that it is Intel's."""
    file = Path("/proc/cpuinfo")
    return file.is_file() and "GenuineIntel" in file.read_text()


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out = matmul_nt(x.reshape(-1, x.shape[-1]), weight, bias)
    return out.view(*x.shape[:-1], len(weight))


class FastLinear(nn.Linear):
    """nn.Linear with `linear` as its forward."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fast_linear(model: nn.Module) -> None:
    """Turns every plain nn.Linear of the model into a FastLinear, in place."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FastLinear


class _OneDnnLinear(torch.autograd.Function):
    """x: (rows, in) -> (rows, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return matmul_nt(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = matmul_nt(grad, weight.T)
        if ctx.needs_input_grad[1]:
            grad_weight = matmul_nt(grad.T, x.T)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            grad_bias = grad.sum(0)
        return grad_x, grad_weight, grad_bias
