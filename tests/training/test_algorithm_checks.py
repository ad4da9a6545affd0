"""Combinations of algorithms and options that make no sense are refused at start, with a remedy."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from plan_configs import ppo_config
from programs import write_task

from spmdrl.algo.advantages import ESTIMATORS, Estimator
from spmdrl.algo.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    PolicyLoss,
    loss_of,
    loss_options,
    ppo,
)
from spmdrl.algo.options import Positive, options_of
from spmdrl.cli.arguments import dry_flags, override
from spmdrl.config import (
    MOVED,
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    PpoConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.exit import FAILED
from spmdrl.distributed.phases import Phases
from spmdrl.rewards.runner import RewardRunner, TooManyInvalid
from spmdrl.training import dry_run
from spmdrl.training.checks.algorithms import READERS, check_algo
from spmdrl.training.process_reward_model import with_outcome_weights


def config_of(roles=None, rollout=None, **algo):
    rollout = {"n": 4, "max_tokens": 50} | (rollout or {})
    return PpoConfig(
        "m", DataConfig("t"), "gsm8k", algo=AlgoConfig(**algo), rollout=RolloutConfig(**rollout),
        **(roles or {}),
    )  # fmt: skip


def on(**changes):
    return CorrectionConfig(**{"level": "token"} | changes)


def needs_tau(logprobs, old_logprobs, mb, *, tau):
    return -tau * logprobs, {}


def of_the_config(logprobs, old_logprobs, mb, algo):
    return -logprobs, {}


KEYS = {"reward_keys": {"a": 1.0}}
CRITIC, PRM = {"critic": TrainConfig()}, {"prm": TrainConfig()}
PER_TURN = {"rewards": RewardConfig(per_turn=True)}
NONSENSE = [
    # (what is set, words of the refusal)
    ({"advantage": "gae"}, ["'gae'", "needs critic="]),
    *[({"roles": CRITIC, "advantage": a}, ["no use for one", repr(a)])
      for a in ("grpo", "rloo", "reinforce_plus_plus", "opo")],
    *[({"rollout": {"n": 1}, "advantage": a}, ["rollout.n=1", "advantage 0"])
      for a in ("grpo", "dr_grpo", "rloo", "grpo_passk", "optimal_token_baseline")],
    ({"reward_coef": 0.5}, ["would have no effect", "kl_in='reward'"]),
    ({"reward_coef": 0.0, "kl_coef": 1.0, "kl_in": "reward"}, ["teaches it nothing", "ref.model"]),
    ({"reward_coef": 0.0, "kl_coef": 1.0, "kl_in": "reward", "dynamic_sampling": 2,
      "roles": {"ref": TrainConfig(model="teacher")}}, ["dynamic_sampling", "goes by rewards"]),
    ({"advantage": "remax"}, ["greedy answer", "rollout.greedy_baseline=True"]),
    ({"rollout": {"greedy_baseline": True}}, ["greedy_baseline", "no use", "remax"]),
    ({"advantage": "prime"}, ["needs prm="]),
    ({"roles": PRM}, ["no use for prm"]),
    ({"advantage": "prime", "roles": PRM | {"ref": TrainConfig(model="other")}}, ["same"]),
    ({"advantage": "prime", "roles": PRM, "overlong_buffer": 5}, ["labels"]),
    ({"advantage": "gdpo"}, ["reward_keys"]),
    ({"advantage": "gdpo", "advantage_args": KEYS, "overlong_buffer": 5}, ["overlong_buffer"]),
    ({"advantage": "gdpo", "advantage_args": KEYS, "roles": PER_TURN},
     ["rewards.per_turn", "reads only", "['a']"]),
    ({"advantage": "prime", "roles": PRM | PER_TURN}, ["rewards.per_turn", "label"]),
    ({"policy_loss": "sppo"}, ["win_rate"]),
    ({"advantage": "win_rate"}, ["sppo"]),
    ({"advantage": "reinforce_plus_plus", "policy_loss": "geo_mean"}, ["one per token"]),
    ({"policy_loss": "geo_mean", "aggregation": "token_mean"}, ["seq_mean_token_mean"]),
    ({"policy_loss": "luspo", "aggregation": "token_mean"}, ["scales", "'seq_mean_token_sum'"]),
    ({"policy_loss": "vespo", "mini_batches": 2, "correction": CorrectionConfig(level="token")},
     ["level='token'", "correct twice", "bypass=True"]),
    ({"policy_loss": "vespo"}, ["one update per rollout", "weight 1"]),
    ({"policy_loss": "vespo", "mini_batches": 2, "loss_args": {"k_pos": 0.0}}, ["'k_pos']=0.0"]),
    ({"seq_mean_over": "all"}, ["seq_mean_over='all'", "no effect", "divide by sequences"]),
    ({"whiten_over": "samples"}, ["whiten_over='samples'", "no effect", "gdpo"]),
    ({"kl_cut": 10.0}, ["kl_cut=10.0", "no effect", "kl_coef above 0"]),
    ({"kl_coef": 0.1, "kl_estimator": "k2", "kl_cut": 10.0}, ["kl_cut=10.0", "k3"]),
    ({"kl_coef": 0.1, "kl_cut": 0.0}, ["kl_cut=0.0", "above 0"]),
    ({"kl_coef": 0.1, "ref_model_mixup_alpha": 0.5}, ["no effect", "ref_model_sync_steps"]),
    ({"kl_coef": 0.1, "ref_model_sync_steps": -1}, ["ref_model_sync_steps=-1"]),
    ({"kl_coef": 0.1, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.0}, ["(0, 1]"]),
    ({"policy_loss": "kl_cov"}, ["one update per rollout"]),
    ({"kl_bias_correction": True}, ["kl_bias_correction=True", "no effect", "kl_coef above 0"]),
    *[({"kl_bias_correction": True, "kl_coef": 0.1} | other, ["kl_bias_correction=True", "'k3'"])
      for other in ({"kl_estimator": "k2"}, {"kl_estimator": "k3+"}, {"kl_in": "reward"})],
    ({"kl_bias_correction": True, "kl_coef": 0.1, "kl_cut": 10.0}, ["kl_cut=10.0", "biased"]),
    ({"off_policy_mask_threshold": 0.0}, ["off_policy_mask_threshold=0.0", "above 0"]),
    ({"off_policy_mask_threshold": 0.5, "advantage": "grpo_passk"}, ["no effect", "below 0"]),
    ({"advantage_args": {"scale": "none"}}, ["'scale'", "'group', 'batch'", "'none'"]),
    ({"advantage": "rloo", "advantage_args": {"normalize": 1.0}}, ["'normalize'", "bool"]),
    ({"critic_warmup_steps": 3}, ["critic_warmup_steps=3", "nothing learns"]),
    ({"advantage": "gae", "roles": CRITIC,
      "advantage_args": {"lam": 0.9, "lam_critic": 1.0, "lam_alpha": 0.05}},
     ["lam=0.9", "no effect"]),
    # KL
    ({"kl_coef": 0.1, "kl_estimator": "k1"}, ["gradient of 0", "k1+"]),
    ({"kl_coef": 0.1, "kl_estimator": "k3+", "kl_in": "reward"}, ["gradient", "'k3'"]),
    ({"kl_coef": 0.1, "kl_in": "reward", "advantage": "gdpo", "advantage_args": KEYS}, ["lost"]),
    ({"kl_coef": -0.1}, ["kl_coef=-0.1"]),
    # options without effect
    ({"value_clip": 0.1}, ["value_clip=0.1", "no effect", "gae"]),
    ({"kl_target": 0.1}, ["kl_target=0.1", "kl_coef above 0"]),
    ({"kl_coef": 0.1, "kl_in": "reward", "advantage": "gpg"}, ["leaves no reward 0"]),
    # options of another loss or estimator, of another type, missing ones
    ({"loss_args": {"clip_high": 0.28}, "policy_loss": "gpg"},
     ["policy_loss='gpg'", "no option 'clip_high'", "it has none"]),
    ({"loss_args": {"dual_clip": 5.0}, "policy_loss": "gspo"},
     ["no option 'dual_clip'", "it has clip_low, clip_high"]),
    ({"advantage_args": {"gamma": 0.9}}, ["advantage='grpo'", "no option 'gamma'"]),
    ({"advantage_args": KEYS}, ["no option 'reward_keys'"]),
    ({"loss_args": {"clip_high": "0.28"}}, ["algo.loss_args['clip_high']", "float", "'0.28'"]),
    ({"loss_args": {"clip_high": float("nan")}}, ["clip_high", "nan"]),
    ({"loss_args": {"clip_high": True}}, ["algo.loss_args['clip_high']", "float", "True"]),
    ({"advantage": "optimal_token_baseline", "advantage_args": {"zero_tail": 1.0}},
     ["zero_tail", "bool"]),
    ({"policy_loss": needs_tau}, ["needs_tau", "needs the option tau"]),
    ({"policy_loss": needs_tau, "loss_args": {"tau": 1, "rho": 2}}, ["no option 'rho'"]),
    ({"policy_loss": of_the_config}, ["of_the_config", "logprobs, old_logprobs, mb", "algo"]),
    ({"advantage": of_the_config}, ["of_the_config", "must be f(outcomes", "keyword-only"]),
    ({"advantage": "grop"}, ["'grop'", "did you mean 'grpo'?", "'win_rate'"]),
    ({"policy_loss": "pop"}, ["'pop'", "did you mean 'ppo'?", "'gspo'"]),
    ({"policy_loss": PolicyLoss(needs_tau, selects="drawn"), "loss_args": {"tau": 1.0}},
     ["selects='drawn'", "cov_fraction, cov_low"]),
    ({"norm_length": 100}, ["norm_length=100", "seq_mean_token_sum_norm"]),
    ({"replay_steps": 2}, ["replay_steps=2", "sample_filter"]),
    ({"filter_power": 3.0, "sample_filter": "max_min"}, ["filter_power=3.0", "'pow'"]),
    # corrections
    ({"rollout": {"top_p": 0.9}}, ["top_p=0.9", "algo.correction", "another policy"]),
    ({"rollout": {"top_k": 20}}, ["top_k=20", "algo.correction"]),
    ({"rollout": {"min_p": 0.1}}, ["min_p=0.1", "another policy", "algo.correction"]),
    ({"rollout": {"repetition_penalty": 1.1}}, ["repetition_penalty=1.1", "algo.correction"]),
    ({"rollout": {"top_p": 0.9}, "policy_loss": "reinforce",  # rejects, and weighs nothing
      "correction": CorrectionConfig(bypass=True, reject={"token_k2": 1.0})}, ["another policy"]),
    ({"correction": CorrectionConfig(high=3.0)}, ["correction.high=3.0", "no effect"]),
    ({"correction": on(low=0.1)}, ["correction.low=0.1", "mode='mask'"]),
    ({"correction": on(mode="mask", low=3.0)}, ["low=3.0", "high=2.0"]),
    ({"correction": on(bypass=True)}, ["correct twice", "reinforce"]),
    ({"correction": CorrectionConfig(bypass=True), "policy_loss": "gpg"}, ["corrects nothing"]),
    ({"correction": on(bypass=True, normalize=True), "policy_loss": "gpg"}, ["normalize"]),
    ({"correction": CorrectionConfig(bypass=True), "top_entropy_fraction": 0.2}, ["leaves out"]),
    ({"correction": CorrectionConfig(bypass=True), "advantage": "optimal_token_baseline"},
     ["leaves out"]),
    ({"correction": CorrectionConfig(bypass=True), "kl_coef": 0.1, "kl_in": "reward"},
     ["leaves out"]),
    ({"correction": on(reject={"token_k4": 1.0})}, ["token_k4", "seq_mean_k3"]),
    ({"correction": on(reject={"token_k1": 2.0})}, ["token_k1", "(low, high)"]),
    ({"correction": on(reject={"token_k1": (2.0, 0.5)})}, ["token_k1", "low < high"]),
    ({"correction": on(reject={"seq_sum_k3": (0.1, 0.5)})}, ["seq_sum_k3", "one upper bound"]),
    ({"sample_filter": "pow", "replay_steps": 1, "advantage": "reinforce_plus_plus"},
     ["older weights", "level='token'"]),
    ({"sample_filter": "pow"}, ["group mean", "'grpo'"]),
    ({"policy_loss": "geo_mean", "correction": on()}, ["one term per sequence", "geometric"]),
    ({"policy_loss": "sppo", "advantage": "win_rate", "top_entropy_fraction": 0.2}, ["chooses"]),
    ({"advantage": "gdpo", "advantage_args": {"reward_keys": {"a": 0.0}}}, ["not all 0"]),
    ({"advantage": "gdpo", "advantage_args": {"reward_keys": {"a": "x"}}}, ["reward_keys", "'x'"]),
    ({"advantage": "gdpo", "advantage_args": KEYS, "dynamic_sampling": 2}, ["'score'"]),
    ({"correction": on(reject={"seq_mean_k3": "0.01"})}, ["one upper bound"]),
    ({"correction": on(reject={"token_k1": ("a", "b")})}, ["(low, high)"]),
    ({"advantage": len, "kl_target": 0.1}, ["kl_target=0.1", "kl_coef above 0"]),
    ({"advantage": len, "replay_steps": 2}, ["replay_steps=2", "sample_filter"]),
    # ranges
    ({"loss_args": {"dual_clip": 1.0}}, ["'dual_clip']=1.0", "above 1"]),
    ({"loss_args": {"clip_low": 1.5}}, ["'clip_low']=1.5", "below 1"]),
    ({"loss_args": {"clip_high": -0.1}}, ["'clip_high']=-0.1", "above 0"]),
    ({"policy_loss": "sapo", "loss_args": {"tau_pos": 0}}, ["'tau_pos']=0", "above 0"]),
    ({"policy_loss": "kl_cov", "epochs": 2, "loss_args": {"cov_fraction": 1.5}},
     ["'cov_fraction']=1.5", "(0, 1]"]),
    ({"policy_loss": "clip_cov", "loss_args": {"cov_low": 6.0}}, ["cov_low=6.0", "cov_high=5.0"]),
    ({"advantage": "gae", "roles": CRITIC, "advantage_args": {"lam_alpha": 0.0}},
     ["'lam_alpha']=0.0", "above 0"]),
    ({"advantage": "reinforce_plus_plus", "advantage_args": {"gamma": 1.1}},
     ["'gamma']=1.1", "0..1"]),
    ({"top_entropy_fraction": 0.0}, ["top_entropy_fraction=0.0", "(0, 1]"]),
    ({"dynamic_sampling": -1}, ["dynamic_sampling=-1"]),
    ({"dynamic_sampling": 3, "rollout": {"n": 1}, "advantage": "reinforce_plus_plus"},
     ["every group is one"]),
    ({"overlong_buffer": 60}, ["overlong_buffer=60", "max_tokens=50"]),
    ({"epochs": 0}, ["epochs=0"]),
    ({"reward_clip": (1.0, 1.0)}, ["reward_clip=(1.0, 1.0)", "the higher one"]),
    ({"reward_clip": (0.0, 1.0), "advantage": "gdpo", "advantage_args": KEYS}, ["reward_clip"]),
    ({"entropy_target": 0.2, "entropy_coef_min": 0.1, "entropy_coef_max": 0.01}, ["is below"]),
    ({"entropy_coef_max": 0.01}, ["entropy_target"]),
    ({"dynamic_sampling_metric": "acc"}, ["dynamic_sampling_metric", "dynamic_sampling"]),
]  # fmt: skip


def text_of(value):
    """A test's name must be the same in every process: without addresses."""
    return re.sub(r" at 0x\w+", "", str(value))[:60]


