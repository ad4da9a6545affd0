"""Runs model-written Python in a process that can reach nothing. See docs/sandbox.md.

Bubblewrap gives it namespaces of its own: no network, no other process, no file but Python's
library (read-only) and an empty folder of bounded size. A seccomp filter allows the system calls
that a plain program needs. Resource limits hold per process; for the sum over processes we watch.

What the code does to itself, up to and including a limit, is a Result. Only a failure of ours
raises. Standard library only: reward workers import this.
"""

from __future__ import annotations

import functools
import importlib.util
import marshal
import math
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from spmdrl.config import ConfigError
from spmdrl.rewards.sandbox import channel as sandbox_channel
from spmdrl.rewards.sandbox import inside as sandbox_inside
from spmdrl.rewards.sandbox import judge as sandbox_judge
from spmdrl.rewards.sandbox import names as sandbox_names
from spmdrl.rewards.sandbox import program as sandbox_program
from spmdrl.rewards.sandbox import proxies as sandbox_proxies
from spmdrl.rewards.sandbox import seccomp as sandbox_seccomp
from spmdrl.rewards.sandbox import values as sandbox_values
from spmdrl.rewards.sandbox import weak as sandbox_weak
from spmdrl.rewards.sandbox.limits import children, over_limits
from spmdrl.rewards.sandbox.values import frame

Status = Literal[
    "ok", "error", "time", "cpu", "memory", "output", "processes", "disk", "killed", "unjudged"
]  # fmt: skip
Kind = Literal["run", "call", "assert"]
FORM_VARIABLE = "SPMDRL_SANDBOX"  # "weak" asks for the form without namespaces
START_LIMIT_S = 30.0  # for the sandbox to be there; beyond it the failure is ours
GRACE_S = 2.0  # beyond a test's wall_s, for the process inside to report
TICK_S = 0.02  # between two looks at the memory of all processes
MOST_WORDS = 4000  # bytes kept of what bubblewrap or a crash of the sandbox says
EVALUATING = re.compile(rb"eval|exec|pickle")  # tests with these need a spare process
NOBODY = 65534
FIRST_USER = 1 << 30  # plus the thread's id: a user of the call's own, where we are root
ALL_USERS, CAP_SYS_ADMIN = "4294967295", 21
MIB = 1 << 20
BOOT = """
import marshal, os
os.write(1, b"R")
def read(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        part or os._exit(9)
        data += part
    return data
for part in marshal.loads(read(int.from_bytes(read(4), "big"))):
    exec(part)
"""


class SandboxError(RuntimeError):
    """The sandbox itself failed; says nothing about the code."""


@dataclass(frozen=True)
class Limits:
    """The limits of one run, or of each test of several. Reaching one is a Result with its name as
    status.
    """

    wall_s: float = 10.0
    cpu_s: float = 5.0  # of each process, in whole seconds, rounded up
    memory_mib: int = 512  # address space of each process; resident memory of all together
    processes: int = 8  # and threads, beside the first
    file_mib: int = 16  # all files together
    output_kib: int = 64  # of stdout; as much again of stderr

    def __post_init__(self) -> None:
        least = {"wall_s": 0.01, "cpu_s": 0.01, "memory_mib": 64, "file_mib": 1, "output_kib": 1}
        for name, value in {**least, "processes": 0}.items():
            given = getattr(self, name)
            if not value <= given < math.inf:
                raise ConfigError(f"Limits.{name}={given}: expected at least {value:g}, and finite")


USUAL = Limits()


@dataclass(frozen=True)
class Result:
    """The result of one run. Output that is not UTF-8 has U+FFFD in place of the wrong bytes."""

    status: Status
    exit_code: int | None  # below 0: minus the signal; None: not known, all was ended at once
    stdout: str  # both end at output_kib
    stderr: str
    returned: str  # of a "call": JSON as values.plain makes it; of "unjudged": the reason
    seconds: float


class SandboxExit(NamedTuple):
    """The end of the conversation with a sandbox."""

    ready: bool  # it was there; so what came after is the code's doing
    results: list[Result]
    status: Status  # of the tests that have no result
    seconds: float  # since the last result
    words: bytearray  # of bubblewrap or of a crash in there


def run_code(code: str, stdin: str = "", limits: Limits = USUAL) -> Result:
    """Runs `code` as a main program. Blocks for `limits.wall_s` and a few seconds at most.

    Raises ConfigError where no sandbox can be made here, SandboxError where one failed.
    """
    return run_tests(code, "run", [stdin.encode("utf-8", "surrogatepass")], limits)[0]


