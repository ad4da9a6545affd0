"""What an update of the policy takes on one GPU, by settings: python examples/bench/update.py

One optimizer step of engine fsdp on one rank over `--sequences` sequences of `--question` +
`--answer` random tokens, the answers in the loss, with a model of step.py's shapes and random
weights. A case is a set of fields of TrainConfig; one update that is not counted compiles kernels.
A JSON line per case: the median of `--runs` updates in seconds, tokens per second, model FLOP/s as
a share of the GPU's peak (spmdrl/training/logs/flops.py; left out where that is not known), and the
most memory that PyTorch gave out. With `--profile NAME` one more update of that case is profiled on
a GPU: the share of its time in which kernels ran, and the kernels that took most, in milliseconds
and calls. `--cases` and `--profile` take names with semicolons between them; without `--cases` all
are measured in turn, until `--limit_s` seconds are over.
"""

from __future__ import annotations

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from spmdrl.distributed.env import before_torch

before_torch()
import fire  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from step import save_model  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from spmdrl.algo.objectives import policy_objective  # noqa: E402
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig  # noqa: E402
from spmdrl.data.packing import empty_batch  # noqa: E402
from spmdrl.distributed.process import prepare_environment, start_process_group  # noqa: E402
from spmdrl.distributed.topology import Topology  # noqa: E402
from spmdrl.engines.fsdp.engine import FsdpEngine  # noqa: E402
from spmdrl.training.logs.flops import Flops, peak_tflops  # noqa: E402
from spmdrl.types import Batch  # noqa: E402

USUAL = {"micro_batch_tokens": 16384, "activation_checkpointing": False}
CASES: dict[str, dict[str, Any]] = {
    "usual": {},
    "compiled": {"compile": True},
    "65536 tokens": {"micro_batch_tokens": 65536},
    "compiled, 65536 tokens": {"compile": True, "micro_batch_tokens": 65536},
    "checkpointing": {"activation_checkpointing": True},
    "checkpointing, 65536 tokens": {"activation_checkpointing": True, "micro_batch_tokens": 65536},
    "checkpointing, compiled": {"activation_checkpointing": True, "compile": True},
    "selective": {"activation_checkpointing": "selective"},
    "fp8 tensorwise, compiled": {"compile": True, "fp8": "tensorwise"},
    "fp8 rowwise, compiled": {"compile": True, "fp8": "rowwise"},
    "fp8 rowwise_with_gw_hp, compiled": {"compile": True, "fp8": "rowwise_with_gw_hp"},
    "liger": {"kernels": "liger"},
    "torch": {"kernels": "torch"},
    "torch, compiled": {"kernels": "torch", "compile": True},
}


def batch_of(sequences: int, question: int, answer: int, vocab: int) -> Batch:
    length = question + answer
    batch = empty_batch(torch.full((sequences,), length))
    draw = torch.Generator().manual_seed(0)
    batch.token_ids = torch.randint(3, vocab, (batch.num_tokens,), generator=draw)
    mask = torch.zeros(sequences, length)
    mask[:, question:] = 1
    batch.loss_mask = mask.flatten()
    batch.advantages = torch.randn(batch.num_tokens, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def seconds(engine: FsdpEngine, batch: Batch, device: torch.device) -> float:
    wait(device)
    begun = time.perf_counter()
    engine.update(batch, policy_objective(AlgoConfig()), 1.0)
    wait(device)
    return time.perf_counter() - begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def profiled(engine: FsdpEngine, batch: Batch, device: torch.device, most: int) -> dict[str, Any]:
    """Of an update: the share of its time in which kernels ran, and those that took most."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        took = seconds(engine, batch, device)
    rows = sorted(found.key_averages(), key=lambda row: -row.self_device_time_total)
    busy = sum(row.self_device_time_total for row in rows) / 1e6
    kernels = [[row.key[:90], round(row.self_device_time_total / 1e3, 1), row.count]
               for row in rows[:most]]  # fmt: skip
    return {"seconds": round(took, 3), "busy": round(busy / took, 3), "kernels": kernels}


def measured(
    case: str, model: str, topology: Topology, batch: Batch, runs: int, flops: float
) -> tuple[dict[str, Any], FsdpEngine]:
    """The row of a case, without its profile, and its engine. flops: of an update."""
    device = topology.device
    role = TrainConfig(**USUAL | CASES[case], optim=OptimConfig(lr=1e-6))
    torch.compiler.reset()
    begun = time.perf_counter()
    engine = FsdpEngine.build("policy", model, role, topology)
    first_s = seconds(engine, batch, device)
    ready_s = time.perf_counter() - begun
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    took = median(seconds(engine, batch, device) for _ in range(runs))
    row: dict[str, Any] = {
        "case": case, "update_s": round(took, 4), "first_update_s": round(first_s, 2),
        "ready_s": round(ready_s, 1), "tokens_per_s": round(batch.num_tokens / took),
    }  # fmt: skip
    peak = peak_tflops(device)
    if peak is not None:
        row["mfu"] = round(flops / took / peak / 1e12, 4)
    if device.type == "cuda":
        row["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    return row, engine


def main(
    shape: str = "0.6b", sequences: int = 256, question: int = 256, answer: int = 512,
    runs: int = 3, cases: str | None = None, profile: str = "", kernels: int = 30,
    limit_s: float = 300,
) -> None:  # fmt: skip
    end = time.monotonic() + limit_s
    prepare_environment()
    device = start_process_group(timedelta(seconds=limit_s))
    topology = Topology.build(device, dp=1, fsdp=-1)
    with tempfile.TemporaryDirectory() as own:
        save_model(Path(own), shape)
        config = AutoConfig.from_pretrained(own)
        batch = batch_of(sequences, question, answer, config.vocab_size)
        flops = Flops.of_model(config).of(batch.seq_lens, float(batch.loss_mask.sum()))
        for name in cases.split(";") if cases else CASES:
            if time.monotonic() > end:
                break
            row, engine = measured(name, own, topology, batch, runs, flops)
            if name in profile.split(";") and device.type == "cuda":
                row["profile"] = profiled(engine, batch, device, kernels)
            print(json.dumps(row), flush=True)
            del engine
            if device.type == "cuda":
                torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
