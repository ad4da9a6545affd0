"""Memory of one rank that the other ranks of its host can read, also when it is dead.

The memory has no name in any file system, so nothing is left behind: the others open it through
/proc while the rank lives, and keep it. It goes with the last of them.
"""

from __future__ import annotations

import fcntl
import os

PHASE_BYTES = 128
NAME = "spmdrl_rank"


class Page:
    """The name of a rank's phase, and whether a failure has been told on this host.

    A beat goes out every half second only, and a rank may be killed sooner after a phase began.
    """

    def __init__(self, fd: int | None = None) -> None:
        """fd: an open page; None: a new one."""
        self.fd = os.memfd_create(NAME) if fd is None else fd

    @classmethod
    def of(cls, pid: int, fd: int) -> Page | None:
        """Opens the page of another process, by its number for it; returns None where the system
        does not allow it, or where that process is one of another PID namespace.
        """
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"/memfd:{NAME}"):
                return None
            return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return None

    def write_phase(self, phase: str) -> None:
        """Writes the phase in one system call: a kill leaves the old name or the new one."""
        text = phase.encode(errors="replace")[:PHASE_BYTES]
        os.pwrite(self.fd, text.ljust(PHASE_BYTES), 0)

    @property
    def phase(self) -> str:
        return os.pread(self.fd, PHASE_BYTES, 0).decode(errors="replace").rstrip()

    def claim(self) -> bool:
        """Whether this is the first call for this page, of all processes that have it."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX, 1, PHASE_BYTES)
        try:
            if os.pread(self.fd, 1, PHASE_BYTES):
                return False
            os.pwrite(self.fd, b"1", PHASE_BYTES)
            return True
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, PHASE_BYTES)

    def close(self) -> None:
        os.close(self.fd)
