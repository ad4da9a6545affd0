"""Images that tools and environments return: in a message, among a sample's tokens, in a batch.

A message with an image has a list of parts as its content,

    {"role": "tool", "name": "zoom", "content": [{"type": "text", "text": "the left half:"},
                                                 {"type": "image", "image": "data:image/png;..."}]}

so that the image goes wherever the messages go: to other ranks, into a checkpoint, to a reward. A
batch has a number for each image, at the first of its tokens, and the images themselves beside it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from spmdrl.data.pictures import decoded
from spmdrl.data.table_files import BadRow
from spmdrl.types import Message, Picture, PlacedImage, Sample

IMAGE_TYPES = ("image", "image_url", "input_image")  # of a part: TRL's name, OpenAI's two
HAVE_IT = ("image", "image_url", "url", "bytes")  # keys of such a part, one of which has the image
EXPECTED = "an image of Pillow, the bytes of its file or a data: URI"


class ImageTokens(Protocol):
    """The tokens of an image, as images.ImageProcessor knows them."""

    token_id: int

    def layout(self, picture: Picture) -> list[int]: ...


def with_images(value: Any) -> Any:
    """Returns what a tool or an environment said as it stands in a message: a list of parts where
    there is an image in it, otherwise the value itself.

    value: plain data, in which an image is what worker.image_part returns, a part as OpenAI and TRL
    have them, or a data: URI. It is an image, a list of images, texts and parts, or a dict with
    "image" and "text" as verl's tools return it. Raises BadRow for an image anywhere else.
    """
    if is_table(value):
        value = parts_of_table({key: each for key, each in value.items() if each is not None})
    if not holds_image(value):
        return value
    given = value if isinstance(value, list) else [value]
    return [part_of(each) for each in given]


def is_table(value: Any) -> bool:
    """Says whether it is a dict with an image under "image", as verl's tools return it, and no
    part.
    """
    return isinstance(value, dict) and not is_part(value) and holds_image(value.get("image"))


def parts_of_table(value: dict[str, Any]) -> list[Any]:
    """Returns the text and the images of such a dict. Raises BadRow for other keys."""
    if others := sorted(set(value) - {"text", "image"}):
        raise BadRow(f"an image beside {', '.join(others)}; expected 'text' alone beside 'image'")
    images = value["image"] if isinstance(value["image"], list) else [value["image"]]
    shown = [each if is_part(each) else {"type": "image", "image": each} for each in images]
    return [value["text"], *shown] if value.get("text") else shown


def shows_image(value: Any) -> bool:
    """Says whether it is an image, or has one where `with_images` looks for it. A dict that only
    holds one somewhere else shows none.
    """
    each = value if isinstance(value, list) else [value]
    return any(is_uri(one) or is_image(one) or is_table(one) for one in each)


def holds_image(value: Any) -> bool:
    if isinstance(value, dict):
        return is_image(value) or any(map(holds_image, value.values()))
    return any(map(holds_image, value)) if isinstance(value, list) else is_uri(value)


def is_uri(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("data:image/")


def is_part(value: Any) -> bool:
    return isinstance(value, dict) and value.get("type") in ("text", *IMAGE_TYPES)


def is_image(value: Any) -> bool:
    """Says whether it is a part of a message that is an image. One without its image stands for one
    of the prompt's.
    """
    found = isinstance(value, dict) and value.get("type") in IMAGE_TYPES
    return found and any(value.get(key) is not None for key in HAVE_IT)


def part_of(value: Any) -> dict[str, str]:
    """Returns one part, its image as a data: URI that names its real kind. Raises BadRow."""
    if isinstance(value, str) and not is_uri(value):
        return {"type": "text", "text": value}
    if isinstance(value, dict) and value.get("type") == "text":
        text = value.get("text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
    uri = uri_of(value)
    try:
        encoded = base64.b64decode(uri.partition(",")[2], validate=True)
    except ValueError as error:
        raise BadRow(f"an image's data: URI is not base64: {error}") from error
    return {"type": "image", "image": named_by_kind(uri, encoded)}


def named_by_kind(uri: str, encoded: bytes) -> str:
    """Returns the data: URI with the kind of image that its bytes are; what is none stays as it
    is, and is told when it is to be shown.
    """
    try:
        kind = decoded(Picture(encoded), lambda image: Image.MIME.get(image.format or "", ""))
    except BadRow:
        return uri
    is_known = kind.startswith("image/")
    return f"data:{kind};base64,{uri.partition(',')[2]}" if is_known else uri


def uri_of(value: Any) -> str:
    """Finds the data: URI in what is an image. Raises BadRow."""
    if is_uri(value):
        return str(value)
    if isinstance(value, dict):
        held = [value[key] for key in HAVE_IT if value.get(key) is not None]
        if held:
            return uri_of(held[0])
    shown = value if isinstance(value, str) else type(value).__name__
    raise BadRow(f"{shown[:60]!r} beside or in place of an image; expected {EXPECTED}")


def pictures_in(messages: Iterable[Message]) -> list[Picture]:
    """Returns the images that replies show, in their order."""
    return [
        Picture(base64.b64decode(part["image"].partition(",")[2]))
        for message in messages
        if message["role"] != "assistant" and isinstance(message["content"], list)
        for part in message["content"]
        if is_image(part)
    ]


def without_images(messages: Iterable[Message]) -> list[Message]:
    """Returns messages as a chat template is given them: an image is {"type": "image"}."""
    return [{**message, "content": without_data(message["content"])} for message in messages]


def without_data(content: Any) -> Any:
    """Returns a message's content as a chat template is given it."""
    if not isinstance(content, list):
        return content
    return [{"type": "image"} if is_image(part) else part for part in content]


