"""Finds what a hub's name stands for here: the one place that turns a name into a folder or files.

Works in one process and asks no other rank; training/fetch.py calls it once for each host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import Any

from huggingface_hub import constants, metadata_load
from yaml import YAMLError

from spmdrl.cli.hub_names import DATA_SUFFIXES, HubName, as_tuple, model_name
from spmdrl.config import ConfigError
from spmdrl.hub import huggingface, modelscope
from spmdrl.hub.huggingface import NEVER, PendingDownload, Report
from spmdrl.hub.model_files import INDEX, missing_shards

CONFIGS = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]  # of a model
WEIGHTS = ("*.safetensors", "*.bin")  # the first of them that a model has
CARD = "README.md"
# with a data set's card, a file that each repository has: where there is no card, the cache still
# knows the commit offline
ABOUT = [CARD, ".gitattributes"]
CONVERTED = "refs/convert/parquet"  # where the Hugging Face Hub keeps its own copies of data sets
SHOWN = 10  # of names that could have been meant
# a card's pattern for files, as the expression that it stands for
GLOB = {r"\*\*/": "(?:.*/)?", r"\*\*": ".*", r"\*": "[^/]*", r"\?": "[^/]"}

Splits = dict[str, dict[str, list[str]]]  # config -> split -> files


def quiet(done: int, total: int) -> None:
    """Takes a download's report and says nothing."""


def hub_of(name: HubName) -> ModuleType:
    return modelscope if name.on_modelscope else huggingface


# ---- models


def local_model(field: str, model: str, weights: bool = True) -> str:
    """Returns the folder of a model: a path as it is, a hub's name downloaded. Raises ConfigError.

    field: of the config or the command line, for the message. weights: else without them.
    """
    name = model_name(field, model)
    return model if name is None else fetch_model(name, weights)


def fetch_model(name: HubName, weights: bool = True, report: Report = quiet) -> str:
    """Downloads what is not there yet of a model or an adapter; returns its folder.

    weights: else without them: config, tokenizer and own code. Raises ConfigError, also where the
    cache lacks some of the weights and the hub is not to be asked.
    """
    folder = hub_of(name).snapshot(name, CONFIGS, report)
    if weights:
        kind = kind_of_weights(name, folder)
        folder = hub_of(name).snapshot(name, [*CONFIGS, kind], report)
        missing = missing_shards(str(name), folder)
        if missing:
            raise ConfigError(f"{name} lacks {shown(missing)} in {folder}, which {INDEX} names")
    if not any(Path(folder, f"{kind}config.json").is_file() for kind in ("", "adapter_")):
        raise ConfigError(f"{name} has no config.json: it is no model that transformers loads")
    return str(folder)


def kind_of_weights(name: HubName, folder: Path) -> str:
    """Returns the pattern of a model's weights: pickled ones only where there are no others.
    Raises ConfigError where there are none.
    """
    files = hub_of(name).listing(name, folder)
    wanted = [file for file in files if not any(fnmatch(file, never) for never in NEVER)]
    for kind in WEIGHTS:
        if matching(wanted, [kind]):
            return kind
    raise ConfigError(f"{name} has no weights: no *.safetensors and no *.bin")


def pending_weights(name: HubName) -> PendingDownload:
    """Says which of a model's weights are still to be downloaded. Raises ConfigError, offline
    where any are.
    """
    if constants.HF_HUB_OFFLINE:
        fetch_model(name)
        return PendingDownload(0, 0)
    hub = hub_of(name)
    return hub.pending(name, [kind_of_weights(name, hub.snapshot(name, CONFIGS, quiet))])


# ---- data sets


def fetch_data(name: HubName, split: str, report: Report = quiet) -> tuple[str, ...]:
    """Downloads the files of a data set; returns their paths here, in order of their names.

    split: where the name has none; "": it has to. Raises ConfigError, with those that there are.
    """
    hub = hub_of(name)
    folder = hub.snapshot(name, ABOUT, report)
    files = hub.listing(name, folder)
    if name.files:
        wanted = matching(files, [name.files])
        if not wanted:
            there = [file for file in files if file.endswith(DATA_SUFFIXES)]
            raise ConfigError(f"{name}: no such file; the data set has {shown(there)}")
    else:
        splits = card_splits(name, Path(folder, CARD), files)
        if not splits and not name.on_modelscope and not name.revision:
            converted = HubName("dataset", name.repo, CONVERTED)
            folder, splits = converted_splits(name, converted, report)
            wanted, name = files_of_split(name, splits, split), converted
        else:
            wanted = files_of_split(name, splits or unnamed(name, files), split)
    folder = hub.snapshot(name, [*ABOUT, *map(escape, wanted)], report)
    return tuple(str(folder / file) for file in wanted)


