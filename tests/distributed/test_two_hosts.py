"""Two machines: a rank dies, then the cable is pulled; nobody hangs, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from launchers_on_hosts import Side, is_running, two_hosts, wait_for
from programs import CONFIG, metrics_of, write_task
from virtual_hosts import Network

pytestmark = pytest.mark.ranks

LOST_S = 5
STEPS = 20
RANKS = {"left": 2, "right": 1}
SETTINGS = ("--data.eval", "None", "--lost_timeout_s", LOST_S, "--checkpoint.every_steps", 2,
            "--steps", STEPS)  # fmt: skip
start = partial(Side, nodes="2", ranks=RANKS)
FAILURE = (
    r"spmdrl: rank (?P<rank>\d) on (?P<host>\w+) failed in phase '[a-z_ ]+': "
    r"no (sign of life|rendezvous store) for [567] s.*; last checkpoint: (?P<checkpoint>\S+)"
)


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as network:
        yield network


def test_a_cut_cable_ends_both_sides_and_the_run_goes_on(network, qwen3, tmp_path):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    slow = "    import os, time\n    time.sleep(0 if os.path.exists('go') else 0.05)\n"
    Path(tmp_path, "cfg.py").write_text(CONFIG.replace("    return", slow + "    return"))
    both = [network.hosts["right"], network.hosts["left"]]
    head = network.hosts["left"].address
    sides = [start(host, tmp_path, head, *SETTINGS) for host in both]
    wait_for("saved run/checkpoints/step_00000002", sides)
    ranks = [side.ranks() for side in sides]
    assert [len(pids) for pids in ranks] == [1, 2]

    network.cut("right")
    cut_at = time.monotonic()
    for side, pids in zip(sides, ranks, strict=True):
        assert side.wait(LOST_S + 20) == 1
        assert not any(map(is_running, pids))
        told = re.search(FAILURE, side.text())
        assert told, side.text()[-5000:]
        last = told["checkpoint"]  # by name: nobody is to wait for a disk now
        assert Path(tmp_path, last, "manifest.json").exists()
        assert told["host"] == ("right" if told["rank"] == "2" else "left")
    took_s = time.monotonic() - cut_at
    assert took_s < LOST_S + 10

    network.mend("right")
    sides = [start(host, tmp_path, head, *SETTINGS, "--resume", last, restarts=1) for host in both]
    first = steps_in(wait_for(r"resumed from \S+: \d+ steps done", sides))
    wait_for(f"saved run/checkpoints/step_{first + 2:08d}", sides)
    # torchrun starts the ranks of both machines again, but this one alone counts a restart: all go
    # on from the newest checkpoint all the same, not from the one they were given
    os.kill(sides[0].ranks()[0], signal.SIGKILL)
    log = next(side for side in sides if "resumed from" in side.text())
    log.seen = len(log.text())
    second = steps_in(wait_for(r"resumed from \S+: \d+ steps done", [log]))
    assert first < second <= first + 6
    Path(tmp_path, "go").touch()
    for side in sides:
        assert side.wait(90) == 0, side.text()[-5000:]
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_network_that_does_not_connect_is_told(network, qwen3, tmp_path, monkeypatch):
    """All ranks find the store; the interface that gloo is told to use leads nowhere."""
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(CONFIG)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "dummy0")
    for number, host in enumerate(network.hosts.values()):
        host.ip("link add dummy0 type veth peer name dummy1")
        host.ip(f"addr add 10.88.0.{number}/32 dev dummy0")
        host.ip("link set dummy1 up")
        host.ip("link set dummy0 up")
        host.ip("route add 10.88.0.0/24 via 10.77.0.1")
    head = network.hosts["left"].address
    sides = [
        start(h, tmp_path, head, *SETTINGS, "--start_timeout_s", "8")
        for h in network.hosts.values()
    ]
    for side in sides:
        assert side.wait(90) == 1
    said = "".join(side.text() for side in sides)
    cause = r"ranks \[0, 1, 2\] of 3 found no connection to all others within 8 s .*IFNAME"
    assert re.search(rf"spmdrl: rank \d on \w+ failed in phase 'start': {cause}", said), said
    assert "start_process_group" in said  # the stack


def steps_in(line: str) -> int:
    return int(line.split()[-3])
