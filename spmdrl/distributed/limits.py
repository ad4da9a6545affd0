"""Limits that the system sets a process, by name: what fails for one of them rarely says so."""

from __future__ import annotations

import errno
import os
import resource
from contextlib import suppress
from pathlib import Path

from spmdrl.distributed.exit import say

MIB = 1 << 20
# what allocators, loaders and thread libraries say where memory or a thread is refused
OUT_OF_MEMORY = (
    "MemoryError", "bad_alloc", "annot allocate memory", "can't allocate memory", "out of memory",
    "can't start new thread", "Resource temporarily unavailable", "failed to map segment",
)  # fmt: skip
# (limit, how a shell calls it, what it limits, what it divides bytes by)
OF_MEMORY = (
    (resource.RLIMIT_AS, "ulimit -v", "the address space of each process"),
    (resource.RLIMIT_DATA, "ulimit -d", "the data of each process"),
)
CGROUP = Path("/sys/fs/cgroup")


def memory_limits() -> list[str]:
    """The limits on memory that are set for this process, in words; [] where there is none."""
    found = []
    for kind, command, what in OF_MEMORY:
        most, _ = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            found.append(f"{command} limits {what} to {most // MIB} MiB")
    cgroup = cgroup_limit()
    if cgroup is not None:
        found.append(f"its cgroup has {cgroup // MIB} MiB for all processes")
    return found


def warn_of_limits() -> None:
    """Says once on each host, on stderr, which limit a shell has set on memory. torch and vLLM map
    far more than they use, and where that is refused they may abort without a reason."""
    limits = [text for text in memory_limits() if text.startswith("ulimit")]
    if limits and os.environ.get("LOCAL_RANK", "0") == "0":
        say(f"spmdrl: {'; '.join(limits)}: imports or threads may fail for it, with any message; "
            "ulimit -v unlimited lifts it")  # fmt: skip


def limit_of(cause: str) -> str:
    """Returns what to add to the cause of a failure: the limit that it may be of; "" where there is
    none.

    cause: the type and the text of the error.
    """
    if any(words in cause for words in OUT_OF_MEMORY):
        import psutil  # not at the top: a program looks for limits before it imports anything

        used = psutil.Process().memory_info()
        limits = memory_limits()
        if "thread" in cause or "temporarily" in cause:
            limits += count_limit(resource.RLIMIT_NPROC, "ulimit -u", "processes and threads")
        now = f"this process has {used.vms // MIB} MiB mapped, {used.rss // MIB} MiB in memory"
        return f" ({'; '.join([*limits, now])})" if limits else ""
    limits = []
    if f"[Errno {errno.EMFILE}]" in cause or "Too many open files" in cause:
        limits = count_limit(resource.RLIMIT_NOFILE, "ulimit -n", "open files")
    if f"[Errno {errno.EFBIG}]" in cause or "File too large" in cause:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        if most != resource.RLIM_INFINITY:
            limits = [f"ulimit -f limits a file to {most / MIB:g} MiB"]
    return f" ({'; '.join(limits)})" if limits else ""


def count_limit(kind: int, command: str, what: str) -> list[str]:
    most, _ = resource.getrlimit(kind)
    return [] if most == resource.RLIM_INFINITY else [f"{command} limits {what} to {most}"]


def cgroup_limit() -> int | None:
    """Bytes that this process's cgroup (v2, or v1's memory controller) may use; None: no limit."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max"
            most = int(Path(CGROUP, name).read_text())
            return most if most < 1 << 60 else None
    return None


def kills_for_memory() -> int:
    """Counts the processes of this cgroup that the kernel has killed since the cgroup ran out of
    memory, and of the whole host; 0 where the system does not tell.
    """
    count = 0
    for path, key in ((CGROUP / "memory.events", "oom_kill"), (Path("/proc/vmstat"), "oom_kill")):
        with suppress(OSError, ValueError):
            rows = [line.split() for line in path.read_text().splitlines()]
            count += sum(int(value) for name, value in rows if name == key)
    return count
