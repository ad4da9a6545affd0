"""Off-policy sequence masking and the bias-corrected KL of DeepSeek-V3.2, against slow loops."""

from dataclasses import replace

import pytest
import reference
import torch
from test_losses import case_of, flat_gradients, leaves, rows_of

from spmdrl.algo import kl, losses, objectives
from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, CorrectionConfig

THRESHOLD = 0.05


def batch_with_weights(seed, per_sequence=True):
    trs, batch, new = case_of(seed, per_sequence)
    counts = losses.loss_counts(batch.loss_mask, batch.seq_lens)
    batch.loss_weights = losses.token_mean(batch.loss_mask, batch.seq_lens, counts, 1)
    batch.rollout_logprobs = batch.rollout_logprobs * batch.loss_mask
    for tr, row in zip(trs, rows_of(batch.rollout_logprobs, batch), strict=True):
        tr.rollout = row
    return trs, batch, new


@pytest.mark.parametrize("per_sequence", [True, False])
@pytest.mark.parametrize("seed", [0, 2, 3])  # with 1 no sequence is bad and has drifted
def test_a_bad_sequence_that_has_drifted_has_no_policy_loss(seed, per_sequence):
    trs, batch, new = batch_with_weights(seed, per_sequence)
    algo = AlgoConfig(off_policy_mask_threshold=THRESHOLD)
    loss, sums = policy_objective(algo)(new, torch.zeros_like(new), batch)
    (got_grad,) = torch.autograd.grad(loss, new)
    rows, adv = leaves(rows_of(new.detach(), batch)), rows_of(batch.advantages, batch)
    masked = reference.off_policy_masked(rows_of(new.detach(), batch), trs, adv, THRESHOLD)
    terms = reference.ppo_loss(rows, trs, adv, 0.2, 0.2, 3.0)
    terms = [[x * (not m) for x, m in zip(*row, strict=True)]
             for row in zip(terms, masked, strict=True)]  # fmt: skip
    want = reference.aggregate("token_mean", terms, trs)
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got_grad, flat_gradients([[want]], rows), rtol=1e-6, atol=1e-9)
    count = sum(map(sum, masked))
    assert float(sums["off_policy_masked"]) == count > 0
    assert count < float(batch.loss_mask.sum())


@pytest.mark.parametrize(
    "correction",
    [
        CorrectionConfig(),
        CorrectionConfig(bypass=True),
        CorrectionConfig(bypass=True, reject={"token_k1": (0.8, 1.3)}),
    ],
    ids=str,
)
def test_the_mask_is_beside_the_weights_and_spares_the_kl(correction):
    """What is masked has the loss of an advantage of 0: the KL and the entropy stay."""
    _, batch, new = batch_with_weights(0)
    entropy = torch.rand_like(new.detach()) * batch.loss_mask
    if correction.bypass:
        batch.old_logprobs = batch.rollout_logprobs
    else:
        batch.policy_weights = torch.rand_like(new.detach()) * batch.loss_mask
    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.2, correction=correction)
    with_mask = replace(algo, off_policy_mask_threshold=THRESHOLD)
    loss, sums = policy_objective(with_mask)(new, entropy, batch)
    near = objectives.near_policy(new.detach(), batch, THRESHOLD)
    assert 0 < float((1 - near).sum()) < float(batch.loss_mask.sum())
    other = replace(batch, advantages=batch.advantages * near)
    want, plain = policy_objective(algo)(new, entropy, other)
    torch.testing.assert_close(loss, want)
    for name in plain.keys() & {"correction_weight", "rejected", "ref_kl", "entropy"}:
        torch.testing.assert_close(sums[name], plain[name])


@pytest.mark.parametrize("seed", range(3))
def test_the_corrected_kl_is_k3_times_the_ratio(seed):
    trs, batch, new = batch_with_weights(seed)
    batch.advantages = torch.zeros_like(new.detach())
    batch.ref_logprobs = batch.ref_logprobs.double()
    algo = AlgoConfig(kl_coef=0.5, kl_bias_correction=True)
    loss, sums = policy_objective(algo)(new, torch.zeros_like(new), batch)
    (got_grad,) = torch.autograd.grad(loss, new)
    rows, ref = leaves(rows_of(new.detach(), batch)), rows_of(batch.ref_logprobs, batch)
    terms = reference.on_tokens(trs, lambda i, t: (
        reference.ratio(rows, trs, i, t) * reference.kl("k3", rows[i][t], ref[i][t])))  # fmt: skip
    want = 0.5 * reference.aggregate("token_mean", terms, trs)
    torch.testing.assert_close(loss.detach(), want.detach(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(got_grad, flat_gradients([[want]], rows), rtol=1e-6, atol=1e-9)
    total = float(sum(x for row in terms for x in row).detach())
    assert float(sums["ref_kl"]) == pytest.approx(total, rel=1e-6)


@pytest.mark.parametrize("is_old", [True, False], ids=["on policy", "off policy"])
def test_the_corrected_kl_is_unbiased_and_so_is_its_gradient(is_old):
    """Exact over a small vocabulary, with samples of another policy than the one at hand."""
    torch.manual_seed(0)
    logits = torch.randn(50, dtype=torch.float64, requires_grad=True)
    q = torch.log_softmax(torch.randn(50).double(), -1)
    p = torch.log_softmax(logits, -1)
    old = p.detach() if is_old else torch.log_softmax(torch.randn(50).double(), -1)
    exact = (p.exp() * (p - q)).sum()
    (exact_grad,) = torch.autograd.grad(exact, logits, retain_graph=True)
    corrected = objectives.kl_in_loss(AlgoConfig(kl_coef=1.0, kl_bias_correction=True))
    expected = (old.exp() * corrected(p, old, q)).sum()
    (grad,) = torch.autograd.grad(expected, logits, retain_graph=True)
    torch.testing.assert_close(expected, exact)
    torch.testing.assert_close(grad, exact_grad)
    (plain,) = torch.autograd.grad((old.exp() * kl.k3(p, q)).sum(), logits)
    assert float((plain - exact_grad).abs().max()) > 1e-2
