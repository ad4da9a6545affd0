"""Preference losses compared with loops over answers in float64, written from the papers."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spmdrl.algo.options import options_of
from spmdrl.algo.own_functions import preference_loss_name, without_faults
from spmdrl.algo.preference_losses import (
    PREFERENCE_LOSSES,
    PreferenceLoss,
    loss_function,
    needs_reference,
    preference_loss_of,
)
from spmdrl.algo.preference_terms import (
    by_label,
    labelled_terms,
    pair_terms,
    preference_loss,
    term_sums,
)
from spmdrl.config import ConfigError, PreferenceConfig
from spmdrl.data.packing import concatenate, empty_batch
from spmdrl.engines.micro_batches import stand_in
from spmdrl.training.checks.preference import check_loss
from spmdrl.types import Batch

BETA = 0.3


def made(seed: int, num_pairs: int = 5) -> tuple[Batch, Tensor]:
    """Pairs of answers of 1 to 6 tokens behind prompts of 2 to 4; log-probabilities of tokens."""
    draw = torch.Generator().manual_seed(seed)
    asked = torch.randint(2, 5, (num_pairs,), generator=draw).repeat_interleave(2)
    said = torch.randint(1, 7, (2 * num_pairs,), generator=draw)
    batch = empty_batch(asked + said)
    for start, before, tokens in zip(batch.cu_seqlens.tolist(), asked, said, strict=False):
        batch.loss_mask[start + before : start + before + tokens] = 1
    batch.ref_sums = -4 * torch.rand(2 * num_pairs, generator=draw, dtype=torch.float64)
    batch.rewards = torch.rand(2 * num_pairs, generator=draw, dtype=torch.float64).round()
    logprobs = -2 * torch.rand(batch.num_tokens, generator=draw) * batch.loss_mask
    return batch, logprobs.requires_grad_()


def answers_of(batch: Batch, logprobs: Tensor) -> list[list[float]]:
    """The log-probabilities of each answer's tokens."""
    found = []
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        learnt = batch.loss_mask[start:end] > 0
        found.append(logprobs[start:end][learnt].double().tolist())
    return found


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def odds(logprobs: list[float]) -> float:
    p = math.exp(sum(logprobs) / len(logprobs))
    return p / (1 - p)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def cdpo(difference: float, smoothing: float) -> float:
    """Mitchell 2023, eq. 3."""
    return -(1 - smoothing) * log_sigmoid(difference) - smoothing * log_sigmoid(-difference)


def paper_dpo(w, u, ref_w, ref_l, smoothing=0.0, free=False, normalized=False, alpha=0.0):
    """Rafailov et al. 2023, eq. 7; Tulu 3, eq. 6; RPO, eq. 1."""
    h_w, h_l = (sum(w), sum(u)) if free else (sum(w) - ref_w, sum(u) - ref_l)
    if normalized:
        h_w, h_l = h_w / len(w), h_l / len(u)
    return cdpo(BETA * (h_w - h_l), smoothing) - alpha * sum(w) / len(w)


def paper_ipo(w, u, ref_w, ref_l, normalized=False):
    """Azar et al. 2023, eq. 17."""
    h_w, h_l = sum(w) - ref_w, sum(u) - ref_l
    if normalized:
        h_w, h_l = h_w / len(w), h_l / len(u)
    return (h_w - h_l - 1 / (2 * BETA)) ** 2


def paper_orpo(w, u, *_):
    """Hong et al. 2024, eq. 6 and 7."""
    return -mean(w) - BETA * log_sigmoid(math.log(odds(w) / odds(u)))


def paper_simpo(w, u, *_, gamma=0.5, alpha=0.0):
    """Meng et al. 2024, eq. 6."""
    return -log_sigmoid(BETA * sum(w) / len(w) - BETA * sum(u) / len(u) - gamma) - alpha * mean(w)


def paper_cpo(w, u, *_, smoothing=0.0):
    """Xu et al. 2024, eq. 3 to 5."""
    return cdpo(BETA * sum(w) - BETA * sum(u), smoothing) - mean(w)


