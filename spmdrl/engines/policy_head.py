"""Says what training engines ask of a policy's LM head, and in which form its results come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from spmdrl_kernels.lm_head import lm_head_gathered, lm_head_logprobs
from torch import Tensor

from spmdrl.types import Batch, PolicyStats

Head = Callable[..., tuple[Tensor, ...]]


def head_results(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, pi_squared: bool,
    top_k: int, ids: Tensor | None, support: Tensor | None = None,
    plain: Head = lm_head_logprobs, **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Returns logprobs and entropy of the targets, (n,) float32 each, and the sums of squares (0
    unless `pi_squared`), or in their place what top_k or ids ask for.

    top_k, above 0: (n, top_k) float32 twice, the largest log-probabilities, largest first, and
    their ids; float32 holds ids exactly up to 2^24, more than any vocabulary has. ids: (n, k)
    int64, or None; their log-probabilities, (n, k), with gradient. plain: what computes the rest;
    options: further arguments of the head. support: as support_results takes it, which gives all
    results then; or None.
    """
    if support is not None:
        assert ids is None and top_k == 0
        return support_results(hidden, weight, targets, support, temperature, **options)
    asked = hidden, weight, targets, temperature
    if ids is not None:
        return lm_head_gathered(hidden, weight, targets, ids, temperature, **options)
    if top_k == 0:
        return plain(*asked, pi_squared=pi_squared, **options)
    logprobs, entropy, _, top, top_ids = lm_head_logprobs(*asked, top_k=top_k, **options)
    return logprobs, entropy, top.float(), top_ids.float()


def support_results(
    hidden: Tensor, weight: Tensor, targets: Tensor, support: Tensor, temperature: float,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns logprobs, entropy and sums of squares, (n,) each, of the distribution over the
    support alone: p(v) = exp(z_v) / sum of exp(z_u) over the u of the support, 0 elsewhere.

    support: (n, k) int64, the ids of a row different, the target among them, -1 behind the last.
    Gradients flow from the first two. Source: "Keep Sampling Mask" of DeepSeek-V3.2, section 3.1,
    arXiv 2512.02556.
    """
    found = lm_head_gathered(hidden, weight, targets, support, temperature, **options)[2]
    outside = support < 0  # where the head gives NaN
    logprobs = found.masked_fill(outside, float("-inf")).log_softmax(-1)
    chosen = logprobs.masked_fill(support != targets[:, None], 0.0).sum(-1)
    probs = logprobs.exp()
    entropy = -(probs * logprobs.masked_fill(outside, 0.0)).sum(-1)
    return chosen, entropy, probs.detach().square().sum(-1)


def asked_ids(mb: Batch, rows: Tensor, teacher: bool) -> tuple[Tensor | None, Tensor | None]:
    """Returns ids, those of the teacher, and support, as head_results takes them, of tokens `rows`
    of a micro-batch. teacher: without it ids are None.
    """
    ids, support = mb.teacher_ids if teacher else None, mb.support_ids
    return (
        None if ids is None else ids[rows].long(),
        None if support is None else support[rows].long(),
    )


def num_columns(pi_squared: bool, top_k: int, batch: Batch, teacher: bool) -> int:
    """Returns how many rows `table_of` has of what a pass without gradient is asked for. teacher:
    the log-probabilities of the batch's teacher_ids.
    """
    if teacher:
        assert batch.teacher_ids is not None and not (top_k or pi_squared)
        return 2 + batch.teacher_ids.shape[1]
    return 2 + 2 * top_k if top_k else 3 if pi_squared else 2


def table_of(found: Sequence[Tensor], columns: int) -> Tensor:
    """(columns, num_tokens) of results of (num_tokens,) and (num_tokens, k); the first of them
    where there are more.
    """
    rows = [part[None] if part.ndim == 1 else part.T for part in found]
    return torch.cat(rows)[:columns]


def policy_stats(table: Tensor, top_k: int, teacher: bool) -> PolicyStats:
    """table: as table_of makes it, of all tokens of a batch."""
    if teacher:
        students = table[2:].T.contiguous()
        return PolicyStats(table[0].clone(), table[1].clone(), student_logprobs=students)
    if not top_k:
        return PolicyStats(*table)
    top, ids = table[2:].chunk(2)
    return PolicyStats(
        table[0].clone(), table[1].clone(), None, top.T.contiguous(), ids.T.int().contiguous()
    )


def with_students(mb: Batch, found: Sequence[Tensor]) -> Batch:
    """Returns the micro-batch with what the policy says of the teacher's tokens, where it has any:
    the third of the results of a pass with gradient.
    """
    return mb if mb.teacher_ids is None else replace(mb, student_logprobs=found[2])
