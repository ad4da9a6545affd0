"""The rows of docs/metrics.md and docs/metrics_run.md, and which metrics have none."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = (DOCS / "metrics.md", DOCS / "metrics_run.md")
OF_SOURCES = "` *"  # behind the name of a metric that is there for each data source, too


def metric_rows() -> list[list[str]]:
    """The cells of every row: name, unit, meaning, when the metric is there, a healthy value."""
    rows = [line.strip("|").split("|") for line in table_lines()]
    return [[row[0].split("`")[1], *(cell.strip() for cell in row[1:])] for row in rows]


def table_lines() -> list[str]:
    found, inside = [], False
    for line in "\n".join(page.read_text() for page in PAGES).splitlines():
        inside = line.startswith("| metric | unit |") or (inside and line.startswith("|"))
        if inside and line.startswith("| `"):
            found.append(line)
    return found


@cache
def pattern() -> re.Pattern[str]:
    """Matches the names of all metrics that have a row."""
    names = []
    for line in table_lines():
        name = re.sub(r"<\\?\w+>", ".+", re.escape(line.split("`")[1]))
        names.append(name.replace("eval/", "eval/(.+/)?") if OF_SOURCES in line else name)
    return re.compile("|".join(names))


def without_a_row(names: Iterable[str]) -> set[str]:
    """Those of the names with a slash that no row is about."""
    return {name for name in names if "/" in name and not pattern().fullmatch(name)}
