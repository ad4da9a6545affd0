"""Estimators with another scale than their paper's, against slow loops in float64."""

import pytest
import reference
import torch
from golden_batches import random_trajectories

from spmdrl.algo.advantages import Outcomes, advantage_of
from spmdrl.config import AlgoConfig

KEYS = {"format": 0.3, "correct": 1.0}
CASES = {
    "grpo": ({"scale": "batch"}, reference.grpo_over_batch),
    "grpo_passk": ({"scale": "none"}, lambda t: reference.grpo_passk(t, divide=False)),
    "rloo": ({"normalize": True}, lambda t: reference.rloo(t, normalize=True)),
}


def outcomes_of(trs):
    """The samples as an estimator sees them; the rows are ordered by group."""

    def column(values):
        return torch.tensor(list(values), dtype=torch.float64)

    return Outcomes(
        groups=torch.tensor([tr.group for tr in trs]),
        scores=column(tr.reward if tr.valid else 0.0 for tr in trs),
        valid=column(float(tr.valid) for tr in trs),
        lengths=column(float(len(reference.policy_tokens(tr))) for tr in trs),
        greedy_rewards=column(0.0 for _ in trs),
        reward_components=torch.stack([column(tr.keys[k] for tr in trs) for k in KEYS], 1),
        process=column(0.0 for _ in trs),
    )


def estimates(name, args, trs):
    return advantage_of(AlgoConfig(advantage=name, advantage_args=args))(outcomes_of(trs))


def per_sample(trs, rows):
    """{sample: its number}, of those that have a token of the policy's."""
    return {i: rows[i][reference.policy_tokens(tr)[0]] for i, tr in enumerate(trs)
            if reference.policy_tokens(tr)}  # fmt: skip


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", CASES)
def test_advantages_are_those_of_the_loops(name, seed):
    args, loop = CASES[name]
    trs = sorted(random_trajectories(seed, binary=seed % 2 == 1), key=lambda tr: tr.group)
    got, plain = estimates(name, args, trs), estimates(name, {}, trs)
    want = per_sample(trs, loop(trs))
    for i, value in want.items():
        assert float(got[i]) == pytest.approx(value, rel=1e-7, abs=1e-9)
    binary_passk = name == "grpo_passk" and seed % 2 == 1  # every group has a tie: all are 0
    assert binary_passk or any(abs(float(got[i] - plain[i])) > 1e-2 for i in want)


@pytest.mark.parametrize("seed", range(6))
def test_gdpo_without_the_deviations(seed):
    """Before it is whitened, which is not the estimator's own."""
    trs = sorted(random_trajectories(seed), key=lambda tr: tr.group)
    got = estimates("gdpo", {"reward_keys": KEYS, "scale": "none"}, trs)
    for members in reference.groups(trs).values():
        for i in members if len(members) > 1 else ():
            want = sum(
                w * (trs[i].keys[k] - reference.mean(trs[j].keys[k] for j in members))
                for k, w in KEYS.items()
            )
            assert float(got[i]) == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert float(got.abs().max()) > 0.1


def test_a_step_of_one_sample_or_of_equal_rewards_has_no_advantage():
    trs = sorted(random_trajectories(0), key=lambda tr: tr.group)
    for tr in trs:
        tr.reward = 0.5
    for some in (trs, trs[:1], [tr for tr in trs if not tr.valid][:1]):
        for name, (args, _) in CASES.items():
            got = estimates(name, args, some)
            assert torch.isfinite(got).all() and float(got.abs().max()) == 0, name
