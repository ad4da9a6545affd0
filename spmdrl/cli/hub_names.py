"""Names of models and data sets on a hub, as a config spells them. Imports no torch.

    Qwen/Qwen3-0.6B                  a model on the Hugging Face Hub
    Qwen/Qwen3-0.6B@v1.0             the same at a revision: a branch, a tag or a commit
    openai/gsm8k:main:train          a data set there: its config and its split
    hf://datasets/openai/gsm8k/main/train-*.parquet     files of it
    modelscope:Qwen/Qwen3-0.6B       a model on ModelScope
    modelscope:modelscope/gsm8k:main:train, modelscope:modelscope/gsm8k/main/train.parquet

A path that exists here always wins over a hub. What a name stands for here, hub/download.py finds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

from spmdrl.config import ConfigError

DATA_SUFFIXES = (".parquet", ".jsonl")
MODELSCOPE = "modelscope:"
# a path that ends so names a file, never a data set on a hub
FILE_SUFFIXES = (*DATA_SUFFIXES, ".json", ".csv", ".tsv", ".txt", ".gz", ".zst", ".arrow", ".zip")
REPO = r"(?P<repo>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[^\s:@]+?))?"
MODEL = re.compile(REPO)
DATASET = re.compile(REPO + r"(?::(?P<config>[^\s:\[\]]*))?(?::(?P<split>[\w.-]+))?")
FILES = re.compile(r"(?P<repo>\w[\w.-]*/[\w.-]+)(?:@(?P<revision>[^\s:@/]+))?/(?P<files>\S+)")
# where both hubs' clients keep what they have downloaded
CACHED = re.compile(
    r".*?/(?P<kind>model|dataset)s(?P<layout>--|/)(?P<owner>[^/]+?)--(?P<name>[^/]+)"
    r"/snapshots/(?P<revision>[^/]+)(?:/(?P<files>.+))?"
)


@dataclass(frozen=True)
class HubName:
    """One model, or a data set or some of its files."""

    kind: Literal["model", "dataset"]
    repo: str  # owner/name
    revision: str = ""  # "": the hub's default branch
    files: str = ""  # of a data set: a path in it, which may have * and ?
    config: str = ""  # of a data set: the only one, if it is not given
    split: str = ""  # of a data set: "train" for data.train, if it is not given
    on_modelscope: bool = False

    def __str__(self) -> str:
        revision = f"@{quote(self.revision, safe='')}" if self.revision else ""
        if self.files:
            text = f"{self.repo}{revision}/{self.files}"
            return f"{MODELSCOPE if self.on_modelscope else 'hf://datasets/'}{text}"
        parts = f":{self.config}:{self.split}".rstrip(":")
        return f"{MODELSCOPE if self.on_modelscope else ''}{self.repo}{revision}{parts}"


def model_name(field: str, text: str) -> HubName | None:
    """Reads the name of a model on a hub; None for a path. Raises ConfigError for what is neither.

    field: of the config, for the message.
    """
    return None if os.path.exists(text) else hub_model(field, text)


def hub_model(field: str, text: str) -> HubName | None:
    """Reads a name as `model_name` does, also where a path here has the same."""
    on_modelscope = text.startswith(MODELSCOPE)
    if text.startswith("hf://"):
        example = text.removeprefix("hf://").removeprefix("models/") or "Qwen/Qwen3-0.6B"
        raise ConfigError(
            f"{field}={text!r}: hf:// names files of data sets; a model on the Hugging Face Hub is "
            f"named without it: {example!r}"
        )
    found = MODEL.fullmatch(text.removeprefix(MODELSCOPE))
    if not found or (not on_modelscope and text.startswith(("/", ".", "~"))):
        if on_modelscope:
            raise ConfigError(
                f"{field}={text!r}: expected modelscope:owner/name or modelscope:owner/name@"
                "revision"
            )
        return None
    revision = unquote(found["revision"] or "")
    name = HubName("model", found["repo"], revision, on_modelscope=on_modelscope)
    check_name(field, text, name)
    return name


def data_name(field: str, text: str) -> HubName | None:
    """Reads the name of a data set on a hub, or of its files; None for a path. Raises ConfigError
    as `model_name` does.
    """
    if os.path.exists(text):
        return None
    on_modelscope = text.startswith(MODELSCOPE)
    if text.startswith("hf://"):
        found = FILES.fullmatch(text.removeprefix("hf://datasets/"))
        if not text.startswith("hf://datasets/") or not found:
            raise ConfigError(
                f"{field}={text!r}: expected a file of a data set, hf://datasets/owner/name/path"
                f"/file.parquet; a whole split is named owner/name:config:split"
            )
    else:
        found = named_set(text.removeprefix(MODELSCOPE), on_modelscope)
        if found is None and on_modelscope:
            raise ConfigError(
                f"{field}={text!r}: expected modelscope:owner/name:config:split, or a file of a "
                "data set, modelscope:owner/name/path/file.parquet"
            )
        if found is None:
            refuse_split(field, text)
            return None
    parts = {key: unquote(value or "") for key, value in found.groupdict().items()}
    name = HubName("dataset", **parts, on_modelscope=on_modelscope)
    check_name(field, text, name)
    return name


def named_set(text: str, on_modelscope: bool) -> re.Match[str] | None:
    """Matches owner/name:config:split; on ModelScope also a path in a data set."""
    is_file = text.endswith(FILE_SUFFIXES)
    if text.startswith(("/", ".", "~")) or (is_file and not on_modelscope):
        return None
    found = None if is_file else DATASET.fullmatch(text)
    return found or (FILES.fullmatch(text) if on_modelscope else None)


def refuse_split(field: str, text: str) -> None:
    """Raises ConfigError for what begins as a data set on a hub and goes on as nothing known."""
    if re.match(REPO + ":", text) and not text.endswith(FILE_SUFFIXES):
        raise ConfigError(
            f"{field}={text!r}: no such file, and no data set on a hub: these are named "
            "owner/name:config:split, as in openai/gsm8k:main:train; a part of a split cannot be "
            "named"
        )


def check_name(field: str, text: str, name: HubName) -> None:
    """Raises ConfigError for a name that its hub cannot have, and where its client is missing."""
    if name.on_modelscope:
        if find_spec("modelscope") is None:
            raise ConfigError(
                f"{field}={text!r} is on ModelScope, whose package is not installed here: "
                "pip install 'spmdrl[modelscope]'"
            )
    else:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name.repo)
        except HFValidationError as error:
            raise ConfigError(
                f"{field}: {text!r} is no folder or file here (looked from {Path.cwd()}), and no "
                f"hub id: {error}"
            ) from error
    if name.files and not name.files.endswith(DATA_SUFFIXES):
        raise ConfigError(f"{field}={text!r}: expected a .parquet or .jsonl file")


def name_of(path: str) -> str | None:
    """Returns the name that stands for a file or folder in a hub's cache, with the commit that it
    is of; None for any other path.
    """
    found = CACHED.fullmatch(str(path))
    if found is None or (found["kind"] == "model" and found["files"]):
        return None
    repo, on_modelscope = f"{found['owner']}/{found['name']}", found["layout"] == "/"
    revision = "" if on_modelscope and found["revision"] == "master" else found["revision"]
    kind: Any = found["kind"]
    return str(HubName(kind, repo, revision, found["files"] or "", on_modelscope=on_modelscope))


def with_names(value: Any) -> Any:
    """Returns a field's value with hubs' names in place of paths in their caches."""
    if isinstance(value, str):
        return name_of(value) or value
    return tuple(with_names(item) for item in value) if type(value) is tuple else value


def as_tuple(paths: str | Iterable[str]) -> tuple[str, ...]:
    return (paths,) if isinstance(paths, str) else tuple(paths)
