"""Ulysses: ranks share the tokens of a micro-batch, and in attention its heads.

DeepSpeed-Ulysses (Jacobs et al. 2023, arXiv 2309.14509). The ranks of a team are given the same
sequences, packed in one row. Each feeds its layers an equal run of that row. Attention alone looks
across tokens: before it an all-to-all gives each rank all tokens of some heads, after it another
one gives each rank all heads of its tokens. The backward passes are the same all-to-alls again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.data.shared_prefix import SharedRow, Unit
from spmdrl.distributed.topology import Topology
from spmdrl.engines.micro_batches import scatter_rows
from spmdrl.engines.sequence_sharing import SumForward, broadcast_batch
from spmdrl.hub.transformers_compat import model_class, takes_attention_functions
from spmdrl.segments import to_device
from spmdrl.types import Batch


@dataclass(frozen=True)
class SequenceParallelGroup:
    """Ranks that work on the same micro-batches; the first of them is given the sequences."""

    group: dist.ProcessGroup
    size: int
    rank: int

    @classmethod
    def of(cls, topology: Topology) -> SequenceParallelGroup | None:
        """This rank's, by the axis sp; None without one, where every rank works by itself."""
        if not topology.has_axis("sp"):
            return None
        size, rank = topology.axis_size("sp"), topology.axis_rank("sp")
        return cls(topology.mesh.get_group("sp"), size, rank)


# ---- what a rank is fed, and what it gives back


@dataclass(frozen=True)
class TokenShard:
    """The run of a micro-batch's tokens whose hidden states this rank makes."""

    seq_lens: Tensor  # (num_seqs,) int64 on the CPU, of the tokens of the whole team; where they
    # are padded to equal shares, the last is one of padding alone
    prefixes: Tensor  # (num_seqs,) int64 on the CPU: which of these stands before each; -1: none
    token_ids: Tensor  # (num_local,) int64
    positions: Tensor  # (num_local,) int64, within the sequence
    rows: Tensor  # (n,) int64: the unmasked tokens of the micro-batch that follow on these
    states: Tensor  # (n,) int64: on which of them
    targets: Tensor  # (n,) int64: the ids of `rows`
    routed_experts: Tensor | None = None  # (num_local, num_moe_layers, top_k), as in Batch
    teacher_ids: Tensor | None = None  # (n, k) int64: those of `rows`, as in Batch
    support_ids: Tensor | None = None  # (n, k) int64: those of `rows`, as in Batch
    adapters: Tensor | None = None  # (num_local,) int64 on the CPU: of each token, as in Batch


def share_of(
    mb: Batch, units: Sequence[Unit], team: SequenceParallelGroup | None, device: torch.device
) -> TokenShard:
    """mb: on the CPU, the same on all ranks of the team; its sequences are those of the units, one
    unit after the other. Per-token results are on the device.
    """
    size, rank = (team.size, team.rank) if team is not None else (1, 0)
    row = SharedRow.build(mb.seq_lens, units)
    padding = -len(row.tokens) % size
    lens, prefixes = row.run_lens, row.prefixes
    if padding:
        lens, prefixes = torch.cat([lens, torch.tensor([padding])]), pad(prefixes, (0, 1), value=-1)
    num_local = (len(row.tokens) + padding) // size
    mine = slice(rank * num_local, (rank + 1) * num_local)
    begins = torch.repeat_interleave(mb.cu_seqlens[:-1], mb.seq_lens)
    positions = (torch.arange(mb.num_tokens) - begins)[row.tokens]
    positions = torch.cat([positions, torch.arange(padding)])
    rows = mb.loss_mask.nonzero().flatten()
    states = row.places[rows - 1] - mine.start
    here = (states >= 0) & (states < num_local)
    rows = rows[here]
    of_tokens = (pad(mb.token_ids[row.tokens], (0, padding))[mine], positions[mine], rows,
                 states[here], mb.token_ids[rows])  # fmt: skip
    further = {}
    if mb.routed_experts is not None:  # padding goes where the first token goes
        further["routed_experts"] = mb.routed_experts[pad(row.tokens, (0, padding))[mine]]
    if mb.teacher_ids is not None:
        further["teacher_ids"] = mb.teacher_ids[rows].long()
    if mb.support_ids is not None:
        further["support_ids"] = used_columns(mb.support_ids[rows]).long()
    moved = to_device([*of_tokens, *further.values()], device)
    named = dict(zip(further, moved[len(of_tokens) :], strict=True))
    if mb.adapters is not None:
        of_all = torch.repeat_interleave(mb.adapters, mb.seq_lens)
        named["adapters"] = of_all[pad(row.tokens, (0, padding))[mine]]
    return TokenShard(lens, prefixes, *moved[: len(of_tokens)], **named)


def used_columns(support_ids: Tensor) -> Tensor:
    """(n, width) -> (n, k): without the last columns, which hold -1 alone; one stays."""
    return support_ids[:, : max(1, int((support_ids >= 0).any(0).sum()))]


def whole(found: Tensor, rows: Tensor, mb: Batch, team: SequenceParallelGroup | None) -> Tensor:
    """(n,) or (n, k) values of tokens `rows`, these the share of a rank -> (num_tokens,) or
    (num_tokens, k), 0 if masked.

    All ranks of the team get all values and then compute the same loss from them: each keeps the
    gradient of its own. Collective over the team.
    """
    values = scatter_rows(found, rows, mb)
    return values if team is None else SumForward.apply(values, team.group)


