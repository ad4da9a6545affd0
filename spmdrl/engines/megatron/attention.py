"""Gives megatron-core's layers attention over packed sequences, and a norm.

The stock core attention takes no packed sequences without TransformerEngine, and the stock RMSNorm
no sequence parallelism; both are replaced through the layer spec.

Under context parallelism every sequence is cut into 2n chunks, of which rank r holds r and 2n - 1 -
r, so that all have the same work. Keys and values are gathered; queries stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from spmdrl_kernels.norm import rms_norm
from spmdrl_kernels.switch import on_triton
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.layers import flash_attn_varlen
from spmdrl.engines.fsdp.packed_rows import Packing, VarlenRow


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
        params.layout = Packing.build(seq_lens, device)
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
    """Causal core attention; dropout is off, as everywhere in RL.

    Megatron's config says which layers see a window of keys (window_size, window_attn_skip_freq),
    and whether each head has a sink in its softmax (softmax_type="learnable"), which is called as
    in DotProductAttention: softmax_offset (heads of this rank,).
    """

    def __init__(
        self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str,
        softmax_scale: float | None = None, pg_collection: Any = None,
        softcap: float | None = None, scale_factor: float = 1.0, **kwargs: Any,
    ) -> None:  # fmt: skip
        """softcap: scores are softcap * tanh(scores / softcap). scale_factor: what this layer's
        scale is times that of the config.
        """
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
        from megatron.core.transformer.utils import is_layer_window_attention

        super().__init__()
        scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self.scale = scale * scale_factor
        self.softcap, self.groups = softcap, pg_collection
        self.cp: dist.ProcessGroup = pg_collection.cp
        sees_window = is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window: int | None = config.window_size[0] + 1 if sees_window else None
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
            zeros = torch.zeros(heads, dtype=config.params_dtype, device=device)
            self.softmax_offset = nn.Parameter(zeros)
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

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
        q, k, v = (t.transpose(0, 1)[None] for t in (query, key, value))
        out, _ = attention.packed_attention(
            self, q, k, v, None, packing, scaling=self.scale, sliding_window=self.window,
            softcap=self.softcap, s_aux=self.softmax_offset,
            flash=None if self.softcap is None else flash_attn_varlen,
        )  # fmt: skip
        return out[0]

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
            q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
            out = self._masked(q, k, v, self._seen(q.shape[2], k.shape[2], q.device))
            outs.append(out[0].transpose(0, 1))
        return torch.cat(outs)

    def _seen(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """(queries, keys) bool: which keys a query sees; the last query sees the last key."""
        ones = torch.ones(queries, keys, dtype=torch.bool, device=device)
        seen = ones.tril(keys - queries)
        return seen if self.window is None else seen & ~ones.tril(keys - queries - self.window)

    def _masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """(1, heads, length, d) each."""
        if self.softcap is not None or self.softmax_offset is not None:
            return attention.plain_attention(
                q, k, v, mask, self.scale, self.softcap, self.softmax_offset
            )
        return scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1]
        )

    def _flash(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        width = value.shape[-1]
        value = pad(value, (0, query.shape[-1] - width))
        q, k, v = query.contiguous(), key.contiguous(), value.contiguous()
        row = VarlenRow(
            segments.cu_queries, max(segments.query_lens), segments.cu_keys,
            max(segments.key_lens), None,
        )  # fmt: skip
        window = (-1 if self.window is None else self.window - 1, 0)
        out: Any
        if self.softmax_offset is not None:
            out = attention.SinkAttention.apply(
                q, k, v, self.softmax_offset, row, self.scale, window
            )
        else:
            out = varlen_attn(
                q, k, v, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys,
                scale=self.scale, window_size=window, enable_gqa=q.shape[1] != k.shape[1],
            )  # fmt: skip
        return out[..., :width]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Returns the sinks as megatron-core's checkpoints have them."""
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"softmax_offset": 0},
            sharded_offsets, tp_group=self.groups.tp, dp_cp_group=metadata["dp_cp_group"],
        )  # fmt: skip


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
    """RMSNorm as in Hugging Face. Under sequence parallelism Megatron sums its gradient.

    With layernorm_zero_centered_gamma the factor is 1 + weight, as in Gemma (arXiv 2403.08295),
    and is multiplied before the result is cast to the dtype of x.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, config.layernorm_zero_centered_gamma
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        fill = 0.0 if self.zero_centered else 1.0
        weight = torch.full((hidden_size,), fill, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        on_cpu = x.dtype == torch.float32 and not x.is_cuda
        if on_cpu or (on_triton(x, self.weight) and not self.zero_centered):
            return rms_norm(x, 1.0 + self.weight if self.zero_centered else self.weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.zero_centered:
            return ((1.0 + self.weight.float()) * wide).to(x.dtype)
        return self.weight * wide.to(x.dtype)


class JointRmsNorm(nn.Module):
    """RMSNorm of all heads' queries, or keys, together, as in OLMo 2 (arXiv 2501.00656).

    Each tensor rank has its heads and their weights; squares are summed over the ranks.
    """

    def __init__(self, config: Any, hidden_size: int, heads: int, eps: float = 1e-6) -> None:
        """hidden_size: of a head; heads: of all tensor ranks, which share them."""
        from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

        super().__init__()
        self.eps, self.size = eps, heads * hidden_size
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        here = self.size // config.tensor_model_parallel_size
        self.weight = nn.Parameter(torch.ones(here, dtype=config.params_dtype, device=device))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x: (tokens, 1, heads here, size of a head)."""
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            reduce_from_tensor_model_parallel_region,
        )

        wide = x.float()
        squares = wide.square().sum((-2, -1), keepdim=True)
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares)
        )
        normed = (wide * torch.rsqrt(squares / self.size + self.eps)).to(x.dtype)
        return self.weight.view(*x.shape[-2:]) * normed

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        weight = {"weight": self.weight}
        return make_sharded_tensors_for_checkpoint(weight, prefix, {"weight": 0}, sharded_offsets)


class NormedAdd(nn.Module):
    """Adds a layer's attention or MLP to the residual after a norm of its own, as in Gemma 2 (arXiv
    2408.00118). It takes the place of Megatron's bias_dropout_add.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(
        self, out_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        out, bias = out_and_bias
        return residual + self.norm(out if bias is None else out + bias)


class ClampedSwiGlu(nn.Module):
    """(tokens, 2 * width), a gate and an up in turn -> (tokens, width).

    Source: gpt-oss, arXiv 2508.10925, section 2.2: (up + 1) * gate * sigmoid(alpha * gate), both
    clamped.
    """

    def __init__(self, config: Any, alpha: float, limit: float) -> None:
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate_up: Tensor) -> Tensor:
        gate = gate_up[..., ::2].clamp(max=self.limit)
        up = gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}  # Megatron's MLP asks each of its parts
