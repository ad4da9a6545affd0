"""Estimators and losses against loops written from the papers, on ragged batches with holes."""

import random

import pytest
import torch

from spmdrl.algo import advantages as adv
from spmdrl.algo import kl
from spmdrl.algo.losses import POLICY_LOSSES, loss_weights, policy_objective, value_loss
from spmdrl.config import AlgoConfig
from spmdrl.packing import empty_batch


def ragged(seed, lens=(7, 1, 12, 5)):
    """Lengths and a mask with a prompt at the front and holes in the middle."""
    g = torch.Generator().manual_seed(seed)
    seq_lens = torch.tensor(lens)
    mask = (torch.rand(int(seq_lens.sum()), generator=g) > 0.35).float()
    start = 0
    for n in lens:
        mask[start] = 0
        start += n
    return seq_lens, mask, g


@pytest.mark.parametrize("seed", range(5))
def test_grpo(seed):
    rng = random.Random(seed)
    groups = [rng.choice([0, 0, 3, 3, 3, 7, 9]) for _ in range(20)] + [42]
    scores = [rng.choice([0.0, 1.0, rng.random()]) for _ in groups]
    valid = [float(rng.random() > 0.2) for _ in groups]
    want = []
    for g, s, ok in zip(groups, scores, valid, strict=True):
        mates = [s2 for g2, s2, ok2 in zip(groups, scores, valid, strict=True) if g2 == g and ok2]
        if not ok or len(mates) < 2:
            want.append(0.0)
            continue
        mean = sum(mates) / len(mates)
        std = (sum((m - mean) ** 2 for m in mates) / (len(mates) - 1)) ** 0.5
        want.append((s - mean) / (std + 1e-6))
    got = adv.grpo(*(torch.tensor(x, dtype=torch.float64) for x in (scores,)),
                   torch.tensor(groups), torch.tensor(valid, dtype=torch.float64))  # fmt: skip
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_grpo_group_of_one_is_zero_and_not_its_score():
    got = adv.grpo(torch.tensor([5.0]).double(), torch.tensor([0]), torch.ones(1).double())
    assert got.tolist() == [0.0]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.97, 0.9), (1.0, 0.0)])
def test_gae_skips_masked_tokens(seed, gamma, lam):
    seq_lens, mask, g = ragged(seed)
    rewards = torch.randn(len(mask), generator=g) * mask
    values = torch.randn(len(mask), generator=g) * mask
    got, returns = adv.gae(rewards, values, mask, seq_lens, gamma, lam)
    want = torch.zeros(len(mask), dtype=torch.float64)
    end = 0
    for n in seq_lens.tolist():
        start, end = end, end + n
        next_value, running = 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            if not mask[t]:
                continue
            delta = float(rewards[t]) + gamma * next_value - float(values[t])
            running = delta + gamma * lam * running
            next_value = float(values[t])
            want[t] = running
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(returns, (got + values) * mask)


def test_token_rewards_sit_on_the_last_unmasked_token():
    seq_lens = torch.tensor([4, 3, 2])
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1, 0, 0.0])  # the last sequence has no token to train
    kl_per_token = torch.full((9,), 0.5)
    got = adv.token_rewards(torch.tensor([2.0, 3.0, 9.0]), mask, seq_lens, kl_per_token, 0.1)
    want = torch.tensor([0, -0.05, 1.95, 0, 0, -0.05, 2.95, 0, 0])
    torch.testing.assert_close(got, want)


def test_whitening_uses_the_moments_of_all_ranks():
    _, mask, g = ragged(3)
    values = torch.randn(len(mask), generator=g) * 3 + 5
    parts = [slice(0, 9), slice(9, None)]  # two ranks
    moments = sum(adv.token_moments(values[p], mask[p]) for p in parts)
    white = torch.cat([adv.whiten(values[p], mask[p], moments) for p in parts])
    kept = white[mask.bool()].double()
    assert abs(kept.mean()) < 1e-6
    assert abs(kept.std() - 1) < 1e-6
    assert (white[~mask.bool()] == 0).all()