@pytest.mark.parametrize(("setting", "words"), NONSENSE, ids=text_of)
def test_nonsense_is_refused(setting, words):
    with pytest.raises(ConfigError) as error:
        check_algo(config_of(**setting))
    assert all(word in str(error.value) for word in words), str(error.value)


SENSE = [
    {},
    {"advantage": "gae", "roles": CRITIC, "rollout": {"n": 1}, "advantage_args": {"lam": 0.95}},
    {"advantage": "reinforce_plus_plus", "rollout": {"n": 1}, "advantage_args": {"gamma": 0.99}},
    {"advantage": "remax", "rollout": {"n": 1, "greedy_baseline": True}},
    {"advantage": "prime", "roles": PRM},
    {"advantage": "win_rate", "policy_loss": "sppo"},
    {"roles": PER_TURN},
    {
        "advantage": "gae",
        "roles": CRITIC | PER_TURN,
        "advantage_args": {"gamma": 0.9, "lam_alpha": None},
        "reward_coef": 0.5,
        "kl_coef": 0.1,
        "kl_in": "reward",
    },
    {"advantage": "remax", "rollout": {"greedy_baseline": True}, "roles": PER_TURN},
    {"policy_loss": "gspo", "aggregation": "seq_mean_token_mean", "loss_args": {"clip_low": 3e-4}},
    {"rollout": {"top_p": 0.9}, "correction": on()},
    {"rollout": {"min_p": 0.1, "repetition_penalty": 1.1}, "correction": on()},
    {"rollout": {"top_k": 20}, "correction": CorrectionConfig(bypass=True)},
    {"correction": on(bypass=True), "policy_loss": "reinforce"},
    {
        "sample_filter": "pow",
        "filter_power": 3.0,
        "replay_steps": 1,
        "correction": on(),
        "advantage": "reinforce_plus_plus",
    },
    {"policy_loss": "cispo", "loss_args": {"clip_low": 10.0, "clip_high": 4}},
    {"policy_loss": "dppo_kl", "loss_args": {"clip_low": 1.5}},
    {"policy_loss": "gspo", "aggregation": len},
    {"policy_loss": "luspo", "seq_mean_over": "all"},
    {"policy_loss": "vespo", "mini_batches": 2},
    {"policy_loss": "vespo", "correction": CorrectionConfig(bypass=True)},
    *[{"policy_loss": "gspo", "aggregation": name} for name in AGGREGATIONS],
    {"policy_loss": "gspo", "seq_mean_over": "all"},
    {"kl_coef": 0.1, "kl_bias_correction": True, "off_policy_mask_threshold": 0.5},
    {"advantage_args": {"scale": "batch"}},
    {"advantage": "rloo", "advantage_args": {"normalize": True}},
    {"advantage": "reinforce_plus_plus_baseline", "whiten_over": "samples"},
    {"kl_coef": 0.1, "kl_cut": 10.0, "kl_in": "reward"},
    {"correction": on(high=0.4)},
    {"policy_loss": "geo_mean", "correction": on(level="geometric")},
    {"kl_coef": 0.1, "kl_estimator": "k1", "kl_in": "reward", "kl_target": 0.1},
]


