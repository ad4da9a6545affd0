"""Translates TRL's GRPOConfig: a Python script, the flags of a shell script, or a YAML file.

The names and defaults are those of TRL 1.16. What a setting means in each library is explained in
docs/migration.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from spmdrl.cli.hub_names import named_set
from spmdrl.config import TRACKERS, ConfigError
from spmdrl.migration.config_source import Translation, setting
from spmdrl.migration.shell import Settings, commands
from spmdrl.migration.trl_datasets import Datasets
from spmdrl.migration.verl import as_value
from spmdrl.migration.verl_settings import OTHER_POLICY

DEFAULTS: dict[str, Any] = {  # of TRL
    "learning_rate": 1e-6, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1,
    "num_generations": 8, "num_iterations": 1, "max_completion_length": 256, "beta": 0.0,
    "epsilon": 0.2, "loss_type": "dapo", "scale_rewards": "group", "weight_decay": 0.0,
    "lr_scheduler_type": "linear", "use_vllm": False, "gradient_checkpointing": True,
    "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0, "importance_sampling_level": "token", "bf16": True,
    "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1, "save_steps": 500,
    "num_train_epochs": 3,
}  # fmt: skip
SAME = {
    "model_name_or_path": "model", "model": "model", "output_dir": "run_dir", "seed": "seed",
    "learning_rate": "actor.optim.lr", "weight_decay": "actor.optim.weight_decay",
    "max_grad_norm": "actor.optim.clip_norm", "warmup_steps": "actor.optim.warmup_steps",
    "warmup_ratio": "actor.optim.warmup_ratio",
    "adam_epsilon": "actor.optim.eps", "num_generations": "rollout.n",
    "num_iterations": "algo.epochs", "max_completion_length": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens", "temperature": "rollout.temperature",
    "top_p": "rollout.top_p", "top_k": "rollout.top_k", "min_p": "rollout.min_p",
    "repetition_penalty": "rollout.repetition_penalty",
    "gradient_checkpointing": "actor.activation_checkpointing",
    "vllm_gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel",
    "vllm_enable_sleep_mode": "rollout.sleep", "top_entropy_quantile": "algo.top_entropy_fraction",
    "off_policy_mask_threshold": "algo.off_policy_mask_threshold",
    "router_aux_loss_coef": "actor.router_aux_loss_coef",
    "entropy_coef": "algo.entropy_coef", "entropy_target": "algo.entropy_target",
    "entropy_coef_min": "algo.entropy_coef_min", "entropy_coef_max": "algo.entropy_coef_max",
    "lora_r": "actor.lora.rank", "lora_alpha": "actor.lora.alpha",
    "use_rslora": "actor.lora.use_rslora", "use_dora": "actor.lora.use_dora",
    "chat_template_kwargs": "data.chat_template_kwargs", "trust_remote_code": "trust_remote_code",
    "save_steps": "checkpoint.every_steps", "save_total_limit": "checkpoint.keep",
    "eval_steps": "eval_every",
}  # fmt: skip
ALWAYS = {
    "vllm_mode": "vLLM runs inside the ranks", "use_vllm": "rollout.engine", "do_train": "",
    "gradient_accumulation_steps": "micro-batches are filled by tokens",
    "per_device_train_batch_size": "in data.prompts_per_step", "logging_steps": "every step",
    "steps_per_generation": "in algo.mini_batches", "remove_unused_columns": "rewards ask by name",
    "log_completions": "samples/ has them", "use_peft": "actor.lora", "report_to": "trackers",
    "dataset_name": "data.train", "dataset": "data.train", "train_dataset": "data.train",
    "shuffle_dataset": "data.shuffle", "ddp_find_unused_parameters": "FSDP2",
    "packing": "sequences are always packed", "vllm_server_host": "there is no server",
    "vllm_server_port": "there is no server", "torch_dtype": "actor.dtype", "dtype": "actor.dtype",
    "attn_implementation": "actor.attention", "config": "",
}  # fmt: skip
NOTES = {  # what to do about settings
    "router_aux_loss_coef": "a loss of each sequence, summed over layers; TRL's is of a "
    "micro-batch, and its coefficient times experts per token / layers is as strong here. Leave it "
    "out for a model without experts: docs/experts.md",
    "dataset_mixture": "data.train takes several files; data.sampler.weights are shares of a step, "
    "by data_source, where the mixture's are shares of each data set's rows: docs/mixtures.md",
}
TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # of GRPOTrainer
OTHERS = ("DPOConfig", "SFTConfig", "KTOConfig", "RewardConfig", "ORPOConfig", "PPOConfig",
          "GKDConfig")  # fmt: skip
LOSSES = {"grpo": "seq_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean",
          "dr_grpo": "seq_mean_token_sum_norm", "cispo": "token_mean", "sapo": None,
          "luspo": None, "vespo": "token_mean"}  # fmt: skip
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
FLAGS = {f"--{name}" for name in (  # that only GRPO has
    "num_generations", "max_completion_length", "num_iterations", "loss_type", "epsilon_high",
    "scale_rewards", "reward_funcs", "vllm_mode",
)}  # fmt: skip


class Computed(str):
    """The source code of a value that a script computes."""


def settings_of_python(text: str) -> Mapping[str, Any] | None:
    """Returns the settings that a script gives to GRPOConfig, GRPOTrainer, LoraConfig and
    load_dataset, or those of the command in its docstring, where it takes them from the command
    line; None where it has no GRPOConfig.

    `args.NAME` is what add_argument has as the default of --NAME. Raises ConfigError for a script
    of another trainer of TRL.
    """
    tree = ast.parse(text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if not any(called(node) == "GRPOConfig" for node in calls):
        found = settings_of_script(ast.get_docstring(tree) or "")
        others = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {*OTHERS}
        if found is None and others:
            raise refusal(", ".join(sorted(others)))
        return found
    defaults = dict(argument for node in calls for argument in arguments_of(node))
    settings: dict[str, Any] = {}
    roles: dict[str, ast.expr] = {}
    for node in calls:
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        if called(node) == "GRPOTrainer":
            keywords = dict(zip(TRAINER, node.args, strict=False)) | keywords
            roles |= {k: keywords.pop(k) for k in TRAINER[3:] if k in keywords}
        given = {name: value_of(value, defaults) for name, value in keywords.items()}
        if called(node) in ("GRPOConfig", "GRPOTrainer"):
            settings |= {k: v for k, v in given.items() if k not in ("args", "peft_config")}
        elif called(node) == "LoraConfig":
            settings |= {"lora_r": given.get("r", 8), "lora_alpha": given.get("lora_alpha", 8)}
            kinds = ("use_rslora", "use_dora")
            settings |= {name: given[name] for name in kinds if name in given}
    loads = [node for node in calls if called(node) == "load_dataset"]
    return settings | datasets_of(tree, loads, roles, defaults)


def datasets_of(
    tree: ast.Module,
    loads: list[ast.Call],
    roles: Mapping[str, ast.expr],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns train_dataset and eval_dataset by our names, and `dataset_notes` about them.

    loads: the calls of load_dataset. roles: what GRPOTrainer is given as either.
    """
    datasets = Datasets(tree, lambda node: value_of(node, defaults))
    found = {role: datasets.of(node) for role, node in roles.items()}
    train, held_out = (found.get(role, []) for role in TRAINER[3:])
    notes = datasets.notes
    if not train:
        loads = sorted(loads, key=lambda node: node.lineno)
        several = dict.fromkeys(name for node in loads for name in datasets.of(node))
        train = [name for name in several if name not in held_out]
        if "train_dataset" in roles and train:
            notes["train_dataset"] = f"the script computes it; it loads {train[0]}, which is taken"
    if len(train) > 1:
        notes["train_dataset"] = f"one of {', '.join(train)}; the first is taken"
    if len(held_out) > 1:
        notes["eval_dataset"] = f"one of {', '.join(held_out)}; the first is taken"
    elif "eval_dataset" in roles and not held_out and ast.unparse(roles["eval_dataset"]) != "None":
        notes["eval_dataset"] = "the script computes it; write data.eval"
    names = {"train_dataset": train[:1], "eval_dataset": held_out[:1]}
    return {role: names[role][0] for role in names if names[role]} | {"dataset_notes": notes}


