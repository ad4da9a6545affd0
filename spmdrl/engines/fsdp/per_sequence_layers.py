"""Layers that are given each sequence of a packed row by itself.

Two kinds of layers need it. Recurrent ones carry a state from token to token (gated delta nets,
Mamba, short convolutions, lightning attention) and would carry that of one sequence into the next:
transformers' own code does so on CPUs even where it is told where sequences begin. Sparse attention
(DeepSeek-V3.2's) chooses the tokens that a query sees among all that a mask leaves.

Such a layer gets its sequences as right-padded rows of a batch, grouped by length as attention
groups them. All of them are causal: what stands right of a token changes nothing of it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmdrl.engines.fsdp.attention import Packing, Pad, PaddedGroup, Unpad
from spmdrl.hub.transformers_compat import set_attention_name, undivided_layers

# kinds of layers, in the words of transformers' configs, that attention.py computes
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
CACHES = ("cache_params", "past_key_values")  # the argument by which a layer is given its state


def is_recurrent(module: nn.Module) -> bool:
    """Says whether a module computes a token from a state that earlier tokens have left.

    It is told by what such modules have: a cache as an argument, and a convolution over tokens, a
    decay of the state, or the slopes of lightning attention.
    """
    arguments = inspect.signature(type(module).forward).parameters
    if "hidden_states" not in arguments or not any(name in arguments for name in CACHES):
        return False
    own = {name for name, _ in module.named_parameters(recurse=False)}
    own |= {name for name, _ in module.named_buffers(recurse=False)}
    convolves = any(isinstance(child, nn.Conv1d) for child in module.children())
    return convolves or bool(own & {"A_log", "slope_rate"})


def is_sparse(module: nn.Module) -> bool:
    """Says whether a module is attention whose indexer chooses what a query sees."""
    return hasattr(module, "is_causal") and isinstance(getattr(module, "indexer", None), nn.Module)


def per_sequence_classes(hf: nn.Module) -> list[str]:
    """Returns the class names of the modules that are given each sequence by itself."""
    return sorted({type(m).__name__ for m in hf.modules() if is_recurrent(m) or is_sparse(m)})


def run_per_sequence(hf: PreTrainedModel) -> None:
    """Has every recurrent layer and every sparse attention compute each sequence by itself.

    Attention that its layer does not tell where sequences are (Nemotron's) finds it as
    `packed_by.packing`.
    """
    names = undivided_layers(hf)
    layer: Any
    for layer in hf.modules():
        if type(layer).__name__ not in names:
            continue
        layer_packing = LayerPacking()
        layer.register_forward_pre_hook(layer_packing.hook, with_kwargs=True)
        for module in layer.modules():
            if is_recurrent(module) or is_sparse(module):
                module.forward = torch.compiler.disable(_per_sequence(module, layer_packing))
            elif hasattr(module, "is_causal"):
                module.packed_by = layer_packing


class LayerPacking:
    """Where the sequences of a layer's row are. It is read anew in each pass of the layer, so also
    where a checkpointed layer is computed once more in the backward pass.
    """

    packing: Packing | None = None

    def hook(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.packing = kwargs.get("packing")


def _per_sequence(module: Any, layer_packing: LayerPacking) -> Callable[..., Any]:
    """Stands in for the module's forward. hidden_states: (1, tokens, width)."""
    own, masked = module.forward, is_sparse(module)
    signature = inspect.signature(own)
    empty: dict[str, Any] = {
        name: None for name in (*CACHES, "attention_mask") if name in signature.parameters
    }
    if masked:  # its own choice is an entry of the mask, which only this attention reads
        module.config = copy.copy(module.config)
        set_attention_name(module.config, "sdpa")

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if layer_packing.packing is None:
            raise ValueError("its layers do not hand on where the sequences of a packed row begin")
        given = signature.bind(hidden_states, *args, **kwargs).arguments
        given.pop("kwargs", None)
        rows, outs, others = given.pop("hidden_states")[0], [], 0
        with buffers_in(module, rows.dtype):
            for group in layer_packing.packing.groups:
                own_args = {n: of_group(v, group, len(rows)) for n, v in given.items()} | empty
                if masked:
                    own_args["attention_mask"] = causal_mask(group, rows.device)
                out = own(hidden_states=Pad.apply(rows, group), **own_args)
                if isinstance(out, tuple):
                    out, others = out[0], len(out) - 1
                outs.append(Unpad.apply(out, group, len(rows)))
        whole = sum(outs[1:], start=outs[0])[None]
        return (whole, *[None] * others) if others else whole

    return forward


def causal_mask(group: PaddedGroup, device: torch.device) -> Tensor:
    """Returns (num_seqs, 1, length, length): True where a query may see a key."""
    ones = torch.ones(group.length, group.length, dtype=torch.bool, device=device)
    return ones.tril().expand(group.num_seqs, 1, -1, -1)


@contextmanager
def buffers_in(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Meanwhile a module's own buffers are of the dtype of its pass, as they are in a model that is
    loaded in it (the slopes of lightning attention).
    """
    own = {n: b for n, b in module.named_buffers(recurse=False) if b.is_floating_point()}
    try:
        for name, buffer in own.items():
            setattr(module, name, buffer.to(dtype))
        yield
    finally:
        for name, buffer in own.items():
            setattr(module, name, buffer)


def of_group(value: Any, group: PaddedGroup, num_tokens: int) -> Any:
    """Returns of an argument what belongs to the group's tokens. (1, tokens, ...) tensors, alone or
    in a tuple, become (num_seqs, length, ...); what is no tensor stays.

    Raises ValueError for a tensor of another shape, of which nothing says whose tokens it has.
    """
    if isinstance(value, tuple):
        return tuple(of_group(part, group, num_tokens) for part in value)
    if not isinstance(value, Tensor):
        return value
    if value.ndim < 2 or value.shape[:2] != (1, num_tokens):
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is no argument of packed tokens")
    return Pad.apply(value[0], group)
