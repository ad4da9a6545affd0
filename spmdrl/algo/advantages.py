"""Advantage estimators.

A sequence estimator sees the whole step at once, (num_samples,) of all ranks, since a group may be
spread over ranks; a token estimator sees this rank's packed tokens.
"""

from __future__ import annotations

import torch
from spmdrl_kernels.scan import discounted_suffix_sums
from torch import Tensor

from spmdrl.types import segment_expand, segment_sum


def grpo(scores: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """(R - mean of its group) / (unbiased std of its group + 1e-6); a group of one gets 0.

    scores: (n,) float64; groups: (n,) int64; valid: (n,) float64, 0 takes a sample out of its
    group's statistics and gives it advantage 0. Returns (n,) float64.
    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2.
    """
    _, slot = torch.unique(groups, return_inverse=True)
    sums = torch.zeros(int(slot.max()) + 1 if len(slot) else 0, 2, dtype=torch.float64)
    sums.index_add_(0, slot, torch.stack([valid, valid * scores], dim=1))
    count = sums[slot, 0]
    centred = (scores - sums[slot, 1] / count.clamp(min=1)) * valid
    squares = torch.zeros(len(sums), dtype=torch.float64).index_add_(0, slot, centred**2)
    std = (squares[slot] / (count - 1).clamp(min=1)).sqrt()
    return torch.where(count > 1, centred / (std + 1e-6), 0.0)


def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, seq_lens: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of generalized advantage estimation, (num_tokens,) each, 0 if masked.

    delta_t = r_t + gamma V_{t+1} - V_t;  A_t = delta_t + gamma lam A_{t+1};  returns = A + V.
    A masked token (prompt, tool) is skipped: t + 1 is the next token that the policy chose; V after
    the last is 0. Rewards must be 0 on masked tokens. Source: Schulman 2015, arXiv 1506.02438.
    """
    chosen = mask.bool()
    counts = segment_sum(mask, seq_lens).long()  # (num_seqs,)
    width = max(int(counts.max()) if len(counts) else 0, 1)
    filled = torch.arange(width)[None, :] < counts[:, None]  # (num_seqs, width)
    r, v = (torch.zeros(len(counts), width).masked_scatter_(filled, x[chosen])
            for x in (token_rewards, values))  # fmt: skip
    next_v = torch.nn.functional.pad(v[:, 1:], (0, 1))
    deltas = torch.where(filled, r + gamma * next_v - v, 0.0)
    scanned = discounted_suffix_sums(deltas, gamma * lam)
    advantages = torch.zeros_like(values)
    advantages[chosen] = scanned[filled]
    return advantages, (advantages + values) * mask


def whiten(advantages: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """Zero mean and unit variance over all unmasked tokens of the step, on all ranks.

    moments: (3,) float64, the sums of 1, A and A^2 over these tokens (see `token_moments`).
    """
    count, total, squares = moments.tolist()
    mean = total / max(count, 1)
    variance = (squares - count * mean**2) / max(count - 1, 1)
    return (advantages - mean) * mask / (max(variance, 0.0) ** 0.5 + 1e-8)


def token_moments(values: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64: sums of 1, x and x^2 over unmasked tokens; add up over ranks, then `whiten`."""
    kept = values[mask.bool()].double()
    return torch.stack([kept.new_tensor(len(kept)), kept.sum(), (kept**2).sum()])


def token_rewards(
    rewards: Tensor, mask: Tensor, seq_lens: Tensor, kl: Tensor | None, kl_coef: float
) -> Tensor:
    """(num_tokens,): the sample's reward on its last unmasked token, less kl_coef * KL on each."""
    order = torch.arange(len(mask), dtype=torch.float64) + 1
    ends = torch.segment_reduce(mask.double() * order, "max", lengths=seq_lens, unsafe=True)
    at_end = (mask > 0) & (order == segment_expand(ends, seq_lens))
    out = torch.where(at_end, segment_expand(rewards, seq_lens), 0.0)
    return out if kl is None else out - kl_coef * kl * mask


SEQUENCE_ESTIMATORS = {"grpo": grpo}
TOKEN_ESTIMATORS = {"gae": gae}
