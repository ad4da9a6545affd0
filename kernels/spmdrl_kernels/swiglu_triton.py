"""SwiGLU on a GPU: silu(gate) * up in one pass, and both gradients in one.

Source: Shazeer 2020, arXiv 2002.05202, section 2. Inside it is float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl_kernels.switch import dtype_to_store

BLOCK = 1024


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """The reference; float32 inside unless given float64."""
    wide = gate if gate.dtype == torch.float64 else gate.float()
    return (torch.nn.functional.silu(wide) * up.to(wide.dtype)).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up: (..., size), which may be the halves of one tensor -> (..., size)."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate is {gate.shape} {gate.dtype}, up is {up.shape} {up.dtype}")
    return _SwiGlu.apply(gate, up)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        rows = [_rows(gate), _rows(up)]
        ctx.save_for_backward(*rows)
        out = gate.new_empty(rows[0].shape, dtype=dtype_to_store(gate))
        if out.numel():
            _forward_kernel[_grid(out)](*rows, out, *_strides(rows), out.shape[1], BLOCK=BLOCK)
        return out.view(gate.shape).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        rows = [*ctx.saved_tensors, _rows(grads[0])]
        dtype = dtype_to_store(rows[0])
        outs = [rows[0].new_empty(rows[0].shape, dtype=dtype) for _ in range(2)]
        if outs[0].numel():
            _backward_kernel[_grid(outs[0])](
                *rows, *outs, *_strides(rows), rows[0].shape[1], BLOCK=BLOCK
            )
        to_gate, to_up = (t.view(grads[0].shape).to(rows[0].dtype) for t in outs)
        return to_gate, to_up


def _rows(x: Tensor) -> Tensor:
    """(rows, size) whose rows are contiguous; a view where x allows one."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _strides(rows: list[Tensor]) -> list[int]:
    return [r.stride(0) for r in rows]


def _grid(out: Tensor) -> tuple[int, int]:
    return len(out), triton.cdiv(out.shape[1], BLOCK)


@triton.jit
def _forward_kernel(gate, up, out, gate_stride, up_stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    x = tl.load(gate + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    found = x / (1.0 + tl.exp(-x)) * y
    tl.store(out + row * size + cols, found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    gate, up, grad, to_gate, to_up, gate_stride, up_stride, grad_stride, size, BLOCK: tl.constexpr
):
    """d silu(x) = s (1 + x (1 - s)), s = sigmoid(x)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < size
    x = tl.load(gate + row * gate_stride + cols, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_stride + cols, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row * grad_stride + cols, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-x))
    at = row * size + cols
    for_gate = g * y * s * (1.0 + x * (1.0 - s))
    tl.store(to_gate + at, for_gate.to(to_gate.dtype.element_ty), mask=inside)
    tl.store(to_up + at, (g * x * s).to(to_up.dtype.element_ty), mask=inside)
