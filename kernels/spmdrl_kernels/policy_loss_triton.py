"""Loss, metric sums and gradients of a policy in one read of its tokens, on a GPU.

A program takes a block of tokens: it adds up the loss and every metric in float64, a column of
`partials` each, and writes d loss / d logprobs and d loss / d entropy. The columns are added up
afterwards in a fixed order, so a result is the same in every run. Losses of whole sequences have a
first pass, a program per sequence, that adds up what their tokens then share.

Everything inside is float64. Formulas and sources are those of spmdrl/algo/losses.py; beside each
value stands its derivative with respect to the token's log-probability. Where PyTorch's derivative
is a choice (the ends of a clamp, equal arguments of a maximum) it is the same one. Comparisons are
such that NaN stays NaN.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from spmdrl_kernels.policy_loss_terms import (
    NUM_MAXIMA,
    OF_SEQUENCES,
    TOTALS,
    Inputs,
    Terms,
    numbers_of,
)

OF_A_SEQUENCE = ("logprobs", "old_logprobs", "advantages", "mask", "kept_mask", "loss_weights",
                 "policy_weights")  # fmt: skip


def loss_and_totals(
    logprobs: Tensor, entropy: Tensor, inputs: Inputs, terms: Terms
) -> tuple[Tensor, Tensor]:
    """The loss, differentiable by logprobs and entropy, and (len(TOTALS),) totals, which are not.

    Shapes and dtypes as in spmdrl_kernels.policy_loss.policy_loss.
    """
    return _PolicyLoss.apply(logprobs, entropy, inputs, terms)


class _PolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor, inputs: Inputs, terms: Terms
    ) -> tuple[Tensor, Tensor]:
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1] and terms.entropy_coef != 0)
        grads = [
            torch.empty_like(t, memory_format=torch.contiguous_format) if want else None
            for t, want in zip((logprobs, entropy), wanted, strict=True)
        ]
        totals = _launch(logprobs, entropy, inputs, terms, *grads).to(logprobs.dtype)
        loss = totals[TOTALS.index("loss")].clone()
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(totals)
        return loss, totals

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, up: Tensor, _: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None]:
        to_logprobs, to_entropy = (None if g is None else up * g for g in ctx.saved_tensors)
        return to_logprobs, to_entropy, None, None


def _launch(
    logprobs: Tensor,
    entropy: Tensor,
    inputs: Inputs,
    terms: Terms,
    to_logprobs: Tensor | None,
    to_entropy: Tensor | None,
) -> Tensor:
    """(len(TOTALS),) float64; fills the two gradients that are given."""
    block = 256 if logprobs.is_cuda else 64
    num_tokens = len(logprobs)
    programs = triton.cdiv(num_tokens, block)
    if num_tokens == 0:
        return torch.zeros(len(TOTALS), dtype=torch.float64, device=logprobs.device)
    tokens = {
        name: None if t is None else t.detach().contiguous()
        for name, t in {"logprobs": logprobs, "entropy": entropy, **inputs.of_tokens()}.items()
    }
    numbers = numbers_of(terms, logprobs.device)
    cu_seqlens = shared = None
    num_seqs = len(inputs.cu_seqlens) - 1
    if terms.loss in OF_SEQUENCES:
        cu_seqlens = inputs.cu_seqlens.to(logprobs.device)
        shared = numbers.new_empty(3, num_seqs)
        _sequence_kernel[(num_seqs,)](
            **{name: tokens[name] for name in OF_A_SEQUENCE}, cu_seqlens=cu_seqlens,
            numbers=numbers, shared=shared, num_seqs=num_seqs, LOSS=terms.loss, BLOCK=block,
        )  # fmt: skip
    partials = numbers.new_empty(len(TOTALS), programs)
    _token_kernel[(programs,)](
        **tokens, cu_seqlens=cu_seqlens, shared=shared, numbers=numbers, to_logprobs=to_logprobs,
        to_entropy=to_entropy, partials=partials, num_tokens=num_tokens, num_seqs=num_seqs,
        steps=num_seqs.bit_length(), LOSS=terms.loss, KL=terms.kl, KL_IN_LOSS=terms.kl_coef != 0,
        BONUS=terms.entropy_coef != 0, BYPASS=terms.bypass, BLOCK=block,
    )  # fmt: skip
    return torch.cat([partials[:-NUM_MAXIMA].sum(1), partials[-NUM_MAXIMA:].amax(1)])


# ---- of a token


@triton.jit
def _read(source, at, live, default: tl.constexpr):  # type: ignore[no-untyped-def]
    """(BLOCK,) float64; 0 where not live, the default where there is no such tensor."""
    if source is None:
        values = tl.full(at.shape, default, tl.float64)
    else:
        values = tl.load(source + at, mask=live, other=0.0).to(tl.float64)
    return values


@triton.jit
def _clamp(x, low, high):  # type: ignore[no-untyped-def]
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def _bounded_exp(x):  # type: ignore[no-untyped-def]
    """exp within e^-20 .. e^20, and its derivative."""
    ratio = tl.exp(_clamp(x, -20.0, 20.0))
    return ratio, tl.where((x < -20.0) | (x > 20.0), 0.0, ratio)


@triton.jit
def _k3(x):  # type: ignore[no-untyped-def]
    """exp(x) - 1 - x of a bounded x, and its derivative."""
    x_in = _clamp(x, -20.0, 20.0)
    ratio = tl.exp(x_in)
    return ratio - 1.0 - x_in, tl.where((x < -20.0) | (x > 20.0), 0.0, ratio - 1.0)


@triton.jit
def _kl(logprobs, ref, KL: tl.constexpr):  # type: ignore[no-untyped-def]
    """An estimator of spmdrl/algo/kl.py; one that ends in + has the derivative of k2."""
    x = logprobs - ref
    if (KL == "k1") | (KL == "k1+"):
        value, slope = x, tl.full(x.shape, 1.0, tl.float64)
    elif (KL == "abs") | (KL == "abs+"):
        value, slope = tl.abs(x), _sign(x)
    elif (KL == "k2") | (KL == "k2+"):
        value, slope = 0.5 * x * x, x
    else:
        value, minus_slope = _k3(-x)
        slope = -minus_slope
    if (KL == "k1+") | (KL == "abs+") | (KL == "k3+"):
        slope = x
    return value, slope


@triton.jit
def _sign(x):  # type: ignore[no-untyped-def]
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, x))


@triton.jit
def _share(a, b):  # type: ignore[no-untyped-def]
    """What reaches a of the gradient of max(a, b); of min(a, b) it reaches b."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def _clipped_surrogate(ratio, d_ratio, advantages, low, high):  # type: ignore[no-untyped-def]
    """max(-A r, -A clip(r)), its derivative, and where it is clipped."""
    plain = -advantages * ratio
    clipped = -advantages * _clamp(ratio, low, high)
    inside = tl.where((ratio < low) | (ratio > high), 0.0, 1.0)
    reaches = _share(plain, clipped) + _share(clipped, plain) * inside
    loss = tl.where(clipped > plain, clipped, plain)
    return loss, -advantages * reaches * d_ratio, (clipped > plain).to(tl.float64)


