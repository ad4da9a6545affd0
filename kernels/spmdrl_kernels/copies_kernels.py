"""The kernels of copies_triton.py: boxes with a cast, blocks to e4m3.

Rounding to bfloat16 and to e4m3 is done on the bits, so that Triton's interpreter, which cuts off,
gives the bits that a GPU does.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _elements(address, KIND: tl.constexpr, HINT: tl.constexpr):  # type: ignore[no-untyped-def]
    """A pointer to what lies there, bfloat16 as whole numbers."""
    if KIND == "float32":
        base = address.to(tl.pointer_type(tl.float32))
    elif KIND == "float16":
        base = address.to(tl.pointer_type(tl.float16))
    elif KIND == "bfloat16" or KIND == "int16":
        base = address.to(tl.pointer_type(tl.uint16))
    elif KIND == "int8":
        base = address.to(tl.pointer_type(tl.uint8))
    elif KIND == "int32":
        base = address.to(tl.pointer_type(tl.uint32))
    else:
        base = address.to(tl.pointer_type(tl.uint64))
    return tl.multiple_of(base, HINT)


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    address, first, at, inside, KIND: tl.constexpr, MASKED: tl.constexpr, HINT: tl.constexpr
):
    """Floats as float32, whole numbers as they are; first, at: offsets in elements."""
    base = _elements(address, KIND, HINT) + first
    if MASKED:
        x = tl.load(base + at, mask=inside, other=0)
    else:
        x = tl.load(base + at)
    if KIND == "bfloat16":
        x = (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float16":
        x = x.to(tl.float32)
    return x


@triton.jit
def _write(  # type: ignore[no-untyped-def]
    address, first, at, x, inside, KIND: tl.constexpr, MASKED: tl.constexpr, HINT: tl.constexpr
):
    base = _elements(address, KIND, HINT) + first
    if KIND == "float16":
        x = x.to(tl.float16)
    elif KIND == "bfloat16":
        x = _bfloat16(x).to(tl.uint16)
    if MASKED:
        tl.store(base + at, x, mask=inside)
    else:
        tl.store(base + at, x)


@triton.jit
def _bfloat16(x):  # type: ignore[no-untyped-def]
    """The bits, rounded to nearest, ties to even; NaN as NVIDIA's conversion has it."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x != x, 0x7FFF, rounded)


