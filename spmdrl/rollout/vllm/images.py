"""Images for vLLM's engine: pixels as the trainer has them, by our image processor.

vLLM's own preprocessing is left out. It would do the same work a second time and, by default, leave
the normalisation to the model (mm_device_do_normalize): pixels that have it would be normalised
twice, which nothing reports.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from spmdrl.data.images import ImageLimits, together
from spmdrl.hub.vision_families import Pixels
from spmdrl.rollout.base import Request
from spmdrl.rollout.vllm import compat


def engine_args(looks: ImageLimits) -> dict[str, Any]:
    return {
        # without any, vLLM would leave the tower out, and its weights had no place
        "limit_mm_per_prompt": {"image": max(looks.per_prompt, 1), "video": 0, "audio": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
    }


@contextmanager
def sizes_of(looks: ImageLimits, max_model_len: int) -> Iterator[None]:
    """While an engine is built: it asks its processor for limits, and for the largest image, by
    which it measures the memory of a pass."""
    import_without_torchvision()
    limits, tokens = {"image": max(looks.per_prompt, 1)}, max(looks.tokens, 1)
    info = SimpleNamespace(
        supported_mm_limits=limits,
        allowed_mm_limits=limits,
        ctx=SimpleNamespace(model_config=SimpleNamespace(max_model_len=max_model_len)),
        get_mm_max_tokens_per_item=lambda seq_len, mm_counts: dict.fromkeys(limits, tokens),
    )

    def largest(mm_counts: Mapping[str, int], cache: Any = None) -> dict[str, Any]:
        vision = looks.vision
        blank = vision.processed(Image.new("RGB", looks.size)) if looks.tokens else vision.nothing
        return {"mm_kwargs": {"image": items_of(looks, [blank])}}

    own = SimpleNamespace(info=info, get_dummy_mm_inputs=largest)
    with compat.replaced_processor(own):
        yield


def features(looks: ImageLimits, request: Request) -> list[Any] | None:
    """Returns the value of EngineCoreRequest.mm_features. identifier: of the pixels, by which vLLM
    keeps what the vision tower made of them, and the prefixes that they are part of.
    """
    if not request.images:
        return None
    view = looks.vision.view(request.prompt_ids, request.images)
    items = items_of(looks, view.pixels)
    return [
        compat.image_feature(item, digest, first, view.is_image[first : first + count])
        for item, digest, (first, count) in zip(items, view.digests, view.spans, strict=True)
    ]


def items_of(looks: ImageLimits, images: Sequence[Pixels]) -> Any:
    """Returns vLLM's own form of some images, one item each. Its models take them by names of
    their own, and want to know of tiles how many an image has.
    """
    config = looks.vision.sizes.config
    kind, sizes = config.model_type, [len(pixels["pixel_values"]) for pixels in images]
    counts = torch.tensor(sizes)
    if "image_grid_thw" in images[0]:
        return compat.image_items(together(images), flat={"pixel_values": counts})
    values: dict[str, Any] = {"pixel_values": torch.cat([p["pixel_values"] for p in images])}
    if kind == "gemma3":
        return compat.image_items(values | {"num_patches": counts}, flat={"pixel_values": counts})
    if kind == "internvl":
        shared = {"image_token_id": torch.tensor(config.image_token_id)}
        values |= {"image_num_patches": counts}
        return compat.image_items(values, flat={"pixel_values": counts}, shared=shared)
    values = {"pixel_values": [pixels["pixel_values"][0] for pixels in images]}
    if kind == "gemma4":
        values["pixel_position_ids"] = [pixels["image_position_ids"][0] for pixels in images]
    return compat.image_items(values)


def import_without_torchvision() -> None:
    """vLLM imports one function, of arithmetic, from a module that torchvision comes with. Builds
    for CPUs do without that package; transformers has the function in another module too."""
    if find_spec("torchvision") is None:
        from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as same

        sys.modules.setdefault("transformers.models.qwen2_vl.image_processing_qwen2_vl", same)
