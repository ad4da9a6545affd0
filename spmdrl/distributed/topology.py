"""The ranks of one role as a device mesh with named axes.

Nothing below a program reads WORLD_SIZE, RANK or an environment variable: it is handed a Topology.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.config.words import counted
from spmdrl.distributed.agreement import lowest
from spmdrl.distributed.torch_compat import mesh_of_groups, timeout_of, unbound_default_group

LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
Groups = dict[tuple[int, ...], dist.ProcessGroup]  # by their ranks of the job, ascending


@dataclass(frozen=True)
class Topology:
    """The ranks of a role, as they are arranged. Exists on every rank of the job.

    On a rank outside the role `here` is False, and nothing but `ranks` and `world` has a meaning.
    """

    ranks: tuple[int, ...]  # of the job, ascending; the mesh's order too, the last axis fastest,
    # but for a host's (from_megatron)
    mesh: DeviceMesh
    group: dist.ProcessGroup  # these ranks; takes CPU tensors too
    control: dist.ProcessGroup  # these ranks again: gloo, for what ranks tell each other
    device: torch.device
    host: str
    # where sequences (sp) or experts (ep) are shared the ranks as FSDP has them: replicas x ranks
    # that share a copy
    sharding: DeviceMesh | None = None
    # where experts are shared: replicas x ranks that share the same experts x ranks that have
    # other experts of a layer each
    experts: DeviceMesh | None = None
    # the groups of the axes and of these ranks, for other arrangements of the same ranks; the same
    # keys on every rank of the job
    groups: Groups = field(default_factory=dict, repr=False, compare=False)
    machine: str = ""  # tells hosts of one name apart, as containers may be: of machine_here

    @classmethod
    def build(
        cls,
        device: torch.device,
        ranks: Sequence[int] | None = None,
        share: Topology | None = None,
        hosted: bool = False,
        **degrees: int,
    ) -> Topology:
        """`ranks` (None: all), outermost axis first; one degree may be -1 (what is left).

        Topology.build(cpu, dp=-1, tp=2) on 8 ranks: dp 4 x tp 2, TP groups are neighbours.
        share: another arrangement of the same ranks, whose groups serve for this one too.
        hosted: torch.distributed's own group is another program's, and left alone.
        Collective over the job, also for ranks outside. Raises ConfigError where the degrees do not
        multiply to the number of ranks.
        """
        everyone = range(dist.get_world_size())
        chosen = tuple(sorted(everyone if ranks is None else ranks))
        shape = resolve_degrees(degrees, len(chosen))
        if share is not None:
            assert share.ranks == chosen, (share.ranks, chosen)
            groups, control = share.groups, share.control
        else:
            groups = {}
            if len(chosen) == len(everyone) and not hosted:
                assert dist.group.WORLD is not None
                groups[chosen] = dist.group.WORLD
            control = new_group(chosen, "gloo")
        group = group_of(chosen, groups, device)
        table = torch.tensor(chosen).view(*shape.values())
        mesh = build_mesh(table, tuple(shape), groups, device)
        sharding = experts = None
        if "sp" in shape or "ep" in shape:
            table = table.view(shape["dp"], -1)
            sharding = build_mesh(table, ("dp", "fsdp"), groups, device)
        if "ep" in shape:
            table = table.view(shape["dp"], -1, shape["ep"] * shape.get("sp", 1))
            experts = build_mesh(table, ("dp", "fsdp", "ep"), groups, device)
        host = socket.gethostname()
        return cls(chosen, mesh, group, control, device, host, sharding, experts, groups,
                   machine_here())  # fmt: skip

    @classmethod
    def from_megatron(cls, share: Topology) -> Topology:
        """The layout of megatron-core's parallel_state on all ranks, in whatever order it has them.

        Axes pp, dp, cp, tp. share: all ranks, whose groups serve for this one too. Collective.
        """
        from megatron.core import parallel_state as ps

        mine = (
            ps.get_pipeline_model_parallel_rank(), ps.get_data_parallel_rank(),
            ps.get_context_parallel_rank(), ps.get_tensor_model_parallel_rank(),
        )  # fmt: skip
        places: list[Any] = [None] * share.world
        dist.all_gather_object(places, mine, group=share.control)
        table = torch.empty([1 + max(axis) for axis in zip(*places, strict=True)], dtype=torch.int)
        for rank, place in zip(share.ranks, places, strict=True):
            table[place] = rank
        mesh = build_mesh(table, ("pp", "dp", "cp", "tp"), share.groups, share.device)
        return cls(share.ranks, mesh, share.group, share.control, share.device, share.host,
                   groups=share.groups, machine=share.machine)  # fmt: skip

    @property
    def place(self) -> tuple[str, str]:
        """Returns what ranks of one host have in common and those of other hosts have not."""
        return self.host, self.machine

    @property
    def here(self) -> bool:
        """Whether this process is one of the ranks."""
        return dist.get_rank() in self.ranks

    @property
    def rank(self) -> int:
        """This process's number among `ranks`; -1 outside."""
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return len(self.ranks)

    @property
    def data_ranks(self) -> tuple[int, ...]:
        """The ranks that are given sequences, each its own: one of every model-parallel group.

        It is the first of its tensor- and context-parallel ranks in the last pipeline stage, where
        losses and logprobs are, or of those that share sequences (sp). Without these axes every
        rank is one.
        """
        names, table = self.mesh.mesh_dim_names, self.mesh.mesh
        assert names is not None
        one = {"tp": 0, "cp": 0, "sp": 0, "pp": -1}
        index = tuple(one.get(name, slice(None)) for name in names)
        return tuple(sorted(table[index].flatten().tolist()))

    @property
    def copies(self) -> DeviceMesh:
        """(dp, fsdp) of a role of engine fsdp: replicas of the weights, ranks that share one."""
        return self.mesh["dp", "fsdp"] if self.sharding is None else self.sharding

    def lowest(self, value: int) -> int:
        """The least that any of the ranks says. Collective."""
        return lowest(value, self.control)

    def connect(self) -> None:
        """Has the ranks of `group` make its communicator for tensors of the device. Collective.

        NCCL makes it at the group's first operation, which all its ranks have to call: a batch of
        sends and receives among some of them may not come first.
        """
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)

    def has_axis(self, name: str) -> bool:
        return name in (self.mesh.mesh_dim_names or ())

    def axis_size(self, axis: str) -> int:
        return self.mesh.shape[self.axis(axis)]

    def axis_rank(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis)

    def axis(self, name: str) -> int:
        assert self.mesh.mesh_dim_names is not None
        return self.mesh.mesh_dim_names.index(name)


