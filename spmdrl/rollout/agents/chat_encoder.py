"""Conversations of agents as tokens, and what the policy says as messages."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.config import PpoConfig
from spmdrl.data.chat import Encoder
from spmdrl.data.images import ImageProcessor
from spmdrl.data.reply_images import pictures_in, without_images
from spmdrl.data.table_files import BadRow
from spmdrl.rollout.agents.requests import ApiError, ChatRequest, arguments_of_call
from spmdrl.rollout.agents.trajectory import EncodedMessages
from spmdrl.rollout.base import Completion
from spmdrl.rollout.multi_turn.between_turns import BetweenTurns
from spmdrl.rollout.multi_turn.conversation import without_thoughts
from spmdrl.rollout.multi_turn.images import ImageRules
from spmdrl.rollout.multi_turn.tools import CallParser, import_parsers
from spmdrl.types import Message, Picture

logger = logging.getLogger(__name__)

MOST_CONTEXTS = 4096  # sets of tools and template options whose encoders are kept


@dataclass(frozen=True)
class Spoken:
    """A turn of the policy's as the agent is told it."""

    message: Message  # content, and tool_calls as a chat template takes them
    finish_reason: str  # as OpenAI names it: "stop" | "length" | "tool_calls"
    stop: str | None = None  # the string that ended it


class ChatEncoder:
    """Encodes conversations whose prompts have the same tools and template options."""

    def __init__(self, encoder: Encoder, parser: CallParser | None, images: ImageRules) -> None:
        """images: which of them the messages may show."""
        self.encoder, self.parser, self.images = encoder, parser, images
        # what an agent's messages say must not end a turn or begin a call
        self.between = BetweenTurns(replace(encoder, all_added=True), encoder.control_ids)

    def encode_all(self, messages: list[Message]) -> EncodedMessages:
        """Returns the tokens of a whole conversation, up to where the policy is to answer. Raises
        ApiError.
        """
        pictures = self.pictures(messages)
        try:
            return self.located(self.encoder.chat(self.written(messages)).ids, pictures)
        except (BadRow, RecursionError) as error:  # the latter: arguments within hundreds of others
            raise ApiError(400, f"messages: {error}", "invalid_messages") from error

    def encode_behind(self, messages: list[Message], last: int) -> EncodedMessages | None:
        """Returns the tokens of messages that follow on a turn which ended with the token `last`;
        None where the template does not write them as they are. Raises ApiError.
        """
        pictures = self.pictures(messages)
        try:
            ids = self.between.joined(self.between.ids(self.written(messages)), last)
            return self.located(ids, pictures) if ids else None
        except (BadRow, RecursionError) as error:
            logger.debug("the conversation is encoded anew: %s", error)
            return None

    def written(self, messages: list[Message]) -> list[Message]:
        """Returns messages as the chat template is given them. Those of models that see images take
        what is no text for a list of parts, so that a turn of calls alone has an empty text.
        """
        if self.images.vision is None:
            return messages
        empty = [{**m, "content": ""} if m["content"] is None else m for m in messages]
        return without_images(empty)

    def pictures(self, messages: list[Message]) -> list[Picture]:
        """Returns the images that messages show. Raises ApiError for one that may not be shown."""
        pictures = pictures_in(messages)
        problem = self.images.problem_of(pictures, 0) if pictures else ""
        if problem:
            raise ApiError(400, f"messages: {problem}", "unsupported_content")
        return pictures

    def located(self, ids: list[int], pictures: list[Picture]) -> EncodedMessages:
        """Returns a template's tokens with those of the images. Raises BadRow."""
        if not pictures:
            return EncodedMessages(ids)
        assert self.images.vision is not None
        return EncodedMessages(*self.images.vision.located(ids, pictures))

    def spoken(self, answer: Completion, stop: tuple[str, ...]) -> Spoken:
        """Reads a turn: its text without the token or the string that ended it, and its calls."""
        ids, is_over = answer.token_ids, answer.finish_reason == "stop"
        ids = ids[:-1] if ids and ids[-1] in self.encoder.control_ids else ids
        stop = stop if is_over else ()
        if self.parser is not None:
            text = before_stop(self.encoder.spell(ids), stop)
            calls, _ = self.parser(without_thoughts(text))
            if calls:
                begins = self.parser.begins
                said = text[: text.find(begins)] if begins and begins in text else ""
                return Spoken(with_calls(said, calls), "tool_calls")
        tokenizer: Any = self.encoder.tokenizer
        text = tokenizer.decode(ids, skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": before_stop(text, stop)}
        finish = "length" if answer.finish_reason == "length" else "stop"
        return Spoken(message, finish, first_stop(text, stop))


class ChatEncoders:
    """The encoders of a run, by the tools and template options of a request."""

    def __init__(
        self, config: PpoConfig, tokenizer: Any, max_model_len: int,
        vision: ImageProcessor | None = None,
    ) -> None:  # fmt: skip
        """vision: of a model that sees images."""
        self.config, self.tokenizer, self.max_model_len = config, tokenizer, max_model_len
        self.images = ImageRules(vision, config.agents, "agents", "an agent sent")
        self.kept: OrderedDict[str, ChatEncoder] = OrderedDict()
        self.texts = Encoder(tokenizer, config.data, max_model_len)  # of prompts that are no chats

    async def prepare(self, request: ChatRequest) -> None:
        """Imports what reads the calls of tools, which takes seconds, without holding the event
        loop.
        """
        if request.tools and request.context not in self.kept:
            with contextlib.suppress(ImportError):  # told where the parser is built
                await asyncio.to_thread(import_parsers)

    def of(self, request: ChatRequest) -> ChatEncoder:
        """Raises ApiError for tools that cannot be parsed."""
        found = self.kept.get(request.context)
        if found is None:
            found = self.kept[request.context] = self.build(request)
            if len(self.kept) > MOST_CONTEXTS:
                self.kept.popitem(last=False)
        self.kept.move_to_end(request.context)
        return found

    def build(self, request: ChatRequest) -> ChatEncoder:
        given = {**self.config.data.chat_template_kwargs, **request.template_kwargs}
        if request.tools:
            given["tools"] = request.tools
        data = replace(self.config.data, chat_template_kwargs=given)
        if data.control_tokens == "error":  # of the data; an agent's messages cannot be refused
            data = replace(data, control_tokens="escape")
        vision = self.images.vision
        encoder = Encoder(
            self.tokenizer, data, self.max_model_len,
            image_text=vision.family.text if vision is not None else None,
        )  # fmt: skip
        parser = None
        if request.tools:
            try:
                parser = CallParser(
                    self.config.agents.parser, self.tokenizer, request.tools, "agents.parser"
                )
            except ValueError as error:  # pydantic's, for schemas, and ConfigError
                raise ApiError(400, f"tools: {error}", "invalid_tools") from error
        return ChatEncoder(encoder, parser, self.images)


def with_calls(said: str, calls: list[tuple[str, str]]) -> Message:
    """Returns the message of a turn that calls tools: (name, arguments as JSON) of each."""
    content = said.strip() or None
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": name, "arguments": arguments_of_call(arguments)},
            }
            for name, arguments in calls
        ],
    }


def before_stop(text: str, stop: tuple[str, ...]) -> str:
    """Returns the text before the first string that ends a turn, as OpenAI's API does."""
    found = first_stop(text, stop)
    return text if found is None else text[: text.find(found)]


def first_stop(text: str, stop: tuple[str, ...]) -> str | None:
    """Returns the string that ends a turn: the first in its text."""
    return min((each for each in stop if each in text), key=text.find, default=None)
