"""One long sequence on ranks that share its tokens, and on as many that do not:
torchrun --nproc-per-node 2 examples/bench/ulysses.py

Two ranks, or more: with --degree as many as ranks. One sequence is a mini-batch: without sharing
the first rank works and the others wait. On CPUs a Qwen3 of two layers, 256 wide, in float32, on
GPUs Qwen3-0.6B with random weights in bfloat16. Each way updates in turn, `--runs` times. Of each a
JSON line: median milliseconds of the slowest rank, and of the fullest rank the MiB that an update
adds at its peak (of the process on a CPU, of torch's allocator on a GPU) and those that its forward
passes keep for the backward ones.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import fire
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.process import keep_what_stands, start_process_group
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.base import TrainEngine
from spmdrl.engines.build import build_engine
from spmdrl.types import Batch

LIMIT_S = 500
MIB = 2**20
SHAPES = {
    "cpu": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": 64},
    "cuda": {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
             "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
             "head_dim": 128},
}  # fmt: skip


def sequence(num_tokens: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.tensor([num_tokens]))
    batch.token_ids = torch.randint(3, 4000, (num_tokens,), generator=draw)
    batch.loss_mask[num_tokens // 4 :] = 1.0
    batch.advantages = torch.randn(num_tokens, generator=draw) * batch.loss_mask
    batch.rollout_logprobs = -torch.rand(num_tokens, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def main(tokens: int = 8192, degree: int | None = None, runs: int = 5) -> None:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    device = start_process_group(timedelta(seconds=LIMIT_S))
    everyone = Topology.build(device, dp=-1)
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [own]
        dist.broadcast_object_list(shared)
        if everyone.rank == 0:
            torch.manual_seed(0)
            shape = SHAPES[device.type] | {"max_position_embeddings": tokens}
            Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(own)
        dist.barrier()
        compare(shared[0], everyone, sequence(tokens), degree or everyone.world, runs)
        dist.barrier()
    dist.destroy_process_group()


def compare(model: str, everyone: Topology, batch: Batch, degree: int, runs: int) -> None:
    engines: dict[int, TrainEngine] = {}
    for sharing in (1, degree):
        config = TrainConfig(
            dtype="bfloat16" if everyone.device.type == "cuda" else "float32", ulysses=sharing,
            micro_batch_tokens=batch.num_tokens, optim=OptimConfig(lr=1e-4),
        )  # fmt: skip
        ranks = Topology.build(everyone.device, share=everyone, **train_degrees(config))
        engine = build_engine("policy", model, config, ranks)
        assert engine is not None
        engines[sharing] = engine
    keep_what_stands()
    part = batch if everyone.rank == 0 else batch.select([])
    loss_fn = policy_objective(AlgoConfig())
    took: dict[int, list[float]] = {sharing: [] for sharing in engines}
    for turn in range(runs + 1):
        for sharing, engine in engines.items():
            dist.barrier()
            start = time.perf_counter()
            engine.update(part, loss_fn, 1.0)
            spent = largest(time.perf_counter() - start)
            took[sharing] += [spent] * (turn > 0)  # the first warms up
    for sharing, engine in engines.items():
        kept: dict[int, int] = {}
        dist.barrier()
        base = mark_memory(everyone.device)
        engine.update(part, loss_fn, 1.0)
        added = largest(peak_memory(everyone.device) - base)
        with keeping(kept):
            engine.update(part, loss_fn, 1.0)
        line = {
            "tokens": batch.num_tokens, "ranks": everyone.world, "ulysses": sharing,
            "ms": round(1000 * statistics.median(took[sharing])), "peak_mib": round(added / MIB),
            "kept_mib": round(largest(float(sum(kept.values()))) / MIB),
        }  # fmt: skip
        if everyone.rank == 0:
            print(json.dumps(line), flush=True)


def largest(value: float) -> float:
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


@contextmanager
def keeping(kept: dict[int, int]) -> Iterator[None]:
    """Fills in the bytes of every storage that autograd keeps meanwhile, by its address."""

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter):
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def mark_memory(device: torch.device) -> float:
    """Bytes in use; the peak is counted from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return float(torch.cuda.memory_allocated(device))
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier updates freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return status_bytes("VmHWM")


def status_bytes(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    fire.Fire(main)
