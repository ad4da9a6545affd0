"""Time, memory and moved bytes of a step, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import torch.distributed as dist

from spmdrl.distributed.topology import Topology
from spmdrl.training.logs.metrics import memory_of_process
from spmdrl.training.logs.trace import PhaseSeconds, SpanLog, phase_metrics


class RankReport(TypedDict):
    """Reports what a rank did since its last report; it can be written as JSON."""

    spans: tuple[PhaseSeconds, float]  # see SpanLog.report
    memory: dict[str, float]  # see memory_of_process
    moved_bytes: Mapping[str, int]  # that it sent, by kind


def reports(
    spans: SpanLog, step: int, topology: Topology, moved_bytes: Mapping[str, int]
) -> list[RankReport]:
    """Gathers the reports of the ranks of `topology`. Collective over it."""
    mine: RankReport = {
        "spans": spans.report(step),
        "memory": memory_of_process(),
        "moved_bytes": moved_bytes,
    }
    everyone: list[Any] = [None] * topology.world
    dist.all_gather_object(everyone, mine, group=topology.control)
    return everyone


def timing(everyone: list[RankReport], num_tokens: float, total_s: float) -> dict[str, float]:
    """Seconds by phase over the ranks, idle share, MiB moved, the most memory and files of a rank,
    and tokens per second."""
    times = phase_metrics([report["spans"] for report in everyone])
    for what in everyone[0]["moved_bytes"]:
        times[f"moved/{what}_mib"] = sum(report["moved_bytes"][what] for report in everyone) / 2**20
    for what in everyone[0]["memory"]:
        times[f"memory/{what}"] = max(report["memory"][what] for report in everyone)
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": num_tokens / total_s}
