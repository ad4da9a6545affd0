"""Samples -> packed batches, dealt to ranks and mini-batches, cut into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from spmdrl.data.routing import Routing
from spmdrl.data.shared_prefix import shared_work, worth_sharing
from spmdrl.distributed.placement import Ranks
from spmdrl.segments import lengths_to_cu_seqlens
from spmdrl.types import TOKEN_FIELDS, Batch, Sample, turn_ends

ATTENTION_TOKENS = 4096  # at this length attention costs as much as everything linear in tokens


def pack_samples(
    samples: list[Sample], keys: Sequence[str] = (), per_turn: bool = False,
    routing: Routing | None = None, support_width: int = 0,
) -> Batch:  # fmt: skip
    """One Batch of all samples, in order. Tokens of an invalid sample are masked from the loss.

    keys: which of the samples' rewards_by_key are wanted; per_turn: whether their turn_rewards are;
    routing: of the experts, where the samples' routed_experts are. support_width: columns of the
    samples' support_ids; 0: these are not wanted.
    """
    tokens: list[int] = []
    mask: list[float] = []
    logprobs: list[float] = []
    versions: list[int] = []
    for sample in samples:
        nothing = [0] * len(sample.prompt.token_ids)
        kept = sample.loss_mask if sample.invalid is None else [0] * len(sample.loss_mask)
        tokens += sample.prompt.token_ids + sample.response_ids
        mask += nothing + kept
        logprobs += nothing + sample.rollout_logprobs
        versions += nothing + sample.policy_version
    loss_mask = torch.tensor(mask, dtype=torch.float32)
    rewards = [0.0 if s.reward is None else s.reward + s.penalty for s in samples]
    components = [[s.rewards_by_key.get(key, 0.0) for key in keys] for s in samples]
    batch = Batch(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        cu_seqlens=lengths_to_cu_seqlens(
            torch.tensor([s.num_tokens for s in samples], dtype=torch.int64)
        ),
        loss_mask=loss_mask,
        rollout_logprobs=torch.tensor(logprobs, dtype=torch.float32) * loss_mask,
        policy_version=torch.tensor(versions, dtype=torch.int64),
        groups=torch.tensor([s.group for s in samples], dtype=torch.int64),
        indices=torch.tensor([s.index for s in samples], dtype=torch.int64),
        prompts=torch.tensor([s.prompt.id for s in samples], dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        valid=torch.tensor([s.invalid is None for s in samples], dtype=torch.float32),
        greedy_rewards=torch.tensor([s.greedy_reward for s in samples], dtype=torch.float64),
        reward_components=torch.tensor(components, dtype=torch.float64).reshape(
            len(samples), len(keys)
        ),
    )
    if per_turn:
        by_token = [reward for s in samples for reward in turn_rewards_by_token(s)]
        batch.turn_rewards = torch.tensor(by_token, dtype=torch.float64)
    if routing is not None:
        batch.routed_experts = routing.unknown(batch.num_tokens)
        for sample, start in zip(samples, batch.cu_seqlens.tolist(), strict=False):
            add_routed_experts(batch, sample, start)
    if support_width:
        batch.support_ids = torch.full((batch.num_tokens, support_width), -1, dtype=torch.int32)
        add_support_ids(batch, samples)
    return batch


def add_support_ids(batch: Batch, samples: Sequence[Sample]) -> None:
    """samples: those of the batch, in its order."""
    assert batch.support_ids is not None
    for sample, end in zip(samples, batch.cu_seqlens[1:].tolist(), strict=True):
        if sample.invalid is None:
            ids = torch.tensor(sample.support_ids)
            batch.support_ids[end - len(ids) : end] = ids
    trained = batch.loss_mask > 0
    here = (batch.support_ids == batch.token_ids[:, None]).any(1)
    assert here[trained].all(), "a token is not among those that it was drawn from"


def add_routed_experts(batch: Batch, sample: Sample, start: int) -> None:
    """start: of the sample's tokens in the batch."""
    assert batch.routed_experts is not None
    rows, trained = sample.routed_experts, batch.loss_mask[start : start + sample.num_tokens]
    num_rows = 0 if rows is None else len(rows)
    places = trained.nonzero()
    # what stands before the last token that is trained on was computed by the engine
    assert not len(places) or num_rows >= int(places[-1]), (num_rows, sample.num_tokens)
    if rows is not None:
        batch.routed_experts[start : start + num_rows] = torch.tensor(rows)


