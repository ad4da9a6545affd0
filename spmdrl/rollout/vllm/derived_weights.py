"""Makes anew, after a push, what vLLM's attention has made of weights when it loaded a model.

Multi-head latent attention cuts kv_b_proj's weight into W_UK and W_UV, in an order that its kernels
read, and goes on with these. Some backends of GPUs compute with a float32 copy of attention sinks.
A push writes the weights; without a second conversion the engine would sample with the old ones.
vLLM's own functions write what they make where the old lies, so that captured graphs stay right.
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


def derived(model: nn.Module) -> Iterator[tuple[str, Any, list[str]]]:
    """Yields the name of each attention layer that computes with tensors made of its weights, the
    object whose process_weights_after_loading makes them, and their names there.
    """
    latent = compat.latent_attention_class()
    for name, module in model.named_modules():
        if isinstance(module, latent):
            yield name, module, compat.absorbed_weights(module)
        elif compat.copies_sinks(module):
            yield name, module.impl, ["sinks"]


def mark_derived(model: nn.Module) -> bool:
    """Marks the parameters that vLLM has made of others: no trainer has them. Returns whether the
    model has tensors that are made of its weights.
    """
    layers = list(derived(model))
    for _, owner, names in layers:
        for name in names:
            getattr(owner, name).is_derived = True
    return bool(layers)


def renew_derived(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes them anew of the weights as they are. dtype: in which the engine computes."""
    for _, owner, _ in derived(model):
        owner.process_weights_after_loading(dtype)


def check_derived(model: nn.Module, dtype: torch.dtype) -> None:
    """Raises WeightMismatch where a layer computes with what was made of other weights."""
    for name, owner, names in derived(model):
        used = {part: getattr(owner, part).clone() for part in names}
        owner.process_weights_after_loading(dtype)
        for part, tensor in used.items():
            if not torch.equal(tensor, getattr(owner, part)):
                raise WeightMismatch(f"{name}.{part} was made of older weights")
