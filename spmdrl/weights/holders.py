"""Says which rank holds which part of which weight, as all ranks come to know it.

A rank reports what differs between ranks and little more: the few different shapes and parts of its
weights, and which of them each weight has, by number. The weights' names are sent once
for each list of names that there is, not by every rank. With 723 weights of a 70B model a rank says
half a kilobyte.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from spmdrl.distributed.collectives import broadcast_object
from spmdrl.weights.boxes import Box, BoxIndex, whole
from spmdrl.weights.classes import Holders, Weight
from spmdrl.weights.shards import Shards


class HeldParts(NamedTuple):
    """Says what a rank holds of a weight."""

    shape: tuple[int, ...]  # of the full tensor
    boxes: tuple[Box, ...]
    derived: bool
    exact: bool


class ShardReport(NamedTuple):
    """Says what a rank says of its weights."""

    names: str  # digest of the list of names
    numbers: bytes  # int32, compressed: of each name's layout
    layouts: tuple[HeldParts, ...]


def agree_on_shards(named: Mapping[str, Shards], group: dist.ProcessGroup) -> list[Weight]:
    """Returns every weight of the job and who holds what of it; a rank without weights gives {}.

    Collective over `group`, where CPU tensors can travel. Raises ValueError where the parts of a
    weight do not make up the whole.
    """
    everyone: list[ShardReport] = [ShardReport("", b"", ())] * dist.get_world_size(group)
    dist.all_gather_object(everyone, shard_report(named), group=group)
    ranks = [dist.get_global_rank(group, number) for number in range(len(everyone))]
    first: dict[str, int] = {}  # of those with the same names
    for rank, report in zip(ranks, everyone, strict=True):
        first.setdefault(report.names, rank)
    names: dict[str, list[str]] = {}
    for digest, source in first.items():
        number = dist.get_group_rank(group, source)
        names[digest] = broadcast_object(list(named), group, number)
    return join(everyone, names, ranks)


def shard_report(named: Mapping[str, Shards]) -> ShardReport:
    layouts: dict[HeldParts, int] = {}
    numbers = [
        layouts.setdefault(
            HeldParts(held.shape, held.boxes, held.derived is not None, held.exact), len(layouts)
        )
        for held in named.values()
    ]
    digest = hashlib.sha256(pickle.dumps(list(named))).hexdigest()
    packed = zlib.compress(np.array(numbers, dtype=np.int32).tobytes())
    return ShardReport(digest, packed, tuple(layouts))


def join(
    everyone: Sequence[ShardReport], names: Mapping[str, Sequence[str]], ranks: Sequence[int]
) -> list[Weight]:
    """everyone: by the order of `ranks`; names: by digest.

    Weights of which every rank says the same layout lie alike and share their holders.
    """
    order = list(dict.fromkeys(name for theirs in names.values() for name in theirs))
    place = {name: number for number, name in enumerate(order)}
    columns: dict[tuple[str, bytes], int] = {}  # of ranks whose weights are numbered alike
    column = [
        columns.setdefault((report.names, report.numbers), len(columns)) for report in everyone
    ]
    table = np.zeros(
        (len(order), len(columns)), dtype=np.int32
    )  # 1 + number of the layout; 0: none
    for (digest, numbers), number in columns.items():
        places = [place[name] for name in names[digest]]
        table[places, number] = 1 + np.frombuffer(zlib.decompress(numbers), dtype=np.int32)
    known: dict[bytes, tuple[tuple[int, ...], Holders, bool, bool]] = {}
    weights = []
    for name, row in zip(order, table, strict=True):
        key = row.tobytes()
        if key not in known:
            chosen = row[column].tolist()  # by rank
            known[key] = _holders_of(name, chosen, everyone, ranks)
        weights.append(Weight(name, *known[key]))
    return weights


def _holders_of(
    name: str, chosen: Sequence[int], everyone: Sequence[ShardReport], ranks: Sequence[int]
) -> tuple[tuple[int, ...], Holders, bool, bool]:
    """Returns (shape, holders, derived, exact).

    chosen: 1 + the number of each rank's layout; 0: none.
    """
    layouts = [
        (rank, report.layouts[number - 1])
        for rank, number, report in zip(ranks, chosen, everyone, strict=True)
        if number
    ]
    shape, parts = layouts[0][1].shape, dict[Box, list[int]]()
    for rank, layout in layouts:
        for box in layout.boxes:
            parts.setdefault(box, []).append(rank)
    if not BoxIndex(list(parts)).fills(whole(shape)):
        raise ValueError(f"the shards of {name} {shape} do not make it up: {list(parts)[:8]}")
    holders = tuple((box, tuple(theirs)) for box, theirs in parts.items())
    derived = any(layout.derived for _, layout in layouts)
    return shape, holders, derived, any(layout.exact for _, layout in layouts)