def placed_images(
    vision: ImageTokens, ids: Sequence[int], chosen: Sequence[int], pictures: Sequence[Picture]
) -> list[PlacedImage]:
    """Finds the images of replies among the tokens of an answer.

    ids: of the answer; chosen: of each token whether the policy chose it, who may have chosen an
    image's token as well. Raises ValueError where the tokens are of other images.
    """
    found, first = [], 0
    for picture in pictures:
        layout = vision.layout(picture)
        while ids[first] != vision.token_id or chosen[first]:
            first += 1
        if list(ids[first : first + len(layout)]) != layout:
            raise ValueError("the tokens of a reply are not those of its images")
        found.append(PlacedImage(first, picture))
        first += len(layout)
    return found


def images_of_sample(vision: ImageTokens, sample: Sample) -> list[PlacedImage]:
    """Returns the images of a sample's replies, of an agent's row all that it shows; tokens count
    from the start of its prompt.
    """
    if sample.placed_images:
        return list(sample.placed_images)
    pictures, start = pictures_in(sample.messages), len(sample.prompt.token_ids)
    placed = placed_images(vision, sample.response_ids, sample.loss_mask, pictures)
    return [PlacedImage(start + first, picture) for first, picture in placed]


# ---- in a batch: numbers, and the images that they are of


def key_of(picture: Picture) -> int:
    """Returns the number of an image: 60 bits of its digest; not 0, which stands for none."""
    return int(picture.digest[:15], 16) or 1


def keys_in(reply_images: Tensor) -> list[int]:
    """The numbers of all images in these tokens, each once, ascending."""
    return [key for key in reply_images.unique().tolist() if key]


def to_bytes(pictures: Mapping[int, Picture], keys: Sequence[int]) -> Tensor:
    """(num_bytes,) uint8: how many there are, the length of each in bytes, then all of them."""
    files = [pictures[key].encoded for key in keys]
    head = np.array([len(files), *map(len, files)], np.int64).tobytes()
    return torch.frombuffer(bytearray(head + b"".join(files)), dtype=torch.uint8)


def from_bytes(sent: Tensor) -> dict[int, Picture]:
    """Returns by their numbers the images that were given to `to_bytes`."""
    packed = sent.numpy().tobytes()
    count = int(np.frombuffer(packed, np.int64, 1)[0])
    lengths = np.frombuffer(packed, np.int64, count, offset=8).tolist()
    found, start = {}, 8 * (1 + count)
    for length in lengths:
        picture = Picture(packed[start : start + length])
        found[key_of(picture)] = picture
        start += length
    return found