@pytest.mark.parametrize("seed", range(3))
def test_ppo_loss_and_gradient(seed):
    algo = AlgoConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    g = torch.Generator().manual_seed(seed)
    new, old, advantage = (torch.randn(300, generator=g).double() for _ in range(3))
    new.requires_grad_()
    losses, metrics = POLICY_LOSSES["ppo"](new, old, advantage, algo)
    (grad,) = torch.autograd.grad(losses.sum(), new)
    for i in range(300):
        x = new[i].detach().clone().requires_grad_()
        r, a = (x - old[i]).exp(), float(advantage[i])
        want = max(-a * r, -a * r.clamp(1 - 0.2, 1 + 0.28))
        if a < 0:
            want = min(want, torch.tensor(-a * 3.0).double())
        torch.testing.assert_close(losses[i].detach(), want.detach())
        want_grad = torch.autograd.grad(want, x)[0] if want.requires_grad else torch.tensor(0.0)
        torch.testing.assert_close(grad[i], want_grad.double())
    assert 0 < float(metrics["clip_fraction"].mean()) < 1


@pytest.mark.parametrize("name", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_aggregation_is_a_weighted_sum(name):
    seq_lens, mask, g = ragged(1)
    losses = torch.randn(len(mask), generator=g)
    lens = seq_lens.tolist()
    per_seq = [x[m.bool()] for x, m in zip(losses.split(lens), mask.split(lens), strict=True)]
    per_seq = [x for x in per_seq if len(x)]  # a sequence without tokens does not count
    want = {
        "token_mean": torch.cat(per_seq).mean(),
        "seq_mean_token_mean": torch.stack([x.mean() for x in per_seq]).mean(),
        "seq_mean_token_sum": torch.stack([x.sum() for x in per_seq]).mean(),
    }[name]
    response_lens = torch.tensor([float(m.sum()) for m in mask.split(lens)])
    counts = torch.tensor([response_lens.sum(), (response_lens > 0).sum()], dtype=torch.float64)
    weights = loss_weights(mask, seq_lens, response_lens, name, counts)
    torch.testing.assert_close((losses * weights).sum(), want)


def test_value_loss_takes_the_larger_of_plain_and_clipped():
    values, old, returns = torch.tensor([[2.0, 0.1], [0.0, 0.0], [3.0, 1.0]])
    got = value_loss(values, old, returns, clip=0.5)
    torch.testing.assert_close(got, torch.tensor([0.5 * 2.5**2, 0.5 * 0.9**2]))


def test_kl_estimators():
    p = torch.log_softmax(torch.randn(50).double(), -1)
    q = torch.log_softmax(torch.randn(50).double(), -1)
    exact = float((p.exp() * (p - q)).sum())
    for name in ("k1", "k3"):  # unbiased: exact in expectation under p
        assert float((p.exp() * kl.ESTIMATORS[name](p, q)).sum()) == pytest.approx(exact)
    assert (kl.k3(p, q) >= 0).all()
    torch.testing.assert_close(kl.k2(p, q), (p - q) ** 2 / 2)


def test_objective_masks_and_reports_the_rollout_difference():
    batch = empty_batch(torch.tensor([3, 2]))
    batch.loss_mask = torch.tensor([0, 1, 1, 0, 0.0])  # the second sample is invalid
    batch.rollout_logprobs = torch.tensor([0, -1.0, -2.0, 0, 0])
    batch.advantages = torch.tensor([9, 1.0, 1.0, 9, 9])
    batch.loss_weights = batch.loss_mask / 2
    logprobs = torch.tensor([5, -1.5, -2.0, 5, 5], requires_grad=True)
    loss, sums = policy_objective(AlgoConfig())(logprobs, torch.zeros(5), batch)
    assert float(loss.detach()) == pytest.approx(-1.0)  # ratio 1: old is the policy itself
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert grad.tolist() == [0, -0.5, -0.5, 0, 0]
    assert float(sums["ratio_max"]) == 1.0
    assert float(sums["logprob_diff_max"]) == pytest.approx(0.5)
    assert float(sums["logprob_diff_mean"]) == pytest.approx(0.5)