@pytest.mark.parametrize("setting", SENSE, ids=str)
def test_sense_is_not_refused(setting):
    check_algo(config_of(**setting))


def test_every_option_of_one_algorithm_alone_has_its_reader():
    """An option that some built-in algorithm does not read is in READERS, so none is silent."""
    for_all = {
        "advantage", "advantage_args", "policy_loss", "loss_args", "aggregation", "kl_coef",
        "entropy_coef", "entropy_target",
        "top_entropy_fraction", "positive_nll_coef", "dynamic_sampling", "overlong_buffer",
        "sample_filter", "epochs", "mini_batches", "critic_warmup_steps", "correction",
        "reward_clip", "distillation", "ref_model_sync_steps", "demonstrations",
    }  # fmt: skip
    assert for_all | set(READERS) == {f.name for f in fields(AlgoConfig)}
    assert not for_all & set(READERS)


def test_functions_of_the_users_have_options_of_their_own():
    def mine(*args, gamma=1.0, **options):
        return None

    check_algo(config_of(advantage=mine, advantage_args={"gamma": 0.9, "lam": 0.8}))
    check_algo(config_of(policy_loss=mine, loss_args={"clip_high": 0.3}))
    check_algo(config_of(policy_loss=needs_tau, loss_args={"tau": 2.0}))
    check_algo(config_of(policy_loss=partial(needs_tau, tau=1.0)))
    check_algo(config_of(advantage=mine, rollout={"greedy_baseline": True}))
    with pytest.raises(ConfigError, match="mine needs critic"):
        check_algo(config_of(advantage=Estimator(mine, "tokens", critic=True)))


