"""Samples -> packed batches: cut into mini-batches, dealt to ranks, cut into micro-batches."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spmdrl.collectives import all_gather_rows, all_to_all_rows
from spmdrl.topology import Topology
from spmdrl.types import Batch, Sample, lengths_to_cu_seqlens

ATTENTION_TOKENS = 4096  # at this length attention costs as much as everything linear in tokens


def pack_samples(samples: list[Sample], keys: Sequence[str] = ()) -> Batch:
    """One Batch of all samples, in order. Tokens of an invalid sample are masked from the loss.

    keys: which of the samples' rewards_by_key are wanted.
    """
    lens = torch.tensor([s.num_tokens for s in samples], dtype=torch.int64)
    batch = empty_batch(lens, len(keys))
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
    batch.token_ids = torch.tensor(tokens, dtype=torch.int64)
    batch.loss_mask = torch.tensor(mask, dtype=torch.float32)
    batch.rollout_logprobs = torch.tensor(logprobs, dtype=torch.float32) * batch.loss_mask
    batch.policy_version = torch.tensor(versions, dtype=torch.int64)
    batch.groups = torch.tensor([s.group for s in samples], dtype=torch.int64)
    batch.indices = torch.tensor([s.index for s in samples], dtype=torch.int64)
    batch.rewards = torch.tensor(
        [0.0 if s.reward is None else s.reward + s.penalty for s in samples], dtype=torch.float64
    )
    batch.valid = torch.tensor([s.invalid is None for s in samples], dtype=torch.float32)
    batch.greedy = torch.tensor([s.greedy_reward for s in samples], dtype=torch.float64)
    table = [[s.rewards_by_key.get(key, 0.0) for key in keys] for s in samples]
    batch.keys = torch.tensor(table, dtype=torch.float64).reshape(len(samples), len(keys))
    return batch


def empty_batch(seq_lens: Tensor, num_keys: int = 0) -> Batch:
    """A Batch of zeros whose sequences have the given lengths, (num_seqs,) int64."""
    num_tokens, num_seqs = int(seq_lens.sum()), len(seq_lens)
    return Batch(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64),
        cu_seqlens=lengths_to_cu_seqlens(seq_lens),
        loss_mask=torch.zeros(num_tokens),
        rollout_logprobs=torch.zeros(num_tokens),
        groups=torch.zeros(num_seqs, dtype=torch.int64),
        indices=torch.zeros(num_seqs, dtype=torch.int64),
        rewards=torch.zeros(num_seqs, dtype=torch.float64),
        valid=torch.zeros(num_seqs),
        greedy=torch.zeros(num_seqs, dtype=torch.float64),
        keys=torch.zeros(num_seqs, num_keys, dtype=torch.float64),
        policy_version=torch.zeros(num_tokens, dtype=torch.int64),
    )


def concatenate(batches: list[Batch]) -> Batch:
    """One Batch of the sequences of several, in order; all have the same fields set."""
    joined = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name, _ in batches[0].tensors()
    }
    lens = torch.cat([batch.seq_lens for batch in batches])
    return replace(batches[0], **joined, cu_seqlens=lengths_to_cu_seqlens(lens))


def balance(batch: Batch, mini_batches: int, topology: Topology) -> tuple[list[Batch], float]:
    """Moves sequences between ranks so that every rank has the same work in every mini-batch.

    A mini-batch is a run of consecutive groups of the step, whatever the number of ranks; there are
    fewer than `mini_batches` where there are fewer groups.
    Returns this rank's Batch of each mini-batch, sequences ordered by (group, index), and the
    imbalance: the heaviest rank's work over the mean, averaged over mini-batches. Collective.
    """
    table = torch.stack([batch.groups, batch.indices, batch.seq_lens], dim=1)
    tables = all_gather_rows(table, topology)
    everyone = torch.cat(tables)  # (total, 3), in order of (rank, local position)
    first = sum(len(t) for t in tables[: topology.rank])
    owner = torch.full((len(everyone),), -1)
    groups, place = everyone[:, 0].unique(return_inverse=True)  # sorted
    mini_batches = max(min(mini_batches, len(groups)), 1)
    mini_of = place * mini_batches // max(len(groups), 1)
    imbalances = []
    for mini in range(mini_batches):
        members = (mini_of == mini).nonzero().flatten()
        # dealt by address, not by who made it, so that the deal is the same for any placement
        members = members[address_order(everyone[members])]
        work = sequence_work(everyone[members, 2]).tolist()
        parts = partition(work, topology.world)
        for rank, part in enumerate(parts):
            owner[members[torch.tensor(part, dtype=torch.int64)]] = rank
        loads = [sum(work[i] for i in part) for part in parts]
        imbalances.append(max(loads) * topology.world / max(sum(loads), 1e-9))
    assert bool((owner >= 0).all())
    mine = owner[first : first + batch.num_seqs]
    batch = exchange(batch, mine, topology)
    batch = batch.select(address_order(torch.stack([batch.groups, batch.indices], 1)).tolist())
    mini_of = torch.searchsorted(groups, batch.groups) * mini_batches // max(len(groups), 1)
    minis = [batch.select((mini_of == m).nonzero().flatten().tolist()) for m in range(mini_batches)]
    return minis, sum(imbalances) / len(imbalances)


def address_order(table: Tensor) -> Tensor:
    """Order of rows by (column 0, column 1)."""
    by_index = torch.argsort(table[:, 1], stable=True)
    return by_index[torch.argsort(table[by_index, 0], stable=True)]


def exchange(batch: Batch, owner: Tensor, topology: Topology) -> Batch:
    """Sends sequence i to rank owner[i]; returns what arrived, ordered by sender. Collective.

    One all-to-all for each dtype and shape class of fields: no pickles, no padding.
    """
    order = torch.argsort(owner, stable=True)
    batch = batch.select(order.tolist())
    seqs_to = torch.bincount(owner, minlength=topology.world)
    ends = batch.cu_seqlens[seqs_to.cumsum(0)]
    tokens_to = torch.diff(ends, prepend=ends.new_zeros(1))
    seq_ints = torch.stack([batch.seq_lens, batch.groups, batch.indices], dim=1)
    seq_floats = torch.stack([batch.rewards, batch.valid.double(), batch.greedy], dim=1)
    seq_floats = torch.cat([seq_floats, batch.keys], dim=1)
    token_ints = torch.stack([batch.token_ids, batch.policy_version], dim=1)
    token_floats = torch.stack([batch.loss_mask, batch.rollout_logprobs], dim=1)
    seq_ints = all_to_all_rows(seq_ints, seqs_to.tolist(), topology)
    seq_floats = all_to_all_rows(seq_floats, seqs_to.tolist(), topology)
    token_ints = all_to_all_rows(token_ints, tokens_to.tolist(), topology)
    token_floats = all_to_all_rows(token_floats, tokens_to.tolist(), topology)
    return Batch(
        token_ids=token_ints[:, 0].contiguous(),
        cu_seqlens=lengths_to_cu_seqlens(seq_ints[:, 0]),
        loss_mask=token_floats[:, 0].contiguous(),
        rollout_logprobs=token_floats[:, 1].contiguous(),
        groups=seq_ints[:, 1].contiguous(),
        indices=seq_ints[:, 2].contiguous(),
        rewards=seq_floats[:, 0].contiguous(),
        valid=seq_floats[:, 1].float(),
        greedy=seq_floats[:, 2].contiguous(),
        keys=seq_floats[:, 3:].contiguous(),
        policy_version=token_ints[:, 1].contiguous(),
    )


def sequence_work(seq_lens: Tensor) -> Tensor:
    """Relative cost of a sequence: linear layers plus attention. (n,) int64 -> (n,) float64."""
    lens = seq_lens.double()
    return lens * (1 + lens / ATTENTION_TOKENS)


def partition(work: list[float], num_parts: int) -> list[list[int]]:
    """Deals items to parts so that the sums are even: Karmarkar and Karp's largest differencing.

    Returns the item numbers of each part, ascending. Deterministic.
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for i, cost in enumerate(work):
        parts: list[tuple[float, list[int]]] = [(cost, [i])]
        parts += [(0.0, []) for _ in range(num_parts - 1)]
        heapq.heappush(heap, (-cost, i, parts))
    if not heap:
        return [[] for _ in range(num_parts)]
    while len(heap) > 1:
        _, tie, heavy = heapq.heappop(heap)
        _, _, light = heapq.heappop(heap)
        # the heaviest part of one takes the lightest of the other
        merged = [(a + b, x + y) for (a, x), (b, y) in zip(heavy, reversed(light), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], tie, merged))
    return [sorted(items) for _, items in heap[0][2]]


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
