"""Rows to learn from by supervised fine-tuning."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from spmdrl.config import ConfigError, LoraConfig, SftDataConfig
from spmdrl.config.words import counted, verb
from spmdrl.data.chat import Encoder
from spmdrl.data.chat_labels import encode_turns
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.left_out import IDS, calls_of
from spmdrl.data.packing import empty_batch
from spmdrl.data.pictures import (
    MARK,
    check_images,
    parts_of,
    pictures_of,
    refuse_single,
    says_image,
    shown_in,
)
from spmdrl.data.prompt_fields import PROMPT, SOURCES, check_prompt, file_source, sees_none
from spmdrl.data.row_reports import unread_tools
from spmdrl.data.source_adapters import (
    AdapterRoutes,
    adapter_routes_of,
    check_adapter_sources,
)
from spmdrl.data.supervised_rows import NO_ROOM, Measured, Size, measure
from spmdrl.data.table_files import (
    MISSING,
    BadRow,
    Files,
    bad_field,
    columns_at,
    load_together,
    lookup,
    without_nulls,
)
from spmdrl.data.videos import videos_of
from spmdrl.data.visuals import Visual
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.topology import Topology
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
    images: tuple[Visual, ...] = ()  # in order of their tokens, none of which is learnt

    def parts(self) -> list[tuple[bool, list[int]]]:
        """(whether it is learnt, token ids) of each run of tokens."""
        pairs = zip(self.loss_mask, self.token_ids, strict=True)
        runs = groupby(pairs, key=lambda pair: pair[0])
        return [(bool(learnt), [token for _, token in run]) for learnt, run in runs]


ANSWERS = ("completion", "output")  # TRL, OpenRLHF

# A data set with at most so many tokens is kept once it is encoded: some 50 MiB on each rank.
KEPT_TOKENS = 1 << 20


class SftDataset:
    """Rows for supervised fine-tuning.

    A row with `response_key` is a prompt and a response: a string prompt becomes one user turn
    (or is tokenised as it stands where the tokenizer has no chat template), as verl does it. So are
    OpenRLHF's `input` and `output`. A row without takes the chat in `messages`, whose last turn is
    the assistant's: that is learnt, or with turns="all" every turn of the assistant's
    (chat_labels.py); or TRL's `prompt` and `completion`. The end of a row over
    max_tokens is cut; where that leaves nothing to learn, or would cut into its images, the row is
    left out. Both are counted as overlong.
    """

    def __init__(
        self, files: Files, measured: Measured, reader: SftReader, config: SftDataConfig
    ) -> None:  # fmt: skip
        self.files, self.measured, self.reader, self.config = files, measured, reader, config
        vision = reader.vision if measured.num_illustrated else None
        self.images = None if vision is None else BatchImages(vision, self.by_id)
        self.keeps = int(measured.num_tokens.sum()) <= KEPT_TOKENS
        self.kept: dict[int, SftExample] = {}  # by index, where rows are kept
        self.routes: AdapterRoutes | None = None  # where there are several adapters

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: SftDataConfig,
        topology: Topology,
        vocab_size: int | None = None,
        vision: ImageProcessor | None = None,
    ) -> SftDataset:
        """Reads the files as PromptDataset.load does. It is a collective and raises ConfigError for
        a bad file or row.
        """
        require_eos(tokenizer)
        keys = (config.prompt_key, config.response_key, "messages")
        others = (*ANSWERS, "input", "instruction", *SOURCES)
        columns = (*columns_at(*keys), *others, "images", "image", config.video_key, "tools")
        files = load_together(topology, lambda: Files.open(paths, columns))
        written = None if vision is None else vision.family.text
        encoder = Encoder(tokenizer, config, config.max_tokens, vocab_size, image_text=written)
        reader = SftReader(encoder, config, vision)

        def size(row: dict[str, Any], folder: Path) -> Size:
            found = reader.read(row, folder)
            check_images(found.images)
            # A prompt without room for a response is told from a row that is only cut.
            has_room = 1 in found.learnt[: config.max_tokens] and found.seen <= config.max_tokens
            tokens = len(found.ids) if has_room else NO_ROOM
            missing = frozenset(reader.left_out(row, found.images) if has_room else ())
            shown = 0 if vision is None else vision.count(found.ids, found.images)
            return Size(tokens, found.escaped, shown, found.blind, missing)

        measured = measure(files, size, topology, config.max_tokens, config.on_bad_row)
        usable = len(files) - measured.num_bad
        left_out = usable - len(measured.rows)
        if left_out == usable:
            raise ConfigError(
                f"{files.names}: in all {counted(usable, 'row')} the prompt alone has at least "
                f"max_tokens={config.max_tokens} tokens. Raise max_tokens."
            )
        if measured.num_overlong and topology.rank == 0:
            logger.info(
                "%d of %s %s longer than max_tokens=%d: %d cut, %d left out",
                *(measured.num_overlong, counted(len(files), "row")),
                *(verb(measured.num_overlong, "are"), config.max_tokens),
                *(measured.num_overlong - left_out, left_out),
            )
        num_tokens = np.minimum(measured.num_tokens, config.max_tokens)
        return cls(files, replace(measured, num_tokens=num_tokens), reader, config)

    def __len__(self) -> int:
        return len(self.measured.rows)

    def batch(self, indices: list[int]) -> Batch:
        examples = [self.example(i) for i in indices]
        batch = empty_batch(torch.tensor([len(e.token_ids) for e in examples], dtype=torch.int64))
        ids = [token for e in examples for token in e.token_ids]
        batch.token_ids = torch.tensor(ids, dtype=torch.int64)
        batch.loss_mask = torch.tensor([float(m) for e in examples for m in e.loss_mask])
        batch.prompts = torch.tensor([e.id for e in examples], dtype=torch.int64)
        if self.routes is not None:
            batch.adapters = self.routes.of(batch.prompts)
        return batch

    def route(self, lora: LoraConfig | None, topology: Topology, trained: bool = False) -> None:
        """Has batches say which of several adapters their rows are of. Raises ConfigError as
        check_adapter_sources does. Collective.
        """
        self.routes = adapter_routes_of(lora, self.data_source)
        if self.routes is not None:
            mine = self.measured.rows[topology.rank :: topology.world].tolist()
            parts = gather_to_all({self.data_source(row) for row in mine}, topology.control)
            check_adapter_sources(lora, sorted(set().union(*parts)), trained)

    def data_source(self, row: int) -> str:
        """The data source of the example whose id this is: its column, or the file's name."""
        found, path = self.files.row(row), self.files.locate(row)[0].path
        named = (found[name] for name in SOURCES if isinstance(found.get(name), str))
        return next(named, file_source(path))

    def shown(self) -> list[str]:
        example, decode = self.example(0), self.reader.encoder.tokenizer.decode
        images = [f"    {picture}" for picture in example.images]
        return [f"  row {example.id}:", *images] + [
            f"    {'learnt' if learnt else 'given '} {decode(ids)[-200:]!r}"
            for learnt, ids in example.parts()
        ]

    def example(self, index: int) -> SftExample:
        """Returns a row's tokens. Those of a small data set are encoded in the first epoch only."""
        found = self.kept.get(index)
        if found is None:
            found = self.encoded(index)
            if self.keeps and not found.images:
                self.kept[index] = found
        return found

    def encoded(self, index: int) -> SftExample:
        row = int(self.measured.rows[index])
        folder = self.files.locate(row)[0].path.parent
        found, most = self.reader.read(self.files.row(row), folder), self.config.max_tokens
        return SftExample(row, found.ids[:most], found.learnt[:most], found.images)

    def by_id(self, row: int) -> SftExample:
        """The example whose id this is."""
        return self.example(int(np.searchsorted(self.measured.rows, row)))


