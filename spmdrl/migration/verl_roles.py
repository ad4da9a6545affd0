"""Translates verl's settings of the models that are trained, and of the reference.

Each part sets the fields of its subject, and returns the settings of verl that it has used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmdrl.migration.config_source import Translation, setting
from spmdrl.migration.verl_settings import (
    ACTOR,
    DTYPES,
    FSDP,
    MEGATRON,
    OPTIM,
    OPTIMIZERS,
    REF,
    ROLLOUT,
    TRAINED,
)


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
    # verl's schedules count rollouts, ours count the updates that are made with each
    updates = t.fields["algo.mini_batches"] * s.get(f"{ACTOR}.ppo_epochs", 1)
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
        if name == "lr_warmup_steps" and value is not None:
            if value > 0:
                t.set(f"{ours}.optim.{field}", round(value * updates), f"{key}, of updates")
        elif value is not None:
            t.set(f"{ours}.optim.{field}", tuple(value) if isinstance(value, list) else value, key)
    names = [f"{theirs}.optim.{n}" for n in ("warmup_style", "lr_scheduler_type", "lr_decay_style")]
    source = next((name for name in names if s.get(name) is not None), "")
    for other in (n for n in names if s.get(n) not in (None, s.get(source))):
        t.notes[setting(other, s[other])] = f"not taken: verl takes {source}, which is given, too"
    if s.get(source) in ("cosine", "linear"):
        t.set(f"{ours}.optim.schedule", s[source], source)
        decay = f"{theirs}.optim.lr_decay_steps", "trainer.total_training_steps"
        until = next((name for name in decay if (s.get(name) or 0) > 0), None)
        if until is not None:  # with epochs it ends with the run
            t.set(f"{ours}.optim.decay_steps", round(s[until] * updates), f"{until}, of updates")
    elif s.get(source) not in (None, "constant"):
        t.notes[setting(source, s[source])] = (
            "optim.schedule is constant, linear or cosine; constant is taken"
        )
    ratio = f"{theirs}.optim.lr_warmup_steps_ratio"
    warmup = s.get(f"{theirs}.optim.lr_warmup_steps")
    if s.get(ratio) and (warmup is None or warmup <= 0):  # verl takes it where no steps are given
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
    """Router replay, the load-balancing loss, and experts spread over the ranks of an engine."""
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
    coef = f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff"
    if s.get(coef):
        t.notes[setting(coef, s[coef])] = (
            "engine megatron has no such loss here; with engine fsdp it is "
            "actor.router_aux_loss_coef, the loss of seq_aux_loss: docs/experts.md"
        )
    return [*modes, returned, spread, coef]


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


def critic(s: Mapping[str, Any], t: Translation) -> list[str]:
    """A critic's own model; without GAE nothing of it is read."""
    if s["algorithm.adv_estimator"] != "gae":
        return [name for name in s if name.startswith("critic.")]
    path = s.get("critic.model.path")
    if path and path != s.get("actor_rollout_ref.model.path"):
        t.set("critic.model", path, "critic.model.path")
    mini = "critic.ppo_mini_batch_size"
    if s.get(mini) not in (None, s[f"{ACTOR}.ppo_mini_batch_size"]):
        t.notes[setting(mini, s[mini])] = "not taken: the critic has the actor's mini-batches"
    if s.get("critic.model.enable_gradient_checkpointing"):
        t.set("critic.activation_checkpointing", True)
    return ["critic.model.path", "critic.model.enable_gradient_checkpointing", "critic.strategy",
            "critic.ulysses_sequence_parallel_size", "critic.ppo_mini_batch_size"]  # fmt: skip
