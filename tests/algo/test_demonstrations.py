"""The loss of tokens of demonstrations against loops in float64, written from LUFFY's paper."""

import math
import random
from dataclasses import replace

import pytest
import torch
from golden_batches import batch_of, random_trajectories

from spmdrl.algo.demonstrations import policy_shaping, take_shares
from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, CorrectionConfig
from spmdrl.types import DEMONSTRATED

GIVEN = (0, 6, 13, 17)  # sequences that are demonstrations; two of them have valid tokens in groups
CLIP, GAMMA, KL, ENTROPY, NLL = 0.2, 0.1, 0.3, 0.02, 0.05
ALGO = AlgoConfig(
    demonstrations=1, kl_coef=KL, kl_estimator="k2", entropy_coef=ENTROPY, positive_nll_coef=NLL
)
CASES = {
    "luffy": ALGO,
    "no shaping": replace(ALGO, policy_shaping_gamma=None),
    "corrected": replace(ALGO, epochs=2, correction=CorrectionConfig(level="token", high=1.2)),
    "corrected in the update": replace(ALGO, correction=CorrectionConfig(level="token", high=1.2)),
    "bypass": replace(ALGO, correction=CorrectionConfig(bypass=True)),
    "pairs": AlgoConfig(demonstrations=1, policy_loss="dpo"),
}


def mixed_batch(seed):
    """A golden batch with demonstrations, in float64, and what an update is given with it."""
    batch = batch_of(random_trajectories(seed))
    for seq in GIVEN:
        tokens = slice(*batch.cu_seqlens[seq : seq + 2].tolist())
        batch.policy_version[tokens] = torch.where(batch.loss_mask[tokens] > 0, DEMONSTRATED, 0)
        batch.rollout_logprobs[tokens] = 0.0
    rng = random.Random(seed)
    noise = lambda low, high: torch.tensor(  # noqa: E731
        [rng.uniform(low, high) for _ in range(batch.num_tokens)], dtype=torch.float64
    )
    batch.advantages = noise(-1, 1) * batch.loss_mask
    batch.loss_weights = noise(0.001, 0.01) * batch.loss_mask
    batch.nll_weights = noise(0.001, 0.01) * batch.loss_mask
    double = {name: value.double() for name, value in batch.tensors() if value.is_floating_point()}
    batch = replace(batch, **double)
    logprobs = ((batch.old_logprobs + noise(-0.4, 0.4)).clamp(max=-1e-3)) * batch.loss_mask
    return batch, logprobs, noise(0, 2) * batch.loss_mask


def by_hand(batch, logprobs, entropy, name):
    """(loss, d loss / d logprob of each token, metrics), token by token."""
    algo = CASES[name]
    loss, slopes, sums = 0.0, [], {}
    values = zip(
        logprobs.tolist(), entropy.tolist(), batch.old_logprobs.tolist(),
        batch.rollout_logprobs.tolist(), batch.ref_logprobs.tolist(), batch.advantages.tolist(),
        batch.loss_weights.tolist(), batch.nll_weights.tolist(), batch.loss_mask.tolist(),
        batch.policy_version.tolist(), strict=True,
    )  # fmt: skip

    def add(key, value):
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + value, count + 1)

    for new, ent, old, engine, ref, a, weight, nll, mask, version in values:
        if not mask:
            slopes.append(0.0)
            continue
        if name == "pairs":  # the derivative of the loss stands in the advantage
            value, slope = -a * new, -a
        elif version == DEMONSTRATED:
            pi, gamma = math.exp(new), algo.policy_shaping_gamma
            value = -a * (pi if gamma is None else pi / (pi + gamma))
            slope = -a * pi * (1 if gamma is None else gamma / (pi + gamma) ** 2)
        else:
            start = engine if name == "bypass" else old
            r = math.exp(new - start)
            clipped = min(max(r, 1 - CLIP), 1 + CLIP)
            value = max(-a * r, -a * clipped)
            slope = -a * r if -a * r >= -a * clipped else 0.0
            if a < 0 and value > -a * 3.0:
                value, slope = -a * 3.0, 0.0
            if name.startswith("corrected"):
                at = old if name == "corrected" else new
                truncated = min(math.exp(at - engine), 1.2)
                value, slope = value * truncated, slope * truncated
        if name != "pairs":
            value += KL * (new - ref) ** 2 / 2 - ENTROPY * ent
            slope += KL * (new - ref)
            loss -= NLL * nll * new
        loss += weight * value
        slopes.append(weight * slope - (0.0 if name == "pairs" else NLL * nll))
        if version == DEMONSTRATED:
            add("off_policy_prob", math.exp(new))
            if name != "pairs":
                gamma = algo.policy_shaping_gamma
                pi = math.exp(new)
                add("off_ratio_mean", pi if gamma is None else pi / (pi + gamma))
        else:
            add("entropy", ent)
            add("ppo_kl", (engine if name == "bypass" else old) - new)
            add("logprob_diff_mean", abs((new if name == "bypass" else old) - engine))
    means = {key: total / count for key, (total, count) in sums.items()}
    return loss, slopes, means


