"""One run at a time in a folder: two would write each other's checkpoints and metrics."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl.checkpoint.disk_space import writing
from spmdrl.cli.arguments import as_source
from spmdrl.config import ConfigError
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import Topology

logger = logging.getLogger(__name__)

NAME = "lock"
PATIENCE_S = 5.0  # for a process that is just ending
# for one of a host that is lost: its file server frees what it had when its lease has run out,
# which NFS version 4 gives for 90 s by default
LEASE_S = 180.0


def lock_run_dir(run_dir: Path, topology: Topology, again: bool = False) -> int | None:
    """Rank 0 takes run_dir/lock until its process ends, however it ends. Collective.

    again: the ranks were started before in this job, so the rank 0 before this one may have had the
    lock on a host that is lost. It is waited for longer.

    Returns its file descriptor on rank 0, to be kept. Raises ConfigError on every rank where
    another process has it. A POSIX record lock: no child inherits it, and it spans hosts where the
    file system does that.
    """
    fd, problem = None, None
    if topology.rank == 0:
        fd, problem = take(run_dir, LEASE_S if again else PATIENCE_S)
    told: list[Any] = [problem]
    dist.broadcast_object_list(told, group=topology.control, group_src=0)
    if told[0]:
        raise ConfigError(told[0])
    return fd


def take(run_dir: Path, patience_s: float) -> tuple[int | None, str | None]:
    """(file descriptor, what is wrong). patience_s: how long another process is waited for."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fd = os.open(Path(run_dir, NAME), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        return (
            None,
            f"run_dir={str(run_dir)!r}: cannot make {Path(run_dir, NAME)}: {error.strerror}",
        )
    begin, told = time.monotonic(), False
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s cannot be locked (%s): start no other run there", run_dir, error)
                return fd, None
            waited_s = time.monotonic() - begin
            holder = os.pread(fd, 200, 0).decode(errors="replace").strip() or "another process"
            if waited_s > patience_s:
                return None, (
                    f"run_dir={str(run_dir)!r} is in use by {holder}: wait for that run, stop it, "
                    "or give this one a run_dir of its own"
                )
            if waited_s > PATIENCE_S and not told:
                told = True
                PROGRESS.line(
                    f"spmdrl: waiting up to {patience_s:.0f} s for {run_dir}, which {holder} has "
                    "locked: on a host that is lost the lock ends with the file server's lease"
                )
        time.sleep(0.2)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return fd, None


def write_config(config: Any, run_dir: Path) -> None:
    """run_dir/config.py: every field as it was resolved."""
    path = Path(run_dir, "config.py")
    text = (
        "# The config of this run as resolved, every field written out. Functions stand by name:\n"
        f"# take their source from the file that was given.\nconfig = {as_source(config)}\n"
    )
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
