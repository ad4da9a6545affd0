"""Rows with answers to prompts, which the policy is to prefer or to avoid.

A pair, of which the first is the better one:

    prompt    [{"role": "user", "content": "2+3?"}]
    chosen    [{"role": "assistant", "content": "5"}]
    rejected  [{"role": "assistant", "content": "6"}]

or, without `prompt`, two whole chats that differ in their last turn alone. A labelled answer:

    prompt      [{"role": "user", "content": "2+3?"}]
    completion  [{"role": "assistant", "content": "5"}]
    label       true

An answer may be a string, too: the assistant's turn behind a prompt that is a chat list; behind a
string it stands as it is. An answer is what the policy would have to say: the content of one turn,
and EOS. The images and videos of a row are shown in its prompt, where the model sees any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from spmdrl.config import AnswerDataConfig, ConfigError, SftDataConfig
from spmdrl.config.data import PolicyRowsConfig
from spmdrl.data.chat import Encoder
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.left_out import IDS, calls_of
from spmdrl.data.packing import empty_batch
from spmdrl.data.pictures import check_images
from spmdrl.data.preferences import conversation, optional
from spmdrl.data.prompt_fields import check_prompt
from spmdrl.data.row_reports import unread_tools
from spmdrl.data.sft import KEPT_TOKENS, SftReader, TokenisedRow, require_eos, text_of
from spmdrl.data.supervised_rows import NO_ROOM, Measured, Size, measure, report_overlong
from spmdrl.data.table_files import (
    MISSING,
    BadRow,
    Files,
    bad_field,
    columns_at,
    load_together,
    lookup,
)
from spmdrl.data.visuals import Visual
from spmdrl.distributed.topology import Topology
from spmdrl.types import Batch, Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Asked = list[Message] | str


class AnswerRow(NamedTuple):
    """A prompt with an answer to it."""

    token_ids: list[int]
    learnt: list[int]  # one entry per token; 1: the answer's
    desirable: bool  # the better one of a pair, or labelled so
    images: tuple[Visual, ...] = ()  # of the prompt

    @property
    def num_asked(self) -> int:
        """Returns the number of tokens of the prompt."""
        return self.learnt.index(1)


class EncodedRow(NamedTuple):
    """A row: the better answer and the worse one, or the only one."""

    answers: tuple[AnswerRow, ...]
    escaped: bool


def as_sft(config: AnswerDataConfig) -> SftDataConfig:
    """Returns what the config says of how text and images are read, as of fine-tuning."""
    return SftDataConfig(
        max_tokens=config.max_tokens,
        **{each.name: getattr(config, each.name) for each in fields(PolicyRowsConfig)},
    )  # fmt: skip


@dataclass(frozen=True)
class AnswerReader:
    """Makes tokens of rows. paired: rows have a better and a worse answer, not one with a label."""

    sft: SftReader
    config: AnswerDataConfig
    paired: bool

    @property
    def keys(self) -> tuple[str, ...]:
        config = self.config
        return (config.chosen_key, config.rejected_key) if self.paired else (config.completion_key,)

    def read(self, row: dict[str, Any], folder: Path) -> EncodedRow:
        """folder: of the data file. Raises BadRow, ConfigError."""
        images = self.sft.images(row, folder)
        said = self.said(row)
        made = [self.encode(key, *each, images) for key, each in said.items()]
        if self.paired and made[0].ids == made[1].ids:
            keys = " and ".join(f"'{key}'" for key in said)
            raise BadRow(f"fields {keys} are the same: nothing is preferred")
        labels = (True, False) if self.paired else (self.label(row),)
        answers = (
            AnswerRow(each.ids, each.learnt, label, each.images)
            for each, label in zip(made, labels, strict=True)
        )
        return EncodedRow(tuple(answers), any(each.escaped for each in made))

    def said(self, row: dict[str, Any]) -> dict[str, tuple[Asked, str]]:
        """Returns the prompt and the text of each answer, by its column. Raises BadRow."""
        prompt = optional(row, self.config, "prompt_key")
        if prompt is not None:
            check_prompt(str(self.config.prompt_key), prompt, parts=self.sees)
        found = {key: self.asked_and_answer(row, key, prompt) for key in self.keys}
        if self.paired:
            (asked, _), (other, _) = found.values()
            if asked != other:
                raise BadRow(
                    f"fields '{self.keys[0]}' and '{self.keys[1]}' differ before their last turn, "
                    "so they are no answers to one prompt: write what both begin with up to the "
                    "turn that differs, and end there"
                )
        return found

    def asked_and_answer(
        self, row: dict[str, Any], key: str, prompt: Asked | None
    ) -> tuple[Asked, str]:
        """Raises BadRow."""
        said = conversation(row, key, prompt, self.config.prompt_key, parts=self.sees)
        if isinstance(said, str):
            if prompt is None:
                raise BadRow(
                    f"field '{key}': a string without a prompt, so there is no telling where the "
                    f"answer begins. Write a column '{self.config.prompt_key or 'prompt'}' "
                    "(data.prompt_key), or chats"
                )
            assert isinstance(prompt, str)
            return prompt, said[len(prompt) :]
        *asked, last = said
        if not asked:
            raise BadRow(f"field '{key}': an answer that nothing stands before: there is no prompt")
        for name in calls_of(last):
            raise BadRow(
                f"field '{key}[-1].{name}': the content of the last turn is learnt, so what it "
                "calls would not be"
            )
        return asked, text_of(last["content"])

    def encode(
        self, key: str, asked: Asked, answer: str, images: tuple[Visual, ...]
    ) -> TokenisedRow:  # fmt: skip
        try:
            return self.sft.answered(asked, answer, images)
        except BadRow as error:
            raise BadRow(f"field '{key}', with what stands before it: {error}") from error

    def label(self, row: dict[str, Any]) -> bool:
        """Raises BadRow."""
        value = lookup(row, self.config.label_key)
        if value is MISSING or not isinstance(value, bool | int) or value not in (0, 1):
            raise bad_field(self.config.label_key, value, "true or false", row)
        return bool(value)

    def left_out(self, row: dict[str, Any], images: Sequence[Visual]) -> set[str]:
        """Names of what the row holds and its texts do not. Raises BadRow, ConfigError."""
        asked, _ = next(iter(self.said(row).values()))
        if isinstance(asked, str):
            return set()
        encoder = self.sft.encoder
        found = encoder.left_out(self.sft.seen(asked, images), asks=True)
        for key in self.keys:
            value = lookup(row, key)
            last = value[-1] if isinstance(value, list) else {}
            others = last.keys() - {"role", "content"} - IDS
            found |= {f"assistant.{name}" for name in others if last[name]}
        return found | unread_tools(row, encoder)

    @property
    def sees(self) -> bool:
        return self.sft.vision is not None


class AnswerDataset:
    """Pairs of answers, or labelled answers. Rows with an answer over max_tokens are left out, and
    counted.

    labelled: its rows are single answers, two of each pair of the files.
    """

    def __init__(
        self, files: Files, measured: Measured, reader: AnswerReader, labelled: bool
    ) -> None:  # fmt: skip
        self.files, self.reader, self.labelled = files, reader, labelled
        self.per_row = len(reader.keys) if labelled else 1  # answers of the files' rows
        self.measured = divided(measured, self.per_row)
        vision = reader.sft.vision if measured.num_illustrated else None
        self.images = None if vision is None else BatchImages(vision, self.by_id)
        self.keeps = int(measured.num_tokens.sum()) <= KEPT_TOKENS
        self.kept: dict[int, tuple[AnswerRow, ...]] = {}  # by the row of the files
        # (len(self), 2) float64, of the reference: log-probabilities of both answers of a pair; of
        # a labelled answer, and of its mismatched one
        self.reference: np.ndarray | None = None

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: AnswerDataConfig,
        topology: Topology,
        vocab_size: int | None = None,
        vision: ImageProcessor | None = None,
        labelled: bool = False,
    ) -> AnswerDataset:
        """Reads the files as PromptDataset.load does. It is a collective and raises ConfigError for
        a bad file or row.
        """
        require_eos(tokenizer)
        names = (config.prompt_key, config.chosen_key, config.rejected_key)
        keys = (*(k for k in names if k), config.completion_key, config.label_key)
        columns = (*columns_at(*keys), "images", "image", config.video_key, "tools")
        files = load_together(topology, lambda: Files.open(paths, columns))
        # a loss of labelled answers takes both: what the first row has that can be read, all have
        paired = not labelled or lookup(first_row(files), config.chosen_key) not in (MISSING, None)
        written = None if vision is None else vision.family.text
        asked = as_sft(config)
        encoder = Encoder(tokenizer, asked, config.max_tokens, vocab_size, image_text=written)
        reader = AnswerReader(SftReader(encoder, asked, vision), config, paired)

        def size(row: dict[str, Any], folder: Path) -> Size:
            found = reader.read(row, folder)
            images = found.answers[0].images
            check_images(images)
            lens = [len(answer.token_ids) for answer in found.answers]
            if max(lens) > config.max_tokens:
                return Size(NO_ROOM, found.escaped)
            missing = frozenset(reader.left_out(row, images))
            vision, shown = reader.sft.vision, 0
            if vision is not None:
                shown = sum(vision.count(each.token_ids, images) for each in found.answers)
            return Size(sum(lens), found.escaped, shown, left_out=missing)

        longest = len(reader.keys) * config.max_tokens
        measured = measure(files, size, topology, longest, config.on_bad_row)
        what = "row", "a prompt with an answer"
        report_overlong(files, measured, config.max_tokens, what, topology)
        found = cls(files, measured, reader, labelled)
        if labelled and len(measured.rows) < 2:
            raise ConfigError(
                f"{files.names}: one row that can be learnt, but the KL of labelled answers needs "
                "an answer to another prompt: at least two rows"
            )
        return found

    def __len__(self) -> int:
        return len(self.measured.rows)

    def answers(self, index: int) -> tuple[AnswerRow, ...]:
        """Returns both answers of a pair, or a labelled one. Those of a small data set are encoded
        in the first epoch only.
        """
        row, side = int(self.measured.rows[index]), index % self.per_row
        found = self.kept.get(row)
        if found is None:
            folder = self.files.locate(row)[0].path.parent
            found = self.reader.read(self.files.row(row), folder).answers
            if self.keeps and not found[0].images:
                self.kept[row] = found
        return found[side : side + 1] if self.labelled else found

    @cached_property
    def others(self) -> np.ndarray:
        """(len(self),) int64: the answer whose text a prompt is given in `mismatched`. Each is the
        next one in an order that is drawn once; of a pair's row, the same side of another pair.
        """
        order = np.random.default_rng(0).permutation(len(self) // self.per_row)
        behind = np.empty_like(order)
        behind[order] = np.roll(order, -1)
        sides = np.arange(self.per_row)
        return (behind[:, None] * self.per_row + sides).reshape(-1)

    def mismatched_answer(self, index: int) -> AnswerRow:
        """The prompt with an answer to another prompt, cut at max_tokens."""
        (own,), (other,) = self.answers(index), self.answers(int(self.others[index]))
        asked, said = own.num_asked, other.token_ids[other.num_asked :]
        most = self.reader.config.max_tokens
        ids = [*own.token_ids[:asked], *said][:most]
        learnt = ([0] * asked + [1] * len(said))[:most]
        return AnswerRow(ids, learnt, own.desirable, own.images)

    def by_id(self, id: int) -> AnswerRow:
        """The answer that a sequence's number in Batch.prompts stands for: twice the index, and 1
        more for the worse one of a pair, or for the mismatched one."""
        index, second = divmod(id, 2)
        if self.labelled and second:
            return self.mismatched_answer(index)
        return self.answers(index)[second]

    def batch(self, indices: list[int]) -> Batch:
        """Both answers of each pair, the better one first; or labelled answers, with 1 in `rewards`
        for a desirable one.
        """
        made = [answer for i in indices for answer in self.answers(i)]
        sides = [0] if self.labelled else [0, 1]
        ids = [2 * i + side for i in indices for side in sides]
        return self.packed(made, ids, indices, sides)

    def mismatched(self, indices: list[int]) -> Batch:
        """Makes a batch of the prompts of labelled answers, each with an answer to another one."""
        made = [self.mismatched_answer(i) for i in indices]
        return self.packed(made, [2 * i + 1 for i in indices], indices, [1])

    def packed(
        self, answers: list[AnswerRow], ids: list[int], indices: list[int], sides: list[int]
    ) -> Batch:  # fmt: skip
        """sides: columns of the reference that the answers of an index have."""
        lens = torch.tensor([len(a.token_ids) for a in answers], dtype=torch.int64)
        batch = empty_batch(lens)
        tokens = [token for a in answers for token in a.token_ids]
        batch.token_ids = torch.tensor(tokens, dtype=torch.int64)
        batch.loss_mask = torch.tensor([float(m) for a in answers for m in a.learnt])
        batch.prompts = torch.tensor(ids, dtype=torch.int64)
        batch.rewards = torch.tensor([a.desirable for a in answers], dtype=torch.float64)
        if self.reference is not None:
            rows = self.reference[np.asarray(indices, dtype=np.int64)][:, sides]
            batch.ref_sums = torch.from_numpy(rows.reshape(-1))
        return batch

    def shown(self) -> list[str]:
        answers, decode = self.answers(0), self.reader.sft.encoder.tokenizer.decode
        lines = [f"  row {self.measured.rows[0]}:"]
        lines += [f"    {picture}" for picture in answers[0].images]
        asked = answers[0].token_ids[: answers[0].num_asked]
        lines.append(f"    given     {decode(asked)[-200:]!r}")
        for answer in answers:
            name = "desirable" if self.labelled else "chosen   "
            if not answer.desirable:
                name = "avoided  " if self.labelled else "rejected "
            lines.append(f"    {name} {decode(answer.token_ids[answer.num_asked :])[-200:]!r}")
        return lines


def first_row(files: Files) -> dict[str, Any]:
    """Returns the first row that can be read; without one {}: who reads all rows says what is
    wrong."""
    for row in range(len(files)):
        try:
            return files.row(row)
        except BadRow:
            continue
    return {}


def divided(measured: Measured, parts: int) -> Measured:
    """Counts each row so many times, with its tokens in nearly equal parts."""
    if parts == 1:
        return measured
    first = measured.num_tokens // parts
    num_tokens = np.stack([measured.num_tokens - (parts - 1) * first, *[first] * (parts - 1)], 1)
    return replace(
        measured, rows=measured.rows.repeat(parts), num_tokens=num_tokens.reshape(-1)
    )  # fmt: skip
