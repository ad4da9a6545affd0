"""Checks which combinations of algorithms and options make sense; the others are refused with the
reason.

An option that the chosen algorithm does not read is refused too: a clip range or a coefficient that
was set and has no effect is a run that is not what its config says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmdrl.algo.advantages import Estimator, estimator_of, reward_keys_of
from spmdrl.algo.correction import TESTS
from spmdrl.algo.losses import SELECTION_OPTIONS, aggregation_of, loss_of, loss_options
from spmdrl.config import AlgoConfig, CorrectionConfig, PpoConfig, RolloutConfig, require
from spmdrl.training.checks.demonstrations import check_demonstrations
from spmdrl.training.checks.online_preference import check_pairs
from spmdrl.training.checks.options import check_all_options, is_number, shown

# option -> (who reads it, in words; whether this config's algorithm does)
Readers = dict[str, tuple[str, Callable[[AlgoConfig], bool]]]


READERS: Readers = {
    "value_clip": ("a critic: advantage gae", lambda a: estimator_of(a).critic),
    "norm_length": (
        "aggregation seq_mean_token_sum_norm",
        lambda a: aggregation_of(a) == "seq_mean_token_sum_norm",
    ),
    "seq_mean_over": (
        "aggregation seq_mean_..., which divide by sequences",
        lambda a: str(aggregation_of(a)).startswith("seq_mean") or not named(aggregation_of(a)),
    ),
    "whiten_over": (
        "advantage gdpo, reinforce_plus_plus_baseline, which are whitened and of whole samples",
        lambda a: estimator_of(a).whiten and estimator_of(a).sees == "outcomes",
    ),
    "kl_cut": (
        "kl_estimator 'k3' and 'k3+' with kl_coef above 0",
        lambda a: a.kl_coef > 0 and a.kl_estimator in ("k3", "k3+"),
    ),
    "kl_bias_correction": (
        "kl_estimator 'k3' in the loss, with kl_coef above 0",
        lambda a: a.kl_coef > 0 and a.kl_in == "loss" and a.kl_estimator == "k3",
    ),
    "off_policy_mask_threshold": (
        "estimators whose advantages may be below 0",
        lambda a: a.advantage != "grpo_passk",
    ),
    "reward_coef": (
        "kl_in='reward' with kl_coef above 0, and distillation, beside which it weighs the reward",
        lambda a: (a.kl_coef > 0 and a.kl_in == "reward") or a.distillation is not None,
    ),
    "kl_estimator": ("kl_coef above 0", lambda a: a.kl_coef > 0),
    "kl_in": ("kl_coef above 0", lambda a: a.kl_coef > 0),
    "kl_target": ("kl_coef above 0", lambda a: a.kl_coef > 0),
    "ref_model_mixup_alpha": ("ref_model_sync_steps", lambda a: a.ref_model_sync_steps > 0),
    "kl_horizon": ("kl_target", lambda a: a.kl_target is not None),
    **dict.fromkeys(
        ("entropy_delta", "entropy_coef_min", "entropy_coef_max"),
        ("entropy_target", lambda a: a.entropy_target is not None),
    ),
    "dynamic_sampling_metric": ("dynamic_sampling", lambda a: a.dynamic_sampling > 0),
    "overlong_penalty": ("overlong_buffer", lambda a: a.overlong_buffer > 0),
    "filter_power": ("sample_filter 'pow'", lambda a: a.sample_filter == "pow"),
    "replay_steps": ("sample_filter", lambda a: a.sample_filter is not None),
    "pairs": ("losses of pairs: dpo, ipo, ...", lambda a: loss_of(a).pairs is not None),
    "policy_shaping_gamma": (
        "demonstrations above 0, with a loss that is not of pairs and has a ratio to shape",
        lambda a: a.demonstrations > 0 and loss_of(a).pairs is None,
    ),
}


def check_algo(config: PpoConfig) -> None:
    """Raises ConfigError with the options, their values and the remedy."""
    algo = config.algo
    check_all_options(algo)
    check_pairs(config)
    check_demonstrations(config)
    check_ranges(algo)
    check_read(algo)
    check_teacher(config)
    check_estimator(config, estimator_of(algo))
    check_loss(algo, estimator_of(algo))
    check_kl_and_entropy(algo)
    check_correction(config)
    check_data(config)


def check_ranges(algo: AlgoConfig) -> None:
    for name in ("epochs", "mini_batches"):
        require(getattr(algo, name) >= 1, f"algo.{name}={getattr(algo, name)}: at least 1")
    positive = (
        "norm_length", "value_clip", "kl_cut", "kl_target", "kl_horizon", "entropy_delta",
        "overlong_penalty", "filter_power", "off_policy_mask_threshold",
    )  # fmt: skip
    for name in positive:
        value = getattr(algo, name)
        require(value is None or value > 0, f"algo.{name}={value} must be above 0")
    for name in (
        "reward_coef", "kl_coef", "positive_nll_coef", "dynamic_sampling", "overlong_buffer",
        "replay_steps", "critic_warmup_steps", "entropy_target", "entropy_coef_min",
        "ref_model_sync_steps",
    ):  # fmt: skip
        value = getattr(algo, name)
        require(value is None or value >= 0, f"algo.{name}={value} must not be negative")
    require(
        algo.entropy_coef_max is None or algo.entropy_coef_max >= algo.entropy_coef_min,
        f"algo.entropy_coef_max={algo.entropy_coef_max} is below "
        f"entropy_coef_min={algo.entropy_coef_min}",
    )
    require(
        algo.reward_clip is None or algo.reward_clip[0] < algo.reward_clip[1],
        f"algo.reward_clip={algo.reward_clip}: expected the lower bound, then the higher one",
    )
    require(
        0 < algo.ref_model_mixup_alpha <= 1,
        f"algo.ref_model_mixup_alpha={algo.ref_model_mixup_alpha} must be in (0, 1]: 1 makes the "
        "reference the policy",
    )
    require(
        0 < algo.top_entropy_fraction <= 1,
        f"algo.top_entropy_fraction={algo.top_entropy_fraction} must be in (0, 1]",
    )


def check_teacher(config: PpoConfig) -> None:
    """Raises ConfigError where rewards have no say and there is no KL to another model to learn
    from.
    """
    algo, ref = config.algo, config.ref
    if algo.reward_coef > 0:
        return
    require(
        ref.model not in (None, config.model) or bool(config.data.hint_key or config.teachers),
        "algo.reward_coef=0 leaves the reference alone to learn from, which is the model itself "
        "and teaches it nothing: set ref.model to a teacher, or data.hint_key",
    )
    asks = {
        "overlong_buffer": algo.overlong_buffer, "dynamic_sampling": algo.dynamic_sampling,
        "sample_filter": algo.sample_filter, "positive_nll_coef": algo.positive_nll_coef,
        "advantage='remax'": algo.advantage == "remax",
    }  # fmt: skip
    found = [name for name, value in asks.items() if value]
    require(not found, f"algo.{', '.join(found)} goes by rewards, and algo.reward_coef is 0")


def check_read(algo: AlgoConfig) -> None:
    default = AlgoConfig()
    for name, (reader, is_read) in READERS.items():
        value = getattr(algo, name)
        require(
            value == getattr(default, name) or is_read(algo),
            f"algo.{name}={shown(value)} would have no effect: it is read by {reader}; here "
            f"advantage={shown(algo.advantage)}, policy_loss={shown(algo.policy_loss)}",
        )


def check_estimator(config: PpoConfig, estimator: Estimator) -> None:
    algo, name = config.algo, shown(config.algo.advantage)
    if estimator.critic:
        require(config.critic is not None, f"algo.advantage={name} needs critic=TrainConfig(...)")
    else:
        require(
            config.critic is None,
            f"critic is set, but algo.advantage={name} has no use for one; leave it out or "
            "choose 'gae'",
        )
    require(
        algo.critic_warmup_steps == 0 or config.critic is not None,
        f"algo.critic_warmup_steps={algo.critic_warmup_steps} without a critic: nothing learns",
    )
    require(
        not estimator.groups or config.rollout.n > 1,
        f"algo.advantage={name} compares samples of one prompt: rollout.n={config.rollout.n} gives "
        "every sample advantage 0; use n of 2 or more",
    )
    require(
        not estimator.needs_greedy or config.rollout.greedy_baseline,
        f"algo.advantage={name} needs the greedy answer to each prompt: set "
        "rollout.greedy_baseline=True",
    )
    require(
        estimator.needs_greedy or not config.rollout.greedy_baseline or not named(algo.advantage),
        f"rollout.greedy_baseline is set, but algo.advantage={name} has no use for it (remax has)",
    )
    check_process_rewards(config, estimator)
    check_advantage_options(config)


def check_process_rewards(config: PpoConfig, estimator: Estimator) -> None:
    """Refuses a process reward model where the estimator has no use for it, and the reverse."""
    algo, name = config.algo, shown(config.algo.advantage)
    require(
        estimator.prm == (config.prm is not None),
        f"algo.advantage={name} "
        + ("needs prm=TrainConfig(...)" if estimator.prm else "has no use for prm; 'prime' has"),
    )
    if not estimator.prm:
        return
    require(
        config.prm is not None and config.prm.model == config.ref.model,
        "prime's reward is log pi_prm - log pi_ref: prm.model and ref.model must be the same, "
        "the model that the prm starts from",
    )
    require(
        algo.overlong_buffer == 0,
        "algo.overlong_buffer changes the rewards, which advantage='prime' takes as labels",
    )
    require(
        not config.rewards.per_turn,
        f"rewards.per_turn adds to the reward, which advantage={name} takes as a label in 0..1 "
        "of the whole sample; its rewards within a sample are those of prm",
    )


def check_advantage_options(config: PpoConfig) -> None:
    """Refuses options of the estimator that another option leaves without an effect."""
    args = config.algo.advantage_args
    require(
        args.get("lam", 1.0) == 1.0
        or args.get("lam_critic") is None
        or args.get("lam_alpha") is None,
        f"algo.advantage_args: lam={args.get('lam')} would have no effect: lam_alpha="
        f"{args.get('lam_alpha')} makes the actor's lambda, lam_critic={args.get('lam_critic')} "
        "is the critic's",
    )
    check_reward_keys(config)


def check_reward_keys(config: PpoConfig) -> None:
    """Refuses reward keys without a weight, and rewards that no key has (GDPO)."""
    algo, args = config.algo, config.algo.advantage_args
    keys = {key: args["reward_keys"][key] for key in reward_keys_of(algo) if "reward_keys" in args}
    require(
        algo.advantage != "gdpo" or algo.overlong_buffer == 0,
        "algo.overlong_buffer is added to the reward, and advantage='gdpo' reads only "
        f"its reward_keys={list(keys)}",
    )
    require(
        algo.advantage != "gdpo" or not config.rewards.per_turn,
        "rewards.per_turn gives turns a part of the reward, and advantage='gdpo' reads only "
        f"its reward_keys={list(keys)}",
    )
    require(
        algo.reward_clip is None or not (algo.advantage == "gdpo" or config.rewards.per_turn),
        "algo.reward_clip is of the whole reward of a sample, and advantage='gdpo' and "
        "rewards.per_turn read parts of it",
    )
    weights = list(keys.values())
    require(
        all(is_number(w) for w in weights) and (not weights or any(weights)),
        f"algo.advantage_args: reward_keys={dict(keys)} must be numbers, not all 0",
    )
    require(
        algo.advantage != "gdpo" or len(keys) > 0,
        "algo.advantage='gdpo' needs algo.advantage_args={'reward_keys': {'key': weight, ...}}, "
        "keys of what the reward function returns; 'score' is the reward itself",
    )


def check_loss(algo: AlgoConfig, estimator: Estimator) -> None:
    name, loss, options = algo.policy_loss, loss_of(algo), loss_options(algo)
    if loss.of_sequences:
        chosen = aggregation_of(algo)
        require(
            chosen == "seq_mean_token_mean" or not named(chosen),
            f"algo.policy_loss={shown(name)} is one term per sequence: algo.aggregation must be "
            f"'seq_mean_token_mean' (or None), not {shown(algo.aggregation)}",
        )
        check_one_number_per_sequence(algo, estimator)
    missing = [n for n in SELECTION_OPTIONS.get(loss.selects or "", ()) if n not in options]
    require(
        not missing,
        f"algo.policy_loss={shown(name)} selects tokens (selects={loss.selects!r}), for which its "
        f"function needs the options {', '.join(missing)}",
    )
    if loss.selects == "drawn":
        require(
            options["cov_low"] <= options["cov_high"],
            f"algo.loss_args: cov_low={options['cov_low']} is above cov_high={options['cov_high']}",
        )
    require(
        name != "kl_cov" or algo.epochs * algo.mini_batches > 1,
        "algo.policy_loss='kl_cov' with one update per rollout: the ratio is 1 and the penalty's "
        "gradient 0; raise algo.epochs or algo.mini_batches",
    )
    check_sequence_weights(algo)
    if named(algo.advantage) and named(name):
        require(
            (name == "sppo") == (algo.advantage == "win_rate"),
            f"algo.policy_loss={name!r} with advantage={algo.advantage!r}: sppo regresses on "
            "the centred win probability, which is advantage='win_rate', and no other loss does",
        )


def check_sequence_weights(algo: AlgoConfig) -> None:
    """Refuses what would undo the lengths of luspo, or leave vespo's weight without a say."""
    name, chosen = algo.policy_loss, aggregation_of(algo)
    require(
        name != "luspo" or chosen == "seq_mean_token_sum" or not named(chosen),
        "algo.policy_loss='luspo' scales a sequence's term by its length, which is "
        f"algo.aggregation='seq_mean_token_sum' (or None), not {shown(algo.aggregation)}; 'gspo' "
        "takes any",
    )
    require(
        name != "vespo" or algo.correction.level == "off",
        "algo.policy_loss='vespo' weighs by the sequence's ratio itself, so algo.correction.level="
        f"{algo.correction.level!r} would correct twice: use CorrectionConfig(bypass=True), with "
        "which that ratio is the trainer's to the engine",
    )
    require(
        name != "vespo" or algo.correction.bypass or algo.epochs * algo.mini_batches > 1,
        "algo.policy_loss='vespo' with one update per rollout: its ratio is 1 and its weight 1; "
        "set algo.correction=CorrectionConfig(bypass=True), or raise algo.mini_batches",
    )


