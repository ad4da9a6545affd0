"""Phases of a run: named, timed, and agreed upon by all ranks at their end.

    with phases("ref_logprobs", ref.topology):
        stats = ref.logprobs(batch)

If the body raises on one rank, all ranks of that topology raise the same PhaseError, naming it.
Ranks outside do not wait: roles on disjoint ranks work at the same time. They hear of a failure
through the watchdog, or at the next phase that they share with the rank that failed.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from spmdrl.config import ConfigError
from spmdrl.distributed.collectives import first_of
from spmdrl.distributed.exit import BAD_CONFIG, FAILED
from spmdrl.distributed.faults.watchdog import Watchdog
from spmdrl.distributed.limits import limit_of
from spmdrl.distributed.topology import Topology

BEGAN = time.time() - time.monotonic()


def clock() -> float:
    """Seconds since the epoch as the system had it when this process began, from then on by the
    monotonic clock: one that is set meanwhile changes no duration."""
    return BEGAN + time.monotonic()


@dataclass(frozen=True)
class FailureReport:
    """A report of what went wrong, the same on every rank."""

    rank: int
    host: str
    phase: str
    cause: str  # one line
    details: str  # traceback
    exit_code: int = FAILED  # BAD_CONFIG: the user's mistake, cause is the whole message

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} failed in phase '{self.phase}': {self.cause}"


REPORT_FIELDS = [field.name for field in fields(FailureReport)]  # a watchdog adds its own


class PhaseError(RuntimeError):
    """A phase failed on at least one rank; raised with the same report on every rank."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(str(report))
        self.report = report


class Span(NamedTuple):
    """One phase on this rank, in seconds since the epoch (clock)."""

    name: str
    start: float
    end: float  # of this rank's work
    agreed: float  # of everyone's: the rank was idle since `end`


class Phases:
    """Times phases and makes one rank's failure everyone's.

    Agreements are made on topology.control, a group of its own, so that a rank that
    fails amid another group's collective cannot garble it. There the others stay blocked, and the
    watchdog, which learns of the failure first, ends them. `shown` tells a user of each phase.
    """

    def __init__(
        self, topology: Topology, watchdog: Watchdog | None = None,
        shown: Callable[[str], AbstractContextManager[Any]] = nullcontext,
    ) -> None:  # fmt: skip
        self.topology, self.watchdog, self.shown = topology, watchdog, shown
        self.name = "start"
        self.mark: Callable[[str], AbstractContextManager[Any]] = nullcontext  # for a profiler
        self.spans: list[Span] = []

    @contextmanager
    def __call__(self, name: str, topology: Topology | None = None) -> Iterator[None]:
        """Ends in a collective on `topology` (None: every rank), all of whose ranks must come."""
        self._begin(name)
        start = clock()
        failure: BaseException | None = None
        with self.shown(name):
            try:
                with self.mark(name):
                    yield
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  raised again on every rank by `agree`
                failure = error
            end = clock()
            with self.mark(f"agree {name}"):
                self.agree(failure, topology or self.topology)
        self.spans.append(Span(name, start, end, clock()))

    def barrier(self, name: str, topology: Topology | None = None) -> None:
        """Waits for every rank of `topology` (None: every rank), in a phase of its own."""
        with self(name, topology):
            pass

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Names what this rank does by itself between two phases; nobody waits for it. A failure of
        the body is told with this name; it is neither timed nor agreed upon here."""
        before = self.name
        self._begin(name)
        yield
        self._begin(before)

    def _begin(self, name: str) -> None:
        self.name = name
        if self.watchdog:
            self.watchdog.progress(name)

    def agree(self, failure: BaseException | None, topology: Topology) -> None:
        """Raises PhaseError on all ranks where `failure` is set on any; a ConfigError stays one."""
        own: dict[str, Any] | None = None
        if failure is not None:
            own = asdict(self.report(failure))
            if self.watchdog:  # this rank may only feel another's end, and then reports that
                own = self.watchdog.report(own)
        found = first_of(own, topology)
        if found is None:
            return
        report = FailureReport(**{name: found[1][name] for name in REPORT_FIELDS})
        if report.exit_code == BAD_CONFIG:
            if self.watchdog:
                self.watchdog.done.set()  # all leave, each when it comes to it: nobody is missed
            raise ConfigError(report.cause) from failure
        raise PhaseError(report) from failure

    def report(self, failure: BaseException) -> FailureReport:
        if isinstance(failure, PhaseError):
            return failure.report
        if isinstance(failure, ConfigError):
            return self.report_of(str(failure), exit_code=BAD_CONFIG)
        reason = str(failure).strip().splitlines()
        cause = f"{type(failure).__name__}: {reason[0] if reason else ''}"
        cause += limit_of(f"{type(failure).__name__}: {failure}")
        details = "".join(traceback.format_exception(failure))
        return self.report_of(cause, details)

    def report_of(self, cause: str, details: str = "", exit_code: int = FAILED) -> FailureReport:
        """Makes a report of this rank, where it is now."""
        return FailureReport(
            self.topology.rank, self.topology.host, self.name, cause, details, exit_code
        )  # fmt: skip

    def still_going(self) -> None:
        """Tells the watchdog that a long phase has not stalled; to be called from time to time."""
        if self.watchdog:
            self.watchdog.progress(self.name)

    def take_spans(self) -> list[Span]:
        """The phases that ended since the last call."""
        taken, self.spans = self.spans, []
        return taken
