"""Draws tokens by noise that is made from addresses, and says how likely each was.

For engines whose library would draw from a generator of its own, or would return logprobs of
another distribution than the one that it draws from.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from spmdrl.rollout.base import SamplingParams
from spmdrl.rollout.rng import gumbel, mix


def draw(
    logits: Tensor,
    params: SamplingParams,
    seeds: Tensor,
    lengths: Tensor,
    log_softmax: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """logits (num_rows, vocab) float32 -> tokens (num_rows,) int64 and their logprobs (num_rows,).

    seeds: (num_rows,) int64, those of the requests after rng.mix. lengths: (num_rows,) int64, how
    many tokens stand before the new one. A token depends on its row's logits, seed and length
    alone.
    """
    logprobs = processed_logprobs(logits, params, log_softmax)
    noise: Tensor | int = 0
    if params.temperature > 0:
        noise = gumbel(mix(seeds + lengths), logits.shape[1])
    tokens = (logprobs + noise).argmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def processed_logprobs(
    logits: Tensor, params: SamplingParams, log_softmax: Callable[[Tensor], Tensor]
) -> Tensor:
    """The distribution sampled from: temperature, then top-k, then top-p of what is left.

    logits: (num_rows, vocab) float32. Greedy: the model's own distribution.
    """
    if params.temperature == 0:
        return log_softmax(logits)
    logits = logits / params.temperature
    if 0 < params.top_k < logits.shape[-1]:
        kth = logits.topk(params.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1:
        ascending, order = logits.sort(-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - params.top_p
        unlikely[:, -1] = False
        logits = logits.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
    return log_softmax(logits)
