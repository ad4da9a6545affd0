"""The pieces in which the weights of one class travel.

Weights are of one class if they have the same shape, the same holders and the same regions in the
engine, as a matrix has in every layer. Their pieces differ in nothing but the numbers of the weight
and of its regions, so they are found once per class:

    pieces     which parts of a region come from which holder, for all engine ranks: found by
               bisection, and kept for all classes that are cut alike (Pieces)
    load       how much every rank sends and takes: sums over pieces and replicas, without a list of
               who sends to whom (Senders.load)
    sends      the pieces that one rank sends (Senders.sends)

With R ranks, of which a weight has H different parts, and engines of T ranks, a class costs
O(R + T H) steps where a list of all messages of the job would have O(R H) entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from spmdrl.weights.boxes import Box, BoxIndex, numel, slab

Array = np.ndarray
Table = Sequence[Sequence[int]]  # global rank of [engine][tp rank]
# By tp rank and region: the parts that the engines of a block share out among themselves, by
# position in the block; None: every rank holds all of its region.
Shares = tuple[tuple[tuple[Box | None, ...] | None, ...], ...]


class Piece(NamedTuple):
    """A part of a region that one holder has, for the engines at one position of their block."""

    tp_rank: int
    region: int  # which of the weight's regions of that tp rank
    position: int
    holder: int
    box: Box  # of the full tensor


class Engines:
    """The table of the engines' ranks, and arrays over global ranks that are made of it."""

    def __init__(self, table: Table, ranks: int) -> None:
        """ranks: a number above that of every rank of the job."""
        self.table = np.array(table, dtype=np.int64)  # (engines, tp)
        self.count, self.tp = self.table.shape
        self.ranks = ranks
        self.engine_of = np.full(ranks, -1)  # of a global rank; -1 outside the engines
        self.engine_of[self.table] = np.arange(self.count)[:, None]
        self.tp_rank_of = np.zeros(ranks, dtype=np.int64)
        self.tp_rank_of[self.table] = np.arange(self.tp)[None, :]

    def place_of(self, rank: int) -> tuple[int, int]:
        """Returns (engine, tp rank); (-1, 0) outside the engines."""
        return int(self.engine_of[rank]), int(self.tp_rank_of[rank])

    def by_rank(self, values: Array) -> Array:
        """Returns (ranks,) with values[tp rank, position] of each rank of the engines, else 0."""
        tp, block = values.shape
        found = np.zeros(self.ranks, dtype=values.dtype)
        found[self.table] = values[np.arange(tp)[None, :], np.arange(self.count)[:, None] % block]
        return found


class Pieces:
    """All pieces of one chunk of a class, and their sizes as arrays."""

    def __init__(
        self, index: BoxIndex, shares: Shares, tp: int, block: int, chunk: int = 0, chunks: int = 1
    ) -> None:
        self.list = list(_pieces(index, shares, chunk, chunks))
        self.by_holder: dict[int, list[int]] = defaultdict(list)  # places in the list
        for number, piece in enumerate(self.list):
            self.by_holder[piece.holder].append(number)
        self.holder = np.array([piece.holder for piece in self.list], dtype=np.int64)
        self.position = np.array([piece.position for piece in self.list], dtype=np.int64)
        self.size = np.array([numel(piece.box) for piece in self.list], dtype=np.int64)
        place = np.array([p.tp_rank * block + p.position for p in self.list], dtype=np.int64)
        # (tp, block): elements that a rank at this position comes to have
        self.received = _sums(place, self.size, tp * block).reshape(tp, block)
        # the same by holder too, of those that there are
        self.keys, inverse = np.unique(place * len(index.boxes) + self.holder, return_inverse=True)
        self.key_sizes = _sums(inverse, self.size, len(self.keys))

    def sizes_at(self, keys: Array) -> Array:
        """keys: (tp rank * block + position) * number of holders + holder."""
        if not len(self.keys):
            return np.zeros(len(keys), dtype=np.int64)
        near = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[near] == keys, self.key_sizes[near], 0)


def _pieces(index: BoxIndex, shares: Shares, chunk: int, chunks: int) -> Iterator[Piece]:
    for tp_rank, regions in enumerate(shares):
        for region, divided in enumerate(regions):
            for position, share in enumerate(divided or ()):
                part = slab(share, chunks, chunk) if share is not None else None
                if part is not None:
                    for holder, box in index.overlapping(part):
                        yield Piece(tp_rank, region, position, holder, box)


