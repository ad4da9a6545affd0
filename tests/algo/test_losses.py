"""Losses, weights and choices against slow float64 loops from the papers; gradients included."""

import math
from dataclasses import replace

import pytest
import reference
import torch
from golden_batches import batch_of, flat, random_trajectories
from metric_pages import metric_rows

from spmdrl.algo import kl, losses, objectives, selection
from spmdrl.algo.advantages import Estimator, Outcomes, advantage_of, token_rewards
from spmdrl.algo.correction import (
    MISMATCH_SUMS,
    correction_weights,
    mismatch_metrics,
    mismatch_sums,
    rejection_keep,
    take_mismatch,
)
from spmdrl.algo.own_functions import TAKEN, without_faults
from spmdrl.config import AlgoConfig, ConfigError, CorrectionConfig
from spmdrl.data.packing import empty_batch
from spmdrl.types import Batch

SEEDS = range(5)
NARROW = {"clip_low": 0.1, "clip_high": 0.15}

LOSSES = {
    "ppo": ({"clip_low": 0.1, "clip_high": 0.15, "dual_clip": 1.5},
            lambda new, trs, adv: reference.ppo_loss(new, trs, adv, 0.1, 0.15, 1.5)),
    "gspo": (NARROW, lambda new, trs, adv: reference.gspo_loss(new, trs, adv, 0.1, 0.15)),
    "cispo": (NARROW, lambda new, trs, adv: reference.cispo_loss(new, trs, adv, 0.1, 0.15)),
    "sapo": ({"tau_pos": 0.9, "tau_neg": 1.3},
             lambda new, trs, adv: reference.sapo_loss(new, trs, adv, 0.9, 1.3)),
    "vespo": ({"k_pos": 1.5, "lambda_pos": 2.0, "k_neg": 2.5, "lambda_neg": 1.2},
              lambda new, trs, adv: reference.vespo_loss(new, trs, adv, (1.5, 2.5), (2.0, 1.2))),
    "gpg": ({}, reference.gpg_loss),
    "reinforce": ({}, reference.reinforce_loss),
    "clip_cov": (NARROW, lambda new, trs, adv: reference.clip_cov_loss(
        new, trs, adv, 0.1, 0.15, every_third(trs))),
    "kl_cov": ({"cov_kl_coef": 0.7}, lambda new, trs, adv: reference.kl_cov_loss(
        new, trs, adv, 0.7, every_third(trs))),
    "geo_mean": (NARROW, lambda new, trs, adv: reference.geo_mean_loss(new, trs, adv, 0.1, 0.15)),
    "sequence_product": (NARROW, lambda new, trs, adv: reference.sequence_product_loss(
        new, trs, adv, 0.1, 0.15)),
    "dppo_tv": ({"clip_low": 0.01, "clip_high": 0.02, "ratio_cap": 1.3},
                lambda new, trs, adv: reference.dppo_tv_loss(new, trs, adv, 0.01, 0.02, 1.3)),
    "dppo_kl": ({"clip_low": 0.001, "clip_high": 0.002, "ratio_cap": 1.3},
                lambda new, trs, adv: reference.dppo_kl_loss(new, trs, adv, 0.001, 0.002, 1.3)),
    "dro": ({"beta": 0.7}, lambda new, trs, adv: reference.dro_loss(new, trs, adv, 0.7)),
    "sppo": ({"beta": 0.4}, lambda new, trs, adv: reference.sppo_loss(new, trs, adv, 0.4)),
}  # fmt: skip
PER_SEQUENCE = ("geo_mean", "sequence_product", "sppo")  # take one advantage for a whole sequence


def every_third(trs):
    return set(reference.all_tokens(trs)[::3])


def case_of(seed, per_sequence):
    """Trajectories with old logprobs, new ones, advantages: for the reference and as tensors."""
    trs = random_trajectories(seed)
    g = torch.Generator().manual_seed(seed)
    batch = batch_of(trs)
    new = (batch.old_logprobs + 0.3 * torch.randn(batch.num_tokens, generator=g)).clamp(max=-1e-3)
    new = (new * batch.loss_mask).double()
    if per_sequence:
        per_seq = torch.randn(len(trs), generator=g).double()
        advantages = torch.repeat_interleave(per_seq, batch.seq_lens) * batch.loss_mask
    else:
        advantages = torch.randn(batch.num_tokens, generator=g).double() * batch.loss_mask
    for name in ("old_logprobs", "rollout_logprobs", "loss_mask"):
        setattr(batch, name, getattr(batch, name).double())
    for tr, row in zip(trs, rows_of(batch.old_logprobs, batch), strict=True):
        tr.logprobs = row  # float32 values, so that both sides have the same
    batch.advantages = advantages
    return trs, batch, new.requires_grad_()


