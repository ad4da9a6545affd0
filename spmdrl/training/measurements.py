"""Time, memory and moved bytes of a step, over all ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from spmdrl.distributed.topology import Topology
from spmdrl.training.build import RlRun
from spmdrl.training.dispatch import TrainBatches
from spmdrl.training.logs.flops import peak_tflops
from spmdrl.training.logs.metrics import memory_of_process
from spmdrl.training.logs.trace import phase_metrics


def reports(run: RlRun, step: int, topology: Topology) -> list[dict[str, Any]]:
    """Gathers what each rank of `topology` did since its last report. Collective over it."""
    roles = run.roles
    mine = {"spans": run.spans.report(step), "samples": roles.post.moved_bytes,
            "weights": roles.weight_bytes, "memory": memory_of_process()}  # fmt: skip
    roles.post.moved_bytes = roles.weight_bytes = 0
    everyone: list[Any] = [None] * topology.world
    dist.all_gather_object(everyone, mine, group=topology.control)
    return everyone


def timing(
    metrics: dict[str, float], everyone: list[dict[str, Any]], total_s: float
) -> dict[str, float]:
    """Seconds by phase over the ranks, idle share, MiB moved, the most memory and files of a rank,
    and response tokens per second."""
    times = phase_metrics([report["spans"] for report in everyone])
    for what in ("samples", "weights"):
        times[f"moved/{what}_mib"] = sum(report[what] for report in everyone) / 2**20
    for what in everyone[0]["memory"]:
        times[f"memory/{what}"] = max(report["memory"][what] for report in everyone)
    tokens = metrics["response/tokens"]
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": tokens / total_s}


def utilisation(run: RlRun, batches: TrainBatches, metrics: dict[str, float]) -> dict[str, float]:
    """Model FLOP/s of the actor's updates over what its GPUs can do; {} where that is not known, as
    on a CPU, or nothing was updated."""
    peak, seconds = peak_tflops(run.runtime.topology.device), metrics.get("time/update_actor_s")
    if peak is None or not seconds:
        return {}
    flops = run.config.algo.epochs * run.flops.of(batches.assignment.seq_lens)
    gpus = len(run.roles.actor.topology.ranks)
    return {"throughput/mfu": flops / (seconds * gpus * peak * 1e12)}
