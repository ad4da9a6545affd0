"""Translates TRL's GRPOConfig: a Python script, the flags of a shell script, or a YAML file.

The names and defaults are those of TRL 1.16. What a setting means in each library is explained in
docs/migration.md.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import Any

from spmdrl.cli.hub_names import named_set
from spmdrl.config import TRACKERS, ConfigError
from spmdrl.migration.config_source import Translation, setting, shown
from spmdrl.migration.shell import Settings, commands
from spmdrl.migration.trl_datasets import Datasets
from spmdrl.migration.trl_training import batches, lora, optimizer
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
    "num_train_epochs": 3, "warmup_steps": 0,
}  # fmt: skip
SAME = {
    "model_name_or_path": "model", "model": "model", "output_dir": "run_dir", "seed": "seed",
    "learning_rate": "actor.optim.lr", "weight_decay": "actor.optim.weight_decay",
    "max_grad_norm": "actor.optim.clip_norm", "warmup_ratio": "actor.optim.warmup_ratio",
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
    "eval_steps": "eval_every", "shuffle_dataset": "data.shuffle",
}  # fmt: skip
RANKS = ("num_processes", "nproc_per_node")  # of accelerate, of torchrun
ALWAYS = {
    "vllm_mode": "vLLM runs inside the ranks", "use_vllm": "rollout.engine", "do_train": "",
    "gradient_accumulation_steps": "micro-batches are filled by tokens",
    "per_device_train_batch_size": "in data.prompts_per_step", "logging_steps": "every step",
    "steps_per_generation": "in algo.mini_batches", "remove_unused_columns": "rewards ask by name",
    "log_completions": "samples/ has them", "use_peft": "actor.lora", "report_to": "trackers",
    "dataset_name": "data.train", "dataset": "data.train", "train_dataset": "data.train",
    "ddp_find_unused_parameters": "FSDP2", "run_name": "run_dir",
    "packing": "sequences are always packed", "vllm_server_host": "there is no server",
    "vllm_server_port": "there is no server", "torch_dtype": "actor.dtype", "dtype": "actor.dtype",
    "attn_implementation": "actor.attention", "config": "", "lora_task_type": "actor.lora",
    **dict.fromkeys(RANKS, "in data.prompts_per_step"),
}  # fmt: skip
NOTES = {  # what to do about settings
    "router_aux_loss_coef": "a loss of each sequence, summed over layers; TRL's is of a "
    "micro-batch, and its coefficient times experts per token / layers is as strong here. Leave it "
    "out for a model without experts: docs/experts.md",
    "dataset_mixture": "data.train takes several files; data.sampler.weights are shares of a step, "
    "by data_source, where the mixture's are shares of each data set's rows: docs/mixtures.md",
    "config_file": "of accelerate: call this program with its num_processes as --ranks",
    "lora_dropout": "adapters have no dropout: log-probabilities differ by the updates alone",
    "reward_weights": "one reward function returns the weighted sum",
    "system_prompt": "of Open-R1: write it into the rows, as the first turn of a chat list",
    "gradient_checkpointing_kwargs": "layers are computed anew without reentrance",
}
TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # of GRPOTrainer
OTHERS = ("DPOConfig", "SFTConfig", "KTOConfig", "RewardConfig", "ORPOConfig", "PPOConfig",
          "GKDConfig")  # fmt: skip
LOSSES = {"grpo": "seq_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean",
          "dr_grpo": "seq_mean_token_sum_norm", "cispo": "token_mean", "sapo": None,
          "luspo": None, "vespo": "token_mean"}  # fmt: skip
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}
LORA = {  # of peft's LoraConfig, the flag of TRL
    "r": "lora_r", **{name: name for name in (
        "lora_alpha", "lora_dropout", "use_rslora", "use_dora",
    )},
}  # fmt: skip
LORA_DEFAULTS = {"bias": "none", "init_lora_weights": True, "inference_mode": False}
LISTS = {  # flags that take several words
    "report_to", "lora_target_modules", "lora_target_parameters", "lora_modules_to_save",
    "reward_funcs", "reward_weights",
}  # fmt: skip
REDIRECTION = re.compile(r"\d*(?:>|<|&>|\|)")  # what follows is no flag's
ACCURACY = re.compile(r"(?:\w+\.)*accuracy_reward")  # TRL's own reward function
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
    notes = dict(note for node in calls for note in unread(node))
    for node in calls:
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        if called(node) == "GRPOTrainer":
            keywords = dict(zip(TRAINER, node.args, strict=False)) | keywords
            roles |= {k: keywords.pop(k) for k in TRAINER[3:] if k in keywords}
        given = {name: value_of(value, defaults) for name, value in keywords.items()}
        if called(node) in ("GRPOConfig", "GRPOTrainer"):
            settings |= {k: v for k, v in given.items() if k not in ("args", "peft_config")}
        elif called(node) == "LoraConfig":
            given = {k: v for k, v in given.items() if LORA_DEFAULTS.get(k) != v}
            settings |= {"lora_r": 8, "lora_alpha": 8}
            settings |= {LORA.get(name, f"lora_{name}"): value for name, value in given.items()}
    if any(called(node) == "LoraConfig" for node in calls):
        notes.pop("peft_config", None)
    if any(isinstance(n, ast.FunctionDef) and ACCURACY.fullmatch(n.name) for n in ast.walk(tree)):
        functions = settings.get("reward_funcs")
        settings["reward_funcs"] = Computed(f"{functions}, which the script defines")
    loads = [node for node in calls if called(node) == "load_dataset"]
    named = datasets_of(tree, loads, roles, defaults)
    return settings | named | {"script_notes": notes | named["script_notes"]}


def unread(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Gives (setting, what to do) for what a call gives in a form that no name says."""
    name = called(node)
    if name not in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
        return
    for keyword in node.keywords:
        if keyword.arg is None:
            computed = f"{name}(**{shown(ast.unparse(keyword.value))})"
            yield computed, "the script computes it; write each of its settings"
        elif keyword.arg == "peft_config" and ast.unparse(keyword.value) != "None":
            yield "peft_config", "the script computes it; write actor.lora"


