"""Reads the settings that a Python script or a shell script gives to TRL, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise, takewhile
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.migration.config_source import shown
from spmdrl.migration.shell import Settings, before_redirection, commands
from spmdrl.migration.trl_datasets import Datasets, statements
from spmdrl.migration.verl import as_value

TRAINER = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")  # of GRPOTrainer
OTHERS = ("DPOConfig", "SFTConfig", "KTOConfig", "RewardConfig", "ORPOConfig", "PPOConfig",
          "GKDConfig", "AsyncGRPOConfig")  # fmt: skip
# the first word of a command that a docstring shows, behind its variables
COMMAND = re.compile(r"(?:\w+=\S*\s+)*(?:accelerate|python[\d.]*|torchrun|trl|uv)\s")
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
QUANTIZED = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type")  # of BitsAndBytesConfig
ENUMS = ("OptimizerNames", "SchedulerType", "IntervalStrategy", "SaveStrategy")  # of transformers
PARSED = ("parse_args_and_config", "parse_args_into_dataclasses")  # of TrlParser
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
        found = settings_of_script(shown_commands(ast.get_docstring(tree) or ""))
        others = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {*OTHERS}
        if found is None and others:
            raise refusal(", ".join(sorted(others)))
        if found is not None:
            later = [*set_later(tree, {})]
            found |= {name: value for name, value, note in later if not note}
            found["script_notes"] = {name: note for name, _, note in later if note}
        if found is None and any(
            isinstance(n, ast.Name) and n.id == "GRPOConfig" for n in ast.walk(tree)
        ):
            raise ConfigError(
                "the script takes TRL's settings from the command line: translate the script or "
                "the YAML file that starts it"
            )
        return found
    defaults = dict(argument for node in calls for argument in arguments_of(node))
    settings: dict[str, Any] = {}
    roles: dict[str, ast.expr] = {}
    notes = dict(note for node in calls for note in unread(node))
    for node in calls:
        keywords = {k.arg: k.value for k in node.keywords if k.arg is not None}
        if called(node) == "GRPOConfig":
            keywords = dict(zip(("output_dir",), node.args, strict=False)) | keywords
        if called(node) == "GRPOTrainer":
            keywords = dict(zip(TRAINER, node.args, strict=False)) | keywords
            roles |= {k: keywords.pop(k) for k in TRAINER[3:] if k in keywords}
        given = {name: value_of(value, defaults) for name, value in keywords.items()}
        if called(node) in ("GRPOConfig", "GRPOTrainer"):
            settings |= {k: v for k, v in given.items() if k not in ("args", "peft_config")}
        elif called(node) == "LoraConfig":
            settings |= {"lora_r": 8, "lora_alpha": 8, "use_peft": True} | adapter(given)
        elif called(node) == "BitsAndBytesConfig":
            given = {"bnb_4bit_quant_type": "fp4"} | given  # its default
            settings |= {k: v for k, v in given.items() if k in QUANTIZED and v != "nf4"}
    for name, value, note in set_later(tree, defaults):
        settings |= {} if note else {name: value}
        notes |= {name: note} if note else {}
    if any(called(node) == "LoraConfig" for node in calls):
        notes.pop("peft_config", None)
    if any(isinstance(n, ast.FunctionDef) and ACCURACY.fullmatch(n.name) for n in ast.walk(tree)):
        functions = settings.get("reward_funcs")
        settings["reward_funcs"] = Computed(f"{functions}, which the script defines")
    loads = [node for node in calls if called(node) == "load_dataset"]
    named = datasets_of(tree, loads, roles, defaults)
    return settings | named | {"script_notes": notes | named["script_notes"]}


def adapter(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of LoraConfig that are not its defaults, by the names of TRL's flags."""
    return {LORA.get(k, f"lora_{k}"): v for k, v in given.items() if LORA_DEFAULTS.get(k) != v}


