"""Draws what each rank did when: python -m spmdrl.timeline RUN_DIR [--steps 3:6]

Merges what the ranks recorded (training/logs/trace.py) into timeline.png, and into trace.json for
ui.perfetto.dev or chrome://tracing. Needs no process group, and no end of the run. Times are those
of each host's own clock; what is white in the picture happened outside of any phase.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import fire
import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from spmdrl.cli.help import asks_for_help, refuse_unknown
from spmdrl.cli.paths import check_folder, check_writable
from spmdrl.config import ConfigError
from spmdrl.distributed.exit import exit_config
from spmdrl.distributed.output import keep_output
from spmdrl.training.logs.answers import shortened
from spmdrl.training.logs.trace import (
    WAIT,
    TraceLine,
    idle_share,
    parse,
    trace_files,
    trace_path,
    work_end,
)

SHOWN_STEPS = 3  # unless --steps says which
FORMATS = (".png", ".pdf", ".svg")  # of the picture
HOST_PID = 1_000_000  # above every rank: a viewer takes a tid that equals its pid for a main thread

# The same phase has the same colour in every picture.
COLOURS = {
    "rollout": "#4e79a7", "reward": "#59a14f", "update_actor": "#e15759", "update": "#e15759",
    "update_critic": "#b07aa1", "update_prm": "#d37295", "sync": "#f28e2b",
    "old_logprobs": "#76b7b2", "ref_logprobs": "#a0cbe8", "values": "#d4a6c8",
    "advantages": "#f1ce63", "balance": "#8cd17d", "data": "#9d7660", "evaluate": "#2f5f83",
    "checkpoint": "#79706e",
}  # fmt: skip
OTHER_COLOURS = ("#499894", "#b6992d", "#ff9d9a", "#86bcb6", "#d7b5a6", "#bab0ac")
WAITING: dict[str, Any] = {"facecolor": "#f3f3f3", "edgecolor": "#c4c4c4", "hatch": "/////"}
GREY = "#666666"
WIDTH = 14.0  # of the picture, inches
CHAR_EM = 0.6  # mean width of a letter over the font size, on the safe side


class TimeSegment(NamedTuple):
    """A stretch of one rank's time, in seconds since the first one that is shown."""

    rank: int
    step: int
    phase: str
    start: float
    end: float
    waiting: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


# (rank, step, (name, start, end, agreed in seconds since the epoch))
Located = tuple[int, int, tuple[str, float, float, float]]


class Trace(NamedTuple):
    """The steps that are shown. A rank without any of them is not in `hosts`."""

    hosts: dict[int, str]  # rank -> host, ascending
    steps: dict[int, float]  # step -> start of its first span; seconds, ascending
    pieces: list[TimeSegment]  # by start
    busy: dict[str, dict[int, float]]  # phase, by first start -> rank -> seconds
    total_s: float
    notes: list[str]  # what a reader should know

    def busy_s(self, rank: int) -> float:
        return sum(seconds.get(rank, 0.0) for seconds in self.busy.values())

    def idle(self, rank: int) -> float:
        return idle_share(self.busy_s(rank), self.total_s)


def main(
    run_dir: str = "", steps: str | None = None, out: str | None = None, **others: Any
) -> None:
    """Draws what each rank of a run did when, and merges the ranks' traces.

    Args:
        run_dir: the folder of a run, also of one that is still going
        steps: 3:6 (both included), 3:, :6 or 5; the newest three unless given
        out: a .png, .pdf or .svg, with the events beside it as .json; else timeline.png and
            trace.json in the run's folder
    """
    keep_output()
    if asks_for_help(others, main):
        return
    folder = Path(str(run_dir))
    picture = Path(str(out)) if out is not None else folder / "timeline.png"
    events = picture.with_suffix(".json") if out is not None else folder / "trace.json"
    try:
        refuse_unknown(others, main)
        if not str(run_dir):
            raise ConfigError("RUN_DIR is required: python -m spmdrl.timeline RUN_DIR")
        check_folder("RUN_DIR", str(run_dir))
        check_writable("--out" if out is not None else "RUN_DIR", str(picture.parent))
        trace = timeline(folder, None if steps is None else str(steps), picture, events)
    except ConfigError as error:
        exit_config(error)
    print(tables(trace), "", *(f"note: {note}" for note in trace.notes), sep="\n")
    print(f"wrote {picture}")
    print(f"wrote {events}: open it in https://ui.perfetto.dev or chrome://tracing")


