"""Checks how long a run is, and what depends on its number of steps."""

from __future__ import annotations

import logging

from spmdrl.config import NotGiven, PpoConfig, RunConfig, SupervisedConfig, require
from spmdrl.config.words import counted
from spmdrl.distributed.placement import is_frozen, training_roles
from spmdrl.training.checks.common import check_decay, warnings_of_optimizer
from spmdrl.training.logs.profiler import check_profile
from spmdrl.training.run_length import is_known, updates_per_run

logger = logging.getLogger(__name__)


def check_length(config: RunConfig) -> None:
    """Raises ConfigError where both steps and epochs say how long a run is, or neither."""
    require(
        config.steps > 0 or config.epochs > 0,
        f"steps={config.steps} is out of range: it must be at least 1 where epochs is 0",
    )
    require(
        not config.epochs or not config.steps or isinstance(config.steps, NotGiven),
        f"steps={config.steps} and epochs={config.epochs:g} both say how long the run is: give one "
        "of them, and 0 for the other",
    )


def warnings_of_length(config: PpoConfig | SupervisedConfig) -> list[str]:
    """Returns warnings about what a run of so many steps does to optimizers and roles; none where
    the number of steps is not known yet.
    """
    found: list[str] = []
    if not is_known(config):
        return found
    for name, role in training_roles(config).items():
        if not is_frozen(name):
            found += warnings_of_optimizer(name, role.optim, updates_per_run(config))
    warmup = config.algo.critic_warmup_steps if isinstance(config, PpoConfig) else 0
    if 0 < config.steps <= warmup:
        found.append(
            f"algo.critic_warmup_steps={warmup} are all of the {counted(config.steps, 'step')}: "
            "the actor is "
            "not trained"
        )
    return found


def check_steps(config: PpoConfig | SupervisedConfig, world: int) -> None:
    """Checks, of a run whose length is given in epochs, what depends on its number of steps; it is
    known once the data has been read. Raises ConfigError, and warns.
    """
    if not config.epochs:
        return
    check_profile(config, world)
    for name, role in training_roles(config).items():
        if not is_frozen(name):
            check_decay(name, role.optim, updates_per_run(config))
    for warning in warnings_of_length(config):
        logger.warning(warning)
