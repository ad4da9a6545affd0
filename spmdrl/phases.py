"""Phases of a run: named, timed, and agreed upon by all ranks at their end.

    with phases("reward"):
        samples = score(samples)

If the body raises on one rank, all ranks raise the same PhaseError, naming that rank.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from spmdrl.config import ConfigError
from spmdrl.topology import Topology
from spmdrl.watchdog import Watchdog


@dataclass(frozen=True)
class Story:
    """What went wrong, told the same way on every rank."""

    rank: int
    host: str
    phase: str
    cause: str  # one line
    details: str  # traceback
    config_error: bool = False  # the user's mistake: cause is the whole message

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed in phase '{self.phase}': {self.cause}"


class PhaseError(RuntimeError):
    """A phase failed on at least one rank; raised with the same story on every rank."""

    def __init__(self, story: Story) -> None:
        super().__init__(str(story))
        self.story = story


class Phases:
    """Times phases and makes one rank's failure everyone's.

    `control` is a CPU group of all ranks for agreements (and the exchanges of a checkpoint, which
    end in one), so that a rank that fails amid another group's collective cannot garble it. There
    the others stay blocked, and the watchdog, which learns of the failure first, ends them.
    `on_change` hears each phase's name.
    """

    def __init__(
        self, topology: Topology, control: dist.ProcessGroup, watchdog: Watchdog | None = None,
        on_change: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        self.topology, self.control, self.watchdog = topology, control, watchdog
        self.on_change = on_change
        self.name = "start"
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Ends in a collective on the control group: every rank must pass through every phase."""
        self.name = name
        if self.watchdog:
            self.watchdog.progress(name)
        if self.on_change:
            self.on_change(name)
        start = time.perf_counter()
        failure: Exception | None = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised again on every rank by `agree`
            failure = error
        self.agree(failure)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def agree(self, failure: Exception | None) -> None:
        """Raises PhaseError on every rank where `failure` is set on any; a ConfigError stays one.

        Costs one all-reduce of one integer.
        """
        if failure is not None and self.watchdog:
            self.watchdog.report(asdict(self.story(failure)))
        world, rank = self.topology.world, self.topology.rank
        failed = torch.tensor([world if failure is None else rank])
        dist.all_reduce(failed, dist.ReduceOp.MIN, group=self.control)
        if failed.item() == world:
            return
        first: list[Any] = [None]
        if failure is not None and failed.item() == rank:
            first = [asdict(self.story(failure))]
        dist.broadcast_object_list(first, src=int(failed.item()), group=self.control)
        story = Story(**first[0])
        if story.config_error:
            raise ConfigError(story.cause) from failure
        raise PhaseError(story) from failure

    def story(self, failure: Exception) -> Story:
        if isinstance(failure, PhaseError):
            return failure.story
        if isinstance(failure, ConfigError):
            return Story(self.topology.rank, self.topology.host, self.name, str(failure), "", True)
        reason = str(failure).strip().splitlines()
        cause = f"{type(failure).__name__}: {reason[0] if reason else ''}"
        details = "".join(traceback.format_exception(failure))
        return Story(self.topology.rank, self.topology.host, self.name, cause, details)

    def still_going(self) -> None:
        """To be called from time to time in a long phase: it has not stalled."""
        if self.watchdog:
            self.watchdog.progress(self.name)

    def take_seconds(self) -> dict[str, float]:
        """Seconds spent in each phase since the last call."""
        taken, self.seconds = self.seconds, {}
        return taken
