"""The ranks of one role as a device mesh with named axes.

Nothing below a program reads WORLD_SIZE, RANK or an environment variable: it is handed a Topology.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from spmdrl.config import ConfigError


@dataclass(frozen=True)
class Topology:
    """`mesh` spans the ranks of a role; `group` is all of them, usable with CPU tensors too."""

    mesh: DeviceMesh
    group: dist.ProcessGroup
    device: torch.device
    host: str

    @classmethod
    def build(cls, device: torch.device, **degrees: int) -> Topology:
        """All ranks of the world, outermost axis first; one degree may be -1 (what is left).

        Topology.build(cpu, dp=-1, tp=2) on 8 ranks: dp 4 x tp 2, TP groups are consecutive ranks.
        Raises ConfigError where the degrees do not multiply to the world size.
        """
        world = dist.get_world_size()
        shape = resolve_degrees(degrees, world)
        mesh = init_device_mesh(
            device.type, tuple(shape.values()), mesh_dim_names=tuple(shape.keys())
        )
        group = dist.group.WORLD
        assert group is not None
        return cls(mesh, group, device, socket.gethostname())

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return dist.get_world_size(self.group)

    def axis_size(self, axis: str) -> int:
        return self.mesh[axis].size()

    def axis_rank(self, axis: str) -> int:
        return self.mesh.get_local_rank(axis)


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
            f"{shown} does not fit {world} ranks: {known} does not divide {world}. "
            f"Degrees that do: {[d for d in range(1, world + 1) if world % d == 0]}"
        )
    return {name: world // known if d == -1 else d for name, d in degrees.items()}


def train_degrees(fsdp: int) -> dict[str, int]:
    """Axes of a training role: replicas of groups of `fsdp` ranks that share one copy; -1: all."""
    return {"dp": 1 if fsdp == -1 else -1, "fsdp": fsdp}
