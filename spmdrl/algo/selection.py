"""Chooses which tokens, samples and groups take part, over the global batch.

The functions here score; `collectives.kth_largest` finds the cut over all ranks. What is random has
an address (seed, step, group, sample, position), so a choice is the same for any number of ranks.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from spmdrl.types import Batch

Rewards = TypeVar("Rewards", float, list[float])  # of a sample


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor, moments: Tensor) -> Tensor:
    """(num_tokens,) float64 (A - mean A) (log pi - mean log pi), -inf where masked.

    moments: `covariance_moments`, added up over all ranks. Source: arXiv 2505.22617.
    """
    count, sum_advantages, sum_logprobs = moments.tolist()
    a = advantages.double() - sum_advantages / max(count, 1)
    p = logprobs.double() - sum_logprobs / max(count, 1)
    return torch.where(mask > 0, a * p, -torch.inf)


def covariance_moments(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(3,) float64: unmasked tokens, sum of advantages, sum of logprobs."""
    m = mask.double()
    return torch.stack([m.sum(), (advantages * m).sum(), (logprobs * m).sum()])


def clip_cov_candidates(
    covariance: Tensor, ratio: Tensor, advantages: Tensor, algo_bounds: tuple[float, ...]
) -> Tensor:
    """(num_tokens,) bool: low <= covariance <= high and not clipped by the ratio already.

    algo_bounds: cov_low, cov_high, clip_low, clip_high.
    """
    cov_low, cov_high, clip_low, clip_high = algo_bounds
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high) > -advantages * ratio
    return (covariance >= cov_low) & (covariance <= cov_high) & ~clipped


def token_lottery(batch: Batch, seed: int, step: int, update: int) -> Tensor:
    """(num_tokens,) float64 in [0, 1): a uniform number per token, from its address alone."""
    positions = torch.arange(batch.num_tokens) - torch.repeat_interleave(
        batch.cu_seqlens[:-1], batch.seq_lens
    )
    group, index = (
        torch.repeat_interleave(x, batch.seq_lens).numpy().astype(np.uint64)
        for x in (batch.groups, batch.indices)
    )
    state = np.full(batch.num_tokens, seed, dtype=np.uint64)
    for part in (np.uint64(step), np.uint64(update), group, index, positions.numpy()):
        state = splitmix64(state ^ np.asarray(part).astype(np.uint64))
    return torch.from_numpy((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def splitmix64(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words that mixes well. Source: Steele 2014, Fast Splittable PRNGs."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def by_power(scores: Tensor, power: float) -> Tensor:
    """|R|^power."""
    return scores.abs() ** power


def best_and_worst(scores: Tensor, power: float) -> Tensor:
    """1 for the samples of the step with the highest and the lowest reward, else 0."""
    return ((scores == scores.max()) | (scores == scores.min())).double()


def best_and_random(scores: Tensor, power: float) -> Tensor:
    """0.4 for the samples of the step with the highest reward, else 0.1."""
    return torch.where(scores == scores.max(), 0.4, 0.1).double()


FILTERS = {"pow": by_power, "max_min": best_and_worst, "max_random": best_and_random}


def filter_weights(scores: Tensor, valid: Tensor, name: str, power: float) -> Tensor:
    """(n,) float64 weights with which samples are drawn; 0 for invalid ones, more for all others.

    Source: PF-PPO, arXiv 2409.06957.
    """
    weights = torch.zeros_like(scores)
    kept = valid > 0
    if kept.any():
        weights[kept] = FILTERS[name](scores[kept], power) + 1e-8
    return weights


def draw(weights: Tensor, count: int, seed: int, step: int) -> Tensor:
    """(n,) int64: how often each of n samples is drawn in `count` draws with replacement."""
    if not float(weights.sum()) > 0:
        return torch.zeros(len(weights), dtype=torch.int64)
    generator = np.random.Generator(np.random.PCG64([seed, step]))
    points = torch.from_numpy(generator.random(count)) * weights.sum()
    chosen = torch.searchsorted(weights.cumsum(0), points, right=True).clamp(max=len(weights) - 1)
    return torch.bincount(chosen, minlength=len(weights))


def best_and_worst_of_groups(groups: Tensor, rewards: Tensor, usable: Tensor) -> Tensor:
    """(num_pairs, 2) int64: of each group the row of the highest reward, then that of the lowest.

    groups: (n,) int64, ascending; rewards: (n,) float64; usable: (n,) bool, rows that may be taken.
    Of equal rewards the first row counts. A group whose usable rows have one reward has no pair.
    """
    pairs = []
    for group in groups.unique_consecutive().tolist():
        rows = ((groups == group) & usable).nonzero().flatten().tolist()
        by_reward = [float(rewards[row]) for row in rows]
        if unequal(by_reward):
            best, worst = by_reward.index(max(by_reward)), by_reward.index(min(by_reward))
            pairs.append([rows[best], rows[worst]])
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)


def overlong_penalty(length: int, max_tokens: int, buffer: int, penalty: float) -> float:
    """0 up to max_tokens - buffer, then falling to -penalty at max_tokens.

    Source: DAPO, arXiv 2503.14476, eq. 13.
    """
    over = length - (max_tokens - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0)


def unequal(rewards: list[Rewards]) -> bool:
    """Whether a group has something to tell: its rewards, one or several of each sample, are not
    all the same.

    Source: DAPO, arXiv 2503.14476.
    """
    return len(rewards) > 1 and max(rewards) > min(rewards)