def test_a_record_of_the_users_says_what_the_step_must_know():
    loss = PolicyLoss(partial(needs_tau, tau=1.0), of_sequences=True)
    with pytest.raises(ConfigError, match="one term per sequence"):
        check_algo(config_of(policy_loss=loss, aggregation="token_mean"))
    check_algo(config_of(policy_loss=replace(loss, aggregation="seq_mean_token_mean")))
    assert loss_of(AlgoConfig(policy_loss=loss)) is loss


@pytest.mark.parametrize("name", MOVED)
def test_former_fields_say_their_new_spelling(name):
    group, option = MOVED[name].split(".")
    with pytest.raises(TypeError, match=f"{name}.*write {group}={{'{option}': 0.5}}"):
        AlgoConfig(**{name: 0.5})
    with pytest.raises(TypeError, match=f"write {group}="):
        replace(AlgoConfig(), **{name: 0.5})
    with pytest.raises(ConfigError, match=f"--algo.{name}: it is now --algo.{group}.{option}"):
        override(config_of(), f"algo.{name}", 0.5)
    options = {o for known in (ESTIMATORS, POLICY_LOSSES)
               for each in known.values() for o in options_of(each.function)}  # fmt: skip
    assert option in options


def test_an_option_is_set_from_the_command_line():
    config = override(config_of(), "algo.loss_args.clip_high", 0.3)
    config = override(config, "algo.policy_loss", "gspo")
    assert config.algo.loss_args == {"clip_high": 0.3}
    check_algo(config)