def prompt_lens(batch: Batch) -> Tensor:
    """(num_seqs,) int64: the masked tokens that each sequence begins with; all of an invalid one's
    but the last.
    """
    places = torch.arange(batch.num_tokens) - torch.repeat_interleave(
        batch.cu_seqlens[:-1], batch.seq_lens
    )
    first = torch.where(batch.loss_mask > 0, places, torch.iinfo(torch.int64).max)
    found = batch.seq_lens - 1
    seqs = torch.repeat_interleave(torch.arange(batch.num_seqs), batch.seq_lens)
    return found.scatter_reduce(0, seqs, first, "amin")


def turn_rewards_by_token(sample: Sample) -> list[float]:
    """(num_tokens,): each turn's on its last token; all 0 where the sample is invalid."""
    row = [0.0] * sample.num_tokens
    if sample.invalid is not None:
        return row
    ends = turn_ends(sample.loss_mask)
    # a sample without any token has a turn, and no place for its reward
    assert len(ends) in (0, len(sample.turn_rewards)), (ends, sample.turn_rewards)
    for end, reward in zip(ends, sample.turn_rewards, strict=False):
        row[len(sample.prompt.token_ids) + end] = reward
    return row


def empty_batch(
    seq_lens: Tensor, num_keys: int = 0, without: Sequence[str] = (), per_turn: bool = False,
    routing: Routing | None = None, reply_images: bool = False, support_width: int = 0,
) -> Batch:  # fmt: skip
    """A Batch of zeros whose sequences have the given lengths, (num_seqs,) int64.

    without: per-token fields that are to be set by the caller. per_turn: with turn_rewards.
    routing: with routed_experts, which nobody knows. reply_images: with these. support_width: with
    support_ids of so many columns, if any.
    """
    num_tokens, num_seqs = int(seq_lens.sum()), len(seq_lens)
    tokens = {name: 0 if name in without else num_tokens for name in TOKEN_FIELDS}
    return Batch(
        token_ids=torch.zeros(tokens["token_ids"], dtype=torch.int64),
        cu_seqlens=lengths_to_cu_seqlens(seq_lens),
        loss_mask=torch.zeros(tokens["loss_mask"]),
        rollout_logprobs=torch.zeros(tokens["rollout_logprobs"]),
        groups=torch.zeros(num_seqs, dtype=torch.int64),
        indices=torch.zeros(num_seqs, dtype=torch.int64),
        prompts=torch.full((num_seqs,), -1),
        rewards=torch.zeros(num_seqs, dtype=torch.float64),
        valid=torch.zeros(num_seqs),
        greedy_rewards=torch.zeros(num_seqs, dtype=torch.float64),
        reward_components=torch.zeros(num_seqs, num_keys, dtype=torch.float64),
        policy_version=torch.zeros(tokens["policy_version"], dtype=torch.int64),
        turn_rewards=(
            torch.zeros(tokens["turn_rewards"], dtype=torch.float64) if per_turn else None
        ),
        routed_experts=None if routing is None else routing.unknown(tokens["routed_experts"]),
        reply_images=(
            torch.zeros(tokens["reply_images"], dtype=torch.int64) if reply_images else None
        ),
        support_ids=(
            torch.full((tokens["support_ids"], support_width), -1, dtype=torch.int32)
            if support_width
            else None
        ),
    )


def concatenate(batches: list[Batch]) -> Batch:
    """One Batch of the sequences of several, in order; all have the same fields set."""
    joined = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name, _ in batches[0].tensors()
    }
    lens = torch.cat([batch.seq_lens for batch in batches])
    return replace(batches[0], **joined, cu_seqlens=lengths_to_cu_seqlens(lens))


