"""Reward models: python -m spmdrl.launch --nproc-per-node 2 -m spmdrl.reward_model --config cfg.py

Trains a sequence classifier with one output on pairs of a better and a worse answer. Options:
--dry-run checks everything that needs no engine and prints the plan; any field of the config is set
by its dotted name. Writes the model to config.out in Hugging Face format, for
reward_model=RewardModelConfig(...) of a PpoConfig. Saves, stops and resumes as python -m spmdrl.ppo
does.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli.help import asks_for_help
from spmdrl.config import RewardTrainingConfig
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
    """Trains on the preferences of a data set.

    Args:
        config: a Python file that defines `config = RewardTrainingConfig(...)`
        dry_run: check, print the plan and a pair of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        show_config: with --dry-run, print every field and not only what differs from the defaults
        gpu_gib: with --dry-run, plan for GPUs with so many GiB instead of those that are here
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-5
    """
    if not asks_for_help(overrides, main, RewardTrainingConfig):
        arguments = config, dry_run, ranks, show_config, gpu_gib, overrides
        run_program(RewardTrainingConfig, arguments, check, task)


def check(config: RewardTrainingConfig, world: int) -> None:
    from spmdrl.training.checks.supervised import check_reward_training

    check_reward_training(config, world)


def task(config: RewardTrainingConfig) -> Task:
    from spmdrl.algo.preference import pair_loss
    from spmdrl.data.preferences import PreferenceDataset
    from spmdrl.hub.hf_folder import load_hf_config
    from spmdrl.training.logs.curves import ACCURACY
    from spmdrl.training.supervised import Task, over_tokens

    padding = load_hf_config(config.model).get_text_config().pad_token_id
    return Task(
        name="reward_model", kind="reward",
        load=partial(
            PreferenceDataset.load, pad_token_id=padding, append_eos=eos_is_appended(config)
        ),
        objective=partial(
            over_tokens, partial(pair_loss, center_coef=config.center_coef),
            partial(measure, center_coef=config.center_coef),
        ),
        summary=dict, notes={"append_eos": eos_is_appended(config)},
        shown=("reward_model/loss", "reward_model/accuracy"), curve=ACCURACY,
        row_sequences=2,
    )  # fmt: skip


def eos_is_appended(config: RewardTrainingConfig) -> bool:
    """Whether EOS is put behind rows that are strings."""
    from spmdrl.rewards.reward_model import appends_eos

    asked = config.data.append_eos
    return appends_eos(config.model) if asked is None else asked


def measure(
    model: TrainEngine, batch: Batch, images: BatchImages | None, center_coef: float
) -> dict[str, Tensor]:
    from spmdrl.algo.preference import pair_terms

    found = pair_terms(model.values(batch, images), batch, center_coef)
    return {name: values.double().sum() for name, values in found.items()}


if __name__ == "__main__":
    fire.Fire(main)
