"""The runs that are shown, and every question that the page asks of them.

An answer is what JSON can hold. The server gives them one by one; a page that stands alone
(`export.py`) holds those that it has room for.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.view.metric_table import MetricTable
from spmdrl.view.sample_index import FILTERS, FileIndex, RowInfo, SampleFiles
from spmdrl.view.sample_rows import OF_TOKENS, UNREADABLE, Row, holds_text, lowered, row_of

MOST_POINTS = 4000  # of a curve
MOST_ROWS = 64  # of one answer
MOST_STEPS = 40  # of the history of a prompt
SEARCH_S = 3.0  # after which a search answers with what it has, and where to go on
MOST_SPANS = 20_000  # of a timeline
LIVE_S = 120.0  # a run that wrote since then is taken for one that is going on

Answer = dict[str, Any]


class Run:
    """One run folder, or the folder that spmdrl.evaluate wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)
        self.metrics = MetricTable(folder / "metrics.jsonl")
        self.samples = SampleFiles(folder)
        self.lock = threading.RLock()  # questions are answered in several threads

    def update(self) -> None:
        with self.lock:
            self.metrics.update()
            self.samples.update()

    def curves(self, names: list[str], most: int) -> Answer:
        with self.lock:
            self.metrics.update()
            return self.metrics.series(names, most)

    def steps(self, kind: str) -> list[int]:
        with self.lock:
            self.samples.update()
            return self.samples.steps(kind)

    def index(self, kind: str, step: int) -> FileIndex | None:
        with self.lock:
            return self.samples.index(kind, step)

    def state(self) -> list[int]:
        """Returns numbers that change when the run has written something that is shown."""
        with self.lock:
            self.update()
            return [len(self.metrics.steps), *map(len, self.samples.found.values())]

    def overview(self) -> Answer:
        with self.lock:
            self.update()
            return self.overview_now()

    def overview_now(self) -> Answer:
        files, steps = self.samples.found, self.metrics.steps
        return {
            "name": self.name,
            "path": str(self.folder),
            "rows": len(steps),
            "last_step": max(steps, default=None),
            "metrics": sorted(self.metrics.columns),
            "samples": {kind: list(found) for kind, found in files.items()},
            "has_timeline": (self.folder / "trace").is_dir(),
            "has_config": (self.folder / "config.py").is_file(),
            "going_on": self.is_going_on(),
            "notes": [*self.notes()],
        }

    def is_going_on(self) -> bool:
        state = self.metrics.state
        return state is not None and time.time() - state.mtime_ns / 1e9 < LIVE_S

    def notes(self) -> Iterator[str]:
        """Yields sentences about what is missing or damaged, and about failures."""
        if self.metrics.state is None:
            yield "There is no metrics.jsonl yet, so there are no curves."
        if self.metrics.damaged:
            lines, are = counted(self.metrics.damaged, "line"), verb(self.metrics.damaged, "are")
            yield f"{lines} of metrics.jsonl {are} damaged and {are} left out."
        for path in sorted((self.folder / "errors").glob("rank_*.json"))[:4]:
            yield f"{path.stem.replace('_', ' ')} failed: {failure_in(path)}"

    def config_text(self) -> str:
        path = self.folder / "config.py"
        return path.read_text(errors="replace") if path.is_file() else ""


def failure_in(path: Path) -> str:
    try:
        report = json.loads(path.read_text(errors="replace"))
        return str(report.get("cause") or report.get("error") or report)[:300]
    except (*UNREADABLE, AttributeError):
        return f"{path} cannot be read"


def open_runs(folders: list[str]) -> list[Run]:
    """Opens the runs under short names that differ. Raises ConfigError for what is no run."""
    runs = [Run(checked(Path(folder))) for folder in folders]
    paths = [run.folder.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"RUN {folders[number]} is given twice")
    for run, path in zip(runs, paths, strict=True):
        run.name = short_name(path, paths)
    return runs


