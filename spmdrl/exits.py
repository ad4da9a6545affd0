"""How a program of ours ends. Imports no torch: a wrong key should cost a fraction of a second."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

FAILED = 1  # a restart may cure it
BAD_CONFIG = 2  # it will not
INTERRUPTED = 130
REQUEUE = 75  # stopped by a signal, in order: start it again (sysexits.h: EX_TEMPFAIL)


def leave(code: int) -> NoReturn:
    """Ends the process now: engines and gloo threads may be in any state."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
        Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}))
