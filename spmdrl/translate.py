"""Translates a config of verl or TRL into one of spmdrl:

    python -m spmdrl.translate run_qwen3-8b.sh --out cfg.py

It reads a shell script that starts verl or TRL, a YAML file of either, or a Python script with
TRL's GRPOConfig, and runs none of them. The config that it writes has the other trainer's values
where its defaults are not ours, the name of the setting beside each field, and comments for what
has no counterpart. Check it with `python -m spmdrl.ppo --config cfg.py --dry-run`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fire
import yaml

from spmdrl.cli.help import asks_for_help, refuse_unknown
from spmdrl.config import ConfigError
from spmdrl.config.words import counted
from spmdrl.migration import trl, trl_source, verl
from spmdrl.migration.config_source import Translation, comment, shown, source_of
from spmdrl.migration.shell import Settings

TRL_NAMES = {"num_generations", "max_completion_length", "per_device_train_batch_size", "beta"}


def translated(file: Path, ranks: int | None = None) -> Translation:
    """Returns the translation of a script or a YAML file. ranks: of a run of TRL; None: as many as
    its launcher was told, or 1.

    Raises ConfigError where the file cannot be read, or starts neither verl's reinforcement
    learning nor TRL's GRPO.
    """
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from error
    if file.suffix in (".yaml", ".yml"):
        return of_yaml(file, text, ranks)
    if file.suffix == ".py":
        try:
            settings = trl_source.settings_of_python(text)
        except SyntaxError as error:
            raise ConfigError(f"{file} is no Python: line {error.lineno}: {error.msg}") from error
        if settings is not None:
            return trl.translate(with_recipe(settings, file), ranks)
    else:
        overrides = verl.overrides_of_script(text, str(file.parent))
        if overrides is not None:
            return with_undecided(verl.translate(with_config_file(overrides, file)), overrides)
        flags = trl_source.settings_of_script(text, str(file.parent))
        if flags is not None:
            return with_undecided(trl.translate(with_recipe(flags, file), ranks), flags)
    raise ConfigError(f"{file} starts neither verl.trainer.main_ppo nor TRL with a GRPOConfig")


def with_recipe(flags: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Adds the settings of the YAML file that `--config` names, below those of the flags.

    It is looked for beside the script and in the current folder; else a note asks for it.
    """
    name = flags.get("config")
    if not isinstance(name, str):
        return flags
    for recipe in (file.parent / name, Path(name)):
        if recipe.is_file():
            tree = named_yaml(recipe, file)
            if isinstance(tree, Mapping):
                return numbers_of(tree) | dict(flags)
    why = f"{name} is not there to read, and its settings are left out: translate that file, too"
    others = {k: v for k, v in flags.items() if k != "config"}
    return others | {"script_notes": {**flags.get("script_notes", {}), "--config": why}}


def with_config_file(overrides: Mapping[str, Any], file: Path) -> Mapping[str, Any]:
    """Adds the settings of the YAML file that verl's `--config-path` and `--config-name` name,
    below those of the script.

    It is looked for in the current folder, in the script's, and in those above that one. Where it
    is not there, or is made of other files, `--config-name` stays among the settings, and a note
    asks for them.
    """
    name = overrides.get("--config-name")
    if name is None:
        return overrides
    written = Path(f"{str(name).removesuffix('.yaml')}.yaml")
    folders = (Path(), *file.parents, *file.resolve().parents)
    found = next((folder / written for folder in folders if (folder / written).is_file()), None)
    if found is None:
        return overrides
    tree = named_yaml(found, file)
    if not isinstance(tree, Mapping):
        return overrides
    others = verl.other_files(tree)
    rest = {k: v for k, v in overrides.items() if others or k != "--config-name"}
    if others:
        rest["--config-name"] = f"{name} with {', '.join(others)}"
    return verl.settings_of_yaml(tree) | rest


def named_yaml(path: Path, file: Path) -> Any:
    """Returns what the YAML file at `path` holds, which the script `file` names."""
    try:
        return yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}, which {file} names, cannot be read: {error}") from None


def numbers_of(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tree with its numbers that YAML reads as text, such as 1e-6."""
    return {k: verl.as_value(v) if isinstance(v, str) else verl.numbers(v) for k, v in tree.items()}


def with_undecided(translation: Translation, settings: Settings) -> Translation:
    """Adds a note for each variable whose value depends on how the script is run."""
    for word in settings.unknown:
        translation.notes[word] = "the script does not say what this is; it may hold settings"
    for name, values in settings.undecided.items():
        *others, last = map(shown, values)
        also = f"; others: {', '.join(others)}" if others else ""
        translation.notes[f"${name}"] = (
            f"is set more than once or below an if; the last is taken: {last}{also}"
        )
    return translation


def of_yaml(file: Path, text: str, ranks: int | None) -> Translation:
    """Returns the translation of a YAML file: verl's has groups of settings, TRL's a flat list."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file} is no YAML: {error}") from error
    if isinstance(tree, Mapping) and tree.keys() & {"actor_rollout_ref", "algorithm"}:
        return verl.translate(verl.settings_of_yaml(tree))
    if isinstance(tree, Mapping) and tree.keys() & TRL_NAMES:
        return trl.translate(numbers_of(tree), ranks)
    raise ConfigError(f"{file} has neither verl's actor_rollout_ref or algorithm, nor TRL's names")


def main(file: str = "", out: str = "", ranks: int | None = None, **others: Any) -> None:
    """Writes the config, and says what to look at.

    Args:
        file: a shell script, a YAML file or a Python script of verl or TRL
        out: the config to write; without it the config is printed
        ranks: of a run of TRL, whose batch is that of one process times their number; without it
            as many as the script tells its launcher, or 1
    """
    if asks_for_help(others, main):
        return
    refuse_unknown(others, main)
    if not file:
        raise ConfigError("which file? python -m spmdrl.translate run.sh --out cfg.py")
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ConfigError(f"--ranks {ranks}: give the number of TRL's processes")
    translation = translated(Path(file), ranks)
    source = source_of(translation, Path(file).name)
    if not out:
        print(source, end="")
        return
    try:
        with Path(out).open("x") as target:
            target.write(source)
    except FileExistsError:
        raise ConfigError(
            f"{out} is there already: give --out another name, or remove it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error}") from error
    print(f"wrote {out}; {counted(len(translation.fields), 'field')}")
    for name, why in translation.notes.items():
        print(f"  look at: {comment(f'{name}: {why}')}")
    print(f"next: python -m spmdrl.ppo --config {out} --dry-run")


if __name__ == "__main__":
    try:
        fire.Fire(main)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
        sys.exit(2)
