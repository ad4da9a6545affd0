"""A sharded state on its way to files: copied now, written later, perhaps by another thread.

torch.distributed.checkpoint plans and writes; what it would do with collectives of its own, which
look up torch.distributed's global state, is done here on a group that is handed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from spmdrl.distributed.collectives import together


class HostCopies:
    """Memory of the host for a copy of this rank's shards, kept from one copy to the next.

    Fresh memory costs more time than the copy does. Pinned where the shards lie on a GPU, so that
    the copies overlap.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.kept: dict[MetadataIndex, Tensor] = {}

    def take(self, index: MetadataIndex, source: Tensor) -> Tensor:
        """A copy on the host; complete once `wait` returned."""
        old = self.kept.get(index)
        if old is None or old.shape != source.shape or old.dtype != source.dtype:
            self.kept[index] = torch.empty(source.shape, dtype=source.dtype, pin_memory=self.pinned)
        return self.kept[index].copy_(source.detach(), non_blocking=self.pinned)

    def wait(self) -> None:
        if self.pinned:
            torch.cuda.current_stream().synchronize()


@dataclass
class StagedShards:
    """The shards of a state that this rank is to write."""

    planner: DefaultSavePlanner
    plan: SavePlan
    data: dict[MetadataIndex, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)  # texts for files of their own

    def write(self, folder: Path, group: dist.ProcessGroup) -> None:
        """Writes the shards in the format of torch.distributed.checkpoint. Collective over `group`,
        the same ranks as those that staged, and over nothing else.
        """
        writer = FileSystemWriter(str(folder), sync_files=True, overwrite=False)
        writer.set_up_storage_writer(group.rank() == 0)
        plans = together(group, lambda: writer.prepare_local_plan(self.plan))
        plans, metadata = self.planner.create_global_plan(plans)  # the same on every rank
        mine = writer.prepare_global_plan(plans)[group.rank()]
        mine = self.planner.finish_plan(mine)
        results = together(group, lambda: writer.write_data(mine, self.planner).wait())
        if group.rank() == 0:
            writer.finish(metadata, results)
            for name, text in self.notes.items():
                Path(folder, name).write_text(text)


def stage(
    state: dict[str, Any], planner: DefaultSavePlanner, is_first: bool,
    copies: HostCopies | None,
) -> StagedShards:  # fmt: skip
    """copies: takes the shards, so that the state may change; None: it will not until `write`."""
    planner.set_up_planner(state, None, is_first)
    staged = StagedShards(planner, planner.create_local_plan())
    if copies is None:
        return staged
    for item in staged.plan.items:
        value = planner.resolve_data(item)
        if isinstance(value, Tensor):
            value = copies.take(item.index, value)
        staged.data[item.index] = value
    copies.wait()
    planner.resolve_data = lambda item: staged.data[item.index]  # type: ignore[assignment]
    planner.state_dict = {}
    return staged
