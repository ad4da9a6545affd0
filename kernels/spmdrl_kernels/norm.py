"""RMSNorm on CPUs with a backward pass written out; on GPUs it is norm_triton.py's.

y = w * x / sqrt(mean(x^2) + eps). Source: Zhang and Sennrich 2019, arXiv 1910.07467, eq. 4.
Autograd's own backward reduces the weight's gradient through a broadcast product; this one costs a
fifth of it (kernels/bench/cpu.py measures it).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from spmdrl_kernels.switch import on_triton


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x: (..., size) float32, on GPUs of any width; weight: (size,) -> (..., size).

    offset: added to the weight; 1 in Gemma.
    """
    if on_triton(x, weight):
        from spmdrl_kernels import norm_triton

        return norm_triton.rms_norm(x, weight, eps, offset)
    return _RmsNorm.apply(x, weight + offset if offset else weight, eps)


class FastRmsNorm(nn.Module):
    """Takes the place of a Hugging Face RMSNorm that computes the formula above in float32."""

    weight: Tensor
    variance_epsilon: float
    offset: float = 0.0

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon, self.offset)


def use_fast_rms_norm(model: nn.Module) -> None:
    """Turns Llama's RMSNorm and its copies (Qwen, Mistral, ...) into FastRmsNorm, in place.

    They are told by `variance_epsilon`; Gemma's, which scales by 1 + weight, has no such field.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.__class__ = FastRmsNorm


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = (norm * norm / x.shape[-1] + eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, weight, scale)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """With n = x * scale: dx = scale * (g w - n mean(g w n)), dw = sum over rows of g n."""
        normed, weight, scale = ctx.saved_tensors
        size = normed.shape[-1]
        product = grads[0] * normed
        rows = product.reshape(-1, size)
        grad_weight = rows.sum(0)
        mean = torch.mv(rows, weight).view(scale.shape) / size
        grad = torch.mul(grads[0], weight, out=product)
        return grad.addcmul_(normed, mean, value=-1).mul_(scale), grad_weight, None
