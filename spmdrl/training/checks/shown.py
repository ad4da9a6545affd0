"""Checks of what the prompts of a run show: images and videos."""

from __future__ import annotations

from spmdrl.config import KeepSamplesConfig, PpoConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.prompts import PromptDataset
from spmdrl.training.checks.agents import check_agent_data


def check_shown(config: PpoConfig, dataset: PromptDataset) -> None:
    """Raises ConfigError for data whose rows agents cannot be given, and for videos where they
    cannot be shown.
    """
    check_agent_data(config, dataset)
    if not dataset.images.videos:
        return
    require(
        config.agent is None,
        "data: prompts have videos, which agents are not told of: give their frames as images",
    )
    require(
        config.reward_model is None,
        "data: prompts have videos, which reward models are not shown: leave reward_model out, or "
        "give their frames as images",
    )


def check_kept(config: PpoConfig, looks: ImageLimits | None) -> None:
    """Raises ConfigError where samples are to be kept that show images."""
    require(
        config.keep_samples == KeepSamplesConfig() or looks is None or not looks.shows,
        "keep_samples: samples of this data show images or videos, which are not kept, so that no "
        "step could be replayed: leave keep_samples out",
    )
