"""Compares what the ranks of a run on CPUs have written down, by the rules of NCCL.

With SPMDRL_NCCL_RECORDS=<folder> in its environment each rank writes down, in order, each process
group that it makes and each operation over one, with its stack (recorder.py). A rehearsal does so,
and tests with --strict-nccl. After the run `check` compares what the ranks wrote. Where a GPU job
would hang or fail it raises RulesBroken, with the stacks of both ranks. Data travel by gloo as
without it, so a run that breaks a rule goes on to its end, and all that it breaks is found.

A GPU job's default group is assumed not to be bound to a device, as spmdrl's is not. A host's
program may have bound its own (`init_process_group(device_id=...)`): with SPMDRL_NCCL_BOUND=1 it is
taken for one. "c10d" below is torch/distributed/distributed_c10d.py of torch 2.13. The rules:

creation      All ranks of the parent (the default group of that time) make the same groups in the
              same order, under the same names (c10d.new_group's docstring; a name is a counter,
              c10d._process_group_name, and the prefix of the store's keys by which members meet).
split         The communicator of a bound group is split off the parent's by ncclCommSplit, which
              all ranks of the parent have to call. A member calls it where the group has an NCCL
              backend, a rank outside always (c10d._new_process_group_helper, "split_from",
              pytorch#145376): with a gloo group, or one that only its members make
              (use_local_synchronization), not all ranks do.
hashed name   With a bound default group DeviceMesh makes its groups by one `split_group` per axis,
              which names them by a hash of their ranks and of len(_world.pg_names)
              (c10d._hash_ranks_to_str). The gloo part of a group meets under that name: its members
              need the same one.
time limit    No group has a shorter time limit than the default group. This is a rule of spmdrl and
              not of NCCL: `split_group` and `new_group` have torch's own where they are given none.
first         The communicator of a group that is not split is made at its first operation, which
              all its ranks have to call. A batch of sends and receives that comes first is called
              by all too (c10d.batch_isend_irecv's docstring).
operation     All ranks of a group call the same collectives in the same order, all-reduces and
              broadcasts with the same shape and dtype (NCCL's user guide, "Collective Operations").
order         Two ranks use the communicators that they share in the same order, and no three or
              more wait for one another in a circle, each of two communicators (c10d.new_group's
              docstring; NCCL's user guide, "Using multiple NCCL communicators concurrently").
CPU tensor    No CPU tensor goes over a group which has NCCL alone (ProcessGroupNCCL refuses it).

What a CPU run does not show is read from the source of the caller. A group that is given "gloo" as
a literal, there or where that function is called, is gloo on GPUs too; one that is given a variable
has gloo for CPU tensors and NCCL for those of GPUs, as in topology.group_of; any other has its
parent's backends. A tensor counts as a CPU tensor where the function that calls the collective
assigned it last from torch.zeros or the like without `device`, or from `.cpu()`; any other counts
as a device's. So a CPU tensor that comes from elsewhere is not found by "CPU tensor", and is held
to "order" though gloo carries it. Of an operation whose tensor one rank makes on the CPU all ranks'
are CPU tensors; of the batches over a group all are, where one is. So are objects
(c10d.all_gather_object and others), where the group has gloo at all (c10d._get_object_coll_device).

Not seen: collectives of torch.ops._c10d_functional (DTensor), which C++ calls; streams; how long an
operation takes. Sends and receives outside of batches are not compared.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, count, zip_longest
from pathlib import Path
from typing import Any

from spmdrl.distributed.nccl_rules.events import (
    ALIKE,
    BATCH,
    COLLECTIVES,
    POINT_TO_POINT,
    Creation,
    Group,
    Operation,
    Stack,
)


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.text}"


class RulesBroken(AssertionError):
    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.rules = {finding.rule for finding in findings}
        super().__init__(
            "\n\n".join(["on GPUs this run breaks rules of NCCL:", *map(str, findings)])
        )


def check(folder: Path, ended: bool) -> None:
    """Compares what the ranks of a run wrote. ended: all came to their end, so nothing is missing
    because a rank was stopped. Raises RulesBroken.
    """
    found = findings(read(folder), ended)
    if found:
        raise RulesBroken(found)


Events = dict[int, list[Any]]  # by rank, in order


def read(folder: Path) -> Events:
    events: Events = {}
    for path in folder.glob("rank_*"):
        rank = int(path.name[5:])
        events[rank] = []
        with path.open("rb") as file:
            while file.peek(1):
                try:
                    events[rank].append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break  # the rank was killed as it wrote
    return events


def findings(events: Events, ended: bool) -> list[Finding]:
    rules = (creations, local_creations, limits, operations, orders, cpu_tensors)
    return [finding for rule in rules for finding in rule(events, ended)]


def both(rule: str, said: str, one: tuple[int, Any], other: tuple[int, Any]) -> Finding:
    """Returns a finding with the stacks of two ranks. one, other: (rank, event)."""
    return several(rule, said, [one, other])


def several(rule: str, said: str, events: Sequence[tuple[int, Any]]) -> Finding:
    """Returns a finding with the stacks of all these. events: (rank, event)."""
    shown = "".join(f"\n  rank {rank} {event}:{text(event.stack)}" for rank, event in events)
    return Finding(rule, said + shown)


def lone(rule: str, said: str, one: tuple[int, Any], other: int, events: Events) -> Finding:
    """Returns a finding where the other rank does not come: what it did last is shown. Of a rank
    on another host the folder may have nothing.
    """
    last = events.get(other, [])[-1:]
    did = "".join(f" {event}:{text(event.stack)}" for event in last) or " nothing"
    rank, event = one
    return Finding(
        rule, f"{said}\n  rank {rank} {event}:{text(event.stack)}\n  rank {other} did last{did}"
    )


def text(stack: Stack) -> str:
    return "".join(f"\n    {file}:{line} in {function}" for file, line, function in stack)


def by_group(events: Events, kind: type, key: Callable[[Any], Any]) -> dict[Any, Events]:
    """The events of a kind by group and rank."""
    sorted_: dict[Any, Events] = defaultdict(lambda: defaultdict(list))
    for rank, own in events.items():
        for event in own:
            if isinstance(event, kind) and key(event) is not None:
                sorted_[key(event)][rank].append(event)
    return sorted_


def aligned(ranks: Sequence[int], own: Events) -> Iterator[dict[int, Any]]:
    """The n-th event of each rank; None on a rank that has fewer."""
    for row in zip_longest(*(own.get(rank, []) for rank in ranks)):
        yield dict(zip(ranks, row, strict=True))


def creations(events: Events, ended: bool) -> Iterator[Finding]:
    """creation, split and hashed name: what all ranks of a parent do together. Once
    per place in the source."""
    seen: set[Any] = set()
    made = by_group(events, Creation, lambda event: None if event.is_local else event.parent)
    for parent, own in made.items():
        for row in aligned(parent.members, own):
            finding = differing(parent, row, events, ended)
            if finding is not None:
                yield finding
                break
            places = tuple(event.stack[:2] for event in row.values() if event is not None)
            for finding in (*unsplit(parent, row), *misnamed(row)):
                if (finding.rule, places) not in seen:
                    yield finding
                seen.add((finding.rule, places))


def differing(
    parent: Group, row: dict[int, Creation | None], events: Events, ended: bool
) -> Finding | None:
    """The n-th creation of each rank has the same arguments and the same name."""
    there = [(rank, event) for rank, event in row.items() if event is not None]
    one = there[0]
    for other in there[1:]:
        if agreed(one[1]) != agreed(other[1]):
            said = f"ranks of {parent} do not make the same groups in the same order:"
            return both("creation", said, one, other)
    missing = [rank for rank, event in row.items() if event is None]
    if missing and ended:
        said = f"not every rank of {parent} makes a group:"
        return lone("creation", said, one, missing[0], events)
    return None


def agreed(event: Creation) -> tuple[Any, ...]:
    name = None if event.is_split else event.group.name
    return event.is_split, event.parts, event.limit_s, name, event.group.backends


def unsplit(parent: Group, row: dict[int, Creation | None]) -> Iterator[Finding]:
    calls = {rank: event for rank, event in row.items() if event and event.calls_split}
    spared = {rank: event for rank, event in row.items() if event and not event.calls_split}
    if calls and spared:
        said = (
            f"ranks {sorted(calls)} call ncclCommSplit on {parent} and wait there for ranks "
            f"{sorted(spared)}, which do not:"
        )
        yield both("split", said, next(iter(calls.items())), next(iter(spared.items())))


def misnamed(row: dict[int, Creation | None]) -> Iterator[Finding]:
    """Each rank's own part of a split, by members."""
    parts: dict[tuple[int, ...], list[tuple[int, Creation]]] = defaultdict(list)
    for rank, event in row.items():
        if event is not None and event.is_split and event.group.members:
            parts[event.group.members].append((rank, event))
    for members, named in parts.items():
        other = [pair for pair in named if pair[1].group.name != named[0][1].group.name]
        if other:
            names = {rank: event.group.name[:8] for rank, event in named}
            said = (
                f"DeviceMesh names the group of ranks {list(members)} by how many groups "
                f"a rank is in (_world.pg_names), which differs: {names}:"
            )
            yield both("hashed name", said, named[0], other[0])


