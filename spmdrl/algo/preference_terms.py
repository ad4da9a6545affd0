"""Log-probabilities of tokens -> those of answers, and what a preference loss says of them.

The seam of engines/base.py for spmdrl/algo/preference_losses.py. Everything is float64: a sum over
an answer of thousands of tokens keeps what the log-probabilities have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.own_functions import checked_answers, fault_of
from spmdrl.algo.preference_losses import LabelledAnswers, Loss, Pairs
from spmdrl.segments import segment_expand, segment_sum
from spmdrl.types import Batch

Terms = Callable[[Tensor, Batch], dict[str, Tensor]]  # of each pair or answer; "loss" among them


def answer_sums(logprobs: Tensor, mb: Batch, ld_alpha: float | None = None) -> Tensor:
    """(num_tokens,) -> (num_seqs,) float64: the sum over each answer's tokens."""
    weights = mb.loss_mask if ld_alpha is None else tail_weights(mb, ld_alpha)
    return summed(logprobs.double() * weights, mb)


def summed(values: Tensor, mb: Batch) -> Tensor:
    """(num_tokens,) -> (num_seqs,) float64."""
    return segment_sum(values.double(), mb.seq_lens) if mb.num_seqs else values.double()


def tail_weights(mb: Batch, alpha: float) -> Tensor:
    """(num_tokens,) float64: 1 on the first tokens of an answer, as many as the pair's shorter one
    has, alpha on the rest. Liu et al. 2024, arXiv 2409.06411, eq. 10 (LD-DPO).
    """
    mask = mb.loss_mask.double()
    if mb.num_seqs % 2:  # a stand-in, in which nothing is learnt
        return mask
    counts = summed(mask, mb)
    shared = counts.view(-1, 2).amin(1).repeat_interleave(2)
    before = segment_expand(counts.cumsum(0) - counts, mb.seq_lens)
    is_tail = mask.cumsum(0) - before > segment_expand(shared, mb.seq_lens)
    return torch.where(is_tail, alpha * mask, mask)


