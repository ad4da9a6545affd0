"""Shell commands in a folder that lasts, with bubblewrap around each of them.

A command has namespaces of its own: no network but the loopback, no other process, and of the
machine's files its programs and libraries, read-only. What it writes to the folder is there for the
next one; its processes end with it. The filter of system calls is the sandbox's
(rewards/sandbox/seccomp.py) with those that shells need. Standard library only, for workers.
"""

from __future__ import annotations

import functools
import os
import resource
import secrets
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.rewards.sandbox import seccomp
from spmdrl.rewards.sandbox.limits import MOST_FILES, over_limits
from spmdrl.rewards.sandbox.sandbox import (
    FIRST_USER,
    NOBODY,
    TICK_S,
    Limits,
    SandboxError,
    Status,
    dirs_above,
    end,
    is_real_root,
    is_weak,
    lesser_user,
    own_user,
)

USUAL = Limits(wall_s=20.0, cpu_s=60.0, memory_mib=2048, processes=64, file_mib=256, output_kib=16)
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
SETTINGS = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/ssl/certs")
HOME = "/home/terminal"  # the trainer's Python may be in /root
PASSWD = "root:x:0:0:root:{home}:/bin/bash\nterminal:x:{user}:{user}::{home}:/bin/bash\n"
DISK_S = 0.5  # between two looks at the size of the folder
OWN_PROCESSES = 2  # bubblewrap's init, and the bash that becomes the command
# What the kernel lets a command have beyond limits.processes, which looks at /proc hold it to: a
# command that is over shall be ended with that status, and not go on with forks that fail.
# The kernel counts threads, too, of which programs make as many as there are processors.
SPARE_PROCESSES = 512 + 4 * (os.cpu_count() or 1)
OF_FOLDERS = 1 << 29  # users of folders, behind those that are called by threads' ids
MOST_OPEN = 4096  # files that a process may have open
# says a word that the command does not know, sets limits and becomes the command
LIMITED = """\
echo "$1"; ulimit -u "$2" -n "$3" -f "$4" -t "$5" -v "$6" -c 0 || exit; cd "$7" || exit
exec /bin/bash -c "$8" bash"""

Mount = tuple[str, str]  # a folder of the machine, and where it is in there


@dataclass(frozen=True)
class ShellResult:
    """The end of a command. Output has U+FFFD in place of bytes that are not UTF-8."""

    status: Status  # "ok", or which limit ended it
    exit_code: int | None  # None: it was ended
    output: str  # stdout and stderr as they came; the middle of a longer one is left out


def run_shell(
    command: str, writable: Sequence[Mount], cwd: str, limits: Limits = USUAL,
    read_only: Sequence[Mount] = (),
) -> ShellResult:  # fmt: skip
    """Runs a command with bash in the folder `cwd`.

    writable: folders that it may change. limits: wall_s, memory_mib, processes and file_mib are for
    all its processes together, cpu_s and address space for each. Raises SandboxError where there is
    no sandbox.
    """
    begins = secrets.token_hex(8)
    bounds = [
        at_most(resource.RLIMIT_NPROC, limits.processes + OWN_PROCESSES + SPARE_PROCESSES),
        at_most(resource.RLIMIT_NOFILE, MOST_OPEN),
        at_most(resource.RLIMIT_FSIZE, limits.file_mib << 20) >> 10,
        at_most(resource.RLIMIT_CPU, int(limits.cpu_s) or 1),
        at_most(resource.RLIMIT_AS, limits.memory_mib << 20) >> 10,
    ]
    shell = ["/bin/bash", "-c", LIMITED, "bash", begins, *map(str, bounds), cwd, command]
    with bubblewrapped(writable, read_only, shell) as process:
        output, status = watched(process, limits, [folder for folder, _ in writable])
        code = process.wait() if status == "ok" else None
    text = output.decode(errors="replace")
    if not text.startswith(f"{begins}\n"):
        raise SandboxError(f"a shell command was not started ({status}): {text.strip()}")
    return ShellResult(status, code, text.removeprefix(f"{begins}\n"))


