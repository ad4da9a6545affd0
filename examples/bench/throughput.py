"""Our rollout beside `vllm bench throughput`: python examples/bench/throughput.py

The same work by both, on one GPU: `--prompts` prompts of `--question` random tokens, an answer of
exactly `--answer` to each at temperature 1, a model of step.py's shapes with random weights, and
the same limits for the engine. vLLM's command times itself, after a warm-up; ours, in which a
request has a seed of its own and each token its log-probability, is the median of `--runs` after
one that is not counted. A JSON line: answer tokens per second of both, and ratio, ours over
vLLM's. Without a GPU both are vLLM's build for CPUs: that says nothing of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import fire
import torch
from step import save_model

LIMIT_S = 900
# What the command `vllm bench throughput` runs; the command itself asks for a package of the name
# vllm, which the build for CPUs has not.
COMMAND = """
from vllm.benchmarks.throughput import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
"""
ALONE = {
    "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
}  # fmt: skip


def vllm_seconds(model: str, size: dict[str, int], engine: dict[str, Any]) -> float:
    """What `vllm bench throughput` reports; it runs in a process of its own."""
    with tempfile.TemporaryDirectory() as own:
        found = Path(own, "found.json")
        asked = {
            "model": model, "dataset-name": "random", "random-input-len": size["question"],
            "random-output-len": size["answer"], "num-prompts": size["prompts"],
            "num-warmups": min(32, size["prompts"]), "seed": 0, "output-json": found, **engine,
        }  # fmt: skip
        words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
        script = Path(own, "bench_throughput.py")  # a file, which a spawned engine imports again
        script.write_text(COMMAND)
        done = subprocess.run(
            [sys.executable, str(script), *words, "--disable-detokenize"], timeout=LIMIT_S,
            text=True, capture_output=True,
            env=os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        if done.returncode:
            sys.exit(f"vllm bench throughput: {done.stdout[-3000:]}{done.stderr[-5000:]}")
        result = json.loads(found.read_text())
    expected = size["prompts"] * (size["question"] + size["answer"])
    assert abs(result["total_num_tokens"] - expected) <= 0.01 * expected, result
    return result["elapsed_time"]


def our_seconds(model: str, size: dict[str, int], engine: dict[str, Any], runs: int) -> list[float]:
    os.environ.update({name: value for name, value in ALONE.items() if name not in os.environ})
    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.process import prepare_environment, start_process_group
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import Request, SamplingParams
    from spmdrl.rollout.vllm.engine import VllmEngine

    prepare_environment()
    device = start_process_group(timedelta(seconds=LIMIT_S))
    config = RolloutConfig(
        dtype=engine["dtype"], max_num_seqs=engine["max-num-seqs"], sleep=False,
        gpu_memory_utilization=engine["gpu-memory-utilization"],
        kv_cache_mib=engine.get("kv-cache-memory-bytes", 0) >> 20 or None,
    )  # fmt: skip
    ours = VllmEngine(model, config, engine["max-model-len"], Topology.build(device, dp=1, tp=1))
    draw = torch.Generator().manual_seed(0)
    params = SamplingParams(max_tokens=size["answer"], ignore_eos=True)
    took = []
    for run in range(runs + 1):  # prompts are new in each: no prefix is known
        ids = torch.randint(4, 1000, (size["prompts"], size["question"]), generator=draw).tolist()
        requests = [Request(row, seed=i + 1000 * run) for i, row in enumerate(ids)]
        begun = time.perf_counter()
        answers = ours.generate(requests, params)
        took.append(time.perf_counter() - begun)
        assert {len(answer.token_ids) for answer in answers} == {size["answer"]}
    ours.shutdown()
    torch.distributed.destroy_process_group()
    return took[1:]


def main(
    shape: str = "0.6b", prompts: int = 256, question: int = 256, answer: int = 512, runs: int = 3,
    max_num_seqs: int = 256, kv_cache_mib: int | None = None,
) -> None:  # fmt: skip
    """kv_cache_mib: of both; None: what half of the GPU leaves beside the weights."""
    on_gpu = torch.cuda.is_available()
    size = {"prompts": prompts, "question": question, "answer": answer}
    engine: dict[str, Any] = {
        "dtype": "bfloat16" if on_gpu else "float32", "max-num-seqs": max_num_seqs,
        "gpu-memory-utilization": 0.5, "max-model-len": question + answer,
    }  # fmt: skip
    if kv_cache_mib is not None:
        engine["kv-cache-memory-bytes"] = kv_cache_mib << 20
    with tempfile.TemporaryDirectory() as model:
        save_model(Path(model), shape)
        if on_gpu:
            torch.cuda.empty_cache()
        theirs = vllm_seconds(model, size, engine)
        ours = median(our_seconds(model, size, engine, runs))
    tokens = prompts * answer
    print(json.dumps({
        "shape": shape, **size, "max_num_seqs": max_num_seqs,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "ours_tokens_per_s": round(tokens / ours), "vllm_tokens_per_s": round(tokens / theirs),
        "ratio": round(theirs / ours, 3),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    fire.Fire(main)