def check_one_number_per_sequence(algo: AlgoConfig, estimator: Estimator) -> None:
    """Refuses options about single tokens beside a loss whose terms stand for whole sequences."""
    level, name = algo.correction.level, algo.policy_loss
    require(
        estimator.sees == "outcomes",
        f"algo.policy_loss={shown(name)} takes one advantage per sequence, algo.advantage="
        f"{shown(algo.advantage)} gives one per token",
    )
    require(
        level != "token",
        f"algo.policy_loss={shown(name)} is one term per sequence and takes one weight for it: use "
        "algo.correction.level='sequence' or 'geometric'",
    )
    require(
        algo.top_entropy_fraction == 1,
        f"algo.policy_loss={shown(name)} is one term per sequence: algo.top_entropy_fraction="
        f"{algo.top_entropy_fraction} chooses tokens",
    )


def check_kl_and_entropy(algo: AlgoConfig) -> None:
    require(
        not (algo.kl_coef and algo.kl_in == "loss" and algo.kl_estimator == "k1"),
        "algo.kl_estimator='k1' in the loss has a gradient of 0 in expectation: use 'k2', 'k3', "
        "'k1+' (its value with the gradient of k2), or kl_in='reward'",
    )
    require(
        not (algo.kl_bias_correction and algo.kl_cut is not None),
        f"algo.kl_bias_correction with algo.kl_cut={algo.kl_cut}: a k3 that is cut is biased, "
        "whatever it is multiplied by; leave one of them out",
    )
    plain = str(algo.kl_estimator).removesuffix("+")
    require(
        not (algo.kl_in == "reward" and named(algo.kl_estimator) and plain != algo.kl_estimator),
        f"algo.kl_estimator={algo.kl_estimator!r} differs from {plain!r} in its gradient, and "
        f"kl_in='reward' has none: use {plain!r}",
    )
    require(
        not (algo.kl_coef and algo.kl_in == "reward" and algo.advantage in ("gdpo", "win_rate")),
        f"algo.kl_in='reward' is lost on advantage={algo.advantage!r}, which "
        "ranks or normalises rewards by key: use kl_in='loss'",
    )
    require(
        not (algo.kl_coef and algo.kl_in == "reward" and algo.advantage == "gpg"),
        "algo.kl_in='reward' leaves no reward 0, and advantage='gpg' scales by the share of those "
        "that are not: use kl_in='loss'",
    )