@triton.jit
def _through(x, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "bfloat16":
        x = (_bfloat16(x) << 16).to(tl.float32, bitcast=True)
    elif KIND == "float16":
        x = x.to(tl.float16).to(tl.float32)
    return x


@triton.jit
def _e4m3(x):  # type: ignore[no-untyped-def]
    """The bits of float32 in e4m3 (fn), ties to even; what is too large, inf too, becomes 448.

    Below 2^-6 steps are 2^-9, those of float32 next to 2^14: adding that rounds.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    small = bits.to(tl.float32, bitcast=True) + 16384.0
    small = small.to(tl.uint32, bitcast=True) - 0x46800000
    # the exponent's bias is 7 instead of 127
    normal = (bits - 0x3C000000 + 0x7FFFF + ((bits >> 20) & 1)) >> 20
    found = tl.where(bits < 0x3C800000, small, normal)
    found = tl.where(bits < 0x43F00000, tl.minimum(found, 0x7E), 0x7E)
    found = tl.where(x != x, 0x7F, found)
    return (found | sign).to(tl.uint8)


@triton.jit
def copy_kernel(  # type: ignore[no-untyped-def]
    addresses,  # (boxes, 3) int64: source, destination, whether all is aligned
    entries,  # (boxes, 4) int64: the rest of a Box
    tiles,  # (tiles, 2) int64: box, number within it
    SOURCE: tl.constexpr,
    VIA: tl.constexpr,
    TO: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    box = tl.load(tiles + 2 * tile)
    start = tl.load(tiles + 2 * tile + 1) * BLOCK
    source, to = tl.load(addresses + 3 * box), tl.load(addresses + 3 * box + 1)
    aligned = tl.load(addresses + 3 * box + 2)
    total, columns = tl.load(entries + 4 * box), tl.load(entries + 4 * box + 1)
    strides = tl.load(entries + 4 * box + 2), tl.load(entries + 4 * box + 3)
    lane = tl.arange(0, BLOCK)
    inside = start + lane < total
    if (aligned != 0) & (start + BLOCK <= total):
        if columns == 1073741824:  # NO_END
            at = tl.multiple_of(start, 16) + lane
            x = _through(_read(source, 0, at, inside, SOURCE, False, 16), VIA)
            _write(to, 0, at, x, inside, TO, False, 16)
        else:
            first = start // columns
            place = tl.multiple_of((start - first * columns).to(tl.int32), 16) + lane
            width = tl.multiple_of(columns.to(tl.int32), 16)
            row, column = first + place // width, place % width
            at = row * tl.multiple_of(strides[0], 16) + column
            x = _through(_read(source, 0, at, inside, SOURCE, False, 16), VIA)
            at = row * tl.multiple_of(strides[1], 16) + column
            _write(to, 0, at, x, inside, TO, False, 16)
    else:
        first = start // columns
        place = (start - first * columns).to(tl.int32) + lane
        row, column = first + place // columns.to(tl.int32), place % columns.to(tl.int32)
        x = _read(source, 0, row * strides[0] + column, inside, SOURCE, True, 1)
        _write(to, 0, row * strides[1] + column, _through(x, VIA), inside, TO, True, 1)


@triton.jit
def block_kernel(  # type: ignore[no-untyped-def]
    addresses,  # (parts, 4) int64: source, destination, first block's number, whether aligned
    entries,  # (parts, 10) int64: shape, strides of both, offset in the first block, grid's strides
    tiles,  # (tiles, 3) int64: part, block's row and column
    SOURCE: tl.constexpr,
    MODE: tl.constexpr,
    UNIT: tl.constexpr,  # whether elements of a row are next to each other
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    part = tl.load(tiles + 3 * tile)
    block_row, block_column = tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    source, to = tl.load(addresses + 4 * part), tl.load(addresses + 4 * part + 1)
    grid = tl.load(addresses + 4 * part + 2)
    entry = entries + 10 * part
    top = block_row * BLOCK - tl.load(entry + 6)
    left = block_column * BLOCK - tl.load(entry + 7)
    place = block_row * tl.load(entry + 8) + block_column * tl.load(entry + 9)
    height, width = tl.load(entry), tl.load(entry + 1)
    lane = tl.arange(0, BLOCK)
    rows, columns = lane[:, None], lane[None, :]
    # of the block's first element; with offsets of 32 bits from there less is kept in registers
    source_stride, to_stride = tl.load(entry + 2), tl.load(entry + 4)
    if UNIT:
        source_step, to_step = 1, 1
    else:
        source_step, to_step = tl.load(entry + 3).to(tl.int32), tl.load(entry + 5).to(tl.int32)
    read, write = top * source_stride + left * source_step, top * to_stride + left * to_step
    whole = (top >= 0) & (left >= 0) & (top + BLOCK <= height) & (left + BLOCK <= width)
    if whole & (tl.load(addresses + 4 * part + 3) != 0):
        read, write = tl.multiple_of(read, 16), tl.multiple_of(write, 16)
        at = rows * tl.multiple_of(source_stride.to(tl.int32), 16) + columns
        x = _read(source, read, at, at, SOURCE, False, 16)
        at = rows * tl.multiple_of(to_stride.to(tl.int32), 16) + columns
        _finish(x, to, write, at, at, grid, place, MODE, False, 16)
    else:
        inside = (rows >= -top) & (rows < height - top)
        inside &= (columns >= -left) & (columns < width - left)
        at = rows * source_stride.to(tl.int32) + columns * source_step
        x = _read(source, read, at, inside, SOURCE, True, 1)
        at = rows * to_stride.to(tl.int32) + columns * to_step
        _finish(x, to, write, at, inside, grid, place, MODE, True, 1)


@triton.jit
def _finish(  # type: ignore[no-untyped-def]
    x, to, first, at, inside, grid, place,
    MODE: tl.constexpr, MASKED: tl.constexpr, HINT: tl.constexpr,
):  # fmt: skip
    """x: a block in float32, zero where there is nothing."""
    number = grid.to(tl.pointer_type(tl.float32)) + place
    if MODE == "given":
        scale = tl.load(number)
    else:
        size = tl.abs(x)
        size = tl.where(size != size, float("inf"), size)
        largest = tl.max(tl.max(size, 1), 0)
        if MODE == "largest":  # no number is negative: they compare as their bits do
            bits = grid.to(tl.pointer_type(tl.int32)) + place
            tl.atomic_max(bits, largest.to(tl.int32, bitcast=True))
        else:
            scale = tl.math.div_rn(largest, 448.0)
            scale = tl.where(scale < 1.1754943508222875e-38, 1.0, scale)
            tl.store(number, scale)
    if MODE != "largest":
        q = _e4m3(tl.math.div_rn(x, tl.zeros_like(x) + scale))
        _write(to, first, at, q, inside, "int8", MASKED, HINT)