def at_most(what: int, value: int) -> int:
    """Returns value, or this process's own limit where that is lower: nobody may raise it."""
    hard = resource.getrlimit(what)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


class bubblewrapped:
    """A command in bubblewrap; when the block ends, none of its processes is left."""

    def __init__(
        self, writable: Sequence[Mount], read_only: Sequence[Mount], command: Sequence[str]
    ) -> None:
        self.writable = [folder for folder, _ in writable]
        targets = [there for _, there in (*writable, *read_only)]
        self.mounts = dirs_above(targets, SYSTEM) if is_real_root() else []
        self.mounts += [part for mount in writable for part in ("--bind", *mount)]
        self.mounts += [part for mount in read_only for part in ("--ro-bind", *mount)]
        self.command = command

    def __enter__(self) -> subprocess.Popen[bytes]:
        user = self.user()
        passwd = PASSWD.format(home=HOME, user=user or NOBODY).encode()
        files = [in_memory("filter", seccomp.program(terminal=True)), in_memory("passwd", passwd)]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"] if user else []
        try:
            wrapped = [
                *base(), "--seccomp", str(files[0]), "--perms", "0644", "--ro-bind-data",
                str(files[1]), "/etc/passwd", *self.mounts, *pythons(), "--remount-ro", "/", "--",
                *become, *self.command,
            ]  # fmt: skip
            given: dict[str, Any] = {
                "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT,
                "env": environment(), "cwd": "/", "pass_fds": files, "bufsize": 0, **lesser_user(),
            }  # fmt: skip
            self.process = subprocess.Popen(wrapped, **given)
        finally:
            for file in files:
                os.close(file)
        return self.process

    def __exit__(self, *_: object) -> None:
        end(self.process)

    def user(self) -> int:
        """The user that a command becomes where we are root of the machine, whose processes no
        limit of the kernel counts: the owner of the first folder, see own_by_sandbox, or one of the
        call's own. 0: it stays whoever it is."""
        own = own_user(weak=False)
        owner = os.stat(self.writable[0]).st_uid if own and self.writable else 0
        return owner or own


def in_memory(name: str, content: bytes) -> int:
    """Returns the descriptor of a file that has this content."""
    fd = os.memfd_create(name)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


@functools.cache
def base() -> tuple[str, ...]:
    """Returns the part of the command that is the same in every call.

    It is root of a user namespace, without any capability: files that we own are its own. Real root
    has no user namespace and becomes another user, as with the sandbox of rewards.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError("no program 'bwrap' in PATH")
    if is_real_root() and shutil.which("setpriv") is None:
        raise SandboxError("no program 'setpriv' in PATH, which is of the package util-linux")
    command = [
        program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", "--hostname", "terminal", "--die-with-parent", "--new-session",
        "--cap-drop", "ALL",
    ]  # fmt: skip
    if is_real_root():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        command += dirs_above([*homes_of_python(), *SETTINGS, "/dev/null", HOME], SYSTEM)
    else:
        command += ["--unshare-user", "--uid", "0", "--gid", "0"]
    for place in (*SYSTEM, *SETTINGS):
        if os.path.islink(place):
            command += ["--symlink", os.readlink(place), place]
        elif os.path.exists(place):
            command += ["--ro-bind", place, place]
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    return (*command, "--symlink", "/tmp", "/dev/shm")


def pythons() -> list[str]:
    """Returns what shows the trainer's Python, on top of what is mounted where it is."""
    return [part for place in homes_of_python() for part in ("--ro-bind", place, place)]


def homes_of_python() -> list[str]:
    return sorted({os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)} - {"/usr"})