def check_correction(config: PpoConfig) -> None:
    algo, correction = config.algo, config.algo.correction
    for name, bound in correction.reject.items():
        require(name in TESTS, f"algo.correction.reject: no test {name!r}; there are {list(TESTS)}")
        check_bound(name, bound)
    require(correction.high > 0, f"algo.correction.high={correction.high} must be above 0")
    require(
        correction.mode != "mask" or 0 < correction.low <= correction.high,
        f"algo.correction.low={correction.low} and high={correction.high}: 0 < low <= high",
    )
    default = CorrectionConfig()
    for field in ("mode", "high", "normalize", "low"):
        value = getattr(correction, field)
        read = correction.level != "off" and (field != "low" or correction.mode == "mask")
        require(
            read or value == getattr(default, field),
            f"algo.correction.{field}={value!r} would have no effect: it is read with "
            + ("mode='mask'" if field == "low" else "level='token', 'sequence' or 'geometric'"),
        )
    if correction.bypass:
        check_bypass(algo)
    rollout, whole = config.rollout, RolloutConfig()
    cut = () if rollout.keep_sampling_mask else ("top_p", "top_k", "min_p", "min_tokens")
    names = (*cut, "repetition_penalty")
    cuts = [f"{name}={getattr(rollout, name)}" for name in names
            if getattr(rollout, name) != getattr(whole, name)]  # fmt: skip
    require(
        not cuts or takes_other_samplers(algo),
        f"rollout: {', '.join(cuts)} samples from another policy than the one that is trained: set "
        "algo.correction=CorrectionConfig(level='token') to weigh for it, train on the cut "
        "distribution (keep_sampling_mask=True), or sample from the whole one (top_p=1, top_k=0, "
        "min_p=0, min_tokens=0, repetition_penalty=1)",
    )


