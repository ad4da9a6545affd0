"""The policy loss in one pass against the plain form: float64 truth, metrics and gradients."""

from dataclasses import replace

import pytest
import torch
from spmdrl_kernels import policy_loss
from spmdrl_kernels.policy_loss_terms import ALIASES, CONSTANTS, KL_ESTIMATORS
from triton_tests import DEVICE, READY, no_worse, run_interpreted

from spmdrl.algo.correction import TESTS
from spmdrl.algo.kl import ESTIMATORS
from spmdrl.algo.losses import AGGREGATIONS, POLICY_LOSSES, aggregate_of, loss_counts
from spmdrl.algo.objectives import kernel_terms, policy_objective
from spmdrl.algo.options import options_of
from spmdrl.config import AlgoConfig, CorrectionConfig
from spmdrl.data.packing import empty_batch
from spmdrl.segments import segment_expand

pytestmark = pytest.mark.compiles

SETTINGS = {
    "dppo_tv": {"clip_low": 0.02, "clip_high": 0.03, "ratio_cap": 1.2},
    "dppo_kl": {"clip_low": 0.002, "clip_high": 0.003, "ratio_cap": 1.2},
    "ppo": {"dual_clip": 1.4}, "gspo": {"clip_low": 0.03, "clip_high": 0.05},
    "dro": {"beta": 0.7}, "sppo": {"beta": 0.4}, "kl_cov": {"cov_kl_coef": 0.7},
}  # fmt: skip
NAMES = sorted(name for name in POLICY_LOSSES if ALIASES.get(name, name) in CONSTANTS)
KLS = sorted(ESTIMATORS)


def no_room(name):
    """Clip ranges that let no ratio move, of the losses that have them."""
    bounds = {"clip_low": 0.0, "clip_high": 0.0, "dual_clip": 1.0}
    known = options_of(POLICY_LOSSES[name].function)
    return {option: bound for option, bound in bounds.items() if option in known}


def fresh(shape, g, scale=1.0):
    return scale * torch.randn(shape, generator=g)


def batch_of(seed, lens=(40, 0, 1, 63, 17, 0, 5), spread=0.3, aggregation="token_mean"):
    """A micro-batch of ragged sequences, one of them without a token to train on; every field."""
    g = torch.Generator().manual_seed(seed)
    batch = empty_batch(torch.tensor(lens, dtype=torch.int64), num_keys=0)
    n = batch.num_tokens
    mask = (torch.rand(n, generator=g) > 0.3).float()
    if len(lens) > 4:
        mask[batch.cu_seqlens[4] : batch.cu_seqlens[5]] = 0

    def near(base):
        return (base + fresh(n, g, spread)).clamp(max=0.0) * mask

    old = -3 * torch.rand(n, generator=g) * mask
    own = fresh(len(lens), g)  # the losses of sequences take one advantage for all tokens
    kept = mask * (torch.rand(n, generator=g) > 0.1)
    counts = loss_counts(mask, batch.seq_lens)
    algo = AlgoConfig(aggregation=aggregation)
    batch = replace(
        batch, loss_mask=mask, old_logprobs=old, rollout_logprobs=near(old), ref_logprobs=near(old),
        advantages=(segment_expand(own, batch.seq_lens) + 0.2 * fresh(n, g)) * mask,
        kept_mask=kept, policy_weights=torch.rand(n, generator=g) * kept,
        nll_weights=torch.rand(n, generator=g) * mask / 30,
        selected_mask=(torch.rand(n, generator=g) > 0.8).float() * mask,
        loss_weights=aggregate_of(algo)(kept, batch.seq_lens, counts, 50),
    )  # fmt: skip
    return near(old), torch.rand(n, generator=g) * mask, batch.to(torch.device(DEVICE))


def as_dtype(batch, dtype):
    wide = {n: t.to(dtype) for n, t in batch.tensors() if t.dtype == torch.float32}
    return replace(batch, **wide)


