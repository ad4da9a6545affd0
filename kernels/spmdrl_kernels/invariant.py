"""Operators that give a row the same bits whatever rows it is computed with, and however many.

A decode step with one new token per sequence and a training pass over whole packed sequences then
agree in every bit, which no tolerance can stand in for. The idea is that of He and Thinking
Machines Lab, "Defeating Nondeterminism in LLM Inference" (2025): the order in which numbers are
summed must not depend on the batch.

On CPUs it is had from three things, and nothing else is used:
- a product of matrices is made in blocks of ONE shape, filled up where rows are missing, so that a
  library takes the same path each time. That a row's place in the block does not matter either is
  `faults`' to check on the machine at hand;
- sums are trees of elementwise additions, fixed by the length alone: IEEE 754 leaves no choice;
- of elementwise functions only + - * / and those of libraries that treat the end of a vector like
  its middle: exp, log, sin, cos, sqrt, tanh (`faults` checks them), never sigmoid or silu.

On NVIDIA GPUs products and attention are Triton kernels with fixed tiles (invariant_triton.py); the
rest is the same code. The gradient is that of the ordinary operator, computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl_kernels import lm_head
from spmdrl_kernels.linear import linear as fast_linear
from spmdrl_kernels.norm import rms_norm as fast_rms_norm
from spmdrl_kernels.switch import on_triton

ROWS = 32  # of a product with a weight
QUERIES = 16  # rows of a product of queries and keys: positions x the query heads of a key head
KEYS = 32  # of a block; a prefix of the sequence ends inside one, the rest of which counts nothing


# ---- sums


def tree_sum(x: Tensor) -> Tensor:
    """Over the last dimension, which becomes 1: the second half is added to the first, and so on.

    The order depends on the length alone.
    """
    size = x.shape[-1]
    if size == 0:
        return x.new_zeros(*x.shape[:-1], 1)
    if size > 1:
        half = (size + 1) // 2
        tail = x[..., half:]
        x = x[..., :half].clone()
        x[..., : size - half] += tail
        size = half
    while size > 1:
        half = (size + 1) // 2
        x[..., : size - half] += x[..., half:size]
        size = half
    return x[..., :1]


def pair_sum(x: Tensor) -> Tensor:
    """Over the first dimension: neighbours, then neighbours of these. Zeros at the end of it do not
    change the bits of the sum, nor does their number."""
    while len(x) > 1:
        even = len(x) // 2 * 2
        pairs = x[0:even:2] + x[1:even:2]
        x = pairs if even == len(x) else torch.cat([pairs, x[even:]])
    return x[0]


def mean(x: Tensor) -> Tensor:
    """Over the last dimension, which becomes 1. Gradients are autograd's."""
    return with_gradient_of(
        lambda x: tree_sum(x) / x.shape[-1], lambda x: x.mean(-1, keepdim=True), x
    )


