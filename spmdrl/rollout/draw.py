"""Draws tokens by noise that is made from addresses, and says how likely each was.

For engines whose library would draw from a generator of its own, or would return logprobs of
another distribution than the one that it draws from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import torch
from torch import Tensor

from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.rng import gumbel, mix


def draw(
    logits: Tensor,
    params: SamplingParams,
    seeds: Tensor,
    lengths: Tensor,
    log_softmax: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor, Tensor | None]:
    """logits (num_rows, vocab) float32 -> tokens (num_rows,) int64, their logprobs (num_rows,) and,
    with params.support_width, among which ids they were drawn, as support_of gives them.

    seeds: (num_rows,) int64, those of the requests after rng.mix. lengths: (num_rows,) int64, how
    many tokens stand before the new one. A token depends on its row's logits, seed and length
    alone.
    """
    logprobs = processed_logprobs(logits, params, log_softmax)
    noise: Tensor | int = 0
    if params.temperature > 0:
        noise = gumbel(mix(seeds + lengths), logits.shape[1])
    tokens = (logprobs + noise).argmax(-1)
    support = support_of(logprobs, params.support_width) if params.support_width else None
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1), support


def support_of(logprobs: Tensor, width: int) -> Tensor:
    """(num_rows, vocab) log-probabilities -> (num_rows, width) int32, the ids whose probability is
    not 0, ascending, -1 behind the last; -1 alone where there are more than `width`.
    """
    rows, ids = (logprobs > float("-inf")).nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(logprobs))
    columns = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    fits = counts[rows] <= width
    found = logprobs.new_full((len(logprobs), width), -1, dtype=torch.int32)
    found[rows[fits], columns[fits]] = ids[fits].int()
    return found


def penalise(logits: Tensor, sequences: Sequence[Iterable[int]], penalty: float) -> None:
    """Makes tokens that a row has had less likely, with a penalty above 1: their logits are divided
    by it where they are above 0, else multiplied. Changed in place.

    logits: (num_rows, vocab); sequences: the tokens of prompt and answer of each row. Source: CTRL,
    arXiv 1909.05858, section 4.1, with the division of negative logits that vLLM and transformers
    make a product.
    """
    if penalty == 1:
        return
    had = [sorted(set(sequence)) for sequence in sequences]
    lengths = torch.tensor([len(tokens) for tokens in had], device=logits.device)
    rows = torch.repeat_interleave(torch.arange(len(had), device=logits.device), lengths)
    tokens = torch.tensor(list(chain(*had)), dtype=torch.int64, device=logits.device)
    values = logits[rows, tokens]
    logits[rows, tokens] = torch.where(values > 0, values / penalty, values * penalty)


def processed_logprobs(
    logits: Tensor, params: SamplingParams, log_softmax: Callable[[Tensor], Tensor]
) -> Tensor:
    """The distribution sampled from: temperature, min-p, top-k, and top-p of what is left.

    logits: (num_rows, vocab) float32, after `penalise`. Greedy: the distribution of these logits.
    min-p: tokens whose probability is below min_p times the largest are left out; arXiv 2407.01082.
    """
    if params.temperature == 0:
        return log_softmax(logits)
    logits = logits / params.temperature
    if params.min_p > 0:
        least = logits.amax(-1, keepdim=True) + math.log(params.min_p)
        logits = logits.masked_fill(logits < least, float("-inf"))
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1:
        ascending, order = logits.sort(-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
    return log_softmax(logits)
