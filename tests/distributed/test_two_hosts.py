"""Two machines: a rank dies, then the cable is pulled; nobody hangs, and the run goes on."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
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
from programs import CONFIG, ROOT, ForkedRank, metrics_of, pids_of, write_task
from ranks import SERVER, become
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from virtual_hosts import Host, Network, why_not

pytestmark = pytest.mark.ranks

LOST_S = 5
NAMES = ("net", "uts", "mnt", "pid")  # of the namespaces of a host
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
    """launch/multinode.sh on one of the hosts, output to folder/<host>.log.

    What it starts as python is written down instead, and done on that host by a process that has
    imported torch already; so have the ranks, which are forks of it.
    """

    def __init__(self, host: Host, folder: Path, head: str, *args: str, restarts: int = 0) -> None:
        self.host, self.log = host, folder / f"{host.name}.log"
        self.seen = 0  # what of the log is known already
        stand_in = folder / "bin"
        stand_in.mkdir(exist_ok=True)
        Path(stand_in, "python").write_text('#!/bin/sh\nprintf "%s\\0" "$@" -- && env -0\n')
        Path(stand_in, "python").chmod(0o755)
        env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | {
            "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "MAX_RESTARTS": str(restarts),
            "PATH": f"{stand_in}:{os.environ['PATH']}", "RANKS_PER_NODE": str(RANKS[host.name]),
        }  # fmt: skip
        command = [str(ROOT / "launch/multinode.sh"), "2", head, "cfg.py", "--data.eval", "None",
                   "--lost_timeout_s", str(LOST_S), "--checkpoint.every_steps", "2",
                   "--steps", str(STEPS), *args]  # fmt: skip
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        words, _, settings = done.stdout.partition("\0--\0")
        launcher = words.split("\0"), dict(x.split("=", 1) for x in settings.split("\0") if x)
        self.log.write_text("")
        self.process = SERVER.Process(target=on_host, args=(host.pid, str(self.log), *launcher))
        self.process.start()

    def wait(self, limit_s: float) -> int | None:
        self.process.join(limit_s)
        return self.process.exitcode

    def text(self) -> str:
        return self.log.read_text()

    def ranks(self) -> list[int]:
        """Process ids in rank order."""
        [launcher] = psutil.Process(self.process.pid).children()
        return pids_of(launcher.pid)


def on_host(host: int, log: str, words: list[str], env: dict[str, str]) -> None:
    """The command `python WORDS` on the host with this process id, as nsenter would start it."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{host}/ns/{name}", os.O_RDONLY) for name in NAMES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
    launcher = multiprocessing.get_context("fork").Process(target=launch, args=(log, words, env))
    launcher.start()  # a process is of another pid namespace than the one that entered it
    launcher.join()
    sys.exit(launcher.exitcode)


def launch(log: str, words: list[str], env: dict[str, str]) -> None:
    assert words[:2] == ["-m", "spmdrl.launch"], words
    os.setsid()
    os.chdir(Path(log).parent)
    become(Path(log), env)
    subprocess_handler.Popen = ForkedRank
    sys.exit(importlib.import_module("spmdrl.launch").main(words[2:]))


def is_running(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_for(words: str, sides: list[Side], limit_s: float = 90) -> str:
    """Until one of them has said it."""
    end = time.monotonic() + limit_s
    while True:
        for side in sides:
            if found := re.search(words, side.text()[side.seen :]):
                return found[0]
        assert time.monotonic() < end, "\n".join(side.text()[-4000:] for side in sides)
        time.sleep(0.05)


def test_a_cut_cable_ends_both_sides_and_the_run_goes_on(network, qwen3, tmp_path):
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    slow = "    import os, time\n    time.sleep(0 if os.path.exists('go') else 0.05)\n"
    Path(tmp_path, "cfg.py").write_text(CONFIG.replace("    return", slow + "    return"))
    both = [network.hosts["right"], network.hosts["left"]]
    head = network.hosts["left"].address
    sides = [Side(host, tmp_path, head) for host in both]
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
    sides = [Side(host, tmp_path, head, "--resume", last, restarts=1) for host in both]
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
    sides = [Side(h, tmp_path, head, "--start_timeout_s", "8") for h in network.hosts.values()]
    for side in sides:
        assert side.wait(90) == 1
    said = "".join(side.text() for side in sides)
    cause = r"ranks \[0, 1, 2\] of 3 found no connection to all others within 8 s .*IFNAME"
    assert re.search(rf"spmdrl: rank \d on \w+ failed in phase 'start': {cause}", said), said
    assert "start_process_group" in said  # the stack


def steps_in(line: str) -> int:
    return int(line.split()[-3])
