"""A command with a time limit, of which no process is left: neither ranks, which torchrun starts in
sessions of their own, nor what they started and left. Linux; nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # prctl.h
SHOW_STACKS_S = 10.0  # at most, between SIGABRT, at which Python prints its stacks, and SIGKILL
EACH_S = 2.0  # at most, for one process to print its stacks
GONE_WITHIN_S = 20.0


def adopt_orphans() -> None:
    """Makes this process the parent of whatever below it loses its own. Cores are not written."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run_limited(command: list[str], env: dict[str, str], log: Path, limit_s: float) -> int | None:
    """Returns the exit code, or None over the limit; `log` then ends with the stacks of all Python
    processes. Every process below this one is ended, so one command runs at a time.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command, env=env | {"PYTHONFAULTHANDLER": "1"}, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        show_stacks()
        return None
    finally:
        end_all()
        process.poll()


def end_all() -> None:
    """Kills all processes below this one. Raises RuntimeError where one does not go."""
    end = time.monotonic() + GONE_WITHIN_S
    while left := send(signal.SIGKILL):
        wait_for_ends(0.05)
        if time.monotonic() > end:
            raise RuntimeError(
                f"processes {left} did not end within {GONE_WITHIN_S:.0f} s of SIGKILL"
            )


def show_stacks() -> None:
    """Aborts the processes below this one, one after the other: stacks that several of them print
    at once are mixed in the log.
    """
    end = time.monotonic() + SHOW_STACKS_S
    for pid in descendants(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
        wait_for_ends(min(EACH_S, max(end - time.monotonic(), 0.0)), pid)


def wait_for_ends(limit_s: float, wanted: int | None = None) -> None:
    """Returns when no process is below this one, or not the wanted one, or after `limit_s`
    seconds.
    """
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        below = descendants(os.getpid())
        if not below or (wanted is not None and wanted not in below):
            return
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def send(number: int) -> list[int]:
    """Signals every process below this one and returns them; zombies of children are among them."""
    below = descendants(os.getpid())
    for pid in below:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return below


def descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            pid, rest = stat.read_text().split(" ", 1)
            children.setdefault(int(rest.rpartition(")")[2].split()[1]), []).append(int(pid))
    found: list[int] = []
    reached = [root]
    while reached:
        reached = [child for parent in reached for child in children.get(parent, [])]
        found += reached
    return found
