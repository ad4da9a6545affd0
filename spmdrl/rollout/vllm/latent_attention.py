"""Multi-head latent attention in vLLM: the products that it makes of a weight are made anew.

When vLLM has loaded a model, it cuts kv_b_proj's weight into W_UK and W_UV, in an order that its
kernels read, and goes on with these. A push writes kv_b_proj; without a second cut the engine would
sample with the old weights. vLLM's own function writes the new cuts where the old ones lie, so that
captured graphs stay right.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.vllm import compat

CPU_BACKEND = "CPU_MLA"  # AMX's would free kv_b_proj's weight, to which pushes write


def is_latent(text: Any) -> bool:
    """Says whether a language model of this config has multi-head latent attention."""
    return getattr(text, "kv_lora_rank", None) is not None


def latent_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    kind = compat.latent_attention_class()
    for name, module in model.named_modules():
        if isinstance(module, kind):
            yield name, module


def mark_absorbed(model: nn.Module) -> bool:
    """Marks the parameters that vLLM has made of others: no trainer has them. Returns whether the
    model has layers of latent attention.
    """
    layers = [layer for _, layer in latent_layers(model)]
    for layer in layers:
        for name in compat.absorbed_weights(layer):
            getattr(layer, name).is_absorbed = True
    return bool(layers)


def renew_absorbed(model: nn.Module, dtype: torch.dtype) -> None:
    for _, layer in latent_layers(model):
        layer.process_weights_after_loading(dtype)


def check_absorbed(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises WeightMismatch where a layer computes from other products than its weight's."""
    for name, layer in latent_layers(model):
        used = {part: getattr(layer, part).clone() for part in compat.absorbed_weights(layer)}
        layer.process_weights_after_loading(dtype)
        for part, tensor in used.items():
            if not torch.equal(tensor, getattr(layer, part)):
                raise WeightMismatch(f"{name}.{part} is of an older kv_b_proj.weight")
