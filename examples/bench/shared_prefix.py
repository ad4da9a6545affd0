"""Times an update with a group's prompt computed once, and with each answer's own, in turns.

    python examples/bench/shared_prefix.py [--rounds 7] [--shapes 60:10:8:32,256:512:8:2]

shapes: tokens of a prompt, tokens of an answer, answers to a prompt, prompts. On a CPU a Qwen3 of
4 layers of 256, in float32, two threads; on a GPU one of Qwen3-0.6B's shape, in bfloat16. Prints a
line of JSON for each shape: medians in seconds, their ratio, tokens that are computed, and how far
the two gradient norms are apart.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from statistics import median

import fire

from spmdrl.distributed.env import before_torch

before_torch()
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: E402

from spmdrl.algo.objectives import policy_objective  # noqa: E402
from spmdrl.config import AlgoConfig, OptimConfig, TrainConfig  # noqa: E402
from spmdrl.data.packing import empty_batch  # noqa: E402
from spmdrl.data.shared_prefix import units_by_prefix  # noqa: E402
from spmdrl.distributed.topology import Topology, train_degrees  # noqa: E402
from spmdrl.engines.fsdp.engine import FsdpEngine  # noqa: E402
from spmdrl.types import Batch  # noqa: E402

SHAPES = "60:10:8:32,256:512:8:2,20:64:8:16,1000:50:8:2,200:2000:4:1,500:2500:2:1"
SMALL = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
QWEN3_06B = {
    "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
DROPPED = 2  # rounds


def main(rounds: int = 7, shapes: str = SHAPES, threads: int = 2) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/pg", rank=0, world_size=1)
        torch.manual_seed(0)
        shape = QWEN3_06B if on_gpu else SMALL
        with torch.device(device):
            model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
        model.save_pretrained(folder)
        engines = {share: engine_of(folder, share, device) for share in (False, True)}
        for text in str(shapes).split(","):
            prompt, answer, n, prompts = map(int, text.split(":"))
            batch = batch_of(prompt, answer, n, prompts, int(shape["vocab_size"]))
            print(json.dumps({"shape": text, **compare(engines, batch, rounds)}), flush=True)
        dist.destroy_process_group()


def engine_of(folder: str, share: bool, device: torch.device) -> FsdpEngine:
    config = TrainConfig(
        dtype="float32" if device.type == "cpu" else "bfloat16", shared_prefix=share,
        optim=OptimConfig(lr=1e-9),
    )  # fmt: skip
    topology = Topology.build(device, **train_degrees(config))
    return FsdpEngine.build("policy", str(Path(folder)), config, topology)


def batch_of(prompt: int, answer: int, n: int, prompts: int, vocab: int) -> Batch:
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.full((prompts * n,), prompt + answer))
    asked = torch.randint(0, vocab, (prompts, 1, prompt), generator=draw).expand(-1, n, -1)
    answers = torch.randint(0, vocab, (prompts, n, answer), generator=draw)
    batch.token_ids = torch.cat([asked, answers], dim=2).flatten()
    batch.loss_mask = torch.cat([torch.zeros(prompt), torch.ones(answer)]).repeat(prompts * n)
    batch.groups = torch.arange(prompts).repeat_interleave(n)
    batch.advantages = torch.randn(batch.num_tokens, generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def compare(engines: dict[bool, FsdpEngine], batch: Batch, rounds: int) -> dict[str, float]:
    seconds: dict[bool, list[float]] = {share: [] for share in engines}
    norms: dict[bool, float] = {}
    for _ in range(rounds + DROPPED):
        for share, engine in engines.items():
            start = time.perf_counter()
            found = engine.update(batch, policy_objective(AlgoConfig()), 1.0)  # waits at its end
            seconds[share].append(time.perf_counter() - start)
            norms[share] = found["grad_norm"]
    whole, shared = (median(seconds[share][DROPPED:]) for share in (False, True))
    units = units_by_prefix(batch, engines[True].config.micro_batch_tokens)
    saved = sum((len(unit.seqs) - 1) * unit.prefix for unit in units)
    return {
        "whole_s": round(whole, 4), "shared_s": round(shared, 4),
        "times_as_fast": round(whole / shared, 2),
        "tokens": batch.num_tokens, "computed": batch.num_tokens - saved,
        "norms_differ": abs(norms[True] / norms[False] - 1),
    }  # fmt: skip


if __name__ == "__main__":
    fire.Fire(main)
