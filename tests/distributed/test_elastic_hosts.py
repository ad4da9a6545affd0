"""A job of two machines loses one, goes on from memory, gains it again; its numbers stay."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from launchers_on_hosts import Side, wait_for
from programs import CONFIG, metrics_of, train, write_task
from virtual_hosts import Network, why_not

pytestmark = pytest.mark.ranks

STEPS = 16
start = partial(Side, nodes="1:2", ranks={"left": 1, "right": 1}, restarts=2)
SETTINGS = ("--data.eval", "None", "--lost_timeout_s", 5, "--checkpoint.every_steps", 100,
            "--steps", STEPS)  # fmt: skip
GATE = '''
    import os, time
    while True:
        step = len(open("run/metrics.jsonl").readlines()) if os.path.exists("run/metrics.jsonl") else 0
        if step < int(open("gate").read()):
            break
        time.sleep(0.02)
'''


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("hosts"), ["left", "right"])
    for host in network.hosts.values():  # each has memory of its own
        host.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
    yield network
    network.close()


def test_a_host_is_lost_and_comes_back(network, qwen3, tmp_path):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    Path(tmp_path, "gate").write_text("5")
    Path(tmp_path, "cfg.py").write_text(CONFIG.replace("    return", GATE + "    return", 1))
    left, right = network.hosts["left"], network.hosts["right"]
    sides = [start(host, tmp_path, left.address, *SETTINGS) for host in (left, right)]
    wait_for("step 5/", sides)
    for process in right.processes():
        if process.pid != right.pid:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    lost_at = time.monotonic()
    Path(tmp_path, "gate").write_text("9")
    print(wait_for("elastic: .*", sides), time.monotonic() - lost_at)
    wait_for("step 9/", sides)
    sides[0].seen = len(sides[0].text())
    joined_at = time.monotonic()
    sides[1] = start(right, tmp_path, left.address, *SETTINGS)
    time.sleep(4)
    Path(tmp_path, "gate").write_text("100")
    print(wait_for("elastic: .*", sides), time.monotonic() - joined_at)
    for side in sides:
        assert side.wait(90) == 0, side.text()[-5000:]
    print(sides[0].text())
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, STEPS + 1))
