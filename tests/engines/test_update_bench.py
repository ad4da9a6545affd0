"""examples/bench/update.py measures a case and says what it is to say."""

import json
import os
import subprocess
import sys

import pytest
from programs import ROOT

pytestmark = pytest.mark.ranks


def test_a_case_is_measured():
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/bench/update.py"), "--shape", "tiny", "--sequences",
         "2", "--question", "3", "--answer", "5", "--runs", "1", "--cases", "usual;torch"],
        text=True, env=os.environ | {"PYTHONPATH": path}, capture_output=True, timeout=200,
    )  # fmt: skip
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["case"] for row in rows] == ["usual", "torch"], done.stderr[-3000:]
    for row in rows:
        assert row["tokens_per_s"] == pytest.approx(16 / row["update_s"], abs=1)
        assert row["ready_s"] > row["first_update_s"] > 0