def short_name(path: Path, paths: list[Path]) -> str:
    """Returns the last parts of a path, as many as tell it from the other paths."""
    for length in range(1, len(path.parts)):
        tail = path.parts[-length:]
        if sum(other.parts[-length:] == tail for other in paths) == 1:
            return "/".join(tail)
    return str(path)


def checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"RUN {folder}: there is no such folder")
    parts = ("metrics.jsonl", "config.py", "samples", "trace")
    if any((folder / part).exists() for part in parts):
        return folder
    inside = sorted(path.parent for path in folder.glob("*/metrics.jsonl"))
    if inside:
        names = " ".join(map(str, inside[:8]))
        raise ConfigError(f"RUN {folder} is no run, but holds {len(inside)} of them: {names}")
    raise ConfigError(
        f"RUN {folder} is no run folder: it has none of {', '.join(parts)}. A run's folder is "
        "run_dir of its config"
    )


class Questions:
    """Answers the page's questions. `run` is the number of a run, in the order they were given."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs

    def overview(self) -> Answer:
        return {"runs": [run.overview() for run in self.runs], "left_out": []}

    def state(self) -> Answer:
        return {"state": [run.state() for run in self.runs]}

    def curves(self, run: int, names: list[str], most: int = MOST_POINTS) -> Answer:
        return self.runs[run].curves(names, most)

    def rows(
        self, run: int, kind: str, step: int, wanted: str = "all", above: float = 0.0,
        text: str = "", start: int = 0, most: int = MOST_ROWS,
    ) -> Answer:  # fmt: skip
        """Returns samples of one file: those that pass the filter and hold the text.

        start: the place in the file from which to go on; `next` of the answer, None at the end.
        """
        self.runs[run].steps(kind)
        files, index = self.runs[run].samples, self.runs[run].index(kind, step)
        if index is None:
            return {"rows": [], "counts": {}, "next": None, "damaged": 0}
        found, place = matching(index, wanted, above, text, start, most)
        rows = files.rows(index, found, step)
        return {
            "rows": rows,
            "counts": counts_of(index, above),
            "next": place if place < len(index) else None,
            "damaged": index.damaged + len(found) - len(rows) + files.trained(index.path)[1],
        }

    def search(
        self, run: int, kind: str, wanted: str = "all", above: float = 0.0, text: str = "",
        start: tuple[int, int] | None = None, most: int = MOST_ROWS,
    ) -> Answer:  # fmt: skip
        """Returns samples of all steps, the newest first.

        Ends after SEARCH_S seconds with what it has. `next` is then where to go on, as [step, place
        in its file]; it is given as `start`.
        """
        deadline, rows = time.monotonic() + SEARCH_S, list[Row]()
        steps = self.runs[run].steps(kind)[::-1]
        left = steps if start is None else [step for step in steps if step <= start[0]]
        goes_on = None
        for number, step in enumerate(left):
            if len(rows) >= most or (number and time.monotonic() > deadline):
                goes_on = (step, 0)
                break
            index = self.runs[run].index(kind, step)
            if index is None:
                continue
            place = start[1] if start is not None and step == start[0] else 0
            asked = (wanted, above, text, place, most - len(rows), deadline)
            found, place = matching(index, *asked)
            rows += self.runs[run].samples.rows(index, found, step)
            if place < len(index):
                goes_on = (step, place)
                break
        searched = len(steps) if goes_on is None else steps.index(goes_on[0])
        return {"rows": rows, "searched": searched, "files": len(steps), "next": goes_on}

    def history(self, run: int, kind: str, prompt_id: int | None = None) -> Answer:
        """Returns the samples of one prompt in all steps; of many steps some, first and last too.

        They come without what is known of their tokens. None: the first prompt of the last step.
        Steps whose files were not read yet are read until SEARCH_S seconds are over; `complete`
        tells whether all were.
        """
        files, deadline = self.runs[run].samples, time.monotonic() + SEARCH_S
        steps = self.runs[run].steps(kind)
        if prompt_id is None:
            last = self.runs[run].index(kind, steps[-1]) if steps else None
            prompt_id = last.prompt_ids[0] if last else None
        found: list[tuple[int, FileIndex, list[RowInfo]]] = []
        complete = True
        for step in steps:
            if time.monotonic() > deadline:
                complete = False
                break
            index = self.runs[run].index(kind, step)
            if index is not None and prompt_id in index.prompt_ids:
                infos = [info for info in index.infos() if info.prompt_id == prompt_id]
                found.append((step, index, infos))
        shown = spread(found, MOST_STEPS)
        rows = [row for step, index, infos in shown for row in files.rows(index, infos, step)]
        for row in rows:
            for name in ("tokens", *OF_TOKENS):
                row.pop(name, None)
        return {"prompt": prompt_id, "rows": rows, "steps": len(found), "complete": complete}

    def timeline(self, run: int, steps: str | None = None) -> Answer:
        """Returns what each rank did when; {"error": ...} where there is nothing to show."""
        from spmdrl.timeline import colours, read_trace  # imports matplotlib

        try:
            trace = read_trace(self.runs[run].folder, steps or None)
        except ConfigError as error:
            return {"error": str(error)}
        spans = [
            [p.rank, p.step, p.phase, round(p.start, 4), round(p.end, 4), int(p.waiting)]
            for p in trace.pieces[:MOST_SPANS]
        ]
        return {
            "hosts": trace.hosts, "steps": trace.steps, "spans": spans, "total_s": trace.total_s,
            "colours": colours(trace), "idle": {rank: trace.idle(rank) for rank in trace.hosts},
            "notes": [*trace.notes, *too_many(len(trace.pieces))],
        }  # fmt: skip

    def config(self, run: int) -> Answer:
        return {"text": self.runs[run].config_text()}


def too_many(num_spans: int) -> list[str]:
    if num_spans <= MOST_SPANS:
        return []
    return [f"only the first {MOST_SPANS:,} of {num_spans:,} spans are shown: ask for fewer steps"]


def matching(
    index: FileIndex, wanted: str, above: float, text: str, start: int, most: int,
    deadline: float = math.inf,
) -> tuple[list[RowInfo], int]:  # fmt: skip
    """Returns at most `most` lines from place `start` on, and the place from which to go on.

    deadline: of time.monotonic(), after which it returns what it has found.
    """
    if wanted not in FILTERS:
        raise ConfigError(f"filter {wanted!r} is none of {', '.join(FILTERS)}")
    found: list[RowInfo] = []
    text = lowered(text)
    needle = json.dumps(text, ensure_ascii=False)[1:-1]
    place = start
    with open(index.path, "rb") as file:
        while place < len(index) and len(found) < most:
            if place > start and time.monotonic() > deadline:
                break
            info = index.info(place)
            place += 1
            if not info.passes(wanted, above):
                continue
            if text:
                file.seek(info.offset)
                line = file.readline()
                if not may_hold(line, needle):
                    continue
                row = row_of(line)
                if row is None or not holds_text(row, text):
                    continue  # it is in the name of a column, or across tokens
            found.append(info)
    return found, place


def may_hold(line: bytes, needle: str) -> bool:
    """Whether a line can have a text. Cheaper than to read its JSON, which then decides.

    needle: the text as JSON writes it, in lower case.
    """
    if needle.isascii():
        return needle.encode() in line.lower()
    return b"\\u" in line or needle in lowered(line.decode(errors="replace"))


def counts_of(index: FileIndex, above: float) -> dict[str, int]:
    infos = list(index.infos())
    return {name: sum(info.passes(name, above) for info in infos) for name in FILTERS}


def spread(items: list[Any], most: int) -> list[Any]:
    """Returns `most` of the items, at even distances, the first and the last among them."""
    if len(items) <= most:
        return items
    places = {round(i * (len(items) - 1) / (most - 1)) for i in range(most)}
    return [items[place] for place in sorted(places)]
