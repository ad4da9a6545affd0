"""The folders in which samples of terminal tasks work: made of a task, and found again by its
tests.

Who scores a sample is another process than the one that ran its commands. So a folder is published
under a digest of what it has become: the task, the sample and its commands. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from spmdrl.environments.terminal import (
    HOME,
    Mount,
    ShellResult,
    is_another_user,
    own_by_sandbox,
    run_shell,
)
from spmdrl.rewards.sandbox.sandbox import Limits

PARTS = ("work", "tmp", "home", "logs/verifier", "logs/agent", "home_of_tests")
KEPT_S = 6 * 3600.0  # after which a folder that nobody claimed is removed
JOB = ("MASTER_ADDR", "MASTER_PORT")  # of torch.distributed: tell jobs of a host apart


class TaskFolder:
    """A sample's folder: its work, /tmp and home."""

    def __init__(self, place: Path, about: dict[str, Any]) -> None:
        """about: a row's extra_info."""
        self.place, self.about = place, about
        self.published: Path | None = None

    @classmethod
    def made(cls, about: dict[str, Any]) -> TaskFolder:
        """Returns a new one with the task's files. Raises ValueError for a row without a task."""
        if "task" not in about:
            raise ValueError("this question has no terminal")
        place = Path(tempfile.mkdtemp(dir=all_folders() / "folders"))
        place.chmod(0o711)
        for name in PARTS:
            (place / name).mkdir(parents=True)
        for source, target in about["copies"]:
            copy(Path(about["task"], source), place / "work", target)
        own_by_sandbox(place)
        return cls(place, about)

    def is_there(self) -> bool:
        return self.place.is_dir()

    def mounts(self, for_tests: bool = False) -> list[Mount]:
        """for_tests: with /logs, and with an empty home."""
        places = [("work", self.about["workdir"]), ("tmp", "/tmp")]
        places += [("logs", "/logs"), ("home_of_tests", HOME)] if for_tests else [("home", HOME)]
        return [(str(self.place / name), there) for name, there in places]

    def run(self, command: str, limits: Limits) -> ShellResult:
        return run_shell(command, self.mounts(), self.about["workdir"], limits)

    def publish(self, sample_index: int, calls: Sequence[str]) -> None:
        """Says where it is, for `claimed`."""
        pointer = all_folders() / "states" / digest_of(self.about, sample_index, calls)
        draft = pointer.with_suffix(f".{os.getpid()}")
        draft.write_text(str(self.place))
        draft.rename(pointer)
        if self.published is not None:
            self.published.unlink(missing_ok=True)
        self.published = pointer
        os.utime(self.place)

    def verdict(self, names: Sequence[str], most: int) -> tuple[str, str] | None:
        """(name, text) of the first of these files that is in logs/verifier, "" for the text of one
        that is too large."""
        for name in names:
            path = self.place / "logs" / "verifier" / name
            if path.is_file() and not path.is_symlink() and not path.parent.is_symlink():
                with path.open("rb") as file:
                    data = file.read(most + 1)
                return name, data.decode(errors="replace") if len(data) <= most else ""
        return None

    def remove(self) -> None:
        remove_tree(self.place)


def remove_tree(place: Path) -> None:
    """Removes a folder, also where commands have taken away the right to change what is in it."""
    for above, names, _ in os.walk(place):
        for name in names:
            if not os.path.islink(path := os.path.join(above, name)):
                with suppress(OSError):  # another process removes it
                    os.chmod(path, 0o700)
    shutil.rmtree(place, ignore_errors=True)


def readable_copy(source: Path, into: Path) -> Path:
    """Returns a copy of files that every user can read; the files themselves where the sandbox runs
    as their user: those of a task may be root's alone."""
    if not is_another_user():
        return source
    copied = into / source.name
    if source.is_dir():
        shutil.copytree(source, copied, symlinks=True, dirs_exist_ok=True)
    else:
        shutil.copy2(source, copied)
    for path in (copied, *copied.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode | (0o755 if path.is_dir() else 0o444))
    return copied


def copy(source: Path, work: Path, target: str) -> None:
    """Copies as COPY of a Dockerfile does: of a folder what is in it. target: below work."""
    into = work / target
    if source.is_dir():
        shutil.copytree(source, into, symlinks=True, dirs_exist_ok=True)
        return
    into = into / source.name if target.endswith("/") or into.is_dir() else into
    into.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, into, follow_symlinks=False)


def claimed(about: dict[str, Any], sample_index: int, calls: Sequence[str]) -> TaskFolder | None:
    """Returns the folder in which a sample made these calls, which is then the caller's; None where
    it is not on this host."""
    pointer = all_folders() / "states" / digest_of(about, sample_index, calls)
    mine = pointer.with_suffix(f".claimed{os.getpid()}")
    try:
        pointer.rename(mine)
    except FileNotFoundError:
        return None
    folder = TaskFolder(Path(mine.read_text()), about)
    mine.unlink()
    return folder if folder.is_there() else None


def digest_of(about: dict[str, Any], sample_index: int, calls: Sequence[str]) -> str:
    job = [os.environ.get(name) for name in JOB]
    told = json.dumps([job, about, sample_index, list(calls)], sort_keys=True)
    return hashlib.sha256(told.encode(errors="surrogatepass")).hexdigest()


@functools.cache
def all_folders() -> Path:
    """Returns the place of all folders of this user, without those that nobody claimed for hours.

    Raises PermissionError where it is somebody else's.
    """
    place = Path(tempfile.gettempdir(), f"spmdrl-terminals-{os.geteuid()}")
    place.mkdir(mode=0o711, exist_ok=True)
    if place.is_symlink() or place.stat().st_uid != os.geteuid():
        raise PermissionError(f"{place} is somebody else's; set TMPDIR")
    for name in ("folders", "states"):
        (place / name).mkdir(mode=0o711, exist_ok=True)
    oldest = time.time() - KEPT_S
    for path in (*(place / "states").iterdir(), *(place / "folders").iterdir()):
        with suppress(FileNotFoundError):  # another process removes it
            if path.lstat().st_mtime < oldest:
                remove_tree(path) if path.is_dir() else path.unlink()
    return place
