"""examples/bench/resharding.py, which the GPU session runs, has its stand-ins of both roles in step
with what a push asks of them."""

import json
import os
import subprocess
import sys

import pytest
from programs import ROOT

pytestmark = pytest.mark.ranks


def test_its_smallest_case_runs():
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/bench/resharding.py"), "tiny"], text=True,
        env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=150,
    )  # fmt: skip
    [row] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert "error" not in row, done.stderr[-3000:]
    assert row["case"] == "tiny" and row["tensors"] == 4 and row["ours_ms"] > 0
    assert row["planned_MB"] >= row["moved_MB"] >= 0
