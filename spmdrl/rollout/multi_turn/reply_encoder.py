"""Replies as tokens: what the chat template writes between two turns of the policy's."""

from __future__ import annotations

import logging
from dataclasses import replace
from itertools import groupby
from typing import Any

from spmdrl.config import ConfigError, DataConfig, PpoConfig
from spmdrl.data.chat import CHARS_PER_TOKEN, Encoder, render_chat
from spmdrl.data.images import ImageProcessor
from spmdrl.data.reply_images import pictures_in, without_images
from spmdrl.data.table_files import BadRow
from spmdrl.rollout.base import NOT_CHOSEN, Completion
from spmdrl.rollout.multi_turn.between_turns import BetweenTurns
from spmdrl.rollout.multi_turn.tools import Toolbox
from spmdrl.types import Message

logger = logging.getLogger(__name__)

CUT = "\n... (cut) ...\n"  # in place of the middle of a long message


class ReplyEncoder:
    """Messages as the tokens that the chat template writes between two turns of the policy's.

    Raises ConfigError for a template that cannot write them.
    """

    def __init__(
        self, config: PpoConfig, tokenizer: Any, vision: ImageProcessor | None = None
    ) -> None:  # fmt: skip
        self.vision = vision
        data = prompts_of(config)
        if data.control_tokens == "error":  # of the data; what a tool says cannot be refused
            data = replace(data, control_tokens="escape")
        self.encoder = Encoder(
            tokenizer, data, config.rollout.max_tokens, all_added=True,
            image_text=vision.family.text if vision is not None else None,
        )  # fmt: skip
        plain = Encoder(tokenizer, data, config.rollout.max_tokens)
        self.ends = plain.control_ids  # what a turn may have ended with
        self.between = BetweenTurns(self.encoder, self.ends)
        self.most = config.multi_turn.max_reply_tokens
        roles = ["tool"] * bool(config.tools) + ["user"] * (config.environment is not None)
        for role in roles:
            try:
                self.ids([{"role": role, "name": "x", "content": "x"}])
            except BadRow as error:
                raise ConfigError(f"the chat template cannot write a reply: {error}") from error
        if config.tools and not self.shows_tools():
            logger.warning(
                "the chat template does not show tools to the model: describe them in the data's "
                "prompts, or give the model's folder a template that does"
            )

    def encode(self, messages: list[Message], last: int) -> tuple[list[Message], list[int]]:
        """(the messages as they are said, their tokens behind the token `last`). Raises BadRow.

        The template ends the policy's turn, unless that has ended itself: with the same token, or
        with another that the model has for it.
        """
        said = [{**m, "content": self.short_content(m["content"])} for m in messages]
        ids = self.between.joined(self.ids(said), last)
        if not ids:
            raise BadRow("it has no tokens, so two turns would be one")
        return said, ids

    def ids(self, messages: list[Message]) -> list[int]:
        """Returns the tokens from the end of a turn to the start of the next. Raises BadRow."""
        pictures = pictures_in(messages)
        ids = self.between.ids(without_images(messages))
        if not pictures:
            return ids
        assert self.vision is not None
        return self.vision.placed(ids, pictures)

    def shows_tools(self) -> bool:
        encoder, chat = self.encoder, [{"role": "user", "content": "x"}]
        given = encoder.config.chat_template_kwargs
        without = {name: value for name, value in given.items() if name != "tools"}
        with_tools, plain = (
            render_chat(chat, encoder.tokenizer, each) for each in (given, without)
        )
        return with_tools != plain

    def short_content(self, content: Any) -> Any:
        """Shortens a message's text, or each text beside its images."""
        if isinstance(content, str):
            return self.shortened(content)
        return [
            {**part, "text": self.shortened(part["text"])} if part["type"] == "text" else part
            for part in content
        ]

    def shortened(self, text: str) -> str:
        most = CHARS_PER_TOKEN * self.most
        start, end = (text[:most], text[-most:]) if len(text) > 2 * most else (text, text)
        head = self.encoder.encode(start, special=False, literal=True)
        if start == text and len(head) <= self.most:
            return text
        tail = head if start == text else self.encoder.encode(end, special=False, literal=True)
        half = max(self.most // 2, 1)
        return self.encoder.spell(head[:half]) + CUT + self.encoder.spell(tail[-half:])

    def spoken(self, ids: list[int]) -> str:
        """A turn as it was said, without the control token that ended it."""
        end = -1 if ids[-1] in self.ends else len(ids)
        return self.encoder.spell(ids[:end])

    def texts(self, answer: Completion) -> list[str]:
        """Returns the text of each turn of an answer."""
        tokenizer: Any = self.encoder.tokenizer
        return tokenizer.batch_decode(turns_of(answer), skip_special_tokens=True)


def prompts_of(config: PpoConfig) -> DataConfig:
    """config.data, its prompts with the tools in them. Raises ConfigError."""
    if not config.tools:
        return config.data
    given = config.data.chat_template_kwargs
    if "tools" in given:
        raise ConfigError(
            "data.chat_template_kwargs has 'tools', and so has the config: name them once"
        )
    tools = Toolbox(config.tools, config.sandbox).schemas
    return replace(config.data, chat_template_kwargs={**given, "tools": tools})


def turns_of(answer: Completion) -> list[list[int]]:
    """The tokens of each turn of the policy's."""
    if not answer.replies:
        return [answer.token_ids]
    pairs = zip(answer.token_ids, answer.versions, strict=True)
    runs = groupby(pairs, key=lambda pair: pair[1] != NOT_CHOSEN)
    return [[token for token, _ in run] for chosen, run in runs if chosen]
