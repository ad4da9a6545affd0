"""Hints: what a teacher's prompts have and a student's have not, such as a reference solution.

    solution  "2 + 3: count on from 2, to 5."    data.hint_key names the column

The teacher is asked data.hint_template, in which {prompt} is what the user's last turn says, or the
whole of a prompt that is a string, and {hint} is the row's hint. The answer whose tokens it judges
is the student's, who has not seen the hint. The field says privileged information or privileged
context as well: OPSD, arXiv 2601.18734; SDFT, arXiv 2601.19897.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.config import DataConfig
from spmdrl.data.chat import Encoded, Encoder
from spmdrl.data.images import ImageProcessor
from spmdrl.data.prompt_fields import PromptFields, encode
from spmdrl.data.table_files import BadRow, bad_field, lookup

PLACES = re.compile(r"\{(prompt|hint)\}")


@dataclass(frozen=True)
class HintReader:
    """Makes the tokens of prompts with the hints of their rows."""

    config: DataConfig
    encoder: Encoder  # its limit: tokens of a prompt with its hint
    vision: ImageProcessor | None

    @classmethod
    def of(cls, config: DataConfig, encoder: Encoder, vision: ImageProcessor | None) -> HintReader:
        """encoder: of the prompts."""
        return cls(config, replace(encoder, limit=config.max_hint_prompt_tokens), vision)

    def encode(self, fields: PromptFields, row: dict[str, Any]) -> Encoded:
        """Returns the prompt with the row's hint; of one that is too long its end, where
        overlong_prompts is "truncate". fields: of the row. Raises BadRow, ConfigError.
        """
        prompt = with_hint(fields.prompt, self.config.hint_template, self.hint(row))
        asked = replace(fields, prompt=prompt)
        found, _ = encode(asked, self.encoder, self.config, self.vision, "max_hint_prompt_tokens")
        if self.config.overlong_prompts == "truncate":
            return found._replace(ids=found.ids[-self.encoder.limit :])
        return found

    def hint(self, row: dict[str, Any]) -> str:
        """Raises BadRow where the row has no hint."""
        key = self.config.hint_key
        assert key is not None
        value = lookup(row, key)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value:
            return str(value)
        if not isinstance(value, str) or not value.strip():
            raise bad_field(key, value, "a hint for the teacher: a text, or a number", row)
        return value

    def length(self, fields: PromptFields, row: dict[str, Any], num_tokens: int) -> int:
        """Returns num_tokens, which are those of the prompt without its hint, or more than
        max_prompt_tokens where with its hint it is too long. Raises BadRow, ConfigError.
        """
        found, limit = len(self.encode(fields, row).ids), self.encoder.limit
        if found <= limit:
            return num_tokens
        if self.config.overlong_prompts == "error":
            raise BadRow(
                f"field '{self.config.hint_key}': with this hint the prompt has {found} tokens, "
                f"the limit data.max_hint_prompt_tokens is {limit}. Raise it, or set "
                "overlong_prompts to 'filter' or 'truncate'"
            )
        return max(num_tokens, self.config.max_prompt_tokens + 1)


def with_hint(
    prompt: list[dict[str, Any]] | str, template: str, hint: str
) -> list[dict[str, Any]] | str:
    """Returns a prompt that is a string by the template; of a chat its last turn of the user's, of
    parts the last one that is a text. Raises BadRow where there is no such turn or text.
    """

    def filled(text: str) -> str:
        values = {"prompt": text, "hint": hint}
        return PLACES.sub(lambda place: values[place[1]], template)

    if isinstance(prompt, str):
        return filled(prompt)
    turn = last_of(prompt, "role", "user", "a turn of the user's")
    content = prompt[turn]["content"]
    if isinstance(content, list):
        part = last_of(content, "type", "text", "a text in the user's last turn")
        content = [*content]
        content[part] = {**content[part], "text": filled(content[part]["text"])}
    else:
        content = filled(content)
    return [*prompt[:turn], {**prompt[turn], "content": content}, *prompt[turn + 1 :]]


def last_of(items: list[dict[str, Any]], key: str, value: str, what: str) -> int:
    """The place of the last item whose `key` is `value`. Raises BadRow."""
    found = [i for i, item in enumerate(items) if item.get(key) == value]
    if not found:
        raise BadRow(f"field 'prompt': {what} is missing, in which a hint could stand")
    return found[-1]
