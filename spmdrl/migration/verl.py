"""Translates verl's settings: a YAML file, or the overrides in a script that starts verl.

The names are those of verl 0.7 to 0.9. What a setting means in each library is explained in
docs/migration.md. Where verl's default is not ours, verl's is written down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import yaml

from spmdrl.config import TRACKERS, ConfigError, RolloutConfig
from spmdrl.migration.config_source import Code, Translation, setting
from spmdrl.migration.shell import Settings, commands
from spmdrl.migration.verl_settings import (
    ACTOR,
    ALWAYS,
    BY_DATA_SOURCE,
    DEFAULTS,
    DTYPES,
    ESTIMATORS,
    FSDP,
    KL,
    MEGATRON,
    NOTES,
    OPTIM,
    OPTIMIZERS,
    OTHER_POLICY,
    OVERLONG,
    PROGRAM,
    REF,
    ROLLOUT,
    SAME,
    TRAINED,
)


def overrides_of_script(text: str) -> Settings | None:
    """Returns the settings that a shell script gives to verl; None where it does not start verl.

    Raises ConfigError where the script starts another program of verl than the one for
    reinforcement learning. Of several commands that start it the first is taken.
    """
    for words in commands(text):
        starts = (i for i, word in enumerate(words) if PROGRAM.fullmatch(word))
        place = next(starts, None)
        if place is None:
            continue
        program, rest = words[place], words[place + 1 :]
        settings = dict(as_setting(w) for w in rest if re.match(r"[+~]*[A-Za-z_][\w.@/]*=", w))
        if not any("." in name for name in settings):
            continue
        if not {n.partition(".")[0] for n in settings} >= {"data", "actor_rollout_ref"}:
            raise ConfigError(
                f"the script starts {program}: of verl only the program for reinforcement learning "
                "is translated; docs/sft.md has the fields of fine-tuning"
            )
        return Settings(settings, words.undecided)
    return None


def as_setting(word: str) -> tuple[str, Any]:
    name, _, value = word.lstrip("+~").partition("=")
    return name, as_value(value)


def as_value(text: str) -> Any:
    """Returns a value as Hydra reads it: 1e-6 is a number, [a, b] a list."""
    if re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", text):
        return float(text)
    try:
        return text if " #" in text else yaml.safe_load(text)  # there it begins a comment
    except yaml.YAMLError:
        return text


def settings_of_yaml(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree's values by their dotted names, without OmegaConf's references."""

    def leaves(node: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, Mapping) and value and name != "apply_chat_template_kwargs":
                yield from leaves(value, f"{where}{name}.")
            elif value != "???" and not (isinstance(value, str) and "${" in value):
                yield f"{where}{name}", as_value(value) if isinstance(value, str) else value

    skipped = ("defaults", "hydra")
    found = leaves({k: v for k, v in tree.items() if k not in skipped}, "")
    return {k: v for k, v in found if not k.endswith("_target_") and v is not None}


def translate(given: Mapping[str, Any]) -> Translation:
    """Returns what verl's settings are here. given: by dotted names; verl's defaults fill up."""
    t = Translation("verl")
    unknown = {name: value for name, value in given.items() if is_unknown(name, value)}
    for name, value in unknown.items():
        t.notes[setting(name, value)] = "the script does not say what this variable is"
    given = {k: v for k, v in given.items() if v is not None and k not in unknown}
    for name, value in given.items():
        if isinstance(DEFAULTS.get(name), int | float) and not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r}: verl takes a number")
    settings = DEFAULTS | given
    left = dict(settings)
    for part in (
        data, model, objective, kl, correction, engines, reference, experts, rollout, critic,
        rewards, schedule,
    ):  # fmt: skip
        for name in part(settings, t):
            left.pop(name, None)
    for name, value in left.items():
        if name in SAME:
            t.set(SAME[name], value, "" if name not in given else name)
        elif why := reason(name):
            t.granted[name] = why
        elif name in given and value not in (False, None, "", [], {}, -1):
            why = next((why for start, why in NOTES.items() if name.startswith(start)), None)
            t.notes[setting(name, value)] = why or "nothing here has this name"
    return t