def rows_of(values, batch):
    return [part.tolist() for part in values.split(batch.seq_lens.tolist())]


def leaves(rows):
    return [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in r] for r in rows]


def flat_gradients(loss_rows, leaf_rows):
    total = sum((x for row in loss_rows for x in row), torch.tensor(0.0, dtype=torch.float64))
    flat_leaves = [x for row in leaf_rows for x in row]
    grads = torch.autograd.grad(total, flat_leaves, allow_unused=True)
    return torch.stack([torch.zeros((), dtype=torch.float64) if g is None else g for g in grads])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_and_gradient_are_those_of_the_paper(name, seed):
    settings, expected = LOSSES[name]
    trs, batch, new = case_of(seed, name in PER_SEQUENCE)
    batch.selected_mask = selected_tensor(trs, batch)
    algo = AlgoConfig(policy_loss=name, loss_args=settings)
    got, _ = losses.policy_loss_of(algo)(new, batch.old_logprobs, batch)
    got = got * batch.loss_mask
    (got_grad,) = torch.autograd.grad(got.sum(), new)
    new_rows = leaves(rows_of(new.detach(), batch))
    want = expected(new_rows, trs, rows_of(batch.advantages, batch))
    want_flat = torch.stack([x for row in want for x in row]).detach()
    torch.testing.assert_close(got.detach(), want_flat, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(got_grad, flat_gradients(want, new_rows), rtol=1e-7, atol=1e-9)
    assert float(got_grad.abs().max()) > 0.01


def selected_tensor(trs, batch):
    chosen = every_third(trs)
    return flat(
        [[float((i, t) in chosen) for t in range(len(tr.mask))] for i, tr in enumerate(trs)]
    ).double()


def test_clipping_and_masking_happened_in_the_cases_above():
    for name in (
        "ppo",
        "gspo",
        "cispo",
        "clip_cov",
        "geo_mean",
        "sequence_product",
        "dppo_tv",
        "dppo_kl",
    ):
        trs, batch, new = case_of(0, name in PER_SEQUENCE)
        batch.selected_mask = selected_tensor(trs, batch)
        algo = AlgoConfig(policy_loss=name, loss_args=LOSSES[name][0])
        _, metrics = losses.policy_loss_of(algo)(new, batch.old_logprobs, batch)
        fraction = float((metrics["clip_fraction"] * batch.loss_mask).sum() / batch.loss_mask.sum())
        assert 0.02 < fraction < 0.9, name


@pytest.mark.parametrize("name", losses.AGGREGATIONS)
@pytest.mark.parametrize("seed", SEEDS)
def test_aggregation(name, seed):
    trs, batch, _ = case_of(seed, False)
    values = torch.randn(batch.num_tokens).double() * batch.loss_mask
    rows = [[torch.tensor(x).double() for x in row] for row in rows_of(values, batch)]
    want = float(reference.aggregate(name, rows, trs, norm_length=12))
    halves = [batch.select(list(range(7))), batch.select(list(range(7, len(trs))))]  # two ranks
    counts = sum(losses.loss_counts(h.loss_mask, h.seq_lens) for h in halves)
    algo, got = AlgoConfig(aggregation=name), 0.0
    for half, part in zip(halves, values.split([h.num_tokens for h in halves]), strict=True):
        weights = losses.aggregate_of(algo)(half.loss_mask, half.seq_lens, counts, 12)
        got += float((part * weights).sum())
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_luspo_is_gspos_term_times_the_length(seed):
    """Loss and gradient are those of one term per sequence."""
    trs, batch, new = case_of(seed, per_sequence=True)
    algo = AlgoConfig(policy_loss="luspo", loss_args=NARROW)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.aggregate_of(algo)(batch.loss_mask, batch.seq_lens, counts, 12)
    got, _ = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    (got_grad,) = torch.autograd.grad(got, new)
    rows = leaves(rows_of(new.detach(), batch))
    want = reference.luspo(rows, trs, rows_of(batch.advantages, batch), 0.1, 0.15)
    torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got_grad, flat_gradients([[want]], rows), rtol=1e-6, atol=1e-9)
    assert float(got_grad.abs().max()) > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_value_loss(seed):
    trs, batch, values = case_of(seed, False)
    returns = torch.randn(batch.num_tokens).double() * batch.loss_mask
    old = batch.values.double()
    for tr, row in zip(trs, rows_of(old, batch), strict=True):
        tr.values = row
    got = losses.value_loss(values, old, returns, 0.5) * batch.loss_mask
    (grad,) = torch.autograd.grad(got.sum(), values)
    rows = leaves(rows_of(values.detach(), batch))
    want = reference.value_loss(rows, trs, rows_of(returns, batch), 0.5)
    torch.testing.assert_close(got.detach(), torch.stack([x for r in want for x in r]).detach())
    torch.testing.assert_close(grad, flat_gradients(want, rows))


