"""A limit that a shell has set is named where something fails for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from spmdrl.distributed import limits

FAILS = {
    "ulimit -v limits the address space of each process to 4096 MiB":
        ("ulimit -v 4194304", "bytearray(1 << 33)", "MemoryError"),
    "ulimit -n limits open files to 40":
        ("ulimit -n 40", "[open('/dev/null') for _ in range(50)]", "OSError: [Errno 24]"),
    "ulimit -f limits a file to 1 MiB":
        ("ulimit -f 1024", "open('big', 'wb', 0).write(bytes(1 << 20)); "
         "open('big', 'ab', 0).write(b'x')", "OSError: [Errno 27]"),
}  # fmt: skip
SCRIPT = """
from spmdrl.distributed.limits import limit_of, warn_of_limits
import psutil
warn_of_limits()
try:
    {0}
except (MemoryError, OSError) as error:
    cause = f"{{type(error).__name__}}: {{error}}"
    print(cause + limit_of(cause))
"""


@pytest.mark.programs
@pytest.mark.parametrize("named", FAILS)
def test_the_limit_is_named(tmp_path, named):
    limit, statement, cause = FAILS[named]
    (tmp_path / "script.py").write_text(SCRIPT.format(statement))
    done = subprocess.run(
        ["bash", "-c", f"{limit}; {sys.executable} script.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.startswith(cause), (done.stdout, done.stderr)
    assert named in done.stdout
    assert done.stderr.startswith(f"spmdrl: {named}") == ("-v" in named), done.stderr


def test_no_limit_is_named_that_is_not_set_or_not_to_blame(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    assert limits.limit_of("KeyError: 'no such key'") == ""
    assert limits.limit_of("OSError: [Errno 28] No space left on device") == ""
    assert not any("cgroup" in text for text in limits.memory_limits())
    (tmp_path / "memory.max").write_text("max\n")
    assert not any("cgroup" in text for text in limits.memory_limits())
    (tmp_path / "memory.max").write_text(f"{512 << 20}\n")
    assert limits.memory_limits()[-1] == "its cgroup has 512 MiB for all processes"
    assert "its cgroup has 512 MiB" in limits.limit_of("RuntimeError: std::bad_alloc")


def test_kills_for_want_of_memory_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    before = limits.kills_for_memory()
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert limits.kills_for_memory() == before + 2


def test_locked_memory_that_is_too_little_for_infiniband_is_told(tmp_path, monkeypatch, capsys):
    """The limit is real, in this process; the adapter and the capability are files."""
    adapters, status = tmp_path / "infiniband", tmp_path / "status"
    monkeypatch.setattr(limits, "INFINIBAND", adapters)
    monkeypatch.setattr(limits, "STATUS", status)
    status.write_text("Name:\tpython\nCapEff:\t0000000000000000\n")
    before = limits.resource.getrlimit(limits.resource.RLIMIT_MEMLOCK)
    limits.resource.setrlimit(limits.resource.RLIMIT_MEMLOCK, (65536, before[1]))
    try:
        limits.warn_of_locked_memory()
        adapters.mkdir()
        limits.warn_of_locked_memory()
        assert capsys.readouterr().err == ""
        (adapters / "mlx5_0").mkdir()
        failed = "DistBackendError: NCCL error in: NCCLUtils.cpp:94, unhandled system error"
        assert limits.limit_of(failed) == " (ulimit -l limits locked memory to 0.0625 MiB)"
        monkeypatch.setattr(limits, "LEAST_LOCKED", 1 << 62)
        limits.warn_of_locked_memory()
        assert limits.resource.getrlimit(limits.resource.RLIMIT_MEMLOCK) == (before[1], before[1])
        told = "" if before[1] == limits.resource.RLIM_INFINITY else "spmdrl: ulimit -l limits"
        assert capsys.readouterr().err.startswith(told)
        limits.resource.setrlimit(limits.resource.RLIMIT_MEMLOCK, (65536, before[1]))
        status.write_text("CapEff:\t000001ffffffffff\n")
        assert limits.limit_of(failed) == ""
    finally:
        limits.resource.setrlimit(limits.resource.RLIMIT_MEMLOCK, before)
