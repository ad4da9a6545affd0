"""Downloads what a config names on a hub, once for each host, and puts local paths in its place.

Everything that is built afterwards reads folders and files. What a run writes of its config
(config.py, checkpoints, --dry-run) has the names again, with the commits that were downloaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from spmdrl.cli.arguments import override
from spmdrl.cli.hub_names import HubName, as_tuple, data_name, model_name, with_names
from spmdrl.cli.paths import check_paths, model_fields
from spmdrl.config import ConfigError, RunConfig
from spmdrl.config.words import counted
from spmdrl.distributed.once_per_host import once_per_host
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.progress import PROGRESS
from spmdrl.hub.download import fetch_data, fetch_model, hub_of, pending_weights
from spmdrl.hub.huggingface import Report

R = TypeVar("R", bound=RunConfig)
Paths = str | tuple[str, ...]
# whose weights are downloaded: those of all models; of all but `model`, whose weights another
# program has; or of none, as for --dry-run, which says how large they are
Weights = Literal["all", "roles", "none"]

logger = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """Says what one host has: `paths` by the config's fields that name something on a hub."""

    paths: dict[str, Paths]
    lines: list[str]  # for the user: where it came from, and what a run would download besides


def fetch(
    config: R, phases: Phases, weights: Weights = "all", sets: tuple[str, ...] = ("train", "eval")
) -> R:  # fmt: skip
    """Returns the config with local paths in place of hubs' names. Collective over all ranks.

    sets: the fields of `data` that are read. Raises ConfigError on all ranks where a name cannot be
    had on any host, or hosts have got different commits of it.
    """
    with phases("download"):
        found = once_per_host(lambda: fetch_here(config, phases, weights, sets), phases.topology)
        check_alike([each.paths for each in found])
        for field, paths in found[0].paths.items():
            config = override(config, field, paths)
        if found[0].paths:
            check_paths(config, sets)
    for line in found[0].lines if phases.topology.rank == 0 else []:
        logger.info(line)
    return config


def fetch_here(
    config: RunConfig, phases: Phases, weights: Weights, sets: tuple[str, ...]
) -> Fetched:  # fmt: skip
    """Downloads for this host. Raises ConfigError with the field."""
    here = Fetched({}, [])
    for field, model in model_fields(config).items():
        name = model_name(field, model)
        if name is not None:
            whole = field.endswith("adapter") or weights == "all"
            whole |= weights == "roles" and field != "model"
            with saying_of(field, name):
                folder = fetch_model(name, whole, reporter(name, phases))
                here.paths[field] = folder
                here.lines.append(source_line(field, name, (folder,)))
                if weights == "none" and not whole:
                    here.lines.append(weights_line(name))
    for each in sets:
        field, paths = f"data.{each}", as_tuple(getattr(config.data, each) or ())
        names = [data_name(field, path) for path in paths]
        if any(names):
            files: list[str] = []
            for path, name in zip(paths, names, strict=True):
                files += [path] if name is None else data_here(field, name, phases, here.lines)
            here.paths[field] = tuple(files)
    return here


def data_here(field: str, name: HubName, phases: Phases, lines: list[str]) -> tuple[str, ...]:
    """Downloads a data set for this host, and adds where it came from to the lines."""
    split = "train" if field == "data.train" else ""
    with saying_of(field, name):
        files = fetch_data(name, split, reporter(name, phases))
    lines.append(source_line(field, name, files))
    return files


@contextmanager
def saying_of(field: str, name: HubName) -> Iterator[None]:
    """Adds the field to what a ConfigError says, and that no path of this name is here."""
    try:
        yield
    except ConfigError as error:
        is_pathlike = not (name.on_modelscope or name.files or name.split)
        here = f" There is no such path here either (looked from {Path.cwd()})" * is_pathlike
        raise ConfigError(f"{field}: {error}.{here}".rstrip(".")) from error


def reporter(name: HubName, phases: Phases) -> Report:
    """Returns what a download calls with its bytes: it is shown, and no stall of the run."""

    def report(done: int, total: int) -> None:
        PROGRESS.count(done >> 20, total >> 20, f"MiB of {name}")
        phases.still_going()

    return report


def source_line(field: str, name: HubName, paths: Sequence[str]) -> str:
    more = f" and {counted(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
    return f"{field}: {name} of {hub_of(name).endpoint()}, here {paths[0]}{more}"


def weights_line(name: HubName) -> str:
    """Says what a run downloads that a dry run does not."""
    found = pending_weights(name)
    if not found.files:
        return f"  its weights are in {hub_of(name).cache_folder()} already"
    return (
        f"  a run downloads its weights as well: {counted(found.files, 'file')}, "
        f"{found.size / 1e9:.3g} GB "
        f"from {hub_of(name).endpoint()} to {hub_of(name).cache_folder()}"
    )


def check_alike(hosts: Sequence[dict[str, Paths]]) -> None:
    """Raises ConfigError where a field stands for other things on another host."""
    first = {field: with_names(paths) for field, paths in hosts[0].items()}
    for host in hosts[1:]:
        other = {field: with_names(paths) for field, paths in host.items()}
        for field in first.keys() | other.keys():
            mine, theirs = first.get(field, "a path"), other.get(field, "a path")
            if mine != theirs:
                raise ConfigError(
                    f"{field} is {mine} on one host and {theirs} on another: name a revision, as "
                    "in owner/name@v1.0, and have no folder of that name on some hosts alone"
                )
