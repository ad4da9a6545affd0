"""Samples, a reward that scores them in its processes, and what its processes leave behind."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

from spmdrl.config import RewardConfig
from spmdrl.rewards.runner import RewardRunner
from spmdrl.types import Prompt, Sample


def sample(response: str, truth: Any = "5", source: str = "a", extra: dict | None = None) -> Sample:
    prompt = Prompt(3, [1, 2], source, truth, "2+3?", extra or {})
    lists: tuple[list, list, list, list] = ([4, 5], [0.0, 0.0], [1, 1], [0, 0])
    return Sample(prompt, 0, 1, *lists, "stop", response)


def run(reward: Any, samples: list[Sample], **settings: Any) -> list[Sample]:
    runner = RewardRunner(reward, RewardConfig(**settings))
    try:
        runner.score(samples)
    finally:
        runner.close()
    for s in samples:
        assert (s.reward is None) == (s.invalid is not None)
    return samples


def children() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [p for p in found if any("rewards/workers/worker.py" in word for word in p.cmdline())]


def wait_until(condition, limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def make_leave_children():
    def leave_children(folder, name):
        """A child, one in a session of its own, and a daemon, which has lost its parent."""
        for i, is_leader in enumerate((False, True)):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=is_leader)
            Path(folder, f"{name} {i}").write_text(str(child.pid))
        daemon = Path(folder, f"{name} 2")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                daemon.write_text(str(os.getpid()))
                os.execvp("sleep", ["sleep", "1000"])
            os._exit(0)
        while not (daemon.exists() and daemon.read_text()):
            time.sleep(0.01)

    return leave_children
