"""Estimators of KL(policy || reference) from samples of the policy, and their coefficient.

Source: J. Schulman, Approximating KL Divergence, 2020. Each takes (num_tokens,) log-probabilities
of the chosen tokens and returns (num_tokens,). A name that ends in "+" has the value of the plain
one and the gradient of k2, which is that of the KL in expectation; those of k1 and k3 are not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

KlEstimate = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def absolute(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """|log p/q|: biased, never negative."""
    return (logprobs - ref_logprobs).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p/q)^2 / 2: biased, and its gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, cut: float | None = None) -> Tensor:
    """q/p - 1 - log q/p: unbiased, never negative; log q/p is bounded to -20..20.

    cut: the value is at most this, and a token whose value would be higher has no gradient.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    value = log_ratio.exp() - 1 - log_ratio
    return value if cut is None else value.clamp(max=cut)


def with_gradient_of_k2(estimator: KlEstimate, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The estimator's value; the gradient of k2 (straight through)."""
    squared = k2(logprobs, ref_logprobs)
    return estimator(logprobs, ref_logprobs).detach() + squared - squared.detach()


ESTIMATORS: dict[str, KlEstimate] = {
    "k1": k1, "abs": absolute, "k2": k2, "k3": k3,
    "k1+": partial(with_gradient_of_k2, k1), "abs+": partial(with_gradient_of_k2, absolute),
    "k2+": partial(with_gradient_of_k2, k2), "k3+": partial(with_gradient_of_k2, k3),
}  # fmt: skip


USUAL_CUT = 10.0  # what tokens are counted against where k3 is not cut; verl's


def above_cut(logprobs: Tensor, ref_logprobs: Tensor, cut: float | None) -> Tensor:
    """(num_tokens,) float32: 1 where the value of k3 is above `cut`; None: above USUAL_CUT."""
    value = k3(logprobs.detach(), ref_logprobs)
    return (value > (USUAL_CUT if cut is None else cut)).float()


def next_kl_coef(coef: float, kl: float, target: float, horizon: int, num_samples: int) -> float:
    """The coefficient after a step of `num_samples` samples whose mean KL per token was `kl`.

    coef (1 + clip(kl / target - 1, -0.2, 0.2) num_samples / horizon).
    Source: Ziegler 2019, arXiv 1909.08593, section 2.2.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coef * (1 + error * num_samples / horizon)


def next_entropy_coef(
    coef: float, entropy: float, target: float, delta: float,
    lowest: float = 0.0, highest: float | None = None,
) -> float:  # fmt: skip
    """Up by delta where the step's mean entropy is below its target, else down, within the bounds.

    Source: Skywork-OR1, arXiv 2505.22312 (adaptive entropy control); the bonus is used
    only while the entropy is at or below the target.
    """
    moved = coef + delta if entropy < target else coef - delta
    return max(moved if highest is None else min(moved, highest), lowest)