def test_there_is_one_name_for_each_thing():
    # no second way to leave out the division by the standard deviation, so none can be forgotten
    assert ESTIMATORS["dr_grpo"].function is not ESTIMATORS["grpo"].function
    assert not [f.name for f in fields(AlgoConfig) if "std" in f.name or "norm_adv" in f.name]


if TYPE_CHECKING:
    from torch import Tensor


def of_hidden_types(logprobs: Tensor, old_logprobs: Tensor, mb: Tensor, *, scale: Positive = 1.0):
    return -scale * logprobs, {}


class Scaled:
    def __call__(self, logprobs, old_logprobs, mb, *, scale: Positive = 1.0):
        return -scale * logprobs, {}


@pytest.mark.parametrize("loss", [of_hidden_types, partial(ppo, dual_clip=4.0), Scaled()])
def test_options_of_any_kind_of_function_are_checked(loss):
    option = "clip_low" if isinstance(loss, partial) else "scale"
    for value in (-1.0, "abc"):
        with pytest.raises(ConfigError, match=option):
            check_algo(config_of(policy_loss=loss, loss_args={option: value}))
    check_algo(config_of(policy_loss=loss, loss_args={option: 0.5}))


def of_containers(logprobs, old_logprobs, mb, *, layers: list[int] = (), names: set[str] = ()):
    return -logprobs, {}