def is_unknown(name: str, value: Any) -> bool:
    """Says whether a value has a variable that nothing sets, where it is no part of a path."""
    has_path = name.endswith(("path", "files", "dir", "name"))
    return isinstance(value, str) and "$" in value and not has_path


def reason(name: str) -> str | None:
    """Returns why a setting needs nothing here; None where it does."""
    return next((why for start, why in ALWAYS.items() if name.startswith(start)), None)


# Each of the following sets the fields of one subject, and returns the settings that it has used.


def data(s: Mapping[str, Any], t: Translation) -> list[str]:
    for ours, theirs in (("train", "data.train_files"), ("eval", "data.val_files")):
        files = s.get(theirs)
        if files is None and ours == "train":
            t.set("data.train", "train.parquet")
            t.notes["data.train_files"] = "not given; write the file's name"
        elif files is not None:
            several = isinstance(files, list) and len(files) > 1
            t.set(f"data.{ours}", tuple(files) if several else files[0] if isinstance(files, list)
                  else files, theirs)  # fmt: skip
    cut = s.get("data.truncation", "error")
    how = (
        "filter"
        if s.get("data.filter_overlong_prompts")
        else "truncate"
        if cut == "left"
        else "error"
    )
    t.set("data.overlong_prompts", how, "data.filter_overlong_prompts, data.truncation")
    if cut not in ("left", "error") and how != "filter":
        t.notes[setting("data.truncation", cut)] = "a prompt is cut at its beginning, or refused"
    if s["data.val_max_samples"] > 0 and "data.eval" in t.fields:
        t.set("data.max_eval_prompts", s["data.val_max_samples"], "data.val_max_samples")
    return ["data.train_files", "data.val_files", "data.filter_overlong_prompts", "data.truncation",
            "data.val_max_samples"]  # fmt: skip


def model(s: Mapping[str, Any], t: Translation) -> list[str]:
    prefix = "actor_rollout_ref.model."
    if f"{prefix}path" not in s:
        t.set("model", "Qwen/Qwen3-0.6B")
        t.notes[f"{prefix}path"] = "not given; write the model's name"
    rank = s.get(f"{prefix}lora_rank") or s.get(f"{prefix}lora.rank") or 0
    if rank:
        t.set("actor.lora.rank", rank, f"{prefix}lora_rank")
        t.set("actor.lora.alpha", s.get(f"{prefix}lora_alpha", s.get(f"{prefix}lora.alpha", 16)))
        targets = s.get(f"{prefix}target_modules", "all-linear")
        t.set("actor.lora.target_modules", tuple(targets) if isinstance(targets, list) else targets)
        for adapter in (f"{prefix}lora_adapter_path", f"{prefix}lora.adapter_path"):
            if s.get(adapter):
                t.set("actor.lora.adapter", s[adapter], adapter)
        if s.get(f"{prefix}lora.target_modules"):
            t.notes[setting(f"{prefix}lora.target_modules", s[f"{prefix}lora.target_modules"])] = (
                "names of Megatron; ours are all linear layers: actor.lora.target_modules"
            )
    if s.get(f"{prefix}use_liger"):
        t.set("actor.kernels", "liger", f"{prefix}use_liger")
    if s.get(f"{prefix}use_fused_kernels"):
        t.granted[f"{prefix}use_fused_kernels"] = "the LM head is always fused with the loss"
    names = ("lora_rank", "lora.rank", "lora_alpha", "lora.alpha", "target_modules",
             "lora_adapter_path", "lora.adapter_path", "lora.target_modules", "use_liger",
             "use_fused_kernels")  # fmt: skip
    return [prefix + name for name in names]


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
        kind_of = str(s.get(kind, default))
        estimator = KL.get(kind_of.rstrip("+"), kind_of.rstrip("+")) + "+" * kind_of.endswith("+")
        t.set("algo.kl_coef", s.get(coef, 0.001), coef)
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
    if tests and len(tests) == len(bounds):
        reject = {name: bound_of(name, bound) for name, bound in zip(tests, bounds, strict=True)}
        t.set("algo.correction.reject", reject, f"{prefix}rollout_rs")
    elif tests:
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


