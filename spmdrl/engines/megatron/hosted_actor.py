"""An actor that another program has built with Megatron-core (ExternalActor)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from spmdrl.config import OptimConfig, PpoConfig, TrainConfig, require
from spmdrl.distributed.topology import Topology
from spmdrl.engines.megatron.engine import MegatronEngine
from spmdrl.engines.megatron.external_model import (
    check_host_model,
    check_optimizer,
    check_wrapper,
    form_of,
    silenced_dropout,
)
from spmdrl.engines.megatron.external_weights import chunks_of, parts_of
from spmdrl.engines.megatron.inputs import SequenceSplit
from spmdrl.engines.megatron.parts import Parts
from spmdrl.hub.hf_folder import load_hf_config


def is_megatron(model: Any) -> bool:
    """Says whether a program has built it with Megatron: it is in a list, or one of its classes."""
    kinds = type(model).__mro__
    return isinstance(model, Sequence | nn.ModuleList) or any(
        kind.__module__.startswith("megatron.") for kind in kinds
    )


class MegatronActor:
    """GPTModel chunks in Megatron's DistributedDataParallel, and their MegatronOptimizer."""

    def __init__(self, model: Any, optimizer: Any, config: PpoConfig) -> None:
        """Raises ConfigError where something is missing that a step needs. Collective."""
        self.parts = host_parts(chunks_of(model), optimizer, config)

    @property
    def dtype(self) -> torch.dtype:
        return self.parts.config.params_dtype

    @property
    def has_experts(self) -> bool:
        return bool(self.parts.config.num_moe_experts)

    def role(self, given: TrainConfig) -> TrainConfig:
        return hosted_actor(given, self.parts)

    def engine(self, role: TrainConfig, everyone: Topology) -> MegatronEngine:
        return MegatronEngine(self.parts, role, Topology.from_megatron(everyone))

    def driven_by_us(self) -> AbstractContextManager[None]:
        return self.parts.driven_by_us()


def host_parts(chunks: list[Any], optimizer: Any, config: PpoConfig) -> Parts:
    """Raises ConfigError where something is missing that a step needs."""
    for chunk in chunks:
        check_wrapper(chunk)
    check_optimizer(optimizer, config.actor.offload_optimizer)
    hf_config = load_hf_config(config.model)
    parts = parts_of(chunks, optimizer, hf_config)
    groups = parts.groups
    require(
        not config.actor.offload_params or all(hasattr(b, "param_data") and b.param_data is not None
                                               for c in chunks for b in c.buffers),
        "actor.offload_params: the host's weights lie in no buffer that could be moved; build its "
        "model and optimizer with use_distributed_optimizer=True",
    )  # fmt: skip
    check_host_model(parts, hf_config)
    tensor = groups.tensor.size() if parts.config.sequence_parallel else 1
    parts.cut = SequenceSplit(form_of(parts), groups.context.size(), groups.context.rank(), tensor)
    parts.dropout = silenced_dropout(parts.raw)
    return parts


def hosted_actor(given: TrainConfig, parts: Parts) -> TrainConfig:
    """The actor's config with the host's layout in it."""
    from megatron.core import parallel_state as ps

    require(
        given.optim == OptimConfig(),
        "actor.optim has no effect: the optimizer and its schedule are the host's",
    )
    require(
        given.moe_grouped_gemm,
        "actor.moe_grouped_gemm has no effect: the host's model computes its experts",
    )
    for name in ("overlap_grad_reduce", "overlap_param_gather", "ddp_bucket_size"):
        require(
            getattr(given, name) == getattr(TrainConfig(), name),
            f"actor.{name} has no effect: the host's DistributedDataParallelConfig says it",
        )
    config = parts.config
    layout = {
        "tensor_parallel": parts.groups.tensor.size(),
        "sequence_parallel": config.sequence_parallel,
        "pipeline_parallel": parts.groups.pipeline.size(),
        "virtual_pipeline": len(parts.chunks),
        "num_layers_in_first_pipeline_stage": config.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": config.num_layers_in_last_pipeline_stage,
        "context_parallel": parts.groups.context.size(),
        "expert_parallel": ps.get_expert_model_parallel_world_size(),
        "expert_tensor_parallel": (
            ps.get_expert_tensor_parallel_world_size() if config.num_moe_experts else 1
        ),
    }  # fmt: skip
    for name, value in layout.items():
        said, default = getattr(given, name), getattr(TrainConfig(), name)
        require(
            said in (value, default), f"actor.{name}={said}, but the host's model has {value}: "
            "leave it out",
        )  # fmt: skip
    dtype: Any = str(config.params_dtype).removeprefix("torch.")
    return replace(given, engine="megatron", dtype=dtype, **layout)
