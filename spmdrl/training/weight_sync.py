"""Trainer -> engine, after every update."""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.config import WeightsConfig
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.topology import Topology, group_of
from spmdrl.engines.base import TrainEngine
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.mtp_layers import is_mtp
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.weight_check import clear_weights, require_written
from spmdrl.weights.boxes import Box, numel, view, whole
from spmdrl.weights.bucket_messages import Held
from spmdrl.weights.checkpoint_names import is_adapter
from spmdrl.weights.engine_layout import Layout, ParamView
from spmdrl.weights.fp8_scales import BlockScales
from spmdrl.weights.holders import agree_on_shards
from spmdrl.weights.plan import Weight, describe, make_transfer_plan
from spmdrl.weights.shards import Derived, Shards, derived_of, lying, rounds_of
from spmdrl.weights.transfer import Transfer, full_tensors, planned_bytes, slot_bytes


@dataclass(frozen=True)
class SyncStats:
    """The sizes of one push on this rank; bytes are those that it sent to other ranks. Sum them
    over ranks.

    Without the scales of FP8 blocks, which are reduced over all ranks: 1/4096 of what they scale.
    """

    planned_bytes: int
    moved_bytes: int
    opaque_bytes: int  # of weights that went as full tensors; not in the above
    seconds: float


@dataclass
class PushRound:
    """Weights that are sent together; all of them, unless some are worked out first (derived.py).

    Those in `opaque` go as full tensors, those of `fp8` are quantised on the way. What the engine
    keeps in float32 beside half-precision weights goes in a transfer of its own, `float32`, if the
    trainer computes with it in float32 too; else it is rounded as the others are.
    """

    weights: list[Weight]
    once: bool  # of a base that stays as it is: sent with the first push alone
    transfer: Transfer
    float32: Transfer | None = None
    fp8: Transfer | None = None  # of what the engine keeps in FP8, if anything
    scales: BlockScales | None = None
    scale_places: list[tuple[ParamView, Tensor]] = field(default_factory=list)  # in the engine, and
    # what belongs there
    opaque: list[Weight] = field(default_factory=list)
    float32_opaque: list[Weight] = field(default_factory=list)
    as_they_are: list[Weight] = field(default_factory=list)  # all that go in float32
    planned_bytes: int = -1  # worked out after the first push

    @property
    def transfers(self) -> list[Transfer]:
        every = (self.transfer, self.float32, self.fp8)
        return [transfer for transfer in every if transfer is not None]

    @property
    def rounded(self) -> list[Weight]:
        """Lists the weights that go in the engine's dtype, or quantised."""
        exact = {weight.name for weight in self.as_they_are}
        return [weight for weight in self.weights if weight.name not in exact]

    @property
    def names(self) -> list[str]:
        return [weight.name for weight in self.weights]

    def plan_bytes(self) -> int:
        if self.planned_bytes < 0:
            self.planned_bytes = sum(
                planned_bytes(t.plan, t.dtype.itemsize, t.block_group is not None)
                for t in self.transfers
            )
        return self.planned_bytes

    @property
    def opaque_bytes(self) -> int:
        itemsize = self.transfer.dtype.itemsize
        wide = sum(numel(whole(w.shape)) for w in self.float32_opaque) * torch.float32.itemsize
        return sum(numel(whole(w.shape)) for w in self.opaque) * itemsize + wide


