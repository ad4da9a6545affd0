"""Two machines: a rank dies, then the cable is pulled; nobody hangs, and the run goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from programs import CONFIG, ROOT, metrics_of, write_task
from virtual_hosts import Host, Network, why_not

pytestmark = pytest.mark.ranks

LOST_S = 5
RANKS = {"left": 2, "right": 1}
STEPS = 20
FAILURE = (
    r"spmdrl: rank (?P<rank>\d) on (?P<host>\w+) failed in phase '[a-z_ ]+': "
    r"no (sign of life|rendezvous store) for [567] s.*; last checkpoint: (?P<checkpoint>\S+)"
)


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("hosts"), ["left", "right"])
    yield network
    network.close()


class Side:
    """launch/multinode.sh on one of the hosts, output to folder/<host>.log."""

    def __init__(self, host: Host, folder: Path, head: str, *args: str, restarts: int = 0) -> None:
        self.host, self.log = host, folder / f"{host.name}.log"
        self.seen = 0  # what of the log is known already
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MAX_RESTARTS": str(restarts),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "RANKS_PER_NODE": str(RANKS[host.name]),
        }  # fmt: skip
        command = ["env", f"--chdir={folder}", str(ROOT / "launch/multinode.sh"), "2", head]
        with self.log.open("wb") as log:
            self.process = host.start(
                [*command, "cfg.py", "--data.eval", "None", "--lost_timeout_s", str(LOST_S),
                 "--checkpoint.every_steps", "2", "--steps", str(STEPS), *args],
                env=env, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def text(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[psutil.Process]:
        """In rank order."""
        found = {}
        for process in self.host.processes():
            with suppress(psutil.Error):
                if process.cmdline()[1:4] == ["-u", "-m", "spmdrl.ppo"]:
                    found[int(process.environ()["RANK"])] = process
        return [found[rank] for rank in sorted(found)]


def wait_for(words: str, sides: list[Side], limit_s: float = 90) -> str:
    """Until one of them has said it."""
    end = time.monotonic() + limit_s
    while True:
        for side in sides:
            if found := re.search(words, side.text()[side.seen :]):
                return found[0]
        assert time.monotonic() < end, "\n".join(side.text()[-4000:] for side in sides)
        time.sleep(0.05)


@pytest.mark.timeout(480)  # three starts; three quarters of a minute where it is quiet
def test_a_cut_cable_ends_both_sides_and_the_run_goes_on(network, qwen3, tmp_path):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    slow = "    import os, time\n    time.sleep(0 if os.path.exists('go') else 0.05)\n"
    Path(tmp_path, "cfg.py").write_text(CONFIG.replace("    return", slow + "    return"))
    both = [network.hosts["right"], network.hosts["left"]]
    head = network.hosts["left"].address
    sides = [Side(host, tmp_path, head) for host in both]
    wait_for("saved run/checkpoints/step_00000002", sides)
    assert [len(side.ranks()) for side in sides] == [1, 2]

    network.cut("right")
    cut_at = time.monotonic()
    for side in sides:
        assert side.process.wait(LOST_S + 20) == 1
        assert not side.ranks()
        told = re.search(FAILURE, side.text())
        assert told, side.text()[-5000:]
        last = told["checkpoint"]  # by name: nobody is to wait for a disk now
        assert Path(tmp_path, last, "manifest.json").exists()
        assert told["host"] == ("right" if told["rank"] == "2" else "left")
    took_s = time.monotonic() - cut_at
    assert took_s < LOST_S + 10

    network.mend("right")
    sides = [Side(host, tmp_path, head, "--resume", last, restarts=1) for host in both]
    first = steps_in(wait_for(r"resumed from \S+: \d+ steps done", sides))
    wait_for(f"saved run/checkpoints/step_{first + 2:08d}", sides)
    # torchrun starts the ranks of both machines again, but this one alone counts a restart: all go
    # on from the newest checkpoint all the same, not from the one they were given
    os.kill(sides[0].ranks()[0].pid, signal.SIGKILL)
    log = next(side for side in sides if "resumed from" in side.text())
    log.seen = len(log.text())
    second = steps_in(wait_for(r"resumed from \S+: \d+ steps done", [log]))
    assert first < second <= first + 6
    Path(tmp_path, "go").touch()
    for side in sides:
        assert side.process.wait(90) == 0, side.text()[-5000:]
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
    sides = [Side(h, tmp_path, head, "--start_timeout_s", "8") for h in network.hosts.values()]
    for side in sides:
        assert side.process.wait(90) == 1
    said = "".join(side.text() for side in sides)
    cause = r"ranks \[0, 1, 2\] of 3 found no connection to all others within 8 s .*IFNAME"
    assert re.search(rf"spmdrl: rank \d on \w+ failed in phase 'start': {cause}", said), said
    assert "start_process_group" in said  # the stack


def steps_in(line: str) -> int:
    return int(line.split()[-3])
