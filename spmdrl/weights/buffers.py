"""Buffers that are weights: the biases by which a router balances experts, for example."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a module that its checkpoints have."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}
