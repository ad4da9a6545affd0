"""Rotary position embedding on a GPU, in one pass; backward is the rotation the other way.

(a, b) -> (a cos - b sin, b cos + a sin), where a, b are the halves of a head, as in Hugging Face's
models. Source: Su et al. 2021, arXiv 2104.09864, eq. 34. Inside it is float32, rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl_kernels.switch import dtype_to_store


def plain_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The reference; float32 inside unless given float64."""
    wide = x if x.dtype == torch.float64 else x.float()
    a, b = wide.chunk(2, -1)
    c, s = cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)
    return torch.cat([a * c - b * s, b * c + a * s], -1).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (tokens, heads, head_size), any strides; cos, sin: (tokens, head_size / 2), which may
    be parts of wider rows; no gradient.

    Returns a tensor like x, contiguous.
    """
    if cos.shape != (x.shape[0], x.shape[2] // 2) or cos.shape != sin.shape or x.shape[2] % 2:
        raise ValueError(f"x is {x.shape}, cos is {cos.shape}, sin is {sin.shape}")
    return _Rope.apply(x, *(t if t.stride(1) == 1 else t.contiguous() for t in (cos, sin)))


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, backward=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, backward=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    x = x if x.stride(2) == 1 else x.contiguous()
    tokens, heads, size = x.shape
    out = torch.empty(x.shape, dtype=dtype_to_store(x), device=x.device)
    if x.numel():
        _kernel[(tokens,)](
            x, cos, sin, out, *x.stride()[:2], cos.stride(0), sin.stride(0), heads, size // 2,
            BACKWARD=backward, HEADS=min(8, triton.next_power_of_2(heads)),
            HALF=triton.next_power_of_2(size // 2),
        )  # fmt: skip
    return out.to(x.dtype)


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    x,
    cos,
    sin,
    out,
    token_stride,
    head_stride,
    cos_stride,
    sin_stride,
    num_heads,
    half,
    BACKWARD: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """One token; HEADS of its heads at a time."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, HALF)
    inside = cols < half
    c = tl.load(cos + token * cos_stride + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + token * sin_stride + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACKWARD:
        s = -s
    for first in range(0, num_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        mask = (heads < num_heads)[:, None] & inside[None, :]
        at = x + token * token_stride + heads.to(tl.int64)[:, None] * head_stride + cols[None, :]
        a = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(at + half, mask=mask, other=0.0).to(tl.float32)
        to = out + (token * num_heads + heads)[:, None] * (2 * half) + cols[None, :]
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
        tl.store(to + half, (b * c + a * s).to(out.dtype.element_ty), mask=mask)
