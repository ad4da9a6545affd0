"""Translates TRL's GRPOConfig: a Python script, the flags of a shell script, or a YAML file.

The names and defaults are those of TRL 1.16. What a setting means in each library is explained in
docs/migration.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spmdrl.cli.hub_names import named_set
from spmdrl.config import TRACKERS, ConfigError
from spmdrl.migration.config_source import NUMBERS, Translation, setting
from spmdrl.migration.trl_source import ACCURACY, Computed
from spmdrl.migration.trl_training import batches, lora, optimizer
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
    "max_grad_norm": "actor.optim.clip_norm",
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
    "save_total_limit": "checkpoint.keep", "shuffle_dataset": "data.shuffle",
}  # fmt: skip
RANKS = ("num_processes", "nproc_per_node", "nnodes")  # of accelerate; of torchrun, and its hosts
COUNTED = {  # what takes numbers, beside the names in DEFAULTS and those of our fields
    "steps_per_generation", "generation_batch_size", "max_steps", "warmup_ratio", "eval_steps",
    "adam_beta1", "adam_beta2", "epsilon_high", "delta", "ref_model_sync_steps",
    "ref_model_mixup_alpha", "sapo_temperature_pos", "sapo_temperature_neg",
    "vllm_importance_sampling_cap", "vllm_importance_sampling_clip_min", "vespo_k_pos",
    "vespo_k_neg", "vespo_lambda_pos", "vespo_lambda_neg",
}  # fmt: skip
DIVISORS = {*RANKS, "per_device_train_batch_size", "gradient_accumulation_steps",
            "num_generations", "num_iterations"}  # fmt: skip
WORDS: dict[str, Any] = {  # what takes names, and the types of these
    **dict.fromkeys(("loss_type", "vllm_importance_sampling_mode", "importance_sampling_level",
                     "lr_scheduler_type"), str),
    "scale_rewards": str | bool,
    **dict.fromkeys(("report_to", "lora_target_modules", "lora_target_parameters"),
                    str | list | tuple | set),
}  # fmt: skip
READ = {"steps_per_generation", "use_peft", "report_to"}  # of ALWAYS, what a field comes from
DEFAULT_OF = {"steps_per_generation": "gradient_accumulation_steps"}
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
    "environment_factory": "environment=..., a class whose objects answer turns, or OpenEnvEpisode "
    "for a server of OpenEnv: docs/environments.md",
    "tools": "tools=(...), the same functions: docs/multi_turn.md",
    "max_tool_calling_iterations": "multi_turn.max_turns counts the policy's turns",
    "callbacks": "trackers=(..., an object of your own) is called after each step",
    "num_completions_to_print": "log_samples",
    "trackio_space_id": 'trackers=("trackio",): docs/trackers.md',
    "push_to_hub": "python -m spmdrl.export --push_to_hub: docs/hubs.md",
    "system_prompt": "of Open-R1: write it into the rows, as the first turn of a chat list",
    "gradient_checkpointing_kwargs": "layers are computed anew without reentrance",
}
LOSSES = {"grpo": "seq_mean_token_mean", "bnpo": "token_mean", "dapo": "token_mean",
          "dr_grpo": "seq_mean_token_sum_norm", "cispo": "token_mean", "sapo": None,
          "luspo": None, "vespo": "token_mean"}  # fmt: skip
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


def translate(given: Mapping[str, Any], ranks: int | None) -> Translation:
    """Returns what TRL's settings are here.

    ranks: of TRL's run, which its batch counts by; None: as many as its launcher was told, or 1.
    """
    t = Translation("TRL")
    given = known(given, t)
    s = DEFAULTS | given
    ranks = launched(given, t) if ranks is None else ranks
    used = {*objective(s, t), *correction(s, t), *batches(s, t, ranks), *optimizer(s, t),
            *data(s, t), *lora(s, t)}  # fmt: skip
    for name, value in s.items():
        if name in used or (name in RANKS and any(setting(name, value) in n for n in t.notes)):
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


def known(given: Mapping[str, Any], t: Translation) -> dict[str, Any]:
    """Returns the settings whose value the file says. Each other one has a note, and its default.

    Raises ConfigError where a setting that the translation counts with is no number.
    """
    kept = {"reward_funcs", *ALWAYS} - {*DEFAULTS} - READ  # what is not read may be computed
    found = {}
    for name, value in given.items():
        number = name in COUNTED or SAME.get(name) in NUMBERS
        number |= isinstance(DEFAULTS.get(name), int | float)
        why = ""
        if isinstance(value, Computed):
            computed = NOTES.get(name, "the script computes it; write the value")
            why = "" if name in kept else computed
        elif is_unknown(name, value):
            why = "" if name in kept else "the script does not say what this variable is"
        elif number and value is not None and not isinstance(value, int | float):
            if name in DEFAULTS:
                raise ConfigError(f"{name}={value!r}: TRL takes a number")
            why = "TRL takes a number"
        elif name in DIVISORS and isinstance(value, int | float) and value < 1:
            why = "TRL takes a number above 0"
        elif name in WORDS and not isinstance(value, WORDS[name]) and value is not None:
            why = "TRL takes a name"
        if why:
            default = DEFAULTS.get(name, DEFAULT_OF.get(name))
            t.notes[setting(name, value)] = why + (
                f"; {default} is taken" if default is not None else ""
            )
        elif value is not None:
            found[name] = value
    return found


def is_unknown(name: str, value: Any) -> bool:
    """Says whether a value has a variable that nothing sets, where it is no part of a name."""
    named = ("path", "dir", "name", "model", "dataset", "config", "file", "column", "prompt")
    texts = value if isinstance(value, list) else [value]
    return not name.endswith(named) and any(isinstance(x, str) and "$" in x for x in texts)


def launched(given: Mapping[str, Any], t: Translation) -> int:
    """Returns how many processes TRL had, as its launcher was told; 1 where nothing says it."""
    total = [given[name] for name in RANKS[:1] if name in given]
    asked = total or [given[name] for name in RANKS[1:] if name in given]
    if all(type(number) is int for number in asked):
        return math.prod(asked)
    t.notes[", ".join(setting(name, given[name]) for name in RANKS if name in given)] = (
        "the script does not say how many processes TRL had; 1 is counted: call with --ranks N"
    )
    return 1


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
    if functions is None:
        t.notes["reward_funcs"] = "not given as a name; 'math' stands in its place: docs/rewards.md"
    elif not ACCURACY.fullmatch(named):
        t.notes[setting("reward_funcs", functions)] = (
            "TRL's take lists of completions; write one for one answer: "
            "def reward(response: str, ground_truth: str) -> float. 'math' stands in its place"
        )
    asked = [s["report_to"]] if isinstance(s.get("report_to"), str) else s.get("report_to") or []
    trackers = tuple(name for name in TRACKERS if name in asked)
    t.set("trackers", trackers or ("tensorboard",), "report_to")
    others = [name for name in asked if name not in (*TRACKERS, "none")]
    if others:
        t.notes[setting("report_to", others)] = "trackers=(..., an object of your own)"
    return used


def evaluates(s: Mapping[str, Any]) -> bool:
    return s.get("eval_strategy") not in (None, False, "no")


def flag_name(s: Mapping[str, Any], split: str) -> str | None:
    """Returns the data set of the flags --dataset_name and --dataset_config by our name."""
    name, config = s.get("dataset_name", s.get("dataset")), s.get("dataset_config")
    if type(name) is str and named_set(name, on_modelscope=False) and ":" not in name:
        return f"{name}:{config or ''}:{split}".rstrip(":")
    return name if type(name) is str and not split else None
