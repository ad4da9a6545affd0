"""What strict=True costs: python examples/bench/strict.py

The same work by an engine and a trainer with and without it, in turn, `--runs` times: medians in
milliseconds of an answer phase (vLLM), of the logprobs of its answers and of an update on them, and
the ratio to the default. On CPUs a Qwen3 with 3.2 million random weights in float32, 32 prompts of
8 tokens, answers of 64; on GPUs Qwen3-0.6B's shape in bfloat16, 64 prompts of 512 and answers of
512. It also says by how much the logprobs of engine and trainer differ. A JSON line each.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import fire
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, RolloutConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.process import start_process_group
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.types import Batch

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "RANK": "0", "WORLD_SIZE": "1",
    "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
}  # fmt: skip


def save_model(folder: str, on_gpu: bool) -> None:
    shape: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 1024,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32,
    }  # fmt: skip
    if on_gpu:
        shape = {
            "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
            "vocab_size": 151936, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 128,
        }  # fmt: skip
    torch.manual_seed(0)
    config = Qwen3Config(**shape, tie_word_embeddings=True, max_position_embeddings=4096)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def batch_of(requests: list[Request], answers: list[Completion]) -> Batch:
    lens = [len(r.prompt_ids) + len(a.token_ids) for r, a in zip(requests, answers, strict=True)]
    batch = empty_batch(torch.tensor(lens))
    batch.token_ids = torch.tensor(
        [t for r, a in zip(requests, answers, strict=True) for t in r.prompt_ids + a.token_ids]
    )
    masks = [[0.0] * len(r.prompt_ids) + [1.0] * len(a.token_ids)
             for r, a in zip(requests, answers, strict=True)]  # fmt: skip
    batch.loss_mask = torch.tensor([one for mask in masks for one in mask])
    batch.rollout_logprobs = torch.zeros(len(batch.token_ids))
    given = torch.tensor([logprob for a in answers for logprob in a.logprobs])
    batch.rollout_logprobs[batch.loss_mask > 0] = given
    batch.advantages = torch.randn(len(batch.token_ids)) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3, result


def main(runs: int = 7, model: str | None = None) -> None:
    """model: a Hugging Face folder instead of random weights."""
    os.environ |= {k: v for k, v in ENVIRONMENT.items() if k not in os.environ}
    os.environ.setdefault("MASTER_PORT", "0")
    from spmdrl.engines.fsdp.engine import FsdpEngine
    from spmdrl.rollout.vllm.engine import VllmEngine

    torch.set_num_threads(1)
    device = start_process_group(timedelta(seconds=600))
    on_gpu = device.type == "cuda"
    dtype: Any = "bfloat16" if on_gpu else "float32"
    count, prompt, answer = (64, 512, 512) if on_gpu else (32, 8, 64)
    cache = None if on_gpu else 128
    rollout = RolloutConfig(
        dtype=dtype, kv_cache_mib=cache, gpu_memory_utilization=0.2, sleep=False
    )
    train = TrainConfig(dtype=dtype, micro_batch_tokens=4096)
    times: dict[tuple[str, bool], list[float]] = {}
    with tempfile.TemporaryDirectory() as own:
        if model is None:
            save_model(own, on_gpu)
        folder = model or own
        engines, trainers = {}, {}
        for strict in (False, True):
            engine_ranks = Topology.build(device, dp=1, tp=1)
            engines[strict] = VllmEngine(folder, rollout, prompt + answer, engine_ranks, strict)
            ranks = Topology.build(device, dp=1, fsdp=1)
            trainers[strict] = FsdpEngine.build("policy", folder, train, ranks, strict=strict)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 1000, (count, prompt), generator=draw).tolist()
    requests = [Request(row, 7 * i) for i, row in enumerate(ids)]
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    loss_fn = policy_objective(AlgoConfig())
    for run in range(runs + 1):  # the first is not counted
        for strict in (False, True):
            took, answers = timed(lambda s=strict: engines[s].generate(requests, params))
            batch = batch_of(requests, answers)
            looked, stats = timed(lambda s=strict, b=batch: trainers[s].logprobs(b, 1.0))
            difference = (stats.logprobs - batch.rollout_logprobs).abs() * batch.loss_mask
            if run == 0:
                print(json.dumps({"strict": strict, "largest difference": float(difference.max())}))
                continue
            for name, value in (("answers", took), ("logprobs", looked)):
                times.setdefault((name, strict), []).append(value)
    for run in range(runs + 1):
        for strict in (False, True):
            took, _ = timed(lambda s=strict, b=batch: trainers[s].update(b, loss_fn, 1.0))
            if run:
                times.setdefault(("update", strict), []).append(took)
    for name in ("answers", "logprobs", "update"):
        default, exact = (statistics.median(times[name, strict]) for strict in (False, True))
        print(json.dumps({"phase": name, "default_ms": round(default, 1),
                          "strict_ms": round(exact, 1), "ratio": round(exact / default, 2),
                          "device": str(device)}))  # fmt: skip
    sys.stdout.flush()
    for engine in engines.values():
        engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
