"""Attention over packed sequences, as an attention function for Hugging Face models.

Sequences lie end to end in one row of tokens. On GPUs in half precision the flash-attention varlen
kernel runs on that row as it is. Elsewhere sequences of like length are laid out as right-padded
rows of a batch: a causal query never sees what stands right of it, so the padding needs no mask,
and no block-diagonal (tokens x tokens) mask is ever built.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup, to_heads, to_tokens

NAME = "spmdrl_packed"
MAX_PADDING = 1.25  # padded length / own length inside one group of sequences


@dataclass(frozen=True)
class Packing:
    """The places of the sequences in one micro-batch."""

    cu_seqlens: Tensor  # (num_seqs + 1,) int32, on the device
    max_len: int
    groups: tuple[PaddedGroup, ...]
    team: SequenceParallelGroup | None = (
        None  # ranks that hold equal runs of the tokens; None: they are all here
    )

    @classmethod
    def build(
        cls, seq_lens: Tensor, device: torch.device, team: SequenceParallelGroup | None = None
    ) -> Packing:
        """seq_lens: (num_seqs,) int64 on the CPU."""
        cu_seqlens = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
        groups = padded_groups(seq_lens, cu_seqlens, device)
        return cls(cu_seqlens.to(device, torch.int32), int(seq_lens.max()), groups, team)


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that are computed together, right-padded to `length`.

    The num_seqs * length padded places are tokens and holes. Holes are zeroed: a query never gives
    one any weight, but no weight times what is not a number is not a number.
    """

    tokens: Tensor | None  # (n,) int64: positions in the packed row; None: all of them, in order
    slots: Tensor  # (n,) int64: the padded places that hold them
    holes: Tensor  # (num_seqs * length - n,) int64: the others
    num_seqs: int
    length: int


def padded_groups(
    seq_lens: Tensor, cu_seqlens: Tensor, device: torch.device
) -> tuple[PaddedGroup, ...]:
    """Cuts the sequences, longest first, where one is shorter than the first by MAX_PADDING."""
    order = torch.argsort(seq_lens, descending=True, stable=True).tolist()
    lens = seq_lens.tolist()
    cut: list[list[int]] = []
    for seq in order:
        if cut and lens[cut[-1][0]] <= MAX_PADDING * lens[seq] + 8:
            cut[-1].append(seq)
        else:
            cut.append([seq])
    groups = []
    for members in cut:
        seqs = torch.tensor(sorted(members))
        length, own = lens[members[0]], seq_lens[seqs]
        inside = (torch.arange(length)[None, :] < own[:, None]).flatten()  # (n * length,)
        tokens = (cu_seqlens[:-1][seqs][:, None] + torch.arange(length)[None, :]).flatten()
        groups.append(
            PaddedGroup(
                tokens=None if len(cut) == 1 else tokens[inside].to(device),
                slots=inside.nonzero().flatten().to(device),
                holes=(~inside).nonzero().flatten().to(device),
                num_seqs=len(seqs),
                length=length,
            )
        )
    return tuple(groups)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    flash: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, heads, tokens, head_dim), key, value: (1, kv_heads, ...) -> (1, tokens, heads, d).

    flash: what computes it on GPUs in half precision instead of torch's own varlen attention.

    Raises ValueError for what a model asks and this does not do: dropout, sinks, attention that is
    not causal, and soft-capped scores in torch's varlen attention.
    """
    refused = {"s_aux": kwargs["s_aux"]} if kwargs.get("s_aux") is not None else {}
    if dropout or refused or not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention lacks dropout={dropout}, {refused}, or non-causal use")
    team = packing.team
    if team is not None:
        query, key, value = to_heads(query, key, value, team)
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    compute = (flash or _flash) if half else _padded
    out = compute(query, key, value, packing, scaling, sliding_window, softcap)
    return out if team is None else to_tokens(out, team), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ValueError(f"torch's varlen attention lacks softcap={softcap}; flash-attn has it")
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # (tokens, heads, d)
    out: Any = varlen_attn(
        q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.max_len, packing.max_len,
        scale=scaling, window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (tokens, heads, head_dim)
    outs = []
    for group in packing.groups:
        # (num_seqs, length, heads, head_dim) -> (num_seqs, heads, length, head_dim)
        gq, gk, gv = (_Pad.apply(t, group).transpose(1, 2) for t in (q, k, v))
        mask = _window_mask(group.length, sliding_window, q.device)
        if softcap is None:
            out = scaled_dot_product_attention(
                gq, gk, gv, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=gq.shape[1] != gk.shape[1],
            )  # fmt: skip
        else:
            out = _soft_capped(gq, gk, gv, mask, scaling, softcap)
        outs.append(_Unpad.apply(out.transpose(1, 2), group, len(q)))
    return sum(outs[1:], start=outs[0])[None]


def _soft_capped(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with scores cap * tanh(scores / cap), in plain form. (n, heads, length, d) each.

    Source: Gemma 2, arXiv 2408.00118, section 2.
    """
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~mask, -torch.inf).float().softmax(-1).to(q.dtype) @ v


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, causal and at most `window` back; None where that is no limit."""
    if window is None or window >= length:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ~ones.tril(-window)


class _Pad(torch.autograd.Function):
    """(num_tokens, heads, d) -> (num_seqs, length, heads, d); `_Unpad` is its transpose.

    Copies by index in both directions, where autograd's own backward would be a slow index_add.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: PaddedGroup) -> Tensor:
        ctx.group, ctx.num_tokens = group, len(rows)
        return to_padded(rows, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return from_padded(grads[0], ctx.group, ctx.num_tokens), None


class _Unpad(torch.autograd.Function):
    """(num_seqs, length, heads, d) -> (num_tokens, heads, d), zero on tokens of other groups."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, group: PaddedGroup, num_tokens: int) -> Tensor:
        ctx.group = group
        return from_padded(padded, group, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return to_padded(grads[0], ctx.group), None, None


def to_padded(rows: Tensor, group: PaddedGroup) -> Tensor:
    picked = rows if group.tokens is None else rows.index_select(0, group.tokens)
    shape = (group.num_seqs, group.length, *rows.shape[1:])
    if len(group.holes) == 0:
        return picked.reshape(shape)
    out = rows.new_empty(group.num_seqs * group.length, *rows.shape[1:])
    out.index_copy_(0, group.slots, picked)
    out.index_fill_(0, group.holes, 0.0)
    return out.view(shape)


def from_padded(padded: Tensor, group: PaddedGroup, num_tokens: int) -> Tensor:
    picked = padded.reshape(-1, *padded.shape[2:])
    if len(group.holes):
        picked = picked.index_select(0, group.slots)
    if group.tokens is None:
        return picked
    return picked.new_zeros(num_tokens, *picked.shape[1:]).index_copy_(0, group.tokens, picked)


AttentionInterface.register(NAME, packed_attention)
