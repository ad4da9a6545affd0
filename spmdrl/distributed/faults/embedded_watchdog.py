"""A watchdog for a step inside another program, which has none of ours between its steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from spmdrl.config import ConfigError, PpoConfig
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.faults.watchdog import Watchdog
from spmdrl.distributed.phases import PhaseError, Phases
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import default_store

SHARED = ("failure", "felt", "news", "progress", "told", "claims")  # a watchdog's keys, but beats


class Guard:
    """Makes watchdogs, one for each call into our step; between calls nothing watches.

    A rank that fails inside a call prints the cause at once. Ranks that come to the same phase then
    raise it too; those that are blocked in a collective of Megatron's are ended a few seconds
    later, and so is the failed one, which waits for them. A rank that died ends the others too.
    """

    number = 0  # of guards made in this process, the same on all ranks

    def __init__(self, topology: Topology, config: PpoConfig) -> None:
        """topology: all ranks. Collective over it."""
        Guard.number += 1
        self.topology, self.config = topology, config
        self.folder = Path(config.run_dir, "errors")
        self.prefix, self.calls = f"spmdrl/{Guard.number}", 0
        self.store = default_store().clone()  # calls on one connection block each other
        places = gather_to_all(topology.place, topology.control)
        here = [rank for rank, place in enumerate(places) if place == topology.place]
        after = here[(here.index(topology.rank) + 1) % len(here)]
        self.first_here = here[0]
        self.neighbour = after if len(here) > 1 else None
        self.near_store = here[0] == 0

    def store_of(self, call: int) -> dist.Store:
        return dist.PrefixStore(f"{self.prefix}/{call}", self.store)

    @contextmanager
    def watching(self, phases: Phases) -> Iterator[None]:
        """Around each call. Collective: a rank that never comes is missed."""
        self.calls += 1
        # that all have ended the last call proves that all have closed the one before it
        self.forget(self.calls - 2)
        phases.name = "start of the call"
        watchdog = Watchdog(
            self.store_of(self.calls), self.topology.rank, self.topology.world, self.folder,
            self.config.stall_timeout_s, self.config.lost_timeout_s, self.neighbour,
            near_store=self.near_store, first_here=self.first_here, at_once=True,
        )  # fmt: skip
        watchdog.beat()  # at once: a call may be shorter than a watchdog's period
        phases.watchdog = watchdog
        PROGRESS.heard = phases.still_going  # as in a run of its own
        try:
            yield
            phases.barrier("end of the call")  # nobody leaves while another may still fail
        except (PhaseError, ConfigError):  # all ranks know of it
            raise
        except BaseException as error:  # outside of a phase: on this rank alone
            watchdog.report(asdict(phases.report(error)))
            raise
        finally:
            phases.watchdog = None
            with suppress(RuntimeError):  # the store's rank may have left after a failure
                watchdog.close()

    def forget(self, call: int) -> None:
        """Takes an earlier call's keys out of the program's store: a run makes many calls."""
        keys = [f"beat/{self.topology.rank}", *(SHARED if self.topology.rank == 0 else ())]
        if call > 0:
            store = self.store_of(call)
            for key in keys:
                store.delete_key(key)
