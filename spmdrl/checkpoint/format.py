"""Checkpoints: sharded, complete or not there at all. writer.py writes them.

step_00000020/            renamed into place as the last act
  actor/, critic/, prm/     weights and optimizer of each, written by its engine: FSDP2's by
                            torch.distributed.checkpoint with an index of our own (chunk_index.py),
                            Megatron's in dist_checkpointing's format; load on any world size. Of a
                            role with lora its adapters alone, and in lora.json what base they
                            belong to
  run.json                  step, data position, counters, config text
  rng_R.pt                  random states of rank R; used where the world size is the same
  replay_R.pt, leftover_R.pt   rank R's share of samples that are kept, where there are any
  hf/                       config and tokenizer, for export
  manifest.json             size and sha256 of every file
step_N.tmp                not complete; .old, .trash: on its way out

Nothing in one is unpickled as code, see safe_load.py.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import logging
import math
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from spmdrl.checkpoint.safe_load import read_plain
from spmdrl.config import CheckpointConfig, ConfigError
from spmdrl.config.words import counted
from spmdrl.distributed.collectives import broadcast_object, first_of
from spmdrl.distributed.topology import Topology

logger = logging.getLogger(__name__)

Digest = tuple[int, str]  # size in bytes, sha256
SHOWN_DAMAGED = 3  # checkpoints whose damage a message names
UNREADABLE_RUN = "Name another checkpoint with --resume or --checkpoint"


# ---- writing


class Staged(Protocol):
    """A copy of an engine's state in the host's memory; the engine may go on meanwhile."""

    def write(self, folder: Path, group: dist.ProcessGroup) -> None:
        """Writes it into the folder, which is there and empty, in whatever thread.

        Collective over the engine's ranks, on `group` alone, which is gloo. A failure is raised
        where it happened, on the other ranks as collectives.FailedElsewhere.
        """
        ...


class Checkpointable(Protocol):
    """The methods that a checkpoint asks of an engine; engines.base.TrainEngine describes each."""

    def stage(self) -> Staged: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def offload(self, keep_weights: bool = False) -> None: ...

    def onload(self, weights_only: bool = False) -> None: ...


def digest(path: Path) -> Digest:
    with path.open("rb") as f:
        return path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()


def sealed(path: Path) -> Digest:
    """The digest of a file that is on the disk."""
    fsync(path)
    return digest(path)


def commit(aside: Path, final: Path, digests: dict[str, Digest], in_part: bool = False) -> None:
    """Manifest, fsync, rename: after this the checkpoint exists, before it nothing does.

    digests: of every file by its path within the folder; they are on the disk already. in_part:
    other folders have the rest of them.
    """
    found = {str(f.relative_to(aside)) for f in aside.rglob("*") if f.is_file()}
    assert found <= digests.keys() and (in_part or found == digests.keys()), sorted(
        found ^ digests.keys()
    )
    write_synced(Path(aside, "manifest.json"), json.dumps(digests).encode())
    for folder in [f for f in aside.rglob("*") if f.is_dir()] + [aside]:
        fsync(folder)
    old = final.with_suffix(".old")
    if final.exists():  # of a run that was told not to resume
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)  # killed after this: `recover` takes it back
    os.rename(aside, final)
    fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def recover(root: Path) -> None:
    """After a process that was killed amid `commit` or `prune`. The root must be nobody else's."""
    for left in sorted(root.glob("step_*.old")):
        if not left.with_suffix("").exists():
            os.rename(left, left.with_suffix(""))
    for left in [p for kind in ("old", "tmp", "trash") for p in root.glob(f"step_*.{kind}")]:
        shutil.rmtree(left)


def write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def prune(root: Path, config: CheckpointConfig) -> None:
    """Removes all but the `keep` newest and, of the others, the `keep_best` best."""
    older = steps_in(root)[: -config.keep]
    ranked = [(score_of(folder, config), step, folder) for step, folder in older]
    best = sorted((r for r in ranked if r[0] is not None), reverse=True)[: config.keep_best]
    for _, old in older:
        if old in [folder for _, _, folder in best]:
            continue
        trash = old.with_suffix(".trash")
        shutil.rmtree(trash, ignore_errors=True)
        os.rename(old, trash)
        shutil.rmtree(trash)


def score_of(folder: Path, config: CheckpointConfig) -> float | None:
    """The larger the better; None: it was saved without a value of config.best_metric."""
    if not config.keep_best:
        return None
    try:
        value = json.loads(Path(folder, "run.json").read_text())["metrics"][config.best_metric]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value if config.best_is == "largest" else -value


