"""Translates TRL's settings of a step's size, of the optimizer and of adapters.

Each part sets the fields of its subject, and returns the settings of TRL that it has used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spmdrl.migration.config_source import Translation, setting

SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine",
             "constant": "constant", "constant_with_warmup": "constant"}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
}


def batches(s: Mapping[str, Any], t: Translation, ranks: int) -> list[str]:
    """Prompts of a step, optimizer steps, checkpoints, and the dtype."""
    accumulated = s["gradient_accumulation_steps"]
    each = s["per_device_train_batch_size"] * ranks
    per_generation = s.get("steps_per_generation") or accumulated
    if s.get("generation_batch_size"):
        per_generation = max(1, s["generation_batch_size"] // each)
    answers = each * max(per_generation, accumulated)  # an update may want several generations
    t.set(
        "data.prompts_per_step",
        max(1, answers // s["num_generations"]),
        f"per_device_train_batch_size x steps_per_generation x {ranks} ranks / num_generations",
    )
    mini_batches = max(1, per_generation // accumulated)
    t.set("algo.mini_batches", mini_batches, "steps_per_generation")
    if s["beta"] and s.get("sync_ref_model"):
        every = s.get("ref_model_sync_steps", 512) // (mini_batches * s["num_iterations"])
        t.set("algo.ref_model_sync_steps", max(1, every), "ref_model_sync_steps, of updates")
        t.set("algo.ref_model_mixup_alpha", s.get("ref_model_mixup_alpha", 0.6))
    updates = max_steps(s)
    if updates:
        t.set("steps", max(1, updates // (mini_batches * s["num_iterations"])), "max_steps")
    else:
        t.set("epochs", s["num_train_epochs"], "num_train_epochs")
    t.set("actor.dtype", "bfloat16" if s["bf16"] or s.get("fp16") else "float32", "bf16")
    used = ["max_steps", "num_train_epochs", "generation_batch_size", "bf16", "fp16",
            "save_strategy", "eval_strategy", "sync_ref_model", "ref_model_sync_steps",
            "ref_model_mixup_alpha"]  # fmt: skip
    for strategy, every, field in (
        ("save_strategy", "save_steps", "checkpoint.every_steps"),
        ("eval_strategy", "eval_steps", "eval_every"),
    ):
        if s.get(strategy) in ("no", False):
            t.set(field, 0, strategy)
            used.append(every)
        elif s.get(strategy) not in (None, "steps"):
            t.notes[setting(strategy, s[strategy])] = f"{field} is a number of steps; write it"
    return used


def max_steps(s: Mapping[str, Any]) -> int:
    """Returns the optimizer steps of the run; 0 where it goes by epochs."""
    updates = s.get("max_steps", -1)
    return updates if isinstance(updates, int) and updates > 0 else 0


def optimizer(s: Mapping[str, Any], t: Translation) -> list[str]:
    """The optimizer and its schedule, which both count in optimizer steps."""
    name = str(s.get("optim", "adamw_torch")).rpartition(".")[2].lower()
    if name not in OPTIMIZERS:
        t.notes[setting("optim", name)] = "optim.name is adamw, adamw8bit or muon; adamw is taken"
    elif OPTIMIZERS[name] != "adamw":
        t.set("actor.optim.name", OPTIMIZERS[name], "optim")
    if "adam_beta1" in s or "adam_beta2" in s:
        betas = float(s.get("adam_beta1", 0.9)), float(s.get("adam_beta2", 0.999))
        t.set("actor.optim.betas", betas, "adam_beta1, adam_beta2")
    warmup = s["warmup_steps"]
    if 0 < warmup < 1:  # a share, as Transformers has it since version 5
        t.set("actor.optim.warmup_ratio", warmup, "warmup_steps")
    elif warmup:
        t.set("actor.optim.warmup_steps", int(warmup), "warmup_steps")
    kind = str(s["lr_scheduler_type"]).rpartition(".")[2].lower()
    schedule, used = SCHEDULES.get(kind), ["lr_scheduler_type", "optim", "warmup_steps",
                                           "adam_beta1", "adam_beta2"]  # fmt: skip
    if schedule is None:
        t.notes[setting("lr_scheduler_type", kind)] = (
            "optim.schedule is constant, linear or cosine; constant is taken"
        )
    elif schedule != "constant":
        t.set("actor.optim.schedule", schedule, "lr_scheduler_type")
        if max_steps(s):
            t.set("actor.optim.decay_steps", max_steps(s), "max_steps")
    options = s.get("lr_scheduler_kwargs")
    if kind == "cosine_with_min_lr" and isinstance(options, dict):
        lowest = options.get("min_lr_rate") or options.get("min_lr", 0) / s["learning_rate"]
        t.set("actor.optim.min_lr_ratio", lowest, "lr_scheduler_kwargs")
        used.append("lr_scheduler_kwargs")
    return used


def lora(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Adapters: which layers have them, and what is kept of the model beneath."""
    if s.get("load_in_4bit"):
        t.set("actor.lora.quantization", "nf4", "load_in_4bit")
    if s.get("lora_target_parameters"):
        t.set("actor.lora.target_parameters", tuple(s["lora_target_parameters"]))
    if s.get("use_peft") and "lora_r" not in s:
        t.set("actor.lora.rank", 16, "use_peft")
    targets = s.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    if targets == ["all-linear"]:
        t.set("actor.lora.target_modules", "all-linear", "lora_target_modules")
    elif targets and all(re.fullmatch(r"[\w.]+,?", str(name)) for name in targets):
        names = tuple(str(name).rstrip(",") for name in targets)
        t.set("actor.lora.target_modules", names, "lora_target_modules")
    elif targets:
        t.notes[setting("lora_target_modules", targets)] = (
            "an expression; write the ends of the layers' names: actor.lora.target_modules"
        )
    elif s.get("use_peft") or "lora_r" in s:
        t.notes["lora_target_modules"] = (
            "not given: peft takes some layers, of most families q_proj and v_proj; ours are all "
            "linear layers: actor.lora.target_modules"
        )
    return ["lora_target_modules", "lora_target_parameters", "load_in_4bit"]
