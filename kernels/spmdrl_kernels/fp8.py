"""Matrices in FP8 (e4m3), with a float32 scale per block of 128 x 128 elements.

    scale_inv = largest absolute value of the block / 448      1 where that is zero (or subnormal)
    q         = e4m3(w / scale_inv)                            rounded to nearest, ties to even
    w         ~ q * scale_inv

Blocks are counted from the matrix's first element; those at its right and lower end may be partial.
Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.2, which is the layout that vLLM's block FP8 has.

Matrices may be quantised in parts by ranks that hold a part each: the largest value of a block is
the largest of its parts', whatever the order in which they are compared, and with the scale known
each element is quantised by itself. So the bits do not depend on how a matrix is cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl_kernels.copies_common import FP8_BLOCK, Offset
from spmdrl_kernels.switch import on_triton

BLOCK = FP8_BLOCK
LARGEST = 448.0  # of e4m3
DTYPE = torch.float8_e4m3fn
# elements taken at a time, in float32 (at least a row of blocks): on a CPU what fits its cache
CPU_CHUNK, CHUNK = 1 << 18, 1 << 24
STRIDES = 1 << 24  # smaller ones: 32 bits count 128 of them


def num_blocks(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w: (rows, columns) float -> q like w, float8_e4m3fn; scale_inv (num_blocks) float32.

    Raises ValueError where w is not finite.
    """
    q = torch.empty(w.shape, dtype=DTYPE, device=w.device)
    scale_inv = w.new_zeros(num_blocks(tuple(w.shape)), dtype=torch.float32)
    if by_kernel(w):  # both from one read
        from spmdrl_kernels import copies_triton

        copies_triton.quantize_blocks(w, q, scale_inv)
        refuse_infinite(w, scale_inv)
        return q, scale_inv
    block_maxima(w, (0, 0), scale_inv)
    refuse_infinite(w, scale_inv)
    scale_inv = scales_of(scale_inv)
    quantize_part(w, (0, 0), scale_inv, q)
    return q, scale_inv


def by_kernel(part: Tensor, *others: Tensor) -> bool:
    return on_triton(part) and all(max(t.stride()) < STRIDES for t in (part, *others))


def refuse_infinite(w: Tensor, numbers: Tensor) -> None:
    """numbers: of the blocks of w, their largest or their scales."""
    if not numbers.isfinite().all():
        raise ValueError(f"a matrix of shape {tuple(w.shape)} is not finite: no FP8 for it")


def scales_of(largest: Tensor) -> Tensor:
    """Of blocks with these largest absolute values, float32."""
    # by a tensor: CUDA multiplies with the reciprocal of a number, which the kernel does not
    scale_inv = largest / torch.full_like(largest, LARGEST)
    # a subnormal scale has few bits: the quotient may be far above 448
    return torch.where(scale_inv < torch.finfo(torch.float32).tiny, 1.0, scale_inv)


def block_maxima(part: Tensor, first: Offset, largest: Tensor) -> None:
    """Raises `largest`, of the whole matrix, by the part's absolute values; NaN counts as inf."""
    if by_kernel(part):
        from spmdrl_kernels import copies_triton

        copies_triton.block_maxima(part, first, largest)
        return
    for rows, top in _chunks(part, first[0]):
        found = _in_blocks(rows.float(), (top, first[1])).abs().amax((1, 3))
        place = _touched(largest, found.shape, (top, first[1]))
        torch.maximum(place, found.nan_to_num(torch.inf, torch.inf), out=place)


def quantize_part(part: Tensor, first: Offset, scale_inv: Tensor, out: Tensor) -> None:
    """Writes the part's e4m3 into `out`, of the same shape; scale_inv: of the whole matrix."""
    if by_kernel(part, out):
        from spmdrl_kernels import copies_triton

        copies_triton.quantize_part(part, first, scale_inv, out)
        return
    done = 0
    for rows, top in _chunks(part, first[0]):
        blocks = _in_blocks(rows.float(), (top, first[1]))
        scale = _touched(scale_inv, (blocks.shape[0], blocks.shape[2]), (top, first[1]))
        padded = (blocks / scale[:, None, :, None]).to(DTYPE).flatten(2).flatten(0, 1)
        height, width = rows.shape
        q = padded.narrow(0, top % BLOCK, height).narrow(1, first[1] % BLOCK, width)
        out[done : done + height].copy_(q)
        done += height


def _chunks(part: Tensor, top: int) -> Iterator[tuple[Tensor, int]]:
    """(rows of the part, their first row in the matrix); block rows are not divided further."""
    most = CPU_CHUNK if part.device.type == "cpu" else CHUNK
    height = max(1, most // (max(1, part.shape[1]) * BLOCK)) * BLOCK
    done = 0
    while done < len(part):
        end = min(len(part), done + height - (top + done) % BLOCK)
        yield part[done:end], top + done
        done = end


def _in_blocks(part: Tensor, first: Offset) -> Tensor:
    """(rows, columns) -> (block rows, 128, block columns, 128); zeros where it lacks elements."""
    above, left = first[0] % BLOCK, first[1] % BLOCK
    below, right = -(above + part.shape[0]) % BLOCK, -(left + part.shape[1]) % BLOCK
    if above or left or below or right:
        part = F.pad(part, (left, right, above, below))
    return part.reshape(part.shape[0] // BLOCK, BLOCK, part.shape[1] // BLOCK, BLOCK)


def _touched(grid: Tensor, shape: tuple[int, ...], first: Offset) -> Tensor:
    row, column = first[0] // BLOCK, first[1] // BLOCK
    return grid[row : row + shape[0], column : column + shape[1]]
