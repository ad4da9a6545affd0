"""An environment and a tool whose replies have images, for whole runs and for single turns."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image


def pixels(seed: int, width: int, height: int) -> Image.Image:
    """An image of random pixels."""
    made = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(made)


def show(messages: list[dict], sample_index: int, num_turns: int) -> Any:
    """Shows an image after the first turn, two with a word after the second; every fourth sample
    gets words alone.
    """
    seed = 10 * sample_index + num_turns
    if num_turns >= 3:
        return None
    if sample_index % 4 == 3:
        return "and?"
    first = pixels(seed, 8 * (1 + sample_index % 3), 16)
    if num_turns == 1:
        return first
    file = io.BytesIO()
    pixels(seed + 5, 16, 8).save(file, "PNG")
    parts = [{"type": "text", "text": "3"}, {"type": "image", "image": first}, file.getvalue()]
    return [{"role": "user", "content": parts}]


def zoom(part: int, kind: str = "image") -> Any:
    """Shows a part of a picture.

    Args:
        part: which
        kind: in which form
    """
    image = pixels(part, 16, 8)
    file = io.BytesIO()
    image.save(file, "PNG")
    encoded = file.getvalue()
    if kind == "openai":
        import base64

        uri = "data:image/png;base64," + base64.b64encode(encoded).decode()
        return [{"type": "text", "text": "here"},
                {"type": "image_url", "image_url": {"url": uri}}]  # fmt: skip
    return {
        "image": image, "bytes": encoded, "verl": {"text": "here", "image": [image]},
        "two": [image, "and", encoded], "nested": {"found": {"screenshot": image}},
        "web": [{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}],
        "large": pixels(part, 64, 64), "broken": encoded[:60], "gray": image.convert("CMYK"),
    }[kind]  # fmt: skip