def run(algo, logprobs, entropy, batch, dtype, monkeypatch, kernel=False, **coefs):
    """Loss, both gradients (0 where there is none) and the metrics by name."""
    monkeypatch.setattr(policy_loss, "on_triton", lambda *t: kernel)
    leaves = [t.to(DEVICE, dtype).requires_grad_() for t in (logprobs, entropy)]
    loss, sums = policy_objective(algo, **coefs)(*leaves, as_dtype(batch, dtype))
    grads = torch.autograd.grad(3.0 * loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    return loss.detach(), grads, sums


def compare(algo, logprobs, entropy, batch, monkeypatch, **coefs):
    args = (algo, logprobs, entropy, batch)
    truth = run(*args, torch.float64, monkeypatch, **coefs)
    plain = run(*args, torch.float32, monkeypatch, **coefs)
    ours = run(*args, torch.float32, monkeypatch, kernel=True, **coefs)
    assert list(ours[2]) == list(plain[2])
    flat = [
        [loss.reshape(1), *grads, *(v.reshape(1) for v in sums.values())]
        for loss, grads, sums in (ours, truth, plain)
    ]
    names = ["loss", "to logprobs", "to entropy", *ours[2]]
    for name, got, want, other in zip(names, *flat, strict=True):
        assert got.dtype == torch.float32
        finite = torch.isfinite(want.float())
        assert torch.equal(torch.isfinite(got), finite), name
        no_worse(got[finite], want[finite], other[finite])
    return ours


if not READY:

    def test_interpreted():
        run_interpreted(__file__)

else:

    @pytest.fixture(autouse=True)
    def poison():
        """torch.empty is full of NaN."""
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)

    def test_every_loss_estimator_and_constant_has_its_place():
        assert set(KLS) == KL_ESTIMATORS
        known = set(CONSTANTS)
        assert known == {ALIASES.get(name, name) for name in NAMES}
        for name in NAMES:
            constants = CONSTANTS[ALIASES.get(name, name)]
            assert set(constants) <= set(options_of(POLICY_LOSSES[name].function))

    @pytest.mark.parametrize("kl", KLS)
    @pytest.mark.parametrize("name", NAMES)
    def test_every_loss_with_every_estimator(name, kl, monkeypatch):
        """Everything that can be in it at once; weights of one aggregation after the other."""
        at = NAMES.index(name) + KLS.index(kl)
        aggregation = sorted(AGGREGATIONS)[at % len(AGGREGATIONS)]
        logprobs, entropy, batch = batch_of(at, aggregation=aggregation)
        algo = AlgoConfig(policy_loss=name, kl_estimator=kl, kl_coef=0.1, entropy_coef=0.02,
                          positive_nll_coef=0.3, loss_args=SETTINGS.get(name, {}))  # fmt: skip
        compare(algo, logprobs, entropy, batch, monkeypatch)

    @pytest.mark.parametrize("name", NAMES)
    def test_every_loss_where_nothing_is_optional(name, monkeypatch):
        """One update per rollout: the old policy is the policy at hand; no reference."""
        logprobs, entropy, batch = batch_of(100 + NAMES.index(name))
        absent = ("old_logprobs", "ref_logprobs", "policy_weights", "kept_mask", "nll_weights")
        batch = replace(batch, **dict.fromkeys(absent))
        algo = AlgoConfig(policy_loss=name, loss_args=SETTINGS.get(name, {}))
        _, grads, sums = compare(algo, logprobs, entropy, batch, monkeypatch)
        assert float(sums["ratio_max"]) == 1
        assert name in ("sppo", "dppo_tv", "dppo_kl") or float(grads[0].abs().max()) > 1e-4

    @pytest.mark.parametrize("name", ["ppo", "reinforce", "geo_mean", "sppo"])
    @pytest.mark.parametrize("level", ["off", "token", "sequence"])
    def test_bypass_weighs_by_the_policy_at_hand(name, level, monkeypatch):
        logprobs, entropy, batch = batch_of(7)
        correction = CorrectionConfig(bypass=True, level=level, reject={sorted(TESTS)[-2]: 0.02})
        batch = replace(
            batch, old_logprobs=batch.rollout_logprobs, policy_weights=None, kept_mask=None
        )
        algo = AlgoConfig(policy_loss=name, correction=correction)
        _, _, sums = compare(algo, logprobs, entropy, batch, monkeypatch)
        assert 0 < float(sums["rejected"]) < float(batch.loss_mask.sum())

    def test_a_coefficient_of_the_step_takes_the_place_of_the_configs(monkeypatch):
        logprobs, entropy, batch = batch_of(8)
        algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.2)
        losses = [
            float(compare(algo, logprobs, entropy, batch, monkeypatch, **coefs)[0])
            for coefs in ({}, {"kl_coef": 0.4}, {"entropy_coef": 0.0}, {"kl_coef": 0.0})
        ]
        assert len(set(losses)) == 4
        in_reward = replace(algo, kl_in="reward")  # the estimate is a metric alone
        got = compare(in_reward, logprobs, entropy, batch, monkeypatch)
        assert float(got[0]) == losses[3]
        assert float(got[2]["ref_kl"]) > 0

    @pytest.mark.parametrize("name", NAMES)
    def test_what_a_masked_place_holds_is_not_looked_at(name, monkeypatch):
        logprobs, entropy, batch = batch_of(9)
        algo = AlgoConfig(policy_loss=name, kl_coef=0.1, entropy_coef=0.1, positive_nll_coef=0.1)
        want = run(algo, logprobs, entropy, batch, torch.float32, monkeypatch, kernel=True)
        masked = batch.loss_mask == 0
        bad = {
            field: torch.where(masked, [torch.nan, torch.inf, -torch.inf][i % 3], tensor)
            for i, (field, tensor) in enumerate(batch.tensors())
            if tensor.dtype == torch.float32 and tensor.shape == masked.shape
            and field != "loss_mask"
        }  # fmt: skip
        assert len(bad) == 9
        logprobs, entropy = (
            torch.where(masked, torch.nan, t.to(DEVICE)) for t in (logprobs, entropy)
        )
        mb = replace(batch, **bad)
        got = run(algo, logprobs, entropy, mb, torch.float32, monkeypatch, kernel=True)
        assert torch.equal(got[0], want[0])
        assert all(torch.equal(a, b) for a, b in zip(got[1], want[1], strict=True))
        assert all(torch.equal(got[2][key], want[2][key]) for key in want[2])
        assert (got[1][0][masked] == 0).all()
        assert (got[1][1][masked] == 0).all()

    @pytest.mark.parametrize("name", NAMES)
    def test_log_ratios_far_out_and_at_the_ends_of_clamps(name, monkeypatch):
        """Of 80 and more, exactly 20, exactly 0 where nothing may move (equal arguments)."""
        _, entropy, batch = batch_of(10, lens=(30, 30, 4))
        at = torch.tensor([80.0, -80.0, 20.0, -20.0, 0.0, 20.5, -19.5, 0.0]).repeat(8)
        batch = replace(batch, old_logprobs=torch.full((64,), -50.0, device=DEVICE))
        new = (batch.old_logprobs.cpu() + at) * batch.loss_mask.cpu()
        for algo in (
            AlgoConfig(policy_loss=name, kl_coef=0.1, kl_estimator="k3"),
            AlgoConfig(policy_loss=name, loss_args=no_room(name)),
        ):
            compare(algo, new, entropy, batch, monkeypatch)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_not_finite_is_not_hidden(bad, monkeypatch):
        for name in NAMES:
            logprobs, entropy, batch = batch_of(11, lens=(20,))
            where = int((batch.kept_mask > 0).nonzero()[3])
            logprobs[where] = bad
            algo = AlgoConfig(policy_loss=name)
            args = (algo, logprobs, entropy, batch)
            want = run(*args, torch.float32, monkeypatch)
            got = run(*args, torch.float32, monkeypatch, kernel=True)
            for a, b in zip((got[0], *got[2].values()), (want[0], *want[2].values()), strict=True):
                assert torch.isnan(a) == torch.isnan(b), (name, list(got[2]))
                assert torch.isinf(a) == torch.isinf(b), (name, list(got[2]))
            if torch.isfinite(want[0]):
                torch.testing.assert_close(got[1][0], want[1][0], msg=name)

    @pytest.mark.parametrize("lens", [(), (0,), (0, 0), (1,), (64,), (65,), (60, 0, 5, 63, 200)])
    @pytest.mark.parametrize("name", ["ppo", "gspo", "geo_mean"])
    def test_sizes(name, lens, monkeypatch):
        logprobs, entropy, batch = batch_of(12, lens=lens)
        algo = AlgoConfig(policy_loss=name, kl_coef=0.1, entropy_coef=0.1)
        compare(algo, logprobs, entropy, batch, monkeypatch)
        nothing = {n: torch.zeros_like(t) for n, t in batch.tensors() if t.dtype == torch.float32}
        batch = replace(batch, **nothing)  # not a token to train on
        loss, grads, _ = compare(algo, logprobs, entropy, batch, monkeypatch)
        assert float(loss) == 0
        assert all((g == 0).all() for g in grads)

    def test_only_what_is_asked_for(monkeypatch):
        """Without gradients, with one of the two, twice, of parts of larger tensors."""
        logprobs, entropy, batch = batch_of(13)
        logprobs, entropy = logprobs.to(DEVICE), entropy.to(DEVICE)
        objective = policy_objective(AlgoConfig(entropy_coef=0.1))
        monkeypatch.setattr(policy_loss, "on_triton", lambda *t: True)
        with torch.no_grad():
            want, sums = objective(logprobs, entropy, batch)
        assert not want.requires_grad
        both = torch.stack([logprobs, entropy], 1).requires_grad_()
        loss, again = objective(*both.unbind(1), batch)
        assert torch.equal(loss.detach(), want)
        assert all(torch.equal(sums[key], again[key]) for key in sums)
        assert not any(value.requires_grad for value in again.values())
        (grad,) = torch.autograd.grad(loss, both, retain_graph=True)
        assert torch.equal(grad, torch.autograd.grad(loss, both)[0])
        alone = entropy.clone().requires_grad_()
        (found,) = torch.autograd.grad(objective(logprobs, alone, batch)[0], alone)
        assert torch.equal(found, grad[:, 1])
        alone = logprobs.clone().requires_grad_()
        (found,) = torch.autograd.grad(objective(alone, entropy, batch)[0], alone)
        assert torch.equal(found, grad[:, 0])

    def test_a_named_loss_that_the_kernel_has_not_got_stays_on_the_plain_form(monkeypatch):
        monkeypatch.setitem(POLICY_LOSSES, "mine", POLICY_LOSSES["ppo"])
        assert kernel_terms(AlgoConfig(policy_loss="mine"), 0.0, 0.0) is None
        assert kernel_terms(AlgoConfig(policy_loss="ppo"), 0.0, 0.0) is not None

    def test_functions_of_the_users_stay_on_the_plain_form(monkeypatch):
        def mine(logprobs, old_logprobs, mb):
            return -logprobs * 2, {}

        logprobs, entropy, batch = batch_of(14)
        batch = replace(batch, advantages=None, policy_weights=None)
        for algo in (AlgoConfig(policy_loss=mine), AlgoConfig(kl_estimator=lambda p, q: p - q)):
            assert kernel_terms(algo, 0.0, 0.0) is None
        loss, _, _ = run(AlgoConfig(policy_loss=mine), logprobs, entropy, batch, torch.float32,
                         monkeypatch, kernel=True)  # fmt: skip
        torch.testing.assert_close(loss, (-2 * logprobs.to(DEVICE) * batch.loss_weights).sum())