def engines(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Layout, memory, micro-batches and optimizer of the actor and of the critic."""
    used = role(s, t, ACTOR, "actor")
    has_critic = s["algorithm.adv_estimator"] == "gae"
    return used + (role(s, t, "critic", "critic") if has_critic else [])


def role(s: Mapping[str, Any], t: Translation, theirs: str, ours: str) -> list[str]:
    """Layout, memory, micro-batches and optimizer of a role that is trained."""
    used = [*layout(s, t, theirs, ours), *optimizer(s, t, theirs, ours)]
    if s.get(f"{theirs}.megatron.override_transformer_config.recompute_granularity"):
        t.set(f"{ours}.activation_checkpointing", True, "recompute_granularity")
    if s.get(f"{theirs}.optim.override_optimizer_config.optimizer_cpu_offload"):
        t.set(f"{ours}.offload_optimizer", True, "optimizer_cpu_offload")
    return [*used, *micro_batches(s, t, theirs, ours)]


def layout(s: Mapping[str, Any], t: Translation, theirs: str, ours: str) -> list[str]:
    """Sets the engine of a role, and its degrees and offloading, as far as the engine has them."""
    megatron = is_megatron(s, theirs)
    if megatron:
        t.set(f"{ours}.engine", "megatron", f"{theirs}.megatron")
    groups: tuple[tuple[str, Mapping[str, str]], ...] = (
        ("fsdp_config", FSDP), ("model.fsdp_config", FSDP), ("megatron", MEGATRON),
    )  # fmt: skip
    given = {f"{theirs}.{group}.{name}": (group, field)
             for group, names in groups for name, field in names.items()}  # fmt: skip
    given[f"{theirs}.ulysses_sequence_parallel_size"] = ("fsdp_config", "ulysses")
    for key, (group, field) in given.items():
        value = s.get(key)
        if value is None or (ours == "ref" and field in TRAINED):
            continue
        if megatron != (group == "megatron"):
            t.granted[f"{theirs}.{group}"] = "of the engine that the role does not have"
        elif field == "dtype" and str(value) not in DTYPES:
            t.notes[setting(key, value)] = f"{ours}.dtype is bfloat16 or float32"
        else:
            t.set(f"{ours}.{field}", DTYPES[value] if field == "dtype" else value, key)
    sequence = f"{ours}.sequence_parallel"
    if t.fields.get(f"{ours}.tensor_parallel", 1) == 1:
        t.fields.pop(sequence, None)
    elif sequence not in t.fields:
        t.set(sequence, True, "sequence_parallel, its default")
    return [*given]


def optimizer(s: Mapping[str, Any], t: Translation, theirs: str, ours: str) -> list[str]:
    used: list[str] = []
    for key in (f"{theirs}.optim.optimizer", f"{theirs}.optim.name"):
        used.append(key)
        name = str(s.get(key, "adamw"))
        if name.lower() not in OPTIMIZERS:
            t.notes[setting(key, name)] = "optim.name is adamw, adamw8bit or muon; adamw is taken"
        elif OPTIMIZERS[name.lower()] != "adamw":
            t.set(f"{ours}.optim.name", OPTIMIZERS[name.lower()], key)
    for name, field in OPTIM.items():
        key = f"{theirs}.optim.{name}"
        used.append(key)
        value = s.get(key)
        if value is not None and not (name == "lr_warmup_steps" and value < 0):
            t.set(f"{ours}.optim.{field}", tuple(value) if isinstance(value, list) else value, key)
    names = [f"{theirs}.optim.{n}" for n in ("lr_scheduler_type", "warmup_style", "lr_decay_style")]
    source = next((name for name in names if s.get(name) is not None), "")
    if s.get(source) in ("cosine", "linear"):
        t.set(f"{ours}.optim.schedule", s[source], source)
        steps = s.get(f"{theirs}.optim.lr_decay_steps")
        if steps:
            t.set(f"{ours}.optim.decay_steps", steps, f"{theirs}.optim.lr_decay_steps")
        elif s.get("trainer.total_training_steps"):  # with epochs it ends with the run
            t.notes[f"{ours}.optim.decay_steps"] = "write the optimizer steps until the lowest rate"
            t.set(f"{ours}.optim.decay_steps", 1000)
    ratio = f"{theirs}.optim.lr_warmup_steps_ratio"
    warmup = s.get(f"{theirs}.optim.lr_warmup_steps")
    if s.get(ratio) and (warmup is None or warmup < 0):  # verl takes it where no steps are given
        t.set(f"{ours}.optim.warmup_ratio", s[ratio], ratio)
    return [*used, *names, *(f"{theirs}.optim.{n}" for n in (
        "lr_warmup_steps_ratio", "total_training_steps", "optimizer_impl", "lr_decay_steps",
        "override_optimizer_config.optimizer_cpu_offload",
    ))]  # fmt: skip


def reference(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Gives the reference its layout. In verl its settings are the actor's where it has none."""
    used = [name for name in s if name.startswith(f"{REF}.")]
    if not t.fields.get("algo.kl_coef"):
        if used:
            t.granted[f"{REF}."] = "without a KL term there is no reference"
        return used
    if "actor.lora.rank" in t.fields:
        t.granted[f"{REF}."] = "it is the actor's base, its adapter off, and computed as the actor"
        return used
    starts = (f"{ACTOR}.megatron.", f"{ACTOR}.strategy", f"{ACTOR}.ulysses")
    actors = {n.replace(ACTOR, REF): v for n, v in s.items() if n.startswith(starts)}
    used = layout(actors | dict(s), t, REF, "ref")
    for field, source in t.sources.items():
        if field.startswith("ref.") and source in actors and source not in s:
            t.sources[field] = source.replace(REF, ACTOR)
    tokens = f"{REF}.log_prob_max_token_len_per_gpu"
    if s.get(tokens):
        t.set("ref.micro_batch_tokens", s[tokens], tokens)
    return [*used, tokens]


def experts(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Router replay, and experts spread over the ranks of an engine."""
    modes = f"{ACTOR}.router_replay.mode", f"{ACTOR}.megatron.router_replay.mode"
    returned, spread = f"{ROLLOUT}.enable_rollout_routing_replay", f"{ROLLOUT}.expert_parallel_size"
    given = [name for name in modes if s.get(name)] or [returned]
    source = next((name for name in given if s.get(name) != "disabled"), given[0])
    mode = s.get(source)
    if mode is True or str(mode).upper() == "R3":
        t.set("actor.router_replay", "R3", source)
    elif mode and mode != "disabled":
        t.notes[setting(source, mode)] = "router_replay is R3 or None: docs/experts.md"
    if s[spread] > 1:
        if s[f"{ROLLOUT}.tensor_model_parallel_size"] > 1:
            t.set("rollout.expert_parallel", True, spread)
        else:
            t.notes[setting(spread, s[spread])] = (
                "an engine spreads experts over its rollout.tensor_parallel ranks: set it above 1"
            )
    return [*modes, returned, spread]


def is_megatron(s: Mapping[str, Any], theirs: str) -> bool:
    if s.get(f"{theirs}.strategy") in ("fsdp", "fsdp2"):
        return False
    given = any(name.startswith(f"{theirs}.megatron.") for name in s)
    return given or s.get(f"{theirs}.strategy") == "megatron"


def micro_batches(s: Mapping[str, Any], t: Translation, theirs: str, ours: str) -> list[str]:
    """Sets micro_batch_tokens, from verl's bound of tokens or from its number of sequences."""
    tokens, dynamic = f"{theirs}.ppo_max_token_len_per_gpu", f"{theirs}.use_dynamic_bsz"
    number = f"{theirs}.ppo_micro_batch_size_per_gpu"
    longest = s["data.max_prompt_length"] + s["data.max_response_length"]
    if s.get(dynamic, s.get(f"{ACTOR}.use_dynamic_bsz")) and tokens in s:
        t.set(f"{ours}.micro_batch_tokens", s[tokens], tokens)
    elif s.get(number):
        t.set(f"{ours}.micro_batch_tokens", s[number] * longest,
              f"{number} x the longest sequence")  # fmt: skip
    return [
        tokens,
        number,
        f"{theirs}.ppo_micro_batch_size",
        f"{theirs}.forward_max_token_len_per_gpu",
    ]


def rollout(s: Mapping[str, Any], t: Translation) -> list[str]:
    name = s[f"{ROLLOUT}.name"]
    if name in get_args(get_type_hints(RolloutConfig)["engine"]):
        t.set("rollout.engine", name, f"{ROLLOUT}.name")
    else:
        t.notes[setting(f"{ROLLOUT}.name", name)] = "engines are vllm, sglang and hf; vllm is taken"
    top_k = s.get(f"{ROLLOUT}.top_k", -1)
    t.set("rollout.top_k", max(0, top_k), f"{ROLLOUT}.top_k")
    t.set("eval_top_k", max(0, s.get(f"{ROLLOUT}.val_kwargs.top_k", -1)))
    penalised = s.get(f"{ROLLOUT}.repetition_penalty", 1) != 1
    changed = top_k > 0 or s.get(f"{ROLLOUT}.top_p", 1) < 1 or penalised
    if changed and "algo.correction.level" not in t.fields:
        t.set("algo.correction.level", "token")
        t.notes["algo.correction.level"] = OTHER_POLICY
    temperature = s.get(f"{ROLLOUT}.val_kwargs.temperature", 0)
    samples = s.get(f"{ROLLOUT}.val_kwargs.do_sample", temperature > 0)
    t.set("eval_temperature", float(temperature if samples else 0))
    arguments = {name: s[f"{ROLLOUT}.{name}"] for name in ("max_num_batched_tokens",)
                 if f"{ROLLOUT}.{name}" in s}  # fmt: skip
    if arguments:
        t.set("rollout.engine_args", arguments, f"{ROLLOUT}.max_num_batched_tokens")
    for tools in ("tool_config_path", "interaction_config_path"):
        if s.get(f"{ROLLOUT}.multi_turn.{tools}"):
            t.notes[f"{ROLLOUT}.multi_turn.{tools}"] = (
                "tools are Python functions: docs/multi_turn.md"
            )
    used = (
        "name", "top_k", "val_kwargs.top_k", "val_kwargs.temperature", "max_num_batched_tokens",
        "max_model_len", "prompt_length", "response_length", "multi_turn.tool_config_path",
        "multi_turn.interaction_config_path", "multi_turn.max_tool_response_length",
    )  # fmt: skip
    return [f"{ROLLOUT}.{name}" for name in used]


def critic(s: Mapping[str, Any], t: Translation) -> list[str]:
    """A critic's own model; without GAE nothing of it is read."""
    if s["algorithm.adv_estimator"] != "gae":
        return [name for name in s if name.startswith("critic.")]
    path = s.get("critic.model.path")
    if path and path != s.get("actor_rollout_ref.model.path"):
        t.set("critic.model", path, "critic.model.path")
    if s.get("critic.model.enable_gradient_checkpointing"):
        t.set("critic.activation_checkpointing", True)
    return ["critic.model.path", "critic.model.enable_gradient_checkpointing", "critic.strategy",
            "critic.ulysses_sequence_parallel_size", "critic.ppo_mini_batch_size"]  # fmt: skip


def rewards(s: Mapping[str, Any], t: Translation) -> list[str]:
    """A function of a file, a reward model, or the functions that verl chooses by data_source."""
    path = s.get("custom_reward_function.path", s.get("reward.custom_reward_function.path"))
    name = s.get("custom_reward_function.name") or s.get("reward.custom_reward_function.name")
    has_model = s.get("reward_model.enable") and s.get("reward_model.model.path")
    if path:
        above = (
            "import runpy\n\n"
            "# it is given what its parameters name: solution_str, ground_truth, data_source, ...\n"
            f"reward = runpy.run_path({str(path)!r})[{name or 'compute_score'!r}]\n"
        )
        t.set("reward", Code("reward", above), "custom_reward_function.path")
    elif has_model:
        t.set("reward", "model", "reward_model.enable")
    else:
        t.set("reward", BY_DATA_SOURCE, "its functions by data_source; keep those of your data")
    if not has_model:
        t.fields.pop("reward_model.model", None)
    used = [name for name in s if name.startswith(("custom_reward_function.", "reward.custom_"))]
    manager = s.get("reward_model.reward_manager", s.get("reward.reward_manager.name"))
    if manager not in (None, "naive", "dapo"):
        t.notes[setting("reward_manager", manager)] = "rewards are functions: docs/rewards.md"
    used += ["reward_model.reward_manager", "reward.reward_manager.name", "reward_model.enable"]
    skipped = ("reward_model.rollout.", "reward_model.model.", "reward_model.micro_batch")
    return [*used, *(n for n in s if n.startswith(skipped) and n != "reward_model.model.path"),
            *(() if has_model else ("reward_model.model.path",))]  # fmt: skip


def schedule(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Steps, evaluation, checkpoints and where the run is logged."""
    steps, epochs = s.get("trainer.total_training_steps"), s["trainer.total_epochs"]
    if steps:
        t.set("steps", steps, "trainer.total_training_steps")
    else:
        t.set("epochs", epochs, "trainer.total_epochs")
    t.set("eval_every", max(0, s["trainer.test_freq"]), "trainer.test_freq")
    t.set("checkpoint.every_steps", max(0, s["trainer.save_freq"]), "trainer.save_freq")
    loggers = s.get("trainer.logger", [])
    loggers = [loggers] if isinstance(loggers, str) else list(loggers)
    named = tuple(name for name in TRACKERS if name in loggers)
    t.set("trackers", named or ("tensorboard",), "trainer.logger")
    t.set("project", str(s.get("trainer.project_name", "verl_examples")), "trainer.project_name")
    others = sorted({*loggers} - {"console", *named})
    if others:
        t.notes[setting("trainer.logger", others)] = "trackers=(..., an object of your own)"
    ranks = s.get("trainer.nnodes", 1), s.get("trainer.n_gpus_per_node", 8)
    t.granted["trainer.nnodes, trainer.n_gpus_per_node"] = (
        f"python -m spmdrl.launch --nnodes {ranks[0]} --nproc-per-node {ranks[1]} "
        "-m spmdrl.ppo --config FILE"
    )
    if s.get("trainer.val_before_train") is False:
        t.notes["trainer.val_before_train=False"] = (
            "a run with data.eval is evaluated before it trains"
        )
    return ["trainer.total_training_steps", "trainer.total_epochs", "trainer.test_freq",
            "trainer.save_freq", "trainer.logger", "trainer.project_name", "trainer.nnodes",
            "trainer.n_gpus_per_node", "trainer.val_before_train"]  # fmt: skip
