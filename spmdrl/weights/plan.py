"""Plans who sends which part of which weight to whom: worked out once, from shapes and places
alone.

The engines' ranks are a table: engine `e`, tensor-parallel rank `t`. What rank (e, t) needs of the
weights depends on t only. `block` neighbouring engines divide it among themselves:

    hand over   the holders of the training weights send every rank its share, point to point
    gather      the ranks of a block with the same t give each other their shares

With block 1 everything is handed over. Where the ranks of a block already hold shares that make up
the whole, as FSDP ranks do for engines with tp 1, there is nothing to hand over. What a rank holds
of its own part is copied. Of the plans with even shares and with the shares that are held, for all
sizes of a block that make sense, the one is taken whose busiest rank has the least to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

from spmdrl.weights.boxes import Box, intersect, numel, sizes, slab, whole


class Weight(NamedTuple):
    """A full tensor, and which ranks hold which part of it; the parts make up the whole."""

    name: str
    shape: tuple[int, ...]
    holders: tuple[tuple[Box, tuple[int, ...]], ...]
    derived: bool = False  # worked out by its holders before it is sent

    def held(self, rank: int) -> list[Box]:
        return [box for box, ranks in self.holders if rank in ranks]

    def held_numel(self, rank: int, box: Box) -> int:
        """Returns how many elements of `box` the rank holds."""
        common = (intersect(held, box) for held in self.held(rank))
        return sum(numel(part) for part in common if part is not None)


class TransferPiece(NamedTuple):
    """A part of a region on its way."""

    sender: int
    region: int  # which of the receiver's regions
    box: Box  # of the full tensor


class Cost(NamedTuple):
    """Bytes; compared in this order."""

    busiest: int  # into or out of one rank, whichever is more, stage by stage
    handed: int  # by all ranks together
    gathered: int


@dataclass
class Bucket:
    """The transfers that rank `me` does at a time. Every rank has as many buckets, and fills them
    alike.
    """

    sends: dict[int, list[tuple[int, Box]]]  # receiver -> (weight, part); hand over
    shares: list[list[TransferPiece]]  # of my block, by position; what arrives together, by sender
    share_numel: int  # of the largest share, in elements
    local: list[tuple[int, Box]]  # (region, part) that I hold myself and need not share


@dataclass
class TransferPlan:
    """Rank `me`'s part of the transfer of `weights`."""

    me: int
    weights: list[Weight]
    regions: list[tuple[int, Box]]  # what I need: (weight, part)
    block: int  # engines that gather from each other
    peers: list[int]  # ranks of my block; [] outside the rollout
    position: int  # mine among the peers; -1 outside
    handover: bool  # whether any rank hands anything over
    buckets: list[Bucket]
    cost: Cost  # of the whole job
    whole_bytes: int  # what the job would move if every engine rank were given full tensors
    memory_bytes: int  # of the largest bucket on the fullest rank


Regions = Sequence[tuple[int, Box]]  # (weight, part) in the order of weights
Shares = list[Box | None] | None  # by position in the block; None: every rank holds its own
Table = Sequence[Sequence[int]]  # global rank of [engine][tp rank]


