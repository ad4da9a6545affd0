"""A job of two machines loses one and gains it again, and goes on from memory with the numbers of a
job of constant size."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from launchers_on_hosts import Side, serve_store, two_hosts, wait_for
from programs import CONFIG, metrics_of, train, write_task
from ranks import SERVER
from virtual_hosts import Network

pytestmark = pytest.mark.ranks

STEPS = 8
start = partial(Side, nodes="1:2", ranks={"left": 1, "right": 1}, restarts=1)
SETTINGS = ("--data.eval", "None", "--lost_timeout_s", 5, "--checkpoint.every_steps", 100,
            "--steps", STEPS)  # fmt: skip
# answers of a step are scored once the file says so
GATE = """
    import os, time
    path = "run/metrics.jsonl"
    while os.path.exists("gate") and int(open("gate").read() or 0) <= (
        len(open(path).readlines()) if os.path.exists(path) else 0
    ):
        time.sleep(0.02)
"""


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as network:
        for host in network.hosts.values():  # each has memory of its own
            host.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
        yield network


def set_up(folder: Path, model: Path, until: int) -> None:
    Path(folder, "model").symlink_to(model)
    write_task(folder)
    Path(folder, "cfg.py").write_text(CONFIG.replace("    return", GATE + "    return", 1))
    open_gate(folder, until)


def open_gate(folder: Path, until: int) -> None:
    """Lets the run go on to the end of step `until`."""
    Path(folder, "gate.new").write_text(str(until))
    Path(folder, "gate.new").rename(folder / "gate")


def kill_all_on(host) -> None:
    for process in host.processes():
        if process.pid != host.pid:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def told(text: str) -> tuple[str, int, float]:
    """(what changed, the step that is gone on from, the seconds that were lost) of a line."""
    print(text)
    found = re.fullmatch(r"elastic: (.*); goes on from step (\d+) in memory, (\d+) s", text)
    assert found, text
    return found[1], int(found[2]), float(found[3])


def left_in_memory(host) -> list[str]:
    return [name for name in host.run("ls", "/dev/shm").split() if name.startswith("spmdrl")]


def test_a_host_is_lost_and_comes_back(network, qwen3, tmp_path):
    set_up(tmp_path, qwen3, until=3)
    left, right = network.hosts["left"], network.hosts["right"]
    sides = [start(host, tmp_path, left.address, *SETTINGS) for host in (left, right)]
    wait_for("step 3/", sides)
    kill_all_on(right)
    assert left_in_memory(right)  # nobody was there to remove it
    open_gate(tmp_path, 5)
    what, step, lost_s = told(wait_for("elastic: .*", sides))
    assert what == "2 -> 1 rank, host right lost"
    assert step in (2, 3) and lost_s < 90
    wait_for("step 5/", sides)

    sides[0].seen = len(sides[0].text())
    sides[1] = start(right, tmp_path, left.address, *SETTINGS)
    wait_for("SIGTERM: the run stops after this step", sides)
    open_gate(tmp_path, STEPS)
    assert told(wait_for("elastic: .*", sides))[:2] == ("1 -> 2 ranks, host right new", 6)
    for side in sides:
        assert side.wait(120) == 0, side.text()[-5000:]
    assert left_in_memory(left) == left_in_memory(right) == []
    assert not list(tmp_path.glob("run/checkpoints/step_0000000[1-7]"))  # none was on the disk

    Path(tmp_path, "gate").unlink()
    alone = train(tmp_path, 2, "--config", "cfg.py", *SETTINGS, "--run_dir", "alone")
    assert alone.code == 0, alone.output[-3000:]
    rows, expected = metrics_of(tmp_path / "run"), metrics_of(tmp_path / "alone")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row, other in zip(rows, expected, strict=True):
        assert same(row) == pytest.approx(same(other), abs=1e-5, rel=1e-5)


def same(row: dict) -> dict:
    """What does not depend on the number of ranks."""
    return {name: value for name, value in row.items() if not name.startswith("balance/")}


def test_the_first_host_leaves_in_order(network, qwen3, tmp_path):
    """It is told to go, as by a scheduler that takes it away; the store stands elsewhere."""
    set_up(tmp_path, qwen3, until=2)
    store = SERVER.Process(target=serve_store, args=(network.switch.pid, 29400), daemon=True)
    store.start()
    both = (network.hosts["left"], network.hosts["right"])
    sides = [start(host, tmp_path, network.switch.address, *SETTINGS) for host in both]
    wait_for("step 2/", sides)
    os.kill(sides[0].launcher.pid, signal.SIGTERM)
    wait_for("SIGTERM: the run stops after this step", sides)
    open_gate(tmp_path, STEPS)
    assert told(wait_for("elastic: .*", sides))[:2] == ("2 -> 1 rank, host left lost", 3)
    assert [side.wait(90) for side in sides] == [75, 0], sides[1].text()[-5000:]
    assert left_in_memory(both[0]) == left_in_memory(both[1]) == []
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, STEPS + 1))
    store.kill()


def test_a_host_that_comes_with_another_config_leaves_again(network, qwen3, tmp_path):
    """Else all that is in memory alone would go with the job."""
    set_up(tmp_path, qwen3, until=2)
    left, right = network.hosts["left"], network.hosts["right"]
    sides = [start(left, tmp_path, left.address, *SETTINGS)]
    wait_for("step 2/", sides)
    sides.append(start(right, tmp_path, left.address, *SETTINGS, "--seed", 7))
    wait_for("SIGTERM: the run stops after this step", sides)
    open_gate(tmp_path, STEPS)
    told(wait_for("elastic: .*", sides))
    assert [side.wait(90) for side in sides] == [0, 2], sides[0].text()[-5000:]
    assert "the config differs between ranks" in sides[0].text() + sides[1].text()
    assert "this host leaves the job that it came to" in sides[1].text()
    assert [row["step"] for row in metrics_of(tmp_path / "run")] == list(range(1, STEPS + 1))


def test_a_host_that_comes_in_the_last_step_finds_the_job_done(network, qwen3, tmp_path):
    set_up(tmp_path, qwen3, until=STEPS - 1)
    left, right = network.hosts["left"], network.hosts["right"]
    sides = [start(left, tmp_path, left.address, *SETTINGS)]
    wait_for(f"step {STEPS - 1}/", sides)
    sides.append(start(right, tmp_path, left.address, *SETTINGS))
    wait_for("SIGTERM: the run stops after this step", sides)
    open_gate(tmp_path, STEPS)
    assert [side.wait(90) for side in sides] == [0, 1], sides[0].text()[-5000:]
    assert sides[0].text().count("Finished: ") == 1
    assert "the job has ended" in sides[1].text()  # its store may be gone by then, or closed
