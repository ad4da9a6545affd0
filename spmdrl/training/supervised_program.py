"""What the programs do that learn from rows as they stand, once their arguments are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from spmdrl.cli.arguments import read_arguments
from spmdrl.config import ConfigError, SupervisedConfig
from spmdrl.distributed.env import before_torch, without_garbage_collection
from spmdrl.distributed.exit import GUARD, exit_config
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import LIBRARIES, PROGRESS

if TYPE_CHECKING:
    from spmdrl.training.supervised import Task

C = TypeVar("C", bound=SupervisedConfig)


def run_program(
    kind: type[C], arguments: tuple[Any, ...], check: Callable[[C, int], None],
    task: Callable[[C], Task],
) -> None:  # fmt: skip
    """A program from its arguments to its end.

    kind: of its config. arguments: those of read_arguments behind the kind, the config's path
    first. check: raises ConfigError; it is given the number of ranks. check and task import torch.
    """
    GUARD.install()
    keep_output()
    PROGRESS.start(f"reading {arguments[0]}")
    try:
        value, dry = read_arguments(kind, *arguments)
    except ConfigError as error:
        exit_config(error)
    PROGRESS.now(LIBRARIES)
    before_torch()
    with without_garbage_collection():
        from spmdrl.distributed.process import notes_last  # torch comes in here, see spmdrl/ppo.py
        from spmdrl.training.fetch import fetch
        from spmdrl.training.runtime import started
        from spmdrl.training.supervised import show_plan, train

    with started(value) as runtime, notes_last(dry.run):
        world = dry.ranks or runtime.topology.world
        value = fetch(value, runtime.phases, "none" if dry.run else "all")
        check(value, world)
        if dry.run:
            show_plan(task(value), value, runtime, dry)
        else:
            train(task(value), value, runtime)
