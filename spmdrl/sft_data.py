"""Rows to learn from by supervised fine-tuning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.chat import Encoder
from spmdrl.collectives import sum_over_ranks
from spmdrl.config import ConfigError, SftDataConfig
from spmdrl.data import check_prompt, report_escaped
from spmdrl.files import (
    BAD_ROW,
    MISSING,
    Files,
    bad_field,
    load_together,
    lookup,
    measure_rows,
    without_nulls,
)
from spmdrl.topology import Topology
from spmdrl.turns import Turns, encode_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SftExample:
    """One row to learn. Both lists have one entry per token."""

    id: int  # row number in the concatenated files
    token_ids: list[int]
    loss_mask: list[int]  # 1 on what is learnt: what the assistant said, and the end of its turn

    def parts(self) -> list[tuple[bool, list[int]]]:
        """(whether it is learnt, token ids) of each run of tokens."""
        pairs = zip(self.loss_mask, self.token_ids, strict=True)
        runs = groupby(pairs, key=lambda pair: pair[0])
        return [(bool(learnt), [token for _, token in run]) for learnt, run in runs]


class SftDataset:
    """Rows for supervised fine-tuning.

    A row with `response_key` is a prompt and a response: a string prompt becomes one user turn
    (or is tokenised as it stands where the tokenizer has no chat template), as verl does it. A row
    without takes the chat in `messages`, whose last turn is the assistant's: that is learnt, or
    with turns="all" every turn of the assistant's (turns.py). The end of a row over max_tokens is
    cut; where that leaves nothing to learn the row is left out. Both are counted in `num_overlong`;
    `num_bad` and `num_escaped` are as in PromptDataset.
    """

    def __init__(
        self,
        files: Files,
        rows: np.ndarray,
        num_tokens: np.ndarray,
        encoder: Encoder,
        config: SftDataConfig,
        num_overlong: int,
        num_bad: int,
        num_escaped: int,
    ) -> None:
        self.files, self.encoder, self.config = files, encoder, config
        self.rows, self.num_tokens = rows, num_tokens  # (len(self),) int64, the same on every rank
        self.num_overlong, self.num_bad, self.num_escaped = num_overlong, num_bad, num_escaped

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        topology: Topology,
        vocab_size: int | None = None,
    ) -> SftDataset:
        """As PromptDataset.load: a collective; ConfigError for a bad file or row."""
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no eos_token, so a model could "
                "not learn to stop. Set eos_token in its tokenizer_config.json."
            )
        keys = (config.prompt_key, config.response_key, "messages")
        columns = tuple(key.split(".")[0] for key in keys)
        files = load_together(topology, lambda: Files.open(paths, columns))
        encoder = Encoder(tokenizer, config, config.max_tokens, vocab_size)
        escaped = 0

        def length(row: dict[str, Any], path: Path) -> int:
            nonlocal escaped
            found = sft_tokens(row, encoder)
            escaped += found.escaped
            # A prompt without room for a response is told from a row that is only cut.
            return len(found.ids) if 1 in found.learnt[: config.max_tokens] else NO_ROOM

        lengths = measure_rows(files, length, topology, config.on_bad_row)
        usable = lengths != BAD_ROW
        num_overlong = int((lengths > config.max_tokens).sum())
        rows = np.flatnonzero(usable & (lengths != NO_ROOM))
        if len(rows) == 0:
            raise ConfigError(
                f"{files.names}: in all {usable.sum()} rows the prompt alone has at least "
                f"max_tokens={config.max_tokens} tokens. Raise max_tokens."
            )
        num_tokens = np.minimum(lengths[rows], config.max_tokens)
        if num_overlong and topology.rank == 0:
            logger.info(
                "%d of %d rows are longer than max_tokens=%d: %d were cut, %d left out",
                *(num_overlong, len(files), config.max_tokens),
                *(num_overlong - (usable.sum() - len(rows)), usable.sum() - len(rows)),
            )
        num_escaped = round(sum_over_ranks(float(escaped), topology))
        report_escaped(num_escaped, len(files), topology)
        num_bad = len(files) - int(usable.sum())
        return cls(
            files, rows, num_tokens, encoder, config, num_overlong, num_bad, num_escaped
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def example(self, index: int) -> SftExample:
        row = int(self.rows[index])
        found, most = sft_tokens(self.files.row(row), self.encoder), self.config.max_tokens
        return SftExample(row, found.ids[:most], found.learnt[:most])


NO_ROOM = 2**62  # a length no row has


def sft_tokens(row: dict[str, Any], encoder: Encoder) -> Turns:
    """A row's tokens, not cut. Raises BadRow."""
    config: Any = encoder.config
    prompt: list[dict[str, Any]] | str
    response = lookup(row, config.response_key)
    if response is MISSING and "messages" in row:
        chat = messages_of(row)
        if config.turns == "all":
            return encode_turns(chat, encoder)
        prompt, response = chat[:-1], chat[-1]["content"]
    else:
        prompt, response = prompt_and_response(row, response, config)
    if isinstance(prompt, str) and encoder.tokenizer.chat_template is not None:
        prompt = [{"role": "user", "content": prompt}]
    asked, answer = encoder.prompt(prompt), encoder.answer(response, "response")
    ids = [*asked.ids, *answer.ids, int(encoder.tokenizer.eos_token_id)]
    learnt = [0] * len(asked.ids) + [1] * (len(answer.ids) + 1)
    return Turns(ids, learnt, asked.escaped or answer.escaped)


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises BadRow."""
    chat = row["messages"]
    check_prompt("messages", chat)
    if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
        expected = "a chat list of at least two turns, the last by the assistant"
        raise bad_field("messages", chat, expected)
    return [without_nulls(turn) for turn in chat]


def prompt_and_response(
    row: dict[str, Any], response: Any, config: SftDataConfig
) -> tuple[list[dict[str, Any]] | str, str]:
    """Raises BadRow."""
    prompt = lookup(row, config.prompt_key)
    check_prompt(config.prompt_key, prompt)
    if not isinstance(response, str) or not response:
        expected = "a non-empty string (data.response_key), or a column 'messages'"
        raise bad_field(config.response_key, response, expected, row)
    if isinstance(prompt, str):
        return prompt, response
    return [without_nulls(turn) for turn in prompt], response
