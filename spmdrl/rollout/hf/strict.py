"""The transformers engine with the layers of a strict trainer (engines/fsdp/strict.py).

The model is the trainer's own, but its sequences are left-padded rows of a batch with a cache: the
attention here moves each to where its first token is the first key.
"""

from __future__ import annotations

from typing import Any

import torch
from spmdrl_kernels import invariant
from torch import Tensor, nn
from transformers import AttentionInterface

from spmdrl.engines.fsdp import strict
from spmdrl.hub.transformers_compat import attention_name

NAME = "spmdrl_strict_cached"


def make_strict(engine: Any) -> None:
    """Changes an HfEngine in place. Raises ConfigError as engines/fsdp/strict.py does."""
    hf = engine.model
    strict.require_sound(
        strict.weight_shapes(hf), [strict.head_dim_of(hf.config)], hf.dtype, engine.device
    )
    strict.use_invariant_layers(hf)
    hf.set_attn_implementation(NAME)
    engine.log_softmax = invariant.log_softmax


def padding_of(hf: Any, mask: Tensor) -> dict[str, Tensor]:
    """Returns the argument that the attention below asks for. mask: (num_rows, length), 0 where
    there is no token.
    """
    if attention_name(hf.config) != NAME:
        return {}
    return {"padding": (mask == 0).sum(1)}


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    padding: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (num_rows, heads, num_queries, head_dim), of the last places; key, value: (num_rows,
    kv_heads, length, head_dim); padding: (num_rows,) places ahead of the first token.

    Returns (num_rows, num_queries, heads, head_dim). What is at a place without a token is finite.
    """
    num_queries, length = query.shape[2], key.shape[2]
    order = torch.arange(length, device=key.device) + padding[:, None]
    order = order.clamp_(max=length - 1)[:, None, :, None]
    key, value = (t.gather(2, order.expand_as(t)).transpose(1, 2) for t in (key, value))
    places = torch.arange(length - num_queries, length, device=key.device) - padding[:, None]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = query.transpose(1, 2)
    return invariant.attention(rows, key, value, places.clamp_(min=0), scale), None


AttentionInterface.register(NAME, cached_attention)
