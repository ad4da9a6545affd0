"""Estimators of KL(policy || reference) from samples of the policy.

Source: J. Schulman, Approximating KL Divergence, 2020. Each takes (num_tokens,) log-probabilities
of the chosen tokens and returns (num_tokens,).
"""

from __future__ import annotations

from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p/q: unbiased, high variance, may be negative."""
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log p/q)^2 / 2: its gradient is that of the KL."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log q/p: unbiased, never negative."""
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return log_ratio.exp() - 1 - log_ratio


ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
