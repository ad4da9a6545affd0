"""The images and videos that a prompt shows beside its text. An image is a types.Picture."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from spmdrl.types import Picture


@dataclass(frozen=True)
class Video:
    """A video: the bytes of its file, the file, or its frames in order.

    fps: of a file, how many frames a second are shown; of frames, how many a second has. None: as
    the data config says.
    """

    source: bytes | Path | tuple[Picture, ...]
    fps: float | None = None

    @property
    def encoded(self) -> bytes:
        """Returns the bytes of its file; of frames those of the first."""
        if isinstance(self.source, tuple):
            return self.source[0].encoded
        return self.source if isinstance(self.source, bytes) else self.source.read_bytes()

    @cached_property
    def digest(self) -> str:
        """The first 128 bits of the BLAKE2b hash of all there is, in hexadecimal digits."""
        found = hashlib.blake2b(f"video {self.fps} ".encode(), digest_size=16)
        if isinstance(self.source, tuple):
            found.update(" ".join(frame.digest for frame in self.source).encode())
        else:
            found.update(self.encoded)
        return found.hexdigest()

    def __str__(self) -> str:
        if isinstance(self.source, Path):
            return f"'{self.source}'"
        many = f"{len(self.source)} {'frames' if isinstance(self.source, tuple) else 'bytes'}"
        return f"a video of {many}"


Visual = Picture | Video  # what a prompt may show
