"""The images of a request: those of its prompt, and those of the replies in what is begun of its
answer.
"""

from __future__ import annotations

import json

from spmdrl.data.images import ImageProcessor, PromptImages
from spmdrl.data.reply_images import pictures_in, placed_images
from spmdrl.rollout.base import NOT_CHOSEN, Request
from spmdrl.types import PlacedImage


def images_of_request(vision: ImageProcessor, request: Request) -> PromptImages | None:
    """Returns what the request is to a model with a tower; None where it has no image. It covers
    the prompt, with images in replies also the answer's tokens.
    """
    if request.placed_images:
        return vision.view(request.prompt_ids, (), request.placed_images)
    messages = [message for reply in request.replies for message in json.loads(reply)]
    pictures = pictures_in(messages)
    if not pictures:
        if not request.images:
            return None
        return vision.view(request.prompt_ids, request.images)
    chosen = [int(version != NOT_CHOSEN) for version in request.versions]
    start = len(request.prompt_ids)
    replies = [
        PlacedImage(start + first, picture)
        for first, picture in placed_images(vision, request.response_ids, chosen, pictures)
    ]
    return vision.view([*request.prompt_ids, *request.response_ids], request.images, replies)