def make_transfer_plan(
    me: int,
    weights: list[Weight],
    regions: Sequence[Regions],
    table: Table,
    itemsize: int,
    slot_bytes: int,
) -> TransferPlan:
    """regions: what each tensor-parallel rank needs.

    itemsize: bytes per element on the wire. A bucket takes at most slot_bytes on any rank, or one
    row of a tensor. The same arguments but `me` give plans that fit together.
    """
    block, shares = cheapest(weights, regions, table)
    unit_bytes = _Units(weights, regions, table, block, shares)
    mine = [(e, row.index(me)) for e, row in enumerate(table) if me in row]
    engine, column = mine[0] if mine else (-1, 0)
    start = engine // block * block
    peers = [row[column] for row in table[start : start + block]] if mine else []
    cost = _cost(weights, regions, table, block, shares)
    plan = TransferPlan(
        me, weights, list(regions[column]) if mine else [], block, peers,
        peers.index(me) if mine else -1, cost.handed > 0, [],
        Cost(*(n * itemsize for n in cost)), 0, 0,
    )  # fmt: skip
    plan.whole_bytes = itemsize * sum(
        numel(whole(w.shape)) for w in weights for row in table for rank in row
        if w.held_numel(rank, whole(w.shape)) < numel(whole(w.shape))
    )  # fmt: skip
    load: Counter[int] = Counter()  # elements of the bucket under way, by rank
    bucket = empty_bucket(plan)
    for index in range(len(weights)):
        largest = max(unit_bytes.memory(index, 0, 1).values(), default=0) * itemsize
        rows = max(sizes(whole(weights[index].shape)), default=1)
        chunks = min(max(1, -(-largest // slot_bytes)), max(1, rows))
        for chunk in range(chunks):
            unit = unit_bytes.memory(index, chunk, chunks)
            fullest = max((load[r] + n for r, n in unit.items()), default=0)
            if load and fullest * itemsize > slot_bytes:
                plan.memory_bytes = max(plan.memory_bytes, max(load.values()) * itemsize)
                close_bucket(plan, bucket)
                load, bucket = Counter(), empty_bucket(plan)
            load.update(unit)
            for receiver, region, position, piece in unit_bytes.pieces(index, chunk, chunks):
                add_piece(plan, bucket, receiver, region, position, piece, index)
    plan.memory_bytes = max(plan.memory_bytes, max(load.values(), default=0) * itemsize)
    close_bucket(plan, bucket)
    return plan


def empty_bucket(plan: TransferPlan) -> Bucket:
    return Bucket({}, [[] for _ in plan.peers], 0, [])


def add_piece(
    plan: TransferPlan,
    bucket: Bucket,
    receiver: int,
    region: int,
    position: int,
    piece: TransferPiece,
    weight: int,
) -> None:
    """Notes a piece, of all those of the job, if this rank sends, takes or sees it gathered."""
    own = piece.sender == receiver
    if receiver == plan.me and own and (position < 0 or plan.block == 1):
        bucket.local.append((region, piece.box))
    elif receiver in plan.peers and position >= 0 and (plan.block > 1 or receiver == plan.me):
        bucket.shares[position].append(piece)
    if piece.sender == plan.me and not own:
        bucket.sends.setdefault(receiver, []).append((weight, piece.box))


def close_bucket(plan: TransferPlan, bucket: Bucket) -> None:
    for share in bucket.shares:
        share.sort(key=lambda piece: piece.sender)  # stable: a sender's order is kept
    bucket.share_numel = max((sum(numel(p.box) for p in s) for s in bucket.shares), default=0)
    plan.buckets.append(bucket)


def cheapest(
    weights: list[Weight], regions: Sequence[Regions], table: Table
) -> tuple[int, list[list[Shares]]]:
    """(engines in a block, shares of every region by tensor-parallel rank)."""
    engines = len(table)
    found: list[tuple[tuple[int, ...], int, list[list[Shares]]]] = []
    for block in (b for b in range(1, engines + 1) if engines % b == 0):
        held = _held_shares(weights, regions, table, block)
        if held is not None:
            found.append((_cost(weights, regions, table, block, held), block, held))
            break  # larger blocks would gather more
    for block in sorted({1, engines}):
        even: list[list[Shares]] = [
            [
                None
                if _is_local(weights[w], box, _column(table, tp_rank))
                else [slab(box, block, i) for i in range(block)]
                for w, box in needed
            ]
            for tp_rank, needed in enumerate(regions)
        ]
        found.append((_cost(weights, regions, table, block, even), block, even))
    _, block, shares = min(found, key=lambda candidate: candidate[:2])
    return block, shares


def _column(table: Table, tp_rank: int) -> list[int]:
    return [row[tp_rank] for row in table]


def _is_local(weight: Weight, box: Box, ranks: list[int]) -> bool:
    """Whether each of the ranks holds all of the box."""
    return all(weight.held_numel(rank, box) == numel(box) for rank in ranks)


def _held_shares(
    weights: list[Weight], regions: Sequence[Regions], table: Table, block: int
) -> list[list[Shares]] | None:
    """Returns what each rank holds of each region, if in every block that makes up the whole of it.

    None too where a rank holds several parts of one.
    """
    result: list[list[Shares]] = []
    for tp_rank, needed in enumerate(regions):
        column = _column(table, tp_rank)
        result.append([])
        for w, box in needed:
            if _is_local(weights[w], box, column):
                result[-1].append(None)
                continue
            found = [
                [part for held in weights[w].held(rank) if (part := intersect(held, box))]
                for rank in column
            ]
            if any(len(several) > 1 for several in found):
                return None
            parts = [several[0] if several else None for several in found]
            first = parts[:block]
            alike = all(parts[i : i + block] == first for i in range(0, len(parts), block))
            some = [part for part in first if part is not None]
            apart = all(intersect(a, b) is None for a, b in combinations(some, 2))  # no replicas
            if not alike or not apart or sum(map(numel, some)) != numel(box):
                return None
            result[-1].append(first)
    return result


def _pieces(
    weights: list[Weight], regions: Sequence[Regions], table: Table, block: int,
    shares: list[list[Shares]], wanted: Mapping[int, list[int]] | None = None,
    index: int | None = None, chunk: int = 0, chunks: int = 1,
) -> Iterator[tuple[int, int, int, TransferPiece]]:  # fmt: skip
    """(receiver, its region, position in its block or -1, piece) of the whole job.

    index: only that weight's, whose regions are wanted[tp_rank]; chunk: only that part of every
    share.
    """
    for tp_rank, needed in enumerate(regions):
        column = _column(table, tp_rank)
        for region in range(len(needed)) if wanted is None else wanted[tp_rank]:
            w, box = needed[region]
            divided = shares[tp_rank][region]
            for number, receiver in enumerate(column):
                position = -1 if divided is None else number % block
                share = box if divided is None else divided[position]
                share = slab(share, chunks, chunk) if share is not None else None
                if share is None:
                    continue
                for held, ranks in weights[w].holders:
                    part = intersect(held, share)
                    if part is None:
                        continue
                    # replicas of the trainer send to different receivers
                    sender = receiver if receiver in ranks else ranks[number % len(ranks)]
                    yield receiver, region, position, TransferPiece(sender, region, part)


def _cost(
    weights: list[Weight], regions: Sequence[Regions], table: Table, block: int,
    shares: list[list[Shares]],
) -> Cost:  # fmt: skip
    """Returns the cost in elements."""
    handed_out: Counter[int] = Counter()
    handed_in: Counter[int] = Counter()
    share_of: Counter[int] = Counter()
    for receiver, _, position, piece in _pieces(weights, regions, table, block, shares):
        size = numel(piece.box)
        if piece.sender != receiver:
            handed_out[piece.sender] += size
            handed_in[receiver] += size
        if position >= 0 and block > 1:
            share_of[receiver] += size
    largest = max([0, *handed_out.values(), *handed_in.values()])
    sent = {rank: (block - 1) * size for rank, size in share_of.items()}
    return Cost(largest + max([0, *sent.values()]), sum(handed_out.values()), sum(sent.values()))


@dataclass
class _Units:
    """The weights one by one, each whole or in chunks."""

    weights: list[Weight]
    regions: Sequence[Regions]
    table: Table
    block: int
    shares: list[list[Shares]]
    by_weight: list[dict[int, list[int]]] = field(init=False)  # weight -> tp rank -> its regions

    def __post_init__(self) -> None:
        self.by_weight = [
            {tp_rank: [] for tp_rank in range(len(self.regions))} for _ in self.weights
        ]
        for tp_rank, needed in enumerate(self.regions):
            for region, (w, _) in enumerate(needed):
                self.by_weight[w][tp_rank].append(region)

    def pieces(
        self, index: int, chunk: int, chunks: int
    ) -> Iterator[tuple[int, int, int, TransferPiece]]:
        return _pieces(
            self.weights, self.regions, self.table, self.block, self.shares,
            self.by_weight[index], index, chunk, chunks,
        )  # fmt: skip

    def memory(self, index: int, chunk: int, chunks: int) -> dict[int, int]:
        """Elements that the unit takes in each rank's buffers."""
        sent: Counter[int] = Counter()
        taken: Counter[int] = Counter()
        for receiver, _, position, piece in self.pieces(index, chunk, chunks):
            size = numel(piece.box)
            if piece.sender != receiver:
                sent[piece.sender] += size
            if position >= 0 and (self.block > 1 or piece.sender != receiver):
                taken[receiver] += size
        if self.block > 1:  # room for as many as the largest share of the block
            for row in zip(*self.table, strict=True):
                for start in range(0, len(row), self.block):
                    peers = row[start : start + self.block]
                    largest = max(taken[rank] for rank in peers)
                    taken.update({r: self.block * largest - taken[r] for r in peers})
        return dict(sent + taken)


def describe(plan: TransferPlan) -> list[str]:
    """Lines for a log: what travels, and what full tensors would have cost."""
    mib = 1 << 20
    gathers = f", {plan.block} engines gather" if plan.cost.gathered else ""
    return [
        f"weights: {len(plan.weights)} tensors in {len(plan.buckets)} buckets of at most "
        f"{plan.memory_bytes / mib:.1f} MiB{gathers}",
        f"  planned: {plan.cost.handed / mib:.1f} MiB handed over, {plan.cost.gathered / mib:.1f} "
        f"MiB gathered, at most {plan.cost.busiest / mib:.1f} MiB on one rank; full tensors to "
        f"every engine rank: {plan.whole_bytes / mib:.1f} MiB",
    ]
