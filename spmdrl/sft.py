"""Supervised fine-tuning: python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft --config cfg.py

Also runs as python -m spmdrl.sft. Options: --dry-run checks everything that needs no engine and
prints the plan; any field of the config is set by its dotted name. Writes the model to config.out
in Hugging Face format; with actor.lora also the adapter, to config.out/adapter. Saves, stops and
resumes as python -m spmdrl.ppo does.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli.arguments import read_arguments
from spmdrl.cli.help import asks_for_help
from spmdrl.config import ConfigError, SftConfig
from spmdrl.distributed.env import before_torch, without_garbage_collection
from spmdrl.distributed.exit import GUARD, exit_config
from spmdrl.distributed.output import keep_output
from spmdrl.distributed.progress import LIBRARIES, PROGRESS

if TYPE_CHECKING:
    from torch import Tensor

    from spmdrl.data.images import BatchImages
    from spmdrl.engines.base import TrainEngine
    from spmdrl.training.supervised import Task
    from spmdrl.types import Batch


def main(
    config: str = "", dry_run: bool = False, ranks: int = 0, show_config: bool = False,
    gpu_gib: float = 0.0, **overrides: Any,
) -> None:  # fmt: skip
    """Trains on the responses of a data set.

    Args:
        config: a Python file that defines `config = SftConfig(...)`
        dry_run: check, print the plan and an example of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        show_config: with --dry-run, print every field and not only what differs from the defaults
        gpu_gib: with --dry-run, plan for GPUs with so many GiB instead of those that are here
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-5
    """
    if asks_for_help(overrides, main, SftConfig):
        return
    GUARD.install()
    keep_output()
    PROGRESS.start(f"reading {config}")
    try:
        value, dry = read_arguments(
            SftConfig, config, dry_run, ranks, show_config, gpu_gib, overrides
        )
    except ConfigError as error:
        exit_config(error)
    PROGRESS.now(LIBRARIES)
    before_torch()
    with without_garbage_collection():
        from spmdrl.distributed.process import notes_last
        from spmdrl.training.checks.supervised import (
            check_sft,  # torch comes in here, see spmdrl/ppo.py
        )
        from spmdrl.training.fetch import fetch
        from spmdrl.training.runtime import started
        from spmdrl.training.supervised import show_plan, train

    with started(value) as runtime, notes_last(dry.run):
        world = dry.ranks or runtime.topology.world
        value = fetch(value, runtime.phases, "none" if dry.run else "all")
        check_sft(value, world)
        if dry.run:
            show_plan(task(), value, runtime, dry)
        else:
            train(task(), value, runtime)


def task() -> Task:
    from spmdrl.data.sft import SftDataset
    from spmdrl.training.logs.curves import LOSS
    from spmdrl.training.supervised import Task

    return Task(
        name="sft", kind="policy", load=SftDataset.load, loss_fn=cross_entropy,
        measure=negative_logprobs, summary=with_perplexity, shown=("sft/loss", "sft/grad_norm"),
        curve=LOSS, row_sequences=1,
    )  # fmt: skip


def cross_entropy(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of every response token (the seam of engines/base.py)."""
    assert mb.loss_weights is not None
    loss = -(logprobs * mb.loss_weights).sum()
    return loss, {"entropy": (entropy.detach() * mb.loss_mask).sum()}


def negative_logprobs(
    model: TrainEngine, batch: Batch, images: BatchImages | None
) -> dict[str, Tensor]:
    found = model.logprobs(batch, temperature=1.0, images=images)
    logprobs = found.logprobs  # 0 where nothing is learnt
    return {"loss": -logprobs.double().sum()}


def with_perplexity(means: dict[str, float]) -> dict[str, float]:
    loss = means["loss"]
    return {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}  # what a float holds


if __name__ == "__main__":
    fire.Fire(main)