def local_creations(events: Events, ended: bool) -> Iterator[Finding]:
    for rank, own in events.items():
        for event in own:
            if isinstance(event, Creation) and event.is_local and event.calls_split:
                outside = [r for r in event.parent.members if r not in event.group.members]
                if outside:
                    said = f"{event.group} is split off {event.parent} by its members alone:"
                    yield lone("split", said, (rank, event), outside[0], events)


def limits(events: Events, ended: bool) -> Iterator[Finding]:
    """Once per place in the source, by the first rank that has it."""
    places = set()
    for rank, own in sorted(events.items()):
        for event in own:
            if isinstance(event, Creation) and event.limit_s < event.default_limit_s:
                place = event.stack[0]
                if place not in places:
                    said = f"the default group has a limit of {event.default_limit_s:.0f} s, but"
                    shown = f"{said}\n  rank {rank} {event}:{text(event.stack)}"
                    yield Finding("time limit", shown)
                places.add(place)


def operations(events: Events, ended: bool) -> Iterator[Finding]:
    """first and operation: what the members of a group call, in order."""
    used = by_group(events, Operation, lambda event: event.group)
    by_gloo = {key for own in events.values() for key, event in numbers(own) if event.on_cpu}
    for group, own in used.items():
        on_cpu = any(e.name == BATCH and e.on_cpu for mine in own.values() for e in mine)
        ours = {r: [e for e in mine if e.name != BATCH or not on_cpu] for r, mine in own.items()}
        starts = {rank: first_of(ours.get(rank, []), by_gloo) for rank in group.members}
        batch = next(((r, e) for r, e in starts.items() if e and e.name == BATCH), None)
        for rank, event in starts.items():
            if batch is not None and event is not None and event.name != BATCH:
                said = f"a batch is the first call of {group} on some of its ranks only:"
                yield both("first", said, batch, (rank, event))
                break
        calls = [(r, e) for r, e in starts.items() if e and e.name not in POINT_TO_POINT]
        absent = [rank for rank, event in starts.items() if event is None]
        if ended and calls and absent:
            said = f"not every rank calls the first operation of {group}:"
            yield lone("first", said, calls[0], absent[0], events)
        else:
            yield from unmatched(group, own, events, ended)


