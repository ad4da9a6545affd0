"""Translates verl's settings of the algorithm: estimator, loss, KL and correction.

Each part sets the fields of its subject, and returns the settings of verl that it has used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.migration.config_source import Translation
from spmdrl.migration.verl_settings import ACTOR, ESTIMATORS, KL, OVERLONG


def objective(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Estimator, policy loss and its aggregation."""
    name = s["algorithm.adv_estimator"]
    name = ESTIMATORS.get(name, name)
    undivided = s.get("algorithm.norm_adv_by_std_in_grpo") is False
    if name == "grpo" and undivided:
        name = "dr_grpo"
    t.set("algo.advantage", name, "algorithm.adv_estimator")
    if name == "remax":
        t.set("rollout.greedy_baseline", True)
    takes = {"gae": ("gamma", "lam"), "reinforce_plus_plus": ("gamma",), "remax": ("gamma",)}
    chosen = {key: s[f"algorithm.{key}"] for key in takes.get(name, ()) if f"algorithm.{key}" in s}
    if undivided and name in ("grpo_passk", "gdpo"):
        t.set("algo.advantage_args", {"scale": "none"}, "algorithm.norm_adv_by_std_in_grpo")
    if chosen:
        t.set("algo.advantage_args", chosen, ", ".join(f"algorithm.{key}" for key in chosen))
    loss = s.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    loss = "ppo" if loss == "vanilla" else loss
    t.set("algo.policy_loss", loss, f"{ACTOR}.policy_loss.loss_mode")
    args = loss_args(s, loss)
    if args:
        t.set("algo.loss_args", args, f"{ACTOR}.clip_ratio and the like")
    mode = s.get(f"{ACTOR}.loss_agg_mode", "token-mean").replace("-", "_")
    if loss not in ("sapo", "geo_mean"):  # verl does not read it there
        t.set("algo.aggregation", mode, f"{ACTOR}.loss_agg_mode")
    if mode.startswith("seq_mean") or loss in ("sapo", "geo_mean"):
        t.set("algo.seq_mean_over", "all")
    batch, mini = s["data.train_batch_size"], s[f"{ACTOR}.ppo_mini_batch_size"]
    t.set("algo.mini_batches", max(1, -(-batch // mini)),
          f"data.train_batch_size / {ACTOR}.ppo_mini_batch_size")  # fmt: skip
    if batch % mini and batch > mini:
        t.notes[f"{ACTOR}.ppo_mini_batch_size={mini}"] = (
            f"it does not divide {batch}: choose one that does"
        )
    used = ["algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo", "algorithm.gamma",
            "algorithm.lam", f"{ACTOR}.loss_agg_mode", f"{ACTOR}.ppo_mini_batch_size"]  # fmt: skip
    return [*used, *(n for n in s if n.startswith((f"{ACTOR}.clip_ratio", f"{ACTOR}.policy_loss.",
                                                   f"{ACTOR}.tau_")))]  # fmt: skip


def loss_args(s: Mapping[str, Any], loss: str) -> dict[str, float]:
    """Returns the options of a policy loss, where they are not our defaults."""
    both = s.get(f"{ACTOR}.clip_ratio", 0.2)
    clip = {"clip_low": s.get(f"{ACTOR}.clip_ratio_low", both),
            "clip_high": s.get(f"{ACTOR}.clip_ratio_high", both)}  # fmt: skip
    prefix = f"{ACTOR}.policy_loss."
    options: dict[str, dict[str, Any]] = {
        "ppo": clip | {"dual_clip": s.get(f"{ACTOR}.clip_ratio_c", 3.0)},
        "clip_cov": clip | {"cov_fraction": s.get(f"{prefix}clip_cov_ratio", 0.0002),
                            "cov_low": s.get(f"{prefix}clip_cov_lb", 1.0),
                            "cov_high": s.get(f"{prefix}clip_cov_ub", 5.0)},
        "kl_cov": {"cov_fraction": s.get(f"{prefix}kl_cov_ratio", 0.0002),
                   "cov_kl_coef": s.get(f"{prefix}ppo_kl_coef", 0.1)},
        "sapo": {"tau_pos": s.get(f"{ACTOR}.tau_pos", 1.0),
                 "tau_neg": s.get(f"{ACTOR}.tau_neg", 1.05)},
    }  # fmt: skip
    ours = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "cov_fraction": 0.0002,
            "cov_low": 1.0, "cov_high": 5.0, "cov_kl_coef": 1.0, "tau_pos": 1.0,
            "tau_neg": 1.05}  # fmt: skip
    has_clip = loss in ("gspo", "cispo", "geo_mean", "dppo_tv", "dppo_kl")
    chosen = options.get(loss, clip if has_clip else {})
    return {name: value for name, value in chosen.items() if value != ours[name]}


def kl(s: Mapping[str, Any], t: Translation) -> list[str]:
    in_reward, in_loss = "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss"
    if s.get(in_reward):
        where, coef, kind = "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty"
        default = "kl"
    else:
        where, coef, kind = "loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
        default = "low_var_kl"
    if s.get(in_reward) and s.get(in_loss):
        t.notes[in_loss] = (
            "the KL stands in the reward or in the loss, not in both: reward is taken"
        )
    if s.get(in_reward) or s.get(in_loss):
        t.set("algo.kl_coef", s.get(coef, 0.001), coef)
    if t.fields.get("algo.kl_coef"):
        kind_of = str(s.get(kind, default))
        estimator = KL.get(kind_of.rstrip("+"), kind_of.rstrip("+")) + "+" * kind_of.endswith("+")
        t.set("algo.kl_in", where)
        t.set("algo.kl_estimator", estimator, kind)
        if estimator.startswith("k3"):
            t.set("algo.kl_cut", 10.0, "cuts it at 10")
        if s.get("algorithm.kl_ctrl.type") == "adaptive":
            t.set("algo.kl_target", s.get("algorithm.kl_ctrl.target_kl", 0.1), "algorithm.kl_ctrl")
            t.set("algo.kl_horizon", s.get("algorithm.kl_ctrl.horizon", 10_000))
    return [in_reward, in_loss, f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type",
            *(name for name in s if name.startswith("algorithm.kl_"))]  # fmt: skip


def correction(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Rollout correction, dynamic sampling, PF-PPO and the overlong penalty."""
    prefix = "algorithm.rollout_correction."
    if s.get(f"{prefix}rollout_is"):
        t.set("algo.correction.level", s[f"{prefix}rollout_is"], f"{prefix}rollout_is")
        t.set("algo.correction.high", s.get(f"{prefix}rollout_is_threshold", 2.0))
        t.set("algo.correction.normalize", bool(s.get(f"{prefix}rollout_is_batch_normalize")))
    if s.get(f"{prefix}bypass_mode"):
        t.set("algo.correction.bypass", True, f"{prefix}bypass_mode")
        if s.get(f"{prefix}loss_type") == "reinforce":
            t.set("algo.policy_loss", "reinforce", f"{prefix}loss_type")
            t.fields.pop("algo.loss_args", None)
    tests = [name.strip() for name in str(s.get(f"{prefix}rollout_rs") or "").split(",") if name]
    bounds = str(s.get(f"{prefix}rollout_rs_threshold") or "").split(",")
    if tests:
        try:
            reject = {
                name: bound_of(name, bound) for name, bound in zip(tests, bounds, strict=True)
            }
            t.set("algo.correction.reject", reject, f"{prefix}rollout_rs")
        except (ValueError, ZeroDivisionError):  # no bound for each, or no number above 0
            t.notes[f"{prefix}rollout_rs"] = "give each test its bound: algo.correction.reject"
    used = [name for name in s if name.startswith(prefix)]
    if s.get("algorithm.filter_groups.enable"):
        rounds = s.get("algorithm.filter_groups.max_num_gen_batches") or 10
        t.set("algo.dynamic_sampling", rounds, "algorithm.filter_groups.max_num_gen_batches")
        metric = s.get("algorithm.filter_groups.metric")
        if metric not in (None, "acc", "score", "seq_reward", "seq_final_reward"):
            t.set("algo.dynamic_sampling_metric", metric, "algorithm.filter_groups.metric")
    used += [name for name in s if name.startswith("algorithm.filter_groups.")]
    overlong = {m[1]: (name, s[name]) for name in s if (m := OVERLONG.fullmatch(name))}
    if overlong.get("enable", ("", "len" in overlong))[1] and "len" in overlong:
        t.set("algo.overlong_buffer", overlong["len"][1], overlong["len"][0])
        t.set("algo.overlong_penalty", float(overlong.get("penalty_factor", ("", 1.0))[1]))
    used += [name for name, _ in overlong.values()]
    used += ["reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len",
             "algorithm.use_pf_ppo"]  # fmt: skip
    if not s.get("algorithm.use_pf_ppo"):
        used += ["algorithm.pf_ppo.reweight_method", "algorithm.pf_ppo.weight_pow"]
    return used


def bound_of(test: str, text: str) -> float | tuple[float, float]:
    """Returns the bound of a test of a rejection. Those of k1 bound 1 / rho in verl, rho here."""
    ends = tuple(float(end) for end in text.split("_"))
    if len(ends) == 1:
        return ends[0]
    return (1 / ends[1], 1 / ends[0]) if test.endswith("k1") else (ends[0], ends[1])
