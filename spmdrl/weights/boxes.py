"""Rectangular parts of a tensor: for each dimension the first index and the one past the last.

((0, 3), (4, 8))    rows 0 to 2, columns 4 to 7
()                  a tensor without dimensions
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def numel(box: Box) -> int:
    return prod(last - first for first, last in box)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(last - first for first, last in box)


def intersect(a: Box, b: Box) -> Box | None:
    """None where they have no element in common."""
    common = []
    for (a_first, a_last), (b_first, b_last) in zip(a, b, strict=True):
        first, last = max(a_first, b_first), min(a_last, b_last)
        if first >= last:
            return None
        common.append((first, last))
    return tuple(common)


def slab(box: Box, parts: int, part: int) -> Box | None:
    """One of `parts` slabs along one axis, by the rule of torch.chunk; None where it is empty.

    The axis is the first that is long enough, as FSDP cuts rows, else the longest.
    """
    if parts == 1 or not box:
        return box if part == 0 else None
    lengths = sizes(box)
    axis = next((a for a, length in enumerate(lengths) if length >= parts), None)
    if axis is None:
        axis = lengths.index(max(lengths))
    first, last = box[axis]
    step = -(-lengths[axis] // parts)
    start = first + part * step
    if start >= last:
        return None
    return (*box[:axis], (start, min(start + step, last)), *box[axis + 1 :])


def view(tensor: Tensor, held: Box, box: Box) -> Tensor:
    """The elements `box` of a tensor that holds `held`."""
    for axis, ((first, last), (start, end)) in enumerate(zip(held, box, strict=True)):
        if (first, last) != (start, end):
            tensor = tensor.narrow(axis, start - first, end - start)
    return tensor


def box_of(part: Tensor, full: Tensor) -> Box | None:
    """The box of `full`, contiguous, that `part` is a view of; None where it is not a box.

    Dimensions of size 1 may have been dropped or added.
    """
    if part.dtype != full.dtype or full.numel() == 0:
        return None
    wanted = [(n, s) for n, s in zip(part.shape, part.stride(), strict=True) if n != 1]
    offset, box = int(part.storage_offset()), []
    for length, stride in zip(full.shape, full.stride(), strict=True):
        first, offset = divmod(offset, stride)
        size = 1
        if wanted and wanted[0][1] == stride and length > 1:
            size = wanted.pop(0)[0]
        if first + size > length:
            return None
        box.append((first, first + size))
    if wanted or offset or numel(tuple(box)) != part.numel():
        return None
    return tuple(box)
