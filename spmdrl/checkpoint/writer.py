"""Writes checkpoints while the run goes on.

On every rank `save` copies what it holds into the host's memory, which is all that training waits
for; a thread writes the copy. Ranks' threads meet on gloo groups that nothing else uses.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from spmdrl.checkpoint.disk_space import mib_free, temporary_folder, writing
from spmdrl.checkpoint.format import (
    Checkpointable,
    Digest,
    Staged,
    commit,
    prune,
    rng_state,
    sealed,
    write_synced,
)
from spmdrl.config import CheckpointConfig, ConfigError
from spmdrl.distributed.agreement import gather_to_first, lowest
from spmdrl.distributed.collectives import FailedElsewhere, together
from spmdrl.distributed.phases import Phases
from spmdrl.distributed.topology import Topology, new_group

PROBE_BYTES = 1 << 20


class RankState(Protocol):
    """The state that a rank keeps from step to step beside its models."""

    def save(self, file: io.BytesIO) -> None: ...


class Destination(Protocol):
    """The place where checkpoints stand: a folder that all ranks share (OnDisk), or the memory of
    their hosts (in_memory.InMemory).
    """

    def make(self, aside: Path, folders: list[str]) -> None:
        """Makes the folder that is written into, and these in it. On every rank."""
        ...

    def commit(self, aside: Path, own: dict[str, Digest], group: dist.ProcessGroup) -> Path:
        """Lets the checkpoint stand, and removes older ones; returns its folder. own: the digests
        of what this rank wrote, by path within the folder. Collective over `group`.
        """
        ...

    def discard(self, aside: Path) -> None:
        """Removes what a save that failed has written. On every rank."""
        ...


class OnDisk:
    """Checkpoints in one folder, which rank 0 makes and completes."""

    def __init__(self, root: Path, config: CheckpointConfig, rank: int) -> None:
        self.root, self.config, self.is_first = root, config, rank == 0

    def make(self, aside: Path, folders: list[str]) -> None:
        if self.is_first:
            shutil.rmtree(aside, ignore_errors=True)
            for part in folders:
                Path(aside, part).mkdir(parents=True)

    def commit(self, aside: Path, own: dict[str, Digest], group: dist.ProcessGroup) -> Path:
        final = aside.with_suffix("")
        found = gather_to_first(own, group) or []
        digests: dict[str, Digest] = {name: d for part in found for name, d in part.items()}
        together(group, lambda: commit(aside, final, digests) if self.is_first else None)
        together(group, lambda: prune(self.root, self.config) if self.is_first else None)
        return final

    def discard(self, aside: Path) -> None:
        if self.is_first:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk would stay full


@dataclass
class CheckpointJob:
    """The part of one checkpoint that this rank is to write."""

    step: int
    engines: list[str]  # of the run
    staged: dict[str, Staged]  # of this rank
    files: dict[str, bytes]  # of this rank, by path within the folder
    began: float = field(default_factory=time.perf_counter)


class Saver:
    """One save at a time; `wait` for it before the process ends. Collective over all ranks.

    roles: name -> ranks of everything that is trained, the same on every rank. on_saved: hears, on
    every rank and in whatever thread, the step and the folder once it stands. place: None: root is
    a folder that all ranks share.
    """

    def __init__(
        self, root: Path, config: CheckpointConfig, phases: Phases, roles: dict[str, Topology],
        on_saved: Callable[[int, Path], None], place: Destination | None = None,
    ) -> None:  # fmt: skip
        self.root, self.config, self.phases, self.on_saved = root, config, phases, on_saved
        self.topology = phases.topology
        self.place = place or OnDisk(root, config, self.topology.rank)
        self.groups = own_groups([self.topology, *roles.values()])
        self.roles = roles
        self.thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of this rank
        self.failed = False  # somewhere
        self.took_s: float | None = None  # until the last one stood
        self.hf: dict[str, bytes] | None = None

    def save(
        self, step: int, engines: Mapping[str, Checkpointable], run: dict[str, Any],
        pretrained: list[Any], own: dict[str, RankState] | None = None, writer: int = 0,
    ) -> None:  # fmt: skip
        """Begins root/step_N; afterwards all but those that the config keeps are removed.

        engines: those that this rank has; run["engines"] names all; own: what this rank keeps for
        itself; run (JSON-able) and pretrained (a config, tokenizer and so on, whose save_pretrained
        writes to hf/) are those of the rank `writer`.
        A failure on any rank (disk full, say) is a PhaseError on all, raised by `wait` or by the
        next `save`; `failed` tells of it before. Older checkpoints are left untouched.
        """
        self.wait()
        with self.phases("checkpoint"):
            files = self.small_files(step, run, pretrained, own or {}, writer)
            staged: dict[str, Staged] = {}
            for name, engine in engines.items():
                staged[name] = UnstagedEngine(engine) if self.config.blocking else engine.stage()
            parcel = CheckpointJob(step, run["engines"], staged, files)
        if self.config.blocking:
            with self.phases("checkpoint"):
                self.write(parcel)
            self.wait()
        else:
            work = partial(self.write, parcel)
            self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
            self.thread.start()

    def wait(self) -> None:
        """Waits until what was begun stands. Raises PhaseError on every rank where it does not."""
        with self.phases("checkpoint"):
            if self.thread is not None:
                self.thread.join()
                self.thread = None
            failure, self.failure, self.failed = self.failure, None, False
            if failure is not None:
                raise failure

    def take_metrics(self) -> dict[str, float]:
        """checkpoint/write_s of a save that ended since the last call."""
        took_s, self.took_s = self.took_s, None
        return {} if took_s is None else {"checkpoint/write_s": took_s}

    def small_files(
        self, step: int, run: dict[str, Any], pretrained: list[Any], own: dict[str, RankState],
        writer: int,
    ) -> dict[str, bytes]:  # fmt: skip
        rank = self.topology.rank
        files = {f"rng_{rank}.pt": saved_bytes(partial(torch.save, rng_state()))}
        for name, part in own.items():
            files[f"{name}_{rank:05d}.pt"] = saved_bytes(part.save)
        if rank == writer:
            run = {**run, "step": step, "world": self.topology.world}
            files["run.json"] = json.dumps(run, indent=1).encode()
            if self.hf is None:  # they do not change, and tokenizers bear no second thread
                self.hf = pretrained_files(pretrained)
            files |= self.hf
        return files

    # ---- in the thread

    def write(self, parcel: CheckpointJob) -> None:
        device = self.topology.device
        if device.type == "cuda":  # a thread starts on the first
            torch.cuda.set_device(device)
        aside = Path(self.root, f"step_{parcel.step:08d}.tmp")
        try:
            folder = self.write_and_commit(parcel, aside)
        except Exception as error:  # noqa: BLE001  raised by `wait`, with the rank that it is of
            if not isinstance(error, FailedElsewhere):
                self.failure = error
            self.place.discard(aside)
            self.failed = True
            return
        self.took_s = time.perf_counter() - parcel.began
        self.on_saved(parcel.step, folder)

    def write_and_commit(self, parcel: CheckpointJob, aside: Path) -> Path:
        everyone = self.groups[self.topology.ranks]
        folders = ["hf", *parcel.engines]
        together(everyone, lambda: self.place.make(aside, folders))
        mine = together(everyone, lambda: self.write_parts(parcel, aside))
        own = together(everyone, lambda: {name: sealed(Path(aside, name)) for name in mine})
        return self.place.commit(aside, own, everyone)

    def write_parts(self, parcel: CheckpointJob, aside: Path) -> list[str]:
        """The files that this rank wrote, or answers for."""
        try:
            for name, staged in parcel.staged.items():
                staged.write(Path(aside, name), self.groups[self.roles[name].ranks])
            for name, content in parcel.files.items():
                write_synced(Path(aside, name), content)
        except FailedElsewhere:
            raise
        except (OSError, RuntimeError) as error:
            raise explained(error, aside) from error
        mine = [
            f"{name}/{file.name}"
            for name in parcel.staged
            for file in Path(aside, name).iterdir()
            if writer_of(file.name) == self.roles[name].rank
        ]
        return [*mine, *parcel.files]


@dataclass
class UnstagedEngine:
    """An engine whose state is written as it stands, while nothing changes it."""

    engine: Checkpointable

    def write(self, folder: Path, group: dist.ProcessGroup) -> None:
        self.engine.save(folder)


def own_groups(topologies: Iterable[Topology]) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """One for the ranks of each. Collective over the job."""
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for topology in topologies:
        ranks = tuple(sorted(topology.ranks))
        if ranks not in groups:
            groups[ranks] = new_group(ranks, "gloo")
            if dist.get_rank() in ranks:
                # connects its ranks along the tree, in this thread: one that writes while another
                # waits for a key on the default store's connection would wait for that too
                lowest(0, groups[ranks])
    return groups


def writer_of(name: str) -> int:
    """The rank of its role that wrote a file of an engine; what has no number is the first's."""
    found = re.match(r"__(\d+)_", name)
    return int(found[1]) if found else 0