@pytest.mark.parametrize("name", kl.ESTIMATORS)
def test_kl_estimator_and_its_gradient(name):
    g = torch.Generator().manual_seed(0)
    p = (-torch.rand(40, generator=g).double() * 3).requires_grad_()
    q = -torch.rand(40, generator=g).double() * 3
    got = kl.ESTIMATORS[name](p, q)
    (grad,) = torch.autograd.grad(got.sum(), p)
    for i in range(40):
        x = p[i].detach().clone().requires_grad_()
        want = reference.kl(name, x, float(q[i]))
        (want_grad,) = torch.autograd.grad(want, x)
        torch.testing.assert_close(got[i].detach(), want.detach())
        torch.testing.assert_close(grad[i], want_grad)


@pytest.mark.parametrize("name", ["k3", "k3+"])
def test_k3_may_be_cut_and_what_is_above_is_counted(name):
    """q/p of e^10, of e^2.6 (9.9), e^2.7 (11.2) and e^-1: only what is above 10 is cut."""
    ref = torch.tensor([-0.5, -0.1, -0.1, -2.0]).double()
    new = (ref - torch.tensor([10.0, 2.6, 2.7, -1.0]).double()).requires_grad_()
    batch = empty_batch(torch.tensor([4]))
    batch.loss_mask, batch.loss_weights = torch.ones(4).double(), torch.ones(4).double()
    batch.advantages, batch.rollout_logprobs = torch.zeros(4).double(), new.detach()
    batch.ref_logprobs = ref
    found = {}
    for cut in (None, 10.0):
        algo = AlgoConfig(kl_coef=1.0, kl_estimator=name, kl_cut=cut)
        loss, sums = objectives.policy_objective(algo)(new, torch.zeros(4).double(), batch)
        (found[cut],) = torch.autograd.grad(loss, new)
        assert float(sums["ref_kl_cut"]) == 2
        values = [math.exp(x) - 1 - x for x in (10.0, 2.6, 2.7, -1.0)]
        want = math.fsum(values if cut is None else [min(x, 10.0) for x in values])
        assert float(sums["ref_kl"]) == pytest.approx(want)
    plain = torch.tensor([1 - math.exp(x) for x in (10.0, 2.6, 2.7, -1.0)]).double()
    squared = -torch.tensor([10.0, 2.6, 2.7, -1.0]).double()
    torch.testing.assert_close(found[None], plain if name == "k3" else squared, rtol=1e-6, atol=0)
    kept = torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
    want_cut = plain * kept if name == "k3" else squared
    torch.testing.assert_close(found[10.0], want_cut, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", losses.AGGREGATIONS)
def test_sequence_ratios_take_any_aggregation(name):
    """The gradient is that of one clipped ratio per sequence that stands on all of its tokens."""
    trs, batch, new = case_of(1, per_sequence=True)
    algo = AlgoConfig(policy_loss="gspo", aggregation=name, loss_args=NARROW)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.aggregate_of(algo)(batch.loss_mask, batch.seq_lens, counts, 12)
    loss, _ = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    (got,) = torch.autograd.grad(loss, new)
    rows = leaves(rows_of(new.detach(), batch))
    advantages = rows_of(batch.advantages, batch)
    terms = [[torch.tensor(0.0).double()] * len(row) for row in rows]
    for i, tr in enumerate(trs):
        chosen = reference.policy_tokens(tr)
        if chosen:
            log_ratio = sum(rows[i][t] - tr.logprobs[t] for t in chosen) / len(chosen)
            ratio, a = log_ratio.exp(), advantages[i][chosen[0]]
            term = -torch.minimum(ratio * a, ratio.clamp(0.9, 1.15) * a)
            for t in chosen:
                terms[i][t] = term
    want = reference.aggregate(name, terms, trs, norm_length=12)
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got, flat_gradients([[want]], rows), rtol=1e-6, atol=1e-9)
    assert float(got.abs().max()) > 1e-3


