"""Advantages and weights against slow loops from the papers, on samples spread over gloo ranks."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import reference
import torch
from golden_batches import batch_of, flat, random_trajectories
from ranks import run_calls

from spmdrl.algo.algorithm import Algorithm
from spmdrl.config import (
    AlgoConfig,
    CorrectionConfig,
    DataConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
)
from spmdrl.data.packing import pack_samples
from spmdrl.types import Prompt, Sample

pytestmark = pytest.mark.ranks

BASE = PpoConfig(
    model="-", data=DataConfig(train="-"), reward="gsm8k", rollout=RolloutConfig(n=4, max_tokens=12)
)
SEEDS = range(6)


def args(**options):
    return {"advantage_args": options}


ESTIMATORS = {
    "gae": (args(gamma=0.97, lam=0.9), lambda t: reference.gae(t, 0.97, 0.9)[0]),
    "gae decoupled": (
        args(gamma=1.0, lam=0.95, lam_critic=1.0),
        lambda t: reference.gae(t, 1.0, 0.95, 1.0)[0],
    ),
    "gae length-adaptive": (
        args(lam_alpha=0.3, lam_critic=1.0),
        lambda t: reference.gae(t, 1.0, 1.0, 1.0, 0.3)[0],
    ),
    "grpo": ({}, reference.grpo),
    "grpo over the batch": (args(scale="batch"), reference.grpo_over_batch),
    "dr_grpo": ({}, reference.dr_grpo),
    "grpo_passk": ({}, reference.grpo_passk),
    "grpo_passk undivided": (args(scale="none"), lambda t: reference.grpo_passk(t, False)),
    "gdpo undivided": (
        args(reward_keys={"format": 0.3, "correct": 1.0}, scale="none"),
        lambda t: reference.gdpo(t, {"format": 0.3, "correct": 1.0}, divide=False),
    ),
    "gdpo": (
        args(reward_keys={"format": 0.3, "correct": 1.0}),
        lambda t: reference.gdpo(t, {"format": 0.3, "correct": 1.0}),
    ),
    "gdpo of samples": (
        args(reward_keys={"format": 0.3, "correct": 1.0}) | {"whiten_over": "samples"},
        lambda t: reference.gdpo(t, {"format": 0.3, "correct": 1.0}, over="samples"),
    ),
    "reinforce": (args(gamma=0.9), lambda t: reference.reinforce(t, 0.9)),
    "reinforce without return": (args(gamma=0.0), lambda t: reference.reinforce(t, 0.0)),
    "reinforce of half the reward": (
        args(gamma=0.9) | {"reward_coef": 0.5},
        lambda t: [[x / 2 for x in row] for row in reference.reinforce(t, 0.9)],
    ),
    "remax of half the reward": (
        {"reward_coef": 0.5},
        lambda t: [[x / 2 for x in row] for row in reference.remax(t, 1.0)],
    ),
    "reinforce_plus_plus": (args(gamma=0.9), lambda t: reference.reinforce_plus_plus(t, 0.9)),
    "reinforce_plus_plus_baseline": ({}, reference.reinforce_plus_plus_baseline),
    "remax": (args(gamma=0.95), lambda t: reference.remax(t, 0.95)),
    "rloo": ({}, reference.rloo),
    "rloo normalised": (args(normalize=True), lambda t: reference.rloo(t, True)),
    "opo": ({}, reference.opo),
    "gpg": ({}, reference.gpg),
    "optimal_token_baseline": ({}, reference.optimal_token_baseline),
    "tir_optimal_token_baseline": ({}, lambda t: reference.optimal_token_baseline(t, True)),
    "tir_optimal_token_baseline zero tail": (
        args(zero_tail=True),
        lambda t: reference.optimal_token_baseline(t, True, True),
    ),
    "optimal_token_baseline with weights of tokens": (
        {"correction": CorrectionConfig(level="token", high=1.3)},
        lambda t: reference.optimal_token_baseline(
            t, corrections=reference.rollout_weights(t, "token", "truncate", 0.5, 1.3, False)
        ),
    ),
    "tir_optimal_token_baseline with weights of sequences": (
        {"correction": CorrectionConfig(level="sequence", mode="mask", high=1.5, normalize=True)},
        lambda t: reference.optimal_token_baseline(
            t, True, corrections=reference.rollout_weights(t, "sequence", "mask", 0.5, 1.5, True)
        ),
    ),
    "prime": (args(gamma=0.9), lambda t: reference.prime(t, 0.9)),
    "win_rate": ({}, reference.win_rate),
}


def config_of(case):
    changes, _ = ESTIMATORS[case]
    return replace(BASE, algo=AlgoConfig(advantage=case.split()[0], **changes))


def estimates_on(topology, cases):
    """{(case, seed): (sequence numbers, advantages, returns, metrics)} of this rank."""
    from spmdrl.training.credit import add_advantages, add_correction

    results = {}
    for case in cases:
        for seed in SEEDS:
            trs = random_trajectories(seed, binary=seed % 2 == 1)
            order = random.Random(seed).sample(range(len(trs)), len(trs))
            mine = order[topology.rank :: topology.world]
            batch = batch_of(trs).select(mine)
            if config_of(case).algo.advantage != "prime":
                batch.prm_logprobs = None
            half = len(mine) // 2  # two mini-batches: statistics are of the step
            parts = [batch.select(list(range(half))), batch.select(list(range(half, len(mine))))]
            if config_of(case).algo.correction.level != "off":
                add_correction(parts, config_of(case).algo, topology)
            metrics = add_advantages(
                parts, config_of(case), Algorithm.of(config_of(case).algo), 0.0, topology
            )
            advantages = torch.cat([p.advantages for p in parts])
            returns = None if parts[0].returns is None else torch.cat([p.returns for p in parts])
            results[case, seed] = (mine, advantages, returns, metrics)
    return results


FILTERS = ("pow", "max_min", "max_random")


@pytest.fixture(scope="module")
def runs():
    """{world: {case: what each rank got}}; each world starts once."""
    found = {}
    for world in (1, 2, 3):
        calls = {"estimates": (estimates_on, (list(ESTIMATORS),)),
                 "corrections": (corrections_on, ()), "per turn": (per_turn_on, ())}  # fmt: skip
        if world < 3:
            calls |= {"kl in reward": (kl_in_reward_on, ()), "kept": (kept_of_the_counts_on, ()),
                      "tokens": (tokens_on, (0.2,))}  # fmt: skip
            calls |= {name: (resampled_on, (name,)) for name in FILTERS}
        found[world] = dict(zip(calls, run_calls(world, calls.values()), strict=True))
    return found


@pytest.fixture(scope="module")
def estimates(runs):
    return {world: cases["estimates"] for world, cases in runs.items()}


@pytest.mark.parametrize("case", ESTIMATORS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_advantages_are_those_of_the_paper(estimates, world, case):
    largest = 0.0
    for seed in SEEDS:
        trs = random_trajectories(seed, binary=seed % 2 == 1)
        want = ESTIMATORS[case][1](trs)
        largest = max(largest, *(abs(x) for row in want for x in row))
        for per_rank in estimates[world]:
            mine, got, _, _ = per_rank[case, seed]
            expected = flat([want[i] for i in mine])
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, msg=f"{case} {seed}")
    assert largest > 0.1


def test_returns_of_the_critic_are_not_whitened(estimates):
    for case, args in (("gae", (0.97, 0.9)), ("gae decoupled", (1.0, 0.95, 1.0))):
        for seed in SEEDS:
            want = reference.gae(random_trajectories(seed, seed % 2 == 1), *args)[1]
            for per_rank in estimates[2]:
                mine, _, got, _ = per_rank[case, seed]
                torch.testing.assert_close(got, flat([want[i] for i in mine]), rtol=1e-5, atol=1e-5)


def test_metrics_are_the_same_on_every_rank_and_for_any_number_of_them(estimates):
    for case in ESTIMATORS:
        for seed in SEEDS:
            base = estimates[1][0][case, seed][3]
            for world in (2, 3):
                for per_rank in estimates[world]:
                    assert per_rank[case, seed][3] == pytest.approx(base, rel=1e-6, abs=1e-9)


# ---- rewards per turn


PER_TURN = {
    "gae": (args(gamma=0.9, lam=0.8), lambda t: reference.gae(t, 0.9, 0.8)[0]),
    "reinforce_plus_plus": (args(gamma=0.9), lambda t: reference.reinforce_plus_plus(t, 0.9)),
    "reinforce of half the reward": (
        args(gamma=0.5) | {"reward_coef": 0.5},
        lambda t: [[x / 2 for x in row] for row in reference.reinforce(t, 0.5)],
    ),
    "remax": (args(gamma=0.95), lambda t: reference.remax(t, 0.95)),
    "optimal_token_baseline": ({}, reference.optimal_token_baseline),
    "tir_optimal_token_baseline": ({}, lambda t: reference.optimal_token_baseline(t, True)),
    "grpo": ({}, reference.grpo),  # sees R alone, which is the sum
}


def with_turns(seed, placed=True):
    """(trajectories whose turns have rewards, these rewards of each). placed: on their tokens, as
    documented; else all of R at the end."""
    rng, trs, all_turns = random.Random(seed + 100), random_trajectories(seed), []
    for tr in trs:
        outcome, turns, tr.rewards = tr.reward, [], [0.0] * len(tr.mask)
        last = None
        for t, chosen in enumerate(tr.mask):
            if chosen:
                last = t
            if chosen and (t + 1 == len(tr.mask) or not tr.mask[t + 1]):
                turns.append(rng.uniform(-1, 1))
                tr.rewards[t] = turns[-1] if placed else 0.0
        tr.reward = outcome + sum(turns)
        if last is not None:
            tr.rewards[last] += outcome if placed else tr.reward
        all_turns.append(turns)
    assert max(map(len, all_turns)) > 2
    return trs, all_turns


def samples_of(trs, all_turns):
    seen, samples = Counter(), []
    for tr, turns in zip(trs, all_turns, strict=True):
        n = len(tr.mask) - tr.prompt_len
        samples.append(Sample(
            Prompt(tr.group, [3] * tr.prompt_len, "d", "1", "p"), tr.group, seen[tr.group],
            [5] * n, [0.0] * n, tr.mask[tr.prompt_len :], [0] * n, "stop",
            reward=tr.reward if tr.valid else None, invalid=None if tr.valid else "boom",
            turn_rewards=turns, greedy_reward=tr.greedy,
        ))  # fmt: skip
        seen[tr.group] += 1
    return samples


def per_turn_on(topology):
    """{(case, seed): (sequence numbers, advantages, returns, metrics)} of this rank."""
    from spmdrl.training.credit import add_advantages

    results = {}
    for case, (options, _) in PER_TURN.items():
        algo = AlgoConfig(advantage=case.split()[0], **options)
        config = replace(BASE, algo=algo, rewards=RewardConfig(per_turn=True))
        for seed in SEEDS:
            trs, turns = with_turns(seed)
            order = random.Random(seed).sample(range(len(trs)), len(trs))
            mine = order[topology.rank :: topology.world]
            samples = samples_of(trs, turns)
            batch = pack_samples([samples[i] for i in mine], per_turn=True)
            known = batch_of(trs).select(mine)
            assert torch.equal(batch.loss_mask, known.loss_mask)
            batch.values, batch.old_logprobs = known.values, known.old_logprobs
            batch.pi_squared = known.pi_squared
            bounds = torch.arange(len(mine)).tensor_split(topology.world + 1)  # mini-batches
            parts = [batch.select(part.tolist()) for part in bounds]
            metrics = add_advantages(parts, config, Algorithm.of(config.algo), 0.0, topology)
            advantages = torch.cat([p.advantages for p in parts])
            returns = None if parts[0].returns is None else torch.cat([p.returns for p in parts])
            results[case, seed] = (mine, advantages, returns, metrics)
    return results


@pytest.mark.parametrize("case", PER_TURN)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_turns_reward_stands_where_the_turn_ends(runs, world, case):
    _, estimate = PER_TURN[case]
    moved = 0.0
    for seed in SEEDS:
        want = estimate(with_turns(seed)[0])
        at_the_end = estimate(with_turns(seed, placed=False)[0])
        moved = max(moved, float((flat(want) - flat(at_the_end)).abs().max()))
        for per_rank in runs[world]["per turn"]:
            mine, got, returns, metrics = per_rank[case, seed]
            expected = flat([want[i] for i in mine])
            torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, msg=f"{case} {seed}")
            if case == "gae":
                critic = reference.gae(with_turns(seed)[0], 0.9, 0.8)[1]
                expected = flat([critic[i] for i in mine])
                torch.testing.assert_close(returns, expected, rtol=1e-5, atol=1e-5)
            base = runs[1]["per turn"][0][case, seed][3]
            assert metrics == pytest.approx(base, rel=1e-6, abs=1e-9)
    assert moved == 0.0 if case == "grpo" else moved > 0.1


# ---- KL in the reward, corrections, weights


CORRECTIONS = [
    CorrectionConfig(level="token"),
    CorrectionConfig(level="token", mode="mask", low=0.8, high=1.2),
    CorrectionConfig(level="sequence", high=1.5, normalize=True),
    CorrectionConfig(level="geometric", mode="mask", low=0.9, high=1.2, normalize=True),
    CorrectionConfig(level="token", normalize=True, reject={"token_k1": (0.7, 1.5)}),
    CorrectionConfig(reject={"seq_sum_k1": (0.4, 2.5), "token_k2": 0.2, "token_k3": 0.3}),
    CorrectionConfig(reject={"seq_mean_k1": (0.9, 1.2), "seq_sum_k2": 0.6, "seq_sum_k3": 0.7}),
    CorrectionConfig(reject={"seq_mean_k2": 0.06, "seq_mean_k3": 0.08}),
    CorrectionConfig(reject={"seq_max_k2": 0.15, "seq_max_k3": 0.2}),
]


def corrections_on(topology):
    from spmdrl.training.credit import add_correction

    results = []
    for config in CORRECTIONS:
        for seed in SEEDS:
            trs = random_trajectories(seed)
            mine = list(range(topology.rank, len(trs), topology.world))
            batch = batch_of(trs).select(mine)
            metrics = add_correction([batch], AlgoConfig(correction=config), topology)
            results.append((mine, batch.policy_weights, batch.kept_mask, metrics))
    return results


@pytest.mark.parametrize("world", [1, 2, 3])
def test_corrections_are_those_of_the_definition(runs, world):
    ranks = runs[world]["corrections"]
    cases = [(config, seed) for config in CORRECTIONS for seed in SEEDS]
    rejected = set()
    for number, (config, seed) in enumerate(cases):
        trs = random_trajectories(seed)
        keep = reference.reject(trs, dict(config.reject))
        weights = [[float(m and tr.valid) for m in tr.mask] for tr in trs]
        raw = weights
        if config.level != "off":
            bounds = (config.level, config.mode, config.low, config.high)
            weights = reference.rollout_weights(trs, *bounds, config.normalize)
            raw = reference.rollout_weights(trs, *bounds, False)
        used = [[w * k for w, k in zip(*pair, strict=True)] for pair in zip(raw, keep, strict=True)]
        want_metrics = reference.mismatch_metrics(trs, used)
        for results in ranks:
            mine, got_weights, got_keep, metrics = results[number]
            assert got_keep.tolist() == [float(k) for i in mine for k in keep[i]], (config, seed)
            rejected.add(metrics["correction/rejected"] > 0)
            if config.level == "off":
                assert got_weights is None
            else:
                torch.testing.assert_close(got_weights, flat([weights[i] for i in mine]))
            for name, want in want_metrics.items():
                assert metrics[f"correction/{name}"] == pytest.approx(want, rel=1e-4, abs=1e-6), (
                    name
                )
    assert rejected == {True, False}


def kl_in_reward_on(topology):
    from spmdrl.training.credit import add_advantages

    algo = AlgoConfig(advantage="dr_grpo", kl_coef=0.3, kl_in="reward", kl_estimator="k3")
    trs = random_trajectories(4)
    mine = list(range(topology.rank, len(trs), topology.world))
    batch = batch_of(trs).select(mine)
    batch.prm_logprobs = None
    metrics = add_advantages([batch], replace(BASE, algo=algo), Algorithm.of(algo), 0.3, topology)
    return mine, batch.advantages, metrics


@pytest.mark.parametrize("world", [1, 2])
def test_kl_in_the_reward_is_taken_off_before_the_group_mean(runs, world):
    trs = random_trajectories(4)
    kls = []
    for tr in trs:
        chosen = reference.policy_tokens(tr)
        pairs = [(tr.logprobs[t], tr.rollout[t]) for t in chosen]  # batch_of: ref is rollout
        kls += [float(reference.kl("k3", torch.tensor(p).double(), q)) for p, q in pairs]
        tr.reward -= 0.3 * sum(kls[len(kls) - len(pairs) :])
    want = reference.dr_grpo(trs)
    for mine, got, metrics in runs[world]["kl in reward"]:
        torch.testing.assert_close(got, flat([want[i] for i in mine]), rtol=1e-5, atol=1e-5)
        assert metrics["reward/kl"] == pytest.approx(sum(kls) / len(kls), rel=1e-5)


def kept_of_the_counts_on(topology):
    from spmdrl.training.credit import add_advantages, add_correction

    correction = CorrectionConfig(reject={"token_k1": (0.7, 1.5)})
    trs, sums = random_trajectories(4), {}
    for name in ("seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"):
        for over in ("trained", "all"):
            algo = AlgoConfig(aggregation=name, seq_mean_over=over, correction=correction)
            batch = batch_of(trs).select(list(range(topology.rank, len(trs), topology.world)))
            batch.prm_logprobs = None
            add_correction([batch], algo, topology)
            add_advantages([batch], replace(BASE, algo=algo), Algorithm.of(algo), 0.0, topology)
            assert torch.equal(batch.loss_weights > 0, batch.kept_mask > 0)
            sums[name, over] = float(batch.loss_weights.sum())
    return sums


def test_the_losss_divisor_counts_what_is_kept_or_all_sequences(runs):
    trs = random_trajectories(4)
    keep = reference.reject(trs, {"token_k1": (0.7, 1.5)})
    trained = sum(any(row) for row in keep)
    assert 10 < trained < len(trs) == 19
    for world in (1, 2):
        totals = Counter()
        for sums in runs[world]["kept"]:
            totals.update(sums)
        assert totals["seq_mean_token_mean", "trained"] == pytest.approx(1, abs=1e-6)
        for (name, over), total in totals.items():
            if over == "all":  # the same sums, divided by all
                assert total * 19 == pytest.approx(totals[name, "trained"] * trained, rel=1e-5)


def tokens_on(topology, fraction):
    """Which tokens kl_cov takes where all covariances are 0: ties everywhere."""
    from spmdrl.training.credit import select_tokens

    algo = AlgoConfig(policy_loss="kl_cov", loss_args={"cov_fraction": fraction})
    config = replace(BASE, algo=algo)
    trs = random_trajectories(0)
    mine = list(range(topology.rank, len(trs), topology.world))
    batch = batch_of(trs).select(mine)
    batch.advantages = torch.zeros(batch.num_tokens)
    chosen = select_tokens(batch, batch.old_logprobs, config, 1, 0, topology)
    parts = chosen.split(batch.seq_lens.tolist())
    return {i: part.tolist() for i, part in zip(mine, parts, strict=True)}


def test_of_equal_tokens_as_many_are_taken_as_were_asked_for(runs):
    (want,) = runs[1]["tokens"]
    total = sum(sum(tr.mask) for tr in random_trajectories(0) if tr.valid)
    assert sum(sum(row) for row in want.values()) == int(0.2 * total)
    halves = runs[2]["tokens"]
    assert halves[0] | halves[1] == want


def resampled_on(topology, name):
    from spmdrl.training.credit import resample

    algo = AlgoConfig(advantage="reinforce_plus_plus", sample_filter=name)
    trs = random_trajectories(3, binary=True)
    batch = batch_of(trs).select(list(range(topology.rank, len(trs), topology.world)))
    drawn, kept = resample(batch, replace(BASE, algo=algo), 1, topology)
    addresses = list(zip(drawn.groups.tolist(), drawn.indices.tolist(), strict=True))
    return addresses, drawn.rewards.tolist(), drawn.valid.tolist(), kept


@pytest.mark.parametrize("name", FILTERS)
def test_samples_are_drawn_the_same_on_any_number_of_ranks(runs, name):
    ((want, rewards, valid, kept),) = runs[1][name]
    assert len(want) == len(random_trajectories(3)) == len(set(want))
    assert 1 < kept < len(want)
    assert all(valid)
    if name == "pow":
        assert set(rewards) == {1.0}
    halves = runs[2][name]
    assert sorted(halves[0][0] + halves[1][0]) == sorted(want)
    assert halves[0][3] == halves[1][3] == kept