def first_of(own: list[Operation], by_gloo: set[tuple[Group, int]]) -> Operation | None:
    """The first operation of a rank over a group that is NCCL's on a GPU job."""
    carried = {id(event) for key, event in numbers(own) if key in by_gloo}
    return next((e for e in own if not e.on_cpu and id(e) not in carried), None)


def unmatched(group: Group, own: Events, events: Events, ended: bool) -> Iterator[Finding]:
    collectives = {r: [e for e in mine if e.name in COLLECTIVES] for r, mine in own.items()}
    for row in aligned(group.members, collectives):
        there = [(rank, event) for rank, event in row.items() if event is not None]
        other = [pair for pair in there if alike(pair[1]) != alike(there[0][1])]
        missing = [rank for rank, event in row.items() if event is None]
        if other:
            said = f"ranks of {group} do not call the same operations in the same order:"
            yield both("operation", said, there[0], other[0])
        elif missing and ended:
            said = f"not every rank of {group} calls an operation:"
            yield lone("operation", said, there[0], missing[0], events)
        if other or missing:
            return


def alike(event: Operation) -> tuple[Any, ...]:
    return event.name, event.tensors if event.name in ALIKE else ()


def orders(events: Events, ended: bool) -> Iterator[Finding]:
    """Collectives of device tensors over the groups that two ranks share, the n-th of each. Once
    per pair of places in the source."""
    numbered = {rank: list(numbers(own)) for rank, own in events.items()}
    by_gloo = {key for own in numbered.values() for key, event in own if event.on_cpu}
    seen: set[Any] = set()
    for one, other in combinations(sorted(events), 2):
        shared = [
            [(key, event) for key, event in numbered[rank]
             if key not in by_gloo and {one, other} <= set(event.group.members)]
            for rank in (one, other)
        ]  # fmt: skip
        pairs = zip(*shared, strict=False)
        differs = next(((a, b) for (i, a), (j, b) in pairs if i != j), None)
        places = differs and tuple(event.stack[0] for event in differs)
        if differs is not None and places not in seen:
            said = "two communicators are used in different orders:"
            yield both("order", said, (one, differs[0]), (other, differs[1]))
        seen.add(places)
    if seen <= {None}:
        yield from circle({
            rank: [(key, event) for key, event in own if key not in by_gloo]
            for rank, own in numbered.items()
        })  # fmt: skip


