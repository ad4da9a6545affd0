"""A rank's batch in micro-batches, and what is found of these put together again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.packing import empty_batch, micro_batches, padded_micro_batches, split_to_count
from spmdrl.data.routing import Routing
from spmdrl.data.shared_prefix import Unit, common_prefix, single_units, worth_sharing
from spmdrl.distributed.topology import Topology
from spmdrl.types import SEQ_FIELDS, Batch


@dataclass(frozen=True)
class MicroBatch:
    """Sequences that are computed together."""

    seqs: list[int]  # their numbers in the batch that was cut; none where a stand-in is computed
    batch: Batch  # on the CPU
    units: list[Unit]  # of batch's sequences, in their order


def cut(
    batch: Batch, max_tokens: int, topology: Topology, multiple: int = 1, padded: bool = False,
    units: Sequence[Unit] | None = None,
) -> list[MicroBatch]:  # fmt: skip
    """Cuts a batch on the CPU into micro-batches. Collective over the topology.

    Every rank gets equally many, a multiple of `multiple`, since each is collective. A rank with
    too few sequences gets stand-ins of two masked tokens, which add nothing.
    padded: max_tokens counts a row of the longest for every sequence.
    units: what stays together; None: every sequence is one.
    """
    units = single_units(batch) if units is None else units
    seq_lens = batch.seq_lens.tolist()
    lens = [unit.num_tokens(seq_lens) for unit in units]
    parts = padded_micro_batches(lens, max_tokens) if padded else micro_batches(lens, max_tokens)
    count = torch.tensor([len(parts)])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=topology.group)
    found = []
    for numbers in split_to_count(parts, -(-int(count) // multiple) * multiple):
        seqs = [seq for number in numbers for seq in units[number].seqs]
        chosen = batch.select(seqs) if seqs else stand_in(batch)
        found.append(MicroBatch(seqs, chosen, renumbered([units[i] for i in numbers])))
    return found


def pairs_of(batch: Batch, shares_prefixes: bool = False) -> list[Unit]:
    """Keeps the two sequences of a pair, which stand one after the other, together.

    shares_prefixes: what both begin with is computed once, where that is worth it.
    """
    pairs = [(first, first + 1) for first in range(0, batch.num_seqs, 2)]
    prefixes = [common_prefix(batch, pair) if shares_prefixes else 0 for pair in pairs]
    if not worth_sharing(sum(prefixes), batch.num_tokens):
        return [Unit(pair) for pair in pairs]
    return [Unit(pair, prefix) for pair, prefix in zip(pairs, prefixes, strict=True)]


def renumbered(units: Sequence[Unit]) -> list[Unit]:
    """The units of a micro-batch by the numbers that its sequences have in it; of none, those of a
    stand-in.
    """
    found, first = [], 0
    for unit in units:
        found.append(Unit(tuple(range(first, first + len(unit.seqs))), unit.prefix))
        first += len(unit.seqs)
    return found or [Unit((0,))]


def token_rows(batch: Batch, seqs: list[int]) -> Tensor:
    """Positions in `batch` of all tokens of the given sequences, in that order."""
    spans = [torch.arange(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])) for s in seqs]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def stand_in(batch: Batch) -> Batch:
    """One sequence of two masked tokens, with the optional fields that `batch` has. Its index is
    -1, which no sample has.
    """
    dummy = empty_batch(torch.tensor([2]), batch.reward_components.shape[1])
    dummy.indices.fill_(-1)  # 0 would be the address of the step's first sample
    if batch.routed_experts is not None:  # of which only the shape counts
        _, num_layers, top_k = batch.routed_experts.shape
        dummy.routed_experts = Routing(num_layers, top_k, 0).unknown(2)
    for name, value in batch.tensors():
        if getattr(dummy, name) is None:
            count = 1 if name in SEQ_FIELDS else 2
            setattr(dummy, name, torch.zeros(count, *value.shape[1:], dtype=value.dtype))
    return dummy


def scatter_rows(picked: Tensor, rows: Tensor, mb: Batch) -> Tensor:
    """(n,) or (n, k) values of tokens `rows` -> (num_tokens,) or (num_tokens, k), zero elsewhere;
    keeps the graph if n is 0.
    """
    out = picked.new_zeros(mb.num_tokens, *picked.shape[1:]).index_copy(0, rows, picked)
    return out + 0.0 * picked.sum()


def add_metrics(sums: dict[str, Tensor], new: dict[str, Tensor]) -> None:
    for name, value in new.items():
        value = value.detach().double()
        if name not in sums:
            sums[name] = value
        else:
            sums[name] = (
                torch.maximum(sums[name], value) if name.endswith("_max") else sums[name] + value
            )


def reduce_metrics(
    sums: dict[str, Tensor], group: dist.ProcessGroup, device: torch.device | None = None
) -> dict[str, float]:
    """Sums (maxima for _max names) over the group, whose ranks have the same names.

    device: on which the group's tensors travel; None: CPU.
    """
    names = sorted(sums)
    values = torch.stack([sums[n] for n in names]).to(device or "cpu")
    largest = values.clone()
    dist.all_reduce(values, group=group)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return {n: float(largest[i] if n.endswith("_max") else values[i]) for i, n in enumerate(names)}
