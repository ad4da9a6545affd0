"""Sequences that begin with the same tokens: the answers to one prompt.

In a causal model a token's hidden state depends on what stands before it, so the tokens of a shared
prefix have the same hidden states, keys and values in each sequence. A micro-batch's row of tokens
has them once: first a run with the prefix, then a run for each sequence with its own tokens, whose
queries see the prefix's keys and their own.
Source of the idea: Prefix Grouper, arXiv 2506.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.types import Batch

# A batch is shared where it saves this part of its tokens; for less, the attention's further
# copies cost what the shorter row saves.
WORTH = 0.05
# Keys and values of a prefix are copied for each sequence: a micro-batch has at most so many times
# its budget of tokens, prefixes counted in each sequence.
MOST_COPIES = 2


@dataclass(frozen=True)
class Unit:
    """Sequences that stay in one micro-batch. They begin with the same `prefix` tokens."""

    seqs: tuple[int, ...]
    prefix: int = 0

    def num_tokens(self, seq_lens: Sequence[int]) -> int:
        """The tokens that it takes of a micro-batch's budget. seq_lens: of all sequences."""
        total = sum(seq_lens[seq] for seq in self.seqs)
        return max(total - (len(self.seqs) - 1) * self.prefix, -(-total // MOST_COPIES))


def worth_sharing(saved: float, num_tokens: float) -> bool:
    """Says whether so many tokens less, of `num_tokens`, pay for sharing."""
    return saved > 0 and saved >= WORTH * num_tokens


def single_units(batch: Batch) -> list[Unit]:
    return [Unit((seq,)) for seq in range(batch.num_seqs)]


def units_by_prefix(batch: Batch, max_tokens: int) -> list[Unit]:
    """Returns the sequences of each group of the batch as a unit, with the prefix that all of them
    share; one by one where sharing is not worth it.

    batch: on the CPU. A unit of more than max_tokens tokens is divided. The prefix leaves each
    sequence at least one token of its own.
    """
    found = [Unit(tuple(members), common_prefix(batch, members)) for members in by_group(batch)]
    lens = batch.seq_lens.tolist()
    parts = [part for unit in found for part in divide(unit, lens, max_tokens)]
    if not worth_sharing(sum((len(u.seqs) - 1) * u.prefix for u in parts), batch.num_tokens):
        return single_units(batch)
    return [part if len(part.seqs) > 1 else Unit(part.seqs) for part in parts]


def by_group(batch: Batch) -> list[list[int]]:
    """The numbers of the sequences of each group, ascending; those of several adapters, in which
    the same tokens have other hidden states, apart.
    """
    groups = batch.groups
    if batch.adapters is not None and batch.num_seqs > 0:
        both = torch.stack([groups, batch.adapters], dim=1)
        groups = both.unique(dim=0, return_inverse=True)[1]
    order = torch.argsort(groups, stable=True)
    counts = groups[order].unique_consecutive(return_counts=True)[1]
    return [part.tolist() for part in order.split(counts.tolist())]


def common_prefix(batch: Batch, seqs: Sequence[int]) -> int:
    """Counts the tokens that all of these sequences begin with: fewer than the shortest has; 0 for
    one.
    """
    chosen = torch.tensor(seqs)
    most = int(batch.seq_lens[chosen].min()) - 1
    if len(seqs) == 1 or most < 1:
        return 0
    rows = batch.token_ids[batch.cu_seqlens[:-1][chosen][:, None] + torch.arange(most)]
    return int((rows == rows[0]).all(0).long().cumprod(0).sum())


def divide(unit: Unit, seq_lens: list[int], max_tokens: int) -> list[Unit]:
    """Cuts a unit of more than max_tokens tokens; one of whose sequences is longer stays alone."""
    if not unit.prefix:
        return [Unit((seq,)) for seq in unit.seqs]
    parts: list[Unit] = []
    for seq in unit.seqs:
        longer = Unit((*parts[-1].seqs, seq), unit.prefix) if parts else None
        if longer is not None and longer.num_tokens(seq_lens) <= max_tokens:
            parts[-1] = longer
        else:
            parts.append(Unit((seq,), unit.prefix))
    return parts


@dataclass(frozen=True)
class SharedRow:
    """The row of tokens that a model is given for a micro-batch, shared prefixes once. On the CPU.

    It is a sequence of runs: a whole sequence, a prefix, or what a sequence has behind its prefix.
    """

    tokens: Tensor  # (num_computed,) int64: which token of the micro-batch each of the row's is
    places: Tensor  # (num_tokens,) int64: where in the row each token of the micro-batch is
    run_lens: Tensor  # (num_runs,) int64
    prefixes: Tensor  # (num_runs,) int64: the run whose tokens stand before; -1: none

    @classmethod
    def build(cls, seq_lens: Tensor, units: Sequence[Unit]) -> SharedRow:
        """seq_lens: (num_seqs,) int64 of a micro-batch whose sequences are those of the units, one
        unit after the other.
        """
        lens = seq_lens.tolist()
        run_lens: list[int] = []
        prefixes: list[int] = []
        begins: list[int] = []  # of each run, in the micro-batch
        pieces: list[tuple[int, int]] = []  # (run, length) of the micro-batch's tokens, in order
        start, seq = 0, 0

        def add_run(begin: int, length: int, prefix: int) -> int:
            begins.append(begin)
            run_lens.append(length)
            prefixes.append(prefix)
            return len(run_lens) - 1

        for unit in units:
            shared = add_run(start, unit.prefix, -1) if unit.prefix else -1
            for _ in unit.seqs:
                own = add_run(start + unit.prefix, lens[seq] - unit.prefix, shared)
                pieces += [(shared, unit.prefix)] * (shared >= 0) + [(own, run_lens[own])]
                start, seq = start + lens[seq], seq + 1
        runs = torch.tensor(run_lens, dtype=torch.int64)
        run_starts = runs.cumsum(0) - runs
        tokens = spans(torch.tensor(begins, dtype=torch.int64), runs)
        of_runs, sizes = torch.tensor(pieces, dtype=torch.int64).view(-1, 2).unbind(1)
        return cls(tokens, spans(run_starts[of_runs], sizes), runs, torch.tensor(prefixes))


def spans(starts: Tensor, lens: Tensor) -> Tensor:
    """starts[0], starts[0] + 1, ... of lens[0] numbers, then those of the next; int64."""
    return torch.arange(int(lens.sum())) + torch.repeat_interleave(
        starts - (lens.cumsum(0) - lens), lens
    )


def shared_work(work: Tensor, prefix_work: Tensor, units: Tensor) -> Tensor:
    """(num_units,) float64: the work of the sequences of each unit, their prefix done once.

    work, prefix_work: (n,) float64, of each whole sequence and of the prefix that it shares.
    units: (n,) int64, the number of each sequence's unit; every unit has a sequence.
    """
    num_units = int(units.max()) + 1 if len(units) else 0
    counts = torch.bincount(units, minlength=num_units).double()
    own = torch.zeros(num_units, dtype=torch.float64).index_add_(0, units, work - prefix_work)
    once = torch.zeros(num_units, dtype=torch.float64).index_add_(0, units, prefix_work)
    return own + once / counts
