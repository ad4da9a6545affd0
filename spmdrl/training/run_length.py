"""Finds how long a run is: its steps, which `epochs` and the data may say, and the schedules that
follow from them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

from spmdrl.config import DerivedCount, OptimConfig, PpoConfig, RunConfig, TrainConfig

R = TypeVar("R", bound=RunConfig)
TRAINED = ("actor", "critic", "prm")  # fields of a config that have an optimizer


def is_known(config: RunConfig) -> bool:
    """Whether the number of steps is known; with `epochs` it is once the data has been read."""
    return not config.epochs or isinstance(config.steps, DerivedCount)


def updates_per_run(config: RunConfig) -> int:
    """Optimizer steps of each role that is trained."""
    if isinstance(config, PpoConfig):
        return config.steps * config.algo.epochs * config.algo.mini_batches
    return config.steps


def known_updates(config: RunConfig) -> int | None:
    return updates_per_run(config) if is_known(config) else None


def with_length(config: R, num_rows: int) -> R:
    """Returns the config with the number of steps that `epochs` are, and schedules of that length.

    num_rows: that can be trained on. A pass has as many steps as whole batches are in the data.
    """
    if config.epochs:
        per_step = rows_per_step(config)
        steps = int(config.epochs * (num_rows // per_step) + 1e-6)  # 0.7 * 10 is below 7
        config = replace(config, steps=DerivedCount(max(steps, 1)))
    updates = updates_per_run(config)
    roles = {name: getattr(config, name, None) for name in TRAINED}
    changed: dict[str, Any] = {
        name: with_schedule(role, updates, bool(config.epochs))
        for name, role in roles.items()
        if role is not None
    }
    return replace(config, **changed)


def rows_per_step(config: RunConfig) -> int:
    data = config.data
    return data.prompts_per_step if isinstance(config, PpoConfig) else data.batch_size


def with_schedule(role: TrainConfig, updates: int, in_epochs: bool) -> TrainConfig:
    optim = scheduled(role.optim, updates, in_epochs)
    return role if optim == role.optim else replace(role, optim=optim)


def scheduled(optim: OptimConfig, updates: int, in_epochs: bool) -> OptimConfig:
    """Returns the optimizer's config with warm-up and decay in numbers of optimizer steps.

    updates: of the run. in_epochs: its length is given in epochs, so that a decay without a number
    ends with the run.
    """
    if optim.warmup_ratio:
        warmup = math.ceil(optim.warmup_ratio * updates - 1e-6)  # as transformers rounds it
        optim = replace(optim, warmup_steps=DerivedCount(warmup))
    if in_epochs and optim.schedule != "constant" and not optim.decay_steps:
        optim = replace(optim, decay_steps=DerivedCount(updates))
    return optim
