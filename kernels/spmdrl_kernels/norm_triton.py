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
            _forward_kernel[(len(rows),)](
                rows, weight, out, scale, size, eps, offset, **_block(size)
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
        programs = min(num_rows, _programs(rows))
        to_weight = rows.new_empty(programs, size, dtype=torch.float32)
        if rows.numel():
            _backward_kernel[(programs,)](
                rows, weight, scale, grad, to_x, to_weight, num_rows, size, ctx.offset,
                **_block(size),
            )  # fmt: skip
        to_x = to_x.view(grads[0].shape).to(rows.dtype)
        return to_x, to_weight.sum(0).to(weight.dtype), None, None


def _programs(rows: Tensor) -> int:
    """Each sums the weight's gradient over rows of its own: few enough to add up afterwards."""
    if not rows.is_cuda:
        return 3
    return 4 * torch.cuda.get_device_properties(rows.device).multi_processor_count


def _block(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"SIZE": block, "num_warps": min(16, max(1, block // 512))}


@triton.jit
def _forward_kernel(x, weight, out, scales, size, eps, offset, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, SIZE)
    inside = cols < size
    values = tl.load(x + row * size + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    scale = 1.0 / tl.sqrt(tl.sum(values * values, 0) / size + eps)
    tl.store(scales + row, scale)
    tl.store(out + row * size + cols, (values * scale * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    x, weight, scales, grad, to_x, to_weight, num_rows, size, offset, SIZE: tl.constexpr
):
    """Rows program, program + programs, ...; to_weight: (programs, size) float32."""
    program = tl.program_id(0)
    cols = tl.arange(0, SIZE)
    inside = cols < size
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + offset
    total = tl.zeros((SIZE,), tl.float32)
    wide = tl.full((), 1, tl.int64)
    for row in range(program, num_rows, tl.num_programs(0)):
        at = wide * row * size + cols
        g = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scales + row)
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        total += g * normed
        mean = tl.sum(g * w * normed, 0) / size
        found = scale * (g * w - normed * mean)
        tl.store(to_x + at, found.to(to_x.dtype.element_ty), mask=inside)
    tl.store(to_weight + program.to(tl.int64) * size + cols, total, mask=inside)
