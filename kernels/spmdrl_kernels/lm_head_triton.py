"""LM head -> log-probability and entropy on a GPU, without ever holding all logits.

One matmul kernel makes the logits of a tile, (rows, columns of the vocabulary), in registers, and
writes for each of its rows the four numbers of lm_head_merge.py. Tiles, and ranks that hold a part
of the vocabulary each, are merged as it says. The online form of the softmax is Milakov and
Gimelshein 2018, arXiv 1805.02867; logits in tiles, as Cut Cross-Entropy has them (Wijmans et al.
2024, arXiv 2411.09009).

The top k: columns come in parts, each GROWTH - 1 times as large as all before. A row has slots for
some keys, the best k so far in the first. Of the next part the kernel adds the keys of the logits
that are over the k-th of these, k (GROWTH - 1) of them where large and small logits lie anywhere,
but no more than k of a tile; a second kernel sorts the best to the front. The first part has no
more tiles than there are slots for. A row that runs out of slots, as one may whose logits rise
with the column, is done again, in parts where none can.

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

from spmdrl_kernels.device import allows_tf32, dot_precision, has_tensor_memory_accelerator
from spmdrl_kernels.lm_head_kernels import best_kernel, grad_kernel, merge_kernel, stats_kernel
from spmdrl_kernels.lm_head_merge import LOWEST, NO_KEY, results, top_results
from spmdrl_kernels.switch import dtype_to_store

CHUNK_BYTES = 256 << 20  # of d loss / d logits, held at once
GROWTH = 3  # columns seen after a part over those seen before it


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


# Candidates, which `python kernels/bench/run.py` compares. The first is the default: it reads
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
    if not has_tensor_memory_accelerator(hidden.device):
        return Tiles(128, 128, 32, warps=8)
    return HOPPER[0] if aligned(hidden) and aligned(weight) else HOPPER[-1]


def aligned(matrix: Tensor) -> bool:
    """Whether the tensor memory accelerator can read it: rows begin at multiples of 16 bytes."""
    step = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and step % 16 == 0 and matrix.stride(1) == 1


def lm_head_all(
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
    top_k: int = 0,
    tiles: Tiles | None = None,
    ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As spmdrl_kernels.lm_head.lm_head_logprobs, which has the plain form and checks top_k, and
    lm_head_gathered with ids, (rows, k) or None for k of 0. Six tensors always: the fourth and
    fifth (rows, top_k), the last (rows, k). chunk_bytes: of d loss / d logits."""
    hidden, weight = in_rows(hidden), in_rows(weight)
    head = _Head(
        temperature, softcap or 0.0, chunk_bytes, pi_squared, group, first_row, top_k,
        tiles or tiles_for(hidden, weight),
    )  # fmt: skip
    ids = targets.new_empty(len(targets), 0) if ids is None else ids
    return _LmHead.apply(hidden, weight, bias, targets, ids, head)


def in_rows(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


@dataclass(frozen=True)
class _Head:
    """What both passes share; `softcap` 0 where there is none."""

    temperature: float
    softcap: float
    chunk_bytes: int
    pi_squared: bool
    group: dist.ProcessGroup | None
    first_row: int
    top_k: int
    tiles: Tiles


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ids: Tensor,
        head: _Head,
    ) -> tuple[Tensor, ...]:
        stats, target_logits, keys = row_stats(hidden, weight, bias, targets, head)
        picked = torch.cat(
            [target_logits[:, None], gathered_logits(hidden, weight, bias, ids, head)], 1
        )
        top, log_sum, logprobs, entropy, squares = results(stats, picked, head.group)
        logprobs, gathered = logprobs[:, 0].clone(), logprobs[:, 1:].clone()
        top_logprobs, top_ids = top_results(keys, top, log_sum, head.group)
        ctx.save_for_backward(hidden, weight, bias, targets, top, log_sum, entropy, ids, gathered)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares, top_logprobs, top_ids)
        return logprobs, entropy, squares, top_logprobs, top_ids, gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, top, log_sum, entropy, ids, gathered = ctx.saved_tensors
        wanted, exact = ctx.needs_input_grad[:3], None
        rows = _grad_rows(top, log_sum, entropy, *grads[:2])
        if grads[5] is not None and ids.shape[1] > 0:
            rows[4] += grads[5].float().sum(1)
            exact = _Exact(ids, at_ids(targets, ids, gathered, rows, grads[5], ctx.head))
        found = gradients(hidden, weight, bias, targets, rows, ctx.head, wanted, exact)
        return *found, None, None, None


