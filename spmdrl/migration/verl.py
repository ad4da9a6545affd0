"""Translates verl's settings: a YAML file, or the overrides in a script that starts verl.

The names are those of verl 0.7 to 0.9. What a setting means in each library is explained in
docs/migration.md. Where verl's default is not ours, verl's is written down. The settings of the
algorithm are in verl_algorithm.py, those of the models in verl_roles.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_type_hints

import yaml

from spmdrl.config import TRACKERS, VLLM_ENGINE_ARGS, ConfigError, RolloutConfig
from spmdrl.migration.config_source import NUMBERS, Code, Translation, setting
from spmdrl.migration.shell import Settings, before_redirection, commands
from spmdrl.migration.verl_algorithm import correction, kl, objective
from spmdrl.migration.verl_roles import critic, engines, experts, model, reference
from spmdrl.migration.verl_settings import (
    ALWAYS,
    BY_DATA_SOURCE,
    COUNTED,
    DEFAULTS,
    NAMED,
    NOTES,
    OTHER_POLICY,
    PROGRAM,
    ROLLOUT,
    SAME,
)

NUMBER = re.compile(r"[+-]?(?:\d+(?:\.\d*)?|\.\d+)[eE][+-]?\d+")  # YAML wants a point in it
OWN_FILES = ("ppo_trainer", "ppo_megatron_trainer")  # of verl/trainer/config


def overrides_of_script(text: str, folder: str = ".") -> Settings | None:
    """Returns the settings that a shell script gives to verl; None where it does not start verl.

    folder: where the script lies.

    Raises ConfigError where the script starts another program of verl than the one for
    reinforcement learning. Of several commands that start it the first is taken.
    """
    for words in commands(text, folder):
        starts = (i for i, word in enumerate(words) if PROGRAM.fullmatch(word))
        place = next(starts, None)
        if place is None:
            continue
        program, rest = words[place], words[place + 1 :]
        rest = before_redirection(rest)
        settings = dict(as_setting(w) for w in rest if re.match(r"[+~]*[A-Za-z_][\w.@/]*=", w))
        settings |= config_file(rest)
        if not any("." in name for name in settings):
            continue
        if not {n.partition(".")[0] for n in settings} >= {"data", "actor_rollout_ref"}:
            raise ConfigError(
                f"the script starts {program}: of verl only the program for reinforcement learning "
                "is translated; docs/sft.md has the fields of fine-tuning"
            )
        return Settings(settings, words.undecided, (w for w in rest if w.startswith("$")))
    return None


def as_setting(word: str) -> tuple[str, Any]:
    name, _, value = word.lstrip("+~").partition("=")
    return name, as_value(value)


def as_value(text: str) -> Any:
    """Returns a value as Hydra reads it: 1e-6 is a number, [a, b] a list."""
    if NUMBER.fullmatch(text):
        return float(text)
    if " #" in text or re.fullmatch(r"\d+(:\d+)+", text):  # a comment, a number to base 60
        return text
    if text.startswith("{"):  # {name:value} wants a blank
        text = re.sub(r"([{,]\s*\w+):(?=\S)", r"\1: ", text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if isinstance(value, str) else numbers(value)


def numbers(value: Any) -> Any:
    """Returns the value with the numbers in its lists and mappings that YAML reads as text."""
    if isinstance(value, list):
        return [numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: numbers(each) for name, each in value.items()}
    return float(value) if isinstance(value, str) and NUMBER.fullmatch(value) else value


def config_file(words: list[str]) -> dict[str, str]:
    """Returns the file of settings that a command names, unless it is one of verl's own."""
    given: dict[str, str] = {}
    for option, value in re.findall(r"(?:^|\0)--?([a-z-]+)[=\0]([^\0]*)", "\0".join(words)):
        given[{"cn": "config-name", "cp": "config-path"}.get(option, option)] = value
    name, folder = given.get("config-name", OWN_FILES[0]), given.get("config-path", "config")
    is_own = folder in ("config", "./config") or folder.endswith("verl/trainer/config")
    if is_own and name.removesuffix(".yaml") in OWN_FILES:
        return {}
    return {"--config-name": f"{folder}/{name}"}


def other_files(tree: Mapping[str, Any]) -> list[str]:
    """Returns the files of settings, but verl's own, that a YAML file begins with."""
    defaults = tree.get("defaults") or []
    names = (
        [name for name in defaults if isinstance(name, str)] if isinstance(defaults, list) else []
    )
    return [name for name in names if name not in (*OWN_FILES, "_self_")]


