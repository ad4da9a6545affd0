"""A job whose hosts change: what it goes on from, and what a change has cost.

checkpoint/in_memory.py has the files, distributed/membership.py what the launcher does.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from spmdrl.checkpoint.disk_space import bytes_in, free_bytes, mib
from spmdrl.checkpoint.format import read_run
from spmdrl.checkpoint.in_memory import Hosts, InMemory, InMemoryCheckpoint, find_in_memory
from spmdrl.config import ConfigError, RunConfig
from spmdrl.config.words import counted
from spmdrl.training.checks.memory_fit import Planner, check_memory
from spmdrl.training.runtime import Runtime

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class SizeChange:
    """A start of the ranks after others in the same job. The same on every rank."""

    ranks: tuple[int | None, int]  # before and now; None: not known
    hosts: tuple[tuple[str, ...], tuple[str, ...]]  # before and now
    step: int | None  # of the checkpoint in memory; None: there is none that is whole
    passed: tuple[str, ...] = ()  # what is wrong with those that were passed over
    age_s: float = 0.0  # of the checkpoint, when it was found
    disk: Path | None = None  # the checkpoint that is gone on from where none is in memory
    found_at: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """Says what has changed, what is gone on from, and how long ago that was."""
        before, now = self.ranks
        sizes = counted(now, "rank")
        if before not in (None, now):
            sizes = f"{before} -> {sizes}"
        words = [sizes, *members(*self.hosts)]
        wrong = "; ".join(self.passed)
        if self.step is None:
            rest = f"goes on from {self.disk}" if self.disk else "begins where the run began"
            why = f"is whole ({wrong})" if wrong else "is of a later step"
            return f"elastic: {', '.join(words)}; no checkpoint in memory {why}: {rest}"
        seconds = self.age_s + time.monotonic() - self.found_at
        told = f"elastic: {', '.join(words)}; goes on from step {self.step} in memory"
        return told + (f" (passed over: {wrong})" if wrong else "") + f", {seconds:.0f} s"


def members(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Says which hosts are lost and which are new; several may have one name."""
    if not before:
        return []
    found = []
    for word, hosts in (("lost", Counter(before) - Counter(now)),
                        ("new", Counter(now) - Counter(before))):  # fmt: skip
        names = sorted(hosts.elements())
        if names:
            found.append(f"host{'s' * (len(names) > 1)} {', '.join(names)} {word}")
    return found


def in_memory_every(config: RunConfig, runtime: Runtime) -> int:
    """The steps from one checkpoint in memory to the next; 0: there are none."""
    return runtime.elastic.in_memory_every_steps(config.checkpoint.in_memory_every_steps)


def is_first_here() -> bool:
    """Whether this is the first rank of its host."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def hosts_of(runtime: Runtime) -> Hosts:
    """Collective."""
    topology = runtime.topology
    return Hosts.gather(topology.control, topology.host, int(os.environ.get("LOCAL_RANK", "0")))


def memory_place(runtime: Runtime) -> InMemory:
    """Collective. Each host has been asked by check_memory_room whether it has a folder."""
    assert runtime.elastic.memory is not None
    return InMemory(runtime.elastic.memory, hosts_of(runtime))


def memory_folder(runtime: Runtime) -> Path:
    """This host's folder for checkpoints in memory. Raises ConfigError where nobody keeps it from
    one start of the ranks to the next.
    """
    job = runtime.elastic
    if job.memory is not None:
        return job.memory
    if job.change is not None:  # a launcher that may start the ranks again has told of itself
        raise ConfigError(
            "/dev/shm of this host could not be written when the launcher started, and checkpoints "
            "in memory stand there: give this user the right to write to it, or go without them by "
            "--checkpoint.in_memory_every_steps 0"
        )
    raise ConfigError(
        "checkpoint.in_memory_every_steps is for runs whose ranks may be started again by "
        "python -m spmdrl.launch with --nnodes MIN:MAX or --max-restarts: nobody else keeps "
        "the memory. Start it so, or set in_memory_every_steps to 0"
    )


def check_memory_room(config: RunConfig, runtime: Runtime, least_bytes: int) -> None:
    """Raises ConfigError where this host has no place or no room for checkpoints in memory.

    least_bytes: of a checkpoint. What the ranks before these have left there counts as free: it
    gives way to the next one. For the first rank of each host.
    """
    if in_memory_every(config, runtime) == 0:
        return
    folder, here = memory_folder(runtime), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    # two checkpoints, each with its copy from another host, where there is one
    share = least_bytes * here / runtime.topology.world
    needed = int(share * (2 if here == runtime.topology.world else 4))
    free = free_bytes(folder) + bytes_in(folder)
    if free < needed:
        raise ConfigError(
            f"{folder.parent} has {mib(free)} MiB for checkpoints in memory, which take at least "
            f"{mib(needed)} MiB of each host: make it larger (docker run --shm-size, mount -o "
            "remount,size=...), take more hosts, or none with "
            "--checkpoint.in_memory_every_steps 0"
        )


def look_in_memory(
    config: RunConfig, runtime: Runtime, after: int
) -> tuple[InMemoryCheckpoint | None, SizeChange | None]:
    """Looks for a checkpoint in memory of a step beyond `after`, for ranks that are started again
    in their job. Collective.
    """
    if in_memory_every(config, runtime) == 0:
        return None, None
    place, world = memory_place(runtime), runtime.topology.world
    now = place.hosts.names
    found, passed = find_in_memory(place.root, place.hosts, runtime.topology.control, after)
    if found is None:
        return None, SizeChange((None, world), ((), now), None, tuple(passed))
    saved: dict[str, Any] = read_run(found.folder)
    before = tuple(map(str, saved.get("hosts", ())))
    ranks = (saved["world"], world)
    return found, SizeChange(ranks, (before, now), found.step, tuple(passed), found.age_s)


def check_sizes(sound: Callable[[C, int], None], config: C, runtime: Runtime) -> None:
    """Raises ConfigError where the config cannot run on a number of hosts that --nnodes allows, so
    that a job does not end at a change. sound: raises ConfigError; is given the number of ranks.
    """
    job, here = runtime.elastic, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if not job.is_elastic:
        return
    for nodes in range(job.min_nodes, job.max_nodes + 1):
        try:
            sound(config, nodes * here)
        except ConfigError as error:
            raise ConfigError(
                f"with {counted(nodes, 'host')}, {counted(nodes * here, 'rank')} in all, which "
                "--nnodes "
                f"{job.min_nodes}:{job.max_nodes} allows: {error}"
            ) from error


def check_memory_of_sizes(
    config: RunConfig, world: int, planner: Planner, runtime: Runtime
) -> None:  # fmt: skip
    """Raises ConfigError where the GPUs cannot hold the run on `world` ranks, or on a number of
    hosts that --nnodes allows: with fewer ranks each has a larger share of the model.
    """
    check_memory(config, world, planner)
    check_sizes(partial(check_memory, planner=planner), config, runtime)
