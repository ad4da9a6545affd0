"""LM head -> log-probability, entropy and top k, without ever holding all logits.

logits = softcap(h W^T + b) / T are made for some columns of the vocabulary at a time, in the
forward pass and once more in the backward pass. At most 1/32 of them (512 columns, if that is more)
is there at once, and at most `chunk_bytes`.

On GPUs with Triton the work is that of lm_head_triton.py, whose logits never are in memory; what
follows is its plain form. lm_head_merge.py has the formulas and puts parts together.

With the vocabulary's rows split over the ranks of a group (tensor parallelism) each rank makes its
own logits; what is summed over the vocabulary is summed over the group as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl_kernels.linear import add_product, product, write_product
from spmdrl_kernels.lm_head_merge import (
    LOWEST,
    MAX_TOP_K,
    NO_KEY,
    best_keys,
    merged_parts,
    results,
    top_results,
)
from spmdrl_kernels.switch import on_triton

CHUNK_BYTES = 256 << 20  # logits held at once, at most
COLUMNS = (512, 16384)  # of a chunk, at least and at most: one thread sums a row of so many
BLOCK = 1 << 17  # logits that one thread goes over again and again: they stay in its cache

Found = tuple[Tensor, Tensor, Tensor]
FoundTop = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@overload
def lm_head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = ...,
    bias: Tensor | None = ..., softcap: float | None = ..., chunk_bytes: int = ...,
    pi_squared: bool = ..., group: dist.ProcessGroup | None = ..., first_row: int = ...,
    *, top_k: int,
) -> FoundTop: ...  # fmt: skip
@overload
def lm_head_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = ...,
    bias: Tensor | None = ..., softcap: float | None = ..., chunk_bytes: int = ...,
    pi_squared: bool = ..., group: dist.ProcessGroup | None = ..., first_row: int = ...,
    top_k: Literal[0] = 0,
) -> Found: ...  # fmt: skip
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
    top_k: int = 0,
) -> Found | FoundTop:
    """Log-probability of each target, entropy (nats) and sum of squares of each distribution.

    hidden: (rows, hidden_size); weight: (vocab, hidden_size); targets: (rows,) int64. One outside
    of the vocabulary gives NaN.
    Returns three (rows,) float32 tensors; gradients flow from the first two to hidden, weight and
    bias. The third, sum_v p(v)^2, is 0 unless `pi_squared`.
    Softmax, its sums and what the gradients are summed in are float32 whatever the inputs are, but
    float64 for float64.

    top_k: with 1 to 64, two more tensors: the largest log-probabilities of each row, largest first,
    (rows, top_k), and their token ids, int64. Of equal logits (as float32) the lower id comes
    first. No gradient flows through these. Raises ValueError if the vocabulary has fewer rows.

    group: its ranks hold the vocabulary's rows in order, this one those from `first_row` on; all
    give the same hidden and targets and get the same result; ids count from the first rank's first
    row. Collective over it. The gradient of hidden is then this rank's part of it, to be summed
    over the group by whoever copied hidden.
    """
    check_top_k(top_k, weight, group)
    if on_triton(hidden, weight):
        from spmdrl_kernels import lm_head_triton

        found = lm_head_triton.lm_head_all(
            hidden, weight, targets, temperature, bias, softcap, chunk_bytes, pi_squared, group,
            first_row, top_k,
        )  # fmt: skip
    else:
        head = _Head(temperature, softcap, chunk_bytes, pi_squared, group, first_row, top_k)
        found = _LmHead.apply(hidden, weight, bias, targets, None, head)
    return found[:5] if top_k else found[:3]


def lm_head_gathered(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ids: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    group: dist.ProcessGroup | None = None,
    first_row: int = 0,
) -> Found:
    """Log-probability of each target, entropy (nats), and log-probabilities of `ids`.

    ids: (rows, k) int64, the ids of a row all different but for -1, which gives NaN, through which
    no gradient may flow. The third result is (rows, k), and gradients flow from it, too, to hidden,
    weight and bias. Beside it the memory is that of
    `lm_head_logprobs`, which has the other arguments and results: k numbers a row, never a row's
    whole vocabulary.
    """
    if on_triton(hidden, weight):
        from spmdrl_kernels import lm_head_triton

        found = lm_head_triton.lm_head_all(
            hidden, weight, targets, temperature, bias, softcap, chunk_bytes, False, group,
            first_row, ids=ids,
        )  # fmt: skip
    else:
        head = _Head(temperature, softcap, chunk_bytes, False, group, first_row, 0)
        found = _LmHead.apply(hidden, weight, bias, targets, ids, head)
    return found[0], found[1], found[5]


def check_top_k(top_k: int, weight: Tensor, group: dist.ProcessGroup | None) -> None:
    """Collective over the group if top_k is not 0."""
    if not 0 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}: it has to be 0 (none) to {MAX_TOP_K}")
    vocab = len(weight)
    if top_k and group is not None:
        total = torch.tensor(vocab, device=weight.device)
        dist.all_reduce(total, group=group)
        vocab = int(total)
    if top_k > vocab:
        raise ValueError(f"top_k is {top_k}, but the vocabulary has {vocab} rows: ask for fewer")


@dataclass(frozen=True)
class _Head:
    """What both passes share."""

    temperature: float
    softcap: float | None
    chunk_bytes: int
    pi_squared: bool
    group: dist.ProcessGroup | None
    first_row: int
    top_k: int


class _LmHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ids: Tensor | None,
        head: _Head,
    ) -> tuple[Tensor, ...]:
        """ids: (rows, k), of which the last result has the log-probabilities; None: of none."""
        picked = targets[:, None] if ids is None else torch.cat([targets[:, None], ids], 1)
        stats, logits, keys = _row_stats(hidden, weight, bias, picked, head)
        top, log_sum, logprobs, entropy, squares = results(stats, logits, head.group)
        top_logprobs, top_ids = top_results(keys, top, log_sum, head.group)
        ctx.save_for_backward(hidden, weight, bias, picked, top, log_sum, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(squares, top_logprobs, top_ids)
        logprobs, gathered = logprobs[:, 0].clone(), logprobs[:, 1:].clone()
        return logprobs, entropy, squares, top_logprobs, top_ids, gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, picked, top, log_sum, entropy = ctx.saved_tensors
        of_target = None if grads[0] is None else grads[0][:, None]
        columns = picked - ctx.head.first_row
        to_picked = [
            (ids, grad)
            for ids, grad in ((columns[:, :1], of_target), (columns[:, 1:], grads[5]))
            if grad is not None
        ]
        rows = _Rows(top, log_sum, entropy, to_picked, grads[1])
        wanted = ctx.needs_input_grad[:3]
        return *_gradients(hidden, weight, bias, rows, ctx.head, wanted), None, None, None


def _row_stats(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, head: _Head
) -> tuple[Tensor, Tensor, Tensor]:
    """(4, rows), the numbers of lm_head_merge; the logits of targets, (rows, n) as they are, NaN
    where this part of the vocabulary does not have them; (rows, top_k) keys."""
    num_rows, vocab = len(hidden), len(weight)
    stats = torch.zeros(4, num_rows, dtype=_wide(hidden.dtype), device=hidden.device)
    target_logits = torch.full_like(targets, torch.nan, dtype=stats.dtype)
    keys = targets.new_full((num_rows, head.top_k), NO_KEY)
    if num_rows == 0 or vocab == 0:
        stats[0], stats[1] = -torch.inf, -1.0  # a sum of no terms, less the largest of them
        return stats, target_logits, keys
    columns = _columns(vocab)
    rows = max(1, head.chunk_bytes // (stats.element_size() * columns))
    for part in _slices(num_rows, rows):
        stats[:, part] = _part_stats(
            hidden[part], weight, bias, targets[part] - head.first_row, head, columns,
            target_logits[part], keys[part],
        )  # fmt: skip
    return stats, target_logits, keys


def _part_stats(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: _Head,
    columns: int,
    target_logits: Tensor,
    keys: Tensor,
) -> Tensor:
    """(4, rows); writes target_logits and keys. targets: (rows, n), counted from this rank's first
    row."""
    chunks = _slices(len(weight), columns)
    parts = target_logits.new_zeros(4, len(chunks), len(hidden))
    buffer = hidden.new_empty(len(hidden) * columns)
    scratch = _Scratch(hidden, columns)
    for i, chunk in enumerate(chunks):
        logits = product(hidden, weight[chunk], _at(bias, chunk), buffer)
        for block in scratch.blocks:
            z = _scaled(scratch.wide(logits[block]), head)
            _pick(z, targets[block] - chunk.start, target_logits[block])
            if head.top_k:
                keys[block] = best_keys(keys[block], z, head.first_row + chunk.start)
            _block_stats(z, scratch.like(z), head.pi_squared, parts[:, i, block])
    return merged_parts(parts)


def _block_stats(z: Tensor, exps: Tensor, pi_squared: bool, out: Tensor) -> None:
    """Writes out, (4, rows). z: (rows, columns), which it overwrites, as it does exps."""
    largest, where = z.max(1, keepdim=True)
    largest.clamp_(min=LOWEST)  # where all are -inf
    z.sub_(largest).clamp_(min=LOWEST)
    torch.exp(z, out=exps)
    out[0] = largest[:, 0]
    if pi_squared:
        out[3] = torch.linalg.vecdot(exps, exps)
    # not sum - 1: for a sure model that is a small difference of large numbers
    kept = exps.gather(1, where).sub_(1.0)  # 0; -1 where all are -inf, NaN for NaN
    exps.scatter_(1, where, kept)
    out[1] = exps.sum(1)
    out[2] = exps.mul_(z).sum(1)


def _pick(z: Tensor, columns: Tensor, out: Tensor) -> None:
    """out[i, j] = z[i, columns[i, j]] where z has such a column."""
    here = (columns >= 0) & (columns < z.shape[1])
    found = z.gather(1, columns.clamp(0, z.shape[1] - 1))
    out.copy_(found.where(here, out))


@dataclass(frozen=True)
class _Rows:
    """What the gradient needs of each row: (rows,) each, but for to_picked."""

    top: Tensor
    log_sum: Tensor
    entropy: Tensor
    # pairs of (rows, n): columns, counted from this rank's row 0, and the gradient of their
    # log-probabilities
    to_picked: list[tuple[Tensor, Tensor]]
    to_entropy: Tensor | None


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    rows: _Rows,
    head: _Head,
    wanted: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of hidden, weight and bias, those that are wanted.

    A chunk of columns sees all rows, so its part of the weight's gradient is made in one product.
    """
    num_rows, vocab = len(hidden), len(weight)
    wide = rows.top.dtype
    to_hidden = torch.zeros_like(hidden, dtype=wide) if wanted[0] else None
    new = torch.empty_like if num_rows else torch.zeros_like
    to_weight = new(weight) if wanted[1] else None
    to_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
    most = head.chunk_bytes // (rows.top.element_size() * max(num_rows, 1))
    columns = max(1, min(_columns(vocab), most))
    buffer = hidden.new_empty(num_rows * columns)
    scratch = _Scratch(hidden, columns)
    for chunk in _slices(vocab if num_rows else 0, columns):
        logits = product(hidden, weight[chunk], _at(bias, chunk), buffer)
        for block in scratch.blocks:
            z = scratch.wide(logits[block])
            grad = _d_logits(z, scratch.like(z), rows, block, chunk.start, head)
            logits[block] = grad
            if to_bias is not None:
                to_bias[chunk] += grad.sum(0)
        if to_hidden is not None:
            add_product(to_hidden, logits, weight[chunk])
        if to_weight is not None:
            write_product(to_weight[chunk], logits.T, hidden)
    return (
        None if to_hidden is None else to_hidden.to(hidden.dtype),
        to_weight,
        None if to_bias is None or bias is None else to_bias.to(bias.dtype),
    )


