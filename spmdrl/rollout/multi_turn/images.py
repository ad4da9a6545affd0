"""Images in replies: which of them the model can be shown, and as what they stand in a message."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spmdrl.config import AgentConfig, MultiTurnConfig
from spmdrl.config.words import counted
from spmdrl.data.images import ImageProcessor
from spmdrl.data.pictures import open_picture, size_of
from spmdrl.data.reply_images import pictures_in, shows_image, with_images
from spmdrl.data.table_files import BadRow
from spmdrl.rewards.workers.worker import Reply
from spmdrl.rollout.base import Completion
from spmdrl.types import Message, Picture

logger = logging.getLogger(__name__)

IN_ROWS = "field 'images': "  # how errors about images of the data begin


@dataclass
class ImageRules:
    """Says whether the model can be shown images of replies, or of agents' messages. vision: None
    where it sees none.
    """

    vision: ImageProcessor | None
    limits: MultiTurnConfig | AgentConfig
    section: str = "multi_turn"  # of the config, that has the limits
    source: str = "a tool or the environment returned"  # for a warning: who wants it shown
    has_warned: bool = False

    def allow_any(self) -> bool:
        return self.vision is not None and self.limits.max_images > 0

    def read(self, value: Any) -> Any:
        """Returns a value with its images as parts of messages. Where none may be shown, a dict
        that has one somewhere inside stays what it is, to be read as text. Raises BadRow.
        """
        return with_images(value) if self.allow_any() or shows_image(value) else value

    def problem_of(self, pictures: Sequence[Picture], before: int) -> str:
        """Returns what is wrong with these images, "" where nothing is. before: how many the sample
        has been shown.
        """
        if self.vision is None:
            return self.warned("an image, and the model sees none")
        most = self.limits.max_images
        if not most:
            return self.warned(
                f"an image, and {self.section}.max_images=0 allows none: set it to as many as may "
                "be shown in a sample"
            )
        if before + len(pictures) > most:
            return (
                f"{counted(len(pictures), 'image')}, but a sample may be shown "
                f"{self.section}.max_images="
                f"{most}, and has been shown {before}"
            )
        problems = [self.problem_of_one(self.vision, picture) for picture in pictures]
        return next((problem for problem in problems if problem), "")

    def problem_of_one(self, vision: ImageProcessor, picture: Picture) -> str:
        try:
            open_picture(picture)
            tokens = len(vision.layout(picture))
        except BadRow as error:
            return f"what is no image: {str(error).removeprefix(IN_ROWS)}"
        most = self.limits.max_image_tokens
        if tokens <= most:
            return ""
        width, height = size_of(picture)
        return (
            f"an image of {width} x {height} pixels, which has {tokens} tokens, more than "
            f"{self.section}.max_image_tokens={most}: use a smaller one"
        )

    def warned(self, problem: str) -> str:
        """Logs once what the config can mend, and returns it."""
        if not self.has_warned:
            logger.warning("%s %s", self.source, problem)
            self.has_warned = True
        return problem


@dataclass
class ShownImages:
    """Counts the images of the replies to one turn, and looks at them."""

    rules: ImageRules
    turn: Completion
    num_new: int = 0  # in the replies to this turn, so far

    def of_tool(self, result: Reply) -> Reply:
        """Returns what a tool said with its images as parts of a message; an error where they
        cannot be shown, as for any other failure of a tool.
        """
        if result.error is not None:
            return result
        try:
            content = self.rules.read(result.value)
        except BadRow as error:
            return Reply(None, f"the tool returned {error}")
        problem = self.problem_of([{"role": "tool", "content": content}])
        return Reply(None, f"the tool returned {problem}") if problem else Reply(content)

    def problem_of(self, messages: list[Message]) -> str:
        """Returns why the images of these messages cannot be shown, "" where they can be."""
        pictures = pictures_in(messages)
        if not pictures:
            return ""
        before = sum(len(pictures_in(json.loads(reply))) for reply in self.turn.replies)
        problem = self.rules.problem_of(pictures, before + self.num_new)
        self.num_new += 0 if problem else len(pictures)
        return problem


def said_with_images(value: Any, rules: ImageRules) -> Any:
    """Returns what an environment returned with its images as parts of messages. What has an image
    and is no message becomes the user's. Raises BadRow.
    """
    if isinstance(value, list) and any(isinstance(m, dict) and "role" in m for m in value):
        return [said_in(message, rules) for message in value]
    found = rules.read(value)
    return [{"role": "user", "content": found}] if shows_image(found) else value


def said_in(message: Any, rules: ImageRules) -> Any:
    if not isinstance(message, dict) or "content" not in message:
        return message
    return {**message, "content": rules.read(message["content"])}


def is_content(content: Any) -> bool:
    """Says whether it is a text, or parts with an image among them."""
    return isinstance(content, str) or is_shown(content)


def is_shown(content: Any) -> bool:
    """Says whether it is a list of parts as `with_images` returns it."""
    return isinstance(content, list) and shows_image(content)


def texts_of(content: Any) -> list[str]:
    """Returns the texts of a message's content: itself, or those of its parts."""
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if part["type"] == "text"]