def test_kl_estimators_in_expectation():
    """k1 and k3 have the KL's value, k2 has its gradient: exact over a small vocabulary."""
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(50).double(), -1)
    p = torch.log_softmax(logits, -1)
    exact = (p.exp() * (p - q)).sum()
    value = float(exact.detach())
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    for name in ("k1", "k3"):
        got = (p.exp() * kl.ESTIMATORS[name](p, q)).sum()
        assert float(got.detach()) == pytest.approx(value)
    for name in ("k2", "k1+", "k3+", "abs+"):
        expected = (p.exp().detach() * kl.ESTIMATORS[name](p, q)).sum()
        (grad,) = torch.autograd.grad(expected, logits, retain_graph=True)
        torch.testing.assert_close(grad, exact_grad)


def test_coefficients_that_adapt():
    for seen in (0.001, 0.02, 0.021, 0.5):
        want = reference.adaptive_kl(0.1, seen, 0.02, 64, 10_000)
        assert kl.next_kl_coef(0.1, seen, 0.02, 10_000, 64) == pytest.approx(want)
    for coef, entropy in ((0.01, 0.1), (0.01, 0.5), (0.001, 0.5), (0.0, 0.1)):
        want = reference.adaptive_entropy(coef, entropy, 0.2, 0.005)
        assert kl.next_entropy_coef(coef, entropy, 0.2, 0.005) == pytest.approx(want)
        bounded = kl.next_entropy_coef(coef, entropy, 0.2, 0.005, 0.002, 0.012)
        assert bounded == pytest.approx(min(max(want, 0.002), 0.012))


# ---- what chooses tokens, samples, groups


@pytest.mark.parametrize("seed", SEEDS)
def test_covariances_and_candidates(seed):
    trs, batch, new = case_of(seed, False)
    logprobs = new.detach()
    moments = selection.covariance_moments(logprobs, batch.advantages, batch.loss_mask)
    got = selection.covariances(logprobs, batch.advantages, batch.loss_mask, moments)
    adv = rows_of(batch.advantages, batch)
    want = reference.cov_values(rows_of(logprobs, batch), adv, trs)
    starts = batch.cu_seqlens.tolist()
    for (i, t), value in want.items():
        assert float(got[starts[i] + t]) == pytest.approx(value, rel=1e-9, abs=1e-12)
    assert int(torch.isfinite(got).sum()) == len(want)
    ratio = (logprobs - batch.old_logprobs).exp()
    clipped = {
        (i, t) for i, t in want
        if -adv[i][t] * min(max(float(ratio[starts[i] + t]), 0.9), 1.15)
        > -adv[i][t] * float(ratio[starts[i] + t])
    }  # fmt: skip
    mask = selection.clip_cov_candidates(got, ratio, batch.advantages, (0.05, 1.0, 0.1, 0.15))
    expected = set(reference.clip_cov_candidates(want, 0.05, 1.0, clipped))
    assert {(i, t) for i, t in want if mask[starts[i] + t]} == expected
    assert expected


def test_a_token_draws_the_same_ticket_wherever_it_lies():
    batch = batch_of(random_trajectories(0))
    tickets = selection.token_lottery(batch, seed=3, step=2, update=1)
    order = [5, 0, 12, 3]
    moved = selection.token_lottery(batch.select(order), seed=3, step=2, update=1)
    parts = tickets.split(batch.seq_lens.tolist())
    assert torch.equal(moved, torch.cat([parts[i] for i in order]))
    other = selection.token_lottery(batch, seed=3, step=3, update=1)
    assert not torch.equal(tickets, other)
    assert len(tickets.unique()) == batch.num_tokens
    many = torch.cat([selection.token_lottery(batch, s, 0, 0) for s in range(50)])
    assert abs(float(many.mean()) - 0.5) < 0.02
    assert ((many >= 0) & (many < 1)).all()


