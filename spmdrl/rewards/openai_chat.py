"""The request to a judge: a chat with its images, in the form of OpenAI's servers.

Reward functions call this in their worker processes: standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

MARK = "<image>"  # in a prompt's text: an image stands here (data/pictures.py)
VIDEO_MARK = "<video>"


def openai_messages(
    messages: Sequence[dict[str, Any]], images: Sequence[str] = ()
) -> list[dict[str, Any]]:  # fmt: skip
    """Returns the messages with every image as {"type": "image_url"}.

    messages, images: what a reward function gets under these names; images are data: URIs, those of
    the prompt in their order, and those of replies stand in the messages. A tool's message becomes
    the user's, since servers take images from users alone; it has the tool's name before it.
    """
    left = iter(images)
    return [message_of(message, left) for message in messages]


def message_of(message: dict[str, Any], left: Iterator[str]) -> dict[str, Any]:
    """left: the prompt's images that no message before has shown."""
    role, content = message["role"], message["content"]
    given = content if isinstance(content, list) else [{"type": "text", "text": content}]
    parts = [part for each in given for part in parts_of(each, left)]
    if role == "tool":
        told = {"type": "text", "text": f"The tool {message.get('name', '')} returned:"}
        return {"role": "user", "content": [told, *parts]}
    if all(part["type"] == "text" for part in parts):
        return {"role": role, "content": "".join(part["text"] for part in parts)}
    return {"role": role, "content": parts}


def parts_of(part: dict[str, Any], left: Iterator[str]) -> Iterator[dict[str, Any]]:
    """An image without its data, and a mark in a text, is the next of those that are left; a mark
    for which there is none is text. Servers are shown no videos: one is "<video>".
    """
    if part["type"] == "video":
        yield {"type": "text", "text": VIDEO_MARK}
        return
    if part["type"] != "text":
        uri = part.get("image") or next(left, None)
        yield {"type": "image_url", "image_url": {"url": uri}}
        return
    for piece in re.split(f"({MARK})", part["text"]):
        uri = next(left, None) if piece == MARK else None
        if uri is not None:
            yield {"type": "image_url", "image_url": {"url": uri}}
        elif piece:
            yield {"type": "text", "text": piece}