def saved_bytes(save: Callable[[io.BytesIO], None]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


def pretrained_files(pretrained: list[Any]) -> dict[str, bytes]:
    with writing(temporary_folder() / "hf"), tempfile.TemporaryDirectory() as folder:
        for part in pretrained:
            part.save_pretrained(folder)
        files = [f for f in sorted(Path(folder).rglob("*")) if f.is_file()]
        return {f"hf/{f.relative_to(folder)}": f.read_bytes() for f in files}


def explained(error: Exception, folder: Path) -> OSError:
    """torch does not say why a file could not be written ("disk full"): a small one tells."""
    what = f"cannot write {folder}, where {mib_free(folder)} MiB are free: "
    probe = Path(folder, f"probe_{os.getpid()}")
    try:
        write_synced(probe, bytes(PROBE_BYTES))
    except OSError as why:
        return OSError(why.errno, f"{what}{why.strerror or why} ({type(error).__name__}: {error})")
    finally:
        with suppress(OSError):
            probe.unlink()
    if isinstance(error, OSError) and error.errno:
        return OSError(error.errno, f"{what}{error.strerror}")
    return OSError(f"{what}{type(error).__name__}: {error}")


def check_metric(config: CheckpointConfig, metrics: dict[str, float]) -> None:
    """Raises ConfigError, at a save, where no step will ever have config.best_metric.

    Where a sample has no reward the metric may be missing for that.
    """
    name = config.best_metric
    of_eval = name.startswith("eval/")
    evaluated = any(other.startswith("eval/") for other in metrics)
    if not config.keep_best or name in metrics or (of_eval and not evaluated):
        return
    if metrics.get("eval/reward/invalid" if of_eval else "reward/invalid", 0) > 0:
        return
    raise ConfigError(
        f"checkpoint.best_metric={name!r} is no metric of this run; there are "
        f"{', '.join(sorted(metrics))}"
    )
