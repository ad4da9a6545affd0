"""Preference optimisation: python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.preference --config cfg.py

DPO, IPO, KTO, ORPO, SimPO, CPO or a loss of your own, on answers of a data set. Also runs as
python -m spmdrl.preference. Options: --dry-run checks everything that needs no engine and prints
the plan; any field of the config is set by its dotted name. Writes the model to config.out in
Hugging Face format; with actor.lora also the adapter, to config.out/adapter. Saves, stops and
resumes as python -m spmdrl.ppo does.
"""  # noqa: E501

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.algo.option_help import preference_lines
from spmdrl.cli.help import asks_for_help
from spmdrl.config import PreferenceTrainingConfig
from spmdrl.training.supervised_program import run_program

if TYPE_CHECKING:
    from torch import Tensor

    from spmdrl.algo.preference_terms import Terms
    from spmdrl.data.images import BatchImages
    from spmdrl.engines.base import TrainEngine
    from spmdrl.training.row_share import Share
    from spmdrl.training.supervised import Objective, Task
    from spmdrl.types import Batch


def main(
    config: str = "", dry_run: bool = False, ranks: int = 0, show_config: bool = False,
    gpu_gib: float = 0.0, **overrides: Any,
) -> None:  # fmt: skip
    """Trains a policy to prefer the better answers of a data set.

    Args:
        config: a Python file that defines `config = PreferenceTrainingConfig(...)`
        dry_run: check, print the plan and an example of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        show_config: with --dry-run, print every field and not only what differs from the defaults
        gpu_gib: with --dry-run, plan for GPUs with so many GiB instead of those that are here
        overrides: any field of the config by its dotted name: --preference.loss ipo
    """
    if not asks_for_help(overrides, main, PreferenceTrainingConfig, preference_lines):
        arguments = config, dry_run, ranks, show_config, gpu_gib, overrides
        run_program(PreferenceTrainingConfig, arguments, check, task)


def check(config: PreferenceTrainingConfig, world: int) -> None:
    from spmdrl.training.checks.preference import check_preference

    check_preference(config, world)


def task(config: PreferenceTrainingConfig) -> Task:
    from spmdrl.algo.preference_losses import preference_loss_of
    from spmdrl.algo.preference_terms import by_label
    from spmdrl.data.answers import AnswerDataset
    from spmdrl.training.logs.curves import PREFERENCE
    from spmdrl.training.reference_logprobs import add_reference
    from spmdrl.training.supervised import Task

    labelled = preference_loss_of(config.preference).unpaired
    return Task(
        name="preference", kind="policy", load=partial(AnswerDataset.load, labelled=labelled),
        objective=partial(objective, config), summary=by_label, step_summary=by_label,
        shown=("preference/loss", "preference/rewards/accuracies"), curve=PREFERENCE,
        row_sequences=1 if labelled else 2, prepare=add_reference,
    )  # fmt: skip


def objective(config: PreferenceTrainingConfig, share: Share) -> Objective:
    """The loss over the global batch. Collective: the KL of labelled answers is computed first."""
    from spmdrl.algo.own_functions import preference_loss_name
    from spmdrl.algo.preference_losses import loss_function, preference_loss_of
    from spmdrl.algo.preference_terms import labelled_terms, pair_terms, preference_loss
    from spmdrl.training.supervised import Objective

    terms: Terms
    loss = loss_function(config.preference)
    if preference_loss_of(config.preference).unpaired:
        terms = partial(labelled_terms, loss=loss, kl=mismatched_kl(share))
    else:
        terms = partial(pair_terms, loss=loss, ld_alpha=config.preference.ld_alpha)
    seam = partial(
        preference_loss, terms=terms, num_rows=share.num_rows, num_tokens=share.num_tokens,
        where=preference_loss_name(loss),
    )  # fmt: skip
    return Objective(seam, partial(measure, terms=terms), share.num_rows)


def measure(
    model: TrainEngine, batch: Batch, images: BatchImages | None, terms: Terms
) -> dict[str, Tensor]:
    from spmdrl.algo.preference_terms import term_sums

    return term_sums(terms(model.logprobs(batch, temperature=1.0, images=images).logprobs, batch))


def mismatched_kl(share: Share) -> float:
    """max(0, the mean over the share's rows of log pi(y'|x) - log ref(y'|x)), y' an answer to
    another prompt than x: a pass without gradient over the rows of all ranks. Collective.
    """
    from spmdrl.algo.preference_terms import answer_sums
    from spmdrl.data.answers import AnswerDataset
    from spmdrl.distributed.collectives import sum_over_ranks

    rows, actor = share.rows, share.actor
    assert isinstance(rows, AnswerDataset)
    batch = rows.mismatched(share.mine)
    assert batch.ref_sums is not None
    logprobs = actor.model.logprobs(batch, temperature=1.0, images=rows.images).logprobs
    total = float((answer_sums(logprobs, batch) - batch.ref_sums).sum())
    return max(sum_over_ranks(total, actor.topology) / share.num_rows, 0.0)


if __name__ == "__main__":
    fire.Fire(main)
