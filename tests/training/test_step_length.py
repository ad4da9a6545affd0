"""What one training step runs is short enough to be read: CONTRIBUTING.md, "Reading the code"."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST = 4000  # lines of the functions that a plain step calls


def run(program: str, *arguments: str | Path) -> str:
    """Returns what a program prints."""
    command = [sys.executable, ROOT / program, *arguments]
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_step_runs_what_can_be_read(tmp_path: Path) -> None:
    """Of a smaller step than the example's, which says less of its progress."""
    run("examples/add2/make_assets.py", tmp_path)
    source = tmp_path / "step.py"
    printed = run(
        "tests/step_functions.py", "--config", ROOT / "examples/add2/config.py",
        "--source", source, "--model", tmp_path / "model",
        "--data.train", tmp_path / "train.parquet", "--run_dir", tmp_path / "run",
        "--rollout.enforce_eager", "True", "--data.prompts_per_step", "4",
        "--rollout.max_tokens", "8",
    )  # fmt: skip
    functions = re.search(r"^ *(\d+) of +\d+  lines in \d+ files$", printed, re.MULTILINE)
    lines = len(source.read_text().splitlines())
    assert functions is not None and 2000 < int(functions[1]) < lines
    words = (ROOT / "CONTRIBUTING.md").read_text()
    said = re.search(r"([\d,]+) lines \(([\d,]+) of them in functions\)", words)
    assert said is not None
    most, most_of_functions = (int(number.replace(",", "")) for number in said.groups())
    assert lines <= most <= MOST and int(functions[1]) <= most_of_functions
