"""Ends a program of ours, with its exit code and a report of what failed. Imports no torch: a wrong
key should cost a fraction of a second.
"""

from __future__ import annotations

import json
import os
import posix
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from spmdrl.distributed.progress import PROGRESS

FAILED = 1  # a restart may cure it
BAD_CONFIG = 2  # it will not
INTERRUPTED = 130
REQUEUE = 75  # stopped by a signal, in order: start it again (sysexits.h: EX_TEMPFAIL)


# what writing a file or a stream may raise: ValueError for a closed one, and for a name or a text
# that its encoding lacks
UNWRITABLE = (OSError, ValueError)


# folders of code that is not the user's
INSTALLED = tuple(
    f"{folder}{os.sep}"
    for folder in (
        Path(__file__).parents[1],
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
REPORT_S = 10.0  # for the other ranks to hear why one ends early


def say_alone(cause: str, stack: str) -> None:
    """Reports a failure of this process where there are no other ranks to tell."""
    say(f"{stack}spmdrl: {cause}")


class ExitGuard:
    """Keeps exit code 0 for a run whose ranks have all done all their steps.

    Functions of users run inside a rank (losses, estimators, the config file), and a library may
    call os._exit(0) in one of them. torchrun takes a rank that ended with 0 for one that is done.
    """

    def __init__(self) -> None:
        self.leave_now = os._exit
        self.report_failure: Callable[[str, str], None] = say_alone

    def install(self) -> None:
        """Takes over the process's exit, for programs. Forks of this process, which are not ranks,
        exit as they like.
        """
        rank = os.getpid()

        def exit_unless_early(status: int) -> NoReturn:
            if os.getpid() != rank or status & 0xFF:  # what the kernel keeps of it
                self.leave_now(status)
            self.end_early(status)

        for module in (os, posix):
            vars(module)["_exit"] = exit_unless_early

    def end_early(self, status: int) -> NoReturn:
        stack = "".join(traceback.format_stack(sys._getframe(2)))
        cause = (
            f"os._exit({status}) was called before the run had ended, by a function that runs in "
            f"the rank; the exit code is {FAILED} in its place"
        )
        reporter = threading.Thread(target=self.report_failure, args=(cause, stack), daemon=True)
        reporter.start()
        reporter.join(REPORT_S)  # a store that does not answer is not waited for
        leave_for_torchrun(cause)
        self.leave_now(FAILED)

    def all_done(self) -> None:
        """Every rank has done all its steps: from now on code 0 is true."""
        for module in (os, posix):
            vars(module)["_exit"] = self.leave_now


GUARD = ExitGuard()


def leave(code: int) -> NoReturn:
    """Ends the process now: engines and gloo threads may be in any state."""
    PROGRESS.stop()
    with suppress(*UNWRITABLE):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """Prints to the terminal, if there still is one."""
    PROGRESS.clear()
    with suppress(*UNWRITABLE):
        print(text, file=sys.stderr, flush=True)


def exit_config(error: Exception) -> NoReturn:
    """Rank 0 says it once. Another rank speaks only if rank 0 has not ended the run by then."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(5)
    where = "" if rank == 0 else f" (on rank {rank}, {socket.gethostname()})"
    leave_for_torchrun(f"config error: {error}")
    say(f"\nspmdrl: config error{where}: {error}")
    leave(BAD_CONFIG)


def leave_for_torchrun(text: str) -> None:
    """torchrun prints this file's message in its closing summary, in place of a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        told = json.dumps({"message": {"message": text, "extraInfo": extra}})
        try:
            Path(path).write_text(told)
        except UNWRITABLE:  # over half a file torchrun ends with a traceback
            with suppress(*UNWRITABLE):
                if Path(path).is_file():
                    Path(path).unlink()


def write_failure(failure: dict[str, Any], folder: Path) -> None:
    """A failure into folder/rank_R.json. failure: the fields of phases.FailureReport."""
    if failure["exit_code"] != FAILED:
        return
    with suppress(*UNWRITABLE):  # the disk may be what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        told = {**failure, "last_checkpoint": last_checkpoint(folder.parent)}
        path = Path(folder, f"rank_{failure['rank']}.json")
        if path.exists() and not is_of_this_start(path):
            path.rename(path.with_suffix(f".{path.stat().st_mtime_ns}.json"))
        path.write_text(json.dumps(told, indent=1))


def is_of_this_start(path: Path) -> bool:
    """Whether the file was written since this process began. A start that fails before it takes the
    run's folder finds there what an earlier one left."""
    import psutil  # not at the top: reward workers stay small

    return path.stat().st_mtime >= psutil.Process().create_time()


def format_failure(failure: dict[str, Any], folder: Path) -> str:
    """The failure as it is printed; torchrun gets it as well."""
    if failure["exit_code"] == BAD_CONFIG:
        text = "config error: {cause}".format(**failure)
        leave_for_torchrun(text)
        return f"\nspmdrl: {text}"
    failed = failure["exit_code"] == FAILED
    text = "rank {rank} on {host} {what} in phase '{phase}': {cause}".format(
        **failure, what="failed" if failed else "was stopped"
    )
    text += f"; last checkpoint: {last_checkpoint(folder.parent) or 'none'}"
    leave_for_torchrun(text)
    if not failed:
        return f"\nspmdrl: {text}"
    return f"\nspmdrl: {text}\nspmdrl: {where_details_are(failure, folder)}"


def where_details_are(failure: dict[str, Any], folder: Path) -> str:
    """The file that holds the traceback, or, where it could not be written, the traceback."""
    path, details = Path(folder, "rank_{rank}.json".format(**failure)), failure["details"].rstrip()
    with suppress(*UNWRITABLE):
        if json.loads(path.read_text())["cause"] == failure["cause"]:  # else it is an earlier run's
            return f"details in {path}{own_place(details)}"
    return f"{path} could not be written" + (f"; details:\n{details}" if details else "")


def own_place(details: str) -> str:
    """Names the last line of a traceback that is the user's: of a loss, a tracker, a template of a
    judge in the config file, say. "" where there is none.
    """
    frames = re.findall(r'^  File "([^<"]+)", line (\d+), in (.+)$', details, re.MULTILINE)
    for file, line, name in reversed(frames):
        if not file.startswith(INSTALLED) and "spmdrl_kernels" not in file:
            return f"; it was raised in {os.path.relpath(file)}, line {line}, in {name}"
    return ""


def last_checkpoint(run_dir: Path) -> str | None:
    """Returns the newest checkpoint by its name: what is wrong may be the disk, and to read a whole
    one takes too long.
    """
    with suppress(*UNWRITABLE):
        found = sorted(run_dir.glob("checkpoints/step_????????"))
        return str(found[-1]) if found else None
    return None
