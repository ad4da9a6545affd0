"""Attention over packed sequences, as an attention function for Hugging Face models.

Sequences lie end to end in one row of tokens. On GPUs in half precision the flash-attention varlen
kernel runs on that row as it is. Elsewhere sequences of like length are laid out as right-padded
rows of a batch: a causal query never sees what stands right of it, so the padding needs no mask,
and no block-diagonal (tokens x tokens) mask is ever built.

Where sequences share a prefix (data/shared_prefix.py) the row has it once, as a run of its own. The
queries of a run behind it see copies of its keys and values, then those of their own run; in the
backward pass the copies' gradients are summed, always in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from spmdrl.distributed.torch_compat import varlen_backward, varlen_forward
from spmdrl.engines.fsdp.packed_rows import Packing, Pad, Unpad, VarlenRow
from spmdrl.engines.fsdp.prefix_sharing import CopyRows
from spmdrl.engines.fsdp.ulysses import to_heads, to_tokens

NAME = "spmdrl_packed"


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packing: Packing | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    flash: Callable[..., Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, heads, tokens, head_dim), key, value: (1, kv_heads, ...) -> (1, tokens, heads, d).

    packing: None: it is `module.packed_by.packing` (per_sequence_layers.py).
    s_aux: (heads,) sinks: what each head has in its softmax beside the scores, and gives nothing.
    flash: what computes it on GPUs in half precision instead of torch's own varlen attention.

    Raises ValueError for what a model asks and this does not do: dropout, attention that is not
    causal, and soft-capped scores in torch's varlen attention.
    """
    if dropout or not getattr(module, "is_causal", True):
        raise ValueError(f"packed attention lacks dropout={dropout} or non-causal use")
    packing = packing or getattr(getattr(module, "packed_by", None), "packing", None)
    if packing is None:
        raise ValueError("its layers do not hand on where the sequences of a packed row begin")
    if packing.ahead is not None and packing.ahead.windows_alone and sliding_window is None:
        packing = packing.looking_back
    chunk = chunk_of(module)
    if chunk is not None:
        packing = packing.chunked(chunk)
    team = packing.team
    if team is not None:
        query, key, value = to_heads(query, key, value, team)
        if s_aux is not None:
            s_aux = s_aux.chunk(team.size)[team.rank]
    half = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    half = half and packing.ahead is None  # the kernels have no mask
    size, width = query.shape[-1], value.shape[-1]
    compute = (flash or _flash) if half and has_flash(size) else _padded
    if compute is not _padded and width < size:  # the kernels have one width for all three
        value = pad(value, (0, size - width))
    out = compute(query, key, value, packing, scaling, sliding_window, softcap, s_aux)
    out = out[..., :width]
    return out if team is None else to_tokens(out, team), None


def has_flash(head_size: int) -> bool:
    """Says whether the flash kernels have heads of this width: Gemma 4's wide ones have not."""
    return head_size <= 256 and head_size % 8 == 0


def chunk_of(module: Any) -> int | None:
    """Returns how many tokens a chunk of this attention has; None where it is not in chunks."""
    config = getattr(module, "config", None)
    kinds = getattr(config, "layer_types", None) or ()
    number = getattr(module, "layer_idx", None)
    if config is None or number is None or number >= len(kinds):
        return None
    return config.attention_chunk_size if kinds[number] == "chunked_attention" else None