PAPERS = [
    ("dpo", {}, paper_dpo),
    ("dpo", {"label_smoothing": 0.2}, partial(paper_dpo, smoothing=0.2)),
    ("dpo", {"reference_free": True}, partial(paper_dpo, free=True)),
    ("dpo", {"length_normalized": True}, partial(paper_dpo, normalized=True)),
    ("dpo", {"rpo_alpha": 0.7}, partial(paper_dpo, alpha=0.7)),
    ("ipo", {}, partial(paper_ipo, normalized=True)),
    ("ipo", {"length_normalized": False}, paper_ipo),
    ("orpo", {}, paper_orpo),
    ("simpo", {}, paper_simpo),
    ("simpo", {"simpo_gamma": 1.2, "cpo_alpha": 0.4}, partial(paper_simpo, gamma=1.2, alpha=0.4)),
    ("cpo", {}, paper_cpo),
    ("cpo", {"label_smoothing": 0.1}, partial(paper_cpo, smoothing=0.1)),
]


def terms_for(name: str, options: dict, ld_alpha: float | None = None):
    config = PreferenceConfig(name, {"beta": BETA, **options}, ld_alpha)
    check_loss(config)
    return partial(pair_terms, loss=loss_function(config), ld_alpha=ld_alpha)


@pytest.mark.parametrize(("name", "options", "paper"), PAPERS)
def test_a_loss_is_the_papers(name, options, paper):
    batch, logprobs = made(1)
    found = terms_for(name, options)(logprobs, batch)
    said, refs = answers_of(batch, logprobs), batch.ref_sums.tolist()
    want = [paper(said[i], said[i + 1], refs[i], refs[i + 1]) for i in range(0, len(said), 2)]
    assert found["loss"].tolist() == pytest.approx(want, rel=1e-10)
    margins = found["rewards/chosen"] - found["rewards/rejected"]
    assert torch.equal(found["rewards/margins"], margins)
    assert torch.equal(found["rewards/accuracies"], (margins > 0).double())
    assert found["logps/chosen"].tolist() == pytest.approx(list(map(sum, said[::2])))


def test_every_paired_loss_is_among_the_papers_and_every_option():
    asked: dict[str, set[str]] = {name: {"beta"} for name in PREFERENCE_LOSSES}
    for name, options, _ in PAPERS:
        asked[name] |= options.keys()
    asked["kto"] |= {"desirable_weight", "undesirable_weight"}
    asked["simpo"] |= {"label_smoothing"}  # the same helper as dpo's
    asked["cpo"] |= {"cpo_alpha"}  # its default is 1
    for name, loss in PREFERENCE_LOSSES.items():
        assert set(options_of(loss.function)) == asked[name], name


