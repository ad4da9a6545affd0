"""Reinforcement learning: torchrun --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

Options: --dry-run checks everything that needs no engine and prints the plan; any field of the
config is set by its dotted name, as in --steps 2 --actor.optim.lr 1e-6 --resume auto.
"""

from __future__ import annotations

from typing import Any

import fire

from spmdrl.cli import arguments
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.exits import exit_config
from spmdrl.help import asks_for_help
from spmdrl.imports import before_torch


def main(config: str = "", dry_run: bool = False, ranks: int = 0, **overrides: Any) -> None:
    """Trains the model that the config file names.

    Args:
        config: a Python file that defines `config = PpoConfig(...)`
        dry_run: check, print the plan, score one sample of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-6
    """
    if asks_for_help(overrides, __doc__, PpoConfig):
        return
    try:
        value, dry_run, ranks = arguments(PpoConfig, config, dry_run, ranks, overrides)
    except ConfigError as error:
        exit_config(error)
    # Not at the top: a wrong key should cost a fraction of a second, and torch takes seconds.
    before_torch()
    from spmdrl.plan import check
    from spmdrl.program import started
    from spmdrl.trainer import dry_run as show_plan
    from spmdrl.trainer import train

    with started(value) as runtime:
        check(value, ranks or runtime.topology.world)
        if dry_run:
            show_plan(value, runtime, ranks or runtime.topology.world)
        else:
            train(value, runtime)


if __name__ == "__main__":
    fire.Fire(main)