def _sums(places: Array, sizes: Array, length: int) -> Array:
    """Returns (length,) int64 sums of the sizes at each place; float64 is exact below 2 ** 53."""
    return np.bincount(places, sizes, length).astype(np.int64)


class Load(NamedTuple):
    """Elements by global rank, each (ranks,) int64."""

    sent: Array
    taken: Array  # handed to the rank by others
    shared: Array  # the rank's share, which its block gathers; what it holds itself included


class Senders:
    """Knows which ranks hold which of a weight's parts. Replicas send to different receivers: of
    those that do not hold a part themselves, engine e is sent it by the replica number e modulo
    their count.
    """

    def __init__(self, ranks: Sequence[Sequence[int]], engines: Engines) -> None:
        """ranks: of each part."""
        self.ranks, self.engines = ranks, engines
        self.count = np.array([len(replicas) for replicas in ranks], dtype=np.int64)
        self.start = self.count.cumsum() - self.count
        self.flat = np.array([rank for replicas in ranks for rank in replicas], dtype=np.int64)
        self.held: dict[int, list[int]] = {}  # by rank: the numbers of its parts
        for holder, replicas in enumerate(ranks):
            for rank in replicas:
                self.held.setdefault(rank, []).append(holder)

    def numel(self, sizes: Sequence[int]) -> Array:
        """Returns (ranks,): the elements that each rank holds, of parts of these sizes."""
        repeated = np.repeat(np.array(sizes, dtype=np.int64), self.count)
        return _sums(self.flat, repeated, self.engines.ranks)

    def load(self, pieces: Pieces, block: int) -> Load:
        """Adds up over all ranks at once what `sender` says of each piece and receiver."""
        engines = self.engines
        sent = np.zeros(engines.ranks, dtype=np.int64)
        for replicas in np.unique(self.count[pieces.holder]).tolist():
            # the blocks take turns with the replicas: every `period` blocks it is the same one's
            blocks, period = engines.count // block, replicas // gcd(block, replicas)
            turn = np.arange(min(blocks, period))
            times = blocks // period + (turn < blocks % period)
            chosen = self.count[pieces.holder] == replicas
            first = pieces.position[chosen][:, None] + turn * block
            sender = self.flat[self.start[pieces.holder[chosen]][:, None] + first % replicas]
            size = pieces.size[chosen][:, None] * times
            sent += _sums(sender.ravel(), size.ravel(), engines.ranks)
        received = engines.by_rank(pieces.received)
        own, instead = self._own(pieces, block)
        return Load(sent - instead, received - own, received)

    def _own(self, pieces: Pieces, block: int) -> tuple[Array, Array]:
        """(ranks,) elements that a rank holds itself of what it is to receive, and those that each
        rank would send of these if its receivers did not hold them.
        """
        holder = np.repeat(np.arange(len(self.count)), self.count)
        engine = self.engines.engine_of[self.flat]
        inside = engine >= 0
        rank, holder, engine = self.flat[inside], holder[inside], engine[inside]
        place = self.engines.tp_rank_of[rank] * block + engine % block
        size = pieces.sizes_at(place * len(self.count) + holder)
        instead = self.flat[self.start[holder] + engine % self.count[holder]]
        return _sums(rank, size, self.engines.ranks), _sums(instead, size, self.engines.ranks)

    def sender(self, piece: Piece, engine: int, receiver: int) -> int:
        if piece.holder in self.held.get(receiver, ()):
            return receiver
        replicas = self.ranks[piece.holder]
        return replicas[engine % len(replicas)]

    def sends(self, me: int, pieces: Pieces, block: int) -> Iterator[tuple[int, Box]]:
        """Yields (receiver, part) of what `me` sends; in the order in which the receiver has it."""
        table = self.engines.table
        held = self.held.get(me, ())
        for place in sorted(place for h in held for place in pieces.by_holder.get(h, ())):
            piece = pieces.list[place]
            for engine in range(piece.position, len(table), block):
                receiver = int(table[engine, piece.tp_rank])
                if receiver != me and self.sender(piece, engine, receiver) == me:
                    yield receiver, piece.box
