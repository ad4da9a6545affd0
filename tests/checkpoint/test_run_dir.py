"""A run's folder belongs to one process at a time, and to nobody once that has ended."""

import subprocess
import sys
import time

import pytest

from spmdrl.checkpoint import run_dir as run_lock

HOLD = """
import sys, time
from pathlib import Path
from spmdrl.checkpoint import run_dir as run_lock
fd, problem = run_lock.take(Path(sys.argv[1]))
print(problem, flush=True)
time.sleep(60)
"""


@pytest.mark.clock
def test_another_process_is_named_and_a_killed_one_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "PATIENCE_S", 0.3)
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "None\n"
        fd, problem = run_lock.take(tmp_path / "run")
        assert fd is None
        assert problem is not None and f"in use by process {holder.pid} on " in problem
        holder.kill()
        holder.wait()
    begin = time.monotonic()
    fd, problem = run_lock.take(tmp_path / "run")
    assert problem is None and isinstance(fd, int)
    assert time.monotonic() - begin < 0.3


def test_what_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    fd, problem = run_lock.take(tmp_path / "file" / "run")
    assert fd is None
    assert str(tmp_path / "file" / "run") in problem and "Not a directory" in problem
