"""Reinforcement learning: python -m spmdrl.launch --nproc-per-node 8 -m spmdrl.ppo --config cfg.py

Options: --dry-run checks everything that needs no engine and prints the plan; any field of the
config is set by its dotted name, as in --steps 2 --actor.optim.lr 1e-6 --resume auto.
"""

from __future__ import annotations

from typing import Any

import fire

from spmdrl.algo.option_help import option_lines
from spmdrl.cli.arguments import read_arguments
from spmdrl.cli.help import asks_for_help
from spmdrl.config import PpoConfig
from spmdrl.distributed.env import without_garbage_collection
from spmdrl.distributed.start import reading


def main(
    config: str = "", dry_run: bool = False, ranks: int = 0, show_config: bool = False,
    gpu_gib: float = 0.0, **overrides: Any,
) -> None:  # fmt: skip
    """Trains the model that the config file names.

    Args:
        config: a Python file that defines `config = PpoConfig(...)`
        dry_run: check, print the plan, score one sample of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        show_config: with --dry-run, print every field and not only what differs from the defaults
        gpu_gib: with --dry-run, plan for GPUs with so many GiB instead of those that are here
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-6
    """
    if asks_for_help(overrides, main, PpoConfig, option_lines):
        return
    with reading(config):
        value, dry = read_arguments(
            PpoConfig, config, dry_run, ranks, show_config, gpu_gib, overrides
        )
    # Not at the top: a wrong key should cost a fraction of a second, and torch takes seconds.
    with without_garbage_collection():
        from spmdrl.distributed.process import notes_last
        from spmdrl.training.checks.rl import check, require_sound
        from spmdrl.training.dry_run import show_plan
        from spmdrl.training.elastic import check_sizes
        from spmdrl.training.fetch import fetch
        from spmdrl.training.rl import train
        from spmdrl.training.runtime import started

    with started(value, dry.run) as runtime, notes_last(dry.run):
        world = dry.ranks or runtime.topology.world
        value = fetch(value, runtime.phases, "none" if dry.run else "all")
        check(value, world)
        check_sizes(require_sound, value, runtime)
        if dry.run:
            show_plan(value, runtime, dry)
        else:
            train(value, runtime)


if __name__ == "__main__":
    fire.Fire(main)
