"""RMSNorm on a GPU: one pass over memory forward, one backward.

y = (w + offset) * x / sqrt(mean(x^2) + eps). Source: Zhang and Sennrich 2019, arXiv 1910.07467,
eq. 4; offset 1 is Gemma's. Everything inside is float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl_kernels.switch import dtype_to_store

LARGEST = 32768  # elements of a row, which one program holds
TILE = 4096  # elements of short rows that a program has at a time


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """The reference: x (..., size), weight (size,); float32 inside unless given float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * (weight.to(wide.dtype) + offset)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: (..., size) bfloat16, float16 or float32; weight: (size,) -> like x."""
    if x.shape[-1] > LARGEST:
        raise ValueError(f"rows of {x.shape[-1]} elements: the kernel holds at most {LARGEST}")
    return _RmsNorm.apply(x, weight, eps, offset)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        size = x.shape[-1]
        rows = x.reshape(-1, size).contiguous()
        weight = weight.contiguous()
        out = torch.empty_like(rows, dtype=dtype_to_store(x))
        scale = rows.new_empty(len(rows), dtype=torch.float32)
        if rows.numel():
            tile = _tile(size)
            _forward_kernel[(triton.cdiv(len(rows), tile["ROWS"]),)](
                rows, weight, out, scale, len(rows), size, eps, offset, **tile
            )
        ctx.save_for_backward(rows, weight, scale)
        ctx.offset = offset
        return out.view(x.shape).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """With n = x * scale, v = w + offset: dx = scale (g v - n mean(g v n)), dw = sum of g n."""
        rows, weight, scale = ctx.saved_tensors
        num_rows, size = rows.shape
        grad = grads[0].reshape(-1, size).contiguous()
        to_x = torch.empty_like(rows, dtype=dtype_to_store(rows))
        tile = _tile(size)
        programs = min(triton.cdiv(num_rows, tile["ROWS"]), _programs(rows))
        to_weight = rows.new_empty(programs, size, dtype=torch.float32)
        if rows.numel():
            _backward_kernel[(programs,)](
                rows, weight, scale, grad, to_x, to_weight, num_rows, size, ctx.offset, **tile
            )
        to_x = to_x.view(grads[0].shape).to(rows.dtype)
        return to_x, to_weight.sum(0).to(weight.dtype), None, None


def _programs(rows: Tensor) -> int:
    """Each sums the weight's gradient over rows of its own: few enough to add up afterwards."""
    if not rows.is_cuda:
        return 3
    return 4 * torch.cuda.get_device_properties(rows.device).multi_processor_count


def _tile(size: int) -> dict[str, int]:
    """A program takes several short rows at a time, some 16 elements a thread: one row of a single
    head would keep a warp waiting for memory.
    """
    block = triton.next_power_of_2(size)
    rows = max(1, TILE // block)
    return {"SIZE": block, "ROWS": rows, "num_warps": min(16, max(1, rows * block // 512))}


@triton.jit
def _forward_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, scales, num_rows, size, eps, offset, SIZE: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, SIZE)
    at = rows[:, None] * size + cols[None, :]
    inside = (rows < num_rows)[:, None] & (cols < size)[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 1) / size + eps)
    tl.store(scales + rows, scale, mask=rows < num_rows)
    normed = values * scale[:, None] * w[None, :]
    tl.store(out + at, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, to_x, to_weight, num_rows, size, offset,
    SIZE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Tiles program, program + programs, ...; to_weight: (programs, size) float32."""
    program = tl.program_id(0)
    cols = tl.arange(0, SIZE)
    w = tl.load(weight + cols, mask=cols < size, other=0.0).to(tl.float32) + offset
    total = tl.zeros((ROWS, SIZE), tl.float32)
    wide = tl.full((), ROWS, tl.int64)
    for tile in range(program, tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = wide * tile + tl.arange(0, ROWS)
        at = rows[:, None] * size + cols[None, :]
        inside = (rows < num_rows)[:, None] & (cols < size)[None, :]
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + rows, mask=rows < num_rows, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        total += g * normed
        gw = g * w[None, :]
        mean = tl.sum(gw * normed, 1) / size
        found = scale * (gw - normed * mean[:, None])
        tl.store(to_x + at, found.to(to_x.dtype.element_ty), mask=inside)
    sums = tl.sum(total, 0)
    tl.store(to_weight + program.to(tl.int64) * size + cols, sums, mask=cols < size)
