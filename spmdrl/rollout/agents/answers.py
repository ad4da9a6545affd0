"""The answers to a request, before an API writes them in its own form."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdrl.rollout.base import Completion
from spmdrl.rollout.multi_turn.tools import as_text
from spmdrl.types import Message

Events = Iterable[
    tuple[str, dict[str, Any]]
]  # of a stream: the event's name, "" for none; its data


@dataclass(frozen=True)
class Choice:
    """One of the answers."""

    message: Message
    finish_reason: str  # as OpenAI names it: "stop" | "length" | "tool_calls"
    completion: Completion
    token_texts: list[str]  # of the completion's tokens; [] where nobody asked
    call_ids: tuple[str, ...] = ()  # of the message's tool calls
    stop: str | None = None  # of the request's strings, the one that ended it

    @property
    def text(self) -> str:
        return self.message["content"] or ""

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Returns (id, name, arguments as JSON) of each tool call."""
        functions = [call["function"] for call in self.message.get("tool_calls", ())]
        return [
            (id, function["name"], as_text(function["arguments"]))
            for id, function in zip(self.call_ids, functions, strict=True)
        ]


@dataclass(frozen=True)
class Answers:
    """All answers to a request."""

    model: str
    prompt_ids: list[int]
    choices: Sequence[Choice]
    id: str  # which its agent reads behind the API's prefix, "chatcmpl-" or the like
    echoed: str = ""  # what stands before each answer's text: the prompt, if it is to be there
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_answer_tokens(self) -> int:
        return sum(len(choice.completion.token_ids) for choice in self.choices)


def call_ids_of(message: Message) -> tuple[str, ...]:
    """Returns new ids for the tool calls of a message."""
    return tuple(f"call_{secrets.token_hex(8)}" for _ in message.get("tool_calls", ()))


def server_sent(events: Events) -> Iterable[bytes]:
    """Returns events as the bytes of a stream of server-sent events."""
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        yield f"{head}data: {json.dumps(data, ensure_ascii=False)}\n\n".encode(errors="replace")
