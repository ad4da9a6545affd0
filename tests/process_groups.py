"""Makes the process groups of a config for up to 1,024 ranks in one process, and compares them.

    python tests/process_groups.py --config configs/qwen3_0.6b_gsm8k_grpo_8gpu.py --ranks 1024

Each rank in turn takes torch's fake process group for its world and runs the code that makes the
groups of a run: its topologies, megatron-core's, those of checkpoints and of the vote after a step.
It writes down what it makes (distributed/nccl_rules). Ranks that do not make the same groups, in
the same order and under the same names, would wait for each other for ever on a cluster. The
fake group moves no data, so what a step sends is not seen: `pytest --strict-nccl` has real ranks
for that.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fire
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.testing._internal.distributed import fake_pg

from spmdrl.checkpoint.writer import own_groups
from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.distributed import collectives, topology
from spmdrl.distributed.nccl_rules import rules
from spmdrl.distributed.nccl_rules.events import BOTH, Creation
from spmdrl.distributed.nccl_rules.recorder import Recorder, watched_groups
from spmdrl.distributed.placement import place, training_roles
from spmdrl.distributed.stop_votes import StopVotes
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import group_count, set_group_count
from spmdrl.engines.megatron import parallel_state
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.engines.megatron.parts import degrees_of, parallel_sizes
from spmdrl.training.batch_exchange import P2PChannel
from spmdrl.training.topologies import build_topologies

LIMIT = timedelta(days=7)


@dataclass
class Made:
    """What one rank made."""

    created: list[Creation]
    counts: list[int]  # torch's counter of groups before each agreement on it
    groups: int = 0  # of which the rank is a member
    communicators: int = 0  # of these, those that may have an NCCL communicator
    seconds: float = 0.0


@dataclass
class Counts:
    """Stands in for level_group_count, which asks the other ranks: the largest count of each
    agreement is known from a pass before."""

    known: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    def level(self) -> None:
        self.own.append(group_count())
        if len(self.own) <= len(self.known):
            set_group_count(self.known[len(self.own) - 1])


def make_groups(config: PpoConfig, counts: Counts) -> None:
    """As a run does, engines and data left out."""
    everyone = Topology.build(torch.device("cpu"), dp=-1)
    placement = place(config, everyone.world)
    topologies = build_topologies(config, placement, everyone)
    for name, role in training_roles(config).items():
        ranks = topologies.trainers[name]
        if role.engine == "megatron" and ranks.here:
            RoleState.build(ranks, **parallel_sizes(degrees_of(role)))
        counts.level()
    counts.level()  # after the rollout engine
    P2PChannel(everyone)
    own_groups([everyone, *topologies.trainers.values()])
    StopVotes(everyone, config.async_steps)


@contextmanager
def fake_world(world: int, rank: int) -> Iterator[None]:
    """One rank's view of `world` ranks. Groups of any backend are fake ones, which do not keep
    their time limit: all are said to have the job's.
    """
    make = c10d._new_process_group_helper

    def helper(size: int, me: Any, ranks: Any, backend: Any, *rest: Any, **kw: Any) -> Any:
        return make(size, me, ranks, "fake", *rest, **kw)

    with ExitStack() as undo:
        undo.enter_context(patch.object(c10d, "_new_process_group_helper", helper))
        for module in (topology, collectives, parallel_state):
            undo.enter_context(patch.object(module, "timeout_of", lambda group: LIMIT))
        store = fake_pg.FakeStore()
        dist.init_process_group("fake", rank=rank, world_size=world, store=store, timeout=LIMIT)
        undo.callback(dist.destroy_process_group)
        yield


def made_by(config: PpoConfig, world: int, rank: int, known: list[int]) -> Made:
    counts, begin = Counts(known), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder, "rank_0"), BOTH, bound=False)
        with fake_world(world, rank):
            recorder.started(world, c10d._get_default_group().group_name)
            recorder.limit_s = LIMIT.total_seconds()
            with watched_groups(recorder):
                make_groups(config, counts)
        recorder.file.close()
        created = rules.read(Path(folder))[0]
    members = [group for group in recorder.groups.values() if rank in group.members]
    return Made(
        created, counts.own, len(members), sum(group.has_nccl for group in members),
        time.perf_counter() - begin,
    )  # fmt: skip


def compare(config: PpoConfig, world: int, ranks: list[int]) -> dict[int, Made]:
    """What these ranks make; raises rules.RulesBroken where two of them disagree."""
    first = {rank: made_by(config, world, rank, []) for rank in ranks}
    known: list[int] = []
    while True:  # a count that is raised moves those after it
        largest = [max(counts) for counts in zip(*(m.counts for m in first.values()), strict=True)]
        if largest == known:
            break
        known = largest
        first = {rank: made_by(config, world, rank, known) for rank in ranks}
    events = {rank: made.created for rank, made in first.items()}
    found = [*differing(events), *rules.limits(events, ended=True)]
    if found:
        raise rules.RulesBroken(found)
    return first


def differing(events: rules.Events) -> Iterator[rules.Finding]:
    """Ranks of one parent that do not make the same groups; the first difference of each."""
    made = rules.by_group(events, Creation, lambda event: None if event.is_local else event.parent)
    for parent, own in made.items():
        there = [rank for rank in parent.members if rank in events]
        for row in rules.aligned(there, own):
            finding = rules.differing(parent, row, events, ended=True)
            if finding is not None:
                yield finding
                break


def sample(world: int, most: int) -> list[int]:
    """At most so many ranks: the first and the last, and others at odd distances."""
    if world <= most:
        return list(range(world))
    ends = min(8, most // 4)
    step = max(1, world // max(1, most - 2 * ends)) | 1
    between = range(ends, world - ends, step)
    return sorted({*range(ends), *range(world - ends, world), *between[: most - 2 * ends]})


def main(config: str, ranks: int = 1024, compared: int = 48, **overrides: Any) -> None:
    """Prints what was made, by rank; exits with RulesBroken where ranks disagree.

    ranks: of the simulated job. compared: at most so many of them are run.
    """
    value = load_config(config, PpoConfig, overrides)
    made = compare(value, ranks, sample(ranks, compared))
    most = max(made.values(), key=lambda m: m.groups)
    calls = Counter(len(m.created) for m in made.values())
    print(json.dumps({
        "ranks": ranks, "compared": len(made), "groups_of_a_rank": most.groups,
        "with_a_communicator": max(m.communicators for m in made.values()),
        "calls_of_new_group": max(calls), "seconds_of_a_rank": round(most.seconds, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    fire.Fire(main)
