"""The rows of a step of supervised learning, and which rank is given which of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.data.packing import partition, sequence_work
from spmdrl.data.supervised_rows import Rows
from spmdrl.distributed.collectives import sum_over_ranks
from spmdrl.distributed.placement import Ranks
from spmdrl.training.roles import Trainer
from spmdrl.types import Batch


@dataclass(frozen=True)
class Share:
    """The rows of a step, or of a part of an evaluation: what all ranks take and what is this
    rank's.
    """

    rows: Rows
    actor: Trainer
    indices: list[int]  # of all ranks' rows
    mine: list[int]  # this rank's rows
    batch: Batch  # of these; its loss_weights are one over num_tokens
    num_tokens: float  # unmasked ones of all ranks

    @property
    def num_rows(self) -> int:
        """Returns the number of rows of all ranks."""
        return len(self.indices)


def owners_of(rows: Rows, indices: list[int], ranks: Ranks) -> Tensor:
    """(len(indices),) int64: which of the ranks is given each row. All have the same work."""
    work = sequence_work(torch.from_numpy(rows.measured.num_tokens[indices]))
    found = torch.empty(len(indices), dtype=torch.int64)
    for rank, part in zip(ranks, partition(work.tolist(), len(ranks)), strict=True):
        found[torch.tensor(part, dtype=torch.int64)] = rank
    return found


def share_of(rows: Rows, indices: list[int], trainer: Trainer) -> list[int]:
    """Returns the rows that this rank is given, in their order; none on a rank that helps others
    with theirs.
    """
    owners = owners_of(rows, indices, trainer.ranks)
    return [indices[i] for i in (owners == trainer.topology.rank).nonzero().flatten().tolist()]


def take_share(rows: Rows, indices: list[int], actor: Trainer) -> Share:
    """This rank's share of the rows, weighted by one over the unmasked tokens of all ranks.
    Collective.
    """
    mine = share_of(rows, indices, actor)
    batch = rows.batch(mine)
    num_tokens = sum_over_ranks(float(batch.loss_mask.sum()), actor.topology)
    batch.loss_weights = batch.loss_mask / max(num_tokens, 1.0)
    return Share(rows, actor, indices, mine, batch, num_tokens)