@dataclass(frozen=True)
class BatchAssignment:
    """Says which rank trains on which sequence; it is the same on every rank.

    A row per sequence of the step, ordered by (group, index). A mini-batch is a run of consecutive
    groups, whatever the number of ranks.
    """

    groups: Tensor  # (n,) int64
    indices: Tensor  # (n,) int64
    seq_lens: Tensor  # (n,) int64, tokens
    sample_ranks: Tensor  # (n,) int64, the rank of the job that sampled it
    mini_batch_ids: Tensor  # (n,) int64, its mini-batch
    # (n,) int64: how many tokens of its prompt are computed once for all of its group that are on a
    # rank; 0: none
    prefix_lens: Tensor
    train_ranks: dict[Ranks, Tensor]  # by a role's ranks: (n,) int64, which of them trains on it
    num_mini_batches: int

    @property
    def num_seqs(self) -> int:
        return len(self.groups)

    def held(self, ranks: Ranks, rank: int) -> Tensor:
        """Rows that `rank` trains on as one of `ranks`, by mini-batch, then address."""
        return self.by_mini_batch((self.train_ranks[ranks] == rank).nonzero().flatten())

    def by_mini_batch(self, rows: Tensor) -> Tensor:
        """Ascending rows, reordered by mini-batch."""
        return rows[torch.argsort(self.mini_batch_ids[rows], stable=True)]

    def repeated_prefixes(self, ranks: Ranks) -> Tensor:
        """(m,) int64: the lengths of the prompts that no rank computes: those of all sequences of a
        group on a rank but one.
        """
        rows = torch.stack([self.train_ranks[ranks], self.groups], dim=1)
        units = rows.unique(dim=0, return_inverse=True)[1]
        again = torch.ones(len(rows), dtype=torch.bool)
        order = torch.argsort(units, stable=True)
        again[order[torch.diff(units[order], prepend=units.new_full((1,), -1)) != 0]] = False
        return self.prefix_lens[again]

    def imbalance(self, ranks: Ranks, shares: bool) -> float:
        """The heaviest rank's work over the mean, averaged over mini-batches. shares: whether these
        ranks compute a shared prompt once.
        """
        prefix_lens = self.prefix_lens if shares else torch.zeros_like(self.prefix_lens)
        parts = torch.searchsorted(torch.tensor(ranks), self.train_ranks[ranks])
        found = []
        for mini in range(self.num_mini_batches):
            mine = self.mini_batch_ids == mini
            loads = part_loads(
                parts[mine], self.groups[mine], self.seq_lens[mine], prefix_lens[mine], len(ranks)
            )
            found.append(float(loads.max()) * len(ranks) / max(float(loads.sum()), 1e-9))
        return sum(found) / max(len(found), 1)


def assign_to_ranks(
    table: Tensor, mini_batches: int, roles: Mapping[Ranks, bool]
) -> BatchAssignment:
    """Deals sequences to the ranks of each role, so that all have the same work in a mini-batch.

    table: (n, 5) int64 of group, index, tokens, tokens of the prompt, sampling rank, in any order.
    Sequences are dealt by address and not by who sampled them, so that the assignment is the same
    for any placement of the rollout. There are fewer than `mini_batches` where there are fewer
    groups. roles: by a role's ranks, whether it computes a shared prompt once; sequences of a group
    then stay together as far as the ranks' work stays even.
    """
    table = table[address_order(table)]
    groups, place = table[:, 0].unique(return_inverse=True)  # sorted
    num_mini_batches = max(min(mini_batches, len(groups)), 1)
    mini_batch_ids = place * num_mini_batches // max(len(groups), 1)
    prefix_lens = shared_prompts(place, table[:, 3], table[:, 2])
    if not any(roles.values()):
        prefix_lens = torch.zeros_like(prefix_lens)
    train_ranks: dict[Ranks, Tensor] = {}
    for ranks, shares in roles.items():
        if len(ranks) == 1:
            train_ranks[ranks] = torch.full((len(table),), ranks[0])
            continue
        train_ranks[ranks] = torch.full((len(table),), -1)
        for mini in range(num_mini_batches):
            members = (mini_batch_ids == mini).nonzero().flatten()
            prefixes = prefix_lens[members] if shares else torch.zeros_like(members)
            dealt = deal(place[members], table[members, 2], prefixes, len(ranks))
            train_ranks[ranks][members] = torch.tensor(ranks)[dealt]
    groups, indices, seq_lens, _, sample_ranks = (c.contiguous() for c in table.unbind(1))
    return BatchAssignment(
        groups, indices, seq_lens, sample_ranks, mini_batch_ids, prefix_lens, train_ranks,
        num_mini_batches,
    )  # fmt: skip


