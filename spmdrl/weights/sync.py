"""Trainer -> engine, after every update."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import WeightsConfig
from spmdrl.engines.engine import TrainEngine
from spmdrl.engines.fsdp import DTYPES
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.topology import Topology
from spmdrl.weights.boxes import Box, numel, view, whole
from spmdrl.weights.layout import Layout, Place
from spmdrl.weights.plan import Weight, describe, make_plan
from spmdrl.weights.reshard import (
    Held,
    Transfer,
    copy_all,
    full_tensors,
    planned_bytes,
    slot_bytes,
)
from spmdrl.weights.scales import BlockScales
from spmdrl.weights.shards import Shards, agree_on_shards, lying


@dataclass(frozen=True)
class SyncStats:
    """Of one push, on this rank; bytes are those it sent to other ranks. Sum them over ranks.

    Without the scales of FP8 blocks, which are reduced over all ranks: 1/4096 of what they scale.
    """

    planned_bytes: int
    moved_bytes: int
    opaque_bytes: int  # of weights that went as full tensors; not in the above
    seconds: float


class WeightSync:
    """The way of the actor's weights into the rollout engine, planned once and pushed often.

    `dtype` is the engine's: shards are cast to it while they are packed. What the engine keeps in
    FP8 is quantised then, from the trainer's own dtype, and goes in a transfer of its own.
    """

    def __init__(
        self,
        actor: TrainEngine | None,
        actor_topology: Topology,
        rollout: RolloutEngine | None,
        rollout_topology: Topology,
        dtype: str,
        config: WeightsConfig,
        place: Callable[..., Topology] | None = None,
    ) -> None:
        """Collective over the job. actor and rollout: None outside their topologies. place: makes
        topologies, by default of torch.distributed's own group.

        Raises ValueError where the engine's weights are not the trainer's by name or shape.
        """
        self.actor, self.rollout, self.config = actor, rollout, config
        self.dtype = DTYPES[dtype]
        device = actor_topology.device
        both = sorted({*actor_topology.ranks, *rollout_topology.ranks})
        if place is None:
            place = partial(Topology.build, device)
        self.topology = place(tuple(both), dp=-1)
        self.table = table_of(rollout_topology)
        self.slot_bytes = slot_bytes(config.bucket_mib << 20, device)
        self.weights: list[Weight] = []
        self.named: dict[str, Shards] = actor.named_shards() if actor else {}
        self.holders: list[tuple[Mapping[str, Tensor | None], str]] = []
        self.transfer: Transfer | None = None
        self.fp8: Transfer | None = None  # of what the engine keeps in FP8, if anything
        self.scales: BlockScales | None = None
        self.scale_places: list[tuple[Place, Tensor]] = []  # in the engine, and what belongs there
        self.opaque: list[Weight] = []
        self.planned_bytes = -1  # worked out after the first push
        if self.topology.here:
            self.make_transfers()
        if device.type != "cpu":
            self.build_block_groups()

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for transfer in (self.transfer, self.fp8) if transfer is not None]

    def make_transfers(self) -> None:
        """Collective over the ranks of both roles."""
        control = self.topology.control
        self.weights = agree_on_shards(self.named, control)
        shapes = {w.name: w.shape for w in self.weights}
        layout = self.rollout.layout(shapes) if self.rollout else Layout()
        mine = (layout.regions, layout.opaque, layout.quantized, layout.scales)
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
        opaque = {name for _, names, _, _ in layouts for name in names}
        quantized = {name for _, _, names, _ in layouts for name in names}
        self.opaque = [w for w in self.weights if w.name in opaque]
        found = [regions for regions, _, _, _ in layouts]
        self.holders = layout.holders()
        plain = {w.name for w in self.weights if w.name not in opaque | quantized}
        if quantized:
            self.slot_bytes = max(1, self.slot_bytes // 2)  # two transfers share the bucket
        self.transfer = self.make_transfer(layout, found, plain, self.dtype)
        if quantized:
            self.scales = BlockScales(
                [w for w in self.weights if w.name in quantized], self.topology.device
            )
            self.fp8 = self.make_transfer(layout, found, quantized, torch.uint8)
            for (name, box), place in zip(layout.scales, layout.scale_places, strict=True):
                grid = self.scales.by_name[name]
                self.scale_places.append((place, view(grid, whole(grid.shape), box)))

    def make_transfer(
        self,
        layout: Layout,
        found: list[list[tuple[str, Box]]],
        names: set[str],
        dtype: torch.dtype,
    ) -> Transfer:
        """Of the weights `names`; found: the regions of each tensor-parallel rank."""
        weights = [w for w in self.weights if w.name in names]
        number = {w.name: i for i, w in enumerate(weights)}
        regions = [[(number[n], box) for n, box in mine if n in names] for mine in found]
        of_names = zip(layout.regions, layout.places, strict=True)
        places = [place for (name, _), place in of_names if name in names]
        plan = make_plan(
            dist.get_rank(), weights, regions, self.table, dtype.itemsize, self.slot_bytes
        )
        fp8 = dtype == torch.uint8
        return Transfer(
            plan, self.shards,
            lambda: [p.tensor().view(dtype) if fp8 else p.tensor() for p in places],
            self.addresses, dtype, self.topology.device, self.topology.group,
            scales=self.scales.by_name if fp8 and self.scales else None,
        )  # fmt: skip

    def build_block_groups(self) -> None:
        """Groups for the all-gathers of a GPU job. Collective over the job."""
        blocks = [transfer.plan.block for transfer in self.transfers]
        # 0: there is no such transfer
        sizes = torch.tensor((blocks + [0, 0])[:2], device=self.topology.device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        for number, block in enumerate(sizes.tolist()):
            if block:
                group = self.block_group(block)
                if number < len(self.transfers):
                    self.transfers[number].block_group = group

    def block_group(self, block: int) -> dist.ProcessGroup | None:
        mine = None
        for column in zip(*self.table, strict=True):
            for start in range(0, len(column), block):
                peers = list(column[start : start + block])
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

    def full_tensors(
        self, weights: list[Weight], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """One at a time, on the rollout's ranks; others must exhaust it as well."""
        return full_tensors(
            weights, self.shards, self.table, dtype or self.dtype, self.slot_bytes,
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
        moved = self.transfer.run() + self.push_fp8()
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
            self.planned_bytes = sum(
                planned_bytes(t.plan, t.dtype.itemsize, t.block_group is not None)
                for t in self.transfers
            )
        return SyncStats(self.planned_bytes, moved, self.opaque_bytes, time.perf_counter() - start)

    @torch.no_grad()
    def push_fp8(self) -> int:
        """Bytes that this rank sent."""
        if self.fp8 is None or self.scales is None:
            return 0
        self.scales.agree(self.shards(), self.topology.group)
        copy_all([p.tensor() for p, _ in self.scale_places], [s for _, s in self.scale_places])
        return self.fp8.run()

    @property
    def opaque_bytes(self) -> int:
        return sum(numel(whole(w.shape)) for w in self.opaque) * self.dtype.itemsize

    def check(self) -> int:
        """Proves bit by bit that the engine holds the actor's weights; returns how many."""
        if self.transfer is None:
            return 0
        # what is quantised is so from the trainer's own numbers
        tensors = self.full_tensors(self.weights, torch.float32 if self.fp8 else None)
        try:
            return self.rollout.check_weights(tensors) if self.rollout is not None else 0
        finally:
            exhaust(tensors)

    def describe(self) -> list[str]:
        """What the plan is to move, for a log; [] outside both roles."""
        if self.transfer is None:
            return []
        lines = describe(self.transfer.plan)
        if self.fp8 is not None:
            lines += ["in FP8:", *describe(self.fp8.plan)]
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
