"""LM head -> log-probability and entropy on a GPU, without ever holding all logits.

One matmul kernel makes the logits of a tile, (rows, columns of the vocabulary), in registers, and
writes four numbers for each of its rows. With m the row's largest logit of the tile and
d = z - m <= 0:

    m      rest = sum over the others of e^d      weighted = sum e^d d      squares = sum e^2d

Tiles, and ranks that hold a part of the vocabulary each, are merged by raising all to one m. Then

    log p(t) = (z_t - m) - log1p(rest)     H = log1p(rest) - weighted / (1 + rest)

Both terms of H are >= 0: nothing cancels, however sure the model is. The online form of the softmax
is Milakov and Gimelshein 2018, arXiv 1805.02867; logits in tiles, as Cut Cross-Entropy has them
(Wijmans et al. 2024, arXiv 2411.09009).

The backward pass makes the logits again, for some columns of the vocabulary at a time, and writes
d loss / d logits of these, which two matmuls turn into the gradients. A part of the vocabulary sees
all rows at once, so its gradient is complete, without a float32 copy of (vocab, hidden_size).

Tiles are chosen by dtype, width and GPU alone, never by trial: a row's result depends neither on
the number of rows beside it nor on the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spmdrl_kernels.lm_head_kernels import grad_kernel, merge_kernel, stats_kernel
from spmdrl_kernels.switch import dtype_to_store

CHUNK_BYTES = 256 << 20  # of d loss / d logits, held at once


@dataclass(frozen=True)
class Tiles:
    """Tile of logits (rows, cols), made from hidden_size in steps of `inner`."""

    rows: int
    cols: int
    inner: int
    group: int = 16  # tiles of rows that share the columns in the cache
    warps: int = 4
    stages: int = 3
    tma: bool = False  # operands are loaded by the tensor memory accelerator (Hopper and later)


# Candidates, which `python -m spmdrl_kernels.bench` compares. The first is the default: it reads
# least of the cache for each product; the last does without the tensor memory accelerator.
HOPPER = (
    Tiles(128, 256, 64, warps=8, stages=4, tma=True),
    Tiles(128, 256, 64, warps=8, stages=3, tma=True),
    Tiles(256, 128, 64, group=8, warps=8, stages=4, tma=True),
    Tiles(128, 128, 64, warps=4, stages=3, tma=True),
    Tiles(128, 128, 64, warps=8, stages=3, tma=True),
    Tiles(128, 256, 64, warps=8, stages=3),
)


def tiles_for(hidden: Tensor, weight: Tensor) -> Tiles:
    """hidden: (rows, hidden_size); weight: (vocab, hidden_size), as the kernels get them."""
    if not hidden.is_cuda:  # Triton's interpreter
        return Tiles(16, 32, 16, group=2, warps=1, stages=1)
    if hidden.dtype == torch.float32:
        return Tiles(64, 64, 32)
    if torch.cuda.get_device_capability(hidden.device) < (9, 0):
        return Tiles(128, 128, 32, warps=8)
    return HOPPER[0] if aligned(hidden) and aligned(weight) else HOPPER[-1]


def aligned(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator can read it: rows begin at multiples of 16 bytes."""
    step = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and step % 16 == 0 and matrix.stride(1) == 1


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    pi_squared: bool = False,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As spmdrl_kernels.lm_head.lm_head_logprobs, which has the plain form.

    A target that no rank's vocabulary has gives NaN. chunk_bytes: of d loss / d logits.
    """
    return _LmHead.apply(
        in_rows(hidden), in_rows(weight), bias, targets, temperature, softcap, chunk_bytes,
        pi_squared, group, first_row, tiles,
    )  # fmt: skip


def in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


@dataclass(frozen=True)
class _Head:
    """What both passes share; `softcap` 0 where there is none."""

    temperature: float
    softcap: float
    chunk_bytes: int
    group: dist.ProcessGroup | None
    first_row: int
    tiles: Tiles


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_bytes: int,
        pi_squared: bool,
        group: dist.ProcessGroup | None,
        first_row: int,
        tiles: Tiles | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tiles = tiles or tiles_for(hidden, weight)
        head = _Head(temperature, softcap or 0.0, chunk_bytes, group, first_row, tiles)
        stats, target_logits = row_stats(hidden, weight, bias, targets, head, pi_squared)
        top, log_sum, logprobs, entropy, squares = merged(stats, target_logits, group)
        ctx.save_for_backward(hidden, weight, bias, targets, top, log_sum, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares)
        return logprobs, entropy, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, top, log_sum, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        rows = _grad_rows(top, log_sum, entropy, *grads[:2])
        found = gradients(hidden, weight, bias, targets, rows, ctx.head, wanted)
        return *found, *[None] * 8


def row_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    pi_squared: bool,
) -> tuple[Tensor, Tensor]:
    """(4, rows) float32, the numbers of the module's head; (rows,) the target's logit, NaN where
    this part of the vocabulary does not have it."""
    num_rows, vocab = len(hidden), len(weight)
    stats = hidden.new_zeros(4, num_rows, dtype=torch.float32)
    target_logits = torch.full_like(stats[0], torch.nan)
    if num_rows == 0 or vocab == 0:
        stats[0], stats[1] = -torch.inf, -1.0  # a sum of no terms, less the largest of them
        return stats, target_logits
    for part in _row_parts(num_rows, vocab, head):
        _part_stats(hidden[part], weight, bias, targets[part], head, pi_squared, stats[:, part],
                    target_logits[part])  # fmt: skip
    return stats, target_logits


def _row_parts(num_rows: int, vocab: int, head: _Head) -> list[slice]:
    """Whole groups of rows whose tiles' numbers have at most chunk_bytes, at least one group."""
    tiles = head.tiles
    group = tiles.rows * tiles.group
    size = head.chunk_bytes // (16 * -(-vocab // tiles.cols))
    size = max(1, size // group) * group
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _part_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    pi_squared: bool,
    stats: Tensor,
    target_logits: Tensor,
) -> None:
    """Writes stats, (4, rows) with any stride between the four, and target_logits."""
    num_rows, vocab = len(hidden), len(weight)
    tiles, num_tiles = head.tiles, -(-vocab // head.tiles.cols)
    partial = stats.new_empty(4 if pi_squared else 3, num_tiles, num_rows)
    stats_kernel[(-(-num_rows // tiles.rows) * num_tiles,)](
        *_operands(hidden, weight, tiles), _or_dummy(bias, partial), targets, partial,
        target_logits, num_rows, vocab, head.first_row, 1 / head.temperature, head.softcap,
        **_options(hidden, bias, head, vocab), SQUARES=pi_squared,
    )  # fmt: skip
    size = 32
    merge_kernel[(-(-num_rows // size),)](
        partial, stats, stats.stride(0), num_rows, num_tiles, ROWS=size, TILES=32,
        SQUARES=pi_squared, num_warps=4,
    )  # fmt: skip


def merged(
    stats: Tensor, target_logits: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """top, log of the sum of exp(z - top), log-probability, entropy, squares; (rows,) each.

    Of the vocabularies of all ranks of the group. Collective over it.
    """
    top, rest, weighted, squares = stats
    found = ~target_logits.isnan()
    if group is not None:
        mine, top = top, top.clone()
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        # a share without columns has -inf: it gives 0, and -inf * 0 is not to be seen
        below = (mine - top).clamp(min=-1e30)
        scale, is_top = below.exp(), (mine == top).float()
        weighted = scale * (weighted + below * (1 + rest))
        rest = rest * scale + torch.where(mine == top, 0.0, scale)
        sums = torch.stack(
            [rest, is_top, weighted, squares * scale.square(),
             target_logits.where(found, 0.0), found.float()]
        )  # fmt: skip
        dist.all_reduce(sums, group=group)
        rest, weighted, squares = sums[0] + (sums[1] - 1), sums[2], sums[3]
        found = sums[5] > 0
        target_logits = sums[4].where(found, torch.nan)
    log_sum = rest.log1p()
    total = 1 + rest
    logprobs = (target_logits - top) - log_sum
    return top, log_sum, logprobs, log_sum - weighted / total, squares / total.square()


def _grad_rows(
    top: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    """(5, rows) float32: top, log_sum, g, h, g + h H, of which the kernel makes

    d loss / d z = g [v = t] - p (g + h H + h log p)     z: logits / temperature
    """
    g = torch.zeros_like(top) if grad_logprobs is None else grad_logprobs.float()
    h = torch.zeros_like(top) if grad_entropy is None else grad_entropy.float()
    return torch.stack([top, log_sum, g, h, g + h * entropy])


def gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    head: _Head,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of hidden, weight and bias, those that are wanted; rows: as _grad_rows gives them."""
    num_rows, vocab = len(hidden), len(weight)
    empty = num_rows == 0 or vocab == 0
    new = torch.zeros_like if empty else torch.empty_like
    to_weight = new(weight) if wanted[1] else None
    to_bias = new(bias) if wanted[2] and bias is not None else None
    to_hidden = None
    if empty:
        return torch.zeros_like(hidden) if wanted[0] else None, to_weight, to_bias
    size = _columns_per_chunk(num_rows, weight, head)
    buffer = hidden.new_empty(num_rows * min(size, vocab), dtype=dtype_to_store(hidden))
    for first in range(0, vocab, size):
        part = slice(first, min(first + size, vocab))
        d_logits = buffer[: num_rows * (part.stop - first)].view(num_rows, -1)
        _d_logits(hidden, weight, bias, targets, rows, head, part, d_logits)
        d_logits = d_logits.to(hidden.dtype)
        if wanted[0]:
            added = matmul_float32(d_logits, weight[part])
            to_hidden = added if to_hidden is None else to_hidden.add_(added)
        if to_weight is not None:
            torch.mm(d_logits.T, hidden, out=to_weight[part])
        if to_bias is not None:
            to_bias[part] = d_logits.sum(0, dtype=torch.float32)
    return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, to_bias


def _columns_per_chunk(num_rows: int, weight: Tensor, head: _Head) -> int:
    """So many that d loss / d logits has at most chunk_bytes, whole tiles and at least one.

    Chunks begin at multiples of 8 columns, as matrix units and the accelerator's loads want it.
    """
    columns = head.chunk_bytes // (num_rows * weight.element_size())
    return max(1, columns // head.tiles.cols) * head.tiles.cols


def _d_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    rows: Tensor,
    head: _Head,
    part: slice,
    out: Tensor,
) -> None:
    """Writes d loss / d logits of these columns, as weight multiplies them: (rows, columns)."""
    tiles, (num_rows, columns) = head.tiles, out.shape
    bias = None if bias is None else bias[part]
    grad_kernel[(-(-num_rows // tiles.rows) * -(-columns // tiles.cols),)](
        *_operands(hidden, weight[part], tiles), _or_dummy(bias, rows), targets, rows, out,
        num_rows, columns, head.first_row + part.start, 1 / head.temperature, head.softcap,
        **_options(hidden, bias, head, columns),
    )  # fmt: skip


def matmul_float32(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, never rounded to the operands' dtype where the device can do that."""
    if a.dtype == torch.float32:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _operands(hidden: Tensor, weight: Tensor, tiles: Tiles) -> tuple[Any, ...]:
    """hidden and weight for a kernel, their row strides, and hidden_size."""
    strides = (hidden.stride(0), weight.stride(0), hidden.shape[1])
    if not tiles.tma:
        return hidden, weight, *strides
    a = TensorDescriptor.from_tensor(hidden, [tiles.rows, tiles.inner])
    b = TensorDescriptor.from_tensor(weight, [tiles.cols, tiles.inner])
    return a, b, *strides


def _or_dummy(bias: Tensor | None, instead: Tensor) -> Tensor:
    return instead if bias is None else bias


def _options(hidden: Tensor, bias: Tensor | None, head: _Head, columns: int) -> dict[str, Any]:
    """The constants both kernels are compiled for."""
    tiles = head.tiles
    exact = hidden.dtype != torch.float32 or torch.get_float32_matmul_precision() == "highest"
    return {
        "ROWS": tiles.rows, "COLS": tiles.cols, "INNER": tiles.inner, "GROUP": tiles.group,
        "TMA": tiles.tma, "WIDEN": not hidden.is_cuda, "PRECISION": "ieee" if exact else "tf32",
        "HAS_BIAS": bias is not None, "SOFTCAP": head.softcap > 0,
        "EVEN_COLS": columns % tiles.cols == 0, "EVEN_INNER": hidden.shape[1] % tiles.inner == 0,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