def shared_prompts(groups: Tensor, prompt_lens: Tensor, seq_lens: Tensor) -> Tensor:
    """(n,) int64: the tokens of the prompt where sharing it in its group is worth it, else 0.

    All are (n,) int64, sorted by group; groups are numbered from 0.
    """
    shared = prompt_lens.scatter_reduce(0, groups, prompt_lens, "amin", include_self=False)[groups]
    again = torch.zeros(len(groups), dtype=torch.bool)  # all of a group's but the first
    again[1:] = groups[1:] == groups[:-1]
    return shared * worth_sharing(int(shared[again].sum()), int(seq_lens.sum()))


def deal(groups: Tensor, seq_lens: Tensor, prefix_lens: Tensor, num_parts: int) -> Tensor:
    """(n,) int64: the part that each sequence of a mini-batch is in, so that the heaviest part is
    as light as it can be found to be.

    All are (n,) int64, sorted by group. Sequences are dealt one by one and, where prefixes are
    shared, also in chunks of 2, 4, ... of a group; the heaviest part decides which of these it is.
    """
    if len(groups) == 0:
        return groups
    work, prefix_work = sequence_work(seq_lens), sequence_work(prefix_lens)
    counts = groups.unique_consecutive(return_counts=True)[1]
    within = torch.arange(len(groups)) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    largest = int(counts.max()) if bool(prefix_lens.any()) else 1
    best, lightest, chunk = torch.zeros(len(groups), dtype=torch.int64), float("inf"), 1
    while chunk < 2 * largest:
        keys = torch.stack([groups, within // chunk], dim=1)
        units = keys.unique_consecutive(dim=0, return_inverse=True)[1]
        items = shared_work(work, prefix_work, units)
        of_unit = torch.empty(len(items), dtype=torch.int64)
        for number, part in enumerate(partition(items.tolist(), num_parts)):
            of_unit[torch.tensor(part, dtype=torch.int64)] = number
        parts = of_unit[units]
        # chunks of a group that meet in a part have their prefix once
        heaviest = float(part_loads(parts, groups, seq_lens, prefix_lens, num_parts).max())
        if heaviest < lightest:
            best, lightest = parts, heaviest
        chunk *= 2
    return best


def part_loads(
    parts: Tensor, groups: Tensor, seq_lens: Tensor, prefix_lens: Tensor, num_parts: int
) -> Tensor:
    """(num_parts,) float64: each part's work, where it has the prefix of a group's sequences once.

    parts, groups, seq_lens, prefix_lens: (n,) int64, of each sequence.
    """
    keys, units = torch.stack([parts, groups], dim=1).unique(dim=0, return_inverse=True)
    work = shared_work(sequence_work(seq_lens), sequence_work(prefix_lens), units)
    return torch.zeros(num_parts, dtype=torch.float64).index_add_(0, keys[:, 0], work)


def address_order(table: Tensor) -> Tensor:
    """Order of rows by (column 0, column 1)."""
    by_index = torch.argsort(table[:, 1], stable=True)
    return by_index[torch.argsort(table[by_index, 0], stable=True)]


def sequence_work(seq_lens: Tensor) -> Tensor:
    """Relative cost of a sequence: linear layers plus attention. (n,) int64 -> (n,) float64."""
    lens = seq_lens.double()
    return lens * (1 + lens / ATTENTION_TOKENS)


def partition(work: list[float], num_parts: int) -> list[list[int]]:
    """Deals items to parts so that the sums are even: Karmarkar and Karp's largest differencing.

    Returns the item numbers of each part, ascending. Deterministic.
    """
    # A node is a way to fill all parts: with one item, or as the merger of two others. `sums` has
    # its parts' work, heaviest first; `merged` which two it joins and how its parts were sorted.
    n = len(work)
    sums: dict[int, np.ndarray] = {}
    merged: list[tuple[int, int, np.ndarray]] = []
    heap = [(-cost, i) for i, cost in enumerate(work)]  # largest difference first
    heapq.heapify(heap)

    def taken(node: int) -> np.ndarray:
        if node >= n:
            return sums.pop(node)
        alone = np.zeros(num_parts)
        alone[0] = work[node]
        return alone

    while len(heap) > 1:
        (_, one), (_, other) = heapq.heappop(heap), heapq.heappop(heap)
        # the heaviest part of one takes the lightest of the other
        both = taken(one) + taken(other)[::-1]
        order = np.argsort(-both, kind="stable")
        sums[n + len(merged)] = both = both[order]
        heapq.heappush(heap, (float(both[-1] - both[0]), n + len(merged)))
        merged.append((one, other, order))

    parts: list[list[int]] = [[] for _ in range(num_parts)]
    pending = [(node, np.arange(num_parts)) for _, node in heap]
    while pending:  # which part each place of a node became in the end
        node, labels = pending.pop()
        if node < n:
            parts[labels[0]].append(node)
            continue
        one, other, order = merged[node - n]
        places = np.empty_like(labels)
        places[order] = labels
        pending += [(one, places), (other, places[::-1])]
    return [sorted(items) for items in parts]


def micro_batches(seq_lens: list[int], max_tokens: int) -> list[list[int]]:
    """Cuts sequences into micro-batches of at most max_tokens (first fit, longest first).

    A sequence that is longer than max_tokens is a micro-batch of its own. Deterministic, so that
    passes over the same Batch see the same packing and thus bit-equal logprobs.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for seq in sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i)):
        fits = next((b for b, free in enumerate(room) if free >= seq_lens[seq]), None)
        if fits is None:
            bins.append([])
            room.append(max_tokens)
            fits = len(bins) - 1
        bins[fits].append(seq)
        room[fits] -= seq_lens[seq]
    return [sorted(b) for b in bins]


def padded_micro_batches(seq_lens: list[int], max_tokens: int) -> list[list[int]]:
    """Packs as micro_batches does, where every sequence takes as much as the longest beside it."""
    bins: list[list[int]] = []
    for seq in sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i)):
        if not bins or (len(bins[-1]) + 1) * seq_lens[bins[-1][0]] > max_tokens:
            bins.append([])
        bins[-1].append(seq)
    return [sorted(b) for b in bins]


def split_to_count(bins: list[list[int]], count: int) -> list[list[int]]:
    """Makes `count` micro-batches of fewer: halves the fullest; adds empty ones at last."""
    bins = [list(b) for b in bins]
    while len(bins) < count:
        fullest = max(range(len(bins)), key=lambda b: len(bins[b]), default=None)
        if fullest is None or len(bins[fullest]) < 2:
            bins.append([])
            continue
        items = bins[fullest]
        bins[fullest] = items[: len(items) // 2]
        bins.append(items[len(items) // 2 :])
    return bins


def to_batch(rows: list[list[int]]) -> Batch:
    """Rows of tokens, each with one more behind it that is unmasked: a value is of what stands
    before, so that it is of the whole row."""
    batch = empty_batch(torch.tensor([len(row) + 1 for row in rows], dtype=torch.int64))
    batch.token_ids = torch.tensor([t for row in rows for t in (*row, row[-1])], dtype=torch.int64)
    batch.loss_mask[batch.cu_seqlens[1:] - 1] = 1.0
    return batch
