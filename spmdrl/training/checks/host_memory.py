"""Estimates what a rank takes of host memory beside its models, and finds what the host has."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import psutil

from spmdrl.config.words import counted
from spmdrl.rollout.spec import EngineSpec

GIB = 2**30
RUN_BYTES = 150 << 20  # FSDP, checkpoints and what else a run imports; oneDNN's code for its shapes
CGROUPS = (  # limit and use, of version 2 and 1
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def process_gib(*engines: EngineSpec) -> float:
    """Interpreter, libraries and data of a rank: this process, which has loaded the same. engines:
    those that sample there, whose libraries may not be imported here.
    """
    taken = psutil.Process().memory_info().rss + RUN_BYTES
    taken += sum(each.library_bytes for each in engines if each.library not in sys.modules)
    return taken / GIB


def available_gib() -> tuple[float, str]:
    """GiB that new processes of this user can have on this host, and what says so."""
    limits = [(psutil.virtual_memory().available, "the host's free memory")]
    for limit, used in CGROUPS:
        if Path(limit).is_file() and Path(limit).read_text().strip() != "max":
            left = int(Path(limit).read_text()) - int(Path(used).read_text())
            limits.append((left, f"the limit in {limit}"))
    left, what = min(limits)
    return max(left, 0) / GIB, what


def address_space_gib() -> float | None:
    """Returns the GiB that `ulimit -v` leaves each process; None if it sets no limit."""
    soft = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if soft == resource.RLIM_INFINITY else soft / GIB


def host_lines(rank_gib: float, ranks: int, remedy: str) -> list[str]:
    """Says how many of the ranks this host has room for; a warning, as the last line, where it is
    too few.

    rank_gib: the most that a rank takes of the host; ranks: planned in all. Those that torchrun
    started here are to fit; of those that --ranks adds nobody knows where they will be.
    """
    available, what = available_gib()
    # this dry run's own ranks end before the run begins
    here = min(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    room = int(available / rank_gib)
    lines = [f"  host     {rank_gib:.2f} a rank; {available:.2f} available here ({what}): room for "
             f"{room} of {counted(ranks, 'rank')}"]  # fmt: skip
    space = address_space_gib()
    if here * rank_gib > available:
        lines.append(
            f"warning: {counted(here, 'rank')} x {rank_gib:.2f} = {here * rank_gib:.2f} GiB do "
            "not fit into "
            f"the {available:.2f} GiB that are available on this host: {remedy}"
        )
    elif space is not None and rank_gib > space:
        lines.append(
            f"warning: a rank takes {rank_gib:.2f} GiB, and `ulimit -v` leaves each process "
            f"{space:.2f} GiB: raise it (ulimit -v unlimited), or {remedy}"
        )
    return lines