def datasets_of(
    tree: ast.Module,
    loads: list[ast.Call],
    roles: Mapping[str, ast.expr],
    defaults: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns train_dataset and eval_dataset by our names, and `script_notes` about them.

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
    return {role: names[role][0] for role in names if names[role]} | {"script_notes": notes}


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
    """Gives (name, value) of each --name value, --name=value, and --name alone, which is True.

    The value of a flag that takes several words is their list.
    """
    words = list(takewhile(lambda word: not REDIRECTION.match(word), words))
    for place, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        name = name.replace("-", "_")
        following = words[place + 1] if place + 1 < len(words) else "--"
        if not has_value:
            value = "True" if following.startswith("--") else following
        if name in LISTS and not has_value:
            several = takewhile(lambda word: not word.startswith("--"), words[place + 1 :])
            yield name, [as_value(word.rstrip(",")) for word in several]
            continue
        yield name, None if value == "None" else as_value(value)


def translate(given: Mapping[str, Any], ranks: int) -> Translation:
    """Returns what TRL's settings are here.

    ranks: of TRL's run, which its batch counts by; 1: as many as its launcher was told, if it was.
    """
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
    told = next((s[name] for name in RANKS if type(s.get(name)) is int), 1)
    ranks = told if ranks == 1 else ranks
    used = {*objective(s, t), *correction(s, t), *batches(s, t, ranks), *optimizer(s, t),
            *data(s, t), *lora(s, t)}  # fmt: skip
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
        low = s.get("vllm_importance_sampling_clip_min")
        if mode == "mask":
            t.set("algo.correction.low", float(low or 1e-9))
        elif low:
            t.notes[setting("vllm_importance_sampling_clip_min", low)] = (
                "no counterpart with a truncation, which bounds ratios from above alone"
            )
    elif samples_otherwise(s):
        t.set("algo.correction.level", "token")
        t.notes["algo.correction.level"] = OTHER_POLICY
    return [name for name in s if name.startswith("vllm_importance_sampling")]


def samples_otherwise(s: Mapping[str, Any]) -> bool:
    """Says whether tokens are drawn from another distribution than the model's at a temperature."""
    off = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    return any(s.get(name) is not None and s[name] != value for name, value in off.items())


def data(s: Mapping[str, Any], t: Translation) -> list[str]:
    used = ["reward_funcs", "script_notes", "eval_dataset", "dataset_config", "use_liger_kernel",
            "dataset_train_split", "dataset_test_split", "dataset_prompt_column"]  # fmt: skip
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
    column = s.get("dataset_prompt_column")  # of Open-R1, which makes a user's turn of it
    if column:
        t.set("data.prompt_key", column, "dataset_prompt_column")
        t.set("data.apply_chat_template", True, "dataset_prompt_column")
    stops = s.get("generation_kwargs")
    if isinstance(stops, dict) and stops.keys() == {"stop"}:
        found = [stops["stop"]] if isinstance(stops["stop"], str) else stops["stop"]
        t.set("rollout.stop", tuple(map(str, found)), "generation_kwargs")
        used.append("generation_kwargs")
    if "data.train" not in t.fields:
        t.set("data.train", "train.parquet")
        t.notes["train_dataset"] = "no name of a data set is given; write data.train"
    held_out = str(t.fields.get("data.eval", ""))
    parts = named_set(held_out, on_modelscope=False)
    if parts and not parts["split"]:
        del t.fields["data.eval"]
        t.notes["data.eval"] = f"name the split: {held_out}{'' if ':' in held_out else ':'}:test"
    t.notes |= s.get("script_notes", {})
    t.notes["data.train"] = "columns: prompt, and ground_truth or data.ground_truth_key=<yours>"
    functions = s.get("reward_funcs")
    t.set("reward", "math", "reward_funcs")
    named = str(functions).strip("[]()'\", ")
    if functions is not None and not ACCURACY.fullmatch(named):
        t.notes[setting("reward_funcs", functions)] = (
            "TRL's take lists of completions; write one for one answer: "
            "def reward(response: str, ground_truth: str) -> float. 'math' stands in its place"
        )
    asked = [s["report_to"]] if isinstance(s.get("report_to"), str) else s.get("report_to") or []
    trackers = tuple(name for name in TRACKERS if name in asked)
    t.set("trackers", trackers or ("tensorboard",), "report_to")
    return used


def evaluates(s: Mapping[str, Any]) -> bool:
    return s.get("eval_strategy") not in (None, False, "no")


def flag_name(s: Mapping[str, Any], split: str) -> str | None:
    """Returns the data set of the flags --dataset_name and --dataset_config by our name."""
    name, config = s.get("dataset_name", s.get("dataset")), s.get("dataset_config")
    if type(name) is str and named_set(name, on_modelscope=False) and ":" not in name:
        return f"{name}:{config or ''}:{split}".rstrip(":")
    return name if type(name) is str and not split else None