def machine_here() -> str:
    """Names the running kernel and this process's PID namespace: two hosts of one name see neither
    each other's processes nor each other's files.
    """
    known = []
    for read in (Path("/proc/sys/kernel/random/boot_id").read_text,
                 partial(os.readlink, "/proc/self/ns/pid")):  # fmt: skip
        with suppress(OSError):  # a sandbox may hide one of them
            known.append(read().strip())
    return " ".join(known)


def build_mesh(
    ranks: Tensor, names: tuple[str, ...], groups: Groups, device: torch.device
) -> DeviceMesh:
    """Returns the mesh of the ranks, with a group for each line of them along each axis.

    ranks: of the job, one axis for each name. groups: those that exist, to which new ones are
    added. Collective over the job.
    """
    mine = []
    for axis, size in enumerate(ranks.shape):
        for line in ranks.movedim(axis, -1).reshape(-1, size).tolist():
            group = group_of(line, groups, device)
            if dist.get_rank() in line:
                mine.append(group)
    return mesh_of_groups(device.type, ranks, names, mine)


def group_of(ranks: Sequence[int], groups: Groups, device: torch.device) -> dist.ProcessGroup:
    """Returns the group of the ranks, for tensors of the device and of the CPU, and adds it to
    `groups` where it is not there. On a rank outside it is a placeholder. Collective over the job.
    """
    chosen = tuple(sorted(ranks))
    if chosen not in groups:
        both = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
        groups[chosen] = new_group(chosen, both)
    return groups[chosen]


