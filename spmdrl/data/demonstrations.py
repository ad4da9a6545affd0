"""Demonstrations: answers of somebody else that a row of prompts has, to be learnt from.

    demonstration  "2 + 3 is 5."                                      one answer
    demonstration  ["2 + 3 is 5.", "5"]                               several
    demonstration  [{"role": "assistant", "content": "2 + 3 is 5."}]  one, as LUFFY and TRL have it

data.demonstration_key names the column. A row whose value is missing, null or empty has none. The
tokens are those that the policy would have to say: the content of one turn, and EOS.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.data.chat import Encoder
from spmdrl.data.left_out import calls_of
from spmdrl.data.sft import require_eos, text_of
from spmdrl.data.table_files import MISSING, bad_field, lookup
from spmdrl.distributed.topology import Topology

logger = logging.getLogger(__name__)

EXPECTED = "a string, a chat list of one turn of the assistant's, or a list of these"
THOUGHT = "<think>\n"  # some chat templates begin the answer with it


@dataclass(frozen=True)
class DemonstrationReader:
    """Makes tokens of a row's demonstrations."""

    key: str
    encoder: Encoder  # its limit: tokens of an answer, EOS included

    @classmethod
    def of(cls, key: str, encoder: Encoder, max_tokens: int) -> DemonstrationReader:
        """encoder: of the prompts. max_tokens: of an answer. Raises ConfigError where the tokenizer
        has no EOS.
        """
        require_eos(encoder.tokenizer)
        return cls(key, replace(encoder, limit=max_tokens))

    def read(self, row: dict[str, Any], asked: str) -> tuple[list[int], ...]:
        """Returns the tokens of the row's demonstrations that are no longer than an answer may be.

        asked: the prompt as the model sees it. Raises BadRow.
        """
        return tuple(ids for ids in self.read_all(row, asked) if len(ids) <= self.encoder.limit)

    def counts(self, row: dict[str, Any], asked: str) -> Counter[str]:
        """Counts the row, if it has a demonstration, and those that are too long. Raises BadRow."""
        lengths = [len(ids) for ids in self.read_all(row, asked)]
        overlong = sum(length > self.encoder.limit for length in lengths)
        has_one = overlong < len(lengths)
        return Counter(rows=int(has_one), given=len(lengths), overlong=overlong)

    def read_all(self, row: dict[str, Any], asked: str) -> list[list[int]]:
        return [self.tokens(text, asked) for text in self.texts(row)]

    def texts(self, row: dict[str, Any]) -> list[str]:
        """Raises BadRow."""
        value = lookup(row, self.key)
        if value is MISSING or value is None or value == "" or value == []:
            return []
        if isinstance(value, list) and not isinstance(value[0], dict):
            return [self.text(each) for each in value]
        return [self.text(value)]

    def text(self, value: Any) -> str:
        """Returns what a string, or the only turn of a chat list, says. Raises BadRow."""
        if isinstance(value, list):
            is_turn = len(value) == 1 and isinstance(value[0], dict)
            if not is_turn or value[0].get("role") != "assistant" or calls_of(value[0]):
                raise bad_field(self.key, value, EXPECTED)
            content = value[0].get("content")
            value = text_of(content) if isinstance(content, list) else content
        if not isinstance(value, str) or not value:
            raise bad_field(self.key, value, EXPECTED)
        return value

    def tokens(self, text: str, asked: str) -> list[int]:
        """A text that begins with the thought that the prompt has begun goes on behind it. Raises
        BadRow.
        """
        if asked.endswith(THOUGHT):
            text = text.removeprefix(THOUGHT)
        ids = self.encoder.answer(text, self.key).ids
        return [*ids, int(self.encoder.tokenizer.eos_token_id)]


def report_demonstrations(
    counts: Mapping[str, int], num_rows: int, reader: DemonstrationReader, topology: Topology
) -> None:
    """Says what was found, on the first rank. Raises ConfigError where no row has a demonstration;
    counts: of `DemonstrationReader.counts`, over all rows.
    """
    given, overlong = counts.get("given", 0), counts.get("overlong", 0)
    if given == 0:
        raise ConfigError(
            f"data.demonstration_key={reader.key!r}: none of {counted(num_rows, 'row')} has a "
            "demonstration "
            f"in this column, expected {EXPECTED}. Name the column that has them, or leave "
            "demonstration_key and algo.demonstrations out"
        )
    if overlong and topology.rank == 0:
        logger.warning(
            "%d of %s %s longer than rollout.max_tokens=%d and left out",
            *(overlong, counted(given, "demonstration"), verb(overlong, "are")),
            reader.encoder.limit,
        )


def demonstration_lines(counts: Mapping[str, int]) -> list[str]:
    """Returns the line of a dry run; none where no demonstrations are read."""
    if not counts:
        return []
    return [
        f"  demonstrations: {counts['given']}, {counts.get('overlong', 0)} of them too long; "
        f"{counted(counts.get('rows', 0), 'row')} {verb(counts.get('rows', 0), 'have')} one to "
        "learn from"
    ]
