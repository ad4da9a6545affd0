"""Trainer -> engine against the raw collective of the same bytes.

    python examples/bench/resharding.py [case ...]

Per case: the weights are float32 shards, cast to bfloat16 on the way and written into an engine's
parameters. Next to it a plain torch.distributed collective moves as many bytes, already packed and
cast, from one ready buffer into another: an all-gather where both roles share their ranks, a
broadcast from the first trainer to the engines where they do not. Both have their memory before
the clock starts and take turns; a figure is the median, best_ratio that of the fastest runs, cpu_ms
the processor time of all ranks, which other load on the machine disturbs least. GB/s counts the
bytes of the bfloat16 model that an engine rank comes to hold. Each case runs in fresh processes
with a time limit. On GPUs it is by NCCL; SPMDRL_SHARE_GPU=1 lets ranks share one (docs/gpu.md).
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from spmdrl.distributed.env import before_torch

before_torch()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

LIMIT_S, RUNS, BUCKET_MIB = 90, 31, 64
LARGE = [(2048, 1024)] * 24  # 100 MB in bfloat16
SMALL = [(64, 64)] * 6000  # experts' matrices: 49 MB

# name: (trainers, engines' ranks, tensor parallelism, shapes)
CASES: dict[str, tuple[list[int], list[int], int, list[tuple[int, int]]]] = {
    "colocated, 2 ranks": ([0, 1], [0, 1], 1, LARGE),
    "colocated, 3 ranks": ([0, 1, 2], [0, 1, 2], 1, LARGE),
    "colocated, 4 ranks": ([0, 1, 2, 3], [0, 1, 2, 3], 1, LARGE),
    "colocated, small tensors": ([0, 1], [0, 1], 1, SMALL),
    "split 1 + 1": ([0], [1], 1, LARGE),
    "split 1 + 1, small tensors": ([0], [1], 1, SMALL),
    "split 1 + 2": ([0], [1, 2], 1, LARGE),
    "split 2 + 2": ([0, 1], [2, 3], 1, LARGE),
    "colocated, TP 2": ([0, 1], [0, 1], 2, LARGE),
    "split 2 + 2, TP 2": ([0, 1], [2, 3], 2, LARGE),
    "tiny": ([0, 1], [0, 1], 2, [(8, 4)] * 4),  # says nothing of speed: a test that the rest runs
}


class Trainer:
    """Float32 matrices in row shards; ranks that share a copy in the order of the mesh."""

    def __init__(self, topology: Any, shapes: list[tuple[int, int]]) -> None:
        from torch.distributed.tensor import DTensor, Shard
        from transformers import LlamaConfig

        from spmdrl.weights.shards import shards_of

        rank, world = topology.rank, topology.world
        self.pretrained = [LlamaConfig()]  # by which a push knows the layers that it leaves out
        self.named: dict[str, Any] = {}
        for i, (rows, columns) in enumerate(shapes):
            part = len(torch.empty(rows).chunk(world)[rank])
            local = torch.full((part, columns), float(i % 97), device=topology.device)
            weight = DTensor.from_local(
                local, topology.mesh["fsdp"], [Shard(0)], shape=(rows, columns), stride=(columns, 1)
            )
            self.named[f"w{i}"] = shards_of(weight)

    def named_shards(self) -> dict[str, Any]:
        return self.named


class Engine:
    """Bfloat16 matrices: even ones cut by rows over tensor-parallel ranks, odd ones by columns."""

    has_weights = True  # so that a push sends all at once, as in every step but the first

    def __init__(self, topology: Any, shapes: list[tuple[int, int]]) -> None:
        from spmdrl.weights.engine_layout import Layout, ParamView

        tp, rank = topology.axis_size("tp"), topology.axis_rank("tp")
        self.model, self.found = nn.Module(), Layout()
        for i, shape in enumerate(shapes):
            size = list(shape)
            size[i % 2] //= tp
            box = [(0, shape[0]), (0, shape[1])]
            box[i % 2] = (rank * size[i % 2], (rank + 1) * size[i % 2])
            zeros = torch.zeros(size, dtype=torch.bfloat16, device=topology.device)
            parameter = nn.Parameter(zeros, requires_grad=False)
            self.model.register_parameter(f"w{i}", parameter)
            self.found.regions.append((f"w{i}", tuple(box)))
            self.found.places.append(
                ParamView(self.model, f"w{i}", 0, tuple(size), parameter.stride())
            )

    def layout(self, shapes: Any) -> Any:
        return self.found

    def finish_load(self, running: bool = False) -> None:
        pass


def measure(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the wall, and of this rank's processor."""
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    cpu = time.process_time() - cpu
    dist.barrier()
    return time.perf_counter() - start, cpu


