"""An actor that another program has built with transformers and FSDP2 (ExternalActor)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from spmdrl.config import PpoConfig, TrainConfig
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import forget_pass
from spmdrl.engines.fsdp.engine import FsdpEngine
from spmdrl.engines.fsdp.experts import expert_modules
from spmdrl.engines.fsdp.external_model import (
    check_actor,
    check_architecture,
    check_kind,
    check_offload,
    check_optimizer,
    rounded_steps,
    sharding_of,
)
from spmdrl.engines.fsdp.hosted_policy import HostedPolicy
from spmdrl.engines.fsdp.layers import check_here, packed_attention_name
from spmdrl.engines.fsdp.optimizers import Optimizer
from spmdrl.engines.fsdp.sharded_model import sharded_model_of_host
from spmdrl.engines.fsdp.sharding import root_of, units_of
from spmdrl.hub.hf_folder import load_hf_config

logger = logging.getLogger(__name__)


class FsdpActor:
    """A PreTrainedModel that is sharded by fully_shard, or whole on the only rank, and the
    torch.optim.Optimizer of its weights.
    """

    def __init__(self, model: Any, optimizer: Any, config: PpoConfig) -> None:
        """Raises ConfigError where something is missing that a step needs."""
        check_kind(model)
        check_architecture(model, load_hf_config(config.model))
        self.model = model
        with self.driven_by_us():
            self.sharding = sharding_of(model)
            check_optimizer(optimizer, model)
        warning = rounded_steps(optimizer)
        if warning and dist.get_rank() == 0:
            logger.warning(warning)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        own = Optimizer("host", trained, [optimizer], owned=False)
        self.policy = HostedPolicy(model, own, self.sharding.divisor)

    @property
    def dtype(self) -> torch.dtype:
        return self.sharding.dtype

    @property
    def has_experts(self) -> bool:
        return bool(expert_modules(self.model))

    def role(self, given: TrainConfig) -> TrainConfig:
        check_actor(given, self.sharding)
        dtype: Any = str(self.dtype).removeprefix("torch.")
        return replace(given, dtype=dtype, fsdp=self.sharding.sharers)

    def engine(self, role: TrainConfig, everyone: Topology) -> FsdpEngine:
        check_here(role, everyone.device)
        check_offload(role, self.model, everyone.device)
        self.policy.attention = packed_attention_name(self.model, role, everyone.device)
        layout = Topology.build(
            everyone.device, share=everyone, dp=self.sharding.replicas, fsdp=self.sharding.sharers
        )
        return FsdpEngine(sharded_model_of_host(self.policy, role), role, layout)

    def begin_anew(self, root: FSDPModule | None) -> None:
        """Forgets a pass that has not ended, and has the next one reduce its gradients."""
        if root is not None:
            forget_pass(root)
            root.set_requires_gradient_sync(True)

    @contextmanager
    def driven_by_us(self) -> Iterator[None]:
        """Weights are shards, before and after: units that the host has left gathered have what
        they were before its last optimizer step.
        """
        root = root_of(self.model)
        self.begin_anew(root)
        with ExitStack() as at_end:
            for unit in units_of(self.model):
                at_end.callback(unit.reshard)
            with ExitStack() as after_failure:
                after_failure.callback(self.model.zero_grad)
                # HSDP keeps a sum of gradients that zero_grad does not know
                after_failure.callback(self.begin_anew, root)
                yield
                after_failure.pop_all()
