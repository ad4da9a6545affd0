"""A sharded state on its way to files: copied now, written later, perhaps by another thread.

torch.distributed.checkpoint plans and writes; what it would do with collectives of its own, which
look up torch.distributed's global state, is done here on a group that is handed in.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from spmdrl.checkpoint.chunk_index import Box, Named, StoredPart, encode, write_index
from spmdrl.distributed.agreement import gather_to_first
from spmdrl.distributed.collectives import together
from spmdrl.distributed.torch_compat import local_shape_and_offset, storage_id

# of the host memory in which copies lie. torch rounds what is pinned up to a power of two, which
# would be half as much again for shards one by one
BLOCK_BYTES = 256 << 20
ALIGNMENT = 64  # bytes


class HostCopies:
    """Memory of the host for a copy of this rank's shards, kept from one copy to the next.

    Fresh memory costs more time than the copy does. Pinned where the shards lie on a GPU, so that
    the copies overlap.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.kept: dict[MetadataIndex, Tensor] = {}
        self.blocks: list[Tensor] = []  # (num_bytes,) uint8
        self.taken: list[int] = []  # bytes of each

    def take(self, index: MetadataIndex, source: Tensor) -> Tensor:
        """A copy on the host; complete once `wait` returned."""
        old = self.kept.get(index)
        if old is None or old.shape != source.shape or old.dtype != source.dtype:
            self.kept[index] = self.room(source.nbytes).view(source.dtype).view(source.shape)
        return self.kept[index].copy_(source.detach(), non_blocking=self.pinned)

    def room(self, num_bytes: int) -> Tensor:
        """Returns the first free bytes of a block that has so many left; of a new one, which is as
        large as it must be, where none has. They are a storage of their own: of a larger one
        torch's writer would make a copy.
        """
        rooms = (len(block) - taken for block, taken in zip(self.blocks, self.taken, strict=True))
        i = next((i for i, room in enumerate(rooms) if room >= num_bytes), len(self.blocks))
        if i == len(self.blocks):
            size = max(BLOCK_BYTES, num_bytes)
            self.blocks.append(torch.empty(size, dtype=torch.uint8, pin_memory=self.pinned))
            self.taken.append(0)
        start, end = self.taken[i], self.taken[i] + num_bytes
        self.taken[i] = -(-end // ALIGNMENT) * ALIGNMENT
        return torch.from_numpy(self.blocks[i].numpy()[start:end])

    def wait(self) -> None:
        if self.pinned:
            torch.cuda.current_stream().synchronize()


# What a rank has written: its table of the index and the digest of its names, or for torch's index
# its plan and what torch's writer says of it.
Written = tuple[Any, Any]


@dataclass
class StagedShards:
    """The shards of a state that this rank is to write."""

    planner: DefaultSavePlanner
    plan: SavePlan
    data: dict[MetadataIndex, Any] = field(default_factory=dict)
    notes: dict[str, bytes] = field(default_factory=dict)  # small files that rank 0 writes beside
    names: list[Named] | None = None  # of the whole state; None: its index is torch's

    def write(self, folder: Path, group: dist.ProcessGroup) -> None:
        """Writes the shards in the format of torch.distributed.checkpoint, and an index. Collective
        over `group`, the same ranks as those that staged, and over nothing else.

        No rank needs the others' plans: it has left out what another one writes.
        """
        writer = FileSystemWriter(str(folder), sync_files=True, overwrite=False)
        written = together(group, lambda: self._write_data(writer, group.rank()))
        found = gather_to_first(written, group)
        together(group, lambda: self._finish(folder, writer, found) if found else None)

    def _write_data(self, writer: FileSystemWriter, rank: int) -> Written:
        writer.set_up_storage_writer(rank == 0)
        others = [SavePlan([])] * rank  # the writer names the file by a plan's place in the list
        mine = writer.prepare_global_plan([*others, writer.prepare_local_plan(self.plan)])[rank]
        mine = self.planner.finish_plan(mine)
        results = writer.write_data(mine, self.planner).wait()
        if self.names is None:
            return self.plan, results
        digest = hashlib.sha256(json.dumps(self.names).encode()).digest()
        return encode(stored_parts(results, mine), self.names), digest

    def _finish(self, folder: Path, writer: FileSystemWriter, found: list[Written]) -> None:
        """Writes the index of all ranks' shards, and the notes."""
        first, second = (list(column) for column in zip(*found, strict=True))
        if self.names is None:
            writer.finish(self.planner.create_global_plan(first)[1], second)
        else:
            assert all(digest == second[0] for digest in second), "ranks have other tensors"
            write_index(folder, self.names, first)
        for name, content in self.notes.items():
            Path(folder, name).write_bytes(content)


def stored_parts(results: list[WriteResult], plan: SavePlan) -> list[StoredPart]:
    """Says what the writer has written where, for the index."""
    boxes = {item.index: box_of(item) for item in plan.items}
    return [
        StoredPart(
            result.index.fqn, boxes[result.index], result.storage_data.offset,
            result.storage_data.length,
        )
        for result in results
    ]  # fmt: skip


def box_of(item: WriteItem) -> Box:
    if item.tensor_data is None:
        return (), ()
    return item.tensor_data.chunk.offsets, item.tensor_data.chunk.sizes


def stage(
    state: dict[str, Any], planner: DefaultSavePlanner, is_first: bool,
    copies: HostCopies | None, made: Set[int] = frozenset(),
) -> StagedShards:  # fmt: skip
    """copies: takes the shards, so that the state may change; None: it will not until `write`.
    made: the storages that were made for this save, on the host, and are not copied again.
    """
    planner.set_up_planner(state, None, is_first)
    staged = StagedShards(planner, planner.create_local_plan())
    return copied(staged, copies, made)


def stage_own(
    state: dict[str, Any], rank: int, copies: HostCopies | None
) -> StagedShards:  # fmt: skip
    """Stages of what several ranks have alike the share of this one; see `stage`.

    state: the same names on all ranks. rank: among those that stage.
    """
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, None, rank == 0)
    plan, values = planner.create_local_plan(), planner.state_dict
    names = [named(name, values[name]) for name in sorted(values)]
    numbers = {name: number for number, (name, _, _) in enumerate(names)}
    items = [
        item for item in plan.items if writes(values[item.index.fqn], numbers[item.index.fqn], rank)
    ]
    staged = StagedShards(planner, replace(plan, items=items), names=names)
    return copied(staged, copies)


