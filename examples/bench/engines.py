"""One update of the same work by both training engines:
torchrun --nproc-per-node 1 examples/bench/engines.py
torchrun --nproc-per-node 2 examples/bench/engines.py

On CPUs the model is that of the arithmetic example, the batch 256 sequences of 8 to 24 tokens, in
float32; on GPUs a Qwen3-0.6B with random weights, 16 sequences of 1k to 4k tokens, in bfloat16 with
activation checkpointing. The loss is PPO's. Every layout updates in turn, `--runs` times: medians
in milliseconds of the slowest rank, ratios to FSDP2 with one shard per rank, tokens per second and,
on GPUs, model FLOP/s as a share of --peak_tflops (spmdrl/training/logs/flops.py). A JSON line each.
On GPUs the Megatron layouts need a model that Megatron knows, nothing else.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import fire
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.process import keep_what_stands, start_process_group
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.build import build_engine
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.training.logs.flops import Flops
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
    path = Path(__file__).parents[1] / "arithmetic" / "make_assets.py"
    spec = importlib.util.spec_from_file_location("make_assets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def save_qwen3_06b(folder: Path) -> None:
    """Qwen3-0.6B's shape with random weights."""
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def batch_of(num_seqs: int, shortest: int, longest: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.randint(shortest, longest + 1, (num_seqs,), generator=draw))
    size = batch.num_tokens
    batch.token_ids = torch.randint(3, 16, (size,), generator=draw)
    batch.loss_mask = torch.ones(size)
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0
    batch.advantages = torch.randn(size, generator=draw) * batch.loss_mask
    batch.rollout_logprobs = -torch.rand(size, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def main(
    model: str | None = None, seqs: int | None = None, micro_batch_tokens: int | None = None,
    runs: int = 15, peak_tflops: float = 989.0,
) -> None:  # fmt: skip
    """model: a Hugging Face folder; peak_tflops: of a GPU in bfloat16 (989: H100 and H200)."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    torch.set_num_threads(1)
    device = start_process_group(timedelta(seconds=LIMIT_S))
    everyone = Topology.build(device, dp=-1)
    on_gpu = device.type == "cuda"
    lengths = (1024, 4096) if on_gpu else (8, 24)
    batch = batch_of(seqs or (16 if on_gpu else 256), *lengths)
    with tempfile.TemporaryDirectory() as own:
        shared: list[Any] = [model or own]
        dist.broadcast_object_list(shared)
        if model is None and everyone.rank == 0:
            save_qwen3_06b(Path(own)) if on_gpu else example().save_model(Path(own), 0)
        dist.barrier()
        tokens = micro_batch_tokens or (16384 if on_gpu else 4096)
        compare(shared[0], everyone, batch, tokens, runs, peak_tflops)
        dist.barrier()
    dist.destroy_process_group()


def compare(
    model: str, everyone: Topology, batch: Batch, micro_batch_tokens: int, runs: int,
    peak_tflops: float,
) -> None:  # fmt: skip
    engines = {}
    on_gpu, seqs = everyone.device.type == "cuda", batch.num_seqs
    for name, layout in LAYOUTS[everyone.world].items():
        settings: dict[str, Any] = {
            "dtype": "bfloat16" if on_gpu else "float32", "activation_checkpointing": on_gpu,
            "micro_batch_tokens": micro_batch_tokens, "optim": OptimConfig(lr=1e-4), **layout,
        }  # fmt: skip
        config = TrainConfig(**settings)
        ranks = Topology.build(everyone.device, share=everyone, **train_degrees(config))
        engines[name] = build_engine("policy", model, config, ranks)
    keep_what_stands()
    loss_fn = policy_objective(AlgoConfig())
    flops = Flops.of_model(load_hf_config(model)).of(batch.seq_lens)
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
               "best_ratio": round(min(times) / min(took["fsdp"]), 2),
               "tokens_per_s": round(batch.num_tokens / median[name])}  # fmt: skip
        if on_gpu:
            row["mfu"] = round(flops / median[name] / everyone.world / peak_tflops / 1e12, 3)
        if everyone.rank == 0:
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
