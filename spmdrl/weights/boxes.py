"""Rectangular parts of a tensor: for each dimension the first index and the one past the last.

((0, 3), (4, 8))    rows 0 to 2, columns 4 to 7
()                  a tensor without dimensions
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
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


class BoxIndex:
    """Boxes of one tensor, among which those that overlap a given one are found by bisection."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = tuple(boxes)
        self.sizes = [numel(box) for box in self.boxes]
        dimensions = range(len(self.boxes[0]) if self.boxes else 0)
        starts = [len({box[axis][0] for box in self.boxes}) for axis in dimensions]
        self.axis = starts.index(max(starts)) if starts else -1  # along which most of them are cut
        self.order = list(range(len(self.boxes)))
        if self.axis < 0:
            return
        self.order.sort(key=lambda number: self.boxes[number][self.axis])
        spans = [self.boxes[number][self.axis] for number in self.order]
        self.firsts = [first for first, _ in spans]
        self.lasts = list(accumulate((last for _, last in spans), max))

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """Returns (number of a box, its part within the given one), by ascending numbers."""
        near = self.order
        if self.axis >= 0:
            first, last = box[self.axis]
            near = near[bisect_right(self.lasts, first) : bisect_left(self.firsts, last)]
        found = ((number, intersect(self.boxes[number], box)) for number in near)
        return sorted((number, part) for number, part in found if part is not None)

    def fills(self, box: Box) -> bool:
        """Returns True if the boxes have each element of the given one once, and no others."""
        apart = all(len(self.overlapping(mine)) == 1 for mine in self.boxes)
        return apart and sum(self.sizes) == numel(box)


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
