"""A moving average of the weights, in the weights' own shards: nothing is gathered for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from spmdrl.weights.shards import local


@torch.no_grad()
def start(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The average before the first step: the weights themselves."""
    return {name: p.detach().clone() for name, p in weights.items()}


def update(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """average <- decay average + (1 - decay) weights, in place; both on one device."""
    into = [local(tensor) for tensor in average.values()]
    get_ema_multi_avg_fn(decay)(into, [local(weights[name].detach()) for name in average], 0)


def move(average: dict[str, Tensor], device: torch.device) -> None:
    for name, tensor in average.items():
        average[name] = tensor.to(device)


@torch.no_grad()
def restart(average: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Restarts the average from weights that were loaded from a checkpoint without one."""
    for name, tensor in average.items():
        local(tensor).copy_(local(weights[name]))


def without_stored(state: dict[str, Any], stored: Collection[str]) -> str:
    """Takes the average out of the state that is to be loaded, where the checkpoint has none.

    stored: the keys of the checkpoint. Returns what becomes of an average that only one of them
    has; "" where both or neither have one.
    """
    has_average = any(key.startswith("ema.") for key in stored)
    if "ema" in state and not has_average:
        del state["ema"]
        return "starts from its weights: it has none"
    return "is dropped: ema is 0" if has_average and "ema" not in state else ""
