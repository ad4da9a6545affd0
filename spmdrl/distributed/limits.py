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
INFINIBAND = Path("/sys/class/infiniband")  # has an entry for each adapter, RoCE's too
STATUS = Path("/proc/self/status")
CAP_IPC_LOCK = 14  # capabilities(7): no limit on locked memory holds
LEAST_LOCKED = 1 << 30  # bytes; NCCL locks several MiB for each channel and each peer


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


def locked_memory_limit() -> list[str]:
    """Returns the limit on locked memory, in words, where it is too small for NCCL over InfiniBand
    or RoCE; [] where it is not, and where there is no such adapter.
    """
    if not INFINIBAND.is_dir() or not any(INFINIBAND.iterdir()):
        return []
    most, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    may_lock = int(fields["CapEff"], 16) >> CAP_IPC_LOCK & 1
    if may_lock or most == resource.RLIM_INFINITY or most >= LEAST_LOCKED:
        return []
    return [f"ulimit -l limits locked memory to {most / MIB:g} MiB"]


def warn_of_locked_memory() -> None:
    """Raises the soft limit on locked memory to the hard one where this host has InfiniBand. Says
    once on each host, on stderr, where that is too little for NCCL, whose error names no limit.
    """
    if locked_memory_limit():
        _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    limits = locked_memory_limit()
    if limits and os.environ.get("LOCAL_RANK", "0") == "0":
        say(
            f"spmdrl: {limits[0]}: NCCL may get no memory that InfiniBand can read; ulimit -l "
            "unlimited, docker run --ulimit memlock=-1 or the capability IPC_LOCK lifts it"
        )


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
    limits = locked_memory_limit() if "NCCL" in cause else []
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