@dataclass(frozen=True)
class _Exact:
    """d loss / d logits of some ids, computed in float32: (rows, k) each."""

    ids: Tensor
    values: Tensor

    def write(self, buffer: Tensor, first: int, columns: int) -> None:
        """Overwrites what the kernel wrote for these ids among columns `first` and following.

        buffer: flat, (rows, columns) and one place more, where ids of other columns are written.
        """
        at = self.ids - first
        flat = torch.arange(len(at), device=at.device)[:, None] * columns + at
        flat = flat.where((at >= 0) & (at < columns), len(buffer) - 1)
        buffer.scatter_(0, flat.flatten(), self.values.to(buffer.dtype).flatten())


def at_ids(
    targets: Tensor, ids: Tensor, gathered: Tensor, rows: Tensor, grads: Tensor, head: _Head
) -> Tensor:
    """(rows, k) float32: d loss / d logits of ids, the whole of it.

    Of a sure model it is a small difference of the large numbers that ids add and that the kernel
    takes off, which half precision would lose. gathered, grads: (rows, k), log-probabilities of ids
    and their gradients; rows: as _grad_rows gives them, the sum of grads in the last of them.
    """
    top, log_sum, g, h, both = rows[:, :, None]
    found = (targets[:, None] == ids) * g + grads.float()
    found -= gathered.exp() * (both + h * gathered.clamp(min=LOWEST))
    if head.softcap > 0:
        capped = (gathered + log_sum + top) * head.temperature
        found *= 1 - (capped / head.softcap).square()
    return found / head.temperature


def gathered_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, head: _Head
) -> Tensor:
    """(rows, k) float32: softcap(h W^T + b) / T of ids, NaN where this part of the vocabulary does
    not have them. Rows of the weight are copied for some rows of ids at a time.
    """
    out = torch.full_like(ids, torch.nan, dtype=torch.float32)
    if out.numel() == 0 or len(weight) == 0:
        return out
    size = max(1, head.chunk_bytes // (4 * ids.shape[1] * hidden.shape[1]))
    for first in range(0, len(ids), size):
        part = slice(first, first + size)
        at = ids[part] - head.first_row
        here, at = (at >= 0) & (at < len(weight)), at.clamp(0, len(weight) - 1)
        z = (weight[at].float() * hidden[part, None].float()).sum(-1)
        if bias is not None:
            z += bias[at].float()
        if head.softcap > 0:
            z = head.softcap * torch.tanh(z / head.softcap)
        out[part] = (z / head.temperature).where(here, torch.nan)
    return out


def row_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
) -> tuple[Tensor, Tensor, Tensor]:
    """(4, rows) float32, the numbers of lm_head_merge; (rows,) the target's logit, NaN where this
    part of the vocabulary does not have it; (rows, top_k) keys."""
    num_rows, vocab = len(hidden), len(weight)
    stats = hidden.new_zeros(4, num_rows, dtype=torch.float32)
    target_logits = torch.full_like(stats[0], torch.nan)
    keys = targets.new_full((num_rows, head.top_k), NO_KEY)
    if num_rows == 0 or vocab == 0:
        stats[0], stats[1] = -torch.inf, -1.0  # a sum of no terms, less the largest of them
        return stats, target_logits, keys
    for part in _row_parts(num_rows, vocab, head):
        _part_stats(hidden[part], weight, bias, targets[part], head, stats[:, part],
                    target_logits[part], keys[part])  # fmt: skip
    return stats, target_logits, keys


