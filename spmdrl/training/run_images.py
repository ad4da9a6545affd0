"""The images that the sequences of a run may show: of its data, and of what is said later."""

from __future__ import annotations

from spmdrl.config import PpoConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import BatchImages
from spmdrl.data.prompts import PromptDataset
from spmdrl.types import Prompt


def with_replies(looks: ImageLimits | None, config: PpoConfig) -> ImageLimits | None:
    """Returns the limits of images with those that replies, or agents' messages, may show."""
    sections = (("multi_turn", config.multi_turn), ("agents", config.agents))
    for section, limits in sections:
        if looks is not None and limits.max_images:
            looks = looks.with_replies(limits.max_images, limits.max_image_tokens, section)
    return looks


def batch_images(
    config: PpoConfig, looks: ImageLimits | None, prompts: PromptDataset
) -> BatchImages | None:
    """None where no sequence shows an image. An agent's rows have none of the data's but those that
    it has sent.
    """
    if looks is None or not looks.shows:
        return None
    return BatchImages(looks.vision, prompts.by_id if config.agent is None else no_images)


def no_images(row: int) -> Prompt:
    """Stands for the prompt of an agent's row (data.images.BatchImages.by_id)."""
    return Prompt(row, [], "", None, "")
