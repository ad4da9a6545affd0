"""Learning-rate schedules as a function of the number of updates done: nothing to step or save."""

from __future__ import annotations

import math

from spmdrl.config import OptimConfig


def learning_rate(config: OptimConfig, num_updates: int) -> float:
    """Rate of the update after `num_updates`: linear warm-up, then constant, linear or cosine.

    The decay ends after config.decay_steps at min_lr_ratio * lr.
    """
    if num_updates < config.warmup_steps:
        return config.lr * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(config.decay_steps - config.warmup_steps, 1)
    progress = min((num_updates - config.warmup_steps) / span, 1.0)
    left = 1 - progress if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)