def copied(
    staged: StagedShards, copies: HostCopies | None, made: Set[int] = frozenset()
) -> StagedShards:
    """Gives it copies of its shards, unless `copies` is None. made: as of `stage`."""
    if copies is None:
        return staged
    planner = staged.planner
    for item in staged.plan.items:
        value = planner.resolve_data(item)
        if isinstance(value, Tensor) and storage_id(value) not in made:
            value = copies.take(item.index, value)
        staged.data[item.index] = value
    copies.wait()
    planner.resolve_data = lambda item: staged.data[item.index]  # type: ignore[assignment]
    planner.state_dict = {}
    return staged


def named(name: str, value: Any) -> Named:
    if not isinstance(value, Tensor):
        return name, None, None
    return name, str(value.dtype).removeprefix("torch."), list(value.shape)


def writes(value: Any, number: int, rank: int) -> bool:
    """Whether this rank writes its part of the number-th value of a state: it has elements, and of
    the ranks that have the same it is this one's turn.
    """
    if not isinstance(value, DTensor):
        return rank == 0
    if value.to_local().numel() == 0:
        return False
    mesh, replica, num_replicas = value.device_mesh, 0, 1
    for axis, placement in enumerate(value.placements):
        if placement.is_replicate():
            replica = replica * mesh.size(axis) + mesh.get_local_rank(axis)
            num_replicas *= mesh.size(axis)
    return number % num_replicas == replica


def wanted_parts(state: Mapping[str, Any]) -> dict[str, Box]:
    """The part of each tensor of a state that this rank has, by the name that it is saved under."""
    wanted: dict[str, Box] = {}
    for key, value in state.items():
        if isinstance(value, Mapping):
            inside = wanted_parts(value)
            wanted |= {f"{key}.{name}": box for name, box in inside.items()}
        elif isinstance(value, DTensor):
            size, start = local_shape_and_offset(value.shape, value.device_mesh, value.placements)
            wanted[key] = (start, size)
        elif isinstance(value, Tensor):
            wanted[key] = ([0] * value.dim(), list(value.shape))
    return wanted