def weighs_the_engine(algo: AlgoConfig) -> bool:
    """Returns True if the loss weighs tokens by the engine's logprobs: by a weight of its own, or
    by the loss's ratio, which with bypass is to the engine.
    """
    return algo.correction.level != "off" or (algo.correction.bypass and loss_of(algo).has_ratio)


def takes_other_samplers(algo: AlgoConfig) -> bool:
    """Returns True if answers may be of another distribution than the policy's: the loss weighs
    for it, or compares the answers of a pair, whoever wrote them.
    """
    return weighs_the_engine(algo) or loss_of(algo).pairs is not None


def check_bound(name: str, bound: Any) -> None:
    shown = f"algo.correction.reject[{name!r}]={bound!r}"
    if name.endswith("k1"):
        pair = isinstance(bound, tuple | list) and len(bound) == 2 and all(map(is_number, bound))
        require(
            pair and 0 < bound[0] < bound[1],
            f"{shown} must be (low, high) bounds of the ratio, 0 < low < high, e.g. (0.5, 2.0)",
        )
    else:
        require(is_number(bound) and bound > 0, f"{shown} must be one upper bound above 0")


def check_bypass(algo: AlgoConfig) -> None:
    """Old logprobs are the engine's then: what needs a pass of the trainer's own is not there."""
    correction = algo.correction
    no_ratio = not loss_of(algo).has_ratio
    require(
        correction.level == "off" or no_ratio or not named(algo.policy_loss),
        f"algo.correction: bypass makes the ratio of policy_loss={shown(algo.policy_loss)} that of "
        f"the trainer to the engine, so level={correction.level!r} would correct twice; use "
        "level='off', or policy_loss='reinforce'",
    )
    require(
        correction.level != "off" or bool(correction.reject) or not no_ratio,
        f"algo.correction.bypass with policy_loss={shown(algo.policy_loss)}, which has no ratio, "
        "corrects nothing: set level='token'",
    )
    require(
        not correction.normalize,
        "algo.correction.normalize needs all weights before the update; bypass has them within it",
    )
    for holds, what in (
        (algo.top_entropy_fraction == 1, "top_entropy_fraction"),
        (not estimator_of(algo).token_sums, f"advantage={shown(algo.advantage)}"),
        (not algo.kl_coef or algo.kl_in != "reward", "kl_in='reward'"),
    ):
        require(holds, f"algo.correction.bypass leaves out the pass that algo.{what} needs")


