"""The estimators against every subset, one by one; no number depends on who made a sample."""

import itertools
import math
import random
from collections import Counter
from statistics import fmean

import pytest

from spmdrl.algo.pass_at_k import (
    Attempts,
    best_of,
    counts_up_to,
    majority_of,
    metrics_at_k,
    worst_of,
)


def subsets(values, k):
    return list(itertools.combinations(values, k))


def drawn_rewards(n, binary):
    return [float(random.random() < 0.4) if binary else random.gauss(0, 1) for _ in range(n)]


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_best_and_worst_are_means_over_all_subsets(n, binary):
    rewards = drawn_rewards(n, binary)
    for k in range(1, n + 1):
        assert best_of(rewards, k) == pytest.approx(fmean(map(max, subsets(rewards, k))))
        assert worst_of(rewards, k) == pytest.approx(fmean(map(min, subsets(rewards, k))))


def chen(n, c, k):
    """As in Chen et al. 2021, figure 3."""
    return 1.0 if n - c < k else 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@pytest.mark.parametrize("n", [4, 7, 200])
def test_pass_at_k_is_that_of_chen(n):
    for right in {0, 1, n // 2, n}:
        prompt = Attempts("a", 0, [1.0] * right + [0.0] * (n - right), [None] * n)
        metrics = metrics_at_k([prompt], n)
        for k in counts_up_to(n):
            assert metrics[f"pass@{k}"] == pytest.approx(chen(n, right, k), abs=1e-12)
            assert metrics[f"pass@{k}"] == metrics[f"best@{k}"]


def vote(answers):
    """answers: (reward, pred) of a subset; the mean over equally frequent ones."""
    counts = Counter(pred for _, pred in answers)
    first = [pred for pred, count in counts.items() if count == max(counts.values())]
    rewards = {pred: reward for reward, pred in answers}
    return fmean(rewards[pred] for pred in first)


@pytest.mark.parametrize("preds", ["aabbbcd", "abcdefg", "aaaaaaa", "aaabbb", "ab"])
def test_the_majority_is_near_its_mean_over_all_subsets_and_exact_for_all_answers(preds):
    worth = {pred: random.gauss(0, 1) for pred in set(preds)}
    rewards = [worth[pred] for pred in preds]
    ks = range(1, len(preds) + 1)
    got = majority_of(rewards, list(preds), ks, seed=3)
    spread = max(rewards) - min(rewards)
    for k in ks:
        want = fmean(map(vote, subsets(list(zip(rewards, preds, strict=True)), k)))
        assert got[k] == pytest.approx(want, abs=0.15 * spread + 1e-9)
    assert got[len(preds)] == pytest.approx(vote(list(zip(rewards, preds, strict=True))))
    assert majority_of(rewards, list(preds), ks, seed=3) == got
    # many seeds are many more draws
    means = [majority_of(rewards, list(preds), [2], seed)[2] for seed in range(100)]
    pairs = subsets(list(zip(rewards, preds, strict=True)), 2)
    assert fmean(means) == pytest.approx(fmean(map(vote, pairs)), abs=0.02 * spread + 1e-9)


def test_answers_read_alike_share_their_mean_reward():
    assert majority_of([1.0, 0.0, 0.25], ["a", "a", "b"], [3], 0)[3] == 0.5


@pytest.mark.parametrize(("n", "ks"), [
    (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (9, [2, 4, 8, 9]),
])  # fmt: skip
def test_counts(n, ks):
    assert counts_up_to(n) == ks


def test_prompts_with_fewer_valid_answers():
    """What is left of a prompt counts where it suffices; one without any is counted alone."""
    prompts = [
        Attempts("a", 1, [1.0, 0.0, 1.0, 0.0], ["x", "y", "x", "z"]),
        Attempts("b", 2, [1.0, 0.0], ["x", "y"]),
        Attempts("b", 3, [], []),
    ]
    got = metrics_at_k(prompts, 4)
    assert got["mean@4"] == 0.5
    assert got["std@4"] == 0.5
    assert got["best@2"] == pytest.approx(fmean([5 / 6, 1.0]))
    assert got["worst@2"] == pytest.approx(fmean([1 / 6, 0.0]))
    assert (got["best@4"], got["worst@4"], got["maj@4"]) == (1.0, 0.0, 1.0)  # of the first alone
    assert got["prompts_without_reward"] == 1
    assert got["a/best@2"] == pytest.approx(5 / 6)
    assert (got["b/pass@2"], got["b/prompts_without_reward"]) == (1.0, 1)
    assert "b/best@4" not in got
    one_source = metrics_at_k(prompts[1:], 4)
    assert not any("/" in name for name in one_source)


def test_pass_at_k_is_of_zeros_and_ones_and_maj_at_k_of_what_was_read():
    half = metrics_at_k([Attempts("a", 1, [0.5, 1.0], [None, "x"])], 2)
    assert half.keys() == {"mean@2", "std@2", "best@2", "worst@2", "prompts_without_reward"}
    mixed = metrics_at_k(
        [Attempts("a", 1, [1.0, 0.0], ["x", "y"]), Attempts("b", 1, [0.5, 1.0], [None, None])], 2
    )
    assert "pass@2" not in mixed  # over both
    assert mixed["a/pass@2"] == 1.0
    assert mixed["maj@2"] == mixed["a/maj@2"] == 0.5


def test_no_answer_at_all():
    assert metrics_at_k([Attempts("a", 1, [], [])], 2) == {"prompts_without_reward": 1}