def called(node: ast.Call) -> str:
    """Returns the name of what is called, without its module."""
    return ast.unparse(node.func).rpartition(".")[2]


def arguments_of(node: ast.Call) -> Iterator[tuple[str, Any]]:
    """Gives the name and the default of an argument that add_argument declares."""
    if called(node) == "add_argument":
        names = [a.value for a in node.args if isinstance(a, ast.Constant)]
        long = next((str(n)[2:] for n in names if str(n).startswith("--")), None)
        default = next((k.value for k in node.keywords if k.arg == "default"), None)
        if long is not None and isinstance(default, ast.Constant):
            yield long.replace("-", "_"), default.value


def value_of(node: ast.expr, defaults: Mapping[str, Any]) -> Any:
    """Returns the value of an expression; its source code where it is not a literal."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "args":
        return defaults.get(node.attr, Computed(ast.unparse(node)))
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Computed(ast.unparse(node))


def refusal(name: str) -> ConfigError:
    return ConfigError(
        f"{name} of TRL has no translation: only GRPOConfig has one. docs/sft.md, "
        "docs/preference.md, docs/reward_model.md and docs/distillation.md have the fields of "
        "fine-tuning, of DPO and the like, of reward models, and of GKD"
    )


def settings_of_script(text: str) -> Settings | None:
    """Returns the flags that a shell script gives to TRL's GRPO; None where it starts none."""
    for words in commands(text):
        given = {word.partition("=")[0] for word in words}
        other = next((w for w in words if w in ("dpo", "sft", "kto", "reward", "rloo")), None)
        if "trl" in words and other is not None:
            raise refusal(f"trl {other}")
        if given & FLAGS or {"trl", "grpo"} <= given:
            return Settings(dict(flags(words)), words.undecided)
    return None


def flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Gives (name, value) of each --name value, --name=value, and --name alone, which is True."""
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        following = words[place + 1] if place + 1 < len(words) else "--"
        if not has_value:
            value = "True" if following.startswith("--") else following
        yield name, None if value == "None" else as_value(value)


def translate(given: Mapping[str, Any], ranks: int) -> Translation:
    """Returns what TRL's settings are here. ranks: of TRL's run, which its batch counts by."""
    t = Translation("TRL")
    kept = {"reward_funcs", *ALWAYS} - {*DEFAULTS}  # what is not read may be computed
    for name, value in given.items():
        if isinstance(value, Computed) and name not in kept:
            t.notes[setting(name, value)] = "the script computes it; write the value"
    given = {k: v for k, v in given.items()
             if v is not None and (k in kept or not isinstance(v, Computed))}  # fmt: skip
    for name, value in given.items():
        number = isinstance(DEFAULTS.get(name), int | float)
        if number and not isinstance(value, int | float):
            raise ConfigError(f"{name}={value!r}: TRL takes a number")
    s = DEFAULTS | given
    used = {*objective(s, t), *correction(s, t), *batches(s, t, ranks), *data(s, t)}
    for name, value in s.items():
        if name in used:
            continue
        if name in SAME:
            t.set(SAME[name], value, name if name in given else "")
            if value and name in NOTES:
                t.notes[setting(name, value)] = NOTES[name]
        elif name in ALWAYS:
            t.granted[name] = ALWAYS[name] or "the command line"
        elif name in given and value not in (False, None, "", [], {}):
            t.notes[setting(name, value)] = NOTES.get(name, "nothing here has this name")
    if s.get("use_liger_kernel"):
        t.set("actor.kernels", "liger", "use_liger_kernel")
    if "model" not in t.fields:
        t.set("model", "Qwen/Qwen3-0.6B")
        t.notes["model"] = "not given as a name; write it"
    t.set("rollout.engine", "vllm" if s["use_vllm"] else "hf", "use_vllm")
    return t


def objective(s: Mapping[str, Any], t: Translation) -> list[str]:
    """Estimator, loss, aggregation and KL."""
    scale = {True: "group", False: "none"}.get(s["scale_rewards"], s["scale_rewards"])
    t.set("algo.advantage", "dr_grpo" if scale == "none" else "grpo", "scale_rewards")
    if scale == "batch":
        t.set("algo.advantage_args", {"scale": "batch"}, "scale_rewards")
    kind, high = s["loss_type"], s.get("epsilon_high") or s["epsilon"]
    if kind not in LOSSES:
        t.notes[setting("loss_type", repr(kind))] = "no counterpart; the loss of dapo is taken"
    loss = kind if kind in ("cispo", "sapo", "luspo", "vespo") else "ppo"
    if s["importance_sampling_level"] == "sequence" and loss == "ppo":
        loss = "gspo"
    t.set("algo.policy_loss", loss, "loss_type, importance_sampling_level")
    args = {
        "ppo": {"clip_low": s["epsilon"], "clip_high": high, "dual_clip": s.get("delta") or 1e9},
        **{name: {"clip_low": s["epsilon"], "clip_high": high} for name in ("gspo", "luspo")},
        "vespo": {name: s.get(f"vespo_{name}", default) for name, default in VESPO.items()},
        "cispo": {"clip_low": 1.0, "clip_high": high - 1},
        "sapo": {"tau_pos": s.get("sapo_temperature_pos", 1.0),
                 "tau_neg": s.get("sapo_temperature_neg", 1.05)},
    }  # fmt: skip
    t.set("algo.loss_args", args[loss], "epsilon, epsilon_high, delta")
    aggregation = LOSSES.get(kind, "token_mean")
    if aggregation:
        t.set("algo.aggregation", aggregation, "loss_type")
    if aggregation is None or aggregation.startswith("seq_mean"):
        t.set("algo.seq_mean_over", "all")
    if s["beta"]:
        t.set("algo.kl_coef", s["beta"], "beta")
        if s.get("use_bias_correction_kl"):
            t.set("algo.kl_bias_correction", True, "use_bias_correction_kl")
    if s.get("mask_truncated_completions"):
        t.notes["mask_truncated_completions"] = (
            "a reward function that takes finish_reason returns None where it is 'length'"
        )
    return ["scale_rewards", "loss_type", "epsilon", "epsilon_high", "delta", "beta",
            "importance_sampling_level", "sapo_temperature_pos", "sapo_temperature_neg",
            *(f"vespo_{name}" for name in VESPO),
            "mask_truncated_completions", "use_bias_correction_kl"]  # fmt: skip


def correction(s: Mapping[str, Any], t: Translation) -> list[str]:
    """The importance sampling that TRL does with vLLM unless it is turned off."""
    if s["loss_type"] == "vespo":  # its weight is the sequence's ratio to the policy that sampled
        t.set("algo.correction.bypass", True, "loss_type")
        return [name for name in s if name.startswith("vllm_importance_sampling")]
    if s["use_vllm"] and s["vllm_importance_sampling_correction"]:
        level, _, mode = s["vllm_importance_sampling_mode"].partition("_")
        t.set("algo.correction.level", level, "vllm_importance_sampling_mode")
        t.set("algo.correction.mode", mode)
        high = s.get("vllm_importance_sampling_cap", s["vllm_importance_sampling_clip_max"])
        t.set("algo.correction.high", float(high), "vllm_importance_sampling_clip_max")
        if mode == "mask":
            t.set("algo.correction.low", float(s.get("vllm_importance_sampling_clip_min") or 1e-9))
    elif samples_otherwise(s):
        t.set("algo.correction.level", "token")
        t.notes["algo.correction.level"] = OTHER_POLICY
    return [name for name in s if name.startswith("vllm_importance_sampling")]


def samples_otherwise(s: Mapping[str, Any]) -> bool:
    """Says whether tokens are drawn from another distribution than the model's at a temperature."""
    off = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    return any(s.get(name) is not None and s[name] != value for name, value in off.items())


