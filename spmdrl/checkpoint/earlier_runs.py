"""Moves what stands in a run's folder beyond the step that is gone on from to earlier-N.

Nothing is lost and nothing is mixed. A run that begins anew sets aside all of an earlier run; one
that is resumed sets aside later checkpoints, samples and rows of metrics.jsonl, and the errors.
Every change is a rename, or a copy where a folder is a link to another file system. What decides
how much is moved is moved last: a process that is killed meanwhile leaves the rest to the next
start.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint import run_dir as run_lock
from spmdrl.distributed.progress import PROGRESS

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PREFIX = "earlier-"
REFERENCE = "reference"  # log-probabilities that are named by what they are of, and stay true
OF_A_STEP = r"(?:step|eval)_(\d+)[._].*"  # names of files in these folders


def set_aside(run_dir: Path, done: int, loaded: Path | None = None) -> Path | None:
    """Moves what an earlier run, or an earlier start of this one, left beyond step `done`.

    done 0: all of it. loaded: the checkpoint that is gone on from, which stays where it is. Returns
    the folder that it is in now; None: there was nothing to move.
    """
    if not run_dir.is_dir():
        return None
    metrics = Path(run_dir, METRICS)
    kept: list[bytes] = []
    dropped: list[bytes] = []
    if done == 0 and metrics.exists():
        stale = sorted(everything(run_dir, loaded), key=lambda path: path == metrics)
    else:
        stale = [*later_files(run_dir, done), *(p for p in [run_dir / "errors"] if p.exists())]
        kept, dropped = cut_rows(metrics, done)
        tell_gaps(metrics, kept, done)
    if not stale and not dropped:
        return None
    target = next_folder(run_dir)
    if dropped:
        checkpoint.write_synced(Path(target, METRICS), b"".join(dropped))
        replace_synced(metrics, b"".join(kept))
    for item in stale:
        moved = Path(target, item.relative_to(run_dir))
        if item.parent.name == "checkpoints":
            moved = Path(target, item.name)
        moved.parent.mkdir(exist_ok=True)
        shutil.move(item, moved)  # checkpoints may be on another file system
    PROGRESS.line(f"what an earlier run left in {run_dir} is now in {target}")
    return target


def everything(run_dir: Path, loaded: Path | None) -> Iterator[Path]:
    for path in sorted(run_dir.iterdir()):
        holds_loaded = loaded is not None and loaded.resolve().is_relative_to(path.resolve())
        stays = path.name in (run_lock.NAME, REFERENCE) or path.name.startswith(PREFIX)
        if not stays and not holds_loaded:
            yield path


def later_files(run_dir: Path, done: int) -> Iterator[Path]:
    """Checkpoints, samples and profiles of steps after `done`."""
    folders = ("samples", "kept_samples", "profile")
    yield from (path for step, path in checkpoint.steps_in(run_dir / "checkpoints") if step > done)
    for path in sorted(path for name in folders for path in run_dir.glob(f"{name}/*")):
        found = re.fullmatch(OF_A_STEP, path.name)
        if found and int(found[1]) > done:
            yield path


def next_folder(run_dir: Path) -> Path:
    """A new folder earlier-N, whose number is above those of all others."""
    names = (re.fullmatch(rf"{PREFIX}(\d+)", path.name) for path in run_dir.iterdir())
    target = Path(run_dir, f"{PREFIX}{1 + max((int(m[1]) for m in names if m), default=0)}")
    target.mkdir()
    return target


# ---- metrics.jsonl


def cut_rows(path: Path, done: int) -> tuple[list[bytes], list[bytes]]:
    """(lines of steps up to `done`, all others), each with its line break.

    A line that is no row of metrics is among the others; of one in the middle a warning tells: the
    last may be torn where a process was killed.
    """
    kept: list[bytes] = []
    dropped: list[bytes] = []
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        step = step_of(line)
        if step is None and number < len(lines):
            logger.warning(
                "%s, line %d is no row of metrics and is left out of the history: %.60r",
                *(path, number, line),
            )
        row = line.strip(b"\0") + b"\n" if step is not None else line + b"\n"
        (kept if step is not None and step <= done else dropped).append(row)
    return kept, dropped


def tell_gaps(path: Path, kept: list[bytes], done: int) -> None:
    """Tells of steps up to `done` whose rows the file has lost; from the first that it has a row
    of.
    """
    steps = {step for step in map(step_of, kept) if step is not None}
    lost = [step for step in range(min(steps, default=1), done + 1) if step not in steps]
    if lost and path.exists():
        logger.warning(
            "%s lacks %d of the rows up to step %d; the first is that of step %d",
            *(path, len(lost), done, lost[0]),
        )


def step_of(line: bytes) -> int | None:
    """The step of a row; None for what is no row. A crash of the host may leave NULs around it."""
    try:
        step = json.loads(line.strip(b"\0"))["step"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return step if isinstance(step, int) else None


def replace_synced(path: Path, content: bytes) -> None:
    """Written aside and renamed: a process that is killed leaves the old content or the new."""
    aside = path.with_name(path.name + ".tmp")
    checkpoint.write_synced(aside, content)
    os.replace(aside, path)
    checkpoint.fsync(path.parent)
