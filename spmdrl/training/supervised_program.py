"""The run of a program that learns from rows as they stand: its arguments, then its training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from spmdrl.cli.arguments import read_arguments
from spmdrl.config import SupervisedConfig
from spmdrl.distributed.env import without_garbage_collection
from spmdrl.distributed.start import reading

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
    with reading(arguments[0]):
        value, dry = read_arguments(kind, *arguments)
    with without_garbage_collection():
        from spmdrl.distributed.process import notes_last  # torch comes in here, see spmdrl/ppo.py
        from spmdrl.training.checks.memory_fit import require_sound
        from spmdrl.training.elastic import check_sizes
        from spmdrl.training.fetch import fetch
        from spmdrl.training.runtime import started
        from spmdrl.training.supervised import show_plan, train

    with started(value) as runtime, notes_last(dry.run):
        world = dry.ranks or runtime.topology.world
        value = fetch(value, runtime.phases, "none" if dry.run else "all")
        check(value, world)
        check_sizes(require_sound, value, runtime)
        if dry.run:
            show_plan(task(value), value, runtime, dry)
        else:
            train(task(value), value, runtime)
