"""Encodes what a chat template writes between two turns of the policy's."""

from __future__ import annotations

import json
from functools import cached_property
from typing import Any

from spmdrl.data.chat import Encoder, render_chat
from spmdrl.data.left_out import without_space
from spmdrl.data.table_files import BadRow
from spmdrl.rollout.multi_turn.images import texts_of
from spmdrl.types import Message

SPOKEN = "spmdrlspoken"  # stands for what the policy said, where a template writes a reply


class BetweenTurns:
    """Encodes the messages that follow on a turn, without encoding the turn again."""

    def __init__(self, encoder: Encoder, ends: frozenset[int]) -> None:
        """ends: tokens that a turn may have ended with."""
        self.encoder, self.ends = encoder, ends

    def joined(self, ids: list[int], last: int) -> list[int]:
        """Takes off the end of the turn, which the template writes, where the turn has ended itself
        with the token `last`: with the same token, or with another that the model has for it.
        """
        return ids[1:] if ids and last in self.ends and ids[0] in (last, self.end) else ids

    def ids(self, messages: list[Message]) -> list[int]:
        """Returns the tokens from the end of a turn to the start of the next. Raises BadRow."""
        marked, names = self.encoder.marked(messages, "reply")
        behind = self.behind(marked)
        written = without_space(behind)
        for message in marked:
            if message["role"] == "assistant":
                continue
            texts = texts_of(message["content"])
            # as it is, and as some write what tools say
            forms = [(text, json.dumps(text, ensure_ascii=False)[1:-1]) for text in texts]
            if not all(any(without_space(form) in written for form in both) for both in forms):
                raise BadRow(
                    f"the chat template leaves out, changes or moves a message of the role "
                    f"{message['role']!r} that follows on the assistant's"
                )
        if names:
            return self.encoder.unmarked(behind, names).ids
        return self.encoder.encode(behind, special=False)

    def behind(self, messages: list[Message], asks: bool = True) -> str:
        """Returns what the template writes behind what the policy says. Raises BadRow."""
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "x"}, {"role": "assistant", "content": SPOKEN}
        ]  # fmt: skip
        given = self.encoder.config.chat_template_kwargs
        text = render_chat([*chat, *messages], self.encoder.tokenizer, given, asks)
        if self.encoder.image_text is not None:
            text = text.replace(*self.encoder.image_text)
        _, spoken, behind = text.partition(SPOKEN)
        if not spoken:
            raise BadRow("it changes or leaves out what the assistant said before")
        return behind

    @cached_property
    def end(self) -> int | None:
        """Returns the control token that the template writes there; None: it writes none."""
        ids = self.encoder.encode(self.behind([], asks=False), special=False)
        return ids[0] if ids and ids[0] in self.ends else None
