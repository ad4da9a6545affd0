"""The short form of `make soak`, with the tiny model: examples/arithmetic/soak.py is the test.

Its launchers and their ranks are forks, which have imported all; what else it does is its own.
"""

import importlib
import json
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

import pytest
from programs import (
    CONFIG,
    ROOT,
    RUNNING,
    ForkedRank,
    become,
    environment,
    finish,
    pids_of,
    write_task,
)
from ranks import SERVER

pytestmark = pytest.mark.ranks

RELIABLE = """
def reward(response, ground_truth):
    if len(response) % 9 == 4:
        raise KeyError("a reward that fails")
    if len(response) % 9 == 5:
        return float("nan")
    return float(response.startswith(ground_truth)) + 0.01 * len(response)
"""


class ForkedLauncher(ForkedRank):
    """As much of a Popen as the soak uses, of python -m MODULE ...; of the soak's own session."""

    def __init__(self, command: list[str]) -> None:
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=run_module, args=command[2:3] + [command[3:]])
        self.process.start()
        assert self.process.pid is not None
        self.pid, self.args = self.process.pid, command

    def kill(self) -> None:
        if self.process.exitcode is None:
            self.process.kill()


def run_module(module: str, args: list[str]) -> None:
    sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def soak(folder: str, options: list[str]) -> None:
    """The command, in a process that has imported what its launchers would."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    os.chdir(folder)
    become(Path("log"), environment())
    subprocess_handler.Popen = ForkedRank
    sys.path.insert(0, str(ROOT / "examples/arithmetic"))
    script = importlib.import_module("soak")
    script.launched = ForkedLauncher
    script.ranks_of = lambda launcher: dict(enumerate(pids_of(launcher)))  # some forks show no RANK
    sys.argv[1:] = options
    script.main()


def test_a_run_with_faults_has_the_numbers_of_one_left_alone(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    text = CONFIG.replace("\nconfig = ", RELIABLE + "\nconfig = ")
    text = text.replace("every_steps=0", "every_steps=4").replace(
        "steps=2,", "steps=2, lost_timeout_s=5.0,"
    )
    Path(tmp_path, "cfg.py").write_text(text.replace("n=4,", "n=4, static_split=True,"))
    Path(tmp_path, "log").touch()
    options = ["--config", "cfg.py", "--steps", "12", "--faults", "2", "--seed", "7"]
    process = SERVER.Process(target=soak, args=(str(tmp_path), [*options, "--out", "out"]))
    process.start()
    RUNNING.append(process)
    done = finish(process, tmp_path, 450)
    assert done.code == 0, done.output[-6000:]
    report = json.loads(Path(tmp_path, "out/soak.json").read_text())
    assert {fault["kind"] for fault in report["faults"]} == {"SIGKILL", "SIGSTOP"}
    assert all(fault["back_s"] > 1 for fault in report["faults"])
    assert all(check["holds"] for check in report["checks"]), report["checks"]
    rows = [json.loads(line) for line in Path(tmp_path, "out/faults/metrics.jsonl").open()]
    assert sum(row.get("reward/invalid", 0) for row in rows) > 0
