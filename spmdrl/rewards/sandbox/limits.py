"""Measures what a sandbox's processes use together, which without cgroups no kernel limit bounds.

Seen from outside, in /proc, and from time to time: what is used in between is bounded by the limits
of each process alone.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Literal

MOST_FILES = 10_000  # in the working directory: file names cost memory that no size limit counts


def over_limits(
    pid: int, memory_mib: int, weak: bool, most: int | None = None
) -> Literal["memory", "disk", "processes"] | None:
    """Whether the processes of a sandbox hold too much memory, or its folder too many files, or
    they are more than `most`. Processes that multiply would outrun a look at each of them, so that
    they are counted first, and no further than that.
    """
    below, total_kib = descendants(pid, most), 0
    if most is not None and len(below) > most:
        return "processes"
    for each in below:
        with suppress(OSError):  # it has ended meanwhile
            total_kib += memory_kib(each)
            # where memory ends all the same, these go before the trainer
            Path(f"/proc/{each}/oom_score_adj").write_text("1000")
    if total_kib > memory_mib * 1024:
        return "memory"
    if below and not weak:
        with suppress(OSError):
            folder = os.statvfs(f"/proc/{below[0]}/root/tmp")
            if folder.f_files - folder.f_ffree > MOST_FILES:
                return "disk"
    return None


def memory_kib(pid: int) -> int:
    """Resident or swapped, without files. Pages that a fork still shares count more than once."""
    fields = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return sum(int(fields.get(f, "0").split()[0]) for f in ("RssAnon", "RssShmem", "VmSwap"))


def descendants(pid: int, most: int | None = None) -> list[int]:
    """Parents before children. What lost its parent in there belongs to the sandbox's init.

    most: the look ends once more than these are found.
    """
    found = children(pid)
    for each in found:  # which grows
        if most is not None and len(found) > most:
            break
        found += children(each)
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):  # it has ended meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            text = Path(f"/proc/{pid}/task/{thread}/children").read_text()
            found += map(int, text.split())
    return found