@pytest.mark.parametrize("name", selection.FILTERS)
def test_filter_weights_and_draws(name):
    trs = random_trajectories(2, binary=name == "max_random")
    scores = torch.tensor([tr.reward if tr.valid else 0.0 for tr in trs]).double()
    valid = torch.tensor([float(tr.valid) for tr in trs]).double()
    got = selection.filter_weights(scores, valid, name, power=3.0)
    want = torch.tensor(reference.pf_ppo_weights(trs, name, 3.0)).double()
    torch.testing.assert_close(got, want + 1e-8 * valid, rtol=1e-6, atol=0)
    times = selection.draw(got, 40_000, seed=1, step=1)
    torch.testing.assert_close(times.double() / 40_000, got / got.sum(), rtol=0, atol=0.02)
    assert int(times.sum()) == 40_000
    assert times[valid == 0].sum() == 0
    assert torch.equal(times, selection.draw(got, 40_000, seed=1, step=1))
    assert not torch.equal(times, selection.draw(got, 40_000, seed=1, step=2))


def test_overlong_penalty_and_unequal_groups():
    for length in (0, 3, 8, 9, 11, 12, 13):
        want = reference.overlong_penalty(length, 12, 4, 0.5)
        assert selection.overlong_penalty(length, 12, 4, 0.5) == pytest.approx(want)
    trs = random_trajectories(0)
    keep = reference.mixed_groups(trs)
    for group, members in reference.groups(trs).items():
        assert selection.unequal([trs[i].reward for i in members]) == (group in keep)
    assert not selection.unequal([])


# ---- the objectives that an engine is given


def objective_batch(seed):
    trs, batch, new = case_of(seed, False)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.aggregate_of(AlgoConfig())(
        batch.loss_mask, batch.seq_lens, counts, 12
    )
    return trs, batch, new


def test_objective_is_the_sum_of_its_terms():
    _, batch, new = objective_batch(0)
    g = torch.Generator().manual_seed(0)
    entropy = torch.rand(batch.num_tokens, generator=g).double() * batch.loss_mask
    batch.policy_weights = torch.rand(batch.num_tokens, generator=g).double() * batch.loss_mask
    batch.nll_weights = torch.rand(batch.num_tokens, generator=g).double() * batch.loss_mask
    algo = AlgoConfig(kl_coef=0.1, kl_estimator="k3", positive_nll_coef=0.2, entropy_coef=0.3)
    loss, _ = objectives.policy_objective(algo)(new, entropy, batch)
    policy, _ = losses.ppo(new, batch.old_logprobs, batch)
    per_token = policy * batch.policy_weights - 0.3 * entropy
    per_token = per_token + 0.1 * kl.k3(new, batch.ref_logprobs)
    want = (per_token * batch.loss_weights).sum() - 0.2 * (new * batch.nll_weights).sum()
    torch.testing.assert_close(loss, want)
    loss, _ = objectives.policy_objective(algo, kl_coef=0.0, entropy_coef=0.0)(new, entropy, batch)
    want = (policy * batch.policy_weights * batch.loss_weights).sum()
    torch.testing.assert_close(loss, want - 0.2 * (new * batch.nll_weights).sum())


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_bypass_weighs_reinforce_by_the_policy_at_hand(level):
    trs, batch, new = objective_batch(2)
    batch.old_logprobs = batch.rollout_logprobs
    correction = CorrectionConfig(level=level, high=1.2, bypass=True, reject={"token_k2": 0.4})
    algo = AlgoConfig(policy_loss="reinforce", correction=correction)
    loss, _ = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    for tr, row in zip(trs, rows_of(new.detach(), batch), strict=True):
        tr.logprobs = row  # the policy at hand takes the trainer's place
    for tr, row in zip(trs, rows_of(batch.rollout_logprobs, batch), strict=True):
        tr.rollout = row
    weights = flat(reference.rollout_weights(trs, level, "truncate", 0.5, 1.2)).double()
    weights *= flat([[float(k) for k in row] for row in reference.reject(trs, {"token_k2": 0.4})])
    want = (-batch.advantages * new * weights * batch.loss_weights).sum()
    torch.testing.assert_close(loss, want, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "sequence_product", "sppo"])
