"""Sharding by FSDP2: its units, when they are gathered, how gradients are summed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from spmdrl.distributed.topology import Topology


def shard(
    module: nn.Module, layers: list[nn.Module], compute: torch.dtype, topology: Topology,
    offload: bool = False, reshard_after_forward: bool = True,
) -> None:  # fmt: skip
    """Shards each layer, then the rest with the root; gradients are summed in float32. offload: the
    shards stay on the CPU (FSDP2's CPUOffloadPolicy). reshard_after_forward: of the layers.

    The root is gathered from the first layer's forward pass to the end of the backward pass, which
    begins with the head's: an embedding that is not tied to the head is a unit of its own, so that
    it is not gathered meanwhile.
    """
    settings: dict[str, Any] = {
        "mesh": topology.copies,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if compute == torch.float32 else compute,
            reduce_dtype=torch.float32,
        ),
    }
    if offload:
        pinned = topology.device.type == "cuda"
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
    for unit in [*layers, *untied_embedding(module.hf)]:
        fully_shard(unit, **settings, reshard_after_forward=reshard_after_forward)
    fully_shard(module, **settings)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)  # losses are already divided by global counts
            part.set_force_sum_reduction_for_comms(True)


@contextmanager
def layers_resharded(module: nn.Module) -> Iterator[None]:
    """Meanwhile layers that keep their gathered weights for a backward pass give them back after
    their forward pass.
    """
    units = [
        unit for unit in module.modules() if isinstance(unit, FSDPModule) and unit is not module
    ]
    for unit in units:
        unit.set_reshard_after_forward(True, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)


def untied_embedding(hf: Any) -> list[nn.Module]:
    """Returns the input embedding; nothing where its weight is the head's too."""
    embedding, head = hf.get_input_embeddings(), hf.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    return [] if tied else [embedding]


def set_replica_sync(module: nn.Module, last: bool) -> None:
    """Shards' gradients are reduced in every micro-batch, replicas' once, in the last."""
    assert isinstance(module, FSDPModule)
    module.set_requires_all_reduce(last)


def full_norm(norm: Tensor) -> Tensor:
    """A plain tensor of a norm that may be a DTensor."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
