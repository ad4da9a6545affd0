"""Memory and time of activation checkpointing: python examples/bench/activations.py

A forward and a backward pass of a Qwen3 with random weights over packed sequences, through its
backbone, for every TrainConfig.activation_checkpointing. On a CPU float32 and the sizes of the
arithmetic example's big sister; on a GPU bfloat16 and Qwen3-0.6B's layers. Modes take turns;
medians in milliseconds, most bytes at once beyond the weights and gradients, and both as ratios to
keeping everything. A JSON line each.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import fire
import torch
from torch.autograd.profiler import profile
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from spmdrl.config import TrainConfig
from spmdrl.engines.fsdp import attention, layers
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.model import backbone_hidden
from spmdrl.engines.fsdp.packed_rows import Packing

MODES: tuple[Any, ...] = (False, "selective", True)
SIZES = {
    "cpu": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
             "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}  # fmt: skip


def built(device: torch.device, how: Any) -> PreTrainedModel:
    config = TrainConfig(dtype="bfloat16" if device.type == "cuda" else "float32")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, **SIZES[device.type])).train()
    model.set_attn_implementation(attention.NAME)
    layers.use_kernels(model, config, device)
    use_checkpointing(model, how)
    return model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)


def most_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Allocated at once by `work`, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    with profile(profile_memory=True) as found:
        work()
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def main(seqs: int = 4, length: int | None = None, runs: int = 7) -> None:
    """length: tokens of every sequence; 256 on a CPU, 4096 on a GPU."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lens = torch.full((seqs,), length or (4096 if device.type == "cuda" else 256))
    packing = Packing.build(lens, device)
    positions = torch.cat([torch.arange(n) for n in lens.tolist()]).to(device)
    token_ids = torch.randint(3, 60, (int(lens.sum()),), device=device)
    models = {how: built(device, how) for how in MODES}

    def both(how: Any) -> None:
        hidden = backbone_hidden(models[how], token_ids, positions, packing)
        hidden.float().square().sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    took: dict[Any, list[float]] = {how: [] for how in MODES}
    for how in MODES:
        both(how)  # warms up, and makes the gradients
    for _ in range(runs):
        for how in MODES:
            start = time.perf_counter()
            both(how)
            took[how].append(time.perf_counter() - start)
    ms = {how: statistics.median(times) * 1e3 for how, times in took.items()}
    memory = {how: most_bytes(lambda how=how: both(how), device) for how in MODES}  # type: ignore[misc]
    for how in MODES:
        row = {"device": device.type, "checkpointing": str(how), "tokens": len(token_ids),
               "mib": round(memory[how] / 2**20, 1), "ms": round(ms[how], 1),
               "memory_ratio": round(memory[how] / memory[False], 2),
               "time_ratio": round(ms[how] / ms[False], 2)}  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    fire.Fire(main)
