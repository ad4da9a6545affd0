"""Knows where each sample of a run stands on the disk, without keeping the samples.

A file of samples/ is read once, line by line. Of each line its offset, its prompt's id, its reward
and how it ended are kept, some 30 bytes. What is shown is then read from there.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from spmdrl.view.line_files import FileState, whole_lines
from spmdrl.view.sample_rows import UNREADABLE, Row, row_of

FILE = re.compile(r"(?:(step|eval)_)?(\d+)\.jsonl")
ANSWERS = "answers"  # the kind of a file that spmdrl.evaluate wrote: its name is a number
HEAD = re.compile(rb'\{"prompt_id": (-?\d+), ')
KEY = b', "reward": '  # in a text the quotation marks would be escaped
VERDICT = re.compile(
    rb', "reward": (null|-?[\d.eE+-]+), "invalid": (null|"(?:[^"\\]|\\.)*"), '
    rb'"finish_reason": "([^"]*)"'
)
FILTERS = ("all", "right", "wrong", "cut", "invalid")
CACHED_FILES = 64  # of what the actor said of samples


Key = tuple[str, str, str]  # prompt id, group, sample


class RowInfo(NamedTuple):
    """A line of samples/ as the index keeps it."""

    offset: int
    prompt_id: int
    reward: float  # nan: none
    invalid: bool
    cut: bool

    def passes(self, wanted: str, above: float) -> bool:
        """wanted: one of FILTERS. An answer is right where its reward is above `above`."""
        if wanted == "all":
            return True
        if wanted == "invalid":
            return self.invalid
        if wanted == "cut":
            return self.cut
        if math.isnan(self.reward):
            return False
        return (self.reward > above) == (wanted == "right")


class FileIndex:
    """The lines of one file."""

    def __init__(self, path: str, state: FileState) -> None:
        self.path, self.state = path, state
        self.offsets, self.prompt_ids, self.rewards = array("q"), array("q"), array("d")
        self.flags = bytearray()  # 1: invalid, 2: cut
        self.damaged = 0
        for offset, line in whole_lines(path):
            try:
                prompt_id, reward, invalid, cut = verdict_of(line)
                self.prompt_ids.append(prompt_id)  # first: it may be too large for 8 bytes
            except (*UNREADABLE, AttributeError):
                self.damaged += 1
                continue
            self.rewards.append(reward)
            self.offsets.append(offset)
            self.flags.append(invalid + 2 * cut)

    def __len__(self) -> int:
        return len(self.offsets)

    def info(self, place: int) -> RowInfo:
        flags = self.flags[place]
        return RowInfo(
            self.offsets[place], self.prompt_ids[place], self.rewards[place], bool(flags & 1),
            bool(flags & 2),
        )  # fmt: skip

    def infos(self) -> Iterator[RowInfo]:
        return map(self.info, range(len(self)))

    def lines(self, infos: list[RowInfo]) -> Iterator[tuple[RowInfo, bytes]]:
        with open(self.path, "rb") as file:
            for info in infos:
                file.seek(info.offset)
                yield info, file.readline()


def verdict_of(line: bytes) -> tuple[int, float, bool, bool]:
    """Returns (prompt id, reward, whether invalid, whether cut) of a line.

    Reads few bytes of a line as the run writes it, and all of one that is otherwise.
    """
    head, key = HEAD.match(line), line.find(KEY)
    found = VERDICT.match(line, key) if key >= 0 else None
    if head and found:
        reward = math.nan if found[1] == b"null" else float(found[1])
        return int(head[1]), reward, found[2] != b"null", found[3] == b"length"
    row = json.loads(line)
    given = row.get("reward")
    reward = math.nan if given is None else float(given)
    cut = row.get("finish_reason") == "length"
    return int(row.get("prompt_id", -1)), reward, row.get("invalid") is not None, cut


class SampleFiles:
    """samples/ of one run."""

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir / "samples"
        self.found: dict[str, dict[int, str]] = {}  # kind -> step -> path, steps ascending
        self.indices: dict[str, FileIndex] = {}  # by path
        self.seen: FileState | None = None

    def update(self) -> None:
        """Looks which files there are; a name costs little, so all of them are looked at."""
        state = FileState.of(self.folder)
        if state == self.seen:
            return
        found: dict[str, dict[int, str]] = {}
        if state is not None:
            for entry in os.scandir(self.folder):
                match = FILE.fullmatch(entry.name)
                if match:
                    found.setdefault(match[1] or ANSWERS, {})[int(match[2])] = entry.path
        self.found = {kind: dict(sorted(files.items())) for kind, files in sorted(found.items())}
        self.seen = state

    def steps(self, kind: str) -> list[int]:
        return list(self.found.get(kind, ()))

    def index(self, kind: str, step: int) -> FileIndex | None:
        """Returns the index of a file, made anew where the file has changed; None without it."""
        path = self.found.get(kind, {}).get(step)
        state = None if path is None else FileState.of(path)
        if path is None or state is None:
            return None
        index = self.indices.get(path)
        if index is None or index.state != state:
            index = self.indices[path] = FileIndex(path, state)
        return index

    def rows(self, index: FileIndex, infos: list[RowInfo], step: int) -> list[Row]:
        """Reads samples, with what the actor's ranks said of them later.

        A line that turns out to be damaged is left out.
        """
        trained, _ = self.trained(index.path)
        read = (row_of(line) for _, line in index.lines(infos))
        return [
            {**row, **trained.get(key_of(row), {}), "step": step} for row in read if row is not None
        ]

    def trained(self, path: str) -> tuple[dict[Key, Row], int]:
        """Returns what the actor said of the samples of a file, and how many lines are damaged."""
        path = path.removesuffix(".jsonl") + "_trained.jsonl"
        state = FileState.of(path)
        return ({}, 0) if state is None else read_trained(path, state)

    def image(self, name: str) -> Path | None:
        """Returns an image's file; None for what is no name of one, or is not there."""
        path = self.folder / "images" / name
        return (
            path if re.fullmatch(r"[0-9a-f]{32}(\.[a-z0-9]+)?", name) and path.is_file() else None
        )


@lru_cache(maxsize=CACHED_FILES)
def read_trained(path: str, state: FileState) -> tuple[dict[Key, Row], int]:
    """Reads a file step_N_trained.jsonl; also counts its damaged lines. state: for the cache."""
    read = [row_of(line) for _, line in whole_lines(path)]
    rows = {key_of(row): row for row in read if row is not None}
    return rows, read.count(None)


def key_of(row: Row) -> Key:
    """Returns the fields that tell a sample of a file from the others, as text: they may be of any
    type.
    """
    return str(row.get("prompt_id")), str(row.get("group")), str(row.get("sample"))
