"""The process side of a run: ranks, phases, watchdog and signals, from the start to the end.

Exit codes: 0 done, 1 a failure that a restart may cure, 2 a mistake in the config or the data, 75
stopped by a signal (start it again and it goes on), 130 Ctrl-C.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.checkpoint.disk_space import check_encodable, check_room
from spmdrl.config import ConfigError
from spmdrl.distributed.elastic_job import ElasticJob
from spmdrl.distributed.exit import FAILED, GUARD, REQUEUE, exit_config, leave, leave_for_torchrun
from spmdrl.distributed.faults.rendezvous import FOREVER, StartupBarrier
from spmdrl.distributed.faults.watchdog import Watchdog
from spmdrl.distributed.phases import PhaseError, Phases
from spmdrl.distributed.process import (
    compare_configs,
    local_neighbour,
    prepare_environment,
    require_launcher,
    seed_everything,
    start_process_group,
)
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.signals import STOPPING, Stopping
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import default_store
from spmdrl.rollout.build import shared_bytes


@dataclass
class Runtime:
    """The process side of a run."""

    topology: Topology  # every rank, axis dp
    phases: Phases
    run_dir: Path
    stopping: Stopping = field(default_factory=Stopping)  # unless it listens, nothing stops it
    lock: int | None = None  # rank 0's hold on run_dir
    stopped: str = ""  # what there is to say where a signal ended the run in order
    arguments: tuple[str, ...] = ()  # of the command line
    elastic: ElasticJob = field(default_factory=ElasticJob)  # what the launcher says of the job
    at_end: Callable[[], None] = lambda: None  # after the last collective; no rank waits for it

    @property
    def is_main(self) -> bool:
        return self.topology.rank == 0


@contextmanager
def started(config: Any, is_plan: bool = False) -> Iterator[Runtime]:
    """Starts everything, seeds, compares configs over ranks; ends it all in order, or with a report
    of the failure.

    config: a RunConfig. is_plan: it is looked at and not run, so that other ranks than these may be
    named in it. Exits the process where the body raises.
    """
    PROGRESS.now("connecting the ranks")
    launched = "RANK" in os.environ
    prepare_environment()
    stopping = STOPPING
    stopping.listen()
    neighbour = local_neighbour()
    run_dir = Path(config.run_dir)
    start = StartupBarrier(config.start_timeout_s, run_dir / "errors")
    try:
        require_launcher(launched)
        check_encodable({"run_dir": config.run_dir, "model": config.model})
        device = start_process_group(FOREVER, start)
    except ConfigError as error:
        exit_config(error)
    topology = Topology.build(device, dp=-1)
    store = dist.PrefixStore("watchdog", default_store().clone())
    first_here = topology.rank - int(os.environ["LOCAL_RANK"])
    watchdog = Watchdog(
        store, topology.rank, topology.world, run_dir / "errors", config.stall_timeout_s,
        lost_timeout_s(config), neighbour,
        near_store=os.environ["RANK"] == os.environ["LOCAL_RANK"], first_here=first_here,
    )  # fmt: skip
    start.done()
    phases = Phases(topology, watchdog, PROGRESS.phase)
    PROGRESS.heard = phases.still_going  # an update of many micro-batches may take an hour
    PROGRESS.now("preparing the run")
    stopping.failed = lambda: watchdog.heard
    by_itself, stopping.on_quit = stopping.on_quit, partial(end_early, phases, watchdog)
    GUARD.report_failure = lambda cause, stack: end_early(phases, watchdog, cause, FAILED, stack)
    runtime = Runtime(
        topology,
        phases,
        run_dir,
        stopping,
        arguments=tuple(sys.argv[1:]),
        elastic=ElasticJob.read(),
    )
    try:
        compare_configs(config, topology)
        with phases("check folders"):
            if int(os.environ["LOCAL_RANK"]) == 0:  # on each host
                check_room(run_dir, 0 if is_plan else shared_here(config, topology))
        seed_everything(config.seed + topology.rank)
        yield runtime
        watchdog.progress("end")
        dist.barrier(group=topology.control)  # a rank may hang while its engine closes, or fail
    except PhaseError as error:  # the rank that failed has reported it
        watchdog.announce_and_wait(asdict(error.report))
        leave(error.report.exit_code)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  told with rank and phase, then the process ends
        failure = watchdog.report(asdict(phases.report(error)))
        watchdog.announce_and_wait(failure)
        leave(failure["exit_code"])
    watchdog.close()
    dist.barrier(group=topology.control)  # the store's host leaves last
    GUARD.all_done()
    stopping.on_quit = by_itself  # a program that goes on is alone
    dist.destroy_process_group()
    PROGRESS.stop()
    if runtime.stopped:
        leave_for_torchrun(runtime.stopped)
        leave(REQUEUE)
    runtime.at_end()
    gc.freeze()  # Python's end would look through all of it


def end_early(phases: Phases, watchdog: Watchdog, cause: str, code: int, stack: str = "") -> None:
    """Tells the other ranks that this one ends, by a signal or a function that ends its process:
    they end as well, since it will not be there to finish the step with them.
    """
    watchdog.announce_and_wait(watchdog.report(asdict(phases.report_of(cause, stack, code))))


def shared_here(config: Any, topology: Topology) -> int:
    """Bytes of /dev/shm that the ranks of this host need; on the first of them."""
    if topology.device.type != "cpu":
        return 0
    last = topology.rank + int(os.environ["LOCAL_WORLD_SIZE"])
    return shared_bytes(
        config, list(range(topology.rank, last)), topology.world, torch.get_num_threads()
    )


def lost_timeout_s(config: Any) -> float:
    """torch.profiler ends and writes a trace without letting go of the interpreter: no thread of
    that rank gives a sign of life meanwhile, which may be minutes."""
    if config.profile is None:
        return config.lost_timeout_s
    return max(config.lost_timeout_s, config.stall_timeout_s)