def set_later(tree: ast.Module, defaults: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Gives (setting, value, "") for `args.NAME = value` or `setattr(args, "NAME", value)` behind
    `args = GRPOConfig(...)`, or behind TrlParser's `_, training_args, _ = ...`, and (statement,
    None, what to do) where that stands below an `if` or in a loop, or the name is computed.
    """
    kinds: dict[str, str] = {}  # of variables, by the call that made them
    for _, statement, decided in statements(tree.body):
        for owner, name, value in assigned(statement, kinds):
            kind = kinds.get(owner)
            if kind not in ("GRPOConfig", "LoraConfig"):
                continue
            if not decided or name is None or isinstance(statement, ast.AugAssign):
                yield shown(ast.unparse(statement)), None, "not taken: the script decides it"
                continue
            given = {name: value_of(value, defaults)}
            named = given if kind == "GRPOConfig" else adapter(given)
            yield from ((name, found, "") for name, found in named.items())


def assigned(
    statement: ast.stmt, kinds: dict[str, str]
) -> Iterator[tuple[str, str | None, ast.expr]]:
    """Gives (variable, attribute, value) for what a statement sets of variables; None: a name that
    is computed. Writes into `kinds` which call has made a variable.
    """
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if called(call) == "setattr" and len(call.args) == 3:
            owner, written, given = call.args
            name = written.value if isinstance(written, ast.Constant) else None
            yield ast.unparse(owner), name if isinstance(name, str) else None, given
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign):
        return
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    for target in targets:
        value = statement.value
        if isinstance(target, ast.Name) and isinstance(value, ast.Call):
            kinds[target.id] = called(value)
        parsed = isinstance(value, ast.Call) and called(value) in PARSED
        if parsed and isinstance(target, ast.Tuple):  # script_args, training_args, ... in TRL
            kinds["training_args"] = "GRPOConfig"
        if isinstance(target, ast.Attribute) and value is not None:
            yield ast.unparse(target.value), target.attr, value


def unread(node: ast.Call) -> Iterator[tuple[str, str]]:
    """Gives (setting, what to do) for what a call gives in a form that no name says."""
    name = called(node)
    if name not in ("GRPOConfig", "GRPOTrainer", "LoraConfig"):
        return
    first = {"GRPOConfig": 1, "GRPOTrainer": len(TRAINER), "LoraConfig": 0}[name]
    for argument in node.args[first:]:
        yield f"{name}({shown(ast.unparse(argument))})", "given without its name; write the setting"
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
    if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2] in ENUMS:
        return node.attr.lower()
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        values = {str(k.arg): value_of(k.value, defaults) for k in node.keywords}
        if "None" not in values and not any(isinstance(v, Computed) for v in values.values()):
            return values
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Computed(ast.unparse(node))


def shown_commands(docstring: str) -> str:
    """Returns the paragraphs of a docstring that are commands."""
    paragraphs = re.split(r"\n\s*\n|\n?```\w*\n?", docstring)
    return "\n".join(text for text in paragraphs if COMMAND.match(text.strip()))


def refusal(name: str) -> ConfigError:
    return ConfigError(
        f"{name} of TRL has no translation: only GRPOConfig has one. docs/sft.md, "
        "docs/preference.md, docs/reward_model.md and docs/distillation.md have the fields of "
        "fine-tuning, of DPO and the like, of reward models, and of GKD"
    )


def settings_of_script(text: str, folder: str = ".") -> Settings | None:
    """Returns the flags that a shell script gives to TRL's GRPO; None where it starts none.

    folder: where the script lies.
    """
    for words in commands(text, folder):
        given = {word.partition("=")[0] for word in words}
        other = next((w for w in words if w in ("dpo", "sft", "kto", "reward", "rloo")), None)
        if "trl" in words and other is not None:
            raise refusal(f"trl {other}")
        recipe = "--config" in given and any(re.search(r"grpo[\w.]*$", word) for word in words)
        if given & FLAGS or {"trl", "grpo"} <= given or recipe:
            pairs = pairwise(before_redirection(words))
            unknown = (w for before, w in pairs if w[:1] == "$" and not before.startswith("--"))
            return Settings(dict(flags(words)), words.undecided, unknown)
    return None


def flags(words: list[str]) -> Iterator[tuple[str, Any]]:
    """Gives (name, value) of each --name value, --name=value, and --name alone, which is True.

    The value of a flag that takes several words is their list.
    """
    words = before_redirection(words)
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
