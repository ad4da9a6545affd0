"""Computes what several answers to a held-out prompt say: mean@n, std@n, best@k, worst@k, pass@k,
maj@k.

...@k is the expected value for k different ones of a prompt's valid answers, averaged over the
prompts that have as many.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

NUM_DRAWS = 256  # orders of a prompt's answers that maj@k is the mean over


class Attempts(NamedTuple):
    """The valid answers to one prompt, in order of their sample index."""

    data_source: str
    seed: int  # of maj@k
    rewards: list[float]
    preds: list[str | None]  # what each was read as


def metrics_at_k(prompts: Sequence[Attempts], n: int) -> dict[str, float]:
    """The means over all prompts, and as <data_source>/... where there are several sources.

    n: how many answers each prompt was to have. A prompt without a valid one is counted alone.
    """
    metrics = mean_over(prompts, n)
    sources = sorted({prompt.data_source for prompt in prompts})
    for source in sources if len(sources) > 1 else ():
        own = mean_over([p for p in prompts if p.data_source == source], n)
        metrics |= {f"{source}/{name}": value for name, value in own.items()}
    return metrics


def mean_over(prompts: Sequence[Attempts], n: int) -> dict[str, float]:
    scored = [prompt for prompt in prompts if prompt.rewards]
    values: dict[str, list[float]] = {}
    for prompt in scored:
        for name, value in numbers_of(prompt, n).items():
            values.setdefault(name, []).append(value)
    metrics = {name: math.fsum(found) / len(found) for name, found in values.items()}
    if all(reward in (0, 1) for prompt in scored for reward in prompt.rewards):
        # of rewards 0 and 1 the largest of k is 1 where one of them is right
        best = {name: value for name, value in metrics.items() if name.startswith("best@")}
        metrics |= {name.replace("best", "pass"): value for name, value in best.items()}
    return metrics | {"prompts_without_reward": float(len(prompts) - len(scored))}


def numbers_of(prompt: Attempts, n: int) -> dict[str, float]:
    """Returns the numbers of one prompt that has at least one valid answer."""
    rewards = prompt.rewards
    ks = [k for k in counts_up_to(n) if k <= len(rewards)]
    numbers = {f"mean@{n}": statistics.fmean(rewards), f"std@{n}": statistics.pstdev(rewards)}
    for k in ks:
        numbers |= {f"best@{k}": best_of(rewards, k), f"worst@{k}": worst_of(rewards, k)}
    preds = [pred for pred in prompt.preds if pred is not None]
    if ks and len(preds) == len(rewards):
        voted = majority_of(rewards, preds, ks, prompt.seed)
        numbers |= {f"maj@{k}": value for k, value in voted.items()}
    return numbers


def counts_up_to(n: int) -> list[int]:
    """2, 4, 8, ... and n."""
    return [*(2**i for i in range(1, n.bit_length()) if 2**i < n), n]


def best_of(rewards: Sequence[float], k: int) -> float:
    """Expected largest of k of the rewards, drawn without replacement; k <= len(rewards).

    Of rewards 0 and 1, c of them 1, it is 1 - C(n - c, k) / C(n, k): pass@k of Chen et al. 2021,
    arXiv 2107.03374, equation 1.
    """
    weights = rank_weights(len(rewards), k)
    return math.fsum(w * r for w, r in zip(weights, sorted(rewards), strict=True))


def worst_of(rewards: Sequence[float], k: int) -> float:
    """Expected smallest of k of the rewards, as best_of from the other end."""
    weights = rank_weights(len(rewards), k)
    return math.fsum(w * r for w, r in zip(weights, sorted(rewards, reverse=True), strict=True))


@lru_cache
def rank_weights(n: int, k: int) -> tuple[float, ...]:
    """(n,): the chance that the i-th smallest of n is the largest of k drawn ones.

    It is drawn, and the other k - 1 are among the i smaller ones.
    """
    return tuple(math.comb(i, k - 1) / math.comb(n, k) for i in range(n))


def majority_of(
    rewards: Sequence[float], preds: Sequence[str], ks: Iterable[int], seed: int
) -> dict[int, float]:
    """Returns, by k, the expected reward of the most frequent answer among k of these, drawn
    without replacement; where several are as frequent, their mean. A mean over NUM_DRAWS drawn
    orders.

    An answer's reward is the mean over those that were read as this answer.
    """
    number = {pred: i for i, pred in enumerate(dict.fromkeys(preds))}
    codes = np.array([number[pred] for pred in preds])  # (n,) of the answer
    worth = np.bincount(codes, weights=rewards) / np.bincount(codes)  # (num_answers,)
    orders = np.tile(codes, (NUM_DRAWS, 1))
    np.random.default_rng(seed).permuted(orders, axis=1, out=orders)  # each row by itself
    rows = np.arange(NUM_DRAWS)[:, None] * len(worth)
    result = {}
    for k in ks:
        counts = np.bincount((rows + orders[:, :k]).ravel(), minlength=NUM_DRAWS * len(worth))
        counts = counts.reshape(NUM_DRAWS, -1)
        first = counts == counts.max(1, keepdims=True)
        result[k] = float(((first * worth).sum(1) / first.sum(1)).mean())
    return result
