"""Writes safetensors files one tensor at a time, so that no file is in memory as a whole.

A file begins with the length of its header (8 bytes, little-endian) and the header, JSON that says
of each tensor its dtype, shape and place; the tensors follow. Source: the format's description at
https://huggingface.co/docs/safetensors. Where each tensor lies is known before the first is
written, so they may come in any order, and several processes may write files of one model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FILE_BYTES = 5_000_000_000  # of a file, unless what has to be in one file is larger
INDEX = "model.safetensors.index.json"
UNFINISHED = ".unfinished"  # after the name of a file that is being written
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


class TensorSpec(NamedTuple):
    """A tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def files_of(
    groups: Sequence[Mapping[str, TensorSpec]], file_bytes: int = FILE_BYTES
) -> dict[str, list[int]]:
    """Returns the numbers of the groups in each file, by its name. Tensors of a group share one."""
    found: list[list[int]] = []
    size = 0
    for number, group in enumerate(groups):
        nbytes = sum(spec.nbytes for spec in group.values())
        if not found or size + nbytes > file_bytes:
            found.append([])
            size = 0
        found[-1].append(number)
        size += nbytes
    if len(found) == 1:
        return {"model.safetensors": found[0]}
    return {f"model-{i:05}-of-{len(found):05}.safetensors": own for i, own in enumerate(found, 1)}


class SafetensorsFile:
    """A file that has its name once all of its tensors are written."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        self.path, self.specs = path, specs
        self.left = set(specs)
        self.places: dict[str, int] = {}
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        # wide types first: each tensor then begins at a multiple of its type's size
        place = 0
        for name in sorted(specs, key=lambda name: -specs[name].dtype.itemsize):
            spec = specs[name]
            header[name] = {
                "dtype": NAMES[spec.dtype], "shape": spec.shape,
                "data_offsets": [place, place + spec.nbytes],
            }  # fmt: skip
            self.places[name] = place
            place += spec.nbytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.begin = 8 + len(text)
        self.file = Path(f"{path}{UNFINISHED}").open("wb", buffering=0)
        self.put(len(text).to_bytes(8, "little") + text, 0)
        self.file.truncate(self.begin + place)

    def write(self, name: str, tensor: Tensor) -> None:
        """tensor: of any dtype, on any device; it is converted to the dtype of its spec."""
        spec = self.specs[name]
        assert tuple(tensor.shape) == spec.shape, (name, tensor.shape, spec.shape)
        data = tensor.detach().to("cpu", spec.dtype).contiguous().flatten().view(torch.uint8)
        self.put(data.numpy(), self.begin + self.places[name])
        self.left.discard(name)

    def put(self, data: Any, place: int) -> None:
        rest = memoryview(data)
        while len(rest):  # the kernel writes 2 GiB at once, at most
            written = os.pwrite(self.file.fileno(), rest, place)
            rest, place = rest[written:], place + written

    def close(self) -> None:
        """Raises ValueError where a tensor was not written: the file keeps its unfinished name."""
        self.file.close()
        if self.left:
            raise ValueError(f"{self.path} lacks {len(self.left)} tensors: {sorted(self.left)[:3]}")
        os.rename(f"{self.path}{UNFINISHED}", self.path)


def write_index(out: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Writes which file has which tensor; nothing where there is one file. files: names by file."""
    if len(files) == 1:
        return
    found = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": found}, indent=1)
    Path(out, INDEX).write_text(text)
