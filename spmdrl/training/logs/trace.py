"""Records what each rank did when: a line per step in <run dir>/trace/rank_00003.jsonl, and
metrics.

A span is busy time until this rank's work ended and waiting from there on, until all of the phase's
ranks had come; a span named "wait ..." is waiting altogether. `python -m spmdrl.timeline` draws it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from spmdrl.checkpoint.disk_space import writing

if TYPE_CHECKING:
    from spmdrl.distributed.phases import (  # imports torch: seconds, for the reader of a trace
        Phases,
        Span,
    )

KEPT_LINES = 10_000  # per rank at least, and twice as many at most: some 10 MB; two a step
WAIT = "wait "  # a span so named is never busy

PhaseSeconds = dict[str, tuple[float, float]]  # of one rank: phase -> (busy, waiting) seconds


class TraceLine(NamedTuple):
    """One rank's step, as it stands in the file."""

    step: int
    host: str
    spans: list[tuple[str, float, float, float]]  # name, start, end, agreed; seconds, epoch


class TraceFile:
    """One rank's file in <run dir>/trace; the newest KEPT_LINES at least stay in it.

    A run that goes on after `resume_step` keeps the lines up to there, and drops later and torn
    ones, also those of ranks that the run no longer has. To be made when rank 0 has set an earlier
    run aside. No handle stays open between steps.
    """

    def __init__(
        self, run_dir: Path, rank: int, host: str, resume_step: int = 0, world: int | None = None,
        aside: Path | None = None,
    ) -> None:  # fmt: skip
        """`world`: the number of ranks that the run has now; None: as many as there are files.
        `aside`: the folder in whose trace/ the lines are kept that are dropped here."""
        self.path, self.host, self.num_lines = trace_path(run_dir, rank), host, 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for number, path in trace_files(run_dir).items():
            if number == rank:
                self.num_lines = cut_back(path, resume_step, aside)
            # each left-over file has one rank that sees to it
            elif world is not None and number >= world and number % world == rank:
                cut_back(path, resume_step, aside)

    def write(self, step: int, spans: list[Span]) -> None:
        """Appends a line. A step may come twice (with its checkpoint, say): both lines count."""
        rows = [[name, *(round(t, 6) for t in times)] for name, *times in spans]
        with writing(self.path):
            with self.path.open("a") as f:
                f.write(json.dumps({"step": step, "host": self.host, "spans": rows}) + "\n")
            self.num_lines += 1
            if self.num_lines >= 2 * KEPT_LINES:
                newest = self.path.read_text().splitlines(keepends=True)[-KEPT_LINES:]
                rewrite(self.path, newest)
                self.num_lines = len(newest)


class SpanLog:
    """Phases on their way into the trace, under their step, and into the metrics of a report."""

    def __init__(self, phases: Phases, trace: TraceFile | None = None) -> None:
        self.phases, self.trace = phases, trace
        self.unreported: list[Span] = []
        self.since = time.monotonic()  # the last report

    def note(self, step: int) -> None:
        """Writes what has ended since the last call."""
        spans = self.phases.take_spans()
        if self.trace is not None:
            with self.phases.alone("write trace"):
                self.trace.write(step, spans)
        self.unreported += spans

    def report(self, step: int) -> tuple[PhaseSeconds, float]:
        """busy_and_waiting() since the last report, and how many seconds that is."""
        self.note(step)
        seconds, since_s = busy_and_waiting(self.unreported), time.monotonic() - self.since
        self.unreported, self.since = [], time.monotonic()
        return seconds, since_s


def trace_path(run_dir: Path, rank: int) -> Path:
    return Path(run_dir, "trace", f"rank_{rank:05d}.jsonl")


def trace_files(run_dir: Path) -> dict[int, Path]:
    """Returns the trace files of a run by rank, ascending."""
    found = sorted(Path(run_dir, "trace").glob(f"rank_{'[0-9]' * 5}.jsonl"))
    return {int(path.stem.removeprefix("rank_")): path for path in found}