async def run_code_async(code: str, stdin: str = "", limits: Limits = USUAL) -> Result:
    """run_code in a thread. A cancelled call runs on to its limits and is then dropped."""
    import asyncio  # slow, and reward workers do not need it

    return await asyncio.to_thread(run_code, code, stdin, limits)


def run_tests(
    code: str, kind: Kind, tests: list[bytes], limits: Limits, total_s: float = math.inf
) -> list[Result]:
    """One Result per test, each from a fresh run of `code`, all in one sandbox.

    kind and tests: "run" has stdin; "call" a question as `ask_value` makes it; "assert" statements
    whose names are the program's, "ok" where they pass, "unjudged" where our judge cannot say.
    Limits hold per test. When the sandbox
    ends early, or after `total_s`, what has not run has the status of what ended it.
    """
    check()
    return in_sandbox(code, kind, tests, limits, total_s, is_weak()) if tests else []


def in_sandbox(
    code: str, kind: Kind, tests: list[bytes], limits: Limits, total_s: float, weak: bool
) -> list[Result]:
    """run_tests without the check."""
    limits_inside = {
        "wall_s": limits.wall_s, "cpu_s": math.ceil(limits.cpu_s),
        "output": limits.output_kib << 10, "memory": limits.memory_mib * MIB,
        "file": limits.file_mib * MIB, "processes": limits.processes, "user": own_user(weak),
        "parent": os.getpid(),
        "weak": sandbox_seccomp.program(True) if weak else b"",
    }  # fmt: skip
    spare = kind == "assert" and any(EVALUATING.search(test) for test in tests)
    head = {"code": code, "kind": kind, "count": len(tests), "limits": limits_inside,
            "spare": spare, "packages": packages()}  # fmt: skip
    request = b"".join(map(frame, [harness(kind), marshal.dumps(head), *tests]))
    with launched(limits, weak) as sandbox:
        ended = converse(sandbox, request, len(tests), limits, total_s)
    words = ended.words.decode(errors="replace").strip()
    if not ended.ready or "Traceback" in words:  # the code has no way to write there
        raise SandboxError(f"the sandbox failed: {words or 'it ended without a word'}")
    rest = Result(ended.status, None, "", "", "", ended.seconds)
    return ended.results + [rest] * (len(tests) - len(ended.results))


def ask_value(function: str, arguments: list[Any]) -> bytes:
    """A test of kind "call": function(*arguments), or that method of a class Solution."""
    import json

    return frame(json.dumps(["value", function, arguments]).encode())


# ---- the process


class launched:
    """A sandbox's outermost process; when the block ends, none of its processes is left."""

    def __init__(self, limits: Limits, weak: bool) -> None:
        self.limits, self.weak = limits, weak

    def __enter__(self) -> subprocess.Popen[bytes]:
        python = [
            os.path.realpath(sys.executable),
            "-P",
            "-s",
            "-S",
            "-B",
            "-X",
            "utf8",
            "-c",
            BOOT,
        ]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        pipes |= {"bufsize": 0, "cwd": "/", "env": environment()}
        if self.weak:
            self.process = subprocess.Popen(python, start_new_session=True, **pipes)
            return self.process
        filter_fd = os.memfd_create("seccomp")
        try:
            os.write(filter_fd, sandbox_seccomp.program())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            size = str(self.limits.file_mib * MIB)
            command = [
                *bubblewrap(), "--seccomp", str(filter_fd), "--perms", "1777", "--size", size,
                "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--", *python,
            ]  # fmt: skip
            pipes |= lesser_user()
            self.process = subprocess.Popen(command, pass_fds=[filter_fd], **pipes)
        finally:
            os.close(filter_fd)
        return self.process

    def __exit__(self, *_: object) -> None:
        end(self.process, self.weak)


