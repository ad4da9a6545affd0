"""Things that go wrong: every rank ends within seconds, with one story that says what and where."""

import json
import os
import re
import signal
import subprocess
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from programs import CONFIG, finish, start, torchrun, wait_for, write_task

LIMIT_S = 10

FAULT = """
import os, time
def boom(*args, **kwargs):
    open("struck", "w").write(str(time.time()))
    raise OSError("disk on fire")
if os.environ["RANK"] == "1":
    import {module}
    {module}.{name} = boom
"""
SITES = {
    "data": ("data", "spmdrl.data", "PromptDataset.prompt"),
    "rollout": ("rollout", "spmdrl.collect", "sample_questions"),
    "reward": ("reward", "spmdrl.rewards.runner", "RewardRunner.score"),
    "checkpoint": ("checkpoint", "torch", "save"),
    # amid training the other rank is inside a collective that never completes
    "training": ("update_actor", "spmdrl.algo.objectives", "masked_max"),
}


@pytest.fixture
def folder(tmp_path, qwen3):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize("site", SITES)
def test_an_exception_on_one_rank_ends_all_with_one_story(folder, site):
    phase, module, name = SITES[site]
    fault = FAULT.format(module=module, name=name)
    Path(folder, "cfg.py").write_text(CONFIG + fault)
    every = "1" if site == "checkpoint" else "0"
    done = torchrun(
        folder, 2, "--config", "cfg.py", "--data.eval", "None", "--checkpoint.every_steps", every
    )
    took = time.time() - float(Path(folder, "struck").read_text())
    assert done.code == 1
    assert took < LIMIT_S
    story = f"failed in phase '{phase}': OSError: "
    told = [line for line in done.output.splitlines() if line.startswith("spmdrl: rank 1 on ")]
    assert len(told) == 1, done.output[-4000:]
    assert story in told[0]
    assert told[0].endswith("disk on fire")
    report = json.loads(Path(folder, "run/errors/rank_1.json").read_text())
    assert report["phase"] == phase
    assert "in boom" in report["details"]
    # torchrun's own summary, the last thing on the terminal, says it too
    assert story in done.output.split("Root Cause")[-1]


def test_a_killed_rank_ends_all(folder):
    proc = start(folder, 2, "--config", "cfg.py", "--steps", "1000")
    wait_for(folder, "step 2/1000", proc)
    victim = pids_of(proc, "spmdrl.ppo")[1]
    os.kill(victim, signal.SIGKILL)
    done = finish(proc, folder, LIMIT_S)
    assert done.code == 1
    assert f"Signal 9 (SIGKILL) received by PID {victim}" in done.output.split("Root Cause")[-1]
    assert "spmdrl: rank 0 on" not in done.output  # the neighbour only felt it


def test_ctrl_c_ends_quietly(folder):
    proc = start(folder, 2, "--config", "cfg.py", "--steps", "1000")
    wait_for(folder, "step 2/1000", proc)
    os.killpg(proc.pid, signal.SIGINT)  # what a terminal does: to torchrun and to every rank
    done = finish(proc, folder, LIMIT_S)
    assert done.code != 0
    assert done.output.count("spmdrl: interrupted") == 1


def test_a_frozen_rank_is_named(folder):
    sooner = "\nfrom spmdrl.watchdog import Watchdog\nWatchdog.__init__.__defaults__ = (8.0,)\n"
    Path(folder, "cfg.py").write_text(CONFIG + sooner)  # lost_s, of 20 s
    proc = start(folder, 2, "--config", "cfg.py", "--steps", "1000")
    wait_for(folder, "step 2/1000", proc)
    frozen = pids_of(proc, "spmdrl.ppo")[1]
    os.kill(frozen, signal.SIGSTOP)
    wait_for(folder, "spmdrl: rank 1 on ", proc, 30)
    os.kill(frozen, signal.SIGCONT)  # else torchrun takes 30 s to see that it does not end
    done = finish(proc, folder, LIMIT_S)
    assert done.code == 1
    assert "spmdrl: rank 1 on " in done.output
    assert re.search("no sign of life for [89] s", done.output)


def test_too_many_invalid_rewards_stop_the_run_and_are_shown(folder):
    text = CONFIG.replace(
        "    return float(", "    raise KeyError('no such key')\n    return float("
    )
    Path(folder, "cfg.py").write_text(text)
    done = torchrun(folder, 2, "--config", "cfg.py", "--data.eval", "None")
    assert done.code == 1
    assert "32 of 32 samples have no reward" in done.output
    assert "KeyError: 'no such key'" in done.output
    rows = [json.loads(x) for x in Path(folder, "run/samples/step_1.jsonl").open()]
    assert len(rows) == 32  # all of them, with the traceback
    assert "line 5, in reward" in rows[-1]["invalid"]


def test_invalid_samples_are_masked_and_counted(folder):
    text = CONFIG.replace(
        "    return", "    if ground_truth == '5':\n        raise KeyError('five')\n    return"
    )
    Path(folder, "cfg.py").write_text(text)
    done = torchrun(folder, 2, "--config", "cfg.py", "--data.shuffle", "False", "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    row = [json.loads(x) for x in Path(folder, "run/metrics.jsonl").open()][1]
    rows = [json.loads(x) for x in Path(folder, "run/samples/step_1.jsonl").open()]
    assert row["reward/invalid"] == 4  # of the first eight prompts, 1+4=5 alone
    assert sum(r["invalid"] is not None for r in rows) == 4
    assert all("five" in r["invalid"] for r in rows if r["ground_truth"] == "5")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--stepz", "2"], "nearest: steps"),
        (["--model", "/no/such/model"], "no such folder: '/no/such/model'"),
        (["--data.train", "gone.jsonl"], "gone.jsonl"),
        (["--ranks", "4"], "--ranks 4 is for --dry-run"),
    ],
)
def test_config_errors_are_said_once_before_any_engine(folder, args, words):
    done = torchrun(folder, 2, "--config", "cfg.py", *args)
    said = [line for line in done.output.splitlines() if line.startswith("spmdrl: config error")]
    assert len(said) == 1, done.output
    assert words in said[0]
    assert "exitcode  : 2" in done.output
    assert "exitcode  : 1 " not in done.output
    assert "Traceback" not in done.output.split("torchrun")[0].split("elastic")[0]


def test_dry_run_prints_the_plan(folder):
    done = torchrun(folder, 2, "--config", "cfg.py", "--dry-run", "--ranks", "4")
    assert done.code == 0, done.output
    for words in ("prompts_per_step=8,", "8 prompts x 4 samples = 32 samples a step",
                  "actor    ranks 0-3: dp 1 x fsdp 4", "M parameters; weights 0.00, gradients",
                  "reward of its ground truth '2' as the answer: 1.01",
                  "reward of its ground truth '11' as the answer: 1.02"):  # fmt: skip
        assert done.output.count(words) == 1, (words, done.output)
    assert not Path(folder, "run/metrics.jsonl").exists()


def pids_of(proc: BaseProcess, module: str) -> list[int]:
    """The ranks' processes in rank order: children of torchrun that run `module`."""
    out = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(proc.pid)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [int(line.split()[0]) for line in out.splitlines() if module in line]