def environment() -> dict[str, str]:
    """All of it. python is the trainer's, with its packages."""
    paths = [f"{os.path.realpath(sys.prefix)}/bin", "/usr/local/bin", "/usr/bin", "/bin",
             "/usr/sbin", "/sbin"]  # fmt: skip
    return {"PATH": ":".join(paths), "HOME": HOME, "LANG": "C.UTF-8", "TERM": "dumb",
            "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip


def watched(
    process: subprocess.Popen[bytes], limits: Limits, folders: Sequence[str]
) -> tuple[bytes, Status]:
    """(what it said, "ok" or the limit that it is over), once it has ended or must be."""
    assert process.stdout is not None
    out, said = process.stdout.fileno(), Said(limits.output_kib << 10)
    os.set_blocking(out, False)
    ends, sizes_at = time.monotonic() + limits.wall_s, time.monotonic() + DISK_S
    while process.poll() is None:
        if select.select([out], [], [], TICK_S)[0]:
            said.read(out)
        status: Status | None = over_limits(
            process.pid, limits.memory_mib, True, limits.processes + OWN_PROCESSES
        )
        if status is None and time.monotonic() > sizes_at:
            sizes_at = time.monotonic() + DISK_S
            status = "disk" if too_large(folders, limits.file_mib) else None
        if status is None and time.monotonic() > ends:
            return said.bytes(), "time"
        if status is not None:
            return said.bytes(), status
    said.read(out)
    return said.bytes(), "ok"


class Said:
    """The output of a command: its beginning and its end, each at most half of `most` bytes."""

    def __init__(self, most: int) -> None:
        self.half, self.first, self.last, self.count = most // 2, bytearray(), bytearray(), 0

    def read(self, fd: int) -> None:
        """Takes in what there is."""
        with suppress(BlockingIOError):
            while data := os.read(fd, 1 << 16):
                self.count += len(data)
                room = self.half - len(self.first)
                self.first += data[:room]
                self.last = (self.last + data[max(room, 0) :])[-self.half :]
                if len(data) < 1 << 16:  # or one that never stops would hold us
                    return

    def bytes(self) -> bytes:
        left = self.count - len(self.first) - len(self.last)
        cut = f"\n... ({left} bytes left out) ...\n".encode() if left > 0 else b""
        return bytes(self.first) + cut + bytes(self.last)


def too_large(folders: Iterable[str], most_mib: int) -> bool:
    """Whether the files of folders have together more than most_mib, or are more than 10,000. A
    folder that cannot be looked into may have any number, and counts as that many.
    """
    size = count = 0
    closed: list[OSError] = []
    for folder in folders:
        for place, _, names in os.walk(folder, onerror=closed.append):
            count += 1 + len(names)
            for name in names:
                with suppress(OSError):  # it is gone meanwhile
                    size += os.lstat(os.path.join(place, name)).st_blocks * 512
            if count > MOST_FILES or size > most_mib << 20:
                return True
    return any(isinstance(error, PermissionError) for error in closed)


def is_another_user() -> bool:
    """Says whether commands run as another user than this process."""
    return is_real_root() or bool(lesser_user())


def own_by_sandbox(folder: Path) -> None:
    """Gives files to the user that the sandbox runs as, where that is not us: a user of the
    folder's own where we are root of the machine."""
    if is_real_root():
        user = FIRST_USER + OF_FOLDERS + folder.stat().st_ino % OF_FOLDERS
    elif lesser_user():
        user = NOBODY
    else:
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user, user, follow_symlinks=False)


def check() -> None:
    """Raises ConfigError where no shell can be run here. Tried once."""
    if is_weak():
        raise ConfigError("a terminal needs bubblewrap: SPMDRL_SANDBOX=weak has no processes")
    try:
        try_out()
    except (SandboxError, OSError) as error:
        raise ConfigError(
            f"a terminal needs a sandbox, and there is none here: {error}. docs/sandbox.md says "
            "what to install and to allow"
        ) from error


@functools.cache
def try_out() -> None:
    result = run_shell("/usr/bin/env true && echo $((6 * 7))", [], "/")  # may it start a program
    if result.output != "42\n":
        raise SandboxError(f"bash does not run in it: {result}")
