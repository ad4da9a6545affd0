"""One update of the same work by both training engines:
torchrun --nproc-per-node 1 kernels/bench/engines.py
torchrun --nproc-per-node 2 kernels/bench/engines.py

The model is that of the arithmetic example (or --model), the batch `--seqs` sequences of 8 to 24
tokens, the loss PPO's, all in float32. Every layout updates in turn, `--runs` times: medians in
milliseconds of the slowest rank, and ratios to FSDP2 with one shard per rank. A JSON line each.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import fire
import torch
import torch.distributed as dist

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig
from spmdrl.engines import build_engine
from spmdrl.packing import empty_batch
from spmdrl.program import keep_freed_memory, keep_what_stands
from spmdrl.topology import Topology, train_degrees
from spmdrl.types import Batch

LIMIT_S = 300
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    1: {"fsdp": {}, "megatron": {"engine": "megatron"}},
    2: {
        "fsdp": {},
        "fsdp replicas": {"fsdp": 1},
        "megatron dp": {"engine": "megatron"},
        "megatron tp": {"engine": "megatron", "tensor_parallel": 2},
        "megatron pp": {"engine": "megatron", "pipeline_parallel": 2},
    },
}


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "arithmetic" / "make_assets.py"
    spec = importlib.util.spec_from_file_location("make_assets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch_of(num_seqs: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.randint(8, 25, (num_seqs,), generator=draw))
    size = batch.num_tokens
    batch.token_ids = torch.randint(3, 16, (size,), generator=draw)
    batch.loss_mask = torch.ones(size)
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0
    batch.advantages = torch.randn(size, generator=draw) * batch.loss_mask
    batch.rollout_logprobs = -torch.rand(size, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def main(
    model: str | None = None, seqs: int = 256, micro_batch_tokens: int = 4096, runs: int = 15
) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    dist.init_process_group("gloo")
    everyone = Topology.build(torch.device("cpu"), dp=-1)
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [model or own]
        dist.broadcast_object_list(shared)
        if model is None and everyone.rank == 0:
            example().save_model(Path(own), 0)
        dist.barrier()
        compare(shared[0], everyone, seqs, micro_batch_tokens, runs)
        dist.barrier()
    dist.destroy_process_group()


def compare(model: str, everyone: Topology, seqs: int, micro_batch_tokens: int, runs: int) -> None:
    engines = {}
    for name, layout in LAYOUTS[everyone.world].items():
        settings: dict[str, Any] = {
            "dtype": "float32", "micro_batch_tokens": micro_batch_tokens,
            "optim": OptimConfig(lr=1e-4), **layout,
        }  # fmt: skip
        config = TrainConfig(**settings)
        ranks = Topology.build(torch.device("cpu"), share=everyone, **train_degrees(config))
        engines[name] = build_engine("policy", model, config, ranks)
    keep_what_stands()
    loss_fn, batch = policy_objective(AlgoConfig()), batch_of(seqs)
    took: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(runs + 2):
        for name, engine in engines.items():
            assert engine is not None
            own = engine.topology.data_ranks
            mine = range(seqs)[own.index(everyone.rank) :: len(own)] if everyone.rank in own else []
            part = batch.select(list(mine))
            dist.barrier()
            start = time.perf_counter()
            engine.update(part, loss_fn, 1.0)
            spent = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(spent, dist.ReduceOp.MAX)
            if turn >= 2:  # the first two warm up
                took[name].append(float(spent))
    median = {name: statistics.median(times) for name, times in took.items()}
    for name, times in took.items():
        row = {"ranks": everyone.world, "layout": name, "tokens": batch.num_tokens,
               "ms": round(median[name] * 1e3, 1), "best_ms": round(min(times) * 1e3, 1),
               "ratio": round(median[name] / median["fsdp"], 2),
               "best_ratio": round(min(times) / min(took["fsdp"]), 2)}  # fmt: skip
        if everyone.rank == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
