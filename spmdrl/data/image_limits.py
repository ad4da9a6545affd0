"""The size and number of the images and videos that a rollout engine must be ready for."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from spmdrl.config import ConfigError
from spmdrl.data.images import ImageProcessor


@dataclass(frozen=True)
class ImageLimits:
    """The size and number of images that a rollout engine must be ready for."""

    vision: ImageProcessor
    per_prompt: int  # images, at most; 0: none
    tokens: int  # of the largest
    size: tuple[int, int]  # its width and height
    videos: int = 0  # of a prompt, at most
    video_tokens: int = 0  # of the largest
    video_grid: tuple[int, int, int] = (0, 0, 0)  # its steps in time, rows and columns of patches

    @property
    def shows(self) -> bool:
        """Whether any prompt shows something."""
        return self.per_prompt > 0 or self.videos > 0

    def with_replies(self, most: int, tokens: int, section: str = "multi_turn") -> ImageLimits:
        """Returns the limits where replies show as many images, each of so many tokens at most.
        Raises ConfigError where even the smallest image has more. section: of the config, that has
        these limits.
        """
        side, found = largest_square(self.vision, tokens)
        if found == 0:
            raise ConfigError(
                f"{section}.max_image_tokens={tokens}: an image of this model has more"
            )
        limits = replace(self, per_prompt=self.per_prompt + most)
        if found < self.tokens:
            return limits
        return replace(limits, tokens=max(tokens, self.tokens), size=(side, side))


def largest_square(vision: ImageProcessor, most: int) -> tuple[int, int]:
    """(side in pixels, tokens) of the largest square image of at most so many tokens; tokens 0
    where there is none.
    """
    best = (0, 0)
    for power in range(3, 13):
        for side in (2**power, 3 * 2 ** (power - 1)):
            with suppress(ValueError):  # too small for the processor
                tokens = len(vision.family.layout(vision.sizes, side, side))
                if best[1] < tokens <= most:
                    best = (side, tokens)
    return best