def shared(batch: Batch, team: SequenceParallelGroup, device: torch.device) -> Batch:
    """Returns what the first rank of the team was given, on all of its ranks. Collective over the
    team.
    """
    return broadcast_batch(batch, team.group, 0, device)


def counted_once(sums: dict[str, Tensor], team: SequenceParallelGroup) -> dict[str, Tensor]:
    """Metric sums of one rank, to be added up over all ranks: 0 on all but one of a team."""
    if team.rank == 0:
        return sums
    return {n: s if n.endswith("_max") else torch.zeros_like(s) for n, s in sums.items()}


# ---- attention


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, team: SequenceParallelGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All heads of this rank's tokens -> this rank's heads of all tokens. Collective over the team.

    query: (1, heads, num_local, head_dim); key, value: (1, kv_heads, num_local, ...). Returns them
    as (1, heads / ranks, ranks * num_local, head_dim) and (1, local kv_heads, ...), of which each
    serves equally many queries in a row. Raises ValueError where the heads do not divide.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % team.size:
        raise ValueError(f"{heads} attention heads cannot be dealt to {team.size} ranks")
    chosen = dealt_kv_heads(heads, kv_heads, team.size)
    if chosen != list(range(kv_heads)):
        key, value = _select_heads(key, chosen), _select_heads(value, chosen)
    parts = [_by_rank(t[0], team.size) for t in (query, key, value)]
    widths = [part.shape[-1] for part in parts]
    received = _Exchange.apply(torch.cat(parts, dim=-1), team.group)  # (ranks, num_local, width)
    mine = received.flatten(0, 1).split(widths, dim=-1)
    q, k, v = (
        part.unflatten(-1, (-1, like.shape[-1])).transpose(0, 1)[None]
        for part, like in zip(mine, (query, key, value), strict=True)
    )
    return q, k, v


def to_tokens(out: Tensor, team: SequenceParallelGroup) -> Tensor:
    """(1, ranks * num_local, heads / ranks, head_dim) -> (1, num_local, heads, head_dim).

    Collective over the team.
    """
    rows = out[0].unflatten(0, (team.size, -1))
    received = _Exchange.apply(rows, team.group)  # (ranks, num_local, heads / ranks, head_dim)
    return received.transpose(0, 1).flatten(1, 2)[None]


def dealt_kv_heads(heads: int, kv_heads: int, ranks: int) -> list[int]:
    """Returns which key-value heads the ranks get, each equally many, one rank after the other.

    Rank r has queries r * heads / ranks and following. A head is given to a rank once for every run
    of its queries there, runs being equally long everywhere, as grouped attention wants them. With
    as many key-value heads as ranks or a multiple these are all heads, once; with a divisor each
    rank gets one.
    """
    run = gcd(heads // ranks, heads // kv_heads)
    return [first * kv_heads // heads for first in range(0, heads, run)]


def _select_heads(rows: Tensor, chosen: list[int]) -> Tensor:
    """(1, kv_heads, num_tokens, d) -> (1, len(chosen), ...); what flows back is summed in order."""
    heads = rows.unbind(1)
    return torch.stack([heads[i] for i in chosen], dim=1)


def _by_rank(rows: Tensor, ranks: int) -> Tensor:
    """(heads, num_tokens, head_dim) -> (ranks, num_tokens, heads / ranks * head_dim)."""
    return rows.unflatten(0, (ranks, -1)).transpose(1, 2).flatten(2)


class _Exchange(torch.autograd.Function):
    """(ranks, ...): block i goes to rank i, and its block comes from there; its own transpose."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _exchange(grads[0], ctx.group), None


def _exchange(blocks: Tensor, group: dist.ProcessGroup) -> Tensor:
    blocks = blocks.contiguous()
    received = torch.empty_like(blocks)
    dist.all_to_all_single(received, blocks, group=group)
    return received


# ---- what can be known before


def check_ulysses(hf: PreTrainedConfig, ranks: int) -> None:
    """Raises ConfigError, with what would work, where `ranks` cannot share a model's attention."""
    if ranks == 1:
        return
    heads = hf.get_text_config().num_attention_heads
    if heads % ranks:
        fit = [n for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigError(
            f"ulysses={ranks} deals the model's {heads} attention heads to {ranks} ranks, and "
            f"{heads} % {ranks} = {heads % ranks}; it may be {', '.join(map(str, fit))}"
        )
    model: Any = model_class(AutoModelForCausalLM, type(hf))
    if model is not None and not takes_attention_functions(model):
        raise ConfigError(
            f"ulysses={ranks}: the layers of model type {hf.model_type!r} compute attention by "
            "themselves, where heads cannot be exchanged; use ulysses=1"
        )
    growing = sorted(kind for kind in _rope_types(hf) if "dynamic" in kind or kind == "longrope")
    if growing:
        raise ConfigError(
            f"ulysses={ranks}: the frequencies of rotary embedding {growing[0]!r} depend on the "
            "longest sequence at hand, of which a rank may see a part only; use ulysses=1"
        )


def _rope_types(hf: PreTrainedConfig) -> set[str]:
    """Returns the RoPE types of all layers; some models have one set of parameters for each type of
    layer.
    """
    found: dict[str, Any] = getattr(hf.get_text_config(), "rope_parameters", None) or {}
    sets = [found] if "rope_type" in found else [p for p in found.values() if isinstance(p, dict)]
    return {str(p.get("rope_type")) for p in sets}
