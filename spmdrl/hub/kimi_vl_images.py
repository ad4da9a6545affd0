"""Kimi-VL's image processor, without the Python files that its folders bring along.

An image keeps its size where it has no more patches than in_token_limit, and is scaled to fit where
it has more. Black pixels at its right and bottom make it a whole number of tokens. Source: Kimi-VL
Technical Report, arXiv 2504.07491, section 2.1; the fields of its preprocessor_config.json.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor

MOST_SIDE = 512  # patches: the tower has no positions beyond


class KimiVLImageProcessor(BaseImageProcessor):
    def __init__(
        self, patch_size: int = 14, pad_input: bool = True, in_token_limit: int = 4096,
        merge_kernel_size: Sequence[int] = (2, 2), image_mean: Sequence[float] = (0.5, 0.5, 0.5),
        image_std: Sequence[float] = (0.5, 0.5, 0.5), **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(**kwargs)
        self.patch_size, self.in_token_limit = patch_size, in_token_limit
        self.pad_input, self.merge_kernel_size = pad_input, list(merge_kernel_size)
        self.image_mean, self.image_std = list(image_mean), list(image_std)

    def scaled_size(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width in pixels that an image is scaled to, before black pixels
        fill it up.
        """
        patches = (height // self.patch_size) * (width // self.patch_size)
        if patches <= self.in_token_limit:
            return height, width
        scale = math.sqrt(self.in_token_limit / patches)
        return int(height * scale), int(width * scale)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of an image's patches. Raises ValueError for an image that
        is too long, and where images are cropped, which published models do not do.
        """
        if not self.pad_input:
            raise ValueError("its image processor has pad_input=False, which is not done here")
        sides = zip(self.scaled_size(height, width), self.merge_kernel_size, strict=True)
        rows, columns = (-(-side // (merge * self.patch_size)) * merge for side, merge in sides)
        if max(rows, columns) >= MOST_SIDE:
            raise ValueError(
                f"it would have {rows} x {columns} patches, and the model takes fewer than "
                f"{MOST_SIDE} on a side"
            )
        return rows, columns

    def get_number_of_image_patches(
        self, height: int, width: int, images_kwargs: Any = None
    ) -> int:  # fmt: skip
        rows, columns = self.grid_of(height, width)
        return rows * columns

    def preprocess(
        self, images: Sequence[Image.Image], return_tensors: str | None = None, **kwargs: Any
    ) -> BatchFeature:
        """Returns pixel_values, (patches of all images, 3, patch_size, patch_size) float32, and
        image_grid_thw, (images, 3): 1, and the rows and columns of patches.
        """
        made = [self.patches_of(image.convert("RGB")) for image in images]
        pixels, grids = zip(*made, strict=True)
        found = {"pixel_values": np.concatenate(pixels), "image_grid_thw": np.array(grids)}
        return BatchFeature(found, tensor_type=return_tensors)

    def patches_of(self, image: Image.Image) -> tuple[np.ndarray, list[int]]:
        """Returns an image's patches from left to right and top to bottom, and its grid."""
        rows, columns = self.grid_of(image.height, image.width)
        height, width = self.scaled_size(image.height, image.width)
        if (width, height) != image.size:
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        side = self.patch_size
        canvas = np.zeros((rows * side, columns * side, 3), np.float32)
        canvas[:height, :width] = np.asarray(image, np.float32) / 255
        canvas -= np.array(self.image_mean, np.float32)
        canvas /= np.array(self.image_std, np.float32)
        grid = canvas.reshape(rows, side, columns, side, 3).transpose(0, 2, 4, 1, 3)
        return grid.reshape(-1, 3, side, side), [1, rows, columns]