def settings_of_yaml(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree's values by their dotted names, without OmegaConf's references."""

    def leaves(node: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        for name, value in node.items():
            if isinstance(value, Mapping) and value and name != "apply_chat_template_kwargs":
                yield from leaves(value, f"{where}{name}.")
            elif value != "???" and not (isinstance(value, str) and "${" in value):
                yield (
                    f"{where}{name}",
                    as_value(value) if isinstance(value, str) else numbers(value),
                )

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
        number = name.endswith(COUNTED) or SAME.get(name) in NUMBERS
        if number and not isinstance(value, int | float):
            t.notes[setting(name, value)] = "verl takes a number"
        elif name.endswith(".ppo_mini_batch_size") and value < 1:
            t.notes[setting(name, value)] = "verl takes a number above 0"
        elif name.endswith(NAMED) and not isinstance(value, str):
            t.notes[setting(name, value)] = "verl takes a name"
    given = {k: v for k, v in given.items() if setting(k, v) not in t.notes}
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
    template = "data.apply_chat_template_kwargs."
    named = {n.removeprefix(template): n for n in s if n.startswith(template)}
    if named:
        values = {name: s[theirs] for name, theirs in named.items()}
        t.set("data.chat_template_kwargs", values, ", ".join(named.values()))
    if s["data.val_max_samples"] > 0 and "data.eval" in t.fields:
        t.set("data.max_eval_prompts", s["data.val_max_samples"], "data.val_max_samples")
    return ["data.train_files", "data.val_files", "data.filter_overlong_prompts", "data.truncation",
            "data.val_max_samples", *named.values()]  # fmt: skip


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
    arguments = engine_args(s)
    if arguments:
        t.set("rollout.engine_args", arguments[0], ", ".join(arguments[1]))
    for tools in ("tool_config_path", "interaction_config_path"):
        if s.get(f"{ROLLOUT}.multi_turn.{tools}"):
            t.notes[f"{ROLLOUT}.multi_turn.{tools}"] = (
                "tools are Python functions: docs/multi_turn.md"
            )
    longest = f"{ROLLOUT}.multi_turn.max_tool_response_length"
    if longest in s:
        t.notes[setting(longest, s[longest])] = "of letters; multi_turn.max_reply_tokens is tokens"
    stops = s.get(f"{ROLLOUT}.stop")
    if stops:
        stops = stops if isinstance(stops, list | tuple) else [stops]
        t.set("rollout.stop", tuple(map(str, stops)), f"{ROLLOUT}.stop")
    used = (
        "name", "stop", "top_k", "val_kwargs.top_k", "val_kwargs.temperature", "max_model_len",
        "prompt_length", "response_length",
        "multi_turn.tool_config_path", "multi_turn.interaction_config_path",
        "multi_turn.max_tool_response_length",
    )  # fmt: skip
    return [*(arguments[1] if arguments else ()), *(f"{ROLLOUT}.{name}" for name in used)]


def engine_args(s: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]] | None:
    """Returns rollout.engine_args and the settings that say them; None where none does.

    Of `engine_kwargs.vllm` these are the names that a user may set here, and the fields of such a
    one: `compilation_config.cudagraph_mode`.
    """
    args: dict[str, Any] = {}
    used = []
    batched, own = f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.engine_kwargs.vllm."
    if batched in s:
        args["max_num_batched_tokens"] = s[batched]
        used.append(batched)
    for setting_name, value in ((n, v) for n, v in s.items() if n.startswith(own)):
        *groups, last = setting_name.removeprefix(own).split(".")
        if [*groups, last][0] not in VLLM_ENGINE_ARGS or value is None:
            continue
        place: Any = args
        for group in groups:
            place = place.setdefault(group, {})
            if not isinstance(place, dict):  # a text, which is not read
                break
        else:
            place[last] = value
            used.append(setting_name)
    return (args, used) if args else None


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
    for option in (name for name in used if ".reward_kwargs" in name and s[name]):
        t.notes[setting(option, s[option])] = "write it into the function, as a default"
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
        if epochs != DEFAULTS["trainer.total_epochs"]:
            t.notes[setting("trainer.total_epochs", epochs)] = (
                f"not taken: trainer.total_training_steps={steps} is given, too; verl stops at "
                "whichever is first"
            )
    else:
        t.set("epochs", epochs, "trainer.total_epochs")
    t.set("eval_every", max(0, s["trainer.test_freq"]), "trainer.test_freq")
    t.set("checkpoint.every_steps", max(0, s["trainer.save_freq"]), "trainer.save_freq")
    loggers = s.get("trainer.logger", [])
    loggers = list(loggers) if isinstance(loggers, list | tuple) else [str(loggers)]
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
