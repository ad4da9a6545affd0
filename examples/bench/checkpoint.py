"""What a checkpoint costs training: the pause of one that is written meanwhile, against one that is
waited for.

    python examples/bench/checkpoint.py [--million 30] [--ranks 2] [--runs 7]

Two gloo ranks, engine fsdp, random weights and AdamW's moments: 12 bytes per weight in all. Both
ways take turns; figures are medians. The first save of either way, which makes the buffers, stands
apart. write_s is how long the thread takes until the checkpoint stands, with its checksums, synced;
memory_s the same for one in memory (docs/elastic.md), each rank being a host, with its copy on the
next. memory_pause_s is what training waits for that. One JSON line. Ends after a limit of its own,
whatever happens.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LIMIT_S = 240
GOAL = 0.1


def make_model(folder: Path, million: int) -> None:
    """A Qwen3 of about so many million weights, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    layers = max(round((million - 4) / 3.15), 1)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measure(rank: int, world: int, folder: str, runs: int, port: int) -> None:
    """One rank. Rank 0 prints."""
    from spmdrl.checkpoint.in_memory import Hosts, InMemory
    from spmdrl.checkpoint.writer import Saver
    from spmdrl.config import CheckpointConfig, TrainConfig
    from spmdrl.distributed.phases import Phases
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    signal.alarm(LIMIT_S)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank),
                   "WORLD_SIZE": str(world)}  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    config = TrainConfig(dtype="float32")
    everyone = Topology.build(torch.device("cpu"), dp=-1)
    ranks = Topology.build(torch.device("cpu"), **train_degrees(config))
    engine = build_engine("policy", f"{folder}/model", config, ranks)
    assert engine is not None
    found: dict[str, list[float]] = {
        "blocking": [], "pause": [], "write": [], "memory_pause": [], "memory": [],
    }  # fmt: skip
    savers = {}
    for name, blocking in (("blocking", True), ("pause", False)):
        settings = CheckpointConfig(keep=1, blocking=blocking)
        roles = {"actor": ranks}
        root = Path(folder, name)
        savers[name] = Saver(root, settings, Phases(everyone), roles, lambda step, path: None)
    hosts = Hosts.gather(everyone.control, f"host{rank}", 0)
    memory = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="checkpoint_bench_"))
    place = InMemory(memory, hosts)
    savers["memory_pause"] = Saver(
        memory,
        CheckpointConfig(),
        Phases(everyone),
        roles,
        lambda step, path: None,
        place,
        "memory",
    )
    place.connect(savers["memory_pause"].groups[everyone.ranks])
    for step in range(1, runs + 2):
        for name, saver in savers.items():
            dist.barrier()
            begin = time.perf_counter()
            saver.save(step, {"actor": engine}, {"engines": ["actor"]}, [])
            found[name].append(time.perf_counter() - begin)
            saver.wait()
            if name != "blocking":
                [(_, took_s)] = saver.take_metrics().items()
                found["write" if name == "pause" else "memory"].append(took_s)
    shutil.rmtree(memory)
    if rank == 0:
        print(json.dumps(summary(found, Path(folder, "pause"), world)), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def summary(found: dict[str, list[float]], root: Path, world: int) -> dict[str, Any]:
    medians = {name: statistics.median(times[1:]) for name, times in found.items()}
    size = sum(f.stat().st_size for f in root.rglob("*") if f.is_file())
    ratio = medians["pause"] / medians["blocking"]
    return {
        "state_mib": round(size / 2**20), "ranks": world,
        **{f"{name}_s": round(s, 4) for name, s in medians.items()},
        "first_pause_s": round(found["pause"][0], 4), "pause_of_blocking": round(ratio, 4),
        "best_ratio": round(min(found["pause"][1:]) / min(found["blocking"][1:]), 4),
        "goal": GOAL, "reached": ratio <= GOAL,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--million", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=7)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=".", prefix="checkpoint_bench_"))
    try:
        make_model(folder / "model", args.million)
        port = 20000 + os.getpid() % 20000
        mp.spawn(measure, (args.ranks, str(folder), args.runs, port), args.ranks)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