@pytest.mark.parametrize("bypass", [True, False])
def test_rejected_tokens_have_no_part_in_a_sequence(name, bypass):
    """As if they were masked: neither in the mean over the sequence nor in the gradient."""
    _, batch, new = case_of(3, True)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    correction = CorrectionConfig(bypass=bypass, reject={"token_k1": (0.8, 1.3)})
    algo = AlgoConfig(policy_loss=name, correction=correction)
    ours = new.detach() if bypass else batch.old_logprobs
    if bypass:
        batch.old_logprobs = batch.rollout_logprobs
    log_ratio = (ours - batch.rollout_logprobs) * batch.loss_mask
    keep = rejection_keep(log_ratio, batch.loss_mask, batch.seq_lens, correction.reject)
    assert 0.2 < float(keep.sum() / batch.loss_mask.sum()) < 0.9
    masked = replace(batch, loss_mask=keep)
    per_token = losses.aggregate_of(AlgoConfig())(keep, batch.seq_lens, counts, 12)
    want, _ = losses.POLICY_LOSSES[name](new, batch.old_logprobs, masked)
    want = (want * per_token).sum()
    batch.loss_weights = per_token
    if not bypass:
        batch.kept_mask = keep
    got, _ = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    torch.testing.assert_close(got, want)
    (got_grad,) = torch.autograd.grad(got, new, retain_graph=True)
    (want_grad,) = torch.autograd.grad(want, new)
    torch.testing.assert_close(got_grad, want_grad)
    assert float(got_grad[keep == 0].abs().max()) == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("name", ["ppo", "gspo", "reinforce"])
def test_the_only_update_weighs_by_its_own_pass(level, name):
    """As if the weights were computed before, from a pass of their own."""
    correction = CorrectionConfig(level=level, high=1.2)
    algo = AlgoConfig(policy_loss=name, correction=correction)
    assert objectives.corrects_in_update(algo) and not objectives.needs_old_logprobs(algo)
    _, batch, logprobs = objective_batch(3)
    entropy = torch.zeros_like(logprobs)
    log_ratio = (logprobs.detach() - batch.rollout_logprobs) * batch.loss_mask
    weights = correction_weights(log_ratio, batch.loss_mask, batch.seq_lens, correction)
    before = replace(batch, policy_weights=weights, old_logprobs=logprobs.detach())
    found = []
    in_update = replace(batch, old_logprobs=None)
    for given, of in ((in_update, algo), (before, replace(algo, correction=CorrectionConfig()))):
        leaf = logprobs.detach().clone().requires_grad_()
        loss, sums = objectives.policy_objective(of)(leaf, entropy, given)
        loss.backward()
        found.append((loss.detach(), leaf.grad, sums))
    torch.testing.assert_close(found[0][:2], found[1][:2])
    sums = {name: float(value) / 7 for name, value in found[0][2].items()}  # any factor
    metrics = take_mismatch(sums)
    want = mismatch_metrics(
        mismatch_sums(log_ratio, weights, batch.loss_mask, batch.loss_mask, batch.seq_lens)
    )
    assert metrics == pytest.approx(want) and sums.keys() == found[1][2].keys()
    assert take_mismatch(sums) == {}


@pytest.mark.parametrize(
    "algo",
    [
        AlgoConfig(correction=CorrectionConfig(level="token", normalize=True)),
        AlgoConfig(correction=CorrectionConfig(level="token", reject={"token_k1": (0.5, 2.0)})),
        AlgoConfig(correction=CorrectionConfig(reject={"token_k1": (0.5, 2.0)})),
        AlgoConfig(correction=CorrectionConfig(level="token"), mini_batches=2),
        AlgoConfig(correction=CorrectionConfig(level="token"), top_entropy_fraction=0.5),
        AlgoConfig(correction=CorrectionConfig(level="token"), kl_coef=0.1, kl_in="reward"),
        AlgoConfig(correction=CorrectionConfig(level="token"), advantage="optimal_token_baseline"),
        # functions of the user's, which may look at the weights
        AlgoConfig(correction=CorrectionConfig(level="token"), policy_loss=losses.ppo),
        AlgoConfig(
            correction=CorrectionConfig(level="token"),
            advantage=Estimator(lambda t: t.weights, sees="tokens"),
        ),
    ],
)
def test_a_correction_that_is_needed_before_the_update_takes_a_pass(algo):
    assert objectives.needs_old_logprobs(algo) and objectives.corrects_before_update(algo)
    assert not objectives.corrects_in_update(algo)


def test_bypass_takes_the_engines_logprobs_as_the_old_ones():
    _, batch, new = objective_batch(2)
    batch.old_logprobs = batch.rollout_logprobs
    algo = AlgoConfig(correction=CorrectionConfig(bypass=True))
    loss, sums = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    want, _ = losses.ppo(new, batch.rollout_logprobs, batch)
    torch.testing.assert_close(loss, (want * batch.loss_weights).sum())
    assert float(sums["ratio_max"]) > 1.01