def _flash(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    if softcap is not None:
        raise ValueError(f"torch's varlen attention lacks softcap={softcap}; flash-attn has it")
    q, k, v, row = varlen_inputs(query, key, value, packing)
    window = (-1 if sliding_window is None else sliding_window - 1, 0)
    if sinks is not None:
        return SinkAttention.apply(q, k, v, sinks, row, scaling, window)[None]
    out: Any = varlen_attn(
        q, k, v, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys,
        scale=scaling, window_size=window, enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out[None]


class SinkAttention(torch.autograd.Function):
    """Flash attention with sinks: softmax([scores, sink]) without the sink's column.

    The kernel's forward pass gives the output o and log-sum-exp l of the scores alone. With the
    sink s in the sum, l' = log(e^l + e^s) and o' = o e^(l - l'). The kernel's backward pass makes
    its probabilities from l' and its correction from o', so given these it returns the gradients of
    o'; what is left is the sink's own, -e^(s - l') (do' . o') summed over the queries.
    Source of sinks: gpt-oss, arXiv 2508.10925, section 2.2.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, row: VarlenRow,
        scale: float | None, window: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        """q: (queries, heads, d), k, v: (keys, kv_heads, d), sinks: (heads,) -> like q."""
        out, lse, rng = varlen_forward(q, k, v, row, scale, window)  # lse: (heads, queries) float32
        total = torch.logaddexp(lse, sinks.float()[:, None])
        out = (out * (lse - total).exp().T[..., None]).to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, total, rng)
        ctx.row, ctx.scale, ctx.window = row, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (grad,) = grads
        q, k, v, sinks, out, total, rng = ctx.saved_tensors
        grad = grad.contiguous()
        saved = (q, k, v, out, total, rng)
        dq, dk, dv = varlen_backward(grad, *saved, ctx.row, ctx.scale, ctx.window)
        shares = (sinks.float()[:, None] - total).exp()  # (heads, queries)
        products = (grad.float() * out.float()).sum(-1).T
        return dq, dk, dv, -(shares * products).sum(1).to(sinks.dtype), None, None, None


def varlen_inputs(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor, VarlenRow]:
    """(1, heads, tokens, d) each -> (tokens, heads, d) of the queries, (keys, kv_heads, d) of the
    others, as varlen kernels take them. These align a sequence's last query with its last key.
    """
    q, k, v = (tokens_first(t) for t in (query, key, value))
    row = packing.varlen
    if row.copies is not None:
        k, v = (CopyRows.apply(t, row.copies) for t in (k, v))
    return q.contiguous(), k.contiguous(), v.contiguous(), row


def tokens_first(t: Tensor) -> Tensor:
    """(1, heads, tokens, d) -> (tokens, heads, d), a view whose gradient is a view too: that of
    t[0] would be filled with zeros and copied into.
    """
    return t.squeeze(0).transpose(0, 1)


def _padded(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = (tokens_first(t) for t in (query, key, value))
    outs = []
    for group in packing.groups:
        rows = group if group.keys is None else group.keys.rows
        mask: Tensor | None
        if group.keys is not None and group.keys.masked:
            asked, mask = group, group.keys.mask(group.length, sliding_window)
        else:
            asked, mask = rows, group.mask(sliding_window)
        # (num_seqs, length, heads, head_dim) -> (num_seqs, heads, length, head_dim)
        gq, gk, gv = (
            Pad.apply(t, of).transpose(1, 2) for t, of in ((q, asked), (k, rows), (v, rows))
        )
        if softcap is None and sinks is None:
            out = scaled_dot_product_attention(
                gq, gk, gv, attn_mask=mask, is_causal=mask is None, scale=scaling,
                enable_gqa=gq.shape[1] != gk.shape[1],
            )  # fmt: skip
        else:
            out = plain_attention(gq, gk, gv, mask, scaling, softcap, sinks)
        outs.append(Unpad.apply(out.transpose(1, 2), group, len(q)))
    return sum(outs[1:], start=outs[0])[None]


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention with scores cap * tanh(scores / cap), with sinks, or with both, in plain form.
    (n, heads, length, d) each; sinks: (heads,).

    Source of the cap: Gemma 2, arXiv 2408.00118, section 2.
    """
    if mask is None:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf).float()
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        scores = torch.cat([scores, column], dim=-1)
    return scores.softmax(-1)[..., : k.shape[2]].to(q.dtype) @ v


AttentionInterface.register(NAME, packed_attention)
