"""The short form of `make soak`, with the tiny model: examples/arithmetic/soak.py is the test."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from programs import CONFIG, ROOT, write_task

pytestmark = pytest.mark.ranks

RELIABLE = """
def reward(response, ground_truth):
    if len(response) % 9 == 4:
        raise KeyError("a reward that fails")
    if len(response) % 9 == 5:
        return float("nan")
    return float(response.startswith(ground_truth)) + 0.01 * len(response)
"""


def test_a_run_with_faults_has_the_numbers_of_one_left_alone(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    text = CONFIG.replace("\nconfig = ", RELIABLE + "\nconfig = ")
    text = text.replace("every_steps=0", "every_steps=4").replace(
        "steps=2,", "steps=2, lost_timeout_s=5.0,"
    )
    Path(tmp_path, "cfg.py").write_text(text.replace("n=4,", "n=4, static_split=True,"))
    script = ROOT / "examples" / "arithmetic" / "soak.py"
    options = [
        "--config",
        "cfg.py",
        "--steps",
        "12",
        "--faults",
        "2",
        "--seed",
        "7",
        "--out",
        "out",
    ]
    done = subprocess.run(
        [sys.executable, str(script), *options], cwd=tmp_path, timeout=450, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    report = json.loads(Path(tmp_path, "out/soak.json").read_text())
    assert {fault["kind"] for fault in report["faults"]} == {"SIGKILL", "SIGSTOP"}
    assert all(fault["back_s"] > 1 for fault in report["faults"])
    assert all(check["holds"] for check in report["checks"]), report["checks"]
    rows = [json.loads(line) for line in Path(tmp_path, "out/faults/metrics.jsonl").open()]
    assert sum(row.get("reward/invalid", 0) for row in rows) > 0