def test_options_may_be_containers():
    check_algo(config_of(policy_loss=of_containers, loss_args={"layers": [1], "names": {"a"}}))
    for args in ({"layers": ["a"]}, {"layers": 1}, {"names": "a"}):
        with pytest.raises(ConfigError, match="expected"):
            check_algo(config_of(policy_loss=of_containers, loss_args=args))


def test_a_whole_number_is_the_float_that_an_option_is():
    options = loss_options(AlgoConfig(policy_loss="cispo", loss_args={"clip_high": 4}))
    assert options == {"clip_low": 0.2, "clip_high": 4.0}
    assert isinstance(options["clip_high"], float)


def test_records_that_no_step_could_use_are_refused():
    for wrong in ({"aggregation": "seq_mean"}, {"selects": "some"}):
        with pytest.raises(ValueError, match=repr(next(iter(wrong.values())))):
            PolicyLoss(ppo, **wrong)
    with pytest.raises(TypeError, match="a function is needed"):
        PolicyLoss("ppo")
    for field in ({"advantage": PolicyLoss(ppo)}, {"policy_loss": Estimator(needs_tau)}):
        with pytest.raises(ConfigError, match="a name or a function"):
            check_algo(config_of(**field))


def test_a_nested_option_is_set_from_the_command_line():
    config = override(config_of(advantage="gdpo"), "algo.advantage_args.reward_keys.score", 1.0)
    assert config.algo.advantage_args == {"reward_keys": {"score": 1.0}}
    config = override(config, "algo.advantage_args.reward_keys.format", 0.5)
    check_algo(config)
    assert config.algo.advantage_args == {"reward_keys": {"score": 1.0, "format": 0.5}}
    with pytest.raises(ConfigError, match=r"--algo\.advantage_args\.reward_keys\.score"):
        override(config_of(), "algo.reward_keys.score", 1.0)
    with pytest.raises(ConfigError, match=r"nearest: algo\.loss_args\.clip_high"):
        override(config_of(), "clip_high", 0.3)


