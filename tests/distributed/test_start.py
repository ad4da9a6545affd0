"""Who does not come to the start is named; who comes again meets nobody of before."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from programs import environment, metrics_of, pids_of, run_module, set_up, start
from ranks import SERVER, free_port

pytestmark = pytest.mark.ranks

LIMIT_S = 60


@pytest.fixture
def folder(tmp_path, qwen3):
    return set_up(tmp_path, qwen3)


def start_rank(folder: Path, rank: int, world: int, port: int, *args: str, **env: str) -> Any:
    """A rank as Slurm starts it, which prints into folder/log; a fork, which has imported torch."""
    alike = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_PORT": str(port),
             "MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank)}  # fmt: skip
    command = ["--config", "cfg.py", "--data.eval", "None", *args]
    run = (str(folder), "spmdrl.ppo", command, environment() | alike | env)
    process = SERVER.Process(target=run_module, args=run)
    process.start()
    return process


def exit_code(process: Any, limit_s: float) -> int | None:
    """None: it is still there after limit_s seconds, and then killed."""
    process.join(limit_s)
    code = process.exitcode
    if code is None:
        process.kill()
    return code


@pytest.mark.parametrize(
    ("come", "cause"),
    [
        ([0, 2], r"rank [02] on \S+ .*: ranks \[1, 3\] of 4 did not start within 8 s"),
        ([1], r"rank 1 on \S+ .*: the store at 127\.0\.0\.1:\d+ did not answer within 8 s"),
    ],
)
def test_ranks_that_do_not_come_are_named_once(folder, come, cause):
    port = free_port()
    ranks = [
        start_rank(folder, rank, 4, port, "--start_timeout_s", "8",
                   TORCHELASTIC_ERROR_FILE="/dev/full")
        for rank in come
    ]  # fmt: skip
    assert [exit_code(process, LIMIT_S) for process in ranks] == [1] * len(come)
    said = Path(folder, "log").read_text()
    assert len(re.findall("failed in phase 'start'", said)) == 1, said
    assert re.search(f"spmdrl: {cause}", said), said
    [details] = Path(folder, "run/errors").iterdir()
    assert f"spmdrl: details in run/errors/{details.name}" in said, said


def test_a_taken_port_is_named_with_who_has_it(folder):
    with socket.socket() as other:
        other.bind(("", free_port()))
        other.listen()
        port = other.getsockname()[1]
        rank = start_rank(folder, 0, 2, port, TORCHELASTIC_ERROR_FILE=str(folder / "error"))
        assert exit_code(rank, LIMIT_S) == 1
    said = Path(folder, "log").read_text()
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
        start_rank(folder, rank, 3, port, "--start_timeout_s", "8")
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
        assert exit_code(ranks[1], 30) == 1
    finally:
        for process in ranks:
            process.kill()
    said = Path(folder, "log").read_text()
    assert re.search(r"spmdrl: rank 1 on .*: the store at \S+ did not answer within 8 s", said), (
        said
    )


def test_nodes_that_count_restarts_differently_meet_again(folder):
    """Plain torchrun: the nodes share a store that outlives the restart, and one counts it."""
    more = ("--steps", "12", "--checkpoint.every_steps", "2", "--lost_timeout_s", "5",
            "--config", "cfg.py", "--data.eval", "None")  # fmt: skip
    meet = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint",
            f"127.0.0.1:{free_port()}", "--max-restarts", "2")  # fmt: skip
    nodes = [start(folder, 1, *more, before=meet) for _ in range(2)]
    steps = Path(folder, "run/metrics.jsonl")
    wait_until(lambda: steps.exists() and len(steps.read_text().splitlines()) > 4, nodes)
    [struck] = pids_of(nodes[1].pid)
    os.kill(struck, signal.SIGKILL)
    for node in nodes:
        node.join(90)
        assert node.exitcode == 0, Path(folder, "log").read_text()[-5000:]
    assert [row["step"] for row in metrics_of(folder / "run")] == list(range(1, 13))
    assert "resumed from" in Path(folder, "log").read_text()


def wait_until(condition: Callable[[], bool], nodes: list[Any]) -> None:
    end = time.monotonic() + 3 * LIMIT_S
    while not condition():
        assert time.monotonic() < end
        assert all(node.exitcode is None for node in nodes), "one has ended"
        time.sleep(0.05)
