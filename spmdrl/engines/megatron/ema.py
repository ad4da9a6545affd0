"""A moving average of the weights, in the shards of megatron-core's distributed optimizer.

It lies beside the optimizer's float32 weights and is of their shapes, so that nothing is gathered
for it. Where the whole average is wanted it changes places with these weights for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from spmdrl.engines.megatron import compat

MASTER = "optimizer.state.param."  # begins the names of float32 weights in a checkpoint
AVERAGE = "ema."  # those of the average, as engine fsdp has it


@dataclass
class Average:
    """The average of what an optimizer trains, as far as this rank has it."""

    optimizer: Any  # a MegatronOptimizer over distributed ones
    chunks: list[Any]  # in Megatron's DistributedDataParallel
    decay: float
    tensors: list[Tensor]

    @classmethod
    def start(cls, optimizer: Any, chunks: list[Any], decay: float) -> Average:
        """Begins with the weights themselves."""
        tensors = [p.detach().clone() for p in masters(optimizer)]
        return cls(optimizer, chunks, decay, tensors)

    def update(self) -> None:
        """average <- decay average + (1 - decay) weights; both on one device."""
        if self.tensors:  # a pipeline stage may have nothing that is trained
            get_ema_multi_avg_fn(self.decay)(self.tensors, masters(self.optimizer), 0)

    @torch.no_grad()
    def restart(self) -> None:
        """Restarts from the weights, which were loaded from elsewhere."""
        for average, weight in zip(self.tensors, masters(self.optimizer), strict=True):
            average.copy_(weight)

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Meanwhile the optimizer's float32 weights are the average. Local."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Meanwhile the model's weights are the average, in their dtype. Collective over the
        data-parallel ranks.
        """
        try:
            with self.instead():
                self._show()
                yield
        finally:
            self._show()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in zip(self.tensors, masters(self.optimizer), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    @torch.no_grad()
    def _show(self) -> None:
        for part in compat.optimizer_parts(self.optimizer):
            pairs = zip(part.shard_float16_groups, part.shard_fp32_from_float16_groups, strict=True)
            for shards, owns in pairs:
                for shard, own in zip(shards, owns, strict=True):
                    shard.copy_(own)
        for chunk in self.chunks:
            chunk.start_param_sync(force_sync=True)

    def move(self, device: torch.device) -> None:
        self.tensors = [tensor.to(device) for tensor in self.tensors]


def masters(optimizer: Any) -> list[Tensor]:
    """Returns this rank's shards of the float32 weights that are trained."""
    parts = compat.optimizer_parts(optimizer)
    groups = [group for part in parts for group in part.optimizer.param_groups]
    return [p.detach() for group in groups for p in group["params"]]


# ---- in a checkpoint


def states_of(state: Any) -> Iterator[dict[str, Any]]:
    """Yields what an optimizer's state, as megatron-core saves or has loaded it, has of each
    parameter: its float32 weight as "param" and Adam's moments.
    """
    if isinstance(state, Mapping) and "exp_avg" in state:
        assert isinstance(state, dict)
        yield state
    elif isinstance(state, (Mapping, list)):
        for value in state.values() if isinstance(state, Mapping) else state:
            yield from states_of(value)


def as_average(state: Any, empty: bool) -> dict[str, Any]:
    """Returns the shards of the float32 weights in an optimizer's sharded state, by the average's
    names. empty: in memory of their own, to be loaded into.
    """
    found: dict[str, Any] = {}
    for number, held in enumerate(states_of(state)):
        shard = held["param"]
        name = AVERAGE + shard.key.removeprefix(MASTER).removeprefix("model.")
        data = torch.empty_like(shard.data) if empty else shard.data
        found[str(number)] = replace(shard, key=name, data=data)
    return found


def with_masters(state: Any, average: Mapping[str, Tensor]) -> Any:
    """Returns an optimizer's state with the average as its float32 weights. Neither is changed."""
    copied = containers_copied(state)
    for number, held in enumerate(states_of(copied)):
        held["param"] = average[str(number)]
    return copied


def containers_copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: containers_copied(value) for key, value in state.items()}
    if isinstance(state, list):
        return [containers_copied(value) for value in state]
    return state
