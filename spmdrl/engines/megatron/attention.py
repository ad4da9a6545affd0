"""Gives megatron-core's layers attention over packed sequences, and a norm.

The stock core attention takes no packed sequences without TransformerEngine, and the stock RMSNorm
no sequence parallelism; both are replaced through the layer spec.

Under context parallelism every sequence is cut into 2n chunks, of which rank r holds r and 2n - 1 -
r, so that all have the same work. Keys and values are gathered; queries stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from spmdrl_kernels.norm import rms_norm
from spmdrl_kernels.switch import on_triton
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from spmdrl.engines.fsdp import attention


@dataclass(frozen=True)
class Segments:
    """Pieces of the local queries, each with the keys it sees; the last query sees the last key.

    Two per sequence: the chunks that this rank holds.
    """

    key_rows: Tensor  # (num_keys,) int64: rows of the gathered keys, segment after segment
    cu_queries: Tensor  # (num_segments + 1,) int32
    cu_keys: Tensor  # (num_segments + 1,) int32
    query_lens: list[int]
    key_lens: list[int]


def packed_params(
    seq_lens: Tensor, device: torch.device, cp_size: int = 1, cp_rank: int = 0
) -> Any:
    """Megatron's PackedSeqParams for one micro-batch, with what `PackedAttention` needs.

    seq_lens: (num_seqs,) int64 on the CPU, whole sequences, multiples of 2 * cp_size where that is
    more than one rank. cu_seqlens stay on the CPU: only the rotary embedding reads them, as a list.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    if cp_size > 1 and bool((seq_lens % (2 * cp_size)).any()):
        raise ValueError(
            f"lengths {seq_lens.tolist()} do not divide by 2 * context parallel size {cp_size}"
        )
    cu = pad(seq_lens.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(seq_lens.max())
    params: Any = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip
    if cp_size == 1:
        params.layout = attention.Packing.build(seq_lens, device)
    else:
        params.layout = _segments(seq_lens, cp_size, cp_rank, device)
    return params


def held_rows(seq_lens: Tensor, cp_size: int, cp_rank: int) -> Tensor:
    """(num_tokens / cp_size,) int64: positions in the packed row that rank cp_rank holds."""
    if cp_size == 1:
        return torch.arange(int(seq_lens.sum()))
    rows, start = [], 0
    for length in seq_lens.tolist():
        chunk = length // (2 * cp_size)
        for number in (cp_rank, 2 * cp_size - 1 - cp_rank):
            rows.append(torch.arange(start + number * chunk, start + (number + 1) * chunk))
        start += length
    return torch.cat(rows)


def _segments(seq_lens: Tensor, n: int, r: int, device: torch.device) -> Segments:
    held = torch.cat([held_rows(seq_lens, n, rank) for rank in range(n)])
    gathered_row = torch.empty_like(held)  # packed position -> row of the gathered keys
    gathered_row[held] = torch.arange(len(held))
    key_rows, query_lens, key_lens, start = [], [], [], 0
    for length in seq_lens.tolist():
        chunk = length // (2 * n)
        for number in (r, 2 * n - 1 - r):
            seen = (number + 1) * chunk
            key_rows.append(gathered_row[start : start + seen])
            query_lens.append(chunk)
            key_lens.append(seen)
        start += length
    cu_queries, cu_keys = (
        pad(torch.tensor(lens).cumsum(0), (1, 0)).to(device, torch.int32)
        for lens in (query_lens, key_lens)
    )
    return Segments(torch.cat(key_rows).to(device), cu_queries, cu_keys, query_lens, key_lens)


class PackedAttention(nn.Module):
    """Causal core attention without parameters; dropout is off, as everywhere in RL."""

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        softmax_scale: float | None = None, pg_collection: Any = None, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.cp: dist.ProcessGroup = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        packed_seq_params: Any = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """query: (tokens, heads, d), key: (tokens, kv_heads, d), value: (tokens, kv_heads, dv).

        Returns (tokens, heads * dv).
        """
        layout = getattr(packed_seq_params, "layout", None)
        if layout is None:
            raise ValueError("give the model packed_seq_params that packed_params() made")
        if isinstance(layout, Segments):
            out = self._context_parallel(query, key, value, layout)
        else:
            out = self._packed(query, key, value, layout)
        return out.flatten(1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, packing: Any) -> Tensor:
        width = value.shape[-1]
        if query.is_cuda and width < query.shape[-1]:  # flash attention knows one head dim
            value = pad(value, (0, query.shape[-1] - width))
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out, _ = attention.packed_attention(self, q, k, v, None, packing, scaling=self.scale)
        return out[0, ..., :width]

    def _context_parallel(
        self, query: Tensor, key: Tensor, value: Tensor, segments: Segments
    ) -> Tensor:
        both = torch.cat([key, value], -1)  # one gather for the two
        seen = _Gather.apply(both, self.cp).index_select(0, segments.key_rows)
        key, value = seen.split([key.shape[-1], value.shape[-1]], -1)
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            return self._flash(query, key, value, segments)
        outs = []
        parts = zip(
            query.split(segments.query_lens), key.split(segments.key_lens),
            value.split(segments.key_lens), strict=True,
        )  # fmt: skip
        for q, k, v in parts:
            ones = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
            out = scaled_dot_product_attention(
                q.transpose(0, 1)[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None],
                attn_mask=ones.tril(len(k) - len(q)), scale=self.scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        width = value.shape[-1]
        value = pad(value, (0, query.shape[-1] - width))
        out: Any = varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), segments.cu_queries,
            segments.cu_keys, max(segments.query_lens), max(segments.key_lens), scale=self.scale,
            window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        return out[..., :width]


class _Gather(torch.autograd.Function):
    """(rows, ...) -> (ranks * rows, ...), and the sum of the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        out = grads[0].new_empty(len(grads[0]) // ctx.group.size(), *grads[0].shape[1:])
        dist.reduce_scatter_tensor(out, grads[0].contiguous(), group=ctx.group)
        return out, None


class RmsNorm(nn.Module):
    """RMSNorm as in Hugging Face. Under sequence parallelism Megatron sums its gradient."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps = eps
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        ones = torch.ones(hidden_size, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(ones)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if on_triton(x, self.weight) or (x.dtype == torch.float32 and not x.is_cuda):
            return rms_norm(x, self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
