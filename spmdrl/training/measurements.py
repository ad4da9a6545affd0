"""Time, memory and moved bytes of a step, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from spmdrl.distributed.agreement import broadcast_from_first, gather_to_first
from spmdrl.distributed.topology import Topology
from spmdrl.training.logs.metrics import memory_of_process
from spmdrl.training.logs.trace import (
    PhaseTotals,
    SpanLog,
    Totals,
    add_totals,
    phase_metrics,
    totals_of,
)


@dataclass(frozen=True)
class StepReport:
    """Says what some ranks did since their last report."""

    time: Totals
    memory: dict[str, float]  # the most of any rank, see memory_of_process
    moved_bytes: dict[str, int]  # the sum of what the ranks sent, by kind

    def add(self, other: StepReport) -> StepReport:
        most = {name: max(value, other.memory[name]) for name, value in self.memory.items()}
        moved = {name: n + other.moved_bytes[name] for name, n in self.moved_bytes.items()}
        return StepReport(add_totals(self.time, other.time), most, moved)

    @classmethod
    def read(cls, time: list[Any], memory: dict[str, float], moved: dict[str, int]) -> StepReport:
        """Reads what `as_json` returned and JSON has turned into lists."""
        phases = {name: PhaseTotals(*values) for name, values in time[0].items()}
        return cls(Totals(phases, *time[1:]), memory, moved)

    def as_json(self) -> tuple[Any, ...]:
        return self.time, self.memory, self.moved_bytes


def report(
    spans: SpanLog, step: int, topology: Topology, moved_bytes: Mapping[str, int]
) -> StepReport:
    """Adds up the reports of the ranks of `topology`: its first rank gathers them and tells the
    sum, whose size is that of one report. Collective over the topology."""
    mine = StepReport(totals_of(*spans.report(step)), memory_of_process(), dict(moved_bytes))
    everyone = gather_to_first(mine, topology.control)
    found = None if everyone is None else reduce(StepReport.add, everyone)
    return broadcast_from_first(found, topology.control)


def timing(found: StepReport, num_tokens: float, total_s: float) -> dict[str, float]:
    """Seconds by phase over the ranks, idle share, MiB moved, the most memory and files of a rank,
    and tokens per second."""
    times = phase_metrics(found.time)
    for what, count in found.moved_bytes.items():
        times[f"moved/{what}_mib"] = count / 2**20
    for what, most in found.memory.items():
        times[f"memory/{what}"] = most
    return {**times, "time/step_s": total_s, "throughput/tokens_per_s": num_tokens / total_s}
