"""Reads metrics.jsonl as columns, and goes on where it stopped as the run writes more."""

from __future__ import annotations

import json
import math
from array import array
from pathlib import Path
from typing import Any

from spmdrl.view.line_files import FileState, whole_lines
from spmdrl.view.sample_rows import UNREADABLE

Series = dict[str, list[float | int | None]]


class MetricTable:
    """The rows of a run's metrics.jsonl: steps, and a column of each metric."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clear()

    def clear(self) -> None:
        self.state: FileState | None = None
        self.offset = 0
        self.damaged = 0  # whole lines that are no row
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}  # shorter than steps where its end is missing

    def update(self) -> None:
        """Reads what was written since the last call. A file that was replaced is read anew."""
        state = FileState.of(self.path)
        if state == self.state:
            return
        if state is None or (self.state and not state.continues(self.state)):
            self.clear()
        if state is None:
            return
        for start, line in whole_lines(self.path, self.offset):
            self.offset = start + len(line)
            self.add(line)
        self.state = state

    def add(self, line: bytes) -> None:
        try:
            row = json.loads(line.strip(b"\0\n"))
            self.steps.append(int(row["step"]))  # it may be too large for 8 bytes
        except UNREADABLE:
            self.damaged += 1
            return
        place = len(self.steps) - 1
        for name, value in row.items():
            if name != "step" and isinstance(value, (int, float)):
                column = self.columns.setdefault(name, array("d"))
                column.extend([math.nan] * (place - len(column)))
                column.append(as_float(value))

    def series(self, names: list[str], most: int) -> dict[str, Any]:
        """Returns for each metric {"steps": [...], "values": [...]}, of at most some `most` points.

        Of a longer series each stretch has its lowest and its highest point, so that no peak is
        lost.
        """
        return {name: self.one(name, most) for name in names if name in self.columns}

    def one(self, name: str, most: int) -> Series:
        points = [
            (step, value)
            for step, value in zip(self.steps, self.columns[name], strict=False)
            if math.isfinite(value)
        ]
        points = thinned(points, most)
        return {"steps": [step for step, _ in points], "values": [short(v) for _, v in points]}


def as_float(value: float) -> float:
    """The value; nan for a whole number that is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.nan


def short(value: float) -> float | int:
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.6g}")


def thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    if len(points) <= most:
        return points
    width = -(-len(points) // (most // 2))
    kept: list[tuple[int, float]] = []
    for first in range(0, len(points), width):
        part = points[first : first + width]
        ends = {min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept
