"""A batch of nine ragged sequences, and a training engine, for tests that compare updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import OptimConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.types import Batch

CONFIG = TrainConfig(
    dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3, weight_decay=0.0)
)
LENS = [20, 33, 7, 12, 41, 3, 18, 25, 9]


def whole_batch(seed: int = 0) -> Batch:
    """Nine ragged sequences with holes in their masks and two invalid ones."""
    g = torch.Generator().manual_seed(seed)
    batch = empty_batch(torch.tensor(LENS))
    n = batch.num_tokens
    batch.token_ids = torch.randint(3, 60, (n,), generator=g)
    for i in range(len(LENS)):
        start, end = int(batch.cu_seqlens[i]), int(batch.cu_seqlens[i + 1])
        batch.loss_mask[start + 2 : end] = float(i not in (3, 6))
    batch.loss_mask *= (torch.rand(n, generator=g) > 0.2).float()
    batch.advantages = torch.randn(n, generator=g) * batch.loss_mask
    batch.values = torch.randn(n, generator=g) * batch.loss_mask
    batch.returns = torch.randn(n, generator=g) * batch.loss_mask
    batch.rollout_logprobs = -torch.rand(n, generator=g) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def with_shared_prompts(batch: Batch, groups: list[tuple[int, int]]) -> Batch:
    """Changes a batch in place, and returns it: (sequences, tokens that they begin with) of each
    group, in order.
    """
    first = 0
    for group, (count, prefix) in enumerate(groups):
        begins = batch.cu_seqlens[first : first + count].tolist()
        for begin in begins:
            batch.token_ids[begin : begin + prefix] = batch.token_ids[
                begins[0] : begins[0] + prefix
            ]
        batch.groups[first : first + count] = group
        first += count
    assert first == batch.num_seqs
    return batch


def engine_on(topology: Any, kind: str, model: str, config: TrainConfig, share: Any = None) -> Any:
    """An engine on all ranks. share: a topology whose process groups it has too, as the engines of
    a run do. A group has a thread, which wakes up a hundred times a second.
    """
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine

    ranks = Topology.build(topology.device, share=share, **train_degrees(config))
    return FsdpEngine.build(kind, model, config, ranks)


def on_data_ranks(ranks: Any, batch: Batch) -> Batch:
    """The batch on ranks that hand an engine data, none of it on the others."""
    return batch if ranks.rank in ranks.data_ranks else batch.select([])


def pair_up(batch: Batch, prompt: int, shared: Sequence[Tensor]) -> None:
    """Makes neighbouring sequences answers to one prompt, of which nothing is learnt.

    prompt: the first token that is, counted from 1. shared: per-token tensors whose values before
    it are the same in both.
    """
    numbers = torch.arange(len(batch.seq_lens))
    batch.groups, batch.indices, batch.prompts = numbers // 2, numbers % 2, numbers // 2
    starts = batch.cu_seqlens[:-1].tolist()
    batch.loss_mask = torch.ones(batch.num_tokens)
    for first, second in zip(starts[::2], starts[1::2], strict=True):
        for start in (first, second):
            batch.loss_mask[start : start + prompt - 1] = 0
        for values in shared:
            values[second : second + prompt - 1] = values[first : first + prompt - 1]
    batch.loss_mask[starts] = 0