def timeline(run_dir: Path, steps: str | None, picture: Path, events: Path) -> Trace:
    """Writes both files. Raises ConfigError, see read_trace."""
    if picture.suffix not in FORMATS:
        raise ConfigError(f"--out {picture}: the name must end in one of {', '.join(FORMATS)}")
    trace = read_trace(run_dir, steps)
    first, last = min(trace.steps), max(trace.steps)
    shown = f"step {first}" if first == last else f"steps {first} to {last}"
    figure = draw(trace, f"{shortened(str(run_dir), 100)}: {shown}, {trace.total_s:,.3g} s")
    picture.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        figure.savefig(picture, dpi=120)
    whole = {"traceEvents": chrome_events(trace), "displayTimeUnit": "ms"}
    events.write_text(json.dumps(whole))
    return trace


# --- reading ---


def read_trace(run_dir: Path, steps: str | None) -> Trace:
    """steps: "3:6" (both included), "3:", ":6" or "5"; None: the newest SHOWN_STEPS.

    Raises ConfigError where there is no trace, a damaged one, or none of these steps.
    """
    paths = trace_files(run_dir)
    if not paths:
        raise ConfigError(f"no trace in {run_dir}: there is no {trace_path(run_dir, 0)}")
    # twice over the files, as the spans of all steps of a long run are too many for the memory
    known = {line.step for path in paths.values() for line in lines_of(path) if line}
    if not known:
        raise ConfigError(f"the trace in {run_dir} holds no whole step yet")
    first, last = step_range(steps, max(known))
    lines: dict[int, list[TraceLine]] = {}
    notes: list[str] = []
    for rank, path in paths.items():
        for line in lines_of(path):
            if line is None:
                notes.append(f"the torn last line of {path} is left out")
            elif first <= line.step <= last:
                lines.setdefault(rank, []).append(line)
    if not any(line.spans for rank in lines for line in lines[rank]):
        wanted = f"steps {first} to {last}" if last > first else f"step {first}"
        raise ConfigError(
            f"nothing of {wanted} in the trace of {run_dir}, which holds "
            f"steps {min(known)} to {max(known)}; --steps says which to show"
        )
    absent = [str(rank) for rank in paths if rank not in lines]
    if absent:
        notes.append(f"no such steps from rank {', '.join(absent)}")
    shown = [(rank, line.step, s) for rank in lines for line in lines[rank] for s in line.spans]
    # ranks that sample ahead are in other steps at the time of these
    begin, end = min(s[1] for _, _, s in shown), max(s[3] for _, _, s in shown)
    beside = [
        (rank, line.step, clipped(name, times, begin, end))
        for rank, path in paths.items()
        for line in lines_of(path)
        if line is not None and not first <= line.step <= last
        for name, *times in line.spans
        if times[0] < end and times[2] > begin
    ]
    hosts = {rank: lines[rank][-1].host for rank in sorted(lines)}
    return merge(shown, beside, hosts, notes)


def clipped(
    name: str, times: list[float], begin: float, end: float
) -> tuple[str, float, float, float]:
    start, worked, agreed = (min(max(t, begin), end) for t in times)
    return name, start, worked, agreed


def lines_of(path: Path) -> Iterator[TraceLine | None]:
    """None for a torn last line: the run is writing it, or was killed while it did.

    Raises ConfigError for any other that is damaged.
    """
    with path.open(errors="replace") as f:
        for number, row in enumerate(f, start=1):
            whole = row.endswith("\n")
            line = parse(row) if whole else None
            if whole and line is None:
                raise ConfigError(f"{path}:{number} is no line of a trace: {row.strip()[:60]!r}")
            yield line


def step_range(steps: str | None, newest: int) -> tuple[int, int]:
    """The first and the last step; see read_trace."""
    if steps is None:
        return newest - SHOWN_STEPS + 1, newest
    first, colon, last = steps.partition(":")
    given = [part for part in (first, last) if part]
    if not given or not all(part.isascii() and part.isdigit() for part in given):
        raise ConfigError(f"--steps {steps}: use one step (5), or a first and a last one (3:6)")
    low = int(first or 0)
    if not colon:
        return low, low
    return low, int(last or newest)


