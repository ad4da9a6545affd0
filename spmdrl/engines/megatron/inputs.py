"""A micro-batch as a Megatron model takes it: padded where its layout needs that, cut over ranks.

packed     one row of all tokens, sequence after sequence; the attention is told where they begin.
           Each sequence is padded to a multiple of 2 x context parallel size, the row to one of
           tensor x context parallel size.
padded     a row per sequence, for an attention that knows no packing (a host's, see embed.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import Any, Literal

import torch
from torch import Tensor

from spmdrl.engines.megatron.attention import held_rows, packed_params
from spmdrl.types import Batch

Form = Literal["packed", "packed_host", "padded"]  # packed_host: for TransformerEngine's attention


@dataclass(frozen=True)
class SequenceSplit:
    """The number of ranks that share a row of tokens, and which of them this is."""

    form: Form
    context: int
    context_rank: int
    tensor: int  # that share the norms' activations: 1 without sequence parallelism
    tensor_rank: int = 0


@dataclass(frozen=True)
class Inputs:
    """The inputs of this rank's model chunk, and where the hidden states that it needs will be."""

    batch: Batch  # all tokens of the micro-batch, on every rank that works on it
    token_ids: Tensor  # (rows, local tokens) int64
    positions: Tensor  # (rows, local tokens) int64
    packed: Any  # PackedSeqParams; None where rows are padded
    chosen: Tensor  # (n,) int64: the unmasked tokens of the batch
    local: Tensor  # (m,) int64: which of these this rank makes the hidden state before of
    states: Tensor  # (m,) int64: where these states are, of the rows of hidden states end to end
    places: (
        Tensor  # (num_tokens,) int64 on the CPU: where each token's state is; -1: on another rank
    )
    # (tokens that this rank's routers are given, num_moe_layers, top_k), as in Batch
    routed_experts: Tensor | None = None
    # packed: positions in the row of all tokens, before it is cut over context ranks, (tokens,)
    row_positions: Tensor | None = None
    row_places: Tensor | None = None  # packed: (num_tokens,) int64, where in it each token is


def inputs_of(batch: Batch, cut: SequenceSplit) -> Inputs:
    """batch: on the device."""
    if cut.form == "padded":
        return _padded(batch, cut)
    lens, align = batch.seq_lens, 2 * cut.context if cut.context > 1 else 1
    room = -(-lens // align) * align  # (num_seqs,)
    left_over = -int(room.sum()) % lcm(align, cut.context * cut.tensor)
    if left_over:
        room = torch.cat([room, torch.tensor([left_over])])  # a sequence of padding alone
    place = _places(lens, room[: len(lens)])  # of every token in the padded row
    size = int(room.sum())
    device = batch.token_ids.device
    row = torch.zeros(size, dtype=torch.int64, device=device)
    row[place.to(device)] = batch.token_ids
    positions = torch.arange(size) - torch.repeat_interleave(room.cumsum(0) - room, room)
    held = torch.arange(size)
    if cut.context > 1:
        held = held_rows(room, cut.context, cut.context_rank)
    local = torch.full((size,), -1)
    local[held] = torch.arange(len(held))
    chosen = batch.loss_mask.nonzero().flatten()
    states = local[place[chosen.cpu() - 1]]  # -1: another rank's
    chosen_here = (states >= 0).nonzero().flatten()
    held_here = held.to(device)
    return Inputs(
        batch, row[held_here][None], positions.to(device)[held_here][None],
        _params(room, cut, device), chosen, chosen_here.to(device), states[chosen_here].to(device),
        local[place], _experts(batch, place.to(device), held_here, size, cut),
        positions.to(device), place.to(device),
    )  # fmt: skip


def _experts(
    batch: Batch, place: Tensor, held: Tensor, size: int, cut: SequenceSplit
) -> Tensor | None:
    """Batch.routed_experts of the padded row, of its tokens that this rank's routers are given.
    Padding goes to the first experts: each token is dispatched to as many.
    """
    known = batch.routed_experts
    if known is None:
        return None
    _, num_layers, top_k = known.shape
    rows = torch.arange(top_k, device=known.device, dtype=known.dtype)
    rows = rows.expand(size, num_layers, -1).clone()
    rows[place] = known
    return rows[held].chunk(cut.tensor)[cut.tensor_rank]


def _params(room: Tensor, cut: SequenceSplit, device: torch.device) -> Any:
    if cut.form == "packed":
        return packed_params(room, device, cut.context, cut.context_rank)
    from megatron.core.packed_seq_params import PackedSeqParams

    cu = torch.nn.functional.pad(room.cumsum(0), (1, 0)).to(device, torch.int32)
    longest = int(room.max())
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cu_seqlens_q_padded=cu,
        cu_seqlens_kv_padded=cu, max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip


def _padded(batch: Batch, cut: SequenceSplit) -> Inputs:
    """Padding follows the tokens, so that causal attention does not see it."""
    lens, device = batch.seq_lens, batch.token_ids.device
    width = -(-int(lens.max()) // cut.tensor) * cut.tensor
    place = _places(lens, torch.full_like(lens, width))
    rows = torch.zeros(len(lens) * width, dtype=torch.int64, device=device)
    rows[place.to(device)] = batch.token_ids
    positions = torch.arange(width, device=device).expand(len(lens), width)
    chosen = batch.loss_mask.nonzero().flatten()
    states = place[chosen.cpu() - 1].to(device)
    return Inputs(
        batch, rows.view(len(lens), width), positions, None, chosen,
        torch.arange(len(chosen), device=device), states, place,
    )  # fmt: skip


def _places(lens: Tensor, room: Tensor) -> Tensor:
    """(num_tokens,) where each token is, if sequence i has room[i] places."""
    first, begins = lens.cumsum(0) - lens, room.cumsum(0) - room
    return torch.arange(int(lens.sum())) + torch.repeat_interleave(begins - first, lens)
