"""Buffers that are weights: the biases by which DeepSeek's routers balance experts, for example."""

from __future__ import annotations

from torch import Tensor, nn


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a module that its checkpoints have."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def kept_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the parameters of a module, tied ones once, and the buffers that its checkpoints
    have.
    """
    parameters: dict[str, Tensor] = dict(module.named_parameters())
    return parameters | persistent_buffers(module)
