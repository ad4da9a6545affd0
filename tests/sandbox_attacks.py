"""Attacks on the sandbox, and what holds after any of them."""

from __future__ import annotations

import gc
import os
import textwrap
import time

import psutil

from spmdrl.rewards.sandbox import sandbox
from spmdrl.rewards.sandbox.sandbox import Limits, Result, SandboxError, run_code

TIGHT = Limits(wall_s=3.0, cpu_s=1.0, memory_mib=128, processes=4, file_mib=2, output_kib=16)


def there_is_one(form: str) -> bool:
    try:
        sandbox.try_out(form == "weak")
    except (SandboxError, OSError):
        return False
    return True


def left() -> list[psutil.Process]:
    """Processes of any sandbox, found by what their Python was told to run. Those that another
    worker of pytest-xdist has started, which runs another file at the same time, are left out."""
    found, me = [], psutil.Process()
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    others = {*me.parent().children()} - {me} if is_worker else set()
    for process in psutil.process_iter():
        try:
            is_one = sandbox.BOOT in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
            if is_one and others.isdisjoint(process.parents()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_until(condition, limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return holds


def attack(program: str, limits: Limits = TIGHT, stdin: str = "") -> Result:
    """Runs it, and asserts what holds after any attack."""
    gc.collect()  # may close files of other tests
    mine = set(psutil.Process().children(recursive=True))
    fds, began = os.listdir("/proc/self/fd"), time.monotonic()
    result = run_code(textwrap.dedent(program), stdin, limits)
    assert time.monotonic() - began < limits.wall_s + 4 * sandbox.GRACE_S
    assert set(psutil.Process().children(recursive=True)) <= mine
    assert len(os.listdir("/proc/self/fd")) == len(fds)
    assert "ESCAPED" not in result.stdout, result
    assert len(result.stdout) <= limits.output_kib << 10 >= len(result.stderr)
    return result
