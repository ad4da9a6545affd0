"""Weights that are planned alike, and how the regions of each class are divided among engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spmdrl.weights.boxes import Box, BoxIndex, intersect, numel, slab
from spmdrl.weights.pieces import Engines, Load, Pieces, Senders, Shares

Holders = tuple[tuple[Box, tuple[int, ...]], ...]  # (part, ranks that hold it)
Regions = Sequence[tuple[int, Box]]  # (weight, part) in the order of weights


class Weight(NamedTuple):
    """A full tensor, and which ranks hold which part of it; the parts make up the whole.

    Weights that lie alike have one and the same tuple of holders, so that a thousand layers of a
    thousand ranks take the memory of one, and are recognised without a comparison.
    """

    name: str
    shape: tuple[int, ...]
    holders: Holders
    derived: bool = False  # worked out by its holders before it is sent
    exact: bool = False  # as of Shards

    def held(self, rank: int) -> list[Box]:
        return [box for box, ranks in self.holders if rank in ranks]


class WeightClass:
    """Weights of the same shape, holders and regions."""

    def __init__(
        self, shape: tuple[int, ...], index: BoxIndex, senders: Senders,
        regions: tuple[tuple[Box, ...], ...],
    ) -> None:  # fmt: skip
        """regions: by tp rank, of one weight."""
        self.shape, self.index, self.senders, self.regions = shape, index, senders, regions
        self.weights = 0  # how many there are
        engines = senders.engines
        self.is_local = tuple(  # by tp rank and region: whether each rank holds all of its own
            tuple(
                all(self.held_numel(rank, box) == numel(box) for rank in column)
                for box in boxes
            )
            for boxes, column in zip(regions, engines.table.T.tolist(), strict=True)
        )  # fmt: skip

    def held(self, rank: int) -> list[Box]:
        return [self.index.boxes[number] for number in self.senders.held.get(rank, ())]

    def held_within(self, rank: int, box: Box) -> list[Box]:
        common = (intersect(held, box) for held in self.held(rank))
        return [part for part in common if part is not None]

    def held_numel(self, rank: int, box: Box) -> int:
        """Returns how many elements of `box` the rank holds."""
        return sum(map(numel, self.held_within(rank, box)))


def classify(
    weights: Sequence[Weight], regions: Sequence[Regions], engines: Engines
) -> list[WeightClass]:
    """Returns the class of each weight. regions: of each tp rank."""
    needed: list[list[list[Box]]] = [[[] for _ in regions] for _ in weights]
    for tp_rank, theirs in enumerate(regions):
        for number, box in theirs:
            needed[number][tp_rank].append(box)
    layouts = _Layouts(engines)
    classes: dict[tuple, WeightClass] = {}
    found: list[WeightClass] = []
    for weight, by_tp in zip(weights, needed, strict=True):
        index, senders = layouts.of(weight.holders)
        boxes = tuple(map(tuple, by_tp))
        key = (weight.shape, id(index), id(senders), boxes)
        if key not in classes:
            classes[key] = WeightClass(weight.shape, index, senders, boxes)
        found.append(classes[key])
        found[-1].weights += 1
    return found


@dataclass
class _Layouts:
    """The index of the parts and the ranks of each tuple of holders; equal ones are one object."""

    engines: Engines
    known: dict[int, tuple[BoxIndex, Senders]] = field(default_factory=dict)  # by id of the holders
    indices: dict[tuple[Box, ...], BoxIndex] = field(default_factory=dict)
    senders: dict[tuple[tuple[int, ...], ...], Senders] = field(default_factory=dict)

    def of(self, holders: Holders) -> tuple[BoxIndex, Senders]:
        if id(holders) not in self.known:
            boxes = tuple(box for box, _ in holders)
            ranks = tuple(theirs for _, theirs in holders)
            index = self.indices.get(boxes) or BoxIndex(boxes)
            senders = self.senders.get(ranks) or Senders(ranks, self.engines)
            self.indices[boxes], self.senders[ranks] = index, senders
            self.known[id(holders)] = (index, senders)
        return self.known[id(holders)]


class Cost(NamedTuple):
    """Bytes; compared in this order."""

    busiest: int  # into or out of one rank, whichever is more, stage by stage
    handed: int  # by all ranks together
    gathered: int


@dataclass
class Division:
    """The number of engines that gather from each other, and what each has to share out of each
    class.
    """

    block: int
    shares: dict[WeightClass, Shares]
    known: dict[tuple, Pieces] = field(default_factory=dict)

    def pieces(self, of: WeightClass, chunk: int = 0, chunks: int = 1) -> Pieces:
        """Classes that are cut alike have their pieces in common, whoever holds them."""
        shares = self.shares[of]
        key = (id(of.index), id(shares), chunk, chunks)
        if key not in self.known:
            tp = len(of.regions)
            self.known[key] = Pieces(of.index, shares, tp, self.block, chunk, chunks)
        return self.known[key]

    def load(self, of: WeightClass, chunk: int = 0, chunks: int = 1) -> Load:
        return of.senders.load(self.pieces(of, chunk, chunks), self.block)

    def cost(self, ranks: int) -> Cost:
        """Returns the cost in elements. ranks: a number above that of every rank."""
        sent, taken, shared = np.zeros((3, ranks), dtype=np.int64)
        for of in self.shares:
            load = self.load(of)
            sent += of.weights * load.sent
            taken += of.weights * load.taken
            shared += of.weights * (self.block - 1) * load.shared
        busiest = max(sent.max(), taken.max()) + shared.max()
        return Cost(int(busiest), int(sent.sum()), int(shared.sum()))

    def memory(self, of: WeightClass, chunk: int, chunks: int) -> np.ndarray:
        """Returns (ranks,): the elements that a chunk takes in each rank's buffers."""
        load = self.load(of, chunk, chunks)
        if self.block == 1:
            return load.sent + load.taken
        # room for as many as the largest share of the block
        received = self.pieces(of, chunk, chunks).received
        largest = self.block * received.max(1, keepdims=True)
        return load.sent + of.senders.engines.by_rank(largest)