@triton.jit
def _one_less_exp(x):  # type: ignore[no-untyped-def]
    """1 - exp(x), x < 0, without the loss of digits near 0. Source: Higham 2002, section 1.14.1."""
    u = tl.exp(x)
    near = tl.where(u == 1.0, -x, (1.0 - u) * x / tl.log(tl.where(u == 1.0, 0.5, u)))
    return tl.where(x > -0.5, near, 1.0 - u)


@triton.jit
def _divergence(logprobs, old):  # type: ignore[no-untyped-def]
    """KL of (token, any other), old to new."""
    new, old = tl.where(logprobs > -1e-12, -1e-12, logprobs), tl.where(old > -1e-12, -1e-12, old)
    others = _one_less_exp(old)
    return tl.exp(old) * (old - new) + others * (tl.log(others) - tl.log(_one_less_exp(new)))


@triton.jit
def _trust_region(logprobs, old, ratio, distance, advantages, low, high, cap):  # type: ignore[no-untyped-def]
    up = logprobs > old
    outside = tl.where(advantages > 0, up & (distance > high), (up == 0) & (distance > low))
    loss = tl.where(outside, 0.0, -advantages * tl.where(ratio > cap, cap, ratio))
    return loss, loss, outside.to(tl.float64)


@triton.jit
def _local_loss(logprobs, old, advantages, selected, a, b, c, LOSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Losses that look at one token: value, derivative, clipped, clipped at the dual bound.

    a, b, c: the constants of the loss, see `policy_loss_terms.numbers_of`.
    """
    x = logprobs - old
    none = tl.zeros(x.shape, tl.float64)
    clip, dual = none, none
    ratio, d_ratio = _bounded_exp(x)
    if (LOSS == "ppo") | (LOSS == "clip_cov"):
        loss, slope, clip = _clipped_surrogate(ratio, d_ratio, advantages, a, b)
        if LOSS == "ppo":
            most = -advantages * c
            falls = advantages < 0
            dual = (falls & (loss > most)).to(tl.float64)
            slope = tl.where(falls, slope * _share(most, loss), slope)
            loss = tl.where(dual > 0, most, loss)
        else:
            loss, slope = loss * (1.0 - selected), slope * (1.0 - selected)
    elif LOSS == "cispo":
        clipped = _clamp(ratio, a, b)
        clip = (ratio != clipped).to(tl.float64)
        slope = -clipped * advantages
        loss = slope * logprobs
    elif LOSS == "sapo":
        tau = tl.where(advantages > 0, a, b)
        gate = 1.0 / (1.0 + tl.exp(-tau * (ratio - 1.0)))
        loss = -advantages * gate * 4.0 / tau
        slope = -advantages * gate * (1.0 - gate) * 4.0 * d_ratio
    elif LOSS == "reinforce":
        loss, slope = -advantages * logprobs, -advantages
    elif LOSS == "kl_cov":
        loss = -advantages * ratio + a * tl.abs(x) * selected
        slope = -advantages * d_ratio + a * _sign(x) * selected
    elif LOSS == "dro":
        loss, slope = 0.5 * a * x * x - advantages * logprobs, a * x - advantages
    elif LOSS == "dppo_tv":
        moved = tl.abs(tl.exp(logprobs) - tl.exp(old))
        loss, slope, clip = _trust_region(logprobs, old, ratio, moved, advantages, a, b, c)
    else:
        tl.static_assert(LOSS == "dppo_kl")
        moved = _divergence(logprobs, old)
        loss, slope, clip = _trust_region(logprobs, old, ratio, moved, advantages, a, b, c)
    return loss, slope, clip, dual


# ---- of a sequence


@triton.jit
def _geo_terms(x, low, high):  # type: ignore[no-untyped-def]
    """log r as it is clipped for A > 0, and for any other A."""
    return tl.where(x > high, high, x), tl.where(x < -low, -low, x)


@triton.jit(do_not_specialize=["num_seqs"])
def _sequence_kernel(  # type: ignore[no-untyped-def]
    logprobs, old_logprobs, advantages, mask, kept_mask, loss_weights, policy_weights, cu_seqlens,
    numbers, shared, num_seqs, LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the tokens of a sequence share, to `shared`, (3, num_seqs) float64.

    gspo: the mean of log r. geo_mean: A, the mean of clipped log r, and the sum of weights over
    the number of tokens, which is what a token's log r moves. sppo: A, the sum of log r, and the
    sum of weights.
    """
    seq = tl.program_id(0)
    begin, end = tl.load(cu_seqlens + seq), tl.load(cu_seqlens + seq + 1)
    low, high = tl.load(numbers + 3), tl.load(numbers + 4)
    zero = tl.full((), 0.0, tl.float64)
    count, sum_a, sum_x, sum_up, sum_down, weight = zero, zero, zero, zero, zero, zero
    for block in range(0, tl.cdiv(end - begin, BLOCK)):
        at = begin + block * BLOCK + tl.arange(0, BLOCK)
        live = at < end
        live = live & (tl.load(mask + at, mask=live, other=0.0) != 0)
        keep = _read(mask if kept_mask is None else kept_mask, at, live, 0.0)
        new = _read(logprobs, at, live, 0.0)
        x = new - _read(logprobs if old_logprobs is None else old_logprobs, at, live, 0.0)
        up, down = _geo_terms(x, low, high)
        weights = _read(policy_weights, at, live, 1.0) * _read(loss_weights, at, live, 0.0)
        count += tl.sum(keep, 0)
        sum_a += tl.sum(_read(advantages, at, live, 0.0) * keep, 0)
        sum_x += tl.sum(x * keep, 0)
        sum_up += tl.sum(up * keep, 0)
        sum_down += tl.sum(down * keep, 0)
        weight += tl.sum(weights, 0)
    count = tl.where(count < 1.0, 1.0, count)
    first, second, third = sum_a / count, sum_x, weight
    if LOSS == "gspo":
        first = sum_x / count
    if LOSS == "geo_mean":
        second = tl.where(first > 0, sum_up, sum_down) / count
        third = weight / count
    tl.store(shared + seq, first)
    tl.store(shared + num_seqs + seq, second)
    tl.store(shared + 2 * num_seqs + seq, third)


@triton.jit
def _sequence_of(at, cu_seqlens, num_seqs, steps):  # type: ignore[no-untyped-def]
    """The sequence that each token is in, by bisection; steps: the bits of num_seqs."""
    low, high = tl.zeros(at.shape, tl.int32), tl.zeros(at.shape, tl.int32) + num_seqs
    for _ in range(0, steps):  # token `at` is in one of low .. high - 1
        middle = (low + high) // 2
        reached = tl.load(cu_seqlens + middle) <= at
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
    return low


@triton.jit
def _sequence_loss(logprobs, old, advantages, first, second, a, b, LOSS: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `_local_loss`, without the dual bound; first, second: of `shared`, for each token."""
    x = logprobs - old
    clip = tl.zeros(x.shape, tl.float64)
    if LOSS == "gspo":
        ratio, d_ratio = _bounded_exp(first)
        loss, slope, clip = _clipped_surrogate(ratio, d_ratio, advantages, a, b)
    elif LOSS == "geo_mean":
        up, down = _geo_terms(x, a, b)
        clip = (tl.where(first > 0, up, down) != x).to(tl.float64)
        ratio, d_ratio = _bounded_exp(second)
        loss, slope = -first * ratio, -first * d_ratio * (1.0 - clip)
    else:
        tl.static_assert(LOSS == "sppo")
        error = a * second - first
        loss, slope = error * error, 2.0 * a * error
    return loss, slope, clip


# ---- of a block


@triton.jit
def _add(partials, row: tl.constexpr, values):  # type: ignore[no-untyped-def]
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(partials + at, tl.sum(values, 0))


@triton.jit
def _largest(partials, row: tl.constexpr, values):  # type: ignore[no-untyped-def]
    """The maximum, NaN if there is one."""
    at = row * tl.num_programs(0) + tl.program_id(0)
    wrong = tl.max((values != values).to(tl.int32), 0)
    most = tl.max(values, 0)
    tl.store(partials + at, tl.where(wrong > 0, float("nan"), most))


@triton.jit(do_not_specialize=["num_tokens", "num_seqs", "steps"])
def _token_kernel(  # type: ignore[no-untyped-def]
    logprobs, entropy, advantages, mask, rollout_logprobs, loss_weights, old_logprobs,
    ref_logprobs, policy_weights, kept_mask, nll_weights, selected_mask,  # (num_tokens,), or None
    cu_seqlens, shared,  # None but for losses of sequences
    numbers,  # (6,) float64
    to_logprobs, to_entropy,  # (num_tokens,), or None
    partials,  # (len(TOTALS), programs) float64
    num_tokens, num_seqs, steps,
    LOSS: tl.constexpr, KL: tl.constexpr, KL_IN_LOSS: tl.constexpr, BONUS: tl.constexpr,
    BYPASS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_tokens
    masks = tl.load(mask + at, mask=inside, other=0.0).to(tl.float64)
    live = inside & (masks != 0)
    a, b, c = tl.load(numbers + 3), tl.load(numbers + 4), tl.load(numbers + 5)
    new = _read(logprobs, at, live, 0.0)
    old = _read(logprobs if old_logprobs is None else old_logprobs, at, live, 0.0)
    engine = _read(rollout_logprobs, at, live, 0.0)
    advantage = _read(advantages, at, live, 0.0)
    bonus = _read(entropy, at, live, 0.0)
    chosen = _read(selected_mask, at, live, 0.0)
    weights = _read(loss_weights, at, live, 0.0)
    own_weights = _read(policy_weights, at, live, 1.0)
    keep = _read(mask if kept_mask is None else kept_mask, at, live, 0.0)

    moves = weights * own_weights  # of the policy loss: what a token's derivative is times
    if shared is None:
        value, slope, clip, dual = _local_loss(new, old, advantage, chosen, a, b, c, LOSS)
    else:
        seq = _sequence_of(at, cu_seqlens, num_seqs, steps)
        first = tl.load(shared + seq, mask=live, other=0.0)
        second = tl.load(shared + num_seqs + seq, mask=live, other=0.0)
        value, slope, clip = _sequence_loss(new, old, advantage, first, second, a, b, LOSS)
        dual = tl.zeros(at.shape, tl.float64)
        if LOSS != "gspo":  # a token moves the loss of its whole sequence
            moves = keep * tl.load(shared + 2 * num_seqs + seq, mask=live, other=0.0)
    loss = value * own_weights * weights
    grad = slope * moves
    kl = tl.zeros(at.shape, tl.float64)
    if ref_logprobs is not None:
        kl, d_kl = _kl(new, _read(ref_logprobs, at, live, 0.0), KL)
        if KL_IN_LOSS:
            coef = tl.load(numbers) * weights
            loss += coef * kl
            grad += coef * d_kl
    if BONUS:
        coef = tl.load(numbers + 1) * weights
        loss -= coef * bonus
        if to_entropy is not None:
            tl.store(to_entropy + at, (-coef).to(to_entropy.dtype.element_ty), mask=inside)
    if nll_weights is not None:
        coef = tl.load(numbers + 2) * _read(nll_weights, at, live, 0.0)
        loss -= coef * new
        grad -= coef
    if to_logprobs is not None:
        grad = tl.where(live, grad, 0.0)
        tl.store(to_logprobs + at, grad.to(to_logprobs.dtype.element_ty), mask=inside)

    ours = new if BYPASS else old
    engine_kl, _ = _k3(ours - engine)
    apart = tl.abs(ours - engine)
    _add(partials, 0, tl.where(live, loss, 0.0))
    _add(partials, 1, clip * masks)
    _add(partials, 2, dual * masks)
    _add(partials, 3, chosen * masks)
    _add(partials, 4, bonus * masks)
    _add(partials, 5, (old - new) * masks)
    _add(partials, 6, apart * masks)
    _add(partials, 7, engine_kl * masks)
    _add(partials, 8, kl * masks)
    _add(partials, 9, (1.0 - keep) * masks)
    _add(partials, 10, own_weights * masks)
    _largest(partials, 11, tl.exp(new - old) * masks)
    _largest(partials, 12, apart * masks)
