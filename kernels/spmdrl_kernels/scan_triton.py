"""The scans of spmdrl_kernels.scan on a GPU: a program per sequence, a block of tokens at a time.

In the backward ones a token maps the advantage x of what comes after it to its own, a x + b, with
a = gamma lam and b = delta; a masked token has a = 1, b = 0. Such maps compose to such maps, so a
block is a parallel scan (Blelloch 1990, "Prefix sums and their applications", section 1.4). The
value of the next unmasked token is a scan as well: the nearest one that is set. Sums are float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float, lam: Tensor
) -> tuple[Tensor, Tensor]:
    """As spmdrl_kernels.scan.gae, its reference; all tensors on one device."""
    lam = lam.double()
    coefs = torch.stack([torch.full_like(lam, gamma), gamma * lam])
    return _run(rewards, values, mask, cu_seqlens, coefs)


def returns_to_go(rewards: Tensor, mask: Tensor, cu_seqlens: Tensor, gamma: float) -> Tensor:
    """As spmdrl_kernels.scan.returns_to_go, its reference."""
    shape = (2, len(cu_seqlens) - 1)
    coefs = torch.full(shape, gamma, dtype=torch.float64, device=rewards.device)
    return _run(rewards, None, mask, cu_seqlens, coefs)[0]


def running_sum(
    values: Tensor, mask: Tensor, cu_seqlens: Tensor, exclusive: bool, reverse: bool
) -> Tensor:
    """As spmdrl_kernels.scan.running_sum, its reference; without a gradient."""
    values = values.detach().contiguous()
    out = torch.empty_like(values)
    if len(values):
        _sum_kernel[(len(cu_seqlens) - 1,)](
            values, mask.contiguous(), cu_seqlens.contiguous(), out, EXCLUSIVE=exclusive,
            REVERSE=reverse, BLOCK=1024 if values.is_cuda else 16,
        )  # fmt: skip
    return out


def _run(
    rewards: Tensor, values: Tensor | None, mask: Tensor, cu_seqlens: Tensor, coefs: Tensor
) -> tuple[Tensor, Tensor]:
    """coefs: (2, num_seqs) float64, gamma and gamma * lam of each sequence."""
    rewards, mask = rewards.detach().contiguous(), mask.contiguous()
    values = None if values is None else values.detach().contiguous()
    out = torch.empty(2, len(rewards), dtype=torch.float32, device=rewards.device)
    if len(rewards):
        _kernel[(coefs.shape[1],)](
            rewards, rewards if values is None else values, mask, cu_seqlens.contiguous(),
            coefs.contiguous(), out[0], out[1], coefs.shape[1], VALUES=values is not None,
            BLOCK=1024 if rewards.is_cuda else 16,
        )  # fmt: skip
    return out[0], out[1]


@triton.jit
def _then(a1, b1, a2, b2):  # type: ignore[no-untyped-def]
    """First x -> a1 x + b1 (the later tokens), then x -> a2 x + b2."""
    return a2 * a1, a2 * b1 + b2


@triton.jit
def _nearest(set1, value1, set2, value2):  # type: ignore[no-untyped-def]
    return tl.maximum(set1, set2), tl.where(set2 > 0, value2, value1)


@triton.jit(do_not_specialize=["num_seqs"])
def _kernel(  # type: ignore[no-untyped-def]
    rewards,
    values,
    mask,
    cu_seqlens,  # (num_seqs + 1,) int64
    coefs,  # (2, num_seqs) float64
    advantages,
    returns,
    num_seqs,
    VALUES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    gamma, decay = tl.load(coefs + seq), tl.load(coefs + num_seqs + seq)
    place = tl.arange(0, BLOCK)
    advantage = tl.full((), 0.0, tl.float64)  # of the first unmasked token after the block
    next_value = tl.full((), 0.0, tl.float64)  # of the first one that comes two after the block
    for done in range(0, tl.cdiv(end - begin, BLOCK)):
        start = begin + (tl.cdiv(end - begin, BLOCK) - 1 - done) * BLOCK
        at = start + place
        inside = at < end
        live = inside & (tl.load(mask + at, mask=inside, other=0.0) != 0)
        b = tl.load(rewards + at, mask=inside, other=0.0).to(tl.float64)
        if VALUES:
            value = tl.load(values + at, mask=inside, other=0.0).to(tl.float64)
            # of each token the one after it: is it unmasked, and its value
            after = at + 1 < end
            is_set = after & (tl.load(mask + at + 1, mask=after, other=0.0) != 0)
            later = tl.load(values + at + 1, mask=after, other=0.0).to(tl.float64)
            found, later = tl.associative_scan(
                (is_set.to(tl.int32), later), 0, _nearest, reverse=True
            )
            later = tl.where(found > 0, later, next_value)
            next_value = tl.sum(tl.where(place == 0, later, 0.0), 0)
            b = b + gamma * later - value
        a = tl.where(live, decay, 1.0)
        b = tl.where(live, b, 0.0)
        a, b = tl.associative_scan((a, b), 0, _then, reverse=True)
        found_advantage = a * advantage + b
        advantage = tl.sum(tl.where(place == 0, found_advantage, 0.0), 0)
        kept = tl.where(live, found_advantage, 0.0)
        tl.store(advantages + at, kept.to(tl.float32), mask=inside)
        if VALUES:
            total = tl.where(live, kept + value, 0.0)
            tl.store(returns + at, total.to(tl.float32), mask=inside)


@triton.jit
def _sum_kernel(  # type: ignore[no-untyped-def]
    values,
    mask,
    cu_seqlens,  # (num_seqs + 1,) int64
    out,
    EXCLUSIVE: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The exclusive sum at t is the inclusive one of the token beside it."""
    seq = tl.program_id(0)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    beside = 0
    if EXCLUSIVE:
        beside = 1 if REVERSE else -1
    total = tl.full((), 0.0, tl.float64)
    for done in range(0, tl.cdiv(end - begin, BLOCK)):
        block = tl.cdiv(end - begin, BLOCK) - 1 - done if REVERSE else done
        at = begin + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < end
        source = at + beside
        known = (source >= begin) & (source < end)
        live = known & (tl.load(mask + source, mask=known, other=0.0) != 0)
        value = tl.load(values + source, mask=live, other=0.0).to(tl.float64)
        found = total + tl.cumsum(value, 0, reverse=REVERSE)
        total += tl.sum(value, 0)
        shown = tl.load(mask + at, mask=inside, other=0.0) != 0
        tl.store(out + at, tl.where(shown, found, 0.0).to(out.dtype.element_ty), mask=inside)