def test_objective_masks_and_reports_the_rollout_difference():
    _, batch, new = objective_batch(3)
    batch.old_logprobs = None  # one update per rollout: the policy itself
    loss, sums = objectives.policy_objective(AlgoConfig())(new, torch.zeros_like(new), batch)
    torch.testing.assert_close(loss, (-batch.advantages * batch.loss_weights).sum())
    (grad,) = torch.autograd.grad(loss, new)
    assert (grad[batch.loss_mask == 0] == 0).all()
    assert float(sums["ratio_max"]) == 1.0
    difference = (new.detach() - batch.rollout_logprobs).abs() * batch.loss_mask
    assert float(sums["logprob_diff_max"]) == pytest.approx(float(difference.max()))
    assert float(sums["logprob_diff_mean"]) == pytest.approx(float(difference.sum()))


def test_prm_objective_is_the_cross_entropy_of_the_outcome():
    trs, batch, _ = objective_batch(1)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.seq_mean_token_mean(batch.loss_mask, batch.seq_lens, counts, 1)
    new = batch.prm_logprobs.double().requires_grad_()
    algo = AlgoConfig(advantage="prime", advantage_args={"beta": 0.07})
    loss, _ = objectives.prm_objective(algo)(new, torch.zeros_like(new), batch)
    rows = leaves(rows_of(new.detach(), batch))
    process = [
        [0.07 * (x - float(r)) for x, r in zip(row, ref, strict=True)]
        for row, ref in zip(rows, rows_of(batch.ref_logprobs, batch), strict=True)
    ]
    each = reference.prime_cross_entropy(process, trs, [float(r) for r in batch.rewards])
    has_tokens = [i for i, tr in enumerate(trs) if reference.policy_tokens(tr)]
    want = sum(each[i] for i in has_tokens) / len(has_tokens)
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-6, atol=1e-8)
    (grad,) = torch.autograd.grad(loss, new)
    torch.testing.assert_close(grad, flat_gradients([[want]], rows), rtol=1e-5, atol=1e-8)


def test_reward_sits_on_the_last_unmasked_token():
    seq_lens = torch.tensor([4, 3, 2])
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0.0])  # the last sequence has no token to train
    penalty = torch.full((9,), 0.05)
    got = token_rewards(torch.tensor([2.0, 3.0, 9.0]), mask, seq_lens, penalty)
    want = torch.tensor([0, -0.05, 1.95, 0, 0, -0.05, 2.95, 0, 0])
    torch.testing.assert_close(got, want)


def test_functions_of_the_users_take_the_place_of_names():
    _, batch, new = objective_batch(0)

    def my_loss(logprobs, old_logprobs, mb: Batch, *, scale=1.0):
        ones = torch.ones_like(logprobs)
        return -mb.advantages * logprobs * scale, {
            "mine": ones,
            "mine_max": 7 * ones,
            "one_max": 8 * ones[0],
        }

    def my_aggregation(mask, seq_lens, counts, norm_length):
        return mask / norm_length

    algo = AlgoConfig(
        policy_loss=my_loss, loss_args={"scale": 2.0}, aggregation=my_aggregation, kl_coef=0.1,
        kl_estimator=lambda p, q: (p - q) ** 4,
    )  # fmt: skip
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.aggregate_of(algo)(batch.loss_mask, batch.seq_lens, counts, 12)
    loss, sums = objectives.policy_objective(algo)(new, torch.zeros_like(new), batch)
    per_token = -batch.advantages * new * 2 + 0.1 * (new - batch.ref_logprobs) ** 4
    torch.testing.assert_close(loss, (per_token * batch.loss_mask).sum() / 12)
    assert float(sums["mine"]) == float(batch.loss_mask.sum())
    assert (float(sums["mine_max"]), float(sums["one_max"])) == (7, 8)
    assert without_faults({n: float(s) for n, s in sums.items()})[1] == ""


