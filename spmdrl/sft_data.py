"""Rows to learn from by supervised fine-tuning."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmdrl.chat import Encoder
from spmdrl.config import ConfigError, SftDataConfig
from spmdrl.data import check_prompt
from spmdrl.files import MISSING, Files, bad_field, load_together, lookup, without_nulls
from spmdrl.packing import empty_batch
from spmdrl.rows import IMAGES, NO_ROOM, Measured, measure
from spmdrl.topology import Topology
from spmdrl.turns import Turns, encode_turns
from spmdrl.types import Batch

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
    cut; where that leaves nothing to learn the row is left out. Both are counted as overlong.
    """

    def __init__(
        self, files: Files, measured: Measured, encoder: Encoder, config: SftDataConfig
    ) -> None:  # fmt: skip
        self.files, self.measured, self.encoder, self.config = files, measured, encoder, config

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
        columns = (*(key.split(".")[0] for key in keys), IMAGES)
        files = load_together(topology, lambda: Files.open(paths, columns))
        encoder = Encoder(tokenizer, config, config.max_tokens, vocab_size)

        def size(row: dict[str, Any]) -> tuple[int, bool]:
            found = sft_tokens(row, encoder)
            # A prompt without room for a response is told from a row that is only cut.
            has_room = 1 in found.learnt[: config.max_tokens]
            return len(found.ids) if has_room else NO_ROOM, found.escaped

        measured = measure(files, size, topology, config.max_tokens, config.on_bad_row)
        usable = len(files) - measured.num_bad
        left_out = usable - len(measured.rows)
        if left_out == usable:
            raise ConfigError(
                f"{files.names}: in all {usable} rows the prompt alone has at least "
                f"max_tokens={config.max_tokens} tokens. Raise max_tokens."
            )
        if measured.num_overlong and topology.rank == 0:
            logger.info(
                "%d of %d rows are longer than max_tokens=%d: %d were cut, %d left out",
                *(measured.num_overlong, len(files), config.max_tokens),
                *(measured.num_overlong - left_out, left_out),
            )
        num_tokens = np.minimum(measured.num_tokens, config.max_tokens)
        return cls(files, replace(measured, num_tokens=num_tokens), encoder, config)

    def __len__(self) -> int:
        return len(self.measured.rows)

    def batch(self, indices: list[int]) -> Batch:
        examples = [self.example(i) for i in indices]
        batch = empty_batch(torch.tensor([len(e.token_ids) for e in examples], dtype=torch.int64))
        ids = [token for e in examples for token in e.token_ids]
        batch.token_ids = torch.tensor(ids, dtype=torch.int64)
        batch.loss_mask = torch.tensor([float(m) for e in examples for m in e.loss_mask])
        return batch

    def shown(self) -> list[str]:
        example, decode = self.example(0), self.encoder.tokenizer.decode
        return [f"  row {example.id}:"] + [
            f"    {'learnt' if learnt else 'given '} {decode(ids)[-200:]!r}"
            for learnt, ids in example.parts()
        ]

    def example(self, index: int) -> SftExample:
        row = int(self.measured.rows[index])
        found, most = sft_tokens(self.files.row(row), self.encoder), self.config.max_tokens
        return SftExample(row, found.ids[:most], found.learnt[:most])


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
