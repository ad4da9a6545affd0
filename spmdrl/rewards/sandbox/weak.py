"""The form of the sandbox without namespaces: what a process takes from itself before it runs code.

Sent into the sandbox as part of one program, see `inside.py`.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from typing import Any


def harden(program: bytes, parent: int, packages: list[str]) -> None:
    """Hardens the weak form: dies with its parent, drops capabilities, sees the standard library
    only where the kernel has Landlock, and may only call what `program`, a seccomp filter, allows.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    die_with(parent)
    if libc.prctl(38, 1, 0, 0, 0) != 0:  # no_new_privs
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    landlock(libc, ctypes, packages)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3
    libc.capset(header, (ctypes.c_uint32 * 6)())
    buffer = ctypes.create_string_buffer(program, len(program))
    fields = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    kind = type("sock_fprog", (ctypes.Structure,), {"_fields_": fields})
    value = kind(len(program) // 8, ctypes.addressof(buffer))
    if libc.prctl(22, 2, ctypes.byref(value), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def die_with(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it was gone before the line above
        os._exit(1)


def landlock(libc: Any, ctypes: Any, packages: list[str]) -> None:
    """Reading only in the library folders; the folder of the packages can be listed. Does nothing
    where the kernel has no Landlock."""
    access = (ctypes.c_uint64 * 1)((1 << 13) - 1)  # all that its first version handles
    ruleset = libc.syscall(444, access, 8, 0)
    if ruleset < 0:
        return
    folders = {*sys.path[:3], "/usr/lib", "/lib", "/lib64", "/usr/lib64", "/dev/urandom",
               "/usr/share/zoneinfo"}  # fmt: skip
    folders |= set(packages)
    for folder in folders:
        if not os.path.exists(folder):
            continue
        fd = os.open(folder, os.O_PATH)
        rights = 0b1100 if os.path.isdir(folder) else 0b0100  # read files, list folders
        rights = 0b1000 if folder in packages[:1] else rights
        rule = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
        libc.syscall(445, ruleset, 1, rule, 0)
        os.close(fd)
    libc.syscall(446, ruleset, 0)
    os.close(ruleset)
