"""The internals of megatron-core that the Megatron engine reads, each behind one function.

Checked with megatron-core 0.16.1. When it moves, tests/engines/megatron/test_megatron_compat.py
says which of these broke. To be imported at any time: megatron.core itself is imported by the
functions, after cpu_shim.install().
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

# ---- process-wide state


def parallel_globals() -> dict[str, Any]:
    """Returns the process groups and ranks that megatron.core.parallel_state holds now: its globals
    in capitals that are not constant, and its list of groups.
    """
    from megatron.core import parallel_state

    return {
        name: value
        for name, value in vars(parallel_state).items()
        if re.fullmatch(r"_[A-Z][A-Z_]*|_global_process_group_list", name)
    }


def blank_parallel_globals() -> dict[str, Any]:
    """Returns the same as they are before initialize_model_parallel: None, and no groups yet in
    _HYBRID_DP_CP_GROUPS.
    """
    return dict.fromkeys(parallel_globals()) | {"_HYBRID_DP_CP_GROUPS": {}}


def set_parallel_globals(values: Mapping[str, Any]) -> None:
    """Makes these the process groups and ranks that megatron.core.parallel_state holds."""
    from megatron.core import parallel_state

    vars(parallel_state).update(values)


# ---- checkpoints


def split_state(state: dict[str, Any]) -> tuple[dict[str, Any], Any, Any]:
    """Does what megatron-core's dist_checkpointing.save does before it writes. Returns the shards
    as torch.distributed.checkpoint takes them, a planner for them, and what is common to all ranks.

    Calls save_preprocess of dist_checkpointing.state_dict_utils, and of its strategies.torch
    _replace_state_dict_keys_with_sharded_keys, mcore_to_pyt_state_dict and MCoreSavePlanner.
    """
    from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    sharded, common = save_preprocess(state)
    named, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
        sharded, keep_only_main_replica=True
    )
    planner = torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    return torch_dist.mcore_to_pyt_state_dict(named, False), planner, common


def filled(entry: Any, read: Callable[[Any], Any]) -> Any:
    """Returns the parameter that an entry of sharded_state_dict stands for. read: of each of its
    ShardedTensors. Calls dict_list_map_inplace of dist_checkpointing.dict_utils, and build and
    merge_fn of a ShardedTensorFactory.
    """
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    if not hasattr(entry, "build"):
        return read(entry)
    return entry.merge_fn(dict_list_map_inplace(read, entry.build()))


def shard_of(
    name: str, tensor: Any, shape: tuple[int, ...], first: tuple[int, ...], replica: tuple[int, ...]
) -> Any:
    """Returns a part of the whole tensor `name`, whose parts need be no regular grid. first: where
    the part begins. replica: 0s where this rank is to write it. Makes a ShardedTensor.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    return ShardedTensor(
        name, tensor, tensor.dtype, tuple(tensor.shape), shape, first, axis_fragmentations=None,
        replica_id=replica,
    )  # fmt: skip


def write_format(folder: Path, backend: str, version: int) -> None:
    """Writes metadata.json, by which megatron-core knows the format of a checkpoint. Calls
    save_config of dist_checkpointing.core.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

    save_config(CheckpointingConfig(backend, version), str(folder))


@contextmanager
def reading_with(reader_of: Callable[[str], Any]) -> Iterator[None]:
    """Meanwhile dist_checkpointing.load reads a folder with reader_of(folder). Replaces
    _get_filesystem_reader in dist_checkpointing.strategies.torch.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_dist

    before = torch_dist._get_filesystem_reader
    torch_dist._get_filesystem_reader = lambda folder, cache_metadata=False: reader_of(str(folder))
    try:
        yield
    finally:
        torch_dist._get_filesystem_reader = before


# ---- optimizers


def optimizer_parts(optimizer: Any) -> list[Any]:
    """Returns the optimizers that a MegatronOptimizer is made of, those without parameters left
    out. Reads chained_optimizers and is_stub_optimizer.
    """
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if not getattr(part, "is_stub_optimizer", False)]


