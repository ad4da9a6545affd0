"""The files of a model's image and video processors: loaded, compared, written beside weights."""

from __future__ import annotations

import shutil
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, PreTrainedConfig
from transformers.utils import cached_file

from spmdrl.config import ConfigError, DataConfig, SftDataConfig
from spmdrl.hub.video_processors import load_video_processor
from spmdrl.hub.vision_families import FAMILIES, VideoFamily

FILES = (
    "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json",
    "chat_template.json", "tiktoken.model",
)  # fmt: skip


@dataclass(frozen=True)
class ProcessorFiles:
    """The files that a model's processor is made of, to be written beside its weights. Python files
    that these name are copied with them, and not run.
    """

    model: str

    def save_pretrained(self, folder: str | Path) -> None:
        for name in FILES:
            found = cached_file(self.model, name, _raise_exceptions_for_missing_entries=False)
            if found is not None:
                shutil.copy(found, folder)
                for code in Path(found).parent.glob("*.py"):
                    shutil.copy(code, folder)


def same_pixels(model: str, other: str, video: VideoFamily | None = None) -> bool:
    """Whether both are given the same numbers for an image, and for a video. video: how the family
    sees those; None: it sees none. Raises ConfigError.
    """
    pairs = [tuple(load_processor(name).to_dict() for name in (model, other))]
    if video is not None:
        pairs.append(tuple(video_processor_of(name, video).to_dict() for name in (model, other)))
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std",
             "rescale_factor", "size", "crop_to_patches", "min_patches", "max_patches",
             "max_soft_tokens", "pooling_kernel_size", "do_pan_and_scan", "in_token_limit",
             "merge_kernel_size", "pad_input", "min_frames",
             "max_frames", "cap_pixels_per_frame")  # fmt: skip
    return all(mine.get(name) == theirs.get(name) for mine, theirs in pairs for name in names)


def load_processor(model: str) -> Any:
    """Raises ConfigError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoImageProcessor.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {model!r} sees images, but its preprocessor_config.json does not load: {error}"
        ) from error


def video_processor_of(model: str, family: VideoFamily) -> Any:
    """Raises ConfigError."""
    try:
        return load_video_processor(model, family.kind, family.processor)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model: {model!r} sees videos, but its video_preprocessor_config.json does not load: "
            f"{error}"
        ) from error


def set_pixels(
    processor: Any, config: PreTrainedConfig, data: DataConfig | SftDataConfig
) -> None:  # fmt: skip
    """Has images scaled to what the data config says. Raises ConfigError."""
    edges = ("shortest_edge", data.image_min_pixels), ("longest_edge", data.image_max_pixels)
    limits = {edge: limit for edge, limit in edges if limit is not None}
    if not FAMILIES[config.model_type].in_pixels:
        if limits:
            raise ConfigError(
                "data.image_min_pixels and image_max_pixels are not of model type "
                f"{config.model_type!r}, whose images have sizes of their own: leave them out"
            )
        return
    processor.size = replace(processor.size, **limits)
    least, most = processor.size.shortest_edge, processor.size.longest_edge
    if least > most:
        raise ConfigError(
            f"data.image_min_pixels={least} is above image_max_pixels={most} (one of them may "
            "be what the model's preprocessor_config.json says)"
        )
