"""Trainer -> engine, after every update."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import WeightsConfig
from spmdrl.engines.engine import TrainEngine
from spmdrl.engines.fsdp import DTYPES
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.topology import Topology
from spmdrl.weights.boxes import numel, whole
from spmdrl.weights.layout import Layout
from spmdrl.weights.plan import Plan, Weight, describe, make_plan
from spmdrl.weights.reshard import Held, Transfer, full_tensors, planned_bytes, slot_bytes
from spmdrl.weights.shards import Shards, agree_on_shards, lying


@dataclass(frozen=True)
class SyncStats:
    """Of one push, on this rank; bytes are those it sent to other ranks. Sum them over ranks."""

    planned_bytes: int
    moved_bytes: int
    opaque_bytes: int  # of weights that went as full tensors; not in the above
    seconds: float


class WeightSync:
    """The way of the actor's weights into the rollout engine, planned once and pushed often.

    `dtype` is the engine's: shards are cast to it while they are packed.
    """

    def __init__(
        self,
        actor: TrainEngine | None,
        actor_topology: Topology,
        rollout: RolloutEngine | None,
        rollout_topology: Topology,
        dtype: str,
        config: WeightsConfig,
    ) -> None:
        """Collective over the job. actor and rollout: None outside their topologies.

        Raises ValueError where the engine's weights are not the trainer's by name or shape.
        """
        self.actor, self.rollout, self.config = actor, rollout, config
        self.dtype = DTYPES[dtype]
        device = actor_topology.device
        both = sorted({*actor_topology.ranks, *rollout_topology.ranks})
        self.topology = Topology.build(device, both, dp=-1)
        self.table = table_of(rollout_topology)
        self.slot_bytes = slot_bytes(config.bucket_mib << 20, device)
        self.weights: list[Weight] = []
        self.named: dict[str, Shards] = actor.named_shards() if actor else {}
        self.holders: list[tuple[Mapping[str, Tensor | None], str]] = []
        self.transfer: Transfer | None = None
        self.opaque: list[Weight] = []
        self.planned_bytes = -1  # worked out after the first push
        block_group = None
        if self.topology.here:
            plan, layout = self.make_plan()
            self.transfer = Transfer(
                plan, self.shards, lambda: [place.tensor() for place in layout.places],
                self.addresses, self.dtype, device, self.topology.group,
            )  # fmt: skip
            self.holders = layout.holders()
        if device.type != "cpu":
            block_group = self.build_block_groups()
            if self.transfer is not None:
                self.transfer.block_group = block_group

    def make_plan(self) -> tuple[Plan, Layout]:
        """Collective over the ranks of both roles."""
        control = self.topology.control
        self.weights = agree_on_shards(self.named, control)
        shapes = {w.name: w.shape for w in self.weights}
        number = {w.name: i for i, w in enumerate(self.weights)}
        layout = self.rollout.layout(shapes) if self.rollout else Layout()
        mine = (layout.regions, layout.opaque)
        digest = hashlib.sha256(pickle.dumps(mine)).hexdigest()
        me, first = dist.get_rank(), self.table[0]
        everyone: list[tuple] = [()] * self.topology.world
        said = (digest, mine if me in first else None)
        dist.all_gather_object(everyone, said, group=control)
        by_rank = dict(zip(self.topology.ranks, everyone, strict=True))
        for row in self.table:
            for rank, model in zip(row, first, strict=True):
                if by_rank[rank][0] != by_rank[model][0]:
                    raise ValueError(f"the engines of ranks {model} and {rank} differ in layout")
        layouts = [by_rank[rank][1] for rank in first]
        opaque = {name for _, names in layouts for name in names}
        self.opaque = [w for w in self.weights if w.name in opaque]
        kept = [i for i, (name, _) in enumerate(layout.regions) if name not in opaque]
        layout.places = [layout.places[i] for i in kept]
        regions = [
            [(number[name], box) for name, box in found if name not in opaque]
            for found, _ in layouts
        ]
        plan = make_plan(
            me, self.weights, regions, self.table, self.dtype.itemsize, self.slot_bytes
        )
        return plan, layout

    def build_block_groups(self) -> dist.ProcessGroup | None:
        """Groups for the all-gathers of a GPU job. Collective over the job."""
        block = torch.tensor([self.transfer.plan.block if self.transfer else 0])
        dist.all_reduce(block, dist.ReduceOp.MAX)
        mine = None
        for column in zip(*self.table, strict=True):
            for start in range(0, len(column), int(block)):
                peers = list(column[start : start + int(block)])
                group = dist.new_group(peers) if len(peers) > 1 else None
                if dist.get_rank() in peers:
                    mine = group
        return mine

    def shards(self) -> Held:
        return lying(self.named)

    @torch.no_grad()
    def addresses(self) -> tuple[int, ...]:
        """Offloading and sleeping move weights, which the transfer then looks up anew."""
        shards = [t.data_ptr() for held in self.named.values() for t in held.tensors()]
        places = [held[name].data_ptr() for held, name in self.holders]  # type: ignore[union-attr]
        return (*shards, *places)

    def full_tensors(self, weights: list[Weight]) -> Iterator[tuple[str, Tensor]]:
        """One at a time, on the rollout's ranks; others must exhaust it as well."""
        return full_tensors(
            weights, self.shards, self.table, self.dtype, self.slot_bytes,
            self.topology.device, self.topology.group,
        )  # fmt: skip

    def push(self) -> SyncStats:
        """Puts the actor's weights into the engine. Collective over the ranks of both roles.

        Requests in the engine go on under the new weights. Raises WeightMismatch with config.check
        where the engine does not hold what was sent. Does nothing on ranks outside both roles.
        """
        start = time.perf_counter()
        if self.transfer is None:
            return SyncStats(0, 0, 0, 0.0)
        moved = self.transfer.run()
        if self.opaque:
            tensors = self.full_tensors(self.opaque)
            try:
                if self.rollout is not None:
                    self.rollout.load_opaque(tensors)
            finally:
                exhaust(tensors)
        if self.rollout is not None:
            self.rollout.finish_load()
        if self.config.check:
            self.check()
        if self.planned_bytes < 0:
            padded = self.transfer.block_group is not None
            self.planned_bytes = planned_bytes(self.transfer.plan, self.dtype.itemsize, padded)
        return SyncStats(self.planned_bytes, moved, self.opaque_bytes, time.perf_counter() - start)

    @property
    def opaque_bytes(self) -> int:
        return sum(numel(whole(w.shape)) for w in self.opaque) * self.dtype.itemsize

    def check(self) -> int:
        """Proves bit by bit that the engine holds the actor's weights; returns how many."""
        if self.transfer is None:
            return 0
        tensors = self.full_tensors(self.weights)
        try:
            return self.rollout.check_weights(tensors) if self.rollout is not None else 0
        finally:
            exhaust(tensors)

    def describe(self) -> list[str]:
        """What the plan is to move, for a log; [] outside both roles."""
        if self.transfer is None:
            return []
        lines = describe(self.transfer.plan)
        if self.opaque:
            lines.append(f"  as full tensors: {[w.name for w in self.opaque[:5]]} ...")
        return lines


def exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """So that ranks whose engine did not want them all, or failed, leave no other rank waiting."""
    for _ in tensors:
        pass


def table_of(rollout: Topology) -> list[list[int]]:
    """Global rank of [engine][tensor-parallel rank]; axes dp and tp."""
    tp = rollout.axis_size("tp")
    return [list(rollout.ranks[i : i + tp]) for i in range(0, rollout.world, tp)]