# ---- layers


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b. x: (..., in), weight: (out, in), bias: (out,) -> (..., out)."""
    return _Linear.apply(x, weight, bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear` of (num_rows, in), without a gradient."""
    if on_triton(x, weight):
        from spmdrl_kernels import invariant_triton

        out = invariant_triton.product(x, weight)
        return out if bias is None else out.add_(bias)
    out = x.new_empty(len(x), len(weight))
    for start in range(0, len(x), ROWS):
        rows = x[start : start + ROWS]
        filled = rows if len(rows) == ROWS else nn.functional.pad(rows, (0, 0, 0, ROWS - len(rows)))
        out[start : start + ROWS] = fast_linear(filled.contiguous(), weight)[: len(rows)]
    return out if bias is None else out.add_(bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        return product(rows, weight, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grads[0].reshape(-1, len(weight))
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = fast_linear(grad, weight.T).view(x.shape)
        if ctx.needs_input_grad[1]:
            to_weight = fast_linear(grad.T, x.reshape(-1, x.shape[-1]).T)
        return to_x, to_weight, grad.sum(0) if ctx.has_bias else None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps), in float32 but for the product with w.

    x: (..., size), weight: (size,) -> like x.
    """

    def invariant(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        normed = wide / (tree_sum(wide * wide) / x.shape[-1] + eps).sqrt()
        return weight * normed.to(x.dtype)

    def plain(x: Tensor, weight: Tensor) -> Tensor:
        return fast_rms_norm(x.float(), weight.float(), eps).to(x.dtype)

    return with_gradient_of(invariant, plain, x, weight)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), rounded once."""

    def invariant(x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (1 + (-wide).exp())).to(x.dtype)

    return with_gradient_of(invariant, nn.functional.silu, x)


def log_softmax(logits: Tensor) -> Tensor:
    """(..., vocab) float32 -> the same. Gradients are autograd's."""

    def invariant(logits: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted.sub_(tree_sum(shifted.exp()).log())

    return with_gradient_of(invariant, lambda x: x.log_softmax(-1), logits)


def lm_head_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    softcap: float | None = None,
    pi_squared: bool = False,
    chunk_bytes: int = lm_head.CHUNK_BYTES,
) -> tuple[Tensor, Tensor, Tensor]:
    """What lm_head.lm_head_logprobs gives: logprobs, entropy, sum of squares, (rows,) float32."""
    rows_per_chunk = max(1, chunk_bytes // (4 * len(weight)))

    def invariant(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        shape: Any = (len(hidden),)
        logprobs, entropy, squares = (
            hidden.new_zeros(shape, dtype=torch.float32) for _ in range(3)
        )
        for start in range(0, len(hidden), rows_per_chunk):
            part = slice(start, start + rows_per_chunk)
            logits = product(hidden[part], weight, bias).float()
            if softcap is not None:
                logits = (logits / softcap).tanh() * softcap
            log_p = log_softmax(logits / torch.full((1,), temperature, device=logits.device))
            logprobs[part] = log_p.gather(-1, targets[part, None])[:, 0]
            probs = log_p.exp()
            if pi_squared:
                squares[part] = tree_sum(probs * probs)[:, 0]
            entropy[part] = -tree_sum(probs.mul_(log_p))[:, 0]
        return logprobs, entropy, squares

    def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return lm_head.lm_head_logprobs(
            hidden, weight, targets, temperature, bias, softcap, chunk_bytes
        )[:2]

    logprobs, entropy, squares = with_gradient_of(invariant, plain, hidden, weight, bias)
    return logprobs, entropy, squares.detach()


# ---- attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float,
    window: int | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention; no gradient.

    query: (num_seqs, num_queries, heads, head_dim); key, value: (num_seqs, num_keys, kv_heads,
    head_dim), whose places behind the last position may hold any finite number, on a GPU anything:
    vLLM's cache has what lay in its memory, after a sleep; positions: (num_seqs, num_queries) of
    the queries among the keys; window: keys that a query sees, itself included. Returns what has
    the shape of query.
    """
    if on_triton(query, key, value):
        from spmdrl_kernels import invariant_triton

        return invariant_triton.attention(query, key, value, positions, scale, window)
    return attend(query, as_blocks(key), as_blocks(value), positions, scale, window)


def as_blocks(x: Tensor) -> Tensor:
    """(num_seqs, num_keys, heads, d) -> (num_blocks, num_seqs, heads, KEYS, d), contiguous."""
    x = nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % KEYS))
    return x.unflatten(1, (-1, KEYS)).permute(1, 0, 3, 2, 4).contiguous()


def attend(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, scale: float, window: int | None
) -> Tensor:
    """`attention` of key, value: (num_blocks, num_seqs, kv_heads, KEYS, head_dim), on CPUs.

    The queries of a position that share a key head are rows of one block of QUERIES rows.
    """
    _, num_queries, heads, _ = query.shape
    kv_heads, num_rows = key.shape[2], num_queries * heads // key.shape[2]
    rows = query.unflatten(2, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)  # (seqs, kv, rows, d)
    # the last block is filled up with the last row
    order = torch.arange(num_rows + -num_rows % QUERIES).clamp_(max=max(num_rows - 1, 0))
    rows = rows.float()[:, :, order] * scale
    where = positions.repeat_interleave(heads // kv_heads, 1)[:, order]  # (seqs, rows)
    out = torch.empty_like(rows)
    for start in range(0, rows.shape[2], QUERIES):
        part = slice(start, start + QUERIES)
        last = int(where[:, part].max()) // KEYS + 1
        first = 0 if window is None else max(0, int(where[:, part].min()) - window + 1) // KEYS
        out[:, :, part] = _attend_block(
            rows[:, :, part], key[first:last], value[first:last], where[:, part], first, window
        )
    out = out[:, :, :num_rows].unflatten(2, (num_queries, -1)).transpose(1, 2)
    return out.reshape(query.shape).to(query.dtype)


def _attend_block(
    query: Tensor, key: Tensor, value: Tensor, where: Tensor, first: int, window: int | None
) -> Tensor:
    """query: (seqs, kv, QUERIES, d); key, value: (blocks, seqs, kv, KEYS, d), the first of which is
    block `first`; where: (seqs, QUERIES) -> like query.

    The largest score is exact in any order, so more blocks that count nothing change no bit.
    """
    shape = (len(key), *query.shape[:3])
    q = query.expand(len(key), *query.shape).reshape(-1, *query.shape[2:])
    scores = torch.bmm(q, key.float().flatten(0, 2).transpose(1, 2)).view(*shape, KEYS)
    places = (torch.arange(len(key) * KEYS) + first * KEYS).view(-1, 1, 1, 1, KEYS)
    at = where[:, None, :, None]
    hidden = places > at
    if window is not None:
        hidden |= places <= at - window
    scores.masked_fill_(hidden, -torch.inf)
    probs = (scores - scores.amax((0, 4), keepdim=True)).exp_()
    total = pair_sum(tree_sum(probs))
    parts = torch.bmm(probs.flatten(0, 2), value.float().flatten(0, 2))
    return pair_sum(parts.view(*shape, -1)) / total


# ---- gradients


def with_gradient_of(
    invariant: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor | None
) -> Any:
    """invariant(*inputs), with the gradient of plain(*inputs), which is then computed anew."""
    if not torch.is_grad_enabled():
        return invariant(*inputs)
    return _WithGradientOf.apply(invariant, plain, *inputs)


class _WithGradientOf(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, invariant: Callable[..., Any], plain: Callable[..., Any], *inputs: Tensor | None
    ) -> Any:
        ctx.plain = plain
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        return invariant(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[2:]
        leaves: list[Any] = [
            None if x is None else x.detach().requires_grad_(wants)
            for x, wants in zip(ctx.saved_tensors, wanted, strict=True)
        ]
        with torch.enable_grad():
            outs = ctx.plain(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        given = [(out, grad) for out, grad in zip(outs, grads, strict=False) if grad is not None]
        sought = [leaf for leaf, wants in zip(leaves, wanted, strict=True) if wants]
        found = iter(
            torch.autograd.grad([o for o, _ in given], sought, [g for _, g in given])
            if given and sought
            else [None] * len(sought)
        )
        return None, None, *(next(found) if wants else None for wants in wanted)


# ---- is it so on this machine?


def faults(
    shapes: Iterable[tuple[int, int]], head_dims: Iterable[int], dtype: torch.dtype,
    device: torch.device,
) -> list[str]:  # fmt: skip
    """What of the above does not hold here, in words; [] is what one hopes for.

    shapes: (out, in) of the weights. Takes about as long as ten blocks of each product.
    """
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g).to(device, dtype)

    found = [
        f"a row of a product with a {out} x {size} weight depends on its place"
        for out, size in sorted(set(shapes))
        if not _is_by_row(draw(ROWS + 5, size), draw(out, size))
    ]
    found += [
        f"attention with head_dim={size} depends on what is computed with it"
        for size in sorted(set(head_dims))
        if not _is_by_query(draw(3, 75, 4, size), *(draw(3, 75, 2, size) for _ in range(2)))
    ]
    x = draw(5003, dtype=torch.float32)
    for function in (torch.exp, torch.log, torch.sin, torch.cos, torch.sqrt, torch.tanh):
        whole = function(x.abs())
        parts = torch.cat([function(part.abs()) for part in x.split([1, 2, 13, 100, 1000, 3887])])
        if not torch.equal(whole, parts):
            found.append(f"{function.__name__} of a number depends on its neighbours")
    return found


def _is_by_row(x: Tensor, weight: Tensor) -> bool:
    whole = product(x, weight)
    alone = torch.cat([product(x[i : i + 1], weight) for i in (0, 1, 7, ROWS - 1, ROWS + 4)])
    moved = torch.empty(weight.numel() + 1, dtype=x.dtype, device=x.device)[1:]  # not aligned
    moved = moved.copy_(weight.flatten()).view(weight.shape)
    return (
        torch.equal(whole[[0, 1, 7, ROWS - 1, ROWS + 4]], alone)
        and torch.equal(product(x.flip(0), weight).flip(0), whole)
        and torch.equal(product(x.roll(9, 0), moved).roll(-9, 0), whole)
    )


def _is_by_query(query: Tensor, key: Tensor, value: Tensor) -> bool:
    num_seqs, length = query.shape[:2]
    positions = torch.arange(length, device=query.device).expand(num_seqs, -1)
    whole = attention(query, key, value, positions, 0.3)
    for seq, at in ((0, 0), (1, 31), (2, 32), (1, length - 1)):
        one = slice(seq, seq + 1), slice(at, at + 1)
        alone = attention(query[one], key[one[0], : at + 1], value[one[0], : at + 1],
                          positions[one], 0.3)  # fmt: skip
        if not torch.equal(alone, whole[one]):
            return False
    return True