def merge(
    shown: list[Located], beside: list[Located], hosts: dict[int, str], notes: list[str]
) -> Trace:
    """One trace of spans, with times from the first of `shown` on. beside: of other steps."""
    zero = min(start for _, _, (_, start, _, _) in shown)
    own = {step for _, step, _ in shown}
    pieces: list[TimeSegment] = []
    steps: dict[int, float] = {}
    for rank, step, (name, start, end, agreed) in [*shown, *beside]:
        start, worked, agreed = start - zero, work_end(name, start, end) - zero, agreed - zero
        if step in own:
            steps[step] = min(start, steps.get(step, start))
        if worked > start:
            pieces.append(TimeSegment(rank, step, name, start, worked, waiting=False))
        if agreed > worked:
            pieces.append(TimeSegment(rank, step, name, worked, agreed, waiting=True))
    pieces.sort(key=lambda piece: piece.start)
    busy: dict[str, dict[int, float]] = {}
    for p in pieces:
        if not p.waiting:
            by_rank = busy.setdefault(p.phase, {})
            by_rank[p.rank] = by_rank.get(p.rank, 0.0) + p.seconds
    total_s = max((piece.end for piece in pieces), default=1e-6)
    return Trace(hosts, dict(sorted(steps.items())), pieces, busy, total_s, notes)


# --- what is made of it ---


def tables(trace: Trace) -> str:
    """Busy seconds by phase over the ranks that took part, and idle shares by rank."""
    wide = max(map(len, [*trace.busy, "phase"]))
    out = [f"{'phase':{wide}}  ranks  {'min s':>8}  {'mean s':>8}  {'max s':>8}"]
    for phase, by_rank in trace.busy.items():
        seconds = list(by_rank.values())
        low, mean, high = min(seconds), sum(seconds) / len(seconds), max(seconds)
        out.append(f"{phase:{wide}}  {len(seconds):5}  {low:8.3f}  {mean:8.3f}  {high:8.3f}")
    out += ["", f" rank  {'busy s':>8}    idle  host"]
    out += [f"{rank:5}  {trace.busy_s(rank):8.3f}  {trace.idle(rank):6.1%}  {host}"
            for rank, host in trace.hosts.items()]  # fmt: skip
    return "\n".join(out)


