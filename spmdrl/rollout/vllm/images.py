"""Images and videos for vLLM's engine: pixels as the trainer has them, by our processors.

vLLM's own preprocessing is left out. It would do the same work a second time and, by default, leave
the normalisation to the model (mm_device_do_normalize): pixels that have it would be normalised
twice, which nothing reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from PIL import Image

from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import together
from spmdrl.data.videos import Clip
from spmdrl.hub.vision_families import Pixels
from spmdrl.rollout.base import Request
from spmdrl.rollout.request_images import images_of_request
from spmdrl.rollout.vllm import compat

# modules of transformers, by the model type and by what they prepare
NEED_TORCHVISION = (
    ("qwen2_vl", "image"), ("gemma3", "image"), ("gemma4", "image"), ("got_ocr2", "image"),
    ("internvl", "video"), ("pixtral", "image"), ("glm4v", "image"), ("glm4v", "video"),
)  # fmt: skip


def engine_args(looks: ImageLimits) -> dict[str, Any]:
    return {
        # without any, vLLM would leave the tower out, and its weights had no place
        "limit_mm_per_prompt": {
            "image": max(looks.per_prompt, 1),
            "video": looks.videos,
            "audio": 0,
        },
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
    }


@contextmanager
def sizes_of(looks: ImageLimits, max_model_len: int) -> Iterator[None]:
    """While an engine is built: it asks its processor for limits, and for the largest image, by
    which it measures the memory of a pass."""
    import_without_torchvision()
    limits, tokens = {"image": max(looks.per_prompt, 1)}, {"image": max(looks.tokens, 1)}
    if looks.videos:
        limits["video"], tokens["video"] = looks.videos, looks.video_tokens
    info = SimpleNamespace(
        supported_mm_limits=limits,
        allowed_mm_limits=limits,
        ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)),
        get_mm_max_tokens_per_item=lambda seq_len, mm_counts: tokens,
    )

    def largest(mm_counts: Mapping[str, int], cache: Any = None) -> dict[str, Any]:
        vision = looks.vision
        blank = vision.processed(Image.new("RGB", looks.size)) if looks.tokens else vision.nothing
        found = {"image": items_of(looks, [blank])}
        if looks.videos:
            grid = torch.tensor([looks.video_grid])
            width = vision.nothing["pixel_values"].shape[1]
            blank = {"pixel_values": torch.zeros(int(grid.prod()), width), "image_grid_thw": grid}
            found["video"] = [video_item(looks, blank, Clip(looks.video_grid, 1.0, []))]
        return {"mm_kwargs": found}

    own = SimpleNamespace(info=info, get_dummy_mm_inputs=largest)
    with compat.replaced_processor(own):
        yield


def features(looks: ImageLimits, request: Request) -> list[Any] | None:
    """Returns the value of EngineCoreRequest.mm_features. identifier: of the pixels, by which vLLM
    keeps what the vision tower made of them, and the prefixes that they are part of.
    """
    view = images_of_request(looks.vision, request)
    if view is None:
        return None
    stills = [each for each, clip in zip(view.pixels, view.clips, strict=True) if clip is None]
    images = iter(items_of(looks, stills) if stills else ())
    found = []
    for pixels, clip, digest, (first, count) in zip(
        view.pixels, view.clips, view.digests, view.spans, strict=True
    ):
        is_image = view.is_image[first : first + count]
        if clip is None:
            found.append(compat.vision_feature("image", next(images), digest, first, is_image))
        else:
            item = video_item(looks, pixels, clip)
            found.append(compat.vision_feature("video", item, digest, first, is_image))
    return found


def video_item(looks: ImageLimits, pixels: Pixels, clip: Clip) -> Any:
    """Returns vLLM's own form of a video."""
    vision, grid = looks.vision, pixels["image_grid_thw"]
    values = {"pixel_values_videos": pixels["pixel_values"], "video_grid_thw": grid}
    if vision.shown_videos.family.timed:
        values["second_per_grid_ts"] = torch.tensor([clip.seconds], dtype=torch.float64)
    counts = {"pixel_values_videos": torch.tensor([len(pixels["pixel_values"])])}
    return compat.vision_items("video", values, flat=counts)[0]


def items_of(looks: ImageLimits, images: Sequence[Pixels]) -> Any:
    """Returns vLLM's own form of some images, one item each. Its models take them by names of
    their own, and want to know of tiles how many an image has.
    """
    config = looks.vision.sizes.config
    kind, sizes = config.model_type, [len(pixels["pixel_values"]) for pixels in images]
    counts = torch.tensor(sizes)
    if kind == "kimi_vl":
        found = together(images)
        found["image_grid_hws"] = found.pop("image_grid_thw")[:, 1:]
        return compat.vision_items("image", found, flat={"pixel_values": counts})
    if "image_grid_thw" in images[0]:
        return compat.vision_items("image", together(images), flat={"pixel_values": counts})
    if kind == "gemma3":
        tiles = together(images) | {"num_patches": counts}
        return compat.vision_items("image", tiles, flat={"pixel_values": counts})
    if kind == "internvl":
        tiles = together(images) | {"image_num_patches": counts}
        shared = {"image_token_id": torch.tensor(config.image_token_id)}
        return compat.vision_items("image", tiles, flat={"pixel_values": counts}, shared=shared)
    values = {"pixel_values": [pixels["pixel_values"][0] for pixels in images]}
    if kind == "gemma4":
        values["pixel_position_ids"] = [pixels["image_position_ids"][0] for pixels in images]
    return compat.vision_items("image", values)


class Unused(ModuleType):
    """Stands for a module of transformers that needs torchvision. What its twin without torchvision
    has is there, and for any other name a class that is never used.
    """

    def __init__(self, name: str, twin: str) -> None:
        super().__init__(name)
        self.__dict__["twin"] = import_module(twin) if find_spec(twin) is not None else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        own = self.__dict__["twin"]
        return getattr(own, name, None) or getattr(own, f"{name}Pil", None) or type(name, (), {})


def import_without_torchvision() -> None:
    """vLLM's models import what its own preprocessing needs of transformers, from modules that
    torchvision comes with. Builds for CPUs do without that package, and the preprocessing is left
    out here.
    """
    if find_spec("torchvision") is not None:
        return
    for kind, name in NEED_TORCHVISION:
        module = f"transformers.models.{kind}.{name}_processing_{kind}"
        twin = f"transformers.models.{kind}.image_processing_pil_{kind}"
        if module not in sys.modules:
            sys.modules[module] = Unused(module, twin if name == "image" else module + "_pil")