def _d_logits(
    z: Tensor, grad: Tensor, rows: _Rows, block: slice, first: int, head: _Head
) -> Tensor:
    """d loss / d logits of these rows, in grad; z: their logits without softcap and temperature.

    With x = z / temperature it is g [v = t] - p (g + h H + h log p), over the temperature; with
    several t the sum of their first terms, and the sum of their g in the second.
    """
    slope = None if head.softcap is None else 1 - (z / head.softcap).tanh_().square_()
    log_p = _scaled(z, head).sub_(rows.top[block, None]).sub_(rows.log_sum[block, None])
    log_p.clamp_(min=LOWEST)  # of a logit of -inf: 0 times it is to be 0
    torch.exp(log_p, out=grad)
    by_row = torch.zeros_like(rows.top[block])
    for _, g in rows.to_picked:
        by_row = by_row - g[block].sum(1)
    if rows.to_entropy is not None:
        h = rows.to_entropy[block]
        by_row = by_row - h * rows.entropy[block]
        grad.mul_(log_p.mul_(-h[:, None]).add_(by_row[:, None]))
    else:
        grad.mul_(by_row[:, None])
    for picked, g in rows.to_picked:
        columns = picked[block] - first
        here = (columns >= 0) & (columns < z.shape[1])
        added = g[block].to(grad.dtype).where(here, 0.0)
        grad.scatter_add_(1, columns.clamp(0, z.shape[1] - 1), added)
    if head.temperature != 1.0:
        grad.div_(head.temperature)
    return grad if slope is None else grad.mul_(slope)


