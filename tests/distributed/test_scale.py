"""The benchmark of what grows with ranks: its command, and its counts against real ranks."""

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

COMMAND = "examples/bench/scale.py"
REAL, MANY = 6, 1024


@pytest.mark.ranks
def test_counts_are_those_of_real_ranks_and_stay_small_at_1024(tmp_path):
    done = subprocess.run(
        [sys.executable, COMMAND, "--only", "descriptors,phase_end,store", "--real", str(REAL),
         "--simulated", str(MANY), "--points", str(tmp_path / "points"), "--draw",
         str(tmp_path / "drawn.png")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = defaultdict(dict)
    for line in Path(tmp_path, "points").read_text().splitlines():
        point = json.loads(line)
        found[point["series"], point["kind"]][point["ranks"]] = point["value"]

    counted, real = found["store, start", "simulated"], found["store, start", "measured"]
    assert counted[REAL] == real[REAL] < found["store, start, before", "measured"][REAL]
    counted, real = found["files, after", "simulated"], found["files, after", "measured"]
    assert counted[REAL] - 2 <= real[REAL] <= counted[REAL] + 2  # and what a process opens once
    assert counted[MANY] < 100
    counted, real = found["files, all groups", "simulated"], found["files, all groups", "measured"]
    assert counted[REAL] - 2 <= real[REAL] <= counted[REAL] + 2
    assert found["store, ten phases and a report", "measured"][REAL] == 0
    assert found["store, watchdog, a second", "measured"][REAL] < 10

    ring, tree = (found[f"phase end, {kind}", "model"][MANY] for kind in ("ring", "tree"))
    assert tree < ring / 50
    assert Path(tmp_path, "drawn.png").stat().st_size > 10_000
    assert "| store, start | operations | simulated |" in done.stdout