Calls = list[tuple[tuple[Group, int], Operation]]  # of one rank, in order


def circle(calls: dict[int, Calls]) -> Iterator[Finding]:
    """Lets each rank wait in its calls for all members, as NCCL may. Yields ranks that wait for one
    another then, though any two of them use what they share in the same order.
    """
    stuck = waiting_ranks(calls)
    waits_for = {
        rank: [r for r in event.group.members if r in stuck and stuck[r][0] != key]
        for rank, (key, event) in stuck.items()
    }
    while ended := [rank for rank, others in waits_for.items() if not others]:
        for rank in ended:  # it waits for a rank that does not come, which other rules tell
            del waits_for[rank]
        waits_for = {rank: [r for r in rs if r in waits_for] for rank, rs in waits_for.items()}
    if waits_for:
        path = [min(waits_for)]
        while path[-1] not in path[:-1]:
            path.append(waits_for[path[-1]][0])
        around = path[path.index(path[-1]) : -1]
        said = f"ranks {around} wait for one another in a circle, each for the next:"
        yield several("order", said, [(rank, stuck[rank][1]) for rank in around])


def waiting_ranks(calls: dict[int, Calls]) -> dict[int, tuple[tuple[Group, int], Operation]]:
    """Returns the call in which each rank waits where no rank can go on; none of those that have
    come to their end.
    """
    at = dict.fromkeys(calls, 0)
    there: dict[tuple[Group, int], set[int]] = defaultdict(set)
    going = list(calls)
    while going:
        rank = going.pop()
        if at[rank] < len(calls[rank]):
            key, event = calls[rank][at[rank]]
            there[key].add(rank)
            if there[key] == set(event.group.members):
                for member in event.group.members:
                    at[member] += 1
                going += event.group.members
    return {rank: own[at[rank]] for rank, own in calls.items() if at[rank] < len(own)}


def numbers(own: list[Any]) -> Iterator[tuple[tuple[Group, int], Operation]]:
    """The collectives, each with how many there were before it over its group."""
    counters: dict[Group, Iterator[int]] = defaultdict(count)
    for event in own:
        if isinstance(event, Operation) and event.name in COLLECTIVES:
            yield (event.group, next(counters[event.group])), event


def cpu_tensors(events: Events, ended: bool) -> Iterator[Finding]:
    """Once per place in the source, with the stacks of two ranks where two do it."""
    places: dict[Any, list[tuple[int, Operation]]] = defaultdict(list)
    for rank, own in sorted(events.items()):
        for event in own:
            if isinstance(event, Operation) and event.on_cpu and "cpu" not in event.group.backends:
                places[event.stack[0]].append((rank, event))
    for pairs in places.values():
        one = pairs[0]
        other = next((pair for pair in pairs if pair[0] != one[0]), None)
        said = "a CPU tensor goes over a group that has NCCL alone:"
        if other is not None:
            yield both("CPU tensor", said, one, other)
        else:
            yield Finding("CPU tensor", f"{said}\n  rank {one[0]} {one[1]}:{text(one[1].stack)}")