def test_rewards_that_are_no_labels_end_a_step_as_samples_without_a_reward_do(topology):
    batch = SimpleNamespace(rewards=torch.tensor([0.5, 1.01, 7.0]), valid=torch.tensor([1, 1, 0]))
    with pytest.raises(
        ValueError, match=r"labels in 0\.\.1, got 0\.5 \.\. 1\.01: have the"
    ) as told:
        with_outcome_weights(batch, None)
    reports = [Phases(topology).report(error) for error in (told.value, TooManyInvalid("2 of 3"))]
    assert [report.exit_code for report in reports] == [FAILED, FAILED]
    assert reports[0].cause.startswith("ValueError: advantage='prime' takes rewards as labels")


@pytest.fixture
def show(topology, qwen3, tmp_path, monkeypatch):
    """Shows the plan of a run of sums with these options; its reward workers end with the test."""
    runners = []

    def runner(*args):
        runners.append(RewardRunner(*args))
        return runners[-1]

    write_task(tmp_path)
    monkeypatch.setattr(dry_run, "RewardRunner", runner)
    data = DataConfig(str(tmp_path / "train.jsonl"), prompts_per_step=8, max_prompt_tokens=16)
    runtime = SimpleNamespace(elastic=ElasticJob(1, 1), topology=topology, is_main=True)
    dry = dry_flags(True, 1, False)
    yield lambda **options: dry_run.show_plan(ppo_config(qwen3, data=data, **options), runtime, dry)
    for each in runners:
        each.close()


@pytest.mark.programs
def test_a_dry_run_refuses_rewards_that_are_no_labels(show):
    def reward(response, ground_truth):
        return 1.0 if response == ground_truth else -0.5

    def label(response, ground_truth):
        return 1.0 if response == ground_truth else 0.5

    prime = {"algo": AlgoConfig(advantage="prime"), "ref": TrainConfig(), "prm": TrainConfig()}
    show(reward=label, steps=2, **prime)
    show(reward=reward, steps=2)
    with pytest.raises(ConfigError, match=r"labels in 0\.\.1, got -0\.5 \.\. 1: .*empty answers"):
        show(reward=reward, steps=2, **prime)
