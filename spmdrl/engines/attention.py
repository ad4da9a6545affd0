"""Attention over packed sequences, as an attention function for Hugging Face models.

Sequences lie end to end in one row of tokens. On GPUs in half precision the flash-attention varlen
kernel runs on that row as it is. Elsewhere sequences of like length are laid out as right-padded
rows of a batch: a causal query never sees what stands right of it, so the padding needs no mask,
and no block-diagonal (tokens x tokens) mask is ever built.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "spmdrl_packed"
MAX_PADDING = 1.25  # padded length / own length inside one group of sequences


@dataclass(frozen=True)
class Packing:
    """Where the sequences of one micro-batch lie."""

    cu_seqlens: Tensor  # (num_seqs + 1,) int32, on the device
    max_len: int
    groups: tuple[PaddedGroup, ...]

    @classmethod
    def build(cls, seq_lens: Tensor, device: torch.device) -> Packing:
        """seq_lens: (num_seqs,) int64 on the CPU."""
        cu_seqlens = torch.nn.functional.pad(seq_lens.cumsum(0), (1, 0))
        groups = padded_groups(seq_lens, cu_seqlens, device)
        return cls(cu_seqlens.to(device, torch.int32), int(seq_lens.max()), groups)


@dataclass(frozen=True)
class PaddedGroup:
    """Sequences that are computed together, right-padded to `length`."""

    tokens: Tensor  # (n,) int64: positions of their tokens in the packed row
    slots: Tensor  # (n,) int64: where each lies among the num_seqs * length padded places
    num_seqs: int
    length: int


def padded_groups(
    seq_lens: Tensor, cu_seqlens: Tensor, device: torch.device
) -> tuple[PaddedGroup, ...]:
    """Cuts the sequences, longest first, where the next is shorter than the first by MAX_PADDING."""
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
        inside = torch.arange(length)[None, :] < own[:, None]  # (n, length)
        places = torch.arange(len(seqs) * length).view(len(seqs), length)
        tokens = cu_seqlens[:-1][seqs][:, None] + torch.arange(length)[None, :]
        groups.append(
            PaddedGroup(tokens[inside].to(device), places[inside].to(device), len(seqs), length)
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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, heads, num_tokens, head_dim), key and value with kv_heads -> (1, tokens, heads, d).

    Raises ValueError for what a model asks and this does not do: dropout, soft-capped scores, sinks,
    attention that is not causal.
    """
    refused = {name: kwargs[name] for name in ("softcap", "s_aux") if kwargs.get(name) is not None}
    if dropout or refused or not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention lacks dropout={dropout}, {refused}, or non-causal use")
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _flash(query, key, value, packing, scaling, sliding_window), None
    return _padded(query, key, value, packing, scaling, sliding_window), None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # (tokens, heads, d)
    out = varlen_attn(
        q, k, v, packing.cu_seqlens, packing.cu_seqlens, packing.max_len, packing.max_len,
        scale=scaling, window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None,
) -> Tensor:  # fmt: skip
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # (tokens, heads, head_dim)
    outs = []
    for group in packing.groups:
        shape = (group.num_seqs, group.length)
        gq, gk, gv = (
            _Scatter.apply(t, group.tokens, group.slots, shape[0] * shape[1])
            .view(*shape, *t.shape[1:])
            .transpose(1, 2)
            for t in (q, k, v)
        )  # (num_seqs, heads, length, head_dim)
        mask = _window_mask(group.length, sliding_window, q.device)
        out = scaled_dot_product_attention(
            gq, gk, gv, attn_mask=mask, is_causal=mask is None, scale=scaling,
            enable_gqa=gq.shape[1] != gk.shape[1],
        )  # fmt: skip
        out = out.transpose(1, 2).reshape(shape[0] * shape[1], *q.shape[1:])
        outs.append(_Scatter.apply(out, group.slots, group.tokens, len(q)))
    return sum(outs[1:], start=outs[0])[None]


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """(length, length) bool, causal and at most `window` back; None where the window is no limit."""
    if window is None or window >= length:
        return None
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ~ones.tril(-window)


class _Scatter(torch.autograd.Function):
    """out[targets] = rows[sources], zero elsewhere; both index lists hold no place twice.

    index_select in both directions, where autograd's own backward would be a slow index_add.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sources: Tensor, targets: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(sources, targets)
        ctx.num_rows = len(rows)
        return _move(rows, sources, targets, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        sources, targets = ctx.saved_tensors
        return _move(grads[0], targets, sources, ctx.num_rows), None, None, None


def _move(rows: Tensor, sources: Tensor, targets: Tensor, size: int) -> Tensor:
    if len(sources) == len(rows) == size:  # one group without padding: nothing moves
        in_order = torch.arange(size, device=rows.device)
        if torch.equal(sources, in_order) and torch.equal(targets, in_order):
            return rows
    out = rows.new_zeros(size, *rows.shape[1:])
    out[targets] = rows[sources]
    return out


AttentionInterface.register(NAME, packed_attention)
