"""Layers that are given each sequence of a packed row by itself.

Two kinds of layers need it. Recurrent ones carry a state from token to token (gated delta nets,
Mamba, short convolutions, lightning attention) and would carry that of one sequence into the next:
transformers' own code does so on CPUs even where it is told where sequences begin. Sparse attention
(DeepSeek-V3.2's) chooses the tokens that a query sees among all that a mask leaves.

Such a layer gets its sequences as right-padded rows of a batch, grouped by length as attention
groups them. All of them are causal: what stands right of a token changes nothing of it.

Kernels of flash-linear-attention, causal-conv1d and mamba-ssm, which transformers uses where they
are installed, compute a packed row without padding. A recurrent layer gets the row whole where its
first packed row has shown that they keep sequences apart there (`keeps_apart`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spmdrl.distributed.torch_compat import beside_checkpointing
from spmdrl.engines.fsdp.packed_rows import Packing, Pad, PaddedGroup, Unpad
from spmdrl.hub.transformers_compat import set_attention_name, undivided_layers

# kinds of layers, in the words of transformers' configs, that attention.py computes
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
CACHES = ("cache_params", "past_key_values")  # the argument by which a layer is given its state
VARLEN_PACKAGES = ("fla", "causal_conv1d", "mamba_ssm")  # have kernels for rows of many sequences


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


def run_per_sequence(hf: PreTrainedModel) -> None:
    """Has every recurrent layer and every sparse attention compute each sequence by itself.

    Attention that its layer does not tell where sequences are (Nemotron's) finds it as
    `packed_by.packing`.
    """
    names, whole_rows = undivided_layers(hf), WholeRows()
    layer: Any
    for layer in hf.modules():
        if type(layer).__name__ not in names:
            continue
        layer_packing = LayerPacking()
        layer.register_forward_pre_hook(layer_packing.hook, with_kwargs=True)
        for module in layer.modules():
            if is_recurrent(module) or is_sparse(module):
                forward = _per_sequence(module, layer_packing)
                if is_recurrent(module) and varlen_packages():
                    forward = whole_rows.where_apart(module, layer_packing, forward)
                module.forward = torch.compiler.disable(forward)
            elif hasattr(module, "is_causal"):
                module.packed_by = layer_packing


def varlen_packages() -> list[str]:
    """Returns the names of the installed packages with kernels for rows of many sequences."""
    return [name for name in VARLEN_PACKAGES if find_spec(name) is not None]


class WholeRows:
    """Decides, by class of recurrent modules, whether one is given packed rows whole.

    The first row of several sequences decides, before its own pass and beside what activation
    checkpointing sees, so that a layer that is computed once more in the backward pass is computed
    in the same way.
    """

    def __init__(self) -> None:
        self.apart: dict[type, bool] = {}

    def where_apart(
        self, module: Any, layer_packing: LayerPacking, padded: Callable[..., Any]
    ) -> Callable[..., Any]:
        """Stands in for the module's forward. padded: what computes rows that it mixes."""
        own, kind = module.forward, type(module)
        named = inspect.signature(own).parameters.values()
        if not any(p.kind is p.VAR_KEYWORD for p in named):
            return padded  # it cannot be told where sequences begin

        def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            def whole(rows: Tensor) -> Any:
                assert packing is not None
                with buffers_in(module, rows.dtype):
                    return own(rows, *args, **kwargs | sequence_bounds(packing))

            packing = layer_packing.packing
            if packing is not None and len(packing.seq_lens) > 1 and kind not in self.apart:
                first = int(packing.seq_lens[0])
                rows = (lambda x: padded(x, *args, **kwargs), hidden_states, first)
                with beside_checkpointing():
                    self.apart[kind] = keeps_apart(whole, *rows)
            if packing is not None and self.apart.get(kind, False):
                return whole(hidden_states)
            return padded(hidden_states, *args, **kwargs)

        return forward


def sequence_bounds(packing: Packing) -> dict[str, Tensor]:
    """Returns the arguments by which transformers' recurrent layers are told where sequences are.

    `cu_seq_lens_q`: (num_seqs + 1,) int32, where each begins, and the end. `seq_idx`: (1, tokens)
    int32, which sequence each token is of.
    """
    cu_seqlens = packing.varlen.cu_queries
    tokens = torch.arange(int(packing.seq_lens.sum()), device=cu_seqlens.device)
    seq_idx = torch.searchsorted(cu_seqlens[1:], tokens, right=True, out_int32=True)
    return {"cu_seq_lens_q": cu_seqlens, "seq_idx": seq_idx[None]}


def keeps_apart(
    whole: Callable[[Tensor], Any], padded: Callable[[Tensor], Any], rows: Tensor, first: int
) -> bool:
    """Says whether a layer that is given a packed row whole keeps its sequences apart.

    Two things are asked. The other sequences' outputs have a gradient of exactly 0 with respect to
    the first sequence's inputs. And the outputs are those of the padded rows, but for rounding: to
    5 % of their norm, which no layer that reads another sequence's tokens comes near.

    rows: (1, tokens, width); first: the number of the first sequence's tokens.
    """
    rows = rows.detach().requires_grad_()
    with torch.enable_grad():
        out = output_of(whole(rows))
        (gradient,) = torch.autograd.grad(out[:, first:].float().square().sum(), rows)
    with torch.no_grad():
        want = output_of(padded(rows)).float()
    near = torch.linalg.vector_norm(out.detach().float() - want)
    leaks = bool(gradient[:, :first].any())
    return not leaks and bool(near <= 0.05 * torch.linalg.vector_norm(want))


def output_of(outputs: Any) -> Tensor:
    """Returns what a layer hands on, which may be the first of several outputs."""
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    assert isinstance(out, Tensor)
    return out


class LayerPacking:
    """Remembers where the sequences of a layer's row are. It is read anew in each pass of the
    layer, so also where a checkpointed layer is computed once more in the backward pass.
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
