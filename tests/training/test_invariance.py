"""Loss, gradient norm and every metric of a step do not depend on how its work is split.

Every estimator, every policy loss and every option that has a statistic of the batch in it, through
the step's own code: on 1, 2 and 3 ranks, with the samples in another order, in smaller and larger
micro-batches, with the roles on ranks of their own, and on ranks that share the tokens of their
sequences. A loss knows no estimator but by the advantages, so that each of them comes in some pair
of both, not in every one.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
from ranks import run_ranks
from tiny_models import save_qwen3

from spmdrl.algo.advantages import ESTIMATORS
from spmdrl.algo.losses import POLICY_LOSSES
from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    DistillationConfig,
    OptimConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.training.checks.algorithms import check_algo

NUM_GROUPS, SAMPLES = 6, 4
TRAIN = TrainConfig(
    dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=0.0, weight_decay=0.0)
)
BASE = PpoConfig(
    model="-",
    data=DataConfig(train="-", prompts_per_step=NUM_GROUPS, max_prompt_tokens=8),
    reward="gsm8k",
    rollout=RolloutConfig(n=SAMPLES, max_tokens=24),
    actor=TRAIN,
)
# (world, micro-batch budget, order of the samples, ranks of sampling, actor, ref, critic, prm; how
# many of each of these share their tokens); the first is what the others are held to
SPLITS = [
    (1, 120, "given", "", ""), (2, 80, "shuffled", "", ""),
    (2, 110, "given", "01 01 0 01 01", "2 1 2 1"), (3, 1000, "shuffled", "02 01 2 12 0", ""),
]  # fmt: skip
pytestmark = pytest.mark.timeout(1200)


def config_of(advantage="grpo", policy_loss="ppo", **options):
    """A config in which the two make sense together; raises ConfigError where there is none."""
    per_turn = options.pop("per_turn", False)
    algo = {"advantage": advantage, "policy_loss": policy_loss, "mini_batches": 2} | options
    if advantage == "gdpo":
        algo["advantage_args"] = {"reward_keys": {"format": 0.5, "correct": 1.0}}
    loss_args = {}
    if policy_loss in ("clip_cov", "kl_cov"):
        loss_args["cov_fraction"] = 0.1
    if policy_loss == "clip_cov":
        loss_args |= {"cov_low": 0.01, "cov_high": 0.5}
    if policy_loss in ("ppo", "gspo", "cispo", "clip_cov", "geo_mean", "sequence_product"):
        # else every sequence would be clipped
        wide = {"gspo": 3, "sequence_product": 10}.get(policy_loss, 1)
        loss_args |= {"clip_low": 0.02 * wide, "clip_high": 0.03 * wide}
    if policy_loss in ("dppo_tv", "dppo_kl"):
        loss_args |= {"clip_low": 1e-3, "clip_high": 1e-3}
    config = replace(
        BASE,
        algo=AlgoConfig(loss_args=loss_args, **algo),
        rewards=RewardConfig(per_turn=per_turn),
        critic=TRAIN if advantage == "gae" else None,
        prm=TRAIN if advantage == "prime" else None,
        ref=TrainConfig(model="teacher") if "distillation" in options else TrainConfig(),
        rollout=replace(BASE.rollout, greedy_baseline=advantage == "remax"),
    )
    if config.algo.demonstrations:
        config = replace(config, data=replace(BASE.data, demonstration_key="answer"))
    if config.algo.pairs == "demonstration":
        config = replace(config, rollout=replace(BASE.rollout, n=2))
    check_algo(config)
    return config


ALIASES = {"vanilla", "luspo"}  # of ppo, and of gspo with another aggregation


PAIRS = {
    f"{advantage} {policy_loss}": (advantage, policy_loss)
    for advantage in ESTIMATORS for policy_loss in sorted(set(POLICY_LOSSES) - ALIASES)
}  # fmt: skip


@cache
def pair(name):
    """None where the two make no sense together."""
    try:
        return config_of(*PAIRS[name])
    except ConfigError:
        return None


OPTIONS = {
    "kl in loss": {"kl_coef": 0.1, "kl_estimator": "k3+"},
    "kl in reward": {"advantage": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_target": 0.01},
    "entropy": {"entropy_coef": 0.01, "entropy_target": 10.0},
    "top entropy": {"top_entropy_fraction": 0.2},
    "positive nll": {"positive_nll_coef": 0.1},
    "overlong": {"overlong_buffer": 10},
    "filter": {"advantage": "gae", "sample_filter": "max_random", "kl_coef": 0.1,
               "kl_in": "reward"},
    "filter by power": {"advantage": "remax", "sample_filter": "pow",
                        "mini_batches": 6},
    "replay": {"advantage": "reinforce_plus_plus", "sample_filter": "max_min", "replay_steps": 1,
               "correction": CorrectionConfig(level="token")},
    "token weights": {"correction": CorrectionConfig(
        level="token", high=1.1, normalize=True, reject={"token_k1": (0.8, 1.3)})},
    "sequence masks": {"correction": CorrectionConfig(
        level="sequence", mode="mask", normalize=True, reject={"seq_mean_k3": 0.02})},
    "geometric": {"correction": CorrectionConfig(level="geometric", reject={"seq_max_k2": 0.05})},
    "bypass": {"correction": CorrectionConfig(bypass=True, reject={"seq_sum_k2": 0.2})},
    "bypass reinforce": {
        "policy_loss": "reinforce", "correction": CorrectionConfig(bypass=True, level="sequence")},
    "token_sum": {"aggregation": "token_sum"},
    "seq_mean_token_sum": {"aggregation": "seq_mean_token_sum"},
    "seq_mean_token_mean": {"aggregation": "seq_mean_token_mean"},
    "seq_mean_token_sum_norm": {"aggregation": "seq_mean_token_sum_norm", "norm_length": 40},
    "seq_mean over all": {
        "aggregation": "seq_mean_token_mean", "seq_mean_over": "all",
        "correction": CorrectionConfig(reject={"token_k1": (0.8, 1.3)})},
    "luspo": {"policy_loss": "luspo"},
    "scaled over the batch": {"advantage_args": {"scale": "batch"}},
    "normalised rloo": {"advantage": "rloo", "advantage_args": {"normalize": True}},
    "off-policy mask": {"off_policy_mask_threshold": 0.01},
    "corrected k3": {"kl_coef": 0.1, "kl_bias_correction": True},
    "vespo to the engine": {
        "policy_loss": "vespo",
        "correction": CorrectionConfig(bypass=True, reject={"token_k1": (0.8, 1.3)})},
    "gspo by tokens": {"policy_loss": "gspo", "aggregation": "token_mean"},
    "gdpo of samples": {"advantage": "gdpo", "whiten_over": "samples"},
    "cut k3": {"kl_coef": 0.1, "kl_estimator": "k3", "kl_cut": 0.01},
    "cut k3 in reward": {
        "advantage": "rloo", "kl_coef": 0.1, "kl_in": "reward", "kl_cut": 0.01},
    "token baseline with weights": {
        "advantage": "optimal_token_baseline", "correction": CorrectionConfig(level="token")},
    "per turn": {"advantage": "reinforce_plus_plus", "advantage_args": {"gamma": 0.9},
                 "per_turn": True},
    "per turn by group": {"advantage": "tir_optimal_token_baseline", "per_turn": True},
    "per turn replayed": {
        "advantage": "gae", "advantage_args": {"gamma": 0.9, "lam": 0.8}, "per_turn": True,
        "kl_coef": 0.1, "kl_in": "reward", "sample_filter": "max_random", "replay_steps": 1,
        "correction": CorrectionConfig(level="token")},
    "two epochs": {"epochs": 2, "policy_loss": "clip_cov"},
    "teacher and rewards": {"distillation": DistillationConfig(loss="jsd", beta=0.3, topk=8)},
    "teacher alone": {
        "reward_coef": 0.0, "advantage": "reinforce", "aggregation": "seq_mean_token_mean",
        "distillation": DistillationConfig(
            topk=5, tail=False, coef=2.0, loss_max_clamp=0.012)},
    "online dpo": {"policy_loss": "dpo", "mini_batches": 3, "overlong_buffer": 10},
    "online simpo": {"policy_loss": "simpo", "epochs": 2, "reward_clip": (0.0, 0.5)},
    "demonstrations": {"demonstrations": 1, "kl_coef": 0.1, "entropy_coef": 0.01,
                       "correction": CorrectionConfig(level="token", reject={
                           "token_k1": (0.8, 1.3)})},
    "spin": {"policy_loss": "dpo", "demonstrations": 1, "pairs": "demonstration"},
}  # fmt: skip


def covering():
    """Pairs in which every estimator and every policy loss comes at least once. Others are not
    made: every rank imports this file.
    """
    chosen, seen = [], set()
    for new in (2, 1):  # first those of which neither has come yet
        for name, both in PAIRS.items():
            if len({*both} - seen) >= new and pair(name) is not None:
                chosen.append(name)
                seen |= {*both}
    return chosen


COVERING = covering()
CASES = {name: pair(name) for name in COVERING} | {
    name: config_of(**options) for name, options in OPTIONS.items()
}


def sample_of(group, index, config, step=0):
    """Prompt, answer with tool tokens in the middle; an empty one and two invalid ones."""
    from spmdrl.types import DEMONSTRATED, Prompt, Sample, turn_ends

    rng = random.Random(1000 * step + 100 * group + index)
    n = 0 if (group, index) == (2, 1) else rng.randint(1, 24)
    mask = [1] * min(n, 3) + [int(rng.random() > 0.25) for _ in range(n - 3)]
    invalid = "boom" if (group, index) in ((1, 1), (4, 0)) else None
    correct = float(rng.random() > 0.4)
    sample = Sample(
        prompt=Prompt(group, [5 + group] * (1 + group), "d", "1", "p"), group=group, index=index,
        response_ids=[rng.randint(3, 60) for _ in range(n)], loss_mask=mask,
        rollout_logprobs=[-4.4 + rng.gauss(0, 0.15) for _ in range(n)], policy_version=[0] * n,
        finish_reason="stop", reward=None if invalid else correct, invalid=invalid,
        greedy_reward=float(group % 2), reward_info={"format": rng.random(), "correct": correct},
        penalty=-0.1 if config.algo.overlong_buffer and n > 14 else 0.0,
    )  # fmt: skip
    if config.algo.demonstrations and index == config.rollout.n - 1 and group != 3:
        sample.policy_version, sample.rollout_logprobs = [DEMONSTRATED] * n, [0.0] * n
    if config.rewards.per_turn and not invalid:
        sample.turn_rewards = [rng.uniform(-1, 1) for _ in turn_ends(mask)]
        sample.reward += sum(sample.turn_rewards)
    return sample


def replay_of(config, earlier):
    """A buffer that holds another step's samples, where the config has one."""
    from spmdrl.data.packing import pack_samples
    from spmdrl.training.replay_buffer import ReplayBuffer

    if config.algo.sample_filter is None:
        return None
    buffer = ReplayBuffer(config.algo.replay_steps)
    past = [pack_samples(earlier, per_turn=config.rewards.per_turn)]
    buffer.past = past[: config.algo.replay_steps]
    return buffer


