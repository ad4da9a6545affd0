"""Who does not come to the start is named; who comes again meets nobody of before."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from programs import metrics_of, pids_of, set_up
from ranks import free_port

pytestmark = pytest.mark.ranks

LIMIT_S = 60


@pytest.fixture
def folder(tmp_path, qwen3):
    return set_up(tmp_path, qwen3)


def spawn(folder: Path, log: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
    with Path(folder, log).open("wb") as file:
        return subprocess.Popen(
            [sys.executable, *command, "--config", "cfg.py", "--data.eval", "None"],
            cwd=folder, stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("come", "cause"),
    [
        ([0, 2], r"rank [02] on \S+ .*: ranks \[1, 3\] of 4 did not start within 15 s"),
        ([1], r"rank 1 on \S+ .*: the store at 127\.0\.0\.1:\d+ did not answer within 15 s"),
    ],
)
def test_ranks_that_do_not_come_are_named_once(folder, come, cause):
    port = str(free_port())
    ranks = [
        spawn(folder, f"log{rank}", "-m", "spmdrl.ppo", "--start_timeout_s", "15", RANK=str(rank),
              LOCAL_RANK=str(rank), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_PORT=port,
              MASTER_ADDR="127.0.0.1", TORCHELASTIC_ERROR_FILE="/dev/full")
        for rank in come
    ]  # fmt: skip
    assert [process.wait(LIMIT_S) for process in ranks] == [1] * len(come)
    said = "".join(Path(folder, f"log{rank}").read_text() for rank in come)
    assert len(re.findall("failed in phase 'start'", said)) == 1, said
    assert re.search(f"spmdrl: {cause}", said), said
    assert len(list(Path(folder, "run/errors").iterdir())) == 1


def test_a_taken_port_is_named_with_who_has_it(folder):
    with socket.socket() as other:
        other.bind(("", free_port()))
        other.listen()
        port = other.getsockname()[1]
        rank = spawn(folder, "log0", "-m", "spmdrl.ppo", RANK="0", LOCAL_RANK="0", WORLD_SIZE="2",
                     LOCAL_WORLD_SIZE="2", MASTER_PORT=str(port), MASTER_ADDR="127.0.0.1",
                     TORCHELASTIC_ERROR_FILE=str(folder / "error"))  # fmt: skip
        assert rank.wait(LIMIT_S) == 1
    said = Path(folder, "log0").read_text()
    assert re.search(
        rf"spmdrl: rank 0 on \S+ failed in phase 'start': .* port {port} \(MASTER_PORT\), where "
        rf"process {os.getpid()} listens \(.*pytest.*\): .*address already in use\)", said,
    ), said  # fmt: skip
    assert "Traceback" not in said
    assert str(port) in Path(folder, "error").read_text()
    assert Path(folder, "run/errors/rank_0.json").exists()


def test_a_store_that_freezes_at_the_start_holds_nobody(folder):
    port = free_port()
    ranks = [
        spawn(folder, f"log{rank}", "-m", "spmdrl.ppo", "--start_timeout_s", "12", RANK=str(rank),
              LOCAL_RANK=str(rank), WORLD_SIZE="3", LOCAL_WORLD_SIZE="3", MASTER_PORT=str(port),
              MASTER_ADDR="127.0.0.1")
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        store = psutil.Process(ranks[0].pid)
        connected = {psutil.CONN_ESTABLISHED}
        wait_until(  # its own two connections, and two of rank 1
            lambda: sum(c.laddr.port == port and c.status in connected
                        for c in store.net_connections()) >= 4, ranks,
        )  # fmt: skip
        time.sleep(1)
        store.suspend()
        assert ranks[1].wait(30) == 1
    finally:
        for process in ranks:
            process.kill()
    said = Path(folder, "log1").read_text()
    assert re.search(r"spmdrl: rank 1 on .*: the store at \S+ did not answer within 12 s", said), (
        said
    )


def test_nodes_that_count_restarts_differently_meet_again(folder):
    """Plain torchrun: the nodes share a store that outlives the restart, and one counts it."""
    more = ("--steps", "25", "--checkpoint.every_steps", "2", "--lost_timeout_s", "5")
    torchrun = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
                "--max-restarts", "2", "-m", "spmdrl.ppo")  # fmt: skip
    nodes = [spawn(folder, f"log{node}", *torchrun, *more) for node in range(2)]
    try:
        steps = Path(folder, "run/metrics.jsonl")
        wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 4, nodes)
        [struck] = pids_of(nodes[1].pid)
        os.kill(struck, signal.SIGKILL)
        for node in nodes:
            assert node.wait(90) == 0, Path(folder, "log0").read_text()[-5000:]
    finally:
        for node in nodes:
            node.kill()
    assert [row["step"] for row in metrics_of(folder / "run")] == list(range(1, 26))
    assert "resumed from" in "".join(Path(folder, f"log{node}").read_text() for node in range(2))


def wait_until(condition, nodes: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + 3 * LIMIT_S
    while not condition():
        assert time.monotonic() < end
        assert all(node.poll() is None for node in nodes)
        time.sleep(0.05)