def own_shards(part: Any) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Yields (parameter of the model, its float32 shard on this rank, settings) of a distributed
    optimizer. Reads model_param_group_index_map.
    """
    for parameter, (group, number) in part.model_param_group_index_map.items():
        settings = part.optimizer.param_groups[group]
        yield parameter, settings["params"][number], settings


def range_of(part: Any, parameter: Any) -> tuple[int, int]:
    """Returns where this rank's shard of a distributed optimizer begins and ends in the parameter,
    flattened. Calls _get_model_param_range_map.
    """
    held = part._get_model_param_range_map(parameter)["param"]
    return held.start, held.end


def clip_gradients(shards: list[Any], clip_norm: float, norm: float) -> None:
    """Scales the gradients of an optimizer's float32 shards, whose norm this is, to clip_norm where
    it is larger, as the optimizer's own step does. Calls clip_grad_by_total_norm_fp32 of
    optimizer.clip_grads.
    """
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if shards:  # Apex's kernel takes no empty list
        clip_grad_by_total_norm_fp32(shards, clip_norm, norm)


@contextmanager
def without_gradients(shards: list[Any]) -> Iterator[None]:
    """Meanwhile an optimizer's get_grad_norm leaves out these of its float32 shards, which are no
    leaves where they are parts of the model's own weights.
    """
    before = [shard.grad for shard in shards]
    for shard in shards:
        shard.grad = None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r".*\.grad attribute of a Tensor")
            yield
    finally:
        for shard, grad in zip(shards, before, strict=True):
            shard.grad = grad


# ---- gradients in buckets


def call_when_ready(group: Any, ready: Callable[[Any], None]) -> None:
    """Has a bucket group of a DistributedDataParallel with overlap_grad_reduce call this with each
    parameter whose gradient the last micro-batch has completed. By itself it starts no reduction.

    Replaces register_grad_ready, and reads is_last_microbatch. So nothing counts gradients, and the
    group stays as before its first batch: finish_grad_sync starts what has not been started.
    """

    def register(parameter: Any, force_all_reduce: bool = False) -> None:
        if group.is_last_microbatch:
            ready(parameter)

    group.register_grad_ready = register


# ---- layers for multi-token prediction


def checkpoint_mtp_layer(layer: Any) -> None:
    """Has a MultiTokenPredictionLayer keep only tensors of its input where its activations are
    computed again (recompute_granularity "full").

    0.16.1 gives its PackedSeqParams to an autograd function that saves tensors alone, which raises
    TypeError (NVIDIA/Megatron-LM issue 3643). Replaces _checkpointed_forward, and hands on as
    TransformerBlock does.
    """
    from megatron.core import tensor_parallel

    keeps_parts: bool = layer.config.distribute_saved_activations

    def checkpointed(forward: Callable[..., Any], **inputs: Any) -> Any:
        tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in inputs.items() if name not in tensors}

        def compute(*values: Any) -> Any:
            return forward(**dict(zip(tensors, values, strict=True)), **others)

        return tensor_parallel.checkpoint(compute, keeps_parts, *tensors.values())

    layer._checkpointed_forward = checkpointed


# ---- replay of experts


def router_replays(chunk: Any) -> list[tuple[int, Any]]:
    """Returns (number of the layer in the model, from 0; its RouterReplay) of each router of a
    model chunk that was built with moe_enable_routing_replay. Empties RouterReplay's list of all
    routers, which would keep models alive. Reads layer_number and router_replay of TopKRouter.
    """
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.router_replay import RouterReplay

    RouterReplay.clear_global_router_replay_instances()
    routers = [m for m in chunk.modules() if isinstance(m, TopKRouter)]
    return [(router.layer_number - 1, router.router_replay) for router in routers]


def replay_forward(replay: Any, experts: Any) -> None:
    """Has a router take these experts in its next forward pass, (num_tokens, top_k) int64. Sets
    RouterReplayAction.REPLAY_FORWARD.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay.set_target_indices(experts)
    replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)


def replay_backward(replay: Any, wanted: bool) -> None:
    """Has a router that runs again take the oldest experts that no second run has taken. wanted:
    whether it will run again. Sets RouterReplayAction.REPLAY_BACKWARD.
    """
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    if not wanted:
        replay.clear_indices()


def forget_experts(replay: Any) -> None:
    """Has a router choose for itself again."""
    replay.clear_indices()
    replay.clear_router_replay_action()