def check_data(config: PpoConfig) -> None:
    algo, rollout = config.algo, config.rollout
    require(
        algo.overlong_buffer <= rollout.max_tokens,
        f"algo.overlong_buffer={algo.overlong_buffer} is longer than rollout.max_tokens="
        f"{rollout.max_tokens}",
    )
    require(
        algo.dynamic_sampling == 0 or rollout.n > 1,
        f"algo.dynamic_sampling={algo.dynamic_sampling} drops groups of equal rewards, and with "
        f"rollout.n={rollout.n} every group is one",
    )
    require(
        algo.dynamic_sampling == 0 or algo.advantage != "gdpo",
        "algo.dynamic_sampling drops groups by the reward 'score', which advantage='gdpo' does not "
        "read",
    )
    require(
        algo.sample_filter is None or not estimator_of(algo).groups,
        f"algo.sample_filter={algo.sample_filter!r} leaves samples out, which would move the group "
        f"mean of advantage={shown(algo.advantage)}: use 'gae', 'reinforce_plus_plus' or 'remax'",
    )
    require(
        algo.replay_steps == 0 or weighs_the_engine(algo),
        f"algo.replay_steps={algo.replay_steps} trains on samples of older weights: set "
        "algo.correction=CorrectionConfig(level='token') or bypass=True to account for it",
    )


def named(value: Any) -> bool:
    """Chosen by name, not a function of the user's."""
    return isinstance(value, str)