def run_case(name: str) -> None:
    """One rank's part."""
    from spmdrl.config import WeightsConfig
    from spmdrl.distributed.process import keep_freed_memory, start_process_group
    from spmdrl.distributed.topology import Topology
    from spmdrl.training.weight_sync import WeightSync

    torch.set_num_threads(1)
    device = start_process_group(timedelta(seconds=LIMIT_S))
    keep_freed_memory()
    trainers, engines, tp, shapes = CASES[name]
    actor_ranks = Topology.build(device, trainers, dp=1, fsdp=-1)
    rollout_ranks = Topology.build(device, engines, dp=-1, tp=tp)
    actor: Any = Trainer(actor_ranks, shapes) if actor_ranks.here else None
    rollout: Any = Engine(rollout_ranks, shapes) if rollout_ranks.here else None
    start = time.perf_counter()
    config = WeightsConfig(bucket_mib=BUCKET_MIB)
    sync = WeightSync(actor, actor_ranks, rollout, rollout_ranks, "bfloat16", config)
    plan_s = time.perf_counter() - start
    num_bytes = sum(rows * columns for rows, columns in shapes) * 2 // tp
    num_bytes -= num_bytes % (2 * dist.get_world_size())
    full = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    mine = torch.ones(num_bytes // 2 // len(trainers), dtype=torch.bfloat16, device=device)
    if trainers == engines:
        raw: Callable[[], object] = lambda: dist.all_gather_into_tensor(full, mine)  # noqa: E731
    else:
        used = dist.new_group([trainers[0], *engines])
        outside = dist.get_rank() not in (trainers[0], *engines)
        raw = lambda: outside or dist.broadcast(full, trainers[0], group=used)  # noqa: E731
    sync.push()
    raw()
    times: dict[str, list[tuple[float, float]]] = {"ours": [], "raw": []}
    for _ in range(RUNS):
        times["raw"].append(measure(raw))
        times["ours"].append(measure(lambda: results.append(sync.push())))
    ours, base = (statistics.median(t for t, _ in times[k]) for k in ("ours", "raw"))
    ours_best, base_best = (min(t for t, _ in times[k]) for k in ("ours", "raw"))
    cpu = [statistics.median(t for _, t in times[k]) for k in ("ours", "raw")]
    total = torch.tensor([results[-1].moved_bytes, results[-1].planned_bytes, *cpu]).double()
    dist.all_reduce(total)
    moved, planned, ours_cpu, base_cpu = total.tolist()
    if dist.get_rank() == 0:
        row = {"case": name, "tensors": len(shapes), "MB": round(num_bytes / 1e6, 1),
               "ours_ms": round(ours * 1e3, 1), "raw_ms": round(base * 1e3, 1),
               "ours_GB/s": round(num_bytes / ours / 1e9, 2),
               "raw_GB/s": round(num_bytes / base / 1e9, 2), "ratio": round(base / ours, 2),
               "best_ratio": round(base_best / ours_best, 2),
               "ours_cpu_ms": round(ours_cpu * 1e3, 1), "raw_cpu_ms": round(base_cpu * 1e3, 1),
               "planned_MB": round(planned / 1e6, 1), "moved_MB": round(moved / 1e6, 1),
               "plan_s": round(plan_s, 2)}  # fmt: skip
        print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


results: list[Any] = []


def start_case(name: str) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = 1 + max(*CASES[name][0], *CASES[name][1])
    procs = []
    for rank in range(world):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::FutureWarning",
        }  # fmt: skip
        procs.append(subprocess.Popen([sys.executable, __file__, name], env=env))
    end = time.monotonic() + LIMIT_S
    try:
        codes = [p.wait(timeout=max(0.1, end - time.monotonic())) for p in procs]
    except subprocess.TimeoutExpired:
        print(json.dumps({"case": name, "error": f"over {LIMIT_S} s"}), flush=True)
        return
    finally:
        for p in procs:
            p.kill()
    if any(codes):
        print(json.dumps({"case": name, "error": f"exit codes {codes}"}), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1 and "RANK" in os.environ:
        run_case(sys.argv[1])
    else:
        for chosen in sys.argv[1:] or CASES:
            start_case(chosen)
