"""Divergences to a teacher compared with loops over the vocabulary in float64, from the papers."""

from __future__ import annotations

import math

import pytest
import torch
from spmdrl_kernels.lm_head import lm_head_gathered, lm_head_logprobs
from torch import Tensor

from spmdrl.algo.distillation import distillation_losses, distilling
from spmdrl.config import DistillationConfig
from spmdrl.data.packing import empty_batch
from spmdrl.types import Batch

VOCAB, TOKENS, BETA = 24, 7, 0.3
LOSSES = ["forward_kl", "reverse_kl", "jsd"]


def softmax(logits: list[float]) -> list[float]:
    total = math.fsum(math.exp(z) for z in logits)
    return [math.exp(z) / total for z in logits]


def divergence(loss: str, teacher: list[float], student: list[float]) -> float:
    """Of two distributions, event by event. GKD, arXiv 2306.13649, section 2 and eq. 1."""
    pairs = list(zip(teacher, student, strict=True))
    if loss == "forward_kl":
        return math.fsum(p * math.log(p / q) for p, q in pairs)
    if loss == "reverse_kl":
        return math.fsum(q * math.log(q / p) for p, q in pairs)
    mixed = [(p, q, BETA * p + (1 - BETA) * q) for p, q in pairs]
    return math.fsum(
        BETA * p * math.log(p / m) + (1 - BETA) * q * math.log(q / m) for p, q, m in mixed
    )


def loop(loss: str, teacher: list[float], student: list[float], k: int, tail: bool) -> float:
    """From both models' logits of one place: over the teacher's k likeliest tokens."""
    p, q = softmax(teacher), softmax(student)
    chosen = sorted(range(len(p)), key=lambda v: -p[v])[:k]
    others = [v for v in range(len(p)) if v not in chosen]
    events = [[x[v] for v in chosen] for x in (p, q)]
    if tail and others:
        events = [
            [*found, math.fsum(x[v] for v in others)]
            for found, x in zip(events, (p, q), strict=True)
        ]
    found = divergence(loss, *events)
    return found if tail else max(found, 0.0)


def slope(loss: str, teacher: list[float], student: list[float], k: int, tail: bool) -> list[float]:
    """d loss / d student's logits by differences."""
    found, h = [], 1e-5
    for v in range(len(student)):
        up, down = (
            [z + (sign * h if i == v else 0.0) for i, z in enumerate(student)] for sign in (1, -1)
        )
        found.append(
            (loop(loss, teacher, up, k, tail) - loop(loss, teacher, down, k, tail)) / 2 / h
        )
    return found


