"""Translates TRL's settings of a step's size, of the optimizer and of adapters.

Each part sets the fields of its subject, and returns the settings of TRL that it has used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from spmdrl.config.words import counted
from spmdrl.migration.config_source import Translation, setting

SCHEDULES = {"linear": "linear", "cosine": "cosine", "cosine_with_min_lr": "cosine",
             "constant": "constant", "constant_with_warmup": "constant"}  # fmt: skip
OPTIMIZERS = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw8bit"),
}

QUANTIZED = ("load_in_4bit", "load_in_8bit")


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
        f"per_device_train_batch_size x steps_per_generation x {counted(ranks, 'rank')} / "
        "num_generations",
    )
    mini_batches = max(1, per_generation // accumulated)
    t.set("algo.mini_batches", mini_batches, "steps_per_generation")
    if s["beta"] and s.get("sync_ref_model"):
        every = s.get("ref_model_sync_steps", 512) // (mini_batches * s["num_iterations"])
        t.set("algo.ref_model_sync_steps", max(1, every), "ref_model_sync_steps, of updates")
        t.set("algo.ref_model_mixup_alpha", s.get("ref_model_mixup_alpha", 0.6))
    if per_generation % accumulated and accumulated % per_generation:
        t.notes[setting("steps_per_generation", per_generation)] = (
            f"no multiple of gradient_accumulation_steps={accumulated}: TRL's updates take parts "
            f"of two generations; {mini_batches} whole ones are made of each here"
        )
    if s.get("generation_batch_size", each) % each:
        t.notes[setting("generation_batch_size", s["generation_batch_size"])] = (
            f"no multiple of the {counted(each, 'answer')} of {counted(ranks, 'rank')}: call with "
            "--ranks N"
        )
    updates = max_steps(s)
    if updates:
        t.set("steps", max(1, updates // (mini_batches * s["num_iterations"])), "max_steps")
    else:
        t.set("epochs", s["num_train_epochs"], "num_train_epochs")
    t.set("actor.dtype", "bfloat16" if s["bf16"] or s.get("fp16") else "float32", "bf16")
    return ["max_steps", "num_train_epochs", "generation_batch_size", "bf16", "fp16",
            "sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha",
            *regularly(s, t, mini_batches * s["num_iterations"])]  # fmt: skip


def regularly(s: Mapping[str, Any], t: Translation, updates: int) -> list[str]:
    """After how many steps a checkpoint is written and the model is evaluated.

    updates: of a step. TRL counts updates; without eval_steps it evaluates as often as it logs.
    """
    evaluated = s.get("eval_steps") or s.get("logging_steps", 10)
    for strategy, default, name, every, field in (
        ("save_strategy", "steps", "save_steps", s["save_steps"], "checkpoint.every_steps"),
        ("eval_strategy", "no", "eval_steps", evaluated, "eval_every"),
    ):
        when = s.get(strategy, default)
        if when in ("no", False):
            t.set(field, 0, f"{strategy}, {default!r} unless set")
        elif when != "steps":
            t.notes[setting(strategy, when)] = f"{field} is a number of steps; write it"
        elif not isinstance(every, int | float) or 0 < every < 1:
            t.notes[setting(name, every)] = f"{field} is a number of steps, not a share; write it"
        else:
            steps = max(1, int(every) // updates) if every > 0 else 0
            t.set(field, steps, f"{name}, of updates")
    return ["save_strategy", "save_steps", "eval_strategy", "eval_steps"]


def max_steps(s: Mapping[str, Any]) -> int:
    """Returns the optimizer steps of the run; 0 where it goes by epochs."""
    updates = s.get("max_steps", -1)
    return max(0, int(updates))


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
    kind = str(s["lr_scheduler_type"]).rpartition(".")[2].lower()
    schedule, used = SCHEDULES.get(kind), ["lr_scheduler_type", "optim", "adam_beta1", "adam_beta2",
                                           *warm_up(s, t, kind)]  # fmt: skip
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
        used.append("lr_scheduler_kwargs")
        lowest = lowest_ratio(s, t, options)
        if lowest is None or options.keys() - {"min_lr", "min_lr_rate"}:
            t.notes[setting("lr_scheduler_kwargs", options)] = (
                "only min_lr and min_lr_rate, as numbers, are read: actor.optim.min_lr_ratio"
            )
        if lowest is not None:
            t.set("actor.optim.min_lr_ratio", lowest, "lr_scheduler_kwargs")
    return used


def lowest_ratio(s: Mapping[str, Any], t: Translation, options: Mapping[str, Any]) -> float | None:
    """Returns the lowest learning rate as a share of the highest; None where that is not said."""
    rate, lowest = options.get("min_lr_rate"), options.get("min_lr", 0)
    if rate is not None:
        return rate if isinstance(rate, int | float) else None
    open_ended = any(name.startswith("learning_rate=") for name in t.notes)
    if open_ended or not isinstance(lowest, int | float) or not s["learning_rate"]:
        return None
    return lowest / s["learning_rate"]


def warm_up(s: Mapping[str, Any], t: Translation, kind: str) -> list[str]:
    """The warm-up: warmup_steps before warmup_ratio. `constant` of transformers has none."""
    steps, ratio = s["warmup_steps"], s.get("warmup_ratio") or 0
    if kind == "constant" and (steps or ratio):
        name = "warmup_steps" if steps else "warmup_ratio"
        t.notes[setting(name, s[name])] = (
            "not taken: lr_scheduler_type=constant ignores it, constant_with_warmup does not"
        )
    elif 0 < steps < 1:  # a share, as transformers has it since version 5
        t.set("actor.optim.warmup_ratio", steps, "warmup_steps")
    elif steps:
        t.set("actor.optim.warmup_steps", int(steps), "warmup_steps")
    elif ratio:
        t.set("actor.optim.warmup_ratio", ratio, "warmup_ratio")
    if steps and ratio and kind != "constant":
        t.notes[setting("warmup_ratio", ratio)] = "not taken: warmup_steps is given, too, and wins"
    return ["warmup_steps", "warmup_ratio"]


def lora(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Adapters: which layers have them, and what is kept of the model beneath."""
    given = [n for n in s if n.startswith("lora_") or n in ("use_dora", "use_rslora", *QUANTIZED)]
    if not s.get("use_peft"):
        if any(s[name] for name in given):
            t.notes[", ".join(name for name in given if s[name])] = (
                "not taken: without use_peft TRL has no adapter and trains all weights; else write "
                "actor.lora"
            )
        return given
    if s.get("load_in_4bit"):
        t.set("actor.lora.quantization", "nf4", "load_in_4bit")
    if s.get("lora_target_parameters"):
        named = s["lora_target_parameters"]
        named = (named,) if isinstance(named, str) else tuple(named)
        t.set("actor.lora.target_parameters", named, "lora_target_parameters")
    if "lora_r" not in s:
        t.set("actor.lora.rank", 16, "use_peft")
    targets = s.get("lora_target_modules")
    targets = [targets] if isinstance(targets, str) else targets
    if targets == ["all-linear"]:
        t.set("actor.lora.target_modules", "all-linear", "lora_target_modules")
    elif targets and all(re.fullmatch(r"[\w.,]+", str(name)) for name in targets):
        names = tuple(part for name in targets for part in str(name).split(",") if part)
        t.set("actor.lora.target_modules", names, "lora_target_modules")
    elif targets:
        t.notes[setting("lora_target_modules", targets)] = (
            "an expression; write the ends of the layers' names: actor.lora.target_modules"
        )
    elif not any(name.startswith("lora_target_modules=") for name in t.notes):
        t.notes["lora_target_modules"] = (
            "not given: peft takes some layers, of most families q_proj and v_proj; ours are all "
            "linear layers: actor.lora.target_modules"
        )
    return ["lora_target_modules", "lora_target_parameters", "load_in_4bit"]
