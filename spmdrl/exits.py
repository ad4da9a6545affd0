"""How a program of ours ends. Imports no torch: a wrong key should cost a fraction of a second."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

FAILED = 1  # a restart may cure it
BAD_CONFIG = 2  # it will not
INTERRUPTED = 130
REQUEUE = 75  # stopped by a signal, in order: start it again (sysexits.h: EX_TEMPFAIL)


def leave(code: int) -> NoReturn:
    """Ends the process now: engines and gloo threads may be in any state."""
    with suppress(OSError):  # nobody may be reading any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def say(text: str) -> None:
    """To the terminal, if there still is one."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def exit_config(error: Exception) -> NoReturn:
    """Rank 0 says it once. Another rank speaks only if rank 0 has not ended the run by then."""
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0:
        time.sleep(5)
    where = "" if rank == 0 else f" (on rank {rank}, {socket.gethostname()})"
    leave_for_torchrun(f"config error: {error}")
    print(f"\nspmdrl: config error{where}: {error}", file=sys.stderr, flush=True)
    leave(BAD_CONFIG)


def leave_for_torchrun(text: str) -> None:
    """torchrun prints this file's message in its closing summary, in place of a traceback."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))


def write_story(story: dict[str, Any], folder: Path) -> None:
    """A failure into folder/rank_R.json. story: the fields of phases.Story."""
    if story["exit_code"] != FAILED:
        return
    with suppress(OSError):  # the disk may be what is wrong
        folder.mkdir(parents=True, exist_ok=True)
        told = {**story, "last_checkpoint": last_checkpoint(folder.parent)}
        Path(folder, f"rank_{story['rank']}.json").write_text(json.dumps(told, indent=1))


def leave_word(story: dict[str, Any], folder: Path) -> str:
    """The story as it is printed; torchrun gets it as well."""
    if story["exit_code"] == BAD_CONFIG:
        text = "config error: {cause}".format(**story)
        leave_for_torchrun(text)
        return f"\nspmdrl: {text}"
    failed = story["exit_code"] == FAILED
    text = "rank {rank} on {host} {what} in phase '{phase}': {cause}".format(
        **story, what="failed" if failed else "was stopped"
    )
    text += f"; last checkpoint: {last_checkpoint(folder.parent) or 'none'}"
    leave_for_torchrun(text)
    if not failed:
        return f"\nspmdrl: {text}"
    where = Path(folder, "rank_{rank}.json".format(**story))
    return f"\nspmdrl: {text}\nspmdrl: details in {where}"


def last_checkpoint(run_dir: Path) -> str | None:
    """By name: what is wrong may be the disk, and to read a whole one takes too long."""
    with suppress(OSError):
        found = sorted(run_dir.glob("checkpoints/step_????????"))
        return str(found[-1]) if found else None
    return None
