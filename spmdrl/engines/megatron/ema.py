"""A moving average of the weights, in the shards of megatron-core's distributed optimizer.

It lies beside the optimizer's float32 weights and is of their shapes, so that nothing is gathered
for it. Where the whole average is wanted it changes places with these weights for a while.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        tensors = [p.clone() for p in masters(optimizer)]
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

    def of(self, weight: Tensor) -> Tensor:
        """Returns the average of a shard that the optimizer has."""
        places = (tensor for p, tensor in zip(shards(self.optimizer), self.tensors, strict=True)
                  if p is weight)  # fmt: skip
        return next(places)

    def move(self, device: torch.device) -> None:
        self.tensors = [tensor.to(device) for tensor in self.tensors]


def shards(optimizer: Any) -> list[Any]:
    """Returns this rank's shards of the float32 weights that are trained, as the optimizer has
    them.
    """
    parts = compat.optimizer_parts(optimizer)
    groups = [group for part in parts for group in part.optimizer.param_groups]
    return [p for group in groups for p in group["params"]]


def masters(optimizer: Any) -> list[Tensor]:
    """Returns the same without their gradients."""
    return [p.detach() for p in shards(optimizer)]


# ---- in a checkpoint


def states_of(state: Any) -> Iterator[dict[str, Any]]:
    """Yields what an optimizer's state, as megatron-core saves it, has of each parameter: its
    float32 weight as "param" and Adam's moments.
    """
    if isinstance(state, dict) and "exp_avg" in state:
        yield state
    elif isinstance(state, (dict, list)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from states_of(value)


def as_average(state: Any) -> dict[str, Any]:
    """Returns the shards of the float32 weights in an optimizer's sharded state, by the average's
    names.
    """
    found: dict[str, Any] = {}
    for number, held in enumerate(states_of(state)):
        shard = held["param"]
        name = AVERAGE + shard.key.removeprefix(MASTER).removeprefix("model.")
        found[str(number)] = replace(shard, key=name)
    return found
