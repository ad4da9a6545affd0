"""Declares how each family of models sees images: the tokens that one becomes, and what a tower is
given.

A family's chat template writes a mark for an image, mostly one token. Its tower makes vectors of an
image's pixels, which stand in the row at tokens of one id, config.image_token_id. What differs
between families is declared here, and read by the data, by engine fsdp and by the rollout engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, tensor, zeros_like

Pixels = dict[str, Tensor]  # what an image processor makes of one image, by name


@dataclass(frozen=True)
class ImageSizes:
    """Says what the number of an image's tokens depends on, beside the image."""

    processor: Any  # transformers' image processor
    config: Any
    options: Mapping[str, Any]  # for the image processor, besides its own
    ids: Mapping[str, int]  # of the family's further tokens, by their name


def one_token(pixels: Pixels, config: Any) -> Pixels:
    """The smallest image is made by the image processor as any other."""
    return pixels


def no_options(config: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class VideoFamily:
    """Declares how a family of models sees videos. Its tower takes them as it takes images, by a
    grid with several steps in time.

    kind: the model type whose module in transformers has the video processor `processor`.
    timestamps: each step in time is a frame of its own to the language model, between its marks,
    and the time stands before it in words. timed: otherwise, the tokens' positions in time count
    config.vision_config.tokens_per_second; not timed: they count steps.
    """

    kind: str
    processor: str
    timestamps: bool = False
    timed: bool = False


@dataclass(frozen=True)
class VisionFamily:
    """A family of models with a tower for images.

    inputs: what the image processor makes and the model takes, by name. The first axis goes over
    images, or over their patches or tiles; others are padded where images differ. layout: the token
    ids of an image of (height, width); it raises ValueError for an image that the processor
    refuses. text: what the template writes for an image, and what is tokenised in its place, which
    has config.image_token_id once; None: the same. others: the names of further tokens that a
    layout has. least: makes the pixels of the smallest image there is from
    those of a small one. grid: the rows and columns of tokens of an image of (height, width), from
    which positions in time, height and width follow; None: tokens have one position. looks_ahead:
    in which layers an image's tokens see each other, also those behind them, by the model's config:
    in "all", in those with a "window", or in none; types: the name of the argument that tells
    transformers' own masks which tokens these are. masks: how many masks of tokens the
    model's get_placeholder_mask returns, the first for images; flat: without an axis of size 1.
    in_pixels: the image processor's `size` is a least and a largest number of pixels. video: how it
    sees videos; None: they are not understood here. patches: of the tower, behind each of an
    image's tokens, by the model's config.
    """

    inputs: tuple[str, ...]
    layout: Callable[[ImageSizes, int, int], list[int]]
    patches: Callable[[Any], float]
    text: tuple[str, str] | None = None
    others: tuple[str, ...] = ()
    options: Callable[[Any], dict[str, Any]] = no_options
    least: Callable[[Pixels, Any], Pixels] = one_token
    grid: Callable[[ImageSizes, int, int], tuple[int, int]] | None = None
    looks_ahead: Callable[[Any], str | None] = lambda config: None
    types: str | None = None
    masks: int = 1
    flat: bool = False
    in_pixels: bool = False
    video: VideoFamily | None = None

    @property
    def mrope(self) -> bool:
        """Says whether tokens have positions in time, height and width."""
        return self.grid is not None


# ---- Qwen-VL, GLM-V: as many tokens as the image has squares of patches


def grid_layout(sizes: ImageSizes, height: int, width: int) -> list[int]:
    patches = sizes.processor.get_number_of_image_patches(height, width, {})
    count = patches // sizes.config.vision_config.spatial_merge_size**2
    return [sizes.config.image_token_id] * count


def qwen_grid(sizes: ImageSizes, height: int, width: int) -> tuple[int, int]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    mine = sizes.processor
    side, least, most = side_of(mine), mine.size.shortest_edge, mine.size.longest_edge
    rows, columns = smart_resize(height, width, side, min_pixels=least, max_pixels=most)
    return rows // side, columns // side


def glm_grid(sizes: ImageSizes, height: int, width: int) -> tuple[int, int]:
    from transformers.models.glm4v.image_processing_pil_glm4v import smart_resize

    mine, frames = sizes.processor, sizes.processor.temporal_patch_size
    side, least, most = side_of(mine), mine.size.shortest_edge, mine.size.longest_edge
    rows, columns = smart_resize(
        frames, height, width, frames, side, min_pixels=least, max_pixels=most
    )
    return rows // side, columns // side


def side_of(processor: Any) -> int:
    """Pixels of a token's side."""
    side: int = processor.patch_size * processor.merge_size
    return side


def least_grid(pixels: Pixels, config: Any) -> Pixels:
    merge = config.vision_config.spatial_merge_size
    patches = zeros_like(pixels["pixel_values"][: merge**2])
    return {"pixel_values": patches, "image_grid_thw": tensor([[1, merge, merge]])}


GRID = VisionFamily(
    ("pixel_values", "image_grid_thw"), grid_layout,
    lambda config: config.vision_config.spatial_merge_size**2, least=least_grid, grid=qwen_grid,
    masks=2, in_pixels=True,
)  # fmt: skip
# Kimi-VL: the same, with positions in one row and images that keep their size
KIMI = replace(GRID, grid=None, in_pixels=False)
GLM = replace(GRID, grid=glm_grid)

QWEN2_VIDEO = VideoFamily("qwen2_vl", "Qwen2VLVideoProcessor")
QWEN3_VIDEO = VideoFamily("qwen3_vl", "Qwen3VLVideoProcessor", timestamps=True)
QWEN3 = replace(GRID, video=QWEN3_VIDEO)


# ---- Gemma


def gemma3_layout(sizes: ImageSizes, height: int, width: int) -> list[int]:
    if getattr(sizes.processor, "do_pan_and_scan", None):
        raise ValueError("its image processor has do_pan_and_scan, which is not done here")
    return [sizes.config.image_token_id] * sizes.config.mm_tokens_per_image


def image_patches(vision: Any) -> int:
    side: int = vision.image_size // vision.patch_size
    return side**2


def gemma4_layout(sizes: ImageSizes, height: int, width: int) -> list[int]:
    from transformers.models.gemma4.image_processing_pil_gemma4 import (
        get_aspect_ratio_preserving_size,
    )

    mine, pool = sizes.processor, sizes.processor.pooling_kernel_size
    rows, columns = get_aspect_ratio_preserving_size(
        height, width, mine.patch_size, mine.max_soft_tokens * pool**2, pool
    )
    return [sizes.config.image_token_id] * (rows * columns // (mine.patch_size * pool) ** 2)


def gemma4_looks_ahead(config: Any) -> str | None:
    """The larger ones do, and in the layers with a window alone."""
    return "window" if config.text_config.use_bidirectional_attention == "vision" else None


def least_gemma4(pixels: Pixels, config: Any) -> Pixels:
    side = config.vision_config.pooling_kernel_size
    places = [[column, row] for row in range(side) for column in range(side)]
    patches = zeros_like(pixels["pixel_values"][:, : side**2])
    return {"pixel_values": patches, "image_position_ids": tensor([places])}


# ---- InternVL: tiles; Pixtral: rows of tokens, each with a token that ends it


def internvl_layout(sizes: ImageSizes, height: int, width: int) -> list[int]:
    config, vision = sizes.config, sizes.config.vision_config
    tiles = sizes.processor.get_number_of_image_patches(height, width, dict(sizes.options))
    rows, columns = (
        int(side // patch * config.downsample_ratio)
        for side, patch in zip(vision.image_size, vision.patch_size, strict=True)
    )
    return [config.image_token_id] * (tiles * rows * columns)


def pixtral_layout(sizes: ImageSizes, height: int, width: int) -> list[int]:
    from numpy import empty, uint8
    from transformers.models.pixtral.image_processing_pil_pixtral import (
        get_resize_output_image_size,
    )

    side = sizes.options["patch_size"]
    longest = sizes.processor.size["longest_edge"]
    rows, columns = get_resize_output_image_size(
        empty((3, height, width), dtype=uint8), longest, side, "channels_first"
    )
    row = [sizes.config.image_token_id] * (columns // side) + [sizes.ids["[IMG_BREAK]"]]
    return [*row * (rows // side)][:-1] + [sizes.ids["[IMG_END]"]]


# by transformers' model type
FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": replace(GRID, video=QWEN2_VIDEO),
    "qwen2_5_vl": replace(GRID, video=replace(QWEN2_VIDEO, timed=True)),
    "qwen3_vl": QWEN3,
    "qwen3_vl_moe": QWEN3,
    "qwen3_5": QWEN3,
    "qwen3_5_moe": QWEN3,
    "glm4v": GLM,
    "glm4v_moe": GLM,
    "glm46v": GLM,
    "kimi_vl": KIMI,
    "gemma3": VisionFamily(
        ("pixel_values",), gemma3_layout,
        lambda config: image_patches(config.vision_config) / config.mm_tokens_per_image,
        text=("<start_of_image>", "\n\n<start_of_image><image_soft_token><end_of_image>\n\n"),
        looks_ahead=lambda config: "all", types="token_type_ids",
    ),
    "gemma4": VisionFamily(
        ("pixel_values", "image_position_ids"), gemma4_layout,
        lambda config: config.vision_config.pooling_kernel_size**2,
        text=("<|image|>", "<|image><|image|><image|>"), least=least_gemma4,
        looks_ahead=gemma4_looks_ahead, types="mm_token_type_ids", masks=3, flat=True,
    ),
    "internvl": VisionFamily(
        ("pixel_values",), internvl_layout, lambda config: config.downsample_ratio**-2,
        text=("<IMG_CONTEXT>", "<img><IMG_CONTEXT></img>"),
        options=lambda config: {"crop_to_patches": True},
    ),
    "mistral3": VisionFamily(
        ("pixel_values", "image_sizes"), pixtral_layout,
        lambda config: config.spatial_merge_size**2, others=("[IMG_BREAK]", "[IMG_END]"),
        options=lambda config: {
            "patch_size": config.vision_config.patch_size * config.spatial_merge_size
        },
    ),
}  # fmt: skip