class Moved:
    """A policy that has moved on since it sampled: old logprobs are those of another model."""

    def __init__(self, now, before):
        self.update, self.onload, self.offload = now.update, now.onload, now.offload
        self.logprobs = before.logprobs


def steps_on(topology, cases, splits, models):
    """{(case, split): metrics} of this rank, one step each; nothing moves, the rates are 0."""

    from spmdrl.distributed.phases import Phases
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.engines.fsdp.ulysses import SequenceParallelGroup
    from spmdrl.training.batch_exchange import P2PChannel
    from spmdrl.training.collect import RolloutResult
    from spmdrl.training.roles import Roles, Trainer
    from spmdrl.training.step import train_step

    phases = Phases(topology)
    results = {}
    for split in splits:
        _, budget, order, placement, sharing = split
        everyone = "".join(map(str, topology.ranks))
        sets = [tuple(map(int, ranks)) for ranks in (placement or " ".join([everyone] * 5)).split()]
        degrees = [1, *map(int, (sharing or "1 1 1 1").split())]
        sampling, *places = (
            Topology.build(topology.device, ranks, **train_degrees(TrainConfig(ulysses=degree)))
            for ranks, degree in zip(sets, degrees, strict=True)
        )
        training = Topology.build(topology.device, set().union(*sets[1:]), dp=-1)
        train = replace(TRAIN, micro_batch_tokens=budget)

        def engine(kind, model, place, train=train):
            if not place.here:
                return None
            team = SequenceParallelGroup.of(place)
            config = replace(train, ulysses=team.size if team else 1)
            return FsdpEngine.build(kind, model, config, place)

        actor, ref, critic, prm = places
        now, before = (engine("policy", model, actor) for model in models)
        moved = Moved(now, before) if now else None
        roles = [
            Trainer("actor", actor, moved), Trainer("ref", ref, engine("policy", models[0], ref)),
            Trainer("critic", critic, engine("value", models[0], critic)),
            Trainer("prm", prm, engine("policy", models[1], prm)),
        ]  # fmt: skip
        addresses = [(g, i) for g in range(NUM_GROUPS) for i in range(SAMPLES)]
        if order == "shuffled":
            random.Random(budget).shuffle(addresses)
        mine = addresses[sampling.rank :: sampling.world] if sampling.here else []
        for name, config in cases.items():
            samples = [sample_of(g, i, config) for g, i in mine if i < config.rollout.n]
            needs_ref = config.algo.needs_reference or config.prm is not None
            asked = roles[1] if needs_ref else None
            if config.algo.distillation:  # another model than the actor
                asked = replace(roles[3], name="ref")
            here = Roles(
                config, topology, sampling, training, syncing=topology, phases=phases,
                post=P2PChannel(topology), tokenizer=None, sampler=None, weights=None, mailbox=None,
                actor=roles[0], ref=asked,
                critic=roles[2] if config.critic else None, prm=roles[3] if config.prm else None,
                kl_coef=config.algo.kl_coef, entropy_coef=config.algo.entropy_coef,
                replay=replay_of(config, [sample_of(*address, config, 1) for address in mine]),
            )  # fmt: skip
            rollout = RolloutResult(samples, NUM_GROUPS, samples)
            batches = train_step(here, lambda _, found=rollout: found, step=1, push=False)
            metrics = batches.metrics if batches is not None else {}
            here.post.wait_until_delivered()
            if actor.here:
                metrics |= {"next/kl_coef": here.kl_coef, "next/entropy_coef": here.entropy_coef}
                del metrics["balance/imbalance"]  # how even the ranks' work is
                results[name, split] = metrics
    return results


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """{(case, split): [metrics of each rank]} for all cases and splits; each world starts once."""
    folder = tmp_path_factory.mktemp("models")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    models = [str(save_qwen3(folder / str(seed), seed, **small)) for seed in (0, 1)]
    found = {}
    for world in (1, 2, 3):
        splits = [split for split in SPLITS if split[0] == world]
        per_rank = run_ranks(world, steps_on, CASES, splits, models, timeout_s=500)
        for results in per_rank:  # ranks of the actor
            for key, metrics in results.items():
                found.setdefault(key, []).append(metrics)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("name", CASES)
def test_a_step_does_not_depend_on_how_it_is_split(steps, name):
    want = steps[name, SPLITS[0]][0]
    assert want["actor/grad_norm"] > 0
    for split in SPLITS:
        for got in steps[name, split]:
            assert got.keys() == want.keys()
            for key, value in want.items():
                assert got[key] == pytest.approx(value, rel=1e-6, abs=3e-7), (split, key)


def test_every_estimator_and_every_loss_is_held_to_it():
    """Of 16 x 15: sppo goes with win_rate alone, geo_mean and sequence_product with one advantage
    per sequence."""
    per_sequence, per_token = 8, 7
    assert sum(pair(name) is not None for name in PAIRS) == per_sequence * 14 + per_token * 12 + 1
    words = {word for name in COVERING for word in name.split()}
    assert words == {*ESTIMATORS, *POLICY_LOSSES} - ALIASES