def logits(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    teacher, student = (
        2 * torch.randn(TOKENS, VOCAB, generator=draw, dtype=torch.float64) for _ in range(2)
    )
    return teacher, student.requires_grad_()


def chosen_logprobs(teacher: Tensor, student: Tensor, k: int) -> tuple[Tensor, Tensor]:
    of_teacher, ids = teacher.log_softmax(-1).topk(k)
    return of_teacher, student.log_softmax(-1).gather(1, ids)


@pytest.mark.parametrize(
    ("loss", "k", "tail"),
    [(loss, k, True) for loss in LOSSES for k in (1, 5, VOCAB)] + [("forward_kl", 5, False)],
)
def test_losses_and_gradients_are_those_of_the_loops(loss, k, tail):
    """With k of the whole vocabulary it is the whole divergence: the loop then merges nothing."""
    teacher, student = logits()
    config = DistillationConfig(loss=loss, topk=k, beta=BETA if loss == "jsd" else 0.5, tail=tail)
    found = distillation_losses(*chosen_logprobs(teacher, student, k), config)
    (gradient,) = torch.autograd.grad(found.sum(), student)
    for t in range(TOKENS):
        row = teacher[t].tolist(), student[t].tolist()
        assert found[t].item() == pytest.approx(loop(loss, *row, k, tail), rel=1e-9, abs=1e-12)
        want = torch.tensor(slope(loss, *row, k, tail), dtype=torch.float64)
        torch.testing.assert_close(gradient[t], want, rtol=1e-6, atol=1e-9)


def test_fewer_tokens_never_say_more():
    teacher, student = logits(1)
    for loss in LOSSES:
        by_k = torch.stack([
            distillation_losses(
                *chosen_logprobs(teacher, student.detach(), k), DistillationConfig(loss=loss)
            )
            for k in (1, 3, 8, VOCAB)
        ])  # fmt: skip
        assert (by_k.diff(dim=0) >= -1e-12).all() and (by_k > 0).all()


def test_beta_leads_from_the_forward_to_the_reverse_kl():
    both = chosen_logprobs(*(x.detach() for x in logits(2)), VOCAB)
    forward, reverse = (distillation_losses(*both, DistillationConfig(name)) for name in LOSSES[:2])
    small = distillation_losses(*both, DistillationConfig("jsd", beta=1e-6)) / 1e-6
    large = distillation_losses(*both, DistillationConfig("jsd", beta=1 - 1e-6)) / 1e-6
    torch.testing.assert_close(small, forward, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(large, reverse, rtol=1e-3, atol=1e-4)


def plain_objective(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict]:
    return logprobs.sum(), {"entropy": entropy.sum()}


def test_the_objective_adds_clamped_and_weighted_losses():
    """A token above loss_max_clamp counts as that and has no gradient; a masked one has neither."""
    teacher, student = logits(3)
    config = DistillationConfig("reverse_kl", topk=6, coef=0.5, loss_max_clamp=1.5)
    batch = empty_batch(torch.tensor([TOKENS]))
    batch.loss_mask = torch.ones(TOKENS, dtype=torch.float64)
    batch.loss_mask[0] = 0
    batch.loss_weights = batch.loss_mask * torch.linspace(0.1, 1, TOKENS, dtype=torch.float64)
    batch.teacher_logprobs, batch.student_logprobs = chosen_logprobs(teacher, student, 6)
    own = torch.zeros(TOKENS, dtype=torch.float64)
    loss, sums = distilling(plain_objective, config)(own, own, batch)
    (gradient,) = torch.autograd.grad(loss, student)
    each = [loop("reverse_kl", teacher[t].tolist(), student[t].tolist(), 6, True)
            for t in range(TOKENS)]  # fmt: skip
    cut = [t for t in range(1, TOKENS) if each[t] > 1.5]
    assert cut and len(cut) < TOKENS - 1
    weighted = sum(float(batch.loss_weights[t]) * min(each[t], 1.5) for t in range(TOKENS))
    assert loss.item() == pytest.approx(0.5 * weighted)
    assert float(sums["distillation_clamped"]) == len(cut)
    assert float(sums["distillation_loss"]) == pytest.approx(sum(each[1:]))
    assert 0 < float(sums["student_mass"]) < float(sums["teacher_mass"]) < TOKENS - 1
    assert "entropy" in sums
    for t in range(TOKENS):
        assert bool((gradient[t] == 0).all()) == (t in [0, *cut])


@pytest.mark.parametrize("loss", LOSSES)
def test_the_head_gives_the_gradient_of_the_whole_vocabulary(loss):
    """From hidden states: the head's chunks and k columns against all logits at once."""
    draw = torch.Generator().manual_seed(4)
    hidden, weight, of_teacher, its_weight = (
        torch.randn(n, 8, generator=draw, dtype=torch.float64).requires_grad_()
        for n in (TOKENS, 40, TOKENS, 40)
    )
    targets = torch.randint(0, 40, (TOKENS,), generator=draw)
    config = DistillationConfig(loss, topk=40)
    with torch.no_grad():
        *_, ids = lm_head_logprobs(of_teacher, its_weight, targets, 0.7, top_k=40)
    p, q = ((h @ w.T / 0.7).log_softmax(-1) for h, w in
            ((of_teacher, its_weight), (hidden, weight)))  # fmt: skip
    mixed = torch.log((p.exp() + q.exp()) / 2)
    want = {
        "forward_kl": p.exp() * (p - q), "reverse_kl": q.exp() * (q - p),
        "jsd": (p.exp() * (p - mixed) + q.exp() * (q - mixed)) / 2,
    }[loss].sum(-1)  # fmt: skip
    _, _, student = lm_head_gathered(hidden, weight, targets, ids, 0.7, chunk_bytes=64)
    got = distillation_losses(p.detach().gather(1, ids), student, config)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    gradients = [torch.autograd.grad(x.sum(), [hidden, weight]) for x in (got, want)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
