"""Pairs of conversations to learn a reward from.

    chosen    [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]
    rejected  [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "6"}]

Optional are `prompt`, what stands before both, which then leave it out, and `margin`, by how much
the chosen one is better. Without a chat all are strings, which are read one behind the other as
they stand. Behind a prompt that is a chat list, a string is the assistant's turn. The `images` of a
row are shown by both conversations, where the model sees any.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from spmdrl.config import AnswerDataConfig, DataConfig, PreferenceDataConfig
from spmdrl.data.chat import Encoded, Encoder, encode_said
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.packing import to_batch
from spmdrl.data.pictures import open_picture, pictures_of, refuse_single, with_parts
from spmdrl.data.prompt_fields import check_prompt
from spmdrl.data.row_reports import unread_tools
from spmdrl.data.supervised_rows import NO_ROOM, Measured, Size, measure, report_overlong
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
from spmdrl.data.videos import refuse_videos
from spmdrl.data.visuals import Visual
from spmdrl.distributed.topology import Topology
from spmdrl.types import Batch, Message, Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_MARGIN = 1e6


class Pair(NamedTuple):
    """One row."""

    chosen: Encoded
    rejected: Encoded
    margin: float
    images: tuple[Picture, ...] = ()  # that both conversations show


class Conversation(NamedTuple):
    """One of a pair, as a model that sees images is given it."""

    token_ids: list[int]
    images: tuple[Visual, ...]


@dataclass(frozen=True)
class PairReader:
    """Makes a Pair of a row."""

    encoder: Encoder
    config: PreferenceDataConfig
    pad_token_id: int | None  # of the model, see `encode`
    append_eos: bool = False  # to strings, see encode_said
    vision: ImageProcessor | None = None  # of the model, where it sees images

    def read(self, row: dict[str, Any], folder: Path) -> Pair:
        """folder: of the data file. Raises BadRow, ConfigError."""
        config = self.config
        refuse_videos(row)
        images = pictures_of(row.get("images"), folder)
        if images and self.vision is None:
            raise BadRow("field 'images': the model sees none")
        refuse_single(row, images)
        prompt = optional(row, self.config, "prompt_key")
        if prompt is not None:
            check_prompt(str(config.prompt_key), prompt, parts=self.vision is not None)
        keys = config.chosen_key, config.rejected_key
        said = [self.conversation(row, key, prompt) for key in keys]
        if isinstance(lookup(row, keys[0]), str) != isinstance(lookup(row, keys[1]), str):
            raise BadRow(f"fields '{keys[0]}' and '{keys[1]}': expected two strings, or two chats")
        chosen, rejected = (self.encode(*each, images) for each in zip(keys, said, strict=True))
        if chosen.ids == rejected.ids:
            raise BadRow(f"fields '{keys[0]}' and '{keys[1]}' are the same: nothing is preferred")
        return Pair(chosen, rejected, self.margin(row), images)

    def conversation(
        self, row: dict[str, Any], key: str, prompt: list[Message] | str | None
    ) -> str | list[Message]:
        """The whole of it. Raises BadRow."""
        return conversation(row, key, prompt, self.config.prompt_key, self.vision is not None)

    def seen(self, said: str | list[Message], num_images: int) -> str | list[Message]:
        """A conversation as templates want it where it has images, which both of a pair show.
        Raises BadRow.
        """
        if isinstance(said, str):
            if num_images:
                raise BadRow("field 'images': they want chats, with <image> where each belongs")
            return said
        has_parts = any(isinstance(turn["content"], list) for turn in said)
        return with_parts(said, num_images) if num_images or has_parts else said

    def encode(
        self, key: str, said: str | list[Message], images: tuple[Picture, ...]
    ) -> Encoded:  # fmt: skip
        """transformers takes the score of the last token that is no padding. Raises BadRow."""
        try:
            found = encode_said(self.seen(said, len(images)), self.encoder, self.append_eos)
            if images and self.vision is not None:
                found = found._replace(ids=self.vision.placed(found.ids, images))
        except BadRow as error:
            raise BadRow(f"field '{key}', with what stands before it: {error}") from error
        if found.ids[-1] == self.pad_token_id:
            token = self.encoder.tokenizer.convert_ids_to_tokens(found.ids[-1])
            raise BadRow(
                f"field '{key}': it ends in {token!r}, the model's padding, of which transformers' "
                "classifiers take no score: set another pad_token in tokenizer_config.json and "
                "its pad_token_id in config.json"
            )
        return found

    def left_out(self, row: dict[str, Any], num_images: int) -> set[str]:
        """Names of what the row holds and its texts do not. Raises BadRow, ConfigError."""
        prompt, found = optional(row, self.config, "prompt_key"), set()
        for key in (self.config.chosen_key, self.config.rejected_key):
            said = self.seen(self.conversation(row, key, prompt), num_images)
            if not isinstance(said, str):
                found |= self.encoder.left_out(said, asks=False) | unread_tools(row, self.encoder)
        return found

    def margin(self, row: dict[str, Any]) -> float:
        """Raises BadRow."""
        value = optional(row, self.config, "margin_key")
        if value is None:
            return 0.0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value <= MOST_MARGIN:
            raise bad_field(str(self.config.margin_key), value, f"a number, 0 to {MOST_MARGIN:g}")
        return float(value)


def conversation(
    row: dict[str, Any], key: str, prompt: list[Message] | str | None, prompt_key: str | None,
    parts: bool,
) -> str | list[Message]:  # fmt: skip
    """Returns what stands under `key`, behind the prompt. parts: contents may be lists of them.
    Raises BadRow.
    """
    said = lookup(row, key)
    if said is MISSING:
        raise bad_field(key, said, "a chat list or a string", row)
    check_prompt(key, said, parts=parts)
    asked = list(map(without_nulls, prompt)) if isinstance(prompt, list) else prompt
    if isinstance(said, str):
        if isinstance(asked, str) and said.startswith(asked):
            raise said_twice(key, prompt_key)
        if isinstance(asked, list):
            return [*asked, {"role": "assistant", "content": said}]
        return (asked or "") + said
    answer = list(map(without_nulls, said))
    if isinstance(asked, str) or (asked and is_said_again(asked, answer)):
        raise said_twice(key, prompt_key)
    if said[-1]["role"] != "assistant":
        raise bad_field(f"{key}[{len(said) - 1}].role", said[-1]["role"], "'assistant'")
    return [*(asked or ()), *answer]


def said_twice(key: str, prompt_key: str | None) -> BadRow:
    return BadRow(
        f"field '{prompt_key}': it would stand before what is in '{key}'. Where that is the whole "
        "conversation set data.prompt_key=None; else the prompt must be a chat list, or a string "
        "that the answers do not begin with"
    )


def optional(
    row: dict[str, Any], config: PreferenceDataConfig | AnswerDataConfig, field: str
) -> Any:  # fmt: skip
    """Returns the column that this field of the config names; None where it is not there, which it
    may be under its usual name. Raises BadRow."""
    key = getattr(config, field)
    if key is None:
        return None
    value = lookup(row, key)
    if value is MISSING and key != getattr(type(config), field):
        raise bad_field(key, value, f"a column of that name (data.{field})", row)
    return None if value is MISSING else value


def is_said_again(asked: list[Message], answer: list[Message]) -> bool:
    """Whether what is to stand behind a prompt begins with it, or with its last turn before the
    assistant says anything. A turn may say again later what the prompt says.
    """
    before = takewhile(lambda turn: turn["role"] != "assistant", answer)
    return answer[: len(asked)] == asked or asked[-1] in before


class PreferenceDataset:
    """Pairs of conversations. Those with one over max_tokens are left out, and counted."""

    def __init__(self, files: Files, measured: Measured, reader: PairReader) -> None:
        self.files, self.measured, self.reader = files, measured, reader
        vision = reader.vision
        self.images = None if vision is None else BatchImages(vision, self.by_id)

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: PreferenceDataConfig,
        topology: Topology,
        vocab_size: int | None = None,
        pad_token_id: int | None = None,
        append_eos: bool = False,
        vision: ImageProcessor | None = None,
    ) -> PreferenceDataset:
        """Reads the files as PromptDataset.load does. It is a collective and raises ConfigError for
        a bad file or row.

        pad_token_id: of the model's config; None: the tokenizer's. append_eos: config's, or the
        model's where that is None. vision: of the model, where it sees images.
        """
        keys = (config.prompt_key, config.chosen_key, config.rejected_key, config.margin_key)
        columns = (
            *columns_at(*(key for key in keys if key is not None)),
            "images",
            "image",
            "videos",
            "tools",
        )
        files = load_together(topology, lambda: Files.open(paths, columns))
        asked = DataConfig(
            "", chat_template_kwargs=config.chat_template_kwargs,
            control_tokens=config.control_tokens,
        )  # fmt: skip
        padding = tokenizer.pad_token_id if pad_token_id is None else pad_token_id
        written = None if vision is None else vision.family.text
        encoder = Encoder(tokenizer, asked, config.max_tokens, vocab_size, image_text=written)
        reader = PairReader(encoder, config, padding, append_eos, vision)

        def size(row: dict[str, Any], folder: Path) -> Size:
            pair = reader.read(row, folder)
            for picture in pair.images:
                open_picture(picture)
            lens = len(pair.chosen.ids), len(pair.rejected.ids)
            escaped = pair.chosen.escaped or pair.rejected.escaped
            if max(lens) > config.max_tokens:
                return Size(NO_ROOM, escaped)
            missing = frozenset(reader.left_out(row, len(pair.images)))
            shown = 0
            if vision is not None:
                both = pair.chosen.ids, pair.rejected.ids
                shown = sum(vision.count(ids, pair.images) for ids in both)
            return Size(sum(lens), escaped, shown, left_out=missing)

        measured = measure(files, size, topology, 2 * config.max_tokens, config.on_bad_row)
        what = "pair", "a conversation"
        report_overlong(files, measured, config.max_tokens, what, topology)
        return cls(files, measured, reader)

    def __len__(self) -> int:
        return len(self.measured.rows)

    def pair(self, index: int) -> Pair:
        row = int(self.measured.rows[index])
        return self.reader.read(self.files.row(row), self.files.locate(row)[0].path.parent)

    def by_id(self, id: int) -> Conversation:
        """The conversation that a sequence's number in Batch.prompts stands for: twice the pair's
        index, and 1 more for the rejected one.
        """
        pair = self.pair(id // 2)
        return Conversation((pair.rejected if id % 2 else pair.chosen).ids, pair.images)

    def batch(self, indices: list[int]) -> Batch:
        """Two sequences of each pair, the chosen one first; its margin is in `rewards`."""
        pairs = [self.pair(i) for i in indices]
        batch = to_batch([said.ids for pair in pairs for said in (pair.chosen, pair.rejected)])
        for i, (index, pair) in enumerate(zip(indices, pairs, strict=True)):
            batch.rewards[2 * i] = pair.margin
            if self.images is not None:
                batch.prompts[2 * i], batch.prompts[2 * i + 1] = 2 * index, 2 * index + 1
        return batch

    def shown(self) -> list[str]:
        pair = self.pair(0)
        return [
            f"  row {self.measured.rows[0]}, margin {pair.margin:g}:",
            f"    chosen   {pair.chosen.text[-200:]!r}",
            f"    rejected {pair.rejected.text[-200:]!r}",
        ]