def steps_in(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of complete checkpoints by name, oldest first."""
    if not root.is_dir():
        return []
    found = [(re.fullmatch(r"step_(\d+)", p.name), p) for p in root.iterdir()]
    return sorted((int(m[1]), p) for m, p in found if m)


# ---- reading


def damage(folder: Path, rank: int = 0, world: int = 1) -> str | None:
    """Returns what is wrong with a checkpoint: a file missing, of another size or with flipped
    bits.

    Of `world` ranks each reads its share of the bytes.
    """
    try:
        manifest = json.loads(Path(folder, "manifest.json").read_text())
        sizes = {name: int(size) for name, (size, _) in manifest.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"manifest.json: {error}"
    if "run.json" not in manifest:
        return "manifest.json does not name run.json"
    found = (damaged_file(folder, n, manifest[n]) for n in share_of(sizes, rank, world))
    return next(filter(None, found), None)


def damaged_file(folder: Path, name: str, written: Digest) -> str | None:
    """Returns what is wrong with a file of a checkpoint. written: its line of the manifest."""
    file, (size, checksum) = Path(folder, name), written
    if not file.is_file():
        return f"{name} is missing"
    if file.stat().st_size != size:
        return f"{name} has {file.stat().st_size} bytes, not {size}"
    if digest(file)[1] != checksum:
        return f"{name} does not have the checksum it was written with"
    return None


def share_of(sizes: dict[str, int], rank: int, world: int) -> list[str]:
    """Files of about the same number of bytes for each rank: the largest first, to whom has
    least."""
    loads = [(0, r) for r in range(world)]  # a heap
    mine = []
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + sizes[name] + 1, least))
        if least == rank:
            mine.append(name)
    return mine


def damage_together(folder: Path, topology: Topology) -> str | None:
    """Returns what `damage` finds, the same on every rank. Collective."""
    found = first_of(damage(folder, topology.rank, topology.world), topology)
    return None if found is None else found[1]


def newest_step(root: Path, topology: Topology) -> int:
    """The step of the newest checkpoint by name; 0 where there is none. Collective."""
    newest = max((step for step, _ in steps_in(root)), default=0) if topology.rank == 0 else 0
    return int(broadcast_object(newest, topology.control))


def find(
    resume: str, root: Path, topology: Topology, after: int = 0,
    on_damage: Literal["previous", "stop", "anew"] = "previous", last_resort: bool = True,
) -> Path | None:  # fmt: skip
    """The checkpoint to load, the same on every rank. Collective.

    resume: "never", "auto" (the newest whole one under root, or None where there is none at all),
    or a folder. Under "auto" damaged ones are passed over with a warning, or with on_damage "stop"
    a ConfigError, as a named one that is damaged always is. Where there are some and none is whole
    it is a ConfigError too, unless on_damage is "anew". after: "auto" looks only at those of later
    steps. last_resort False: the caller has another one to load, so None is returned for damaged
    ones as well.
    """
    if resume == "never":
        return None
    told: list[Any] = [[resume]]
    if resume == "auto" and topology.rank == 0:
        told = [[str(path) for step, path in reversed(steps_in(root)) if step > after]]
    dist.broadcast_object_list(told, group=topology.control, group_src=0)
    passed: list[str] = []
    for folder in map(Path, told[0]):
        wrong = damage_together(folder, topology)
        if wrong is None:
            return folder
        if resume != "auto":
            raise ConfigError(f"--resume {resume}: {wrong}")
        if on_damage == "stop":
            raise ConfigError(
                f"the checkpoint {folder} is damaged: {wrong}. Restore it, remove it, or go on "
                "from the one before with --checkpoint.on_damage previous"
            )
        if topology.rank == 0:
            logger.warning("passing over the damaged checkpoint %s: %s", folder, wrong)
        passed.append(f"{folder.name}: {wrong}")
    if passed and last_resort and on_damage != "anew":
        raise ConfigError(none_is_whole(root, passed))
    return None


def none_is_whole(root: Path, passed: list[str]) -> str:
    """passed: what is wrong with each checkpoint, the newest first."""
    more = f"; and {len(passed) - SHOWN_DAMAGED} more" if len(passed) > SHOWN_DAMAGED else ""
    return (
        f"none of the {counted(len(passed), 'checkpoint')} in {root} is whole: "
        f"{'; '.join(passed[:SHOWN_DAMAGED])}{more}. Restore one of them, name another folder with "
        "--resume, or begin again at step 0 with --checkpoint.on_damage anew, which moves what is "
        f"there to {root.parent / 'earlier-N'}"
    )


def read_run(folder: Path) -> dict[str, Any]:
    """Reads run.json of a checkpoint. Raises ConfigError where it cannot be read, or is none."""
    path = Path(folder, "run.json")
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. {UNREADABLE_RUN}") from error
    missing = [key for key in ("step", "engines", "world") if key not in as_mapping(run)]
    if missing:
        raise ConfigError(f"{path} does not say {', '.join(missing)}. {UNREADABLE_RUN}")
    return run


def as_mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def load(folder: Path, engines: Mapping[str, Checkpointable], topology: Topology) -> dict[str, Any]:
    """Loads every engine's state in place; returns run.json. Collective.

    engines: the training engines by the names they were saved under. Random states are restored
    where the world size is what it was; with another they start anew from the run's seed.
    Raises ConfigError where the checkpoint lacks an engine that this run trains, or holds more than
    data.
    """
    run = read_run(folder)
    missing = sorted(set(engines) - set(run["engines"]))
    if missing:
        raise ConfigError(
            f"checkpoint {folder} has {run['engines']}, this run needs {missing} too. Leave out "
            "the option that asks for them, or start anew with --resume never"
        )
    for name, engine in engines.items():
        engine.onload()
        try:
            engine.load(Path(folder, name))
        except CheckpointException as error:  # no subclass of Exception
            cause, _ = next(iter(error.failures.values()))
            if isinstance(cause, ConfigError):
                raise cause from error
            raise ConfigError(
                f"checkpoint {folder} does not fit this run's {name}: {cause}"
            ) from cause
        engine.offload()
    if run["world"] == topology.world:
        set_rng_state(read_plain(Path(folder, f"rng_{topology.rank}.pt")))
    return run


# ---- random states


def rng_state() -> dict[str, Any]:
    """Returns the states of all random generators, in tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
