"""What demonstrations do not go with is refused, with the reason; what they go with is not."""

from dataclasses import replace

import pytest

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    DistillationConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.training.checks.algorithms import check_algo

DATA = DataConfig("-", demonstration_key="answer")
BASE = PpoConfig(
    model="-", data=DATA, reward="gsm8k", rollout=RolloutConfig(n=8, max_tokens=9),
    algo=AlgoConfig(demonstrations=1),
)  # fmt: skip
SPIN = AlgoConfig(demonstrations=1, policy_loss="dpo", pairs="demonstration")
PAIR = RolloutConfig(n=2, max_tokens=9)


def with_algo(**fields):
    return replace(BASE, algo=replace(BASE.algo, **fields))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (replace(BASE, data=DataConfig("-")), ["set data.demonstration_key"]),
        (replace(BASE, algo=AlgoConfig()), ["demonstration_key='answer' has no effect"]),
        (with_algo(demonstrations=8), ["rollout.n=8", "leaves none"]),
        (replace(BASE, tools=(len,)), ["tools", "one turn"]),
        (replace(BASE, environment=len), ["environment", "one turn"]),
        (replace(BASE, agent=len), ["agent", "one turn"]),
        (
            replace(with_algo(advantage="gae"), critic=TrainConfig()),
            ["critic would learn", "advantage='gae'"],
        ),
        (replace(with_algo(advantage="prime"), prm=TrainConfig()), ["process reward model"]),
        (with_algo(advantage="optimal_token_baseline"), ["baseline of each token"]),
        (with_algo(advantage="reinforce", sample_filter="pow"), ["again and again"]),
        (with_algo(policy_loss="kl_cov", epochs=2), ["policy_loss='kl_cov'", "chooses tokens"]),
        (with_algo(top_entropy_fraction=0.2), ["top_entropy_fraction=0.2"]),
        (with_algo(kl_coef=0.1, kl_in="reward"), ["use kl_in='loss'"]),
        (with_algo(kl_coef=0.1, kl_bias_correction=True), ["kl_bias_correction"]),
        (replace(BASE, actor=TrainConfig(router_replay="R3")), ["router_replay", "experts"]),
        (replace(BASE, algo=SPIN), ["algo.pairs", "set them to 1 and 2"]),
        (with_algo(pairs="demonstration"), ["read by losses of pairs", "policy_loss='ppo'"]),
        (
            replace(BASE, algo=replace(SPIN, dynamic_sampling=2), rollout=PAIR),
            ["dynamic_sampling=2 goes by rewards"],
        ),
        (
            replace(BASE, data=DataConfig("-"), algo=AlgoConfig(policy_shaping_gamma=0.2)),
            ["policy_shaping_gamma=0.2 would have no effect"],
        ),
        (
            replace(BASE, algo=replace(SPIN, policy_shaping_gamma=None), rollout=PAIR),
            ["policy_shaping_gamma=None would have no effect", "not of pairs"],
        ),
    ],
)
def test_what_demonstrations_do_not_go_with_is_refused(config, words):
    with pytest.raises(ConfigError) as error:
        check_algo(config)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        with_algo(policy_shaping_gamma=None, epochs=2, dynamic_sampling=3, overlong_buffer=4),
        with_algo(correction=CorrectionConfig(level="token", reject={"token_k1": (0.5, 2.0)})),
        with_algo(kl_coef=0.1, entropy_coef=0.01, off_policy_mask_threshold=0.5),
        with_algo(positive_nll_coef=0.1, policy_loss="gspo", distillation=DistillationConfig()),
        replace(with_algo(advantage="remax"), rollout=replace(BASE.rollout, greedy_baseline=True)),
        replace(BASE, algo=replace(SPIN, ref_model_sync_steps=50), rollout=PAIR),
        with_algo(policy_loss="dpo"),
    ],
)
def test_what_they_go_with_is_not(config):
    check_algo(config)