def batches(s: Mapping[str, Any], t: Translation, ranks: int) -> list[str]:
    """Prompts of a step, optimizer steps, and the schedule, which TRL counts in optimizer steps."""
    accumulated = s["gradient_accumulation_steps"]
    per_generation = s.get("steps_per_generation") or accumulated
    answers = s["per_device_train_batch_size"] * ranks * per_generation
    answers = s.get("generation_batch_size") or answers
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
    updates = s.get("max_steps", -1)
    if isinstance(updates, int) and updates > 0:
        t.set("steps", max(1, updates // (mini_batches * s["num_iterations"])), "max_steps")
    else:
        t.set("epochs", s["num_train_epochs"], "num_train_epochs")
    schedule = str(s["lr_scheduler_type"]).rpartition(".")[2].lower()
    if schedule in ("linear", "cosine"):
        t.set("actor.optim.schedule", schedule, "lr_scheduler_type")
        if isinstance(updates, int) and updates > 0:
            t.set("actor.optim.decay_steps", updates, "max_steps")
    t.set("actor.dtype", "bfloat16" if s["bf16"] or s.get("fp16") else "float32", "bf16")
    return ["max_steps", "num_train_epochs", "lr_scheduler_type", "generation_batch_size", "bf16",
            "fp16", "save_strategy", "eval_strategy", "sync_ref_model", "ref_model_sync_steps",
            "ref_model_mixup_alpha"]  # fmt: skip


def data(s: Mapping[str, Any], t: Translation) -> list[str]:
    for role, field, split in (
        ("train_dataset", "data.train", "dataset_train_split"),
        ("eval_dataset", "data.eval", "dataset_test_split"),
    ):
        name, source = s.get(role), role
        if type(name) is not str and (role == "train_dataset" or evaluates(s)):
            default = "test" if role == "eval_dataset" else ""
            name, source = flag_name(s, s.get(split, default)), "dataset_name"
        if type(name) is str:
            t.set(field, name, source)
    if "data.train" not in t.fields:
        t.set("data.train", "train.parquet")
        t.notes["train_dataset"] = "no name of a data set is given; write data.train"
    held_out = str(t.fields.get("data.eval", ""))
    found = named_set(held_out, on_modelscope=False)
    if found and not found["split"]:
        del t.fields["data.eval"]
        t.notes["data.eval"] = f"name the split: {held_out}{'' if ':' in held_out else ':'}:test"
    t.notes |= s.get("dataset_notes", {})
    t.notes["data.train"] = "columns: prompt, and ground_truth or data.ground_truth_key=<yours>"
    functions = s.get("reward_funcs")
    t.set("reward", "math", "reward_funcs")
    if functions is not None and "accuracy_reward" not in str(functions):
        t.notes[setting("reward_funcs", functions)] = (
            "TRL's take lists of completions; write one for one answer: "
            "def reward(response: str, ground_truth: str) -> float. 'math' stands in its place"
        )
    asked = [s["report_to"]] if isinstance(s.get("report_to"), str) else s.get("report_to") or []
    named = tuple(name for name in TRACKERS if name in asked)
    t.set("trackers", named or ("tensorboard",), "report_to")
    if s.get("lora_target_modules"):
        t.notes["lora_target_modules"] = (
            "write actor.lora.target_modules; ours are all linear layers"
        )
    if s.get("load_in_4bit"):
        t.set("actor.lora.quantization", "nf4", "load_in_4bit")
    if s.get("lora_target_parameters"):
        t.set("actor.lora.target_parameters", tuple(s["lora_target_parameters"]))
    if s.get("use_peft") and "lora_r" not in s:
        t.set("actor.lora.rank", 16, "use_peft")
    return [
        "reward_funcs",
        "dataset_notes",
        "eval_dataset",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "run_name",
        "use_liger_kernel",
        "lora_target_modules",
        "lora_target_parameters",
        "load_in_4bit",
        "lora_dropout",
        "lora_task_type",
    ]


def evaluates(s: Mapping[str, Any]) -> bool:
    return s.get("eval_strategy") not in (None, False, "no")


def flag_name(s: Mapping[str, Any], split: str) -> str | None:
    """Returns the data set of the flags --dataset_name and --dataset_config by our name."""
    name, config = s.get("dataset_name", s.get("dataset")), s.get("dataset_config")
    if type(name) is str and named_set(name, on_modelscope=False) and ":" not in name:
        return f"{name}:{config or ''}:{split}".rstrip(":")
    return name if type(name) is str and not split else None