class _Scratch:
    """Blocks of rows that stay in the cache, and memory for two of them."""

    def __init__(self, hidden: Tensor, columns: int) -> None:
        num_rows, wide = len(hidden), _wide(hidden.dtype)
        rows = num_rows
        if not hidden.is_cuda:
            rows = min(BLOCK * torch.get_num_threads() // columns, -(-num_rows // 4))
        rows = max(1, rows)
        self.blocks = _slices(num_rows, rows)
        self.casts = wide != hidden.dtype
        self.first, self.second = (
            hidden.new_empty(rows * columns if there else 0, dtype=wide)
            for there in (True, self.casts)
        )

    def like(self, z: Tensor) -> Tensor:
        """Of z's shape, holding anything."""
        return self.first[: z.numel()].view(z.shape)

    def wide(self, logits: Tensor) -> Tensor:
        """logits themselves, or a copy, as the sums want them."""
        if not self.casts:
            return logits
        return self.second[: logits.numel()].view(logits.shape).copy_(logits)


def _scaled(z: Tensor, head: _Head) -> Tensor:
    """softcap(z) / temperature, in place."""
    if head.softcap is not None:
        z.div_(head.softcap).tanh_().mul_(head.softcap)
    return z if head.temperature == 1.0 else z.div_(head.temperature)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _columns(vocab: int) -> int:
    """Of a chunk: 1/32 of the vocabulary, whatever the number of rows, so that a row's sums do not
    depend on it."""
    least, most = COLUMNS
    share = -(-vocab // (32 * 64)) * 64
    return min(max(share, least), most, max(vocab, 1))


def _at(bias: Tensor | None, chunk: slice) -> Tensor | None:
    return None if bias is None else bias[chunk]


def _slices(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
