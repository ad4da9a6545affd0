"""The runs that are shown, and every question that the page asks of them.

An answer is what JSON can hold. The server gives them one by one; a page that stands alone
(`export.py`) holds those that it has room for.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.view.metric_table import MetricTable
from spmdrl.view.sample_index import FILTERS, FileIndex, Row, RowInfo, SampleFiles

MOST_POINTS = 4000  # of a curve
MOST_ROWS = 64  # of one answer
MOST_STEPS = 40  # of the history of a prompt
SEARCH_S = 3.0  # after which a search answers with what it has, and where to go on
MOST_SPANS = 20_000  # of a timeline
SEARCHED = ("prompt", "response", "ground_truth", "pred", "invalid", "data_source", "messages")
LIVE_S = 120.0  # a run that wrote since then is taken for one that is going on

Answer = dict[str, Any]


class Run:
    """One run folder, or the folder that spmdrl.evaluate wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name = folder, str(folder)
        self.metrics = MetricTable(folder / "metrics.jsonl")
        self.samples = SampleFiles(folder)

    def update(self) -> None:
        self.metrics.update()
        self.samples.update()

    def state(self) -> list[int]:
        """Returns numbers that change when the run has written something that is shown."""
        self.update()
        files = self.samples.found
        return [len(self.metrics.steps), *(len(files[kind]) for kind in files)]

    def overview(self) -> Answer:
        self.update()
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
            yield f"{self.metrics.damaged} lines of metrics.jsonl are damaged and are left out."
        for path in sorted((self.folder / "errors").glob("rank_*.json"))[:4]:
            yield f"{path.stem.replace('_', ' ')} failed: {failure_in(path)}"

    def config_text(self) -> str:
        path = self.folder / "config.py"
        return path.read_text(errors="replace") if path.is_file() else ""


def failure_in(path: Path) -> str:
    try:
        report = json.loads(path.read_text(errors="replace"))
        return str(report.get("cause") or report.get("error") or report)[:300]
    except (ValueError, AttributeError):
        return f"{path} cannot be read"


def open_runs(folders: list[str]) -> list[Run]:
    """Opens the runs under short names that differ. Raises ConfigError for what is no run."""
    runs = [Run(checked(Path(folder))) for folder in folders]
    paths = [run.folder.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise ConfigError(f"RUN {folders[number]} is given twice")
    for run, path in zip(runs, paths, strict=True):
        same = [other for other in paths if other.name == path.name]
        run.name = path.name if len(same) == 1 else "/".join(path.parts[-2:])
    return runs


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
        table = self.runs[run].metrics
        table.update()
        return table.series(names, most)

    def rows(
        self, run: int, kind: str, step: int, wanted: str = "all", above: float = 0.0,
        text: str = "", start: int = 0, most: int = MOST_ROWS,
    ) -> Answer:  # fmt: skip
        """Returns samples of one file: those that pass the filter and hold the text.

        start: the place in the file from which to go on; `next` of the answer, None at the end.
        """
        files = self.runs[run].samples
        files.update()
        index = files.index(kind, step)
        if index is None:
            return {"rows": [], "counts": {}, "next": None, "damaged": 0}
        found, place = matching(index, wanted, above, text, start, most)
        return {
            "rows": clean(files.rows(index, found, step)),
            "counts": counts_of(index, above),
            "next": place if place < len(index) else None,
            "damaged": index.damaged,
        }

    def search(
        self, run: int, kind: str, wanted: str = "all", above: float = 0.0, text: str = "",
        start: int = 0, most: int = MOST_ROWS,
    ) -> Answer:  # fmt: skip
        """Returns samples of all steps, the newest first. start: so many files have been searched.

        Ends after SEARCH_S seconds with what it has; `next` is then where to go on.
        """
        files, deadline = self.runs[run].samples, time.monotonic() + SEARCH_S
        files.update()
        steps, rows, searched = files.steps(kind)[::-1], [], start
        for step in steps[start:]:
            searched += 1
            index = files.index(kind, step)
            if index is not None:
                found, _ = matching(index, wanted, above, text, 0, most)
                rows += files.rows(index, found, step)
            if len(rows) >= most or time.monotonic() > deadline:
                break
        return {
            "rows": clean(rows), "searched": searched, "files": len(steps),
            "next": searched if searched < len(steps) else None,
        }  # fmt: skip

    def history(self, run: int, kind: str, prompt_id: int) -> Answer:
        """Returns the samples of one prompt in all steps; of many steps some, first and last too.

        Steps whose files were not read yet are read until SEARCH_S seconds are over; `complete`
        tells whether all were.
        """
        files, deadline = self.runs[run].samples, time.monotonic() + SEARCH_S
        files.update()
        found: list[tuple[int, FileIndex, list[RowInfo]]] = []
        complete = True
        for step in files.steps(kind):
            if time.monotonic() > deadline:
                complete = False
                break
            index = files.index(kind, step)
            if index is not None and prompt_id in index.prompt_ids:
                infos = [info for info in index.infos() if info.prompt_id == prompt_id]
                found.append((step, index, infos))
        shown = spread(found, MOST_STEPS)
        rows = [row for step, index, infos in shown for row in files.rows(index, infos, step)]
        return {"rows": clean(rows), "steps": len(found), "complete": complete}

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
    index: FileIndex, wanted: str, above: float, text: str, start: int, most: int
) -> tuple[list[RowInfo], int]:
    """Returns at most `most` lines from place `start` on, and the place behind the last of them."""
    if wanted not in FILTERS:
        raise ConfigError(f"filter {wanted!r} is none of {', '.join(FILTERS)}")
    found: list[RowInfo] = []
    needles = needles_of(text)
    place = start
    with open(index.path, "rb") as file:
        while place < len(index) and len(found) < most:
            info = index.info(place)
            place += 1
            if not info.passes(wanted, above):
                continue
            if needles:
                file.seek(info.offset)
                line = file.readline()
                if not any(needle in line.lower() for needle in needles):
                    continue
                if not holds_text(json.loads(line), text.lower()):
                    continue  # it is in the name of a column, or across tokens
            found.append(info)
    return found, place


def needles_of(text: str) -> list[bytes]:
    """The forms in which JSON may have written a text, in lower case."""
    forms = [json.dumps(text.lower(), ensure_ascii=ascii)[1:-1] for ascii in (False, True)]
    return [form.encode(errors="replace") for form in dict.fromkeys(forms)] if text else []


def holds_text(row: Row, text: str) -> bool:
    """Whether a text in lower case is in what the sample says. As `holds` in static/source.js."""
    return any(
        text in (part if isinstance(part, str) else json.dumps(part, ensure_ascii=False)).lower()
        for part in map(row.get, SEARCHED)
        if part is not None
    )


def counts_of(index: FileIndex, above: float) -> dict[str, int]:
    infos = list(index.infos())
    return {name: sum(info.passes(name, above) for info in infos) for name in FILTERS}


def spread(items: list[Any], most: int) -> list[Any]:
    """Returns `most` of the items, at even distances, the first and the last among them."""
    if len(items) <= most:
        return items
    places = {round(i * (len(items) - 1) / (most - 1)) for i in range(most)}
    return [items[place] for place in sorted(places)]


def clean(value: Any) -> Any:
    """The value with None for every number that JSON has not: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): clean(part) for name, part in value.items()}
    return [clean(part) for part in value] if isinstance(value, list) else value
