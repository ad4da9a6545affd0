"""Compares what the ranks of a rehearsal have called, which gloo forgives and NCCL does not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spmdrl.config.words import counted
from spmdrl.distributed.nccl_rules.events import Creation, Operation
from spmdrl.distributed.nccl_rules.rules import Finding, findings, read
from spmdrl.rehearse.runs import Outcome


@dataclass(frozen=True)
class ComparedCollectives:
    """Holds what came of the comparison of one run's ranks."""

    lines: list[str]
    findings: list[Finding]


def compare(outcome: Outcome) -> ComparedCollectives:
    """Reads what the ranks of a run have written down, and compares it."""
    events = read(outcome.records)
    if not events:
        return ComparedCollectives([f"{outcome.what}: not recorded, which it is on CPU ranks"], [])
    groups = {event.group for own in events.values() for event in own}
    calls = sum(isinstance(event, Operation) for own in events.values() for event in own)
    made = sum(isinstance(event, Creation) for own in events.values() for event in own)
    found = findings(events, ended=outcome.is_done)
    if not found:
        return ComparedCollectives([
            f"{outcome.what}: {len(events)} ranks agree in {calls:,} operations over "
            f"{counted(len(groups), 'group')}, and in the {made:,} calls that made these"
        ], [])  # fmt: skip
    lines = [line for each in found for line in str(each).splitlines()]
    return ComparedCollectives(
        [f"{outcome.what}: broken rules, with the stacks of the ranks", *lines], found
    )


def broken(compared: Iterable[ComparedCollectives]) -> list[str]:
    """Returns a sentence for each rule that a run has broken."""
    rules = dict.fromkeys(each.rule for one in compared for each in one.findings)
    return [
        f"ranks do not call the same collectives (rule {rule!r}): on GPUs the run would hang or "
        "fail; the section on collectives has the stacks, docs/placement.md the rules"
        for rule in rules
    ]
