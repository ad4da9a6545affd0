"""Two engines share a long-tailed workload:

    torchrun --nproc-per-node 2 examples/bench/scheduling.py

Real vLLM engines, one per rank, on a small random Qwen3. Prompts have answers of log-normal length
(cut at 8 times the median; `--sigma 0` makes all of them equal), `--samples` of each, in random
order. In turn, `--runs` times; medians, and ratios of the best runs, which other work on the
machine disturbs least:

    alone    every engine answers the whole list, at the same time. Half of what that takes is the
             ideal: all the work of one engine, split without a rest and without a cost.
    static   engine r answers prompts r, r + 2, ...
    known    the ideal split: the lengths are known, each engine has as many tokens as the other and
             begins with its longest
    ours     spmdrl.rollout.scheduler

An engine's idle share is the part of the makespan that it does not spend in steps; cpu_s is the
processor time of the busiest rank, which is its makespan without rests on a machine that has
nothing else to do, and steps the passes of both engines. A JSON line for
each size of the engines: with places for a part of the list, and with places for all of it at once.
There the longest answer alone takes as many steps on two engines as on one, and what a step costs
whatever is in it cannot be halved; `critical_s` is what those steps cost with one request inside.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import fire
import torch
import torch.distributed as dist

from spmdrl.config import RolloutConfig
from spmdrl.data.packing import partition
from spmdrl.distributed.process import ENGINE_ENV
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Request, SamplingParams

PARAMS = SamplingParams(temperature=1.0, ignore_eos=True)


def save_model(folder: str, hidden: int, layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
        eos_token_id=2, bos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)


def workload(
    num_requests: int, median: int, seed: int, samples: int, sigma: float = 1
) -> list[Request]:
    """Log-normal lengths; the `samples` answers to a prompt, next to each other, are as long."""
    draw = random.Random(seed)
    num_prompts = -(-num_requests // samples)
    factors = [math.exp(draw.gauss(0, sigma)) for _ in range(num_prompts)]
    by_prompt = [min(median * factor, 8 * median) for factor in factors]
    lengths = [by_prompt[i // samples] for i in range(num_requests)]
    return [
        Request([5 + i % 200, 6, 7, 8], seed=i, max_tokens=max(round(length), 1))
        for i, length in enumerate(lengths)
    ]


class Run(NamedTuple):
    makespan_s: float  # over all ranks
    idle: list[float]  # each rank's share of it
    cpu_s: float  # of the rank that used most
    steps: int  # of all ranks


class Clock:
    """Seconds inside engine.step."""

    def __init__(self, engine: Any) -> None:
        self.busy_s, self.steps, self.inner = 0.0, 0, engine.step
        engine.step = self.step

    def step(self) -> Any:
        start = time.perf_counter()
        ended = self.inner()
        self.busy_s += time.perf_counter() - start
        self.steps += 1
        return ended

    def run(self, work: Callable[[], object]) -> Run:
        dist.barrier()
        self.busy_s, self.steps = 0.0, 0
        start, cpu = time.perf_counter(), time.process_time()
        work()
        took = [time.perf_counter() - start, self.busy_s, time.process_time() - cpu, self.steps]
        mine = torch.tensor(took, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        table = torch.stack(everyone)
        makespan = float(table[:, 0].max())
        idle = (1 - table[:, 1] / makespan).tolist()
        return Run(makespan, idle, float(table[:, 2].max()), int(table[:, 3].sum()))


def known_share(requests: list[Request], ranks: Topology) -> list[Request]:
    """This engine's share where all lengths are known: as many tokens each, the longest first."""
    lengths = [float(request.limit(PARAMS)) for request in requests]
    mine = partition(lengths, ranks.world)[ranks.rank]
    return [requests[i] for i in sorted(mine, key=lambda i: -lengths[i])]


