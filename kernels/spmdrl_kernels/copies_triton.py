"""Many copies in one launch, on a GPU.

A table on the device has an entry per box: rows of contiguous columns, with a stride of its own on
either side. A work list cuts the boxes into tiles of BLOCK elements, one program each, so that a
huge tensor and thousands of tiny ones keep the device equally busy. Tensors of more dimensions are
merged into boxes where they can be, and are several boxes otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from spmdrl_kernels.copies_common import FP8_BLOCK, Offset, check_shapes, plain_copies
from spmdrl_kernels.copies_kernels import block_kernel, copy_kernel

BLOCK = 4096  # elements of a tile
NO_END = 1 << 30  # columns of a box of one row; larger ones are divided
MOST_BOXES = 1024  # of one tensor; with more it is left to PyTorch
KINDS = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ALIGNED = 16  # bytes of a pointer, elements of a row

Array = np.ndarray


class Box(NamedTuple):
    """All in elements."""

    source_offset: int
    to_offset: int
    total: int
    columns: int  # NO_END where there is one row
    source_stride: int
    to_stride: int


@lru_cache(maxsize=1 << 14)
def boxes(
    shape: tuple[int, ...], source_strides: tuple[int, ...], to_strides: tuple[int, ...]
) -> tuple[Box, ...] | None:
    """The copy of one tensor; None where it is more than MOST_BOXES."""
    if 0 in shape:
        return ()
    merged: list[tuple[int, int, int]] = []  # innermost first: size, strides
    for size, of_source, of_to in sorted(
        (d for d in zip(shape, source_strides, to_strides, strict=True) if d[0] > 1),
        key=lambda d: (d[2], d[1]),
    ):
        inner = merged[-1] if merged else None
        if inner and (of_source, of_to) == (inner[0] * inner[1], inner[0] * inner[2]):
            merged[-1] = (inner[0] * size, *inner[1:])
        else:
            merged.append((size, of_source, of_to))
    columns = merged.pop(0)[0] if merged and merged[0][1:] == (1, 1) else 1
    rows = merged.pop(0) if merged else (1, 0, 0)
    if np.prod([size for size, _, _ in merged], dtype=np.float64) > MOST_BOXES:
        return None
    found = []
    for place in product(*(range(size) for size, _, _ in merged)):
        source = sum(i * d[1] for i, d in zip(place, merged, strict=True))
        to = sum(i * d[2] for i, d in zip(place, merged, strict=True))
        found += list(_divided(source, to, columns, rows))
    return tuple(found)


def _divided(source: int, to: int, columns: int, rows: tuple[int, int, int]) -> Iterator[Box]:
    """Boxes whose columns a 32-bit integer counts."""
    if columns < NO_END and rows[0] > 1:
        yield Box(source, to, rows[0] * columns, columns, rows[1], rows[2])
        return
    for row, first in product(range(rows[0]), range(0, columns, NO_END)):
        size = min(NO_END, columns - first)
        yield Box(source + row * rows[1] + first, to + row * rows[2] + first, size, NO_END, 0, 0)


class CopyTable:
    """Of pairs of tensors; one launch for each pair of dtypes among them."""

    def __init__(self, via: torch.dtype | None) -> None:
        self.via = via
        self.signature: list[tuple] = []  # of the tensors that the launches are for
        self.launches: list[tuple[tuple[Tensor, ...], tuple[str, str, str]]] = []
        self.rest: list[int] = []  # pairs that PyTorch is left with

    def run(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        signature = [_lies(t) for t in to] + [_lies(s) for s in source]
        if signature != self.signature:
            check_shapes(to, source)
            self.make(to, source)
            self.signature = signature
        for table, (of_source, via, of_to) in self.launches:
            copy_kernel[(len(table[2]),)](
                *table, SOURCE=of_source, VIA=via, TO=of_to, BLOCK=BLOCK, num_warps=8
            )
        plain_copies([to[i] for i in self.rest], [source[i] for i in self.rest], self.via)

    def make(self, to: Sequence[Tensor], source: Sequence[Tensor]) -> None:
        groups: dict[tuple[str, str, str], list[tuple[int, ...]]] = {}
        self.rest = []
        for number, (t, s) in enumerate(zip(to, source, strict=True)):
            kinds = kinds_of(s.dtype, self.via, t.dtype)
            found = boxes(tuple(t.shape), s.stride(), t.stride())
            if kinds is None or found is None:
                self.rest.append(number)
                continue
            first, size = (s.data_ptr(), t.data_ptr()), (s.element_size(), t.element_size())
            groups.setdefault(kinds, []).extend(
                (first[0] + box[0] * size[0], first[1] + box[1] * size[1], *box[2:])
                for box in found
            )
        self.launches = [
            (_upload_boxes(np.array(rows, dtype=np.int64), to[0].device), kinds)
            for kinds, rows in groups.items()
            if rows
        ]


def _lies(t: Tensor) -> tuple:
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def kinds_of(
    source: torch.dtype, via: torch.dtype | None, to: torch.dtype
) -> tuple[str, str, str] | None:
    """What elements are read, rounded and written as; None: not by the kernel."""
    via = to if via is None or source == via else via
    if source == via == to:
        kind = f"int{8 * source.itemsize}"
        return (kind, kind, kind) if source.itemsize in INTS else None
    if not {source, via, to} <= KINDS.keys():
        return None
    return KINDS[source], "float32" if via == to else KINDS[via], KINDS[to]


def _upload_boxes(rows: Array, device: torch.device) -> tuple[Tensor, ...]:
    """rows: of address of source, address of destination and the rest of a Box."""
    total, columns = rows[:, 2], rows[:, 3]
    aligned = ((rows[:, 0] | rows[:, 1]) % ALIGNED == 0) & (
        (columns | rows[:, 4] | rows[:, 5]) % ALIGNED == 0
    )
    tiles = _tiles(-(-total // BLOCK))
    addresses = np.column_stack([rows[:, :2], aligned])
    return _upload(addresses, device), _upload(rows[:, 2:], device), _upload(tiles, device)


def _tiles(counts: Array) -> Array:
    """(entry, number within it) of every tile."""
    entry = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.column_stack([entry, number])


def _upload(rows: Array, device: torch.device) -> Tensor:
    """Int64; from pinned memory, for which the device is not waited for."""
    there = torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
    if device.type == "cuda":
        there = there.pin_memory()
    return there.to(device, non_blocking=True)


class BlockTable:
    """Of parts of matrices and the blocks of 128 x 128 that they touch.

    mode: "given" quantises by scales that are known, "largest" raises the blocks' largest absolute
    values instead, "both" quantises whole blocks by the scales that it finds, from one read.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.signature: list[tuple] = []
        self.launch: tuple[tuple[Tensor, ...], str, bool] | None = None

    def run(
        self, parts: Sequence[Tensor], firsts: Sequence[Offset], grids: Sequence[Tensor],
        to: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """parts: of one dtype, strides below fp8.STRIDES; grids: a float32 number per block of the
        whole matrices; to: as the parts, a byte per element (not written by "largest")."""
        signature = [*firsts, *(_lies(t) for several in (parts, grids, to) for t in several)]
        if signature != self.signature:
            check_shapes(to, parts)
            self.make(parts, firsts, grids, to)
            self.signature = signature
        if self.launch is not None:
            table, kind, unit = self.launch
            block_kernel[(len(table[2]),)](
                *table, SOURCE=kind, MODE=self.mode, UNIT=unit, BLOCK=FP8_BLOCK, num_warps=16
            )

    def make(
        self, parts: Sequence[Tensor], firsts: Sequence[Offset], grids: Sequence[Tensor],
        to: Sequence[Tensor],
    ) -> None:  # fmt: skip
        rows: list[tuple[int, ...]] = []
        tiles: list[Array] = []
        for part, first, grid, out in zip(parts, firsts, grids, to, strict=True):
            if part.numel() == 0:
                continue
            above, left = first[0] % FP8_BLOCK, first[1] % FP8_BLOCK
            height = -(-(above + part.shape[0]) // FP8_BLOCK)
            width = -(-(left + part.shape[1]) // FP8_BLOCK)
            touched = grid.narrow(0, first[0] // FP8_BLOCK, height)
            touched = touched.narrow(1, first[1] // FP8_BLOCK, width)
            blocks = np.indices((1, height, width)).reshape(3, -1).T
            tiles.append(blocks + np.array([len(rows), 0, 0]))
            aligned = (left | part.data_ptr() | out.data_ptr()) % ALIGNED == 0
            aligned &= (part.stride(0) | out.stride(0)) % ALIGNED == 0
            aligned &= part.stride(1) == out.stride(1) == 1
            rows.append((
                part.data_ptr(), out.data_ptr(), touched.data_ptr(), int(aligned), *part.shape,
                *part.stride(), *out.stride(), above, left, *touched.stride(),
            ))  # fmt: skip
        self.launch = None
        if rows:
            table, device = np.array(rows, dtype=np.int64), parts[0].device
            unit = bool((table[:, [7, 9]] == 1).all())
            arrays = (table[:, :4], table[:, 4:], np.concatenate(tiles))
            uploaded = tuple(_upload(array, device) for array in arrays)
            self.launch = (uploaded, KINDS[parts[0].dtype], unit)


def block_maxima(part: Tensor, first: Offset, largest: Tensor) -> None:
    """As spmdrl_kernels.fp8.block_maxima; largest: float32, no number negative."""
    BlockTable("largest").run([part], [first], [largest], [part])


def quantize_part(part: Tensor, first: Offset, scale_inv: Tensor, out: Tensor) -> None:
    """As spmdrl_kernels.fp8.quantize_part."""
    BlockTable("given").run([part], [first], [scale_inv], [out])


def quantize_blocks(w: Tensor, q: Tensor, scale_inv: Tensor) -> None:
    """Writes both from one read of w; the scale is inf where a block is not finite."""
    BlockTable("both").run([w], [(0, 0)], [scale_inv], [q])
