"""Checkpoints: sharded, complete or not there at all.

step_00000020/            renamed into place as the last act
  actor/, critic/, prm/     weights and optimizer of each, written by its engine: FSDP2's by
                            torch.distributed.checkpoint, Megatron's in dist_checkpointing's format;
                            load on any world size. Of a role with lora its adapters alone, and
                            in lora.json what base they belong to
  run.json                  step, data position, counters, config text
  rng_R.pt                  random states of rank R; used where the world size is the same
  replay_R.pt, leftover_R.pt   rank R's share of samples that are kept, where there are any
  hf/                       config and tokenizer, for export
  manifest.json             size and sha256 of every file
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spmdrl.config import ConfigError
from spmdrl.engines.engine import TrainEngine
from spmdrl.phases import PhaseError, Phases
from spmdrl.topology import Topology

logger = logging.getLogger(__name__)


class Keepsake(Protocol):
    """What a rank keeps from step to step beside its models."""

    def save(self, path: Path) -> None: ...


def save(
    root: Path, step: int, engines: dict[str, TrainEngine], run: dict[str, Any],
    phases: Phases, keep: int, pretrained: list[Any], own: dict[str, Keepsake] | None = None,
    writer: int = 0,
) -> Path:  # fmt: skip
    """Writes root/step_N on all ranks and removes all but the `keep` newest. Collective.

    engines: those that this rank has; run["engines"] names all; own: what this rank keeps for
    itself; run (JSON-able) and pretrained (a config, tokenizer and so on, whose save_pretrained
    writes to hf/) are those of the rank `writer`.
    A failure on any rank (disk full, say) is a PhaseError on all and leaves older ones untouched.
    """
    topology = phases.topology
    final = Path(root, f"step_{step:08d}")
    aside = final.with_suffix(".tmp")
    with phases("checkpoint"):
        if topology.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
            for part in ("hf", *run["engines"]):
                Path(aside, part).mkdir(parents=True)
    try:
        with phases("checkpoint"):
            for name, engine in engines.items():
                save_engine(engine, Path(aside, name))
    except PhaseError:
        if topology.rank == 0:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk would stay full
        raise
    with phases("checkpoint"):
        torch.save(rng_state(), Path(aside, f"rng_{topology.rank}.pt"))
        for name, part in (own or {}).items():
            part.save(Path(aside, f"{name}_{topology.rank:05d}.pt"))
        if topology.rank == writer:
            run = {**run, "step": step, "world": topology.world}
            Path(aside, "run.json").write_text(json.dumps(run, indent=1))
            for part in pretrained:
                part.save_pretrained(Path(aside, "hf"))
    with phases("checkpoint"):
        if topology.rank == 0:
            commit(aside, final)
            prune(root, keep)
    return final


def save_engine(engine: TrainEngine, folder: Path) -> None:
    """Raises on the rank that failed what failed there; the phase's agreement tells the others."""
    try:
        engine.save(folder)
    except CheckpointException as error:  # raised on every rank; no subclass of Exception
        mine = error.failures.get(engine.topology.rank)
        if mine is not None:
            cause, stack = mine
            where = "".join(stack.format())
            free_mib = shutil.disk_usage(folder).free >> 20  # torch does not say "disk full"
            raise OSError(
                f"cannot write {folder}, where {free_mib} MiB are free: "
                f"{type(cause).__name__}: {cause}\n{where}"
            ) from cause


def commit(aside: Path, final: Path) -> None:
    """Manifest, fsync, rename: after this the checkpoint exists, before it nothing does."""
    files = [f for f in sorted(aside.rglob("*")) if f.is_file()]
    manifest = {str(f.relative_to(aside)): [f.stat().st_size, sha256(f)] for f in files}
    Path(aside, "manifest.json").write_text(json.dumps(manifest))
    folders = [f for f in aside.rglob("*") if f.is_dir()]
    for path in [*files, Path(aside, "manifest.json"), *folders, aside]:
        fsync(path)
    shutil.rmtree(final, ignore_errors=True)  # of a run that was told not to resume
    os.rename(aside, final)
    fsync(final.parent)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def prune(root: Path, keep: int) -> None:
    for _, old in steps_in(root)[: -keep or None]:
        trash = old.with_suffix(".trash")
        os.rename(old, trash)
        shutil.rmtree(trash)


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of complete checkpoints by name, oldest first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"step_(\d+)", p.name), p) for p in root.iterdir()]
    return sorted((int(m[1]), p) for m, p in found if m)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint: a file missing, of another size or with flipped bits."""
    try:
        manifest = json.loads(Path(folder, "manifest.json").read_text())
    except (OSError, ValueError) as error:
        return f"manifest.json: {error}"
    for name, (size, digest) in manifest.items():
        file = Path(folder, name)
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, not {size}"
        if sha256(file) != digest:
            return f"{name} does not have the checksum it was written with"
    return None


def find(resume: str, root: Path, topology: Topology, after: int = 0) -> Path | None:
    """The checkpoint to load, the same on every rank. Collective.

    resume: "never", "auto" (the newest whole one under root, or none), or a folder. Damaged ones
    are skipped with a warning under "auto"; a named one that is damaged is a ConfigError.
    after: "auto" looks only at those of later steps.
    """
    answer: list[Any] = [None, None]
    if topology.rank == 0 and resume != "never":
        answer = list(_find(resume, root, after))
    dist.broadcast_object_list(answer, group=topology.group, group_src=0)
    found, problem = answer
    if problem:
        raise ConfigError(problem)
    return Path(found) if found else None


def _find(resume: str, root: Path, after: int = 0) -> tuple[str | None, str | None]:
    if resume != "auto":
        wrong = damage(Path(resume))
        return resume, f"--resume {resume}: {wrong}" if wrong else None
    for step, folder in reversed(steps_in(root)):
        if step <= after:
            break
        wrong = damage(folder)
        if wrong is None:
            return str(folder), None
        logger.warning("skipping the damaged checkpoint %s: %s", folder, wrong)
    return None, None


def load(folder: Path, engines: dict[str, TrainEngine], topology: Topology) -> dict[str, Any]:
    """Loads every engine's state in place; returns run.json. Collective.

    engines: the training engines by the names they were saved under. Random states are restored
    where the world size is what it was; with another they start anew from the run's seed.
    Raises ConfigError where the checkpoint lacks an engine that this run trains.
    """
    run = json.loads(Path(folder, "run.json").read_text())
    missing = sorted(set(engines) - set(run["engines"]))
    if missing:
        raise ConfigError(f"checkpoint {folder} has {run['engines']}, this run needs {missing} too")
    for name, engine in engines.items():
        engine.onload()
        try:
            engine.load(Path(folder, name))
        except CheckpointException as error:  # no subclass of Exception
            cause, _ = next(iter(error.failures.values()))
            raise ConfigError(
                f"checkpoint {folder} does not fit this run's {name}: {cause}"
            ) from cause
        engine.offload()
    if run["world"] == topology.world:
        state = torch.load(Path(folder, f"rng_{topology.rank}.pt"), weights_only=False)
        set_rng_state(state)
    return run


def rng_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(),
             "python": random.getstate()}  # fmt: skip
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