def compare(
    model: str, ranks: Topology, requests: list[Request], max_num_seqs: int, runs: int, samples: int
) -> None:
    from spmdrl.rollout.scheduler import Scheduler
    from spmdrl.rollout.vllm.engine import VllmEngine

    config = RolloutConfig(dtype="float32", max_num_seqs=max_num_seqs, kv_cache_mib=512)
    engine = VllmEngine(model, config, 1024, ranks)
    scheduler, clock = Scheduler(engine, ranks), Clock(engine)
    longest = max(requests, key=lambda request: request.limit(PARAMS))
    ways: dict[str, Callable[[], object]] = {
        "alone": lambda: engine.generate(requests, PARAMS),
        "static": lambda: engine.generate(
            [r for i, r in enumerate(requests) if i // samples % ranks.world == ranks.rank], PARAMS
        ),
        "known": lambda: engine.generate(known_share(requests, ranks), PARAMS),
        "ours": lambda: scheduler.run(requests, PARAMS),
        "critical": lambda: engine.generate([longest], PARAMS),
    }
    seen: dict[str, list[Run]] = {name: [] for name in ways}
    for turn in range(runs + 1):
        for name, work in ways.items():
            result = clock.run(work)
            if turn:  # the first warms up
                seen[name].append(result)
    took = {
        name: statistics.median(r.makespan_s for r in results) for name, results in seen.items()
    }
    best = {name: min(r.makespan_s for r in results) for name, results in seen.items()}
    cpu = {name: statistics.median(r.cpu_s for r in results) for name, results in seen.items()}
    ideal = took["alone"] / ranks.world

    def idle(name: str) -> list[float]:
        shares = zip(*(r.idle for r in seen[name]), strict=True)
        return [round(statistics.median(share), 3) for share in shares]

    lengths = sorted(request.limit(PARAMS) for request in requests)
    row = {
        "max_num_seqs": max_num_seqs, "requests": len(requests), "tokens": sum(lengths),
        "median_tokens": lengths[len(lengths) // 2], "longest_tokens": lengths[-1],
        "ideal_s": round(ideal, 3), "critical_s": round(took["critical"], 3),
        "known_s": round(took["known"], 3), "ours/known": round(took["ours"] / took["known"], 3),
        "static_s": round(took["static"], 3), "ours_s": round(took["ours"], 3),
        "ours/ideal": round(took["ours"] / ideal, 3),
        "static/ideal": round(took["static"] / ideal, 3),
        "static/ours": round(took["static"] / took["ours"], 3),
        "idle_static": idle("static"), "idle_ours": idle("ours"),
        "best_ours/best_ideal": round(best["ours"] / best["alone"] * ranks.world, 3),
        "best_static/best_ours": round(best["static"] / best["ours"], 3),
        "cpu_s": {n: round(c, 2) for n, c in cpu.items()},
        "cpu_ours/ideal": round(cpu["ours"] / cpu["alone"] * ranks.world, 3),
        "cpu_static/ours": round(cpu["static"] / cpu["ours"], 3),
        "steps": {n: statistics.median(r.steps for r in seen[n]) for n in ways},
    }  # fmt: skip
    if ranks.rank == 0:
        print(json.dumps(row), flush=True)
    engine.shutdown()


def main(
    requests: int = 256, median: int = 32, places: int = 8, runs: int = 5, seed: int = 0,
    hidden: int = 192, layers: int = 4, samples: int = 8, sigma: float = 1,
) -> None:  # fmt: skip
    """places: of an engine; samples: answers to a prompt, all of one length; sigma: of the logs of
    the lengths.
    """
    for name, value in ENGINE_ENV.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Topology.build(torch.device("cpu"), dp=-1, tp=1)
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        model = str(Path(shared[0], "model"))
        if ranks.rank == 0:
            save_model(model, hidden, layers)
        dist.barrier()
        asked = workload(requests, median, seed, samples, sigma)
        for max_num_seqs in (places, requests):
            compare(model, ranks, asked, max_num_seqs, runs, samples)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fire.Fire(main)