def cheapest(classes: Sequence[WeightClass], engines: Engines) -> tuple[Division, Cost]:
    """Returns the best of the divisions that make sense, and its cost in elements."""
    held = held_division(classes, engines)
    divisions = [] if held is None else [held]
    divisions += [even_division(classes, block) for block in sorted({1, engines.count})]
    costs = [(division.cost(engines.ranks), division.block) for division in divisions]
    best = min(range(len(divisions)), key=lambda number: costs[number])
    return divisions[best], costs[best][0]


def even_division(classes: Sequence[WeightClass], block: int) -> Division:
    """Every engine of a block shares out a slab of the same size."""
    known: dict[tuple, Shares] = {}
    shares: dict[WeightClass, Shares] = {}
    for of in classes:
        key = (of.regions, of.is_local)
        if key not in known:
            known[key] = tuple(
                tuple(
                    None if is_local else tuple(slab(box, block, part) for part in range(block))
                    for box, is_local in zip(boxes, local, strict=True)
                )
                for boxes, local in zip(of.regions, of.is_local, strict=True)
            )
        shares[of] = known[key]
    return Division(block, shares)


def held_division(classes: Sequence[WeightClass], engines: Engines) -> Division | None:
    """Every engine shares out what it holds; None where no size of a block makes up the whole of
    all regions, as FSDP ranks do for engines with tp 1.
    """
    blocks: set[int] = set()
    parts: dict[WeightClass, list[list[list[Box | None] | None]]] = {}
    for of in classes:
        parts[of] = [[] for _ in of.regions]
        for tp_rank, boxes in enumerate(of.regions):
            for box, is_local in zip(boxes, of.is_local[tp_rank], strict=True):
                held = None if is_local else _held_parts(of, box, engines.table[:, tp_rank])
                parts[of][tp_rank].append(held)
                if held is not None:
                    blocks.add(_block_of(held, numel(box)))
                if 0 in blocks or len(blocks) > 1:
                    return None
    block = blocks.pop() if blocks else 1
    shares: dict[WeightClass, Shares] = {
        of: tuple(
            tuple(None if held is None else tuple(held[:block]) for held in theirs)
            for theirs in by_tp
        )
        for of, by_tp in parts.items()
    }
    return Division(block, shares)


def _held_parts(of: WeightClass, box: Box, ranks: np.ndarray) -> list[Box | None]:
    """Returns what each of the ranks holds of the box; [] where one holds several parts of it."""
    found = [of.held_within(rank, box) for rank in ranks.tolist()]
    if any(len(several) > 1 for several in found):
        return []
    return [several[0] if several else None for several in found]


def _block_of(held: list[Box | None], size: int) -> int:
    """Returns after how many engines the parts that they hold begin anew, where those of each block
    make up a region of `size` elements; else 0.
    """
    first = next((number for number, part in enumerate(held) if part is not None), None)
    if first is None:
        return 0
    again = [number for number in range(first + 1, len(held)) if held[number] == held[first]]
    block = again[0] - first if again else len(held)
    parts = [part for part in held[:block] if part is not None]
    if len(held) % block or held != held[:block] * (len(held) // block):
        return 0
    # a weight's parts lie apart, so that those of a block do if no two of them are the same
    whole = len(set(parts)) == len(parts) and sum(map(numel, parts)) == size
    return block if whole else 0