def end(process: subprocess.Popen[bytes], weak: bool = False) -> None:
    """Ends all processes of a sandbox, and closes its pipes."""
    if process.poll() is None:
        if weak:
            os.killpg(process.pid, signal.SIGKILL)
        # init first: bubblewrap then ends by itself, after the kernel has ended all the others
        for pid in children(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        process.kill()
        process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def environment() -> dict[str, str]:
    """All of it. A fixed hash seed: the order of a set must not decide over a reward. One thread
    for numpy, which would else start one for each core."""
    return {"PATH": "/usr/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip


def own_user(weak: bool) -> int:
    """0: it stays whoever it is. Two calls at once never share one, since a call blocks."""
    return FIRST_USER + threading.get_native_id() if is_real_root() and not weak else 0


def is_real_root() -> bool:
    """Root of the machine, with the right to mount; not of a container's own user namespace."""
    if os.geteuid() != 0 or Path("/proc/self/uid_map").read_text().split()[1:] != ["0", ALL_USERS]:
        return False
    status = Path("/proc/self/status").read_text()
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    return bool(capabilities >> CAP_SYS_ADMIN & 1)


def lesser_user() -> dict[str, Any]:
    """Returns arguments for Popen: root that cannot mount becomes nobody, where there is one, and
    makes a user namespace as everybody does; no process limit binds root.
    """
    if os.geteuid() != 0 or is_real_root():
        return {}
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    return {}


@functools.cache
def harness(kind: Kind) -> bytes:
    """The program inside, compiled by the Python that will run it; as much as this kind needs."""
    modules = [sandbox_values, sandbox_weak, sandbox_inside]
    if kind != "run":
        modules.insert(1, sandbox_program)
    if kind == "assert":
        modules[2:2] = [sandbox_proxies, sandbox_channel, sandbox_names, sandbox_judge]
    paths = [Path(str(module.__file__)) for module in modules]
    return marshal.dumps(
        [compile(path.read_text(), f"sandbox_{path.stem}", "exec") for path in paths]
    )


@functools.cache
def bubblewrap() -> tuple[str, ...]:
    """Returns the part of the command that is the same in every call. No /proc: nothing of it is
    needed, and much told by it.

    Real root needs no user namespace: the program inside becomes a user of the call's own, before
    it knows the code. So even a folder that only root can enter may hold the interpreter.
    """
    program = shutil.which("bwrap")
    assert program is not None, "check() found one"
    user = ["--unshare-user", "--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command = [
        program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts",
        "--unshare-cgroup-try", *([] if is_real_root() else user), "--hostname", "sandbox",
        "--die-with-parent", "--new-session", "--cap-drop", "ALL",
    ]  # fmt: skip
    if is_real_root():
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    places = visible()
    command += dirs_above([*places, "/etc/x", "/dev/x"])
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for place in places:
        link = os.path.islink(place)
        command += ["--symlink", os.readlink(place), place] if link else ["--ro-bind", place, place]
    for device in ("null", "zero", "full", "random", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", "/tmp", "/dev/shm"]  # for semaphores; counted with the files
    return tuple(command)


def dirs_above(places: Iterable[str], mounted: Sequence[str] = ()) -> list[str]:
    """Returns bubblewrap's options that make the folders above places, parents first, open to every
    user: its own would be root's alone. mounted: folders that are shown themselves, in which none
    is made.
    """
    shown = set(map(Path, mounted))
    folders = {folder for place in places for folder in Path(place).parents}
    made = sorted(f for f in folders if f not in shown and shown.isdisjoint(f.parents))
    return [part for folder in made for part in ("--perms", "0755", "--dir", str(folder))]


def visible() -> list[str]:
    """The interpreter, its library, the C libraries and the time zones: no command, no home, no
    settings."""
    prefixes = {os.path.realpath(p) for p in (sys.base_prefix, sys.base_exec_prefix)}
    wanted = ["/usr/lib", "/usr/lib64", "/lib", "/lib64", os.path.realpath(sys.executable)]
    wanted += [f"{prefix}/{name}" for prefix in prefixes for name in ("lib", "lib64")]
    wanted += [*packages()[1:], "/usr/share/zoneinfo"]
    stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
    if not any(stdlib.startswith(os.path.realpath(place) + "/") for place in wanted):
        wanted.append(stdlib)
    return [place for place in dict.fromkeys(wanted) if os.path.lexists(place)]


@functools.cache
def packages() -> list[str]:
    """The folder that numpy is in and, of that folder, what belongs to numpy; empty without it."""
    spec = importlib.util.find_spec("numpy")
    if spec is None or spec.origin is None:
        return []
    folder = Path(spec.origin).parent
    found = [path for path in (folder, folder.with_name("numpy.libs")) if path.is_dir()]
    return [str(folder.parent), *map(str, found)]


# ---- the conversation


def converse(
    sandbox: subprocess.Popen[bytes], request: bytes, count: int, limits: Limits, total_s: float
) -> SandboxExit:
    """Writes and reads, never waiting for one alone, until all is told or a limit is hit."""
    assert sandbox.stdin and sandbox.stdout and sandbox.stderr
    feed, out, err = sandbox.stdin.fileno(), sandbox.stdout.fileno(), sandbox.stderr.fileno()
    polled = select.poll()
    for fd in (feed, out, err):
        os.set_blocking(fd, False)
    for fd in (out, err):
        polled.register(fd, select.POLLIN)
    most = {out: count * (limits.output_kib << 12) + MIB, err: MOST_WORDS}
    view, said = memoryview(request), {out: bytearray(), err: bytearray()}
    results: list[Result] = []
    began = last = time.monotonic()
    ready, place, look_at = False, 1, 0.0
    while len(results) < count:
        for fd, _ in polled.poll(TICK_S * 1000):
            if fd == feed:
                view = view[sandbox_inside.put(fd, view) :]
                if not view:
                    polled.unregister(fd)
            elif not sandbox_inside.take(fd, said[fd], most[fd]):
                if fd == out:
                    sandbox_inside.take(err, said[err], MOST_WORDS)  # its last words came before
                    return SandboxExit(ready, results, "killed", time.monotonic() - last, said[err])
                polled.unregister(fd)
        now = time.monotonic()
        new, place = parse(said[out], place)
        if said[out] and not ready:
            # Only now: whatever would end it with us is in place, so it never runs without us.
            polled.register(feed, select.POLLOUT)
            ready, last = True, now
        last = now if new else last
        results += new
        status: Status | None = None
        limit_s = limits.wall_s + GRACE_S if ready else START_LIMIT_S
        if now - last > limit_s or now - began > total_s:
            status = "time"
        elif ready and now >= look_at:  # earlier, /tmp could still be the machine's
            status = over_limits(sandbox.pid, limits.memory_mib, is_weak())
            look_at = time.monotonic() + TICK_S
        if status is not None and len(results) < count:
            return SandboxExit(ready, results, status, now - last, said[err])
    return SandboxExit(True, results, "killed", 0.0, said[err])


def parse(data: bytearray, place: int) -> tuple[list[Result], int]:
    """The whole reports in `data` from `place` on, and where they end; see inside.report.

    Whoever wrote it, this makes text, numbers and nothing else of it.
    """
    results, statuses = [], get_args(Status)
    while (at := place + 11) <= len(data):
        texts = []
        for _ in range(3):
            size = int.from_bytes(data[at : at + 4], "big")
            texts.append(data[at + 4 : at + 4 + size].decode("utf-8", "replace"))
            at += 4 + size
        if at > len(data):
            break
        code = int.from_bytes(data[place + 1 : place + 3], "big", signed=True)
        seconds = int.from_bytes(data[place + 3 : place + 11], "big") / 1e6
        out, err, reply = texts
        results.append(Result(statuses[data[place]], code, out, err, reply[4:], seconds))
        place = at
    return results, place


# ---- whether there can be one


def is_weak() -> bool:
    """Raises ConfigError for a word that is not known."""
    form = os.environ.get(FORM_VARIABLE, "")
    if form not in ("", "weak"):
        raise ConfigError(f"{FORM_VARIABLE}={form}: it may be 'weak' or unset; see docs/sandbox.md")
    return form == "weak"


def check() -> None:
    """Raises ConfigError where no sandbox can be made here, with what to do. Tried once."""
    try:
        try_out(is_weak())
    except (SandboxError, OSError) as error:
        raise ConfigError(
            f"model-written code needs a sandbox, and there is none here: {error}. Install "
            "bubblewrap 0.8 or newer (Debian and Ubuntu: apt-get install bubblewrap) on a machine "
            "that lets users make namespaces (in Docker: --security-opt seccomp=unconfined), or "
            f"set {FORM_VARIABLE}=weak and accept what docs/sandbox.md says about that form."
        ) from error


@functools.cache
def try_out(weak: bool) -> None:
    if not weak and shutil.which("bwrap") is None:
        raise SandboxError("no program 'bwrap' in PATH")
    sandbox_seccomp.program()
    results = in_sandbox("print(6 * 7)", "run", [b""], Limits(), START_LIMIT_S, weak)
    if results[0].stdout != "42\n":
        raise SandboxError(f"Python does not run in it: {results[0]}")
