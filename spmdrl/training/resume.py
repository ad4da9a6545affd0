"""Finds where a run begins: what it goes on from, and what becomes of an earlier run's files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.earlier_runs import set_aside
from spmdrl.checkpoint.job import began_at, restarts, write_job
from spmdrl.checkpoint.run_dir import lock_run_dir, write_config
from spmdrl.config import ConfigError, RunConfig
from spmdrl.config.words import counted
from spmdrl.data.table_files import Files
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.training.elastic import SizeChange, in_memory_every, look_in_memory
from spmdrl.training.run_identity import FORMAT, Tree, differences, identity
from spmdrl.training.runtime import Runtime


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run goes on; the same on every rank."""

    folder: Path | None  # of the checkpoint to load
    began: int | None  # see checkpoint/job.py
    change: SizeChange | None = None  # of the job's hosts or ranks, before this start


def find_start(config: RunConfig, runtime: Runtime) -> ResumePoint:
    """Takes the run's folder and looks for what config.resume asks for. Collective.

    Raises ConfigError where there are checkpoints to go on from and none is whole.
    """
    topology, on_damage = runtime.topology, config.checkpoint.on_damage
    root = runtime.run_dir / "checkpoints"
    runtime.lock = lock_run_dir(runtime.run_dir, topology, again=restarts(topology) > 0)
    if runtime.is_main:
        checkpoint.recover(root)
    began = began_at(runtime.run_dir, topology)
    folder, change = None, None
    if began is not None:
        newest = checkpoint.newest_step(root, topology)
        found, change = look_in_memory(config, runtime, max(began, newest - 1))
        if found is not None:
            return ResumePoint(found.folder, began, change)
    if began is not None and config.resume != "auto":  # its own ones first
        has_other = config.resume != "never"
        folder = checkpoint.find("auto", root, topology, began, on_damage, not has_other)
    if folder is None:
        folder = checkpoint.find(config.resume, root, topology, on_damage=on_damage)
    return ResumePoint(folder, began, change and replace(change, disk=folder))


@dataclass(frozen=True)
class Sameness:
    """The identity of this run, and how it differs from the one that it goes on. The same on every
    rank.
    """

    identity: Tree | None  # for its checkpoints; None: it saves none, and resumes none
    lines: tuple[str, ...] = ()  # to be logged: what changed
    has_other_data: bool = False  # to train on


def compare(
    config: RunConfig, runtime: Runtime, start: ResumePoint, tokenizer: Any, files: Iterable[Files]
) -> Sameness:
    """Whether the checkpoint is one of the run that the config describes. Collective.

    files: see identity.identity. Rank 0 reads the files. Raises ConfigError where something differs
    that config.checkpoint.accept_changes does not allow.
    """
    same, problem = Sameness(None), None
    if runtime.is_main and (start.folder is not None or saves(config, runtime)):
        now = identity(config, tokenizer, files)
        same = Sameness(now)
        if start.folder is not None:
            same, problem = compared(config, runtime, start.folder, now)
    same, problem = broadcast_object((same, problem), runtime.topology.control)
    if problem is not None:
        raise ConfigError(problem)
    return same


def saves(config: RunConfig, runtime: Runtime) -> bool:
    """Whether the run saves checkpoints, on the disk or in memory."""
    return config.checkpoint.every_steps > 0 or in_memory_every(config, runtime) > 0


def compared(
    config: RunConfig, runtime: Runtime, folder: Path, now: Tree
) -> tuple[Sameness, str | None]:
    """Returns what the run is, and why it must not go on from the checkpoint, None if it may."""
    saved = checkpoint.read_run(folder)
    before, world = saved.get("identity"), runtime.topology.world
    ranks = [f"resume: ranks {saved['world']} -> {world}"] * (saved["world"] != world)
    if not isinstance(before, dict) or before.get("format") != FORMAT:
        line = (
            f"resume: {folder} was saved by a version that did not note what its run was: data, "
            "tokenizer, model and rewards are taken to be the same"
        )
        return Sameness(now, (*ranks, line)), None
    found, accepted = differences(before, now), config.checkpoint.accept_changes
    refused = [f for f in found if f.kind is not None and f.kind not in accepted]
    if refused:
        kinds = {f.kind for f in found if f.kind is not None}  # with those that are accepted
        return Sameness(now), refusal(folder, [f.text for f in refused], kinds)
    allowed = [f"resume: {f.text}" + f" (accepted: {f.kind})" * (f.kind is not None) for f in found]
    return Sameness(now, (*ranks, *allowed), any(f.kind == "data" for f in found)), None


def refusal(folder: Path, texts: list[str], kinds: set[str]) -> str:
    flag = f"--checkpoint.accept_changes {','.join(sorted(kinds))}"
    return (
        f"{folder} is of another run than this one: {'; '.join(texts)}. Restore what it was, or go "
        f"on with the change by {flag}, or start anew with --resume never"
    )


def opening_lines(
    config: RunConfig, start: ResumePoint, same: Sameness, done: int, goes_on: bool
) -> list[str]:  # fmt: skip
    """Returns the lines to be logged about where the run begins. goes_on: amid the epoch that it
    was in.
    """
    if start.folder is None:
        none = f"resume: no checkpoint in {config.run_dir}/checkpoints: the run begins at step 0"
        return [none] if config.resume == "auto" else []
    lines = [f"resumed from {start.folder}: {counted(done, 'step')} done", *same.lines]
    if not goes_on:
        lines.append("resume: a new epoch begins: the rows, or their order, are not what they were")
    return lines


def take_folder(config: RunConfig, runtime: Runtime, start: ResumePoint, done: int) -> Path | None:
    """Once what is to be loaded is loaded: `done` steps of this run stand. Collective.

    Returns the folder that holds what was there and is not gone on from; None where there was
    nothing.
    """
    aside = None
    if runtime.is_main:
        own = start.began is not None or is_within(start.folder, runtime.run_dir / "checkpoints")
        aside = set_aside(runtime.run_dir, done if own else 0, start.folder)
        write_config(config, runtime.run_dir)
        write_job(runtime.run_dir, done if start.began is None else start.began)
    return broadcast_object(aside, runtime.topology.control)


def is_within(folder: Path | None, root: Path) -> bool:
    return folder is not None and folder.resolve().parent == root.resolve()
