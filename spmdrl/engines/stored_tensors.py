"""Reads tensors of a checkpoint's shards, one or a part of one at a time, without an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from spmdrl.checkpoint.safe_load import ShardReader
from spmdrl.weights.boxes import Box, intersect, sizes, whole


class WeightSource(NamedTuple):
    """Weights of a model that are read together."""

    shapes: Mapping[str, tuple[int, ...]]  # by the names that a Hugging Face folder has
    read: Callable[[], Iterator[tuple[str, Tensor]]]  # these, one at a time, in float32 or narrower


class StoredTensors:
    """The tensors in a folder that torch.distributed.checkpoint or megatron-core has written."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError where the index has more than data in it, or is none."""
        self.reader = ShardReader(str(folder))
        index = self.reader.read_metadata()
        self.reader.set_up_storage_reader(index, is_coordinator=True)
        self.found: dict[str, TensorStorageMetadata] = {
            name: stored
            for name, stored in index.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.found[name].size)

    def names(self, prefix: str) -> list[str]:
        """Returns the names that begin with the prefix, without it."""
        return [name.removeprefix(prefix) for name in self.found if name.startswith(prefix)]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Reads a part of a tensor, or all of it, with one stored part in memory at a time. What
        lies outside of the tensor is 0.
        """
        stored = self.found[name]
        box = whole(stored.size) if box is None else box
        items = [
            item for chunk in stored.chunks if (item := read_item(name, chunk, box)) is not None
        ]
        target = torch.zeros(sizes(box), dtype=stored.properties.dtype)
        self.reader.read_data(LoadPlan(items), _IntoTensor(target))
        return target

    def rows_apart(self, name: str, boxes: list[Box]) -> list[tuple[int, int]]:
        """Returns the ranges of rows in which a tensor is stored where none of the boxes is in two
        of them, else the range of all rows.
        """
        stored = self.found[name]
        ranges = sorted({(c.offsets[0], c.offsets[0] + c.sizes[0]) for c in stored.chunks})
        apart = all(
            any(first <= box[0][0] and box[0][1] <= last for first, last in ranges) for box in boxes
        )
        follow = all(before[1] == after[0] for before, after in pairwise(ranges))
        return ranges if apart and follow else [(0, stored.size[0])]


def read_item(name: str, chunk: ChunkStorageMetadata, box: Box) -> ReadItem | None:
    """Returns what of a stored part belongs into a tensor that holds `box`; None: nothing."""
    start = tuple(chunk.offsets)
    common = intersect(tuple((o, o + s) for o, s in zip(start, chunk.sizes, strict=True)), box)
    if common is None:
        return None
    firsts = [first for first, _ in common]
    return ReadItem(
        LoadItemType.TENSOR,
        MetadataIndex(name), offsets(firsts, [first for first, _ in box]),
        MetadataIndex(name, chunk.offsets), offsets(firsts, start), torch.Size(sizes(common)),
    )  # fmt: skip


def offsets(firsts: Iterable[int], begins: Iterable[int]) -> torch.Size:
    return torch.Size(a - b for a, b in zip(firsts, begins, strict=True))


class _IntoTensor(DefaultLoadPlanner):
    """Reads into one tensor, at the places that the items say."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self.target[tuple(slice(first, first + size) for first, size in places)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(read_item)
