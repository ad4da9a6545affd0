"""Files of JSON lines that a run may be writing: their whole lines, and whether they changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 1 << 20


class FileState(NamedTuple):
    """Signs by which a changed file is known."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | Path) -> FileState | None:
        """None: it is not there."""
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)

    def continues(self, earlier: FileState) -> bool:
        """Whether the file may have only grown since `earlier`."""
        return self.inode == earlier.inode and self.size >= earlier.size


def whole_lines(path: str | Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line with its line break) from an offset on.

    A last line without a line break is left out: the run is writing it, or was killed meanwhile.
    """
    with open(path, "rb", buffering=PIECE_BYTES) as file:
        file.seek(offset)
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line
            offset += len(line)
