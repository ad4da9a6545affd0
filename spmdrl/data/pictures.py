"""Images in the rows of a data set: where a row has them, and what a prompt says of them and of
videos.
"""

from __future__ import annotations

import base64
import io
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from spmdrl.data.table_files import BadRow, bad_field
from spmdrl.data.visuals import Video, Visual
from spmdrl.types import Message, Picture, PlacedImage

T = TypeVar("T")

MARK, VIDEO_MARK = "<image>", "<video>"

EXPECTED = "images as {'bytes': ...}, {'path': ...}, a path or a data: URI"

# by Pillow, whose readers of damaged files raise whatever their parsing runs into
UNREADABLE = (
    OSError, ValueError, SyntaxError, RuntimeError, EOFError, LookupError, TypeError,
    ArithmeticError, AttributeError, struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip

ORIENTATION, TURNED = 0x0112, range(5, 9)  # the tag in EXIF, and its values that swap the sides


def open_picture(picture: Picture) -> Image.Image:
    """Decodes it: in RGB, upright, on white. Raises BadRow for what cannot be decoded."""
    return decoded(picture, in_rgb)


def check_images(shown: Sequence[Visual]) -> None:
    """Decodes the images among these. Raises BadRow for what cannot be decoded."""
    for each in shown:
        if isinstance(each, Picture):
            open_picture(each)


def size_of(picture: Picture) -> tuple[int, int]:
    """Reads (width, height) in pixels from its header. Raises BadRow."""
    return decoded(
        picture,
        lambda image: (
            image.size[::-1] if image.getexif().get(ORIENTATION) in TURNED else image.size
        ),
    )


def decoded(picture: Picture, look: Callable[[Image.Image], T]) -> T:
    """Opens the image and returns the result of `look`. Raises BadRow."""
    try:
        with Image.open(io.BytesIO(picture.encoded)) as image:
            return look(image)
    except UnidentifiedImageError as error:
        reason = "is of no format that Pillow reads"
        raise BadRow(f"field 'images': {picture} {reason}") from error
    except UNREADABLE as error:
        raise BadRow(f"field 'images': {picture} cannot be read: {error!r}") from error


def in_rgb(image: Image.Image) -> Image.Image:
    """Turns the image as its EXIF orientation says and converts it to RGB. Raises ValueError for
    numbers of which nobody says which is white.
    """
    image = ImageOps.exif_transpose(image)
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are of mode {image.mode!r}: save it with 8 or 16 bits")
    if image.mode.startswith("I;16"):  # convert() would clip at 255
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def pictures_of(value: Any, folder: Path) -> tuple[Picture, ...]:
    """Reads the images of a row's field `images`. folder: of the data file, where relative paths
    begin.

    Raises BadRow.
    """
    if value is None:
        return ()
    if not isinstance(value, list):
        raise bad_field("images", value, f"a list of {EXPECTED}")
    return tuple(picture_of(item, folder) for item in value)


def refuse_single(row: Mapping[str, Any], images: Sequence[Visual]) -> None:
    """Raises BadRow for a row with an `image` and no `images`, which would be learnt blind."""
    if not images and row.get("image") is not None:
        expected = (
            "a column 'images', a list for each row, or no column 'image' where it is not to be "
            "shown"
        )
        raise bad_field("image", row["image"], expected)


def picture_of(item: Any, folder: Path) -> Picture:
    if isinstance(item, dict):  # Arrow gives every image the keys of all others, with null
        found = [item[k] for k in ("bytes", "path", "image") if item.get(k) is not None]
        item = found[0] if found else None
    if isinstance(item, bytes) and item:
        return Picture(item)
    if not isinstance(item, str) or not item:
        raise bad_field("images", item, EXPECTED)
    if item.startswith(("http://", "https://")):
        raise BadRow(
            f"field 'images': {item[:80]!r} is on the web: fetch it before the run and name the "
            "file, so that every rank and every later run sees the same"
        )
    if item.startswith("data:"):
        try:
            return Picture(base64.b64decode(item.partition(",")[2], validate=True))
        except ValueError as error:
            raise BadRow(f"field 'images': a data: URI that is not base64: {error}") from error
    return Picture(folder / item.removeprefix("file://"))


def with_parts(chat: list[Message], num_images: int, num_videos: int = 0) -> list[Message]:
    """The chat as templates want it where there are images or videos: {"type": "image"} or
    {"type": "video"} for each mark. "<video>" stays text where there is no video.

    Raises BadRow where marks are more or fewer than what they stand for.
    """
    seen = [turn | {"content": parts_of(turn["content"], num_videos > 0)} for turn in chat]
    for kind, mark, count in (("image", MARK, num_images), ("video", VIDEO_MARK, num_videos)):
        marks = sum(part["type"] == kind for turn in seen for part in turn["content"])
        if marks != count:
            raise BadRow(
                f"field '{kind}s': {count} of them, but the prompt has {marks} places for one: "
                f"write {mark} where each belongs, or a part {{'type': '{kind}'}} in a list of "
                "parts"
            )
    return seen


def shown_in(chat: list[Message], shown: Sequence[Visual]) -> list[Message]:
    """Returns `with_parts` of a chat that shows these. Raises BadRow."""
    videos = sum(isinstance(each, Video) for each in shown)
    return with_parts(chat, len(shown) - videos, videos)


def with_pictures(chat: list[Message], pictures: Sequence[Picture]) -> list[Message]:
    """Returns a chat that `with_parts` made with its images in it, as OpenAI's chat API takes them.
    Raises BadRow for an image that cannot be read.
    """
    left = iter(pictures)

    def shown(part: dict[str, str]) -> dict[str, Any]:
        if part["type"] != "image":
            return part
        return {"type": "image_url", "image_url": {"url": uri_of_picture(next(left))}}

    return [
        turn | {"content": [shown(part) for part in turn["content"]]}
        if isinstance(turn["content"], list) else turn
        for turn in chat
    ]  # fmt: skip


def uri_of_picture(picture: Picture) -> str:
    """Returns an image as a data: URI. Raises BadRow."""
    kind = decoded(picture, lambda image: Image.MIME[image.format or ""])
    return f"data:{kind};base64,{base64.b64encode(picture.encoded).decode()}"


def written_images(images: Sequence[PlacedImage]) -> list[tuple[int, str]]:
    """Returns images as JSON can hold them: (first token, the file's bytes in base64) of each."""
    return [(first, base64.b64encode(picture.encoded).decode()) for first, picture in images]


def read_images(written: Sequence[tuple[int, str]]) -> list[PlacedImage]:
    """Reads what `written_images` has written."""
    return [PlacedImage(first, Picture(base64.b64decode(text))) for first, text in written]


def says_image(chat: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the text of any turn has the mark of an image."""
    return any(
        MARK in part["text"]
        for turn in chat
        for part in (
            [{"text": turn["content"]}] if isinstance(turn["content"], str) else turn["content"]
        )
        if isinstance(part, dict) and isinstance(part.get("text"), str)
    )


def parts_of(content: Any, videos: bool = False) -> list[dict[str, str]]:
    """videos: "<video>" in a text is the mark of one. Raises BadRow."""
    if isinstance(content, list):
        return [part for given in content for part in parts_of_one(given)]
    marks = {MARK: "image"} | ({VIDEO_MARK: "video"} if videos else {})
    pieces = re.split(f"({'|'.join(marks)})", content)
    return [
        {"type": marks[piece]} if piece in marks else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def parts_of_one(part: Any) -> list[dict[str, str]]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("image", "video"):
        own = [key for key in (kind, "path", "bytes", "url") if part.get(key) is not None]
        if own:
            raise BadRow(
                f"field 'prompt[].content[]': {'an' if kind == 'image' else 'a'} {kind} with its "
                f"own {own[0]!r}: put it into the row's '{kind}s', in the order in which the "
                "prompt shows them"
            )
        return [{"type": kind}]
    if kind == "text" and isinstance(part.get("text"), str):
        return [{"type": "text", "text": part["text"]}] if part["text"] else []
    raise bad_field("prompt[].content[]", part, "{'type': 'image'} or {'type': 'text', 'text': ..}")