def cut_back(path: Path, resume_step: int, aside: Path | None = None) -> int:
    """Leaves the whole lines of steps up to `resume_step`; their number. The others are appended to
    a file of the same name in aside/trace."""
    rows = path.read_text(errors="replace").splitlines(keepends=True)
    parsed = [(row, parse(row) if row.endswith("\n") else None) for row in rows]
    kept = [row for row, line in parsed if line is not None and line.step <= resume_step]
    later = [row for row, line in parsed if line is not None and line.step > resume_step]
    if aside is not None and later:
        Path(aside, "trace").mkdir(exist_ok=True)
        with Path(aside, "trace", path.name).open("a") as file:
            file.writelines(later)
    if kept != rows:
        rewrite(path, kept)
    return len(kept)


def rewrite(path: Path, rows: list[str]) -> None:
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(rows))
    aside.replace(path)  # at once: a rank that is killed here loses nothing


def work_end(name: str, start: float, end: float) -> float:
    """Returns when a span's busy part ends and its waiting begins."""
    return start if name.startswith(WAIT) else max(start, end)


def busy_and_waiting(spans: list[Span]) -> PhaseSeconds:
    """Sums this rank's spans by phase: (seconds busy, seconds waiting)."""
    seconds: PhaseSeconds = {}
    for name, start, end, agreed in spans:
        busy, waiting = seconds.get(name, (0.0, 0.0))
        worked = work_end(name, start, end)
        seconds[name] = (busy + worked - start, waiting + max(agreed - worked, 0.0))
    return seconds


class PhaseTotals(NamedTuple):
    """One phase on the ranks that took part."""

    num_ranks: int
    longest_s: float  # of any rank, from its start until all had agreed
    least_busy_s: float
    busy_s: float  # the sum
    most_busy_s: float


class Totals(NamedTuple):
    """Says where the time of some ranks went. It can be written as JSON."""

    phases: dict[str, PhaseTotals]
    num_ranks: int
    idle: float  # the sum over the ranks of 1 - busy / the rank's seconds
    most_idle: float


def totals_of(seconds: PhaseSeconds, of_s: float) -> Totals:
    """One rank's busy_and_waiting(), and the seconds that these are of."""
    phases = {
        name: PhaseTotals(1, busy + waiting, busy, busy, busy)
        for name, (busy, waiting) in seconds.items()
    }
    idle = idle_share(sum(busy for busy, _ in seconds.values()), of_s)
    return Totals(phases, 1, idle, idle)


def add_totals(one: Totals, other: Totals) -> Totals:
    phases = dict(one.phases)
    for name, (num_ranks, longest_s, least_s, busy_s, most_s) in other.phases.items():
        a = phases.get(name)
        phases[name] = PhaseTotals(
            num_ranks + (a.num_ranks if a else 0), max(longest_s, a.longest_s if a else 0.0),
            min(least_s, a.least_busy_s if a else least_s), busy_s + (a.busy_s if a else 0.0),
            max(most_s, a.most_busy_s if a else 0.0),
        )  # fmt: skip
    return Totals(
        phases, one.num_ranks + other.num_ranks, one.idle + other.idle,
        max(one.most_idle, other.most_idle),
    )  # fmt: skip


def phase_metrics(totals: Totals) -> dict[str, float]:
    """Tells where the time went.

    time/<phase>_s: the longest of any rank, from its start until all had agreed. time_min/,
    time_mean/ and time_max/<phase>_s: busy seconds of the ranks that took part. idle/share and
    idle/share_max: mean and largest over the ranks of 1 - busy / its seconds, which are a step's,
    but of another step where a rank samples ahead.
    """
    metrics: dict[str, float] = {}
    for phase, found in totals.phases.items():
        key = f"{phase.replace(' ', '_')}_s"
        metrics[f"time/{key}"] = found.longest_s
        if not phase.startswith(WAIT):
            metrics[f"time_min/{key}"] = found.least_busy_s
            metrics[f"time_mean/{key}"] = found.busy_s / found.num_ranks
            metrics[f"time_max/{key}"] = found.most_busy_s
    share = totals.idle / totals.num_ranks
    return metrics | {"idle/share": share, "idle/share_max": totals.most_idle}


def idle_share(busy_s: float, total_s: float) -> float:
    return max(1.0 - busy_s / total_s, 0.0) if total_s > 0 else 0.0


def parse(row: str) -> TraceLine | None:
    """None for what is no line of a trace."""
    try:
        raw = json.loads(row)
        spans = [(str(n), float(s), float(e), float(a)) for n, s, e, a in raw["spans"]]
        return TraceLine(int(raw["step"]), str(raw["host"]), spans)
    except (ValueError, KeyError, TypeError):
        return None
