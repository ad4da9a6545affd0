"""Runs test functions on several real gloo ranks, each a fresh process, with a hard time limit.

    def _work(topology, x): ...            # module level; runs on every rank
    def test_it(): results = run_ranks(2, _work, 3)

A start takes longer than most functions: `run_calls` makes many calls on the same ranks. A process
is forked from a server that has imported torch and the trainer, and has done nothing else. A run
that is over its limit fails and shows the stack of every rank.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from spmdrl.distributed.nccl_rules.events import RECORDS

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_GLOO_LAZY_INIT": "1",  # as in every run: distributed.process.GLOO_ENV
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # a process that asked CUDA itself could not fork ours
}


STRICT = "SPMDRL_STRICT_NCCL"  # set by --strict-nccl: what ranks do is held to NCCL's rules

EPHEMERAL = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
EPHEMERAL = EPHEMERAL if EPHEMERAL > 16_000 else 32_768  # where it begins lower, there is no better

Call = tuple[Callable[..., Any], tuple]  # a function of a test module and its arguments

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preload"])  # found from the project's root


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout_s: float = 360) -> list:
    """Calls work(topology, *args) on `world` ranks; returns the results in rank order."""
    return run_calls(world, [(work, args)], timeout_s)[0]


def run_calls(world: int, calls: Iterable[Call], timeout_s: float = 360) -> list[list]:
    """Makes the calls one after the other on the same ranks; the results of each in rank order.

    All functions are of one module.
    """
    with tempfile.TemporaryDirectory() as folder:
        procs = start_ranks(world, calls, folder)
        finished = wait_all(procs, timeout_s)
        logs = "\n".join(
            f"--- rank {rank} ---\n{Path(folder, f'log_{rank}').read_text()[-6000:]}"
            for rank in range(world)
        )
        check_records(Path(folder, "nccl"), ended=False)  # says more than that ranks hang
        assert finished, f"over the limit of {timeout_s} s; every rank's stack:\n{logs}"
        assert all(p.exitcode == 0 for p in procs), logs
        check_records(Path(folder, "nccl"))
        by_rank = [pickle.loads(Path(folder, f"result_{r}").read_bytes()) for r in range(world)]
        return [list(results) for results in zip(*by_rank, strict=True)]


def start_ranks(world: int, calls: Iterable[Call], folder: str) -> list[BaseProcess]:
    """The ranks' processes, which write log_R and result_R into the folder."""
    named = [(work.__code__.co_filename, work.__name__, args) for work, args in calls]
    Path(folder, "calls.pkl").write_bytes(pickle.dumps(named))
    port = free_port()
    records = records_in(Path(folder, "nccl"))
    procs: list[BaseProcess] = []
    for rank in range(world):
        env = ENGINE_ENV | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }  # fmt: skip
        process = SERVER.Process(target=main, args=(folder, os.environ | env | records))
        process.start()
        procs.append(process)
    return procs


def records_in(folder: Path) -> dict[str, str]:
    """What the ranks' environment has besides; nothing but with --strict-nccl. Empties the
    folder.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if STRICT not in os.environ:
        return {}
    folder.mkdir()
    return {RECORDS: str(folder)}


@contextmanager
def groups_that_end() -> Iterator[None]:
    """Ends the process groups that are made meanwhile. A group of gloo has a thread that wakes up a
    hundred times a second, so a test that makes many engines one after the other would be slow.
    Collective over all ranks.
    """
    from torch.distributed import distributed_c10d as c10d

    before = set(c10d._world.pg_map)
    yield
    c10d.barrier()
    for group in [group for group in c10d._world.pg_map if group not in before]:
        c10d.destroy_process_group(group)
    gc.collect()  # engines are in cycles; a thread ends when nothing has its group any more


def record_if_asked() -> None:
    """For a rank, before it makes its first group; it need not be of a program of ours."""
    if RECORDS in os.environ:
        importlib.import_module("spmdrl.distributed.nccl_rules.recorder").record()


def check_records(folder: Path, ended: bool = True) -> None:
    """Raises RulesBroken, see nccl_rules/rules.py. Does nothing without --strict-nccl."""
    if folder.is_dir():
        importlib.import_module("spmdrl.distributed.nccl_rules.rules").check(folder, ended)


def wait_all(procs: list[BaseProcess], timeout_s: float, kill_after_s: float = 5) -> bool:
    """Waits for all, or until one fails; on a time-out asks each for its stack. Ends them all.

    kill_after_s: how long the others may go on after one has failed.
    """
    try:
        return wait_or_kill(procs, timeout_s, kill_after_s)
    finally:  # the test's own limit may have come first
        for p in procs:
            if p.exitcode is None:
                p.kill()
                p.join()


def wait_or_kill(procs: list[BaseProcess], timeout_s: float, kill_after_s: float) -> bool:
    end = time.monotonic() + timeout_s
    failed_at = None
    while any(p.exitcode is None for p in procs):
        now = time.monotonic()
        if any(p.exitcode not in (None, 0) for p in procs):
            failed_at = failed_at or now
        if now > end or (failed_at and now > failed_at + kill_after_s):
            break
        time.sleep(0.05)
    alive = [p for p in procs if p.exitcode is None]
    for p in alive:
        assert p.pid is not None
        os.kill(p.pid, signal.SIGUSR1)
    time.sleep(1 if alive else 0)
    return not alive or failed_at is not None


def free_port() -> int:
    """Of those that the system gives to nobody by itself: it would between here and the start."""
    while True:
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % 8
        port = random.SystemRandom().randrange(15_000 + worker, EPHEMERAL, 8)  # no two draw one
        with socket.socket() as s, suppress(OSError):
            s.bind(("", port))
            return port


def become(log: Path, env: dict[str, str]) -> None:
    """What a forked process takes over: its environment, and a file for all it prints."""
    os.environ.clear()
    os.environ.update(env)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # in a fork of pytest they are its own


def main(folder: str, env: dict[str, str]) -> None:
    """One rank."""
    become(Path(folder, f"log_{env['RANK']}"), env)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist

    from spmdrl.distributed.topology import Topology

    torch.set_num_threads(1)
    calls = pickle.loads(Path(folder, "calls.pkl").read_bytes())
    source = calls[0][0]
    sys.path[:0] = [str(Path(__file__).parent), str(Path(source).parent)]
    record_if_asked()
    spec = importlib.util.spec_from_file_location("rank_module", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo")
    topology = Topology.build(torch.device("cpu"), dp=-1)
    results = []
    for _, name, args in calls:
        torch.manual_seed(0)  # what an earlier call drew is not to be seen
        results.append(getattr(module, name)(topology, *args))
        dist.barrier()
    Path(folder, f"result_{dist.get_rank()}").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