def test_tokens_behind_the_shorter_answer_count_by_ld_alpha():
    """Liu et al. 2024 (arXiv 2409.06411), eq. 10."""
    batch, logprobs = made(2)
    found = terms_for("dpo", {}, ld_alpha=0.25)(logprobs, batch)
    said, refs = answers_of(batch, logprobs), batch.ref_sums.tolist()
    for i in range(0, len(said), 2):
        shared = min(len(said[i]), len(said[i + 1]))
        w, u = (sum(s[:shared]) + 0.25 * sum(s[shared:]) for s in said[i : i + 2])
        want = -log_sigmoid(BETA * (w - refs[i] - u + refs[i + 1]))
        assert float(found["loss"].detach()[i // 2]) == pytest.approx(want, rel=1e-10)


@pytest.mark.parametrize("kl", [0.0, 0.8])
def test_kto_is_the_papers(kl):
    """Ethayarajh et al. 2024, eq. 7 and 8; means of one label over the answers that have it."""
    batch, logprobs = made(3)
    options = {"beta": BETA, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    loss = loss_function(PreferenceConfig("kto", options))
    found = labelled_terms(logprobs, batch, loss, kl)
    want, rewards = [], {True: [], False: []}
    for said, ref, label in zip(answers_of(batch, logprobs), batch.ref_sums.tolist(),
                                batch.rewards.tolist(), strict=True):  # fmt: skip
        ratio = sum(said) - ref
        rewards[label > 0].append(BETA * ratio)
        want.append(1.5 * (1 - sigmoid(BETA * (ratio - kl))) if label > 0
                    else 0.5 * (1 - sigmoid(BETA * (kl - ratio))))  # fmt: skip
    assert found["loss"].tolist() == pytest.approx(want, rel=1e-10)
    means = by_label({name: float(v) / 10 for name, v in term_sums(found).items()})
    assert means["rewards/chosen"] == pytest.approx(mean(rewards[True]))
    assert means["rewards/rejected"] == pytest.approx(mean(rewards[False]))
    assert means["rewards/margins"] == pytest.approx(mean(rewards[True]) - mean(rewards[False]))
    assert means["kl"] == pytest.approx(kl)
    one_label = by_label({"desirable": 1.0, "rewards/chosen": 2.0, "rewards/rejected": 0.0,
                          "logps/chosen": 1.0, "logps/rejected": 0.0})  # fmt: skip
    assert one_label == {"desirable": 1.0, "rewards/chosen": 2.0, "logps/chosen": 1.0}


@pytest.mark.parametrize("name", sorted(set(PREFERENCE_LOSSES) - {"kto"}))
def test_micro_batches_and_stand_ins_add_up_to_the_mean_over_pairs(name):
    batch, logprobs = made(4)
    terms = terms_for(name, {})
    num_tokens = float(batch.loss_mask.sum())
    seam = partial(preference_loss, terms=terms, num_rows=5, num_tokens=num_tokens)
    whole, metrics = seam(logprobs, torch.zeros_like(logprobs), batch)
    assert without_faults({name: float(total) for name, total in metrics.items()})[1] == ""
    (grad,) = torch.autograd.grad(whole, logprobs)
    assert torch.isfinite(grad).all()
    total, sums, gradients = 0.0, {}, []
    for seqs in ([0, 1, 2, 3], [4, 5, 6, 7, 8, 9]):
        part = batch.select(seqs)
        own = logprobs.detach()[_rows(batch, seqs)].requires_grad_()
        loss, found = seam(own, torch.zeros_like(own), part)
        gradients += torch.autograd.grad(loss, own)
        total += float(loss)
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in found.items()}
    empty = stand_in(batch)
    own = torch.zeros(2, requires_grad=True)
    loss, found = seam(own, torch.zeros(2), empty)
    loss.backward()
    assert float(loss) == 0 and found.keys() == metrics.keys()
    assert total == pytest.approx(float(whole), rel=1e-6)
    torch.testing.assert_close(torch.cat(gradients), grad)
    means = {name: float(v) / num_tokens for name, v in metrics.items()}  # as engines divide
    assert {n: v / num_tokens for n, v in sums.items()} == pytest.approx(means)
    want = float(terms(logprobs, batch)["rewards/margins"].mean())
    assert means["rewards/margins"] == pytest.approx(want)


def _rows(batch: Batch, seqs: list[int]) -> Tensor:
    bounds = batch.cu_seqlens
    return torch.cat([torch.arange(int(bounds[s]), int(bounds[s + 1])) for s in seqs])


def test_a_batch_of_a_rank_without_rows_has_the_same_terms():
    batch, _ = made(5)
    nothing = batch.select([])
    found = terms_for("dpo", {}, ld_alpha=0.5)(torch.zeros(0), nothing)
    assert all(values.shape == (0,) for values in found.values())
    assert "rewards/margins" in found
    assert concatenate([nothing, batch]).num_seqs == 10


def test_orpo_of_a_certain_answer_is_finite():
    batch, _ = made(6, num_pairs=1)
    logprobs = torch.zeros(batch.num_tokens, requires_grad=True)
    loss = terms_for("orpo", {})(logprobs, batch)["loss"].sum()
    loss.backward()
    assert math.isfinite(float(loss.detach())) and torch.isfinite(logprobs.grad).all()


def mine(answers, *, beta: float = 1.0):
    return beta * (answers.rejected - answers.chosen), {}


def test_a_loss_that_is_not_finite_is_named():
    batch, logprobs = made(8)
    terms = partial(pair_terms, loss=partial(mine, beta=math.inf), ld_alpha=None)
    where = preference_loss_name(partial(mine))
    _, sums = preference_loss(
        logprobs, torch.zeros_like(logprobs), batch, terms, num_rows=5, num_tokens=9, where=where
    )
    kept, said = without_faults({name: float(total) for name, total in sums.items()})
    assert said == ", as the preference loss mine returned losses that are not finite"
    assert not any("fault" in name for name in kept)


def test_a_function_of_the_users_is_a_loss():
    batch, logprobs = made(7)
    config = PreferenceConfig(mine, {"beta": 2})
    check_loss(config)
    assert needs_reference(config) and not preference_loss_of(config).unpaired
    found = pair_terms(logprobs, batch, loss_function(config), None)
    said = answers_of(batch, logprobs)
    assert found["loss"].tolist() == pytest.approx(
        [2 * (sum(said[i + 1]) - sum(said[i])) for i in range(0, 10, 2)]
    )
    ratio = sum(said[0]) - float(batch.ref_sums[0])
    assert float(found["rewards/chosen"].detach()[0]) == pytest.approx(ratio)


def test_losses_without_a_reference_build_none():
    without = {name for name in PREFERENCE_LOSSES if not needs_reference(PreferenceConfig(name))}
    assert without == {"orpo", "simpo", "cpo"}
    assert not needs_reference(PreferenceConfig("dpo", {"reference_free": True}))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (PreferenceConfig("dpoo"), "did you mean 'dpo'"),
        (PreferenceConfig("ipo", {"label_smoothing": 0.1}), "loss='ipo' has no option"),
        (PreferenceConfig("dpo", {"beta": 0.0}), "must be above 0"),
        (PreferenceConfig("dpo", {"label_smoothing": 0.5}), "at least 0 and below 0.5"),
        (PreferenceConfig("dpo", {"beta": "x"}), "loss_args"),
        (PreferenceConfig(lambda a, b: 0), "must be f(answers, *, options)"),
        (PreferenceConfig("dpo", ld_alpha=1.5), "must be in 0..1"),
        (PreferenceConfig("kto", ld_alpha=0.5), "it is of loss='dpo'"),
        (PreferenceConfig("simpo", ld_alpha=0.5), "it is of loss='dpo'"),
        (PreferenceConfig("dpo", {"length_normalized": True}, 0.5), "set one of them"),
    ],
)
def test_what_cannot_work_is_refused(config, said):
    with pytest.raises((ConfigError, TypeError)) as caught:
        check_loss(config)
    assert said in str(caught.value)


def test_a_record_of_a_loss_is_checked():
    with pytest.raises(TypeError, match="a function is needed"):
        PreferenceLoss("dpo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one from the reference"):
        PreferenceLoss(mine, unpaired=True, reference=False)


@pytest.mark.parametrize(
    ("own", "message"),
    [
        (lambda a: (-a.chosen.mean(), {}), r"as losses, returned a tensor of shape \(\)"),
        (lambda a: -a.chosen, "must return a pair"),
        (lambda a: (-a.chosen.detach(), {}), "must have a gradient"),
        (lambda a: (-a.chosen, {"loss": a.chosen}), "loss is a metric of a run's own"),
        (lambda a: (-a.chosen, {"margin": a.chosen.mean()}), "metric 'margin', returned"),
    ],
)
def test_what_a_loss_of_the_users_returns_is_checked(own, message):
    """A mean over the pairs of a micro-batch was divided by their number once more."""
    batch, logprobs = made(4)
    loss = loss_function(PreferenceConfig(own))
    with pytest.raises(ConfigError, match=f"preference loss <lambda>.*{message}"):
        pair_terms(logprobs, batch, loss, None)