def tensors_at(places: list[ParamView], viewed_as: torch.dtype | None) -> list[Tensor]:
    """Returns the engine's tensors at these places, viewed as another dtype of their size."""
    tensors = [place.tensor() for place in places]
    return tensors if viewed_as is None else [tensor.view(viewed_as) for tensor in tensors]


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
        topology: Topology | None = None,
        in_place: bool = False,
    ) -> None:
        """Collective over the job. actor and rollout: None outside their topologies. topology: of
        the ranks of both; None: it is made. in_place: no role's weights leave the GPU between
        pushes, so that a push may keep its views of them for the next; on a CPU it always does.

        Raises ValueError where the engine's weights are not the trainer's by name or shape.
        """
        self.actor, self.rollout, self.config = actor, rollout, config
        self.rollout_topology = rollout_topology
        self.dtype = DTYPES[dtype]
        device = actor_topology.device
        self.in_place = in_place or device.type == "cpu"
        both = {*actor_topology.ranks, *rollout_topology.ranks}
        self.topology = topology or Topology.build(device, tuple(both), dp=-1)
        self.table = table_of(rollout_topology)
        self.slot_bytes = slot_bytes(config.bucket_mib << 20, device)
        self.adapter_apart = config.lora == "adapter"
        self.named: dict[str, Shards] = {}
        if actor is not None:
            apart = self.adapter_apart
            named = actor.named_shards(merged=False) if apart else actor.named_shards()
            model = actor.pretrained[0]  # the engine samples without what predicts several tokens
            self.named = {name: held for name, held in named.items() if not is_mtp(name, model)}
        self.derived: Derived | None = derived_of(self.named)
        self.rounds: list[PushRound] = []
        self.base_is_there = False
        if self.topology.here:
            self.make_transfers()
        if device.type != "cpu":
            self.build_block_groups()

    @property
    def weights(self) -> list[Weight]:
        return [weight for group in self.rounds for weight in group.weights]

    @property
    def transfers(self) -> list[Transfer]:
        return [transfer for group in self.rounds for transfer in group.transfers]

    def make_transfers(self) -> None:
        """Collective over the ranks of both roles."""
        self.topology.connect()  # some ranks may have nothing to send or to receive
        control = self.topology.control
        weights = agree_on_shards(self.named, control)
        shapes = {w.name: w.shape for w in weights}
        layout = self.rollout.layout(shapes) if self.rollout else Layout()
        layouts = self.layouts_of_an_engine(layout)
        opaque = {name for mine in layouts for name in mine.opaque}
        quantized = {name for mine in layouts for name in mine.quantized}
        wide = {name for mine in layouts for name in mine.float32}
        found = [mine.regions for mine in layouts]
        if quantized:
            self.slot_bytes = max(1, self.slot_bytes // 2)  # two transfers share the bucket
        for group, once in self.grouped(weights):
            self.rounds.append(
                self.make_round(group, once, layout, found, opaque, quantized, wide - quantized)
            )

    def layouts_of_an_engine(self, layout: Layout) -> list[Layout]:
        """Returns the layout of each tensor-parallel rank, without its places, which is the same in
        all engines; each is sent once, by the first engine. Collective.

        Raises ValueError where two engines differ.
        """
        mine = replace(layout, places=[], scale_places=[])
        digest = hashlib.sha256(pickle.dumps(mine)).hexdigest()
        everyone = gather_to_all(digest, self.topology.control)
        by_rank = dict(zip(self.topology.ranks, everyone, strict=True))
        first = self.table[0]
        for row in self.table:
            for rank, model in zip(row, first, strict=True):
                if by_rank[rank] != by_rank[model]:
                    raise ValueError(f"the engines of ranks {model} and {rank} differ in layout")
        layouts = []
        for rank in first:
            told = [mine if rank == dist.get_rank() else None]
            dist.broadcast_object_list(told, rank, group=self.topology.control)
            assert told[0] is not None
            layouts.append(told[0])
        return layouts

    def grouped(self, weights: list[Weight]) -> list[tuple[list[Weight], bool]]:
        """(weights of a round, whether they are sent but once)."""
        if self.adapter_apart:
            base = [w for w in weights if not is_adapter(w.name)]
            rounds = [base, [w for w in weights if is_adapter(w.name)]]
        else:
            limit = self.config.bucket_mib << 20
            if any(weight.derived for weight in weights):
                limit //= 2
                self.slot_bytes = max(1, self.slot_bytes // 2)  # half is for what is worked out
            rounds = rounds_of(weights, limit)
        if self.derived is not None:
            self.derived.arrange([[weight.name for weight in group] for group in rounds])
        return [(group, self.adapter_apart and i == 0) for i, group in enumerate(rounds)]

    def make_round(
        self,
        weights: list[Weight],
        once: bool,
        layout: Layout,
        found: list[list[tuple[str, Box]]],
        opaque: set[str],
        quantized: set[str],
        wide: set[str],
    ) -> PushRound:
        """found: the regions of each tensor-parallel rank."""
        wide = wide & {w.name for w in weights if w.exact}
        if self.dtype == torch.float32:
            wide = set()
        plain = [w for w in weights if w.name not in opaque | quantized | wide]
        transfer = self.make_transfer(plain, layout, found, self.dtype)
        made = PushRound(weights, once, transfer)
        made.opaque = [w for w in weights if w.name in opaque - wide]
        made.float32_opaque = [w for w in weights if w.name in opaque & wide]
        made.as_they_are = [w for w in weights if w.name in wide]
        in_float32 = [w for w in weights if w.name in wide - opaque]
        if in_float32:
            made.float32 = self.make_transfer(in_float32, layout, found, torch.float32)
        in_fp8 = [w for w in weights if w.name in quantized]
        if in_fp8:
            made.scales = BlockScales(in_fp8, self.topology.device)
            grids = made.scales.by_name
            made.fp8 = self.make_transfer(in_fp8, layout, found, torch.uint8, grids)
            for (name, box), place in zip(layout.scales, layout.scale_places, strict=True):
                if name in grids:
                    grid = grids[name]
                    made.scale_places.append((place, view(grid, whole(grid.shape), box)))
        return made

    def make_transfer(
        self,
        weights: list[Weight],
        layout: Layout,
        found: list[list[tuple[str, Box]]],
        dtype: torch.dtype,
        scales: dict[str, Tensor] | None = None,
    ) -> Transfer:
        number = {w.name: i for i, w in enumerate(weights)}
        regions = [[(number[n], box) for n, box in mine if n in number] for mine in found]
        of_names = zip(layout.regions, layout.places, strict=True)
        places = [place for (name, _), place in of_names if name in number]
        plan = make_transfer_plan(
            dist.get_rank(), weights, regions, self.table, dtype.itemsize, self.slot_bytes
        )
        viewed_as = dtype if dtype == torch.uint8 else None
        return Transfer(
            plan, partial(self.shards, weights), partial(tensors_at, places, viewed_as), dtype,
            self.topology.device, self.topology.group, scales=scales,
            in_place=self.in_place and self.derived is None,
        )  # fmt: skip

    def build_block_groups(self) -> None:
        """Groups for the all-gathers of a GPU job; an engine alone gathers nothing. Collective over
        the job.
        """
        used = torch.zeros(len(self.table) + 1, device=self.topology.device)  # by engines in it
        for transfer in self.transfers:
            used[transfer.plan.block] = transfer.plan.block > 1
        dist.all_reduce(used, dist.ReduceOp.MAX)
        for block in used.nonzero().flatten().tolist():
            group = self.block_group(block)
            for transfer in self.transfers:
                if transfer.plan.block == block:
                    transfer.block_group = group

    def block_group(self, block: int) -> dist.ProcessGroup | None:
        mine = None
        for column in zip(*self.table, strict=True):
            for start in range(0, len(column), block):
                peers = list(column[start : start + block])
                group = group_of(tuple(peers), self.topology.groups, self.topology.device)
                if dist.get_rank() in peers:
                    mine = group
        return mine

    def shards(self, weights: list[Weight]) -> Held:
        mine = {w.name: self.named[w.name] for w in weights if w.name in self.named}
        return lying(mine, self.topology.device)

    def full_tensors(
        self, weights: list[Weight], dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """One at a time, on the rollout's ranks; others must exhaust it as well."""
        return full_tensors(
            weights, partial(self.shards, weights), self.table, dtype or self.dtype,
            self.slot_bytes, self.topology,
        )  # fmt: skip

    def push(self) -> SyncStats:
        """Puts the actor's weights into the engine. Collective over the ranks of both roles.

        The actor's `offload` or `onload` is called between its last update and this. Requests in
        the engine go on under the new weights. Raises WeightMismatch where the first push leaves
        out a weight of an engine that was built without any, and with config.check where the
        engine does not hold what was sent. Does nothing on ranks outside both roles.
        """
        start = time.perf_counter()
        moved = planned = opaque = 0
        if not self.rounds:
            return SyncStats(0, 0, 0, 0.0)
        if self.rollout is not None and not self.rollout.has_weights:
            clear_weights(self.rollout.model)
        for group in self.rounds:
            if group.once and self.base_is_there:
                continue
            moved += self.push_round(group)
            planned, opaque = planned + group.plan_bytes(), opaque + group.opaque_bytes
        if self.rollout is not None:
            if not self.rollout.has_weights:
                require_written(self.rollout.model, self.rollout_topology.axis_rank("tp"))
                self.rollout.has_weights = True
            self.rollout.finish_load()
        self.base_is_there = True
        if self.config.check:
            self.check()
        if self.derived is not None:
            self.derived.release()
        return SyncStats(planned, moved, opaque, time.perf_counter() - start)

    def push_round(self, group: PushRound) -> int:
        """Bytes that this rank sent."""
        if self.derived is not None:
            self.derived.compute(group.names)
        moved = group.transfer.run()
        if group.fp8 is not None and group.scales is not None:
            moved += self.push_fp8(group, group.fp8, group.scales)
        if group.float32 is not None:
            moved += group.float32.run()
        if group.opaque or group.float32_opaque:
            tensors = chain(
                self.full_tensors(group.opaque),
                self.full_tensors(group.float32_opaque, torch.float32),
            )
            try:
                if self.rollout is not None:
                    self.rollout.load_opaque(tensors)
            finally:
                exhaust(tensors)
        return moved

    @torch.no_grad()
    def push_fp8(self, group: PushRound, transfer: Transfer, scales: BlockScales) -> int:
        """Bytes that this rank sent of what the engine keeps in FP8."""
        scales.agree(self.shards(group.weights), self.topology.group)
        for place, grid in group.scale_places:
            place.tensor().copy_(grid)
        return transfer.run()

    def check(self) -> int:
        """Proves bit by bit that the engine holds the actor's weights; returns how many."""
        if not self.rounds:
            return 0
        tensors = self.all_tensors()
        try:
            return self.rollout.check_weights(tensors) if self.rollout is not None else 0
        finally:
            exhaust(tensors)

    def all_tensors(self) -> Iterator[tuple[str, Tensor]]:
        # what is quantised is so from the trainer's own numbers
        dtype = torch.float32 if any(group.fp8 for group in self.rounds) else None
        for group in self.rounds:
            if self.derived is not None:
                self.derived.compute(group.names)
            yield from self.full_tensors(group.rounded, dtype)
            yield from self.full_tensors(group.as_they_are, torch.float32)

    def describe(self) -> list[str]:
        """Returns lines for a log about what the plan moves; [] outside both roles."""
        lines: list[str] = []
        for number, group in enumerate(self.rounds):
            if len(self.rounds) > 1:
                when = ", with the first push" if group.once else ""
                lines.append(f"round {number + 1} of {len(self.rounds)}{when}:")
            lines += describe(group.transfer.plan)
            if group.fp8 is not None:
                lines += ["in FP8:", *describe(group.fp8.plan)]
            opaque = [*group.opaque, *group.float32_opaque]
            if opaque:
                lines.append(f"  as full tensors: {[w.name for w in opaque[:5]]} ...")
        return lines


def exhaust(tensors: Iterator[tuple[str, Tensor]]) -> None:
    """Takes the rest of the tensors, so that ranks whose engine did not want them all, or failed,
    leave no other rank waiting.
    """
    for _ in tensors:
        pass


def table_of(rollout: Topology) -> list[list[int]]:
    """Global rank of [engine][tensor-parallel rank]; axes dp and tp."""
    tp = rollout.axis_size("tp")
    return [list(rollout.ranks[i : i + tp]) for i in range(0, rollout.world, tp)]