def update(batch, logprobs, entropy, algo):
    """(loss, gradient, metrics as an engine's update gives them)."""
    at = logprobs.clone().requires_grad_()
    loss, sums = policy_objective(algo)(at, entropy, batch)
    (gradient,) = torch.autograd.grad(loss, at)
    count = float(batch.loss_mask.sum())
    found = {n: float(v) if n.endswith("_max") else float(v) / count for n, v in sums.items()}
    return float(loss.detach()), gradient, found, sums


@pytest.mark.parametrize("name", CASES)
def test_tokens_of_demonstrations_have_the_papers_loss(name):
    algo = CASES[name]
    batch, logprobs, entropy = mixed_batch(seed=3)
    if name == "pairs":
        batch = replace(batch, nll_weights=None)
    if name == "bypass":
        batch.old_logprobs = batch.rollout_logprobs
    if name == "corrected":  # as add_correction does before an update, on sampled tokens alone
        is_given = batch.policy_version == DEMONSTRATED
        ratio = (batch.old_logprobs - batch.rollout_logprobs).exp().clamp(max=1.2)
        batch.policy_weights = torch.where(is_given, 7.0, ratio) * batch.loss_mask
        batch.kept_mask = batch.loss_mask.clone()
    whole = batch if name != "pairs" else replace(batch, nll_weights=torch.zeros_like(entropy))
    want, slopes, means = by_hand(whole, logprobs, entropy, name)
    loss, gradient, found, _ = update(batch, logprobs, entropy, algo)
    assert loss == pytest.approx(want, rel=1e-9)
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-12)
    take_shares(found)
    assert not [key for key in found if ":" in key]
    assert found["logprob_diff_max"] < 2  # of a demonstration it would be -log pi
    for key, value in means.items():
        assert found[key] == pytest.approx(value, rel=1e-6), key
    assert ("off_ratio_mean" in found) == (name != "pairs")


def test_micro_batches_add_up():
    batch, logprobs, entropy = mixed_batch(seed=5)
    loss, _, _, sums = update(batch, logprobs, entropy, ALGO)
    halves = [range(7), range(7, batch.num_seqs)]
    totals, added = dict.fromkeys(sums, 0.0), 0.0
    for half in halves:
        first, last = (int(batch.cu_seqlens[i]) for i in (half[0], half[-1] + 1))
        part = batch.select(list(half))
        own, _, _, found = update(part, logprobs[first:last], entropy[first:last], ALGO)
        added += own
        for name, value in found.items():
            pair = totals[name], float(value)
            totals[name] = max(pair) if name.endswith("_max") else sum(pair)
    assert added == pytest.approx(loss, rel=1e-12)
    assert totals == pytest.approx({n: float(v) for n, v in sums.items()}, rel=1e-12)


def test_shaping_keeps_the_weight_of_unlikely_tokens():
    """The derivative by pi is gamma / (pi + gamma)^2: the largest where pi is 0."""
    pi = torch.tensor([1e-30, 1e-3, 0.1, 0.9], dtype=torch.float64)
    found = policy_shaping(pi.log(), 0.1)
    assert found.tolist() == pytest.approx((pi / (pi + 0.1)).tolist(), rel=1e-12)
    assert policy_shaping(pi.log(), None).tolist() == pytest.approx(pi.tolist(), rel=1e-12)


def test_an_update_without_demonstrations_is_the_plain_one():
    batch, logprobs, entropy = mixed_batch(seed=7)
    batch.policy_version.clamp_(min=0)
    plain = update(batch, logprobs, entropy, replace(ALGO, demonstrations=0))
    mixed = update(batch, logprobs, entropy, ALGO)
    assert mixed[0] == plain[0] and torch.equal(mixed[1], plain[1])
    take_shares(mixed[2])
    assert mixed[2] == pytest.approx(plain[2], rel=1e-12)
