"""Checks what the paths of a config must be, before torch is imported, which takes no time.

`check_paths` needs no process group. What is inside the files is checked where they are read.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spmdrl.cli.hub_names import DATA_SUFFIXES, as_tuple, data_name, model_name
from spmdrl.config import ConfigError, RunConfig, SupervisedConfig, TeacherEndpoint

MAX_PATH = 4096  # Linux


def check_paths(config: RunConfig, sets: tuple[str, ...] = ("train", "eval")) -> None:
    """Raises ConfigError for a path that cannot be read, or written, as the run is going to.

    Names of models and data on a hub are only read; whether the hub has them is asked later, once
    for each host (training/fetch.py). sets: the fields of `data` whose files are read.
    """
    for field, model in model_fields(config).items():
        if field.endswith("adapter"):
            # neither a folder nor a name on a hub
            if os.path.exists(model) or model_name(field, model) is None:
                check_folder(field, model)
        else:
            check_model_path(field, model)
    for name in sets:
        paths = getattr(config.data, name)
        if paths is not None:
            check_data_files(f"data.{name}", paths)
    check_resume(config.resume)
    check_writable("run_dir", config.run_dir)
    if isinstance(config, SupervisedConfig):
        check_out(config.out, config)


def model_fields(config: RunConfig) -> dict[str, str]:
    """Returns the fields that name a model or an adapter, by their dotted keys."""
    found = {}
    for where, node in nodes_of(config):
        if isinstance(node, TeacherEndpoint):  # its model is on another machine
            continue
        for name in ("model", "adapter"):
            value = getattr(node, name, None)
            if isinstance(value, str) and (value or f"{where}{name}" == "model"):
                found[f"{where}{name}"] = value
    return found


def nodes_of(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The config and every dataclass in it, each with its dotted place: "", "actor.", ..."""
    yield where, node
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        groups = value if isinstance(value, Mapping) else {"": value}
        for key, group in groups.items():
            if dataclasses.is_dataclass(group) and not isinstance(group, type):
                yield from nodes_of(group, f"{where}{field.name}.{key}{'.' * bool(key)}")


def check_model_path(name: str, model: str) -> None:
    """Raises ConfigError for what is neither a Hugging Face model folder nor a name on a hub."""
    if not model.strip():
        raise ConfigError(f"{name}={model!r} is no name")
    if len(model) > MAX_PATH or "\0" in model:
        raise ConfigError(f"{name}: {model[:60]!r}... is no path and no hub id")
    if os.path.isdir(model):
        if not os.path.isfile(Path(model, "config.json")):
            raise ConfigError(
                f"{name}: {model!r} has no config.json; is it a Hugging Face model folder?"
            )
    elif os.path.exists(model) or model_name(name, model) is None:
        raise ConfigError(f"{name}: no such folder: {model!r} (and not a hub id like owner/name)")


def check_data_files(name: str, paths: str | tuple[str, ...]) -> None:
    """Raises ConfigError for a file that is not there, is no data file, or is named twice."""
    if not as_tuple(paths):
        raise ConfigError(f"no data file is given: set {name} to one path or several")
    seen: dict[Any, str] = {}  # by device and inode, or by the name on a hub
    for path in as_tuple(paths):
        on_hub = data_name(name, path)
        if on_hub is None:
            check_data_file(Path(path))
            status = os.stat(path)
        file = on_hub or (status.st_dev, status.st_ino)
        if file in seen:
            both = f"{path!r} twice" if seen[file] == path else f"{seen[file]!r} and {path!r}"
            raise ConfigError(
                f"{name} names {both}, which is one file: a step could ask a prompt twice. Name it "
                "once; to give its rows more weight, write them more often into one file"
            )
        seen[file] = path


def check_data_file(path: Path) -> None:
    """Raises ConfigError unless there is a readable file of a known format."""
    try:
        exists, is_dir, is_file = path.exists(), path.is_dir(), path.is_file()
    except (OSError, ValueError) as error:
        raise ConfigError(f"data file '{path}' cannot be read: {error}") from error
    if path.suffix not in DATA_SUFFIXES:
        what = "is a folder" if is_dir else f"has the unknown extension '{path.suffix}'"
        raise ConfigError(f"data file '{path}' {what}: expected a .parquet or .jsonl file")
    if not exists:
        raise ConfigError(
            f"data file '{path}' does not exist (looked from {Path.cwd()}){made_by(path)}"
        )
    if not is_file:
        raise ConfigError(f"data file '{path}' is a folder, pipe or device, not a file")
    if not os.access(path, os.R_OK):
        raise ConfigError(f"data file '{path}' cannot be read: permission denied")


def made_by(path: Path) -> str:
    """Says how the data of our own examples is made, where a file of theirs is missing, or how
    several files are named.
    """
    names = [name.strip() for name in str(path).split(",")]
    if len(names) > 1 and all(Path(name).suffix in DATA_SUFFIXES for name in names):
        return f". Several files are a list: '{json.dumps(names)}'"
    for example, script in (
        ("gsm8k", "data/gsm8k.py"),
        ("arithmetic", "arithmetic/make_assets.py"),
    ):
        if example in path.parts:
            command = f"python examples/{script} --out {path.parent}"
            return f". The example's data is made by: {command}"
    return ""


def check_resume(resume: str) -> None:
    """Raises ConfigError for what is no checkpoint and no word."""
    if resume in ("never", "auto"):
        return
    folder = Path(resume)
    if os.path.isfile(folder / "run.json"):
        return
    raise ConfigError(
        f"resume={resume!r}: {missing_checkpoint(folder)}. Use 'never', 'auto' (the newest "
        "checkpoint of run_dir), or a folder such as RUN_DIR/checkpoints/step_00000050"
    )


def missing_checkpoint(folder: Path) -> str:
    """Says what is wrong with a folder without run.json."""
    if not os.path.isdir(folder):
        return f"there is no such folder (looked from {Path.cwd()})"
    found = sorted([*folder.glob("step_*"), *folder.glob("checkpoints/step_*")])
    hint = f"; the newest in it is {found[-1]}" if found else ""
    return f"this folder is no checkpoint, it has no run.json{hint}"


def check_folder(name: str, path: str) -> None:
    if not os.path.isdir(path):
        raise ConfigError(f"{name}={path!r}: no such folder (looked from {Path.cwd()})")


def check_out(out: str, config: SupervisedConfig) -> None:
    check_writable("out", out)
    for field, model in model_fields(config).items():
        if os.path.isdir(model) and os.path.isdir(out) and os.path.samefile(out, model):
            what = "the model that is trained" if field == "model" else field
            raise ConfigError(
                f"out={out!r} is the folder of {what}, which would be overwritten: name another"
            )


def check_writable(name: str, path: str) -> None:
    """Raises ConfigError unless a folder at `path` exists or could be made, and be written to.

    Writes a file without a name where the system has them, so that nothing is left behind.
    """
    if not path.strip() or "\0" in path:
        raise ConfigError(f"{name}={path!r} is no name")
    folder = Path(path).absolute()
    try:
        while not is_there(folder):
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = "there is no room on its disk"
        elif os.path.isfile(folder):
            what = f"{str(folder)!r} is a file; name a folder"
        else:
            what = f"{str(folder)!r} cannot be written to: {error.strerror}"
        raise ConfigError(f"{name}={path!r}: {what}") from error


def is_there(folder: Path) -> bool:
    """Says whether the folder exists. Raises OSError where that cannot be known, or it is no
    folder.
    """
    try:
        os.stat(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            raise
        return False
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "it is a file", str(folder))
    return True