def pair_terms(
    logprobs: Tensor, mb: Batch, loss: Callable[[Pairs], Loss], ld_alpha: float | None
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the loss and the metrics of each pair, (num_pairs,) float64.

    mb: the better answer of a pair stands before the worse one. logprobs: (num_tokens,).
    """
    counts = summed(mb.loss_mask, mb)
    kept = counts > 0  # a stand-in has nothing to learn
    sums = answer_sums(logprobs, mb, ld_alpha)[kept]
    ref = mb.ref_sums[kept] if mb.ref_sums is not None else torch.zeros_like(sums).detach()
    parts = (part.view(-1, 2).unbind(1) for part in (sums, ref, counts[kept]))
    (chosen, rejected), (ref_chosen, ref_rejected), tokens = parts
    return terms_of_pairs(Pairs(chosen, rejected, ref_chosen, ref_rejected, *tokens), loss)


def terms_of_pairs(pairs: Pairs, loss: Callable[[Pairs], Loss]) -> dict[str, Tensor]:
    """Returns the loss and the metrics of each pair, (num_pairs,) float64."""
    losses, found = checked_answers(loss, pairs, pairs.chosen)
    found = {"rewards/chosen": pairs.chosen_ratios, "rewards/rejected": pairs.rejected_ratios,
             **found}  # fmt: skip
    better, worse = found["rewards/chosen"].detach(), found["rewards/rejected"].detach()
    return {
        "loss": losses,
        "rewards/accuracies": (better > worse).double(),
        "rewards/margins": better - worse,
        **found,
        "logps/chosen": pairs.chosen,
        "logps/rejected": pairs.rejected,
    }


def pair_gradients(
    pairs: Pairs, loss: Callable[[Pairs], Loss]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Returns the derivatives of the mean loss by the log-probabilities of the chosen and of the
    rejected answers, (num_pairs,) float64 each, and the means of what `terms_of_pairs` says.

    A loss L of pairs reads the weights through these sums alone, so that its gradient is the sum
    over answers of dL / d log pi(y|x) times the gradient of log pi(y|x): exact where the sums are
    those of the weights at hand. Of DPO the derivative by the chosen one is -beta sigmoid(-beta d)
    / num_pairs, d the difference of both log-ratios. Source: Rafailov et al. 2023, arXiv
    2305.18290, section 4 ("What does the DPO update do?").
    """
    with torch.enable_grad():
        chosen, rejected = (x.detach().requires_grad_() for x in (pairs.chosen, pairs.rejected))
        found = terms_of_pairs(replace(pairs, chosen=chosen, rejected=rejected), loss)
        of_chosen, of_rejected = torch.autograd.grad(
            found["loss"].mean(), (chosen, rejected), allow_unused=True, materialize_grads=True
        )
    means = {name: float(values.detach().double().mean()) for name, values in found.items()}
    return of_chosen, of_rejected, means


def labelled_terms(
    logprobs: Tensor, mb: Batch, loss: Callable[[LabelledAnswers], Loss], kl: float
) -> dict[str, Tensor]:
    """Returns the loss and the metrics of each answer, (num_answers,) float64.

    mb: with 1 in `rewards` for a desirable answer. What is of the answers of one label is 0 at the
    others; `by_label` makes means of it. kl: see LabelledAnswers.
    """
    counts = summed(mb.loss_mask, mb)
    kept = counts > 0
    assert mb.ref_sums is not None
    sums, desirable = answer_sums(logprobs, mb)[kept], mb.rewards[kept].double()
    answers = LabelledAnswers(sums, mb.ref_sums[kept], desirable, counts[kept], kl)
    losses, found = checked_answers(loss, answers, sums)
    signs = 2 * desirable - 1
    right = {"rewards/accuracies": (signs * (answers.ratios - kl) > 0).double()}
    found = right | {"rewards": answers.ratios} | found
    reward = found.pop("rewards").detach()
    return {
        "loss": losses,
        **found,
        "rewards/chosen": reward * desirable,
        "rewards/rejected": reward * (1 - desirable),
        "logps/chosen": sums * desirable,
        "logps/rejected": sums * (1 - desirable),
        "kl": torch.full_like(sums, kl),
        "desirable": desirable,
    }


OF_ONE_LABEL = {"chosen": True, "rejected": False}


def by_label(means: dict[str, float]) -> dict[str, float]:
    """Takes means over all answers, and returns those over the answers of one label where
    labelled_terms has such; without those that no answer is of. "desirable" is their share.
    """
    share, found = means.get("desirable"), dict(means)
    if share is None:
        return found
    for kind in ("rewards", "logps"):
        for side, is_desirable in OF_ONE_LABEL.items():
            value, weight = found.pop(f"{kind}/{side}"), share if is_desirable else 1 - share
            if weight > 1e-9:
                found[f"{kind}/{side}"] = value / weight
    if {"rewards/chosen", "rewards/rejected"} <= found.keys():
        found["rewards/margins"] = found["rewards/chosen"] - found["rewards/rejected"]
    return found


def preference_loss(
    logprobs: Tensor, entropy: Tensor, mb: Batch, terms: Terms, num_rows: int, num_tokens: float,
    where: str = "the preference loss",
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The seam of engines/base.py: the mean over the rows of the global batch.

    num_rows: pairs, or labelled answers, of all ranks. num_tokens: unmasked ones of all ranks, by
    which engines divide metrics. where: what errors call the loss.
    """
    found = terms(logprobs, mb)
    losses = found.pop("loss")
    loss, fault = losses.sum() / num_rows, fault_of(where, losses, logprobs, mb.ref_sums)
    per_token = num_tokens / num_rows
    metrics = {name: values.detach().sum() * per_token for name, values in found.items()}
    return loss.float(), metrics | fault | {"entropy": (entropy.detach() * mb.loss_mask).sum()}


def term_sums(found: dict[str, Any]) -> dict[str, Tensor]:
    """Returns the sum of each term, float64."""
    return {name: values.double().sum() for name, values in found.items()}
