"""The start of a program on every rank, before torch is imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from spmdrl.config import ConfigError
from spmdrl.distributed.env import before_torch
from spmdrl.distributed.exit import GUARD, exit_config
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import LIBRARIES, PROGRESS


@contextmanager
def reading(config: str) -> Iterator[None]:
    """Guards the process and its output from here on; meanwhile the arguments are read. A
    ConfigError ends the program with its message. config: the file that is read, for the display.

    It imports no torch: a wrong argument costs a fraction of a second, and torch takes seconds.
    Behind it torch can be imported.
    """
    GUARD.install()
    keep_output()
    PROGRESS.start(f"reading {config}")
    try:
        yield
    except ConfigError as error:
        exit_config(error)
    PROGRESS.now(LIBRARIES)
    before_torch()