def chrome_events(trace: Trace) -> list[dict[str, Any]]:
    """Trace event format: a process per host, a thread per rank, complete events, microseconds."""
    hosts = list(dict.fromkeys(trace.hosts.values()))
    pids = {rank: HOST_PID + hosts.index(host) for rank, host in trace.hosts.items()}
    events: list[dict[str, Any]] = []
    for pid, host in enumerate(hosts, start=HOST_PID):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": host}})
    for rank, pid in pids.items():
        about = {"ph": "M", "pid": pid, "tid": rank}
        events.append({**about, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        events.append({**about, "name": "thread_sort_index", "args": {"sort_index": rank}})
    for step, start in trace.steps.items():
        mark = {"ph": "i", "s": "g", "name": f"step {step}", "cat": "step", "ts": micros(start)}
        events.append({**mark, "pid": HOST_PID, "tid": min(trace.hosts)})
    for p in trace.pieces:
        event = {"ph": "X", "name": p.phase, "cat": "phase", "pid": pids[p.rank], "tid": p.rank}
        if p.waiting:  # one name for all of them: Perfetto chooses colours by the name
            name = p.phase if p.phase.startswith(WAIT) else "wait"
            event |= {"name": name, "cat": "wait", "cname": "grey"}
        times = {"ts": micros(p.start), "dur": micros(p.end) - micros(p.start)}
        events.append({**event, **times, "args": {"step": p.step, "phase": p.phase}})
    return events


def micros(seconds: float) -> int:
    """Whole ones, as recorded, so that neighbours do not overlap by a rounding error."""
    return round(seconds * 1e6)


def draw(trace: Trace, title: str) -> Figure:
    """A row per rank, a bar per phase. All lengths are inches but those that are named."""
    row = min(max(12.8 / len(trace.hosts), 0.2), 0.5)
    font = 8.0 if row > 0.3 else 6.5  # points
    labels = [f"rank {rank} ({shortened(host, 24)})" for rank, host in trace.hosts.items()]
    left, right = max(map(len, labels)) * font * CHAR_EM / 72 + 0.2, 0.6
    across = WIDTH - left - right
    entry = max(map(len, [*trace.busy, "waiting"])) * 8 * CHAR_EM / 72 + 0.45
    columns = max(int(across / entry), 1)
    legend_rows = -(-(len(trace.busy) + 1) // columns)
    below, above, middle = 0.6 + 0.19 * legend_rows, 0.68, row * len(labels) + 0.1
    height = below + middle + above
    figure = Figure(figsize=(WIDTH, height))
    axes = figure.add_axes((left / WIDTH, below / height, across / WIDTH, middle / height))
    axes.set(xlim=(0, trace.total_s), ylim=(len(labels) - 0.4, -0.6))
    axes.set_xlabel("seconds", fontsize=9)
    axes.set_yticks(range(len(labels)), labels, fontsize=font)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    draw_bars(axes, trace, font, row, trace.total_s / across)
    draw_steps(axes, trace, trace.total_s / across)
    draw_idle(axes, trace, font)
    figure.text(left / WIDTH, 1 - 0.26 / height, title, fontsize=11, va="center")
    patches = [Patch(color=shade, label=name) for name, shade in colours(trace).items()]
    figure.legend(
        handles=[*patches, Patch(**WAITING, linewidth=0, label="waiting")], fontsize=8,
        loc="lower left", bbox_to_anchor=(left / WIDTH, 0.08 / height), borderaxespad=0,
        ncols=columns, frameon=False, handlelength=1.4, borderpad=0,
    )  # fmt: skip
    return figure


def draw_bars(axes: Axes, trace: Trace, font: float, row: float, inch_s: float) -> None:
    """font: points; row: its height in inches; inch_s: seconds to the inch."""
    shades = colours(trace)
    bars: dict[tuple[int, str], list[TimeSegment]] = {}  # "": waiting
    for p in trace.pieces:
        bars.setdefault((p.rank, "" if p.waiting else p.phase), []).append(p)
    rows = {rank: y for y, rank in enumerate(trace.hosts)}
    for (rank, phase), pieces in bars.items():
        where, y = [(p.start, p.seconds) for p in pieces], rows[rank]
        if not phase:
            axes.broken_barh(where, (y - 0.3, 0.6), linewidth=0, **WAITING)
            continue
        axes.broken_barh(where, (y - 0.4, 0.8), color=shades[phase], linewidth=0)
        for p in pieces:
            text = fitting(phase, p.seconds / inch_s, 0.8 * row, font)
            axes.text((p.start + p.end) / 2, y, text, fontsize=font, linespacing=1.0,
                      ha="center", va="center", color=text_colour(shades[phase]))  # fmt: skip


def fitting(name: str, width: float, height: float, font: float) -> str:
    """The name, in two lines if need be, or nothing, for a bar in inches; font: points."""
    for text in (name, name.replace("_", "_\n", 1)):
        lines = text.split("\n")
        wide = max(map(len, lines)) * font * CHAR_EM / 72 + 0.04
        if wide < width and len(lines) * font * 1.2 / 72 < height:
            return text
    return ""


def draw_steps(axes: Axes, trace: Trace, inch_s: float) -> None:
    """A thin line where a step begins on its first rank, and its number where there is room."""
    free = 0.0
    where: dict[str, Any] = {"xycoords": axes.get_xaxis_transform(), "textcoords": "offset points"}
    for step, start in trace.steps.items():
        axes.axvline(start, color="black", linewidth=0.7)
        if start >= free:
            axes.annotate(f"step {step}", (start, 1), (0, 4), fontsize=8, **where)
            free = start + 0.7 * inch_s


def draw_idle(axes: Axes, trace: Trace, font: float) -> None:
    """Each rank's idle share, to the right of its row."""
    right: dict[str, Any] = {"xycoords": axes.get_yaxis_transform(), "color": GREY}
    for y, rank in enumerate(trace.hosts):
        axes.annotate(f"{trace.idle(rank):.0%}", (1.006, y), va="center", fontsize=font, **right)
    axes.annotate("idle", (1.006, 1), (0, 4), xycoords="axes fraction", fontsize=8, color=GREY,
                  textcoords="offset points")  # fmt: skip


def colours(trace: Trace) -> dict[str, str]:
    """Returns the colour of each phase, in the order of the legend."""
    others = [name for name in trace.busy if name not in COLOURS]
    found = {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}
    return {name: COLOURS.get(name) or found[name] for name in trace.busy}


def text_colour(background: str) -> str:
    red, green, blue = to_rgb(background)
    return "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"


if __name__ == "__main__":
    fire.Fire(main)
