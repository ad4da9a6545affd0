"""Room and rights to write: checked before anything expensive starts, and named where they fail."""

from __future__ import annotations

import errno
import locale
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError, require
from spmdrl.distributed.collectives import broadcast_object
from spmdrl.distributed.topology import Topology

MIB = 1 << 20
PROBE_BYTES = MIB
WRITTEN_IN = ("samples", "checkpoints", "errors", "trace", "profile")  # folders of a run's folder
SHARED_MEMORY = Path("/dev/shm")
SHARED_S = 10.0  # in which a file that one host has made is seen by the others
UNKNOWN_BYTES = 1 << 62  # of file systems that do not say how large they are


def check_encodable(paths: dict[str, Any]) -> None:
    """paths: from config. Raises ConfigError where the process's locale cannot name one."""
    for field, path in paths.items():
        try:
            os.fsencode(str(path))
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{field}={str(path)!a}: the locale of this process encodes paths as "
                f"{error.encoding}, which lacks a letter of it: set PYTHONUTF8=1 in the "
                "environment, or a locale such as LC_ALL=C.UTF-8; this one is "
                f"{locale.setlocale(locale.LC_CTYPE)!r}"
            ) from error


def check_room(run_dir: Path, shared_bytes: int = 0) -> None:
    """Writes a file of PROBE_BYTES where a run will write, and removes it.

    shared_bytes: what the ranks of this host need of /dev/shm. Raises ConfigError with the folder
    and the MiB that are free there.
    """
    probe(nearest(run_dir, "run_dir"), f"run_dir={str(run_dir)!r}")
    for name in WRITTEN_IN:
        if Path(run_dir, name).is_dir():
            probe(Path(run_dir, name), f"run_dir={str(run_dir)!r}")
    probe(temporary_folder(), "TMPDIR")
    if shared_bytes and free_bytes(SHARED_MEMORY) < shared_bytes:
        raise ConfigError(
            f"{SHARED_MEMORY} has {mib(free_bytes(SHARED_MEMORY))} MiB free; the tensor-parallel "
            f"ranks of vLLM on this host need {mib(shared_bytes)} MiB there: make it larger "
            "(docker run --shm-size, mount -o remount,size=...), remove what others have left "
            "in it, or lower rollout.tensor_parallel"
        )


def check_shared(run_dir: Path, topology: Topology, here: bool) -> None:
    """Has rank 0 make a file, for which others look. Raises ConfigError on a rank that does not
    find it: all hosts write a checkpoint into one folder. Collective over the job.

    here: this rank looks; the first of each host is enough.
    """
    name = broadcast_object(f".spmdrl_shared_{secrets.token_hex(8)}", topology.control)
    file = nearest(run_dir, "run_dir") / name
    if topology.rank == 0:
        file.touch()
    topology.lowest(0)  # it is there
    found = not here or appears(file)
    topology.lowest(0)  # all have looked
    if topology.rank == 0:
        file.unlink()
    require(
        found,
        f"run_dir={str(run_dir)!r} is another folder on host {topology.host} than on that of rank "
        "0, and all hosts write a checkpoint into one: name one on a file system that they share, "
        "or save none with --checkpoint.every_steps 0",
    )


def appears(file: Path) -> bool:
    """Whether the file is there within SHARED_S: a network's file system may be late."""
    deadline = time.monotonic() + SHARED_S
    while not file.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def check_room_for_checkpoint(run_dir: Path, least_bytes: int) -> None:
    """Raises ConfigError where not even one would fit."""
    root = Path(run_dir, "checkpoints")
    free = free_bytes(root) + bytes_left_over(root)
    if free < least_bytes:
        raise ConfigError(
            f"run_dir={str(run_dir)!r} has {mib(free)} MiB free, and a checkpoint takes at least "
            f"{mib(least_bytes)} MiB: make room, give another run_dir, or save none with "
            "--checkpoint.every_steps 0"
        )


def bytes_left_over(root: Path) -> int:
    """Counts the bytes that a run that was killed while it saved has left, which the next start
    removes.
    """
    return sum(bytes_in(f) for kind in ("tmp", "trash") for f in root.glob(f"step_*.{kind}"))


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def temporary_folder() -> Path:
    """TMPDIR, as what is not Python reads it too. Raises ConfigError where there is none."""
    try:
        return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(f"TMPDIR: {error.strerror}: set it to one that can be written") from error


def nearest(folder: Path, field: str) -> Path:
    """The folder, or of those above it the first that is there. Raises ConfigError for a file."""
    with suppress(PermissionError):  # the probe will tell
        while not folder.exists() and folder != folder.parent:
            if folder.is_symlink():
                raise ConfigError(f"{field}: {folder} is a link to nothing")
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(f"{field}: {folder} is a file, and is to be a folder")
    return folder


def probe(folder: Path, field: str) -> None:
    """Under a name of its own: hosts share folders, and processes on two hosts may share a pid."""
    try:
        with tempfile.NamedTemporaryFile(prefix=".spmdrl_probe_", dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
    except OSError as error:
        remedy = "give one with more room" if is_full(error) else "give one that can be written"
        raise ConfigError(
            f"{field}: {folder} cannot be written: {error.strerror}; {mib_free(folder)} MiB are "
            f"free: {remedy}"
        ) from error


def is_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """An OSError of the body says in its text which file it is of, and how much room there is."""
    try:
        yield
    except OSError as error:
        path = Path(os.fsdecode(error.filename)) if error.filename else path
        why = error.strerror or str(error)
        gone = "" if path.parent.is_dir() else f"; the folder {path.parent} is gone"
        raise OSError(
            error.errno, f"cannot write {path}, where {mib_free(path)} MiB are free: {why}{gone}"
        ) from error


def free_bytes(path: Path) -> int:
    """Returns the free bytes for this user on the file system of the path, or of the one above."""
    for folder in (path, *path.absolute().parents):
        with suppress(OSError):
            usage = shutil.disk_usage(folder)
            return usage.free if usage.total else UNKNOWN_BYTES
    return 0


def mib(count: int) -> str:
    return f"{count / MIB:.1f}" if count < 10 * MIB else f"{count // MIB:,}"


def mib_free(path: Path) -> str:
    return mib(free_bytes(path))
