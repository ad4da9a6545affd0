"""How weights travel, worked out from a list of all messages of the job.

This is slow and plain: it is what plans of spmdrl/weights/plan.py are compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from spmdrl.weights.boxes import Box, intersect, numel, slab
from spmdrl.weights.classes import Cost, Regions, Weight
from spmdrl.weights.pieces import Table
from spmdrl.weights.plan import TransferPiece

Shares = list[Box | None] | None  # by position in the block; None: every rank holds its own


def held_numel(weight: Weight, rank: int, box: Box) -> int:
    common = (intersect(held, box) for held in weight.held(rank))
    return sum(numel(part) for part in common if part is not None)


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
    return all(held_numel(weight, rank, box) == numel(box) for rank in ranks)


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
                [
                    part
                    for held in weights[w].held(rank)
                    if (part := intersect(held, box)) is not None
                ]
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
