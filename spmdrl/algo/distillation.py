"""Measures how far a student is from a teacher, token by token, over the tokens that the teacher
finds most likely.

P is the teacher's distribution in the place of a token and Q the student's, as log-probabilities of
the same k tokens, (num_tokens, k). With `with_rest` all other tokens are one more event, whose
probability is what the k leave, so that P and Q are distributions of k + 1 events. Merging tokens
can only lower a divergence, so what is found is at most that over the whole vocabulary, and equal
to it where k is all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from spmdrl.config import DistillationConfig
from spmdrl.types import Batch

LOWEST = -1e30  # a log-probability whose probability is 0, and 0 times it is 0
Objective = Callable[[Tensor, Tensor, Batch], tuple[Tensor, dict[str, Tensor]]]


def kl(p: Tensor, q: Tensor) -> Tensor:
    """(num_tokens, k) log-probabilities -> (num_tokens,): sum of p (log p - log q), in nats."""
    return (p.exp() * (p.clamp(min=LOWEST) - q.clamp(min=LOWEST))).sum(-1)


def forward_kl(teacher: Tensor, student: Tensor, beta: float = 0.0) -> Tensor:
    """KL(P || Q): the student covers what the teacher may say."""
    return kl(teacher, student)


def reverse_kl(teacher: Tensor, student: Tensor, beta: float = 1.0) -> Tensor:
    """KL(Q || P): the student keeps to what the teacher says most. Source: MiniLLM, Gu et al. 2023,
    arXiv 2306.08543, eq. 1.
    """
    return kl(student, teacher)


def jsd(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q.

    Divided by beta it comes near the forward KL for beta near 0, and divided by 1 - beta near the
    reverse KL for beta near 1. Source: GKD, Agarwal et al. 2023, arXiv 2306.13649, eq. 1.
    """
    middle = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * kl(teacher, middle) + (1 - beta) * kl(student, middle)


DIVERGENCES = {"forward_kl": forward_kl, "reverse_kl": reverse_kl, "jsd": jsd}


def with_rest(logprobs: Tensor) -> Tensor:
    """(num_tokens, k) -> (num_tokens, k + 1): the last is of all other tokens together.

    Its probability is at least 16 times the dtype's rounding error, below which the difference to 1
    says nothing; there it has no gradient.
    """
    rest = 1 - logprobs.exp().sum(-1, keepdim=True)
    return torch.cat([logprobs, rest.clamp(min=16 * torch.finfo(rest.dtype).eps).log()], -1)


def distillation_losses(teacher: Tensor, student: Tensor, config: DistillationConfig) -> Tensor:
    """(num_tokens, k) log-probabilities of the same tokens -> (num_tokens,) in nats, not clamped.

    Without the tail the sum over k tokens alone may be below 0, where the student gives them more
    than the teacher does; then it is 0 and has no gradient, as verl's forward_kl_topk.
    """
    divergence = DIVERGENCES[config.loss]
    if config.tail:
        return divergence(with_rest(teacher), with_rest(student), config.beta)
    return divergence(teacher, student, config.beta).clamp(min=0)


def distilling(objective: Objective, config: DistillationConfig) -> Objective:
    """Returns a loss function of the actor that also has coef times the divergence of each token,
    weighted as the policy loss is.
    """

    def with_teacher(
        logprobs: Tensor, entropy: Tensor, mb: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = objective(logprobs, entropy, mb)
        teacher, student = mb.teacher_logprobs, mb.student_logprobs
        assert teacher is not None and student is not None and mb.loss_weights is not None
        losses = distillation_losses(teacher, student, config)
        found = distillation_metrics(losses.detach(), teacher, student.detach(), mb, config)
        if config.loss_max_clamp is not None:
            losses = losses.clamp(max=config.loss_max_clamp)
        return loss + config.coef * (losses * mb.loss_weights).sum(), sums | found

    return with_teacher


def distillation_metrics(
    losses: Tensor, teacher: Tensor, student: Tensor, mb: Batch, config: DistillationConfig
) -> dict[str, Tensor]:
    """Returns sums over the unmasked tokens: losses before the clamp, how many it cut, and what the
    k tokens have of each distribution.
    """
    mask = mb.loss_mask
    found = {
        "distillation_loss": losses,
        "teacher_mass": teacher.exp().sum(-1),
        "student_mass": student.exp().sum(-1),
    }
    if config.loss_max_clamp is not None:
        found["distillation_clamped"] = (losses > config.loss_max_clamp).to(losses.dtype)
    return {name: (values * mask).sum() for name, values in found.items()}
