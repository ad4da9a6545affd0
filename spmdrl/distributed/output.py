"""Standard streams that do not end a run: a closed pipe, a full disk, a locale without a letter.

    python -m spmdrl.launch ... | head      spmdrl.launch ... > /a/full/disk      ... >&-

What cannot be written is lost, and the run goes on: metrics, samples and checkpoints are files of
their own. For programs; a library must not touch the process's streams.
"""

from __future__ import annotations

import io
import os
import select
import sys
from contextlib import suppress
from typing import Any, TextIO

STREAMS = {"stdout": 1, "stderr": 2}
KEPT: list[Any] = []  # the streams replaced: with its last reference one would close its number


class Patient(io.FileIO):
    """A file descriptor for writing; a write never raises OSError, and is whole or lost."""

    lost = 0  # writes so far, of this stream

    def write(self, data: Any) -> int:
        rest = memoryview(data).cast("B")
        total = len(rest)
        with suppress(ValueError):  # closed, as the interpreter ends
            try:
                while rest:
                    written = super().write(rest)
                    if written is None:  # a descriptor that does not block: wait as others would
                        poll = select.poll()  # select.select knows no descriptor above 1023
                        poll.register(self, select.POLLOUT)
                        poll.poll()
                    rest = rest[written or 0 :]
            except OSError as error:
                self.lost += 1
                if self.lost == 1:
                    tell_once(self.fileno(), error)
        return total


def tell_once(fd: int, error: OSError) -> None:
    """Tells on stderr, by rank 0, that stdout is lost from here on."""
    if fd == STREAMS["stdout"] and os.environ.get("RANK", "0") == "0":
        told = f"spmdrl: standard output cannot be written ({error}): the run goes on without it\n"
        with suppress(OSError):
            os.write(STREAMS["stderr"], told.encode(errors="replace"))


def keep_output() -> None:
    """Makes sure that nothing that is printed raises from now on. To be called before any file is
    opened: one that takes the number of a closed standard stream would be written what a library
    prints.
    """
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    for name, fd in STREAMS.items():
        stream = getattr(sys, name)
        if stream is None or has_fd(stream, fd):
            setattr(sys, name, patient(stream, fd))


def has_fd(stream: TextIO, fd: int) -> bool:
    """Returns True if the stream is the process's own, and not what a test or a notebook put in its
    place.
    """
    try:
        return stream.fileno() == fd and not isinstance(stream.buffer, Patient)
    except (OSError, ValueError, AttributeError):
        return False


def patient(old: Any, fd: int) -> TextIO:
    """Returns a stream like `old`, but for letters that its encoding lacks: these are escaped."""
    if old is not None:
        with suppress(OSError):
            old.flush()
        KEPT.append(old)
    raw: Any = Patient(fd, "w", closefd=False)
    return io.TextIOWrapper(
        raw,
        encoding="utf-8" if old is None else old.encoding,
        errors="backslashreplace",
        line_buffering=old is None or old.line_buffering,
        write_through=old is None or old.write_through,
    )
