"""Supervised fine-tuning: python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.sft --config cfg.py

Also runs as python -m spmdrl.sft. Options: --dry-run checks everything that needs no engine and
prints the plan; any field of the config is set by its dotted name. Writes the model to config.out
in Hugging Face format; with actor.lora also the adapter, to config.out/adapter. Saves, stops and
resumes as python -m spmdrl.ppo does.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli.help import asks_for_help
from spmdrl.config import DistillationConfig, SftConfig
from spmdrl.training.supervised_program import run_program

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
    if not asks_for_help(overrides, main, SftConfig):
        arguments = config, dry_run, ranks, show_config, gpu_gib, overrides
        run_program(SftConfig, arguments, check, task)


def check(config: SftConfig, world: int) -> None:
    from spmdrl.training.checks.supervised import check_sft

    check_sft(config, world)


def task(config: SftConfig) -> Task:
    from spmdrl.algo.distillation import distilling
    from spmdrl.data.sft import SftDataset
    from spmdrl.training.logs.curves import DIVERGENCE, LOSS
    from spmdrl.training.supervised import Task, over_tokens

    given = Task(
        name="sft", kind="policy", load=SftDataset.load,
        objective=partial(over_tokens, cross_entropy, negative_logprobs),
        summary=with_perplexity, shown=("sft/loss", "sft/grad_norm"), curve=LOSS,
        row_sequences=1,
    )  # fmt: skip
    if config.distillation is None:
        return given
    loss_fn = distilling(partial(beside_teacher, config.cross_entropy_coef), config.distillation)
    measure = partial(distance_to_teacher, config.distillation)
    return replace(
        given, objective=partial(over_tokens, loss_fn, measure), curve=DIVERGENCE,
        shown=("sft/loss", "sft/distillation_loss", "sft/grad_norm"),
    )  # fmt: skip


def cross_entropy(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of every response token (the seam of engines/base.py)."""
    assert mb.loss_weights is not None
    loss = -(logprobs * mb.loss_weights).sum()
    return loss, {"entropy": (entropy.detach() * mb.loss_mask).sum()}


def beside_teacher(
    coef: float, logprobs: Tensor, entropy: Tensor, mb: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """coef times the cross-entropy, which is then a metric of its own: the loss is more than it."""
    loss, sums = cross_entropy(logprobs, entropy, mb)
    return coef * loss, sums | {"cross_entropy": -(logprobs.detach() * mb.loss_mask).sum()}


def negative_logprobs(
    model: TrainEngine, batch: Batch, images: BatchImages | None
) -> dict[str, Tensor]:
    found = model.logprobs(batch, temperature=1.0, images=images)
    logprobs = found.logprobs  # 0 where nothing is learnt
    return {"loss": -logprobs.double().sum()}


def distance_to_teacher(
    config: DistillationConfig, model: TrainEngine, batch: Batch, images: BatchImages | None
) -> dict[str, Tensor]:
    """The cross-entropy and the divergence to the teacher, in one pass without gradient."""
    from spmdrl.algo.distillation import distillation_losses, distillation_metrics

    found = model.logprobs(batch, temperature=1.0, images=images, teacher=True)
    teacher, student = batch.teacher_logprobs, found.student_logprobs
    assert teacher is not None and student is not None
    losses = distillation_losses(teacher, student, config)
    sums = distillation_metrics(losses.double(), teacher.double(), student.double(), batch, config)
    return {"loss": -found.logprobs.double().sum()} | sums


def with_perplexity(means: dict[str, float]) -> dict[str, float]:
    loss = means["loss"]
    return means | {"perplexity": math.exp(min(loss, 700.0))}  # what a float holds


if __name__ == "__main__":
    fire.Fire(main)