def new_group(
    ranks: Sequence[int], backend: str, connected: bool = False
) -> dist.ProcessGroup:  # fmt: skip
    """Makes a process group with the time limit of the default group. Collective over the job.

    Its NCCL communicator is made by its members at their first operation, and not split off the
    default group's: all ranks of the job would have to take part in that. connected: gloo connects
    all ranks with all now, and not two of them when they first talk to each other.
    """
    assert dist.group.WORLD is not None
    with unbound_default_group(), gloo_connects_now() if connected else nullcontext():
        return dist.new_group(ranks, timeout=timeout_of(dist.group.WORLD), backend=backend)


@contextmanager
def gloo_connects_now() -> Iterator[None]:
    """Meanwhile groups are made without TORCH_GLOO_LAZY_INIT, which torch reads for each."""
    before = os.environ.get(LAZY_GLOO)
    os.environ[LAZY_GLOO] = "0"
    try:
        yield
    finally:
        del os.environ[LAZY_GLOO]
        if before is not None:
            os.environ[LAZY_GLOO] = before


def resolve_degrees(degrees: dict[str, int], world: int) -> dict[str, int]:
    """Replaces the one -1 by what is left of `world`; raises ConfigError with the arithmetic."""
    known = prod(d for d in degrees.values() if d != -1)
    shown = " x ".join(f"{name}={d}" for name, d in degrees.items())
    if any(d == 0 or d < -1 for d in degrees.values()):
        raise ConfigError(f"parallel degrees must be positive, or -1 for the rest: {shown}")
    if list(degrees.values()).count(-1) > 1:
        raise ConfigError(f"only one parallel degree may be -1: {shown}")
    if world % known or (-1 not in degrees.values() and known != world):
        raise ConfigError(
            f"{shown} does not fit {counted(world, 'rank')}: {known} does not divide {world}. "
            f"Degrees that do: {[d for d in range(1, world + 1) if world % d == 0]}"
        )
    return {name: world // known if d == -1 else d for name, d in degrees.items()}


def train_degrees(role: TrainConfig) -> dict[str, Any]:
    """Axes of a training role.

    fsdp: replicas of groups of `fsdp` ranks that share one copy; -1: all. Of a copy's ranks, each
    `ulysses` neighbours share their sequences too (sp), and each `expert_parallel` neighbours have
    all experts between them (ep, and sp within it). megatron: its own order. Raises ConfigError
    where a copy has no such groups.
    """
    if role.engine == "megatron":
        return {"pp": role.pipeline_parallel, "dp": -1, "cp": role.context_parallel,
                "tp": role.tensor_parallel}  # fmt: skip
    dp = 1 if role.fsdp == -1 else -1
    ulysses, experts = role.ulysses, role.expert_parallel
    if experts < 1 or (experts > 1 and experts % max(ulysses, 1)):
        raise ConfigError(
            f"expert_parallel={experts} with ulysses={ulysses}: expert_parallel must be 1, or a "
            "multiple of ulysses, whose ranks share a sequence's tokens within it"
        )
    spread = experts > 1
    name, neighbours = ("expert_parallel", experts) if spread else ("ulysses", ulysses)
    if ulysses < 1 or (role.fsdp != -1 and role.fsdp % neighbours):
        raise ConfigError(
            f"{name}={neighbours} with fsdp={role.fsdp}: ranks that share sequences or experts "
            f"share a copy of the weights too: fsdp must be -1 or a multiple of {name}, which is 1 "
            "or more"
        )
    degrees = {"dp": dp, "fsdp": -1 if dp == 1 else role.fsdp // neighbours}
    if spread:
        degrees["ep"] = experts // ulysses
    if ulysses > 1:
        degrees["sp"] = ulysses
    return degrees