def require_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError where the tokenizer has no EOS to learn."""
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of '{tokenizer.name_or_path}' has no eos_token, so a model could "
            "not learn to stop. Set eos_token in its tokenizer_config.json."
        )


class TokenisedRow(NamedTuple):
    """A row's tokens, not cut."""

    ids: list[int]
    learnt: list[int]  # 1: the assistant's
    escaped: bool
    images: tuple[Visual, ...] = ()
    seen: int = 0  # tokens up to the end of the last image
    blind: bool = False  # whether it says where an image stands, and has none


@dataclass(frozen=True)
class SftReader:
    """Makes tokens of rows. vision: of the model, where it sees images."""

    encoder: Encoder
    config: SftDataConfig
    vision: ImageProcessor | None

    def read(self, row: dict[str, Any], folder: Path) -> TokenisedRow:
        """folder: of the file. Raises BadRow, ConfigError."""
        row = in_its_form(row, self.config.response_key)
        images = self.images(row, folder)
        prompt, response = self.asked_and_said(row)
        if response is not None:
            found = self.answered(prompt, response, images)
        else:
            assert not isinstance(prompt, str)  # it is `messages`
            turns = encode_turns(self.seen(prompt, images), self.encoder)
            found = self.placed(turns.ids, turns.learnt, turns.escaped, images)
        is_blind = (
            self.vision is not None and not images and not isinstance(prompt, str)
        ) and says_image(prompt)
        return found._replace(blind=is_blind)

    def answered(
        self, prompt: list[dict[str, Any]] | str, response: str, images: tuple[Visual, ...]
    ) -> TokenisedRow:
        """Returns a prompt with a response to it and EOS, which are learnt. Raises BadRow,
        ConfigError."""
        if not isinstance(prompt, str):
            prompt = self.seen(prompt, images)
        elif images:
            raise BadRow(f"field 'images': {self.why_not_shown()}")
        asked, answer = self.encoder.prompt(prompt), self.encoder.answer(response, "response")
        found = self.placed(asked.ids, [0] * len(asked.ids), asked.escaped, images)
        return found._replace(
            ids=[*found.ids, *answer.ids, int(self.encoder.tokenizer.eos_token_id)],
            learnt=found.learnt + [1] * (len(answer.ids) + 1),
            escaped=asked.escaped or answer.escaped,
        )

    def why_not_shown(self) -> str:
        if self.encoder.tokenizer.chat_template is None:
            return "the tokenizer has no chat template to show them in"
        return (
            "a prompt and a completion that are strings have no chat template around them: write "
            f"both as chat lists, with {MARK} where each image belongs"
        )

    def left_out(self, row: dict[str, Any], images: Sequence[Visual]) -> set[str]:
        """Names of what the row holds and its text does not. Raises BadRow, ConfigError."""
        row = in_its_form(row, self.config.response_key)
        chat, response = self.asked_and_said(row)
        if isinstance(chat, str):
            return set()
        found = self.encoder.left_out(self.seen(chat, images), asks=response is not None)
        said = row.get("messages") or row.get("completion")
        if response is not None and lookup(row, self.config.response_key) is MISSING and said:
            said = without_nulls(said[-1])  # its content is learnt, and nothing else
            others = said.keys() - {"role", "content"} - IDS
            found |= {f"{said['role']}.{key}" for key in others if said[key]}
        return found | unread_tools(row, self.encoder)

    def images(self, row: dict[str, Any], folder: Path) -> tuple[Visual, ...]:
        """Returns its images, and behind them its videos. Raises BadRow, ConfigError."""
        key = self.config.video_key
        images: tuple[Visual, ...] = pictures_of(row.get("images"), folder)
        found = images + videos_of(row.get(key), folder, key)
        if self.vision is None and found:
            raise sees_none(found)
        refuse_single(row, images)
        return found

    def asked_and_said(self, row: dict[str, Any]) -> tuple[list[dict[str, Any]] | str, str | None]:
        """None: what the assistant said is in the chat, all of which is learnt. Raises BadRow."""
        response = lookup(row, self.config.response_key)
        if response is MISSING and "messages" in row:
            chat = messages_of(row, self.vision is not None)
            if self.config.turns == "all":
                return chat, None
            for key in calls_of(chat[-1]):
                raise BadRow(
                    f"field 'messages[{len(chat) - 1}].{key}': data.turns='last' learns the "
                    "content of the last turn alone, so what it calls would not be learnt. Set "
                    "data.turns='all', under a chat template that writes calls"
                )
            said = chat[-1]["content"]
            if not (said.strip() if isinstance(said, str) else said):  # EOS alone would be learnt
                raise bad_field(f"messages[{len(chat) - 1}].content", said, "a non-empty answer")
            return chat[:-1], said
        config = self.config
        if response is MISSING and row.get("completion") is not None:
            return prompt_and_completion(row, config, self.vision is not None)
        if response is MISSING and "output" in row and row.get("instruction") is None:  # OpenRLHF
            config, response = replace(config, prompt_key=prompt_column(row, config)), row["output"]
        prompt, response = prompt_and_response(row, response, config, self.vision is not None)
        if isinstance(prompt, str) and self.encoder.tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
        return prompt, response

    def seen(self, chat: list[dict[str, Any]], images: Sequence[Visual]) -> list[dict[str, Any]]:
        """The chat as templates want it where there are images, which stand in others' turns than
        the assistant's. Raises BadRow."""
        if not images and not any(isinstance(turn["content"], list) for turn in chat):
            return chat
        others = iter(shown_in([t for t in chat if t["role"] != "assistant"], images))
        return [turn if turn["role"] == "assistant" else next(others) for turn in chat]

    def placed(
        self, ids: list[int], learnt: list[int], escaped: bool, images: tuple[Visual, ...]
    ) -> TokenisedRow:
        """Each image's placeholder as often as it wants it. Raises BadRow."""
        if not images:
            return TokenisedRow(ids, learnt, escaped)
        assert self.vision is not None
        marks = self.vision.marks(images)
        places = [place for place, id in enumerate(ids) if id in marks]
        if len(ids) > self.encoder.limit and len(places) < len(images):
            return TokenisedRow(
                ids, learnt, escaped, images, len(ids)
            )  # not all of a very long text
        images, last = self.vision.ordered(ids, images), places[-1] + 1
        layouts = self.vision.layouts(ids, images)
        labels = [label for label, ids in zip(learnt, layouts, strict=True) for _ in ids]
        return TokenisedRow(
            [id for ids in layouts for id in ids], labels, escaped, images,
            sum(map(len, layouts[:last])),
        )  # fmt: skip


