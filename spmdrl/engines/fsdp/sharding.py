"""Sharding by FSDP2: its units, when they are gathered, how gradients are summed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spmdrl.config import TrainConfig
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import forget_pass
from spmdrl.engines.fsdp.experts import expert_modules
from spmdrl.weights.shards import local

# elements of a tensor whose squares a CPU adds up in float32 one after the other: of 2^28 numbers
# of the same size a norm would be too small by 2 per cent, of more by more
PIECE = 1 << 14


def shard(
    module: nn.Module, layers: list[nn.Module], compute: torch.dtype, topology: Topology,
    offload: bool = False, reshard_after_forward: bool = True, divide_experts: bool = False,
) -> None:  # fmt: skip
    """Shards each layer, then the rest with the root; gradients are summed in float32. offload: the
    shards stay on the CPU (FSDP2's CPUOffloadPolicy). reshard_after_forward: of the layers.

    Where a rank has some experts (split_experts), those of a layer are a unit of their own over the
    ranks that have the same. divide_experts: ranks may share an expert's rows, where there are more
    ranks than experts.

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
    if topology.experts is not None:
        shard_experts(layers, settings | {"reshard_after_forward": reshard_after_forward},
                      topology.experts, divide_experts)  # fmt: skip
    for unit in [*layers, *untied_embedding(module.hf)]:
        fully_shard(unit, **settings, reshard_after_forward=reshard_after_forward)
    fully_shard(module, **settings)
    for part in units_of(module):
        part.set_gradient_divide_factor(1.0)  # losses are already divided by global counts
        part.set_force_sum_reduction_for_comms(True)


def shard_experts(
    layers: list[nn.Module], settings: dict[str, Any], mesh: DeviceMesh, divide: bool
) -> None:
    """Shards the experts of each layer by themselves: whole ones, or rows of each."""
    own = mesh["dp", "fsdp"]
    policy: MixedPrecisionPolicy = settings["mp_policy"]
    # the router's weights stay in the dtype that the model has them in
    policy = dataclasses.replace(policy, cast_forward_inputs=False)

    def placement(p: nn.Parameter) -> Shard:
        held, sharers = len(p) // mesh["ep"].size(), own.size(1)
        return Shard(int(divide and held % sharers > 0 and p.shape[1] % sharers == 0))

    for layer in layers:
        for unit in expert_modules(layer):
            fully_shard(
                unit, **settings | {"mesh": own, "mp_policy": policy}, shard_placement_fn=placement
            )


def divides_experts(config: TrainConfig) -> bool:
    """Says whether ranks may share an expert's rows: with AdamW, which has no use for whole
    matrices, and no adapter on them, whose factors are not cut in the same way.
    """
    adapted = config.lora is not None and bool(config.lora.target_parameters)
    return config.optim.name == "adamw" and not adapted


def gathers_once(config: TrainConfig, sharers: int) -> bool:
    """Says whether all weights are gathered once for the micro-batches of an update, or of a pass
    without gradient, and kept until its end. sharers: ranks that share a copy of the weights.

    With one of them a gather is a cast and a copy of what is there anyway, and launching these for
    each layer and micro-batch takes longer than they do. Adapters' frozen base would be there
    twice, in the dtype of compute, and what offload_policy keeps on the CPU would be on the device.
    """
    return sharers == 1 and config.lora is None and not config.offload_policy


def units_of(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def root_of(module: nn.Module) -> FSDPModule | None:
    """Returns the outermost unit; None where nothing is sharded (another program's model)."""
    return next((part for part in module.modules() if isinstance(part, FSDPModule)), None)


def reshard_root(module: nn.Module) -> None:
    root = root_of(module)
    if root is not None:
        root.reshard()


@contextmanager
def all_passes(module: nn.Module, once: bool) -> Iterator[None]:
    """Around the passes over all micro-batches of a batch. once: meanwhile all units have their
    whole weights (gathers_once).

    After FloatingPointError, which a run may pass over, weights are shards and nothing is left of
    gradients that were not reduced yet, over shards or over replicas: the next pass is as if this
    one had not been. With `once` that holds after every exception; with several shards it might
    wait for a rank that is lost.
    """
    units = units_of(module) if once else []
    root = root_of(module)
    forgotten = Exception if once else FloatingPointError
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    except forgotten:
        if root is not None:
            forget_pass(root)
        raise
    for unit in units:
        unit.reshard()


@contextmanager
def layers_resharded(module: nn.Module) -> Iterator[None]:
    """Meanwhile layers that keep their gathered weights for a backward pass give them back after
    their forward pass.
    """
    units = [unit for unit in units_of(module) if unit is not module]
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


def set_replica_sync(module: nn.Module, last: bool, once: bool, offloads: bool) -> None:
    """Shards' gradients are reduced in every micro-batch, replicas' once, in the last.

    once: weights were gathered for all micro-batches (gathers_once). The last gives them back, and
    until then each gradient is added to its sum, in float32, where it was computed.
    offloads: by offload_policy, without replicas: FSDP2 takes the mesh's axis of one rank for
    replicas, and would sum the gradients on the GPU until the last micro-batch.
    """
    root = root_of(module)
    if root is None:
        return
    if once:
        root.set_reshard_after_backward(last)
        root.set_requires_gradient_sync(last)
    else:
        root.set_requires_all_reduce(last or offloads)


def clip_gradients(params: Sequence[Tensor], most: float, topology: Topology) -> Tensor:
    """Clips gradients to a norm over all parameters, which it returns, as clip_grad_norm_ of torch
    does. Collective.

    All are sharded over the ranks of a copy, so the norm is made of those of each rank's shards.
    torch's function takes parameters of one mesh, and experts have their own; and DTensor would
    look for a sharding of each operation on each shape, for seconds in a process's first update.
    """
    held = [local(p).detach() for p in params if p.grad is not None]
    shards = [local(p.grad) for p in params if p.grad is not None]
    parts = [p for g in shards for p in (g.flatten().split(PIECE) if g.is_cpu else (g,))]
    square = get_total_norm(parts).float().square().to(topology.device)
    dist.all_reduce(square, group=topology.copies.get_group("fsdp"))
    norm = square.sqrt()
    for weight, gradient in zip(held, shards, strict=True):
        weight.grad = gradient
    clip_grads_with_norm_(held, most, norm)  # a few kernels for all; shards may be on the CPU
    return norm
