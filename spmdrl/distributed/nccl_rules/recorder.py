"""Writes down, on each rank, the process groups and the collectives of a run.

It is a layer over torch.distributed and no registered backend: torch, vLLM and megatron-core ask
for a backend's name, and would take other ways with a name that is not gloo.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.distributed.nccl_rules.events import (
    BATCH,
    BOTH,
    COLLECTIVES,
    POINT_TO_POINT,
    RECORDS,
    Creation,
    Group,
    Operation,
)
from spmdrl.distributed.nccl_rules.sources import (
    TORCH,
    backends_of,
    caller,
    carries_objects,
    made_on_cpu,
    stack,
)

BACKENDS = "SPMDRL_NCCL_BACKENDS"  # of the default group on a GPU job
BOUND = "SPMDRL_NCCL_BOUND"  # "1": the default group is bound to the rank's GPU
INSTALLED: list[Recorder] = []  # one per process

# what is replaced in them: for the type checker of any type
C10D: Any = c10d
DIST: Any = dist
MESH: Any = DeviceMesh


class Recorder:
    """Appends what this rank does to a file. One per process."""

    def __init__(self, file: Path, backends: str, bound: bool) -> None:
        self.file, self.backends, self.bound = file.open("ab"), backends, bound
        self.bound_name = ""  # of the group that is bound to a device
        self.groups: dict[str, Group] = {}  # this process's own, by name
        self.starts, self.limit_s = 0, 0.0
        self.lock, self.inside = threading.Lock(), threading.local()

    def write(self, event: Creation | Operation) -> None:
        with self.lock:
            pickle.dump(event, self.file)
            self.file.flush()  # a rank may end by a signal

    def is_inside(self) -> bool:
        """Whether this thread is in a call that is written down as a whole."""
        return getattr(self.inside, "depth", 0) > 0

    def within(self, call: Callable[[], Any]) -> Any:
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            return call()
        finally:
            self.inside.depth -= 1

    def started(self, size: int, name: str) -> None:
        self.starts += 1
        self.groups = {name: Group(self.starts, name, tuple(range(size)), self.backends)}
        self.bound_name = name if self.bound else ""

    def splits(self) -> bool:
        """Whether a group that is made now is split off the default group's communicator."""
        parent = self.parent()
        return parent.has_nccl and parent.name == self.bound_name

    def parent(self) -> Group:
        return self.groups[c10d._get_default_group().group_name]

    def created(self, ranks: Sequence[int], name: str, limit_s: float) -> None:
        parent, frame = self.parent(), caller()
        backends = parent.backends if self.is_inside() else backends_of(frame, parent.backends)
        members = tuple(parent.members[rank] for rank in ranks)
        group = Group(self.starts, name, members, backends)
        mine = c10d._get_default_group().rank() in ranks
        if mine:
            self.groups[name] = group
        if not self.is_inside():
            calls = self.splits() and (group.has_nccl or not mine)
            parts = (tuple(ranks),)
            self.write(
                Creation(parent, group, parts, limit_s, self.limit_s, False, calls, stack(frame))
            )

    def split(self, table: list[list[int]], limit_s: float) -> None:
        """Writes down what DeviceMesh would do on GPUs: c10d.split_group."""
        parent = self.parent()
        me = c10d._get_default_group().rank()
        mine = sorted(next((part for part in table if me in part), []))
        name = c10d._process_group_name(mine, use_hashed_name=True)
        members = tuple(parent.members[rank] for rank in mine)
        group = Group(self.starts, name, members, parent.backends)
        parts = tuple(map(tuple, table))
        found = stack(caller())
        self.write(Creation(parent, group, parts, limit_s, self.limit_s, True, True, found))

    def called(self, group: dist.ProcessGroup, name: str, tensors: list[torch.Tensor]) -> None:
        known = self.groups.get(group.group_name)
        if known is None or not known.has_nccl or self.is_inside():
            return  # made around torch.distributed, or of no interest to NCCL
        frame = caller()
        shown = tuple(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
        on_cpu = "cpu" in known.backends and carries_objects()
        on_cpu = on_cpu or any(made_on_cpu(frame, tensor) for tensor in tensors)
        thread = threading.current_thread().name
        self.write(Operation(known, name, shown, on_cpu, thread, stack(frame)))


def record() -> None:
    """Has this rank write down what it does into the folder that RECORDS names. To be called before
    its first group is made; a second call does nothing.
    """
    if INSTALLED:
        return
    file = Path(os.environ[RECORDS], f"rank_{os.environ['RANK']}")
    file.parent.mkdir(parents=True, exist_ok=True)
    backends, bound = os.environ.get(BACKENDS, BOTH), os.environ.get(BOUND) == "1"
    recorder = Recorder(file, backends, bound)
    INSTALLED.append(recorder)
    watch_binding(recorder)
    watch_groups(recorder)
    watch_meshes(recorder)
    watch_batches(recorder)
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        watch_method(recorder, name)


@contextmanager
def watched_groups(recorder: Recorder) -> Iterator[None]:
    """Meanwhile groups are written down, in a process that goes on to do other things."""
    make = C10D._new_process_group_helper
    watch_groups(recorder)
    try:
        yield
    finally:
        C10D._new_process_group_helper = make


def watch_groups(recorder: Recorder) -> None:
    make = C10D._new_process_group_helper

    @wraps(make)
    def helper(
        size: int, rank: Any, ranks: Any, backend: Any, store: Any, name: str, **kw: Any
    ) -> Any:
        if len(ranks) == 0:
            recorder.started(size, name)
            recorder.limit_s = kw["timeout"].total_seconds()
        else:
            recorder.created(ranks, name, kw["timeout"].total_seconds())
        return make(size, rank, ranks, backend, store, name, **kw)

    C10D._new_process_group_helper = helper


def watch_binding(recorder: Recorder) -> None:
    """Has ProcessGroup.bound_device_id say and keep what it would on a GPU job. To torch itself it
    says that no group is bound: gloo's cannot be split.
    """

    def device_of(group: dist.ProcessGroup) -> torch.device | None:
        asks = sys._getframe(1).f_code.co_filename
        asks_torch = asks.startswith(TORCH)
        bound = group.group_name == recorder.bound_name and bool(recorder.bound_name)
        return torch.device("cuda", 0) if bound and not asks_torch else None

    def bind(group: dist.ProcessGroup, device: torch.device | None) -> None:
        recorder.bound_name = "" if device is None else group.group_name

    DIST.ProcessGroup.bound_device_id = property(device_of, bind)


def watch_meshes(recorder: Recorder) -> None:
    make = MESH._init_one_process_group

    def axis(layout: Any, rank_map: Any, dim_name: str, override: tuple[Any, Any]) -> Any:
        arguments = (layout, rank_map, dim_name, override)
        whole = layout.numel() == dist.get_world_size() and override == (None, None)
        if whole or not recorder.splits():  # the default group serves, or new_group makes each
            return make(*arguments)
        table = _MeshLayout([layout]).remap_to_tensor(rank_map).tolist()
        given = override[1]._timeout if override[1] else c10d.default_pg_timeout
        recorder.split(table, given.total_seconds())
        return recorder.within(lambda: make(*arguments))

    MESH._init_one_process_group = staticmethod(axis)


def watch_batches(recorder: Recorder) -> None:
    batch = c10d.batch_isend_irecv

    @wraps(batch)
    def watched(ops: list[dist.P2POp]) -> Any:
        recorder.called(ops[0].group or c10d._get_default_group(), BATCH, [op.tensor for op in ops])
        return recorder.within(lambda: batch(ops))

    C10D.batch_isend_irecv = DIST.batch_isend_irecv = watched


def watch_method(recorder: Recorder, name: str) -> None:
    method = getattr(dist.ProcessGroup, name)

    @wraps(method)
    def watched(group: dist.ProcessGroup, *args: Any, **kw: Any) -> Any:
        recorder.called(group, name, list(tensors_in([*args, *kw.values()])))
        return method(group, *args, **kw)

    setattr(dist.ProcessGroup, name, watched)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
