"""Runs a test function on several real gloo ranks, each a fresh process, with a hard time limit.

    def _work(topology, x): ...            # module level; runs on every rank
    def test_it(): results = run_ranks(2, _work, 3)

A run that is over its limit fails and shows the stack of every rank.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def run_ranks(world: int, work: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list:
    """Calls work(topology, *args) on `world` ranks; returns the results in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(work.__code__.co_filename)
        call = Path(folder, "call.pkl")
        call.write_bytes(pickle.dumps((str(source), work.__name__, args)))
        port = free_port()
        procs = []
        for rank in range(world):
            env = os.environ | ENGINE_ENV | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }  # fmt: skip
            log = Path(folder, f"log_{rank}").open("w")
            command = [sys.executable, __file__, str(call), folder]
            procs.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        finished = wait_all(procs, timeout_s)
        logs = "\n".join(
            f"--- rank {rank} ---\n{Path(folder, f'log_{rank}').read_text()[-6000:]}"
            for rank in range(world)
        )
        assert finished, f"over the limit of {timeout_s} s; every rank's stack:\n{logs}"
        assert all(p.returncode == 0 for p in procs), logs
        return [pickle.loads(Path(folder, f"result_{r}").read_bytes()) for r in range(world)]


def wait_all(procs: list[subprocess.Popen], timeout_s: float) -> bool:
    """Waits for all, or until one fails; on a time-out asks each for its stack. Ends them all."""
    end = time.monotonic() + timeout_s
    failed_at = None
    while any(p.poll() is None for p in procs):
        now = time.monotonic()
        if any(p.poll() not in (None, 0) for p in procs):
            failed_at = failed_at or now
        if now > end or (failed_at and now > failed_at + 5):
            break
        time.sleep(0.05)
    alive = [p for p in procs if p.poll() is None]
    for p in alive:
        p.send_signal(signal.SIGUSR1)
    time.sleep(1 if alive else 0)
    for p in alive:
        p.kill()
        p.wait()
    return not alive or failed_at is not None


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def main(call: str, folder: str) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch
    import torch.distributed as dist

    from spmdrl.topology import Topology

    torch.set_num_threads(1)
    source, name, args = pickle.loads(Path(call).read_bytes())
    sys.path[:0] = [str(Path(__file__).parent), str(Path(source).parent)]
    spec = importlib.util.spec_from_file_location("rank_module", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo")
    topology = Topology.build(torch.device("cpu"), dp=-1)
    result = getattr(module, name)(topology, *args)
    Path(folder, f"result_{dist.get_rank()}").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