def test_a_loss_of_the_users_that_is_not_finite_is_named_where_what_it_was_given_is():
    _, batch, new = objective_batch(0)
    batch.loss_weights = batch.loss_mask / 12

    def my_loss(logprobs, old_logprobs, mb):
        return logprobs / (1 - mb.loss_mask), {}

    objective = objectives.policy_objective(AlgoConfig(policy_loss=my_loss))

    def said():
        _, sums = objective(new, torch.zeros_like(new), batch)
        kept, told = without_faults({name: float(total) for name, total in sums.items()})
        assert "ppo_kl" in kept and not any("my_loss" in name for name in kept)
        return told

    assert said() == ", as algo.policy_loss: my_loss returned losses that are not finite"
    batch.advantages[0] = float("nan")
    assert said() == ""


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"policy_loss": lambda new, old, mb: ((new * mb.loss_mask).sum(), {})},
         r"as losses, returned a tensor of shape \(\); .* \(num_tokens,\)"),
        ({"policy_loss": lambda new, old, mb: new}, "must return a pair: .* a Tensor"),
        ({"policy_loss": lambda new, old, mb: (new, {"lr": new})}, "actor/lr is a metric of a run"),
        ({"policy_loss": lambda new, old, mb: (new, {"mine": 1.0})}, "metric 'mine', returned 1.0"),
        ({"policy_loss": lambda new, old, mb: (new, {3: new})}, "name 3 of a metric"),
        ({"policy_loss": lambda new, old, mb: (new.detach(), {}), "entropy_coef": 0.1},
         "<lambda>: losses must have a gradient with respect to logprobs"),
        ({"kl_estimator": lambda p, q: (p - q).sum(), "kl_coef": 0.1}, r"tensor of shape \(\)"),
        ({"kl_estimator": lambda p, q: (p - q).detach(), "kl_coef": 0.1}, "must have a gradient"),
    ],
)  # fmt: skip
def test_what_functions_of_the_users_return_is_checked(chosen, message):
    """Else it would be broadcast, or written over by a number of the step's own."""
    _, batch, new = objective_batch(0)
    batch.loss_weights = batch.loss_mask / 12
    objective = objectives.policy_objective(AlgoConfig(**chosen))
    with pytest.raises(ConfigError, match=message):
        objective(new, torch.zeros_like(new), batch)


def test_the_names_that_a_loss_of_the_users_may_not_give_are_all_the_documented_ones():
    """Whole runs are compared with these rows; those of losses and of each adapter are left out."""
    named = {*losses.POLICY_LOSSES, *losses.PREFERENCE_LOSSES, "a loss of pairs",
             "losses with a clip range"}  # fmt: skip
    documented = {
        name.removeprefix("actor/") for name, _, _, when, _ in metric_rows()
        if name.startswith("actor/") and "<" not in name
        and not any(loss == when or f"`{loss}`" in when for loss in named)
    }  # fmt: skip
    assert documented == TAKEN - {"loss_sum", *MISMATCH_SUMS}


def test_other_functions_of_the_users_are_checked_too():
    aggregate = losses.aggregate_of(AlgoConfig(aggregation=lambda mask, *_: mask.sum()))
    with pytest.raises(ConfigError, match=r"algo.aggregation: .* tensor of shape \(\)"):
        aggregate(torch.ones(3), torch.tensor([3]), torch.ones(2), 12)
    for weigh in (torch.ones_like, lambda mask: 1 / mask - 1, lambda mask: mask / mask):
        aggregate = losses.aggregate_of(AlgoConfig(aggregation=lambda mask, *_, f=weigh: f(mask)))
        with pytest.raises(ConfigError, match=r"gave a weight to 2 masked tokens, the first of"):
            aggregate(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([3]), torch.ones(2), 12)
    seen = Outcomes(*[torch.ones(4)] * 7)
    estimate = advantage_of(AlgoConfig(advantage=lambda o: o.scores[:1]))
    with pytest.raises(ConfigError, match=r"algo.advantage: .* shape \(n,\), here \(4,\)"):
        estimate(seen)
    with_critic = Estimator(lambda o: o.scores, critic=True)
    with pytest.raises(ConfigError, match="must return a pair, advantages and returns"):
        advantage_of(AlgoConfig(advantage=with_critic))(seen)


def test_extreme_ratios_stay_finite():
    _, batch, new = objective_batch(0)
    far = (new.detach() - 400).requires_grad_()
    for name in losses.POLICY_LOSSES:
        batch.selected_mask = torch.zeros_like(far)
        algo = AlgoConfig(policy_loss=name)
        mb = replace(batch, old_logprobs=batch.old_logprobs)
        loss, _ = objectives.policy_objective(algo)(far, torch.zeros_like(far), mb)
        (grad,) = torch.autograd.grad(loss, far)
        assert math.isfinite(float(loss.detach())), name
        assert torch.isfinite(grad).all(), name