def card_splits(name: HubName, card: Path, files: list[str]) -> Splits:
    """Returns the files of each split, by a data set's card: the field `configs` of its YAML, of
    which `datasets` says how it is read. Empty where it has none, or of files that are read here
    in no form.
    """
    try:
        said: Any = (metadata_load(card) if card.is_file() else None) or {}
    except (YAMLError, ValueError) as error:
        raise ConfigError(f"{name}: the YAML of its {CARD} cannot be read: {error}") from error
    configs = said.get("configs")
    found: Splits = {}
    for config in configs if isinstance(configs, list) else []:
        data = config.get("data_files") or []
        splits: dict[str, list[str]] = {}
        for entry in [data] if isinstance(data, str) else data:
            whole = {"path": entry} if isinstance(entry, str) else entry
            named = matching(files, as_tuple(whole["path"]))
            splits.setdefault(str(whole.get("split", "train")), []).extend(named)
        found[str(config.get("config_name", "default"))] = splits
    every = [file for splits in found.values() for split in splits.values() for file in split]
    return found if every and all(file.endswith(DATA_SUFFIXES) for file in every) else {}


def converted_splits(name: HubName, converted: HubName, report: Report) -> tuple[Path, Splits]:
    """Returns the folder and the splits of the Hub's own Parquet copy of a data set: files
    config/split/0000.parquet. Raises ConfigError.
    """
    try:
        folder = huggingface.snapshot(converted, ABOUT, report)
    except ConfigError as error:
        raise ConfigError(
            f"{name}: its card names no Parquet or JSONL files for its splits, and the Hub's copy "
            f"of it in Parquet is not to be had ({error}). Name its files: hf://datasets/"
            f"{name.repo}/path/file.parquet"
        ) from error
    splits: Splits = {}
    for file in huggingface.listing(converted, folder):
        if file.endswith(".parquet") and file.count("/") == 2:
            config, split, _ = file.split("/")
            splits.setdefault(config, {}).setdefault(split, []).append(file)
    return folder, splits


def unnamed(name: HubName, files: list[str]) -> Splits:
    there = [file for file in files if file.endswith(DATA_SUFFIXES)]
    example = HubName(
        "dataset", name.repo, name.revision, there[0] if there else "path/file.parquet",
        on_modelscope=name.on_modelscope,
    )  # fmt: skip
    raise ConfigError(
        f"{name}: its card names no Parquet or JSONL files for its splits. Name its files, as in "
        f"{example}; it has {shown(there)}"
    )


def files_of_split(name: HubName, splits: Splits, default: str) -> list[str]:
    """Raises ConfigError for a config or split that a data set has not, with those that it has."""
    config = name.config or (next(iter(splits)) if len(splits) == 1 else "default")
    if config not in splits:
        told = f"has no config {name.config!r}" if name.config else "has several configs: name one"
        raise ConfigError(
            f"{name}: the data set {told}, as in {name.repo}:{next(iter(splits), 'default')}:train;"
            f" it has {shown(splits)}"
        )
    split = name.split or default
    if not splits[config].get(split):
        partial = " (the Hub's copy has only its first part)" * (
            f"partial-{split}" in splits[config]
        )
        told = f"has no split {split!r}{partial}" if split else "has several splits: name one"
        example = f"{name.repo}:{config}:{next(iter(splits[config]), 'train')}"
        raise ConfigError(
            f"{name}: the config {config!r} {told}, as in {example}; it has {shown(splits[config])}"
        )
    return sorted(splits[config][split])


def matching(files: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the files that match any of the patterns, in which ** stands for folders."""
    expressions = [
        re.compile(re.sub("|".join(map(re.escape, GLOB)), lambda m: GLOB[m[0]], re.escape(pattern)))
        for pattern in patterns
    ]
    return [file for file in files if any(e.fullmatch(file) for e in expressions)]


def shown(names: Iterable[str]) -> str:
    found = [str(name) for name in names]
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (", ".join(found[:SHOWN]) or "none") + more
