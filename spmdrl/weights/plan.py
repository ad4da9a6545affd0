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

Weights that lie alike, as those of equal layers do, are planned once (classes.py, pieces.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from spmdrl.weights.boxes import Box, numel, sizes, slab, whole
from spmdrl.weights.classes import (
    Cost,
    Division,
    Holders,
    Regions,
    Weight,
    WeightClass,
    cheapest,
    classify,
)
from spmdrl.weights.pieces import Engines, Table


class TransferPiece(NamedTuple):
    """A part of a region on its way."""

    sender: int
    region: int  # which of the receiver's regions
    box: Box  # of the full tensor


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
    engines = Engines(table, 1 + max([me, *_ranks_of(weights, table)]))
    of_weight = classify(weights, regions, engines)
    classes = list(dict.fromkeys(of_weight))
    division, cost = cheapest(classes, engines)
    block, engine, column = division.block, *engines.place_of(me)
    start = engine // block * block
    peers = [row[column] for row in table[start : start + block]] if engine >= 0 else []
    plan = TransferPlan(
        me, weights, list(regions[column]) if peers else [], block, peers,
        peers.index(me) if peers else -1, cost.handed > 0, [],
        Cost(*(n * itemsize for n in cost)), itemsize * sum(map(_whole_numel, classes)), 0,
    )  # fmt: skip
    numbers: list[list[int]] = [[] for _ in weights]  # of each weight's regions among mine
    for region, (weight, _) in enumerate(plan.regions):
        numbers[weight].append(region)
    units = {of: _units(me, of, division, itemsize, slot_bytes) for of in classes}
    filling = _Filling(plan, engines.ranks)
    for weight, of in enumerate(of_weight):
        for unit in units[of]:
            if filling.any and filling.fullest_with(unit) * itemsize > slot_bytes:
                filling.close(itemsize)
            filling.add(unit, weight, numbers[weight])
    filling.close(itemsize)
    return plan


def plan_of_full_tensor(
    me: int, weight: Weight, table: tuple[tuple[int, ...], ...], itemsize: int, slot_bytes: int
) -> TransferPlan:
    """Returns the plan that gives every rank of the table all of one weight. It is worked out once
    for weights that lie alike, and kept for the next check or export.
    """
    plan = _plan_of_full_tensor(me, weight.shape, weight.holders, table, itemsize, slot_bytes)
    return replace(plan, weights=[weight])


@lru_cache(maxsize=4096)
def _plan_of_full_tensor(
    me: int, shape: tuple[int, ...], holders: Holders, table: tuple[tuple[int, ...], ...],
    itemsize: int, slot_bytes: int,
) -> TransferPlan:  # fmt: skip
    regions = [[(0, whole(shape))] for _ in table[0]]
    weight = Weight("", shape, holders)
    return make_transfer_plan(me, [weight], regions, table, itemsize, slot_bytes)


def _ranks_of(weights: Sequence[Weight], table: Table) -> set[int]:
    ranks = {rank for row in table for rank in row}
    for holders in {id(weight.holders): weight.holders for weight in weights}.values():
        ranks.update(*(theirs for _, theirs in holders))
    return ranks


def _whole_numel(of: WeightClass) -> int:
    """Returns the elements of all weights of a class that would travel as full tensors, to every
    engine rank that does not hold all of them itself.
    """
    size, table = numel(whole(of.shape)), of.senders.engines.table
    lacking = of.senders.numel(of.index.sizes)[table] < size
    return of.weights * size * int(lacking.sum())


@dataclass
class _Unit:
    """A chunk of a weight of one class, as this rank has to do with it."""

    memory: np.ndarray  # (ranks,) elements in the buffers of each rank
    shared: np.ndarray  # (block,) elements that arrive here, by position
    sends: list[tuple[int, Box]]  # (receiver, part)
    shares: list[tuple[int, int, int, Box]]  # (position, sender, region, part); of my block
    local: list[tuple[int, Box]]  # (region, part) that I hold myself and need not share


def _units(
    me: int, of: WeightClass, division: Division, itemsize: int, slot_bytes: int
) -> list[_Unit]:
    """Returns a weight's chunks: as many as it takes for each to fit into a slot, or one row each.

    A chunk may come from a few senders alone, so that those that divide the largest load of a rank
    need not divide it evenly.
    """
    rows = max([1, *sizes(whole(of.shape))])
    largest = int(division.memory(of, 0, 1).max()) * itemsize
    chunks = min(max(1, -(-largest // slot_bytes)), rows)
    while chunks < rows:
        fullest = max(int(division.memory(of, i, chunks).max()) for i in range(chunks))
        if fullest * itemsize <= slot_bytes:
            break
        chunks = min(2 * chunks, rows)
    return [_unit(me, of, division, chunk, chunks) for chunk in range(chunks)]


def _unit(me: int, of: WeightClass, division: Division, chunk: int, chunks: int) -> _Unit:
    """Finds this rank's pieces of a chunk."""
    block, senders, engines = division.block, of.senders, of.senders.engines
    pieces, load = division.pieces(of, chunk, chunks), division.load(of, chunk, chunks)
    unit = _Unit(
        division.memory(of, chunk, chunks), load.taken[me : me + 1],
        list(senders.sends(me, pieces, block)), [], [],
    )  # fmt: skip
    engine, column = engines.place_of(me)
    if engine < 0:
        return unit
    if block > 1:
        unit.shared = pieces.received[column]
    for piece in (p for p in pieces.list if p.tp_rank == column):
        number = engine // block * block + piece.position
        sender = senders.sender(piece, number, int(engines.table[number, column]))
        if block == 1 and sender == me:
            unit.local.append((piece.region, piece.box))
        else:
            unit.shares.append((piece.position, sender, piece.region, piece.box))
    for region, box in enumerate(of.regions[column]):
        part = slab(box, chunks, chunk) if of.is_local[column][region] else None
        if part is not None:
            unit.local += [(region, held) for held in of.held_within(me, part)]
    return unit


class _Filling:
    """Fills a plan's buckets one after the other."""

    def __init__(self, plan: TransferPlan, ranks: int) -> None:
        self.plan, self.ranks = plan, ranks
        self.start()

    def start(self) -> None:
        plan = self.plan
        self.load = np.zeros(self.ranks, dtype=np.int64)  # elements, by rank
        self.shared = np.zeros(max(1, len(plan.peers)), dtype=np.int64)  # by position
        self.bucket = Bucket(defaultdict(list), [[] for _ in plan.peers], 0, [])

    @property
    def any(self) -> bool:
        return bool(self.load.any())

    def fullest_with(self, unit: _Unit) -> int:
        """Returns the elements on the fullest of the ranks that the unit takes memory on."""
        return int(np.where(unit.memory, self.load + unit.memory, 0).max())

    def add(self, unit: _Unit, weight: int, numbers: Sequence[int]) -> None:
        """numbers: of this weight's regions among those of the plan."""
        bucket = self.bucket
        self.load += unit.memory
        self.shared += unit.shared
        for receiver, box in unit.sends:
            bucket.sends[receiver].append((weight, box))
        for position, sender, region, box in unit.shares:
            bucket.shares[position].append(TransferPiece(sender, numbers[region], box))
        bucket.local += [(numbers[region], box) for region, box in unit.local]

    def close(self, itemsize: int) -> None:
        plan, bucket = self.plan, self.bucket
        for share in bucket.shares:
            share.sort(key=lambda piece: piece.sender)  # stable: a sender's order is kept
        bucket.share_numel = int(self.shared.max()) if plan.peers else 0
        bucket.sends = dict(bucket.sends)
        plan.memory_bytes = max(plan.memory_bytes, int(self.load.max()) * itemsize)
        plan.buckets.append(bucket)
        self.start()


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
