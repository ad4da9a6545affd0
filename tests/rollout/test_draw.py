"""Penalties and cuts of a distribution, against loops over the vocabulary; without an engine."""

import math
from functools import partial

import pytest
import torch

from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.draw import draw, penalise, processed_logprobs

LOG_SOFTMAX = partial(torch.log_softmax, dim=-1)


def by_loops(logits, params):
    """log of what is left of softmax(logits / T) and renormalised; -inf elsewhere."""
    weights = [math.exp(x / params.temperature) for x in logits]
    likeliest = max(weights)
    weights = [w if w >= params.min_p * likeliest else 0.0 for w in weights]
    if params.top_k:
        least = sorted(weights, reverse=True)[params.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    kept, mass = [0.0] * len(weights), 0.0
    for i in sorted(range(len(weights)), key=lambda i: -weights[i]):
        if mass < params.top_p * sum(weights):
            kept[i] = weights[i]
            mass += weights[i]
    return [math.log(w / mass) if w else -math.inf for w in kept]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(min_p=0.2),
        SamplingParams(min_p=1.0, temperature=0.3),
        SamplingParams(min_p=0.05, temperature=2.0),
        SamplingParams(min_p=0.1, top_k=4, top_p=0.7, temperature=1.5),
    ],
    ids=str,
)
def test_what_is_left_of_a_distribution(params):
    logits = 2 * torch.randn(20, 30, generator=torch.Generator().manual_seed(0)).double()
    got = processed_logprobs(logits, params, LOG_SOFTMAX)
    want = torch.tensor([by_loops(row, params) for row in logits.tolist()], dtype=torch.float64)
    torch.testing.assert_close(got, want)
    left = torch.isfinite(got).sum(1)
    assert 1 <= int(left.min()) < 30
    seeds = torch.arange(20)
    tokens, logprobs, _ = draw(logits, params, seeds, seeds, LOG_SOFTMAX)
    torch.testing.assert_close(logprobs, want[torch.arange(20), tokens])


@pytest.mark.parametrize("penalty", [1.0, 1.5, 0.5])
def test_a_penalty_is_of_the_tokens_that_were_there(penalty):
    """Each once, however often it stands there; a row without tokens stays as it is."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).double()
    logits[0, 2] = -math.inf  # a stop that is forbidden stays so
    sequences = [[2, 5, 5, 7, 0], (), [1]]
    want = logits.tolist()
    for row, sequence in zip(want, sequences, strict=True):
        for token in set(sequence):
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
    penalise(logits, sequences, penalty)
    torch.testing.assert_close(logits, torch.tensor(want, dtype=torch.float64))


def test_greedy_answers_heed_the_penalty_alone():
    logits = torch.tensor([[3.0, 2.5, -1.0]])
    params = SamplingParams(temperature=0.0, min_p=0.9, repetition_penalty=2.0)
    penalise(logits, [[0]], params.repetition_penalty)
    token, logprob, _ = draw(logits, params, torch.tensor([1]), torch.tensor([1]), LOG_SOFTMAX)
    assert token.tolist() == [1]
    assert float(logprob) == pytest.approx(float(torch.tensor([1.5, 2.5, -1.0]).log_softmax(-1)[1]))