def _row_parts(num_rows: int, vocab: int, head: _Head) -> list[slice]:
    """Whole groups of rows whose tiles' numbers and keys have at most chunk_bytes, at least one
    group."""
    tiles = head.tiles
    group = tiles.rows * tiles.group
    row_bytes = 16 * -(-vocab // tiles.cols) + 8 * _slots(head.top_k)[1]
    size = max(1, head.chunk_bytes // row_bytes // group) * group
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def _part_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    stats: Tensor,
    target_logits: Tensor,
    keys: Tensor,
    growth: int = GROWTH,
) -> None:
    """Writes stats, (4, rows) with any stride between the four, target_logits and keys."""
    num_rows, vocab = len(hidden), len(weight)
    num_tiles = -(-vocab // head.tiles.cols)
    partial = stats.new_empty(4 if head.pi_squared else 3, num_tiles, num_rows)
    best = _Best(hidden, head)
    for columns in best.column_parts(vocab, growth):
        _launch_stats(hidden, weight, bias, targets, head, columns, partial, target_logits, best)
        best.sort()
    size = 32
    merge_kernel[(-(-num_rows // size),)](
        partial, stats, stats.stride(0), num_rows, num_tiles, ROWS=size, TILES=32,
        SQUARES=head.pi_squared, num_warps=4,
    )  # fmt: skip
    if head.top_k == 0:
        return
    keys.copy_(best.keys[:, : head.top_k])
    again = best.missed.nonzero().squeeze(1)  # the one time that the host waits for the GPU
    if len(again) and growth > 1:
        more = keys[again]
        _part_stats(hidden[again], weight, bias, targets[again], head, stats[:, again],
                    target_logits[again], more, growth=1)  # fmt: skip
        keys[again] = more


class _Best:
    """The slots of the rows' keys, or nothing where none are asked for."""

    def __init__(self, hidden: Tensor, head: _Head) -> None:
        rows = len(hidden) if head.top_k else 0
        self.k, self.slots = _slots(head.top_k)
        self.cols = head.tiles.cols
        self.keys = torch.empty(rows, self.slots, dtype=torch.int64, device=hidden.device)
        self.counts = torch.zeros(rows, dtype=torch.int32, device=hidden.device)
        self.floors = torch.full_like(self.counts, -(1 << 31))
        self.missed = torch.zeros_like(self.counts)

    def column_parts(self, vocab: int, growth: int) -> list[slice]:
        """Whole tiles, all at once without keys; with growth 1 no row can run out of slots."""
        if self.slots == 0:
            return [slice(0, vocab)]
        parts: list[slice] = []
        size = self.slots // self.k * self.cols
        free = (self.slots - self.k) // self.k * self.cols
        while not parts or parts[-1].stop < vocab:
            first = parts[-1].stop if parts else 0
            parts.append(slice(first, min(first + size, vocab)))
            size = max(free, parts[-1].stop * (growth - 1))
        return parts

    def sort(self) -> None:
        if self.slots:
            best_kernel[(len(self.keys),)](
                self.keys, self.counts, self.floors, self.missed, K=self.k, SLOTS=self.slots,
                num_warps=4,
            )  # fmt: skip


def _slots(top_k: int) -> tuple[int, int]:
    """How many keys are kept of a row, and how many it has slots for: powers of two, of few."""
    if top_k == 0:
        return 0, 0
    k = max(8, 1 << (top_k - 1).bit_length())
    return k, min(8 * k, 256)  # sorting takes the square of it; more than GROWTH times k


def _launch_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    part: slice,
    partial: Tensor,
    target_logits: Tensor,
    best: _Best,
) -> None:
    """Of these columns, which begin with a tile."""
    tiles, num_rows, columns = head.tiles, len(hidden), part.stop - part.start
    bias = None if bias is None else bias[part]
    stats_kernel[(-(-num_rows // tiles.rows) * -(-columns // tiles.cols),)](
        *_operands(hidden, weight[part], tiles), _or_dummy(bias, partial), targets,
        partial[:, part.start // tiles.cols :], partial.stride(0), target_logits, best.keys,
        best.counts, best.floors, num_rows, columns, head.first_row + part.start,
        1 / head.temperature, head.softcap, **_options(hidden, bias, head, columns),
        SQUARES=head.pi_squared, K=best.k, SLOTS=best.slots,
    )  # fmt: skip


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
    exact: _Exact | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of hidden, weight and bias, those that are wanted; rows: as _grad_rows gives them. exact: of
    these ids."""
    num_rows, vocab = len(hidden), len(weight)
    empty = num_rows == 0 or vocab == 0
    new = torch.zeros_like if empty else torch.empty_like
    to_weight = new(weight) if wanted[1] else None
    to_bias = new(bias) if wanted[2] and bias is not None else None
    to_hidden = None
    if empty:
        return torch.zeros_like(hidden) if wanted[0] else None, to_weight, to_bias
    size = _columns_per_chunk(num_rows, weight, head)
    buffer = hidden.new_empty(num_rows * min(size, vocab) + 1, dtype=dtype_to_store(hidden))
    for first in range(0, vocab, size):
        part = slice(first, min(first + size, vocab))
        d_logits = buffer[: num_rows * (part.stop - first)].view(num_rows, -1)
        _d_logits(hidden, weight, bias, targets, rows, head, part, d_logits)
        if exact is not None:
            exact.write(buffer[: d_logits.numel() + 1], head.first_row + first, d_logits.shape[1])
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
    exact = hidden.dtype != torch.float32 or not allows_tf32()
    return {
        "ROWS": tiles.rows, "COLS": tiles.cols, "INNER": tiles.inner, "GROUP": tiles.group,
        "TMA": tiles.tma, "WIDEN": not hidden.is_cuda, "PRECISION": dot_precision(exact),
        "HAS_BIAS": bias is not None, "SOFTCAP": head.softcap > 0,
        "EVEN_COLS": columns % tiles.cols == 0, "EVEN_INNER": hidden.shape[1] % tiles.inner == 0,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip
