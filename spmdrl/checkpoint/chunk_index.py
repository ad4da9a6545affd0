"""The index of a sharded state: which rank's file has which part of which tensor, and where.

torch.distributed.checkpoint has one object for each part, gathered on a rank and read by all: 2.2
million for a 70B model and its moments on 1,024 ranks, seconds and gigabytes for each rank. Here a
rank's parts are a table of numbers, packed to some 20 KB. index.zip holds them as they are:

names.json    [[name, dtype, shape], ...]; for what is no tensor dtype and shape are null
3             rank 3's table, compressed: int64, little-endian, a row for each part in its file:
              number of the name, place in the file, length there, start in each dimension, size
              in each dimension; as many dimensions as the tensor that has most

A reader looks into its own rank's table first. Where the state was cut in the same way that has
all, else it goes through the tables of all ranks, and keeps what it asks for. Nothing is unpickled.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from spmdrl.distributed.torch_compat import storage_info

INDEX = "index.zip"
NAMES = "names.json"

Box = tuple[Sequence[int], Sequence[int]]  # start and size in each dimension
Named = tuple[str, str | None, list[int] | None]  # a row of names.json


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor, or a value that is no tensor, in a rank's file."""

    name: str
    box: Box
    place: int  # bytes from the beginning of the file
    length: int  # bytes


def file_of(rank: int) -> str:
    """The file that torch's FileSystemWriter makes on a rank."""
    return f"__{rank}_0.distcp"


def encode(parts: Sequence[StoredPart], names: Sequence[Named]) -> bytes:
    """Packs a rank's table. Raises KeyError for a name that is not in `names`."""
    numbers = {name: number for number, (name, _, _) in enumerate(names)}
    dims = most_dims(names)
    table = np.zeros((len(parts), 3 + 2 * dims), dtype="<i8")
    table[:, 3 + dims :] = 1  # in dimensions that a tensor does not have
    for row, part in zip(table, parts, strict=True):
        start, size = part.box
        row[:3] = numbers[part.name], part.place, part.length
        row[3 : 3 + len(start)] = start
        row[3 + dims : 3 + dims + len(size)] = size
    # column by column: neighbours are alike
    return zlib.compress(table.T.tobytes(), level=1)


def write_index(folder: Path, names: Sequence[Named], tables: Sequence[bytes]) -> None:
    """tables: what `encode` returned, in rank order."""
    with zipfile.ZipFile(Path(folder, INDEX), "w", zipfile.ZIP_STORED) as file:
        file.writestr(NAMES, json.dumps(names))
        for rank, table in enumerate(tables):
            file.writestr(str(rank), table)


def read_index(
    folder: Path, wanted: Mapping[str, Box] | None = None, rank: int | None = None
) -> Metadata:
    """Reads the index as torch.distributed.checkpoint has it.

    wanted: the part of each tensor that will be read; of others no part is in the result, and of
    values that are no tensors all are. None: all. rank: whose table is looked into first. Raises
    ValueError, KeyError or zipfile.BadZipFile for what is no index.
    """
    with zipfile.ZipFile(Path(folder, INDEX)) as file:
        names: list[Named] = [tuple(row) for row in json.loads(file.read(NAMES))]
        found = Metadata({name: description(dtype, shape) for name, dtype, shape in names})
        found.storage_data, found.storage_meta = {}, StorageMeta()
        ranks = sorted(int(name) for name in file.namelist() if name != NAMES)
        ask = wanted_boxes(names, wanted)
        # the first rank's has what is no tensor
        near = [r for r in ranks if r in (0, rank)] if wanted is not None and rank in ranks else []
        tables: dict[int, np.ndarray] = {}
        for group in (near, [r for r in ranks if r not in near]):
            tables |= {r: overlapping(decode(file.read(str(r)), ask), ask) for r in group}
            if tables and is_all(np.concatenate(list(tables.values())), ask):
                break
        else:
            raise ValueError("parts of tensors are missing in it")
    for writer, table in sorted(tables.items()):
        add_parts(found, names, table, writer)
    return found


def description(dtype: str | None, shape: list[int] | None) -> Any:
    if dtype is None or shape is None:
        return BytesStorageMetadata()
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype!r} is no dtype of torch")
    return TensorStorageMetadata(TensorProperties(dtype=kind), torch.Size(shape), [])


def most_dims(names: Sequence[Named]) -> int:
    return max((len(shape) for _, _, shape in names if shape is not None), default=0)


def decode(table: bytes, boxes: np.ndarray) -> np.ndarray:
    """(num_parts, 3 + 2 * dims) int64. boxes: see `wanted_boxes`; a row for each name."""
    found = np.frombuffer(zlib.decompress(table), dtype="<i8").reshape(3 + boxes.shape[1], -1).T
    if len(found) and not 0 <= found[:, 0].min() <= found[:, 0].max() < len(boxes):
        raise ValueError("it numbers tensors that it does not name")
    return found


def wanted_boxes(names: Sequence[Named], wanted: Mapping[str, Box] | None) -> np.ndarray:
    """(num_names, 2 * dims) int64: start in each dimension, then end; an end of 0: nothing of it.

    A value that is no tensor is wanted always.
    """
    dims = most_dims(names)
    boxes = np.zeros((len(names), 2 * dims), dtype=np.int64)
    for row, (name, _, shape) in zip(boxes, names, strict=True):
        is_asked = shape is None or wanted is None or name in wanted
        row[dims:] = 1 if is_asked else 0
        if shape is None or not is_asked:
            continue
        start, size = ([0] * len(shape), shape) if wanted is None else wanted[name]
        if len(start) != len(shape):  # of another model: whoever reads it says so
            start, size = [0] * len(shape), shape
        row[: len(shape)] = start
        row[dims : dims + len(shape)] = np.minimum(np.add(start, size), shape)
    return boxes


def overlapping(table: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """The rows whose part has elements that are wanted."""
    dims = boxes.shape[1] // 2
    start, size, box = table[:, 3 : 3 + dims], table[:, 3 + dims :], boxes[table[:, 0]]
    common = common_sizes(start, size, box)
    return table[(common > 0).all(axis=1)]


def common_sizes(start: np.ndarray, size: np.ndarray, box: np.ndarray) -> np.ndarray:
    dims = start.shape[1]
    first = np.maximum(start, box[:, :dims])
    return np.maximum(np.minimum(start + size, box[:, dims:]) - first, 0)


def is_all(table: np.ndarray, boxes: np.ndarray) -> bool:
    """Whether the rows have every element that is wanted. Parts do not overlap."""
    dims = boxes.shape[1] // 2
    sizes = np.maximum(boxes[:, dims:] - boxes[:, :dims], 0)
    start, size, box = table[:, 3 : 3 + dims], table[:, 3 + dims :], boxes[table[:, 0]]
    there = np.zeros(len(boxes), dtype=np.int64)
    np.add.at(there, table[:, 0], common_sizes(start, size, box).prod(axis=1))
    return bool((there == sizes.prod(axis=1)).all())


def add_parts(found: Metadata, names: Sequence[Named], table: np.ndarray, rank: int) -> None:
    dims = most_dims(names)
    for number, place, length, *box in table.tolist():
        name, _, shape = names[number]
        offset = None
        if shape is not None:
            offset = torch.Size(box[: len(shape)])
            size = torch.Size(box[dims : dims + len(shape)])
            described = found.state_dict_metadata[name]
            assert isinstance(described, TensorStorageMetadata)
            described.chunks.append(ChunkStorageMetadata(offset, size))
        index = MetadataIndex(name, offset)
        found.storage_data[index] = storage_info(file_of(rank), place, length)
