"""A rank's batch in micro-batches, and what is found of these put together again."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.packing import empty_batch, micro_batches, padded_micro_batches, split_to_count
from spmdrl.distributed.topology import Topology
from spmdrl.types import SEQ_FIELDS, Batch


def cut(
    batch: Batch, max_tokens: int, topology: Topology, multiple: int = 1, padded: bool = False,
    unit: int = 1,
) -> list[tuple[list[int], Batch]]:  # fmt: skip
    """(sequence numbers, Batch on the device) of each micro-batch. Collective over the topology.

    Every rank gets equally many, a multiple of `multiple`, since each is collective. A rank with
    too few sequences gets stand-ins of two masked tokens, which add nothing.
    padded: max_tokens counts a row of the longest for every sequence.
    unit: so many sequences, one after the other, stay together.
    """
    lens = batch.seq_lens.view(-1, unit).sum(1).tolist()
    parts = padded_micro_batches(lens, max_tokens) if padded else micro_batches(lens, max_tokens)
    count = torch.tensor([len(parts)])
    dist.all_reduce(count, dist.ReduceOp.MAX, group=topology.group)
    batches = []
    for units in split_to_count(parts, -(-int(count) // multiple) * multiple):
        seqs = [unit * i + place for i in units for place in range(unit)]
        mb = batch.select(seqs) if seqs else stand_in(batch)
        batches.append((seqs, mb.to(topology.device)))
    return batches


def token_rows(batch: Batch, seqs: list[int]) -> Tensor:
    """Positions in `batch` of all tokens of the given sequences, in that order."""
    spans = [torch.arange(int(batch.cu_seqlens[s]), int(batch.cu_seqlens[s + 1])) for s in seqs]
    return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64)


def stand_in(batch: Batch) -> Batch:
    """One sequence of two masked tokens, with the optional fields that `batch` has."""
    dummy = empty_batch(torch.tensor([2]), batch.reward_components.shape[1])
    for name, value in batch.tensors():
        if getattr(dummy, name) is None:
            setattr(dummy, name, torch.zeros(1 if name in SEQ_FIELDS else 2, dtype=value.dtype))
    return dummy


def scatter_rows(picked: Tensor, rows: Tensor, mb: Batch) -> Tensor:
    """(n,) values of tokens `rows` -> (num_tokens,), zero elsewhere; keeps the graph if n is 0."""
    out = picked.new_zeros(mb.num_tokens).index_copy(0, rows, picked)
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