def in_its_form(row: dict[str, Any], response_key: str) -> dict[str, Any]:
    """Returns the row without the answers' columns of rows that are written in another way: Parquet
    has each row's columns in all others, with null. A row without any answer is left as it is.
    """
    names = (response_key, "messages", *ANSWERS)
    if all(lookup(row, name) in (None, MISSING) for name in names):
        return row
    return {key: value for key, value in row.items() if value is not None or key not in names}


def messages_of(row: dict[str, Any], parts: bool) -> list[dict[str, Any]]:
    """parts: contents may be lists of them; the assistant's become text. Raises BadRow."""
    chat = row["messages"]
    check_prompt("messages", chat, parts)
    if isinstance(chat, str) or len(chat) < 2 or chat[-1]["role"] != "assistant":
        expected = "a chat list of at least two turns, the last by the assistant"
        raise bad_field("messages", chat, expected)
    return turns_of(chat)


def turns_of(chat: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the turns as they were written, the assistant's as text. Raises BadRow."""
    turns = [without_nulls(turn) for turn in chat]
    for turn in turns:
        if turn["role"] == "assistant":
            turn["content"] = text_of(turn["content"])
    return turns


def text_of(content: str | list[dict[str, Any]]) -> str:
    """Returns what the assistant said as text. Raises BadRow where it shows an image or a video."""
    if isinstance(content, str):
        return content
    parts = parts_of(content)
    for part in parts:
        if part["type"] != "text":
            kind = {"image": "an image", "video": "a video"}[part["type"]]
            raise BadRow(f"{kind} in what the assistant says, which only others may show")
    return "".join(part["text"] for part in parts)


def prompt_column(row: dict[str, Any], config: SftDataConfig) -> str:
    """Returns the column of the config; where a row has none of the default's name, `input`."""
    has_own = row.get(config.prompt_key) is not None
    has_own |= config.prompt_key != SftDataConfig.prompt_key
    return config.prompt_key if has_own else "input"


def prompt_and_completion(
    row: dict[str, Any], config: SftDataConfig, parts: bool
) -> tuple[list[dict[str, Any]] | str, str]:
    """Reads TRL's prompt and completion: two chats, of which the second is one turn of the
    assistant's, or two strings, which stand one behind the other without a template. Raises BadRow.
    """
    prompt, said = lookup(row, config.prompt_key), row["completion"]
    check_prompt(config.prompt_key, prompt, parts)
    check_prompt("completion", said)
    if isinstance(prompt, str) != isinstance(said, str):
        raise BadRow(
            f"fields '{config.prompt_key}' and 'completion': expected two strings, or two chats"
        )
    if isinstance(prompt, str) or isinstance(said, str):
        return prompt, said
    if len(said) > 1 or said[0]["role"] != "assistant" or calls_of(said[0]):
        expected = "one turn of the assistant's, without calls; a longer chat is written whole into"
        raise bad_field("completion", said, f"{expected} a column 'messages' (data.turns='all')")
    return turns_of(prompt), turns_of(said)[0]["content"]


def prompt_and_response(
    row: dict[str, Any], response: Any, config: SftDataConfig, parts: bool
) -> tuple[list[dict[str, Any]] | str, str]:
    """Raises BadRow."""
    prompt = lookup(row, config.prompt_key)
    if prompt is MISSING:
        raise bad_field(config.prompt_key, prompt, f"{PROMPT}, or a column 'messages'", row)
    check_prompt(config.prompt_key, prompt, parts)
    if not isinstance(response, str) or not response:
        expected = "a non-empty string (data.response_key), or a column 'messages'"
        raise bad_field(config.response_key, response, expected, row)
    if isinstance(prompt, str):
        return prompt, response
    return turns_of(prompt), response
