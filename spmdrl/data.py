"""Prompts from Parquet and JSONL files, and the order they are visited in.

A prompt row follows verl's schema:

    data_source    "openai/gsm8k"                          picks the reward function
    prompt         [{"role": "user", "content": "2+3?"}]   or a plain string
    reward_model   {"style": "rule", "ground_truth": "5"}  or a column `ground_truth`
    extra_info     {...}                                   optional, handed to the reward
    images         [{"bytes": ...}] or paths               optional, see spmdrl/vision.py

A chat list goes through the tokenizer's chat template with a generation prompt. A plain string is
the whole prompt: it is tokenised as it stands, with the special tokens the tokenizer adds by itself
(a base model's BOS). Other columns are not read.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from spmdrl.chat import Encoded, Encoder
from spmdrl.config import ConfigError, DataConfig
from spmdrl.files import (
    BAD_ROW,
    MISSING,
    BadRow,
    Files,
    bad_field,
    load_together,
    lookup,
    measure_rows,
    without_nulls,
)
from spmdrl.topology import Topology
from spmdrl.types import Prompt
from spmdrl.vision import (
    FAMILIES,
    MARK,
    Looks,
    Picture,
    Vision,
    pictures_of,
    says_image,
    with_parts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataset:
    """The usable prompts of some files. `prompt(i)` tokenises on demand.

    num_overlong   rows longer than max_prompt_tokens, filtered or truncated
    num_bad        rows that cannot be used and were left out (on_bad_row="skip")
    num_escaped    rows whose text names control tokens, which were made ordinary text
    data_sources   every data_source of the files, sorted; the same on every rank
    images         the most that a prompt has, and the tokens of the largest; 0 where there is none
    """

    def __init__(
        self,
        files: Files,
        rows: np.ndarray,
        encoder: Encoder,
        config: DataConfig,
        data_sources: tuple[str, ...],
        num_overlong: int,
        num_bad: int,
        num_escaped: int,
        vision: Vision | None,
        images: MostImages,
    ) -> None:
        self.files, self.rows = files, rows  # rows: (len(self),) int64, global row numbers
        self.vision, self.images = vision, images
        self.encoder, self.config, self.data_sources = encoder, config, data_sources
        self.num_overlong, self.num_bad, self.num_escaped = num_overlong, num_bad, num_escaped

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        topology: Topology,
        vocab_size: int | None = None,
        needs_truth: Callable[[str], bool] = lambda data_source: True,
        vision: Vision | None = None,
    ) -> PromptDataset:
        """Opens and checks the files. A collective: every rank of `topology` calls it.

        vocab_size: of the model, if tokens are to be checked against it. needs_truth: whether rows
        of a data_source must have a ground truth. vision: of the model, where it sees images.
        Raises ConfigError, the same on every rank, for a file that cannot be read, for the first
        bad row, for over-long prompts (`overlong_prompts="error"`) and where no prompt is left.
        """
        files = load_together(topology, lambda: Files.open(paths, PROMPT_COLUMNS))
        encoder = Encoder(tokenizer, config, config.max_prompt_tokens, vocab_size)
        sources: set[str] = set()
        escaped = 0
        most = MostImages()

        def length(row: dict[str, Any], path: Path) -> int:
            nonlocal escaped, most
            fields = prompt_fields(row, path.parent, vision is not None)
            if fields.ground_truth is None and needs_truth(fields.data_source):
                raise without_truth(row)
            found = encode(fields, encoder, config, vision)
            sources.add(fields.data_source)
            escaped += found.escaped
            if vision is not None:
                most = most.beside(fields, vision, len(found.ids) <= config.max_prompt_tokens)
            return len(found.ids)

        lengths = measure_rows(files, length, topology, config.on_bad_row)
        rows = np.flatnonzero(lengths != BAD_ROW)
        num_bad = len(files) - len(rows)
        overlong = np.flatnonzero(lengths > config.max_prompt_tokens)
        if len(overlong):
            rows = handle_overlong(files, rows, lengths, overlong, config)
            if topology.rank == 0:
                word = {"filter": "left out", "truncate": "cut to their end"}
                logger.info(
                    "%d of %d prompts are longer than max_prompt_tokens=%d and were %s",
                    *(len(overlong), len(files), config.max_prompt_tokens),
                    word[config.overlong_prompts],
                )
        gathered: list[Any] = [None] * topology.world
        dist.all_gather_object(gathered, (sources, escaped, most), group=topology.group)
        data_sources = tuple(sorted(set().union(*(theirs for theirs, _, _ in gathered))))
        num_escaped = sum(count for _, count, _ in gathered)
        report_escaped(num_escaped, len(files), topology)
        most = MostImages.of(images for _, _, images in gathered)
        report_blind(most.blind, len(files), topology)
        return cls(
            files, rows, encoder, config, data_sources, len(overlong), num_bad, num_escaped,
            vision, most,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Prompt:
        """The prompt at 0 <= index < len(self); its id is the row number over all files."""
        row = int(self.rows[index])
        folder = self.files.locate(row)[0].path.parent
        fields = prompt_fields(self.files.row(row), folder, self.vision is not None)
        token_ids, text, _ = encode(fields, self.encoder, self.config, self.vision)
        if len(token_ids) > self.config.max_prompt_tokens:
            token_ids = token_ids[-self.config.max_prompt_tokens :]
            text = str(self.encoder.tokenizer.decode(token_ids))
        return Prompt(
            row, token_ids, fields.data_source, fields.ground_truth, text, fields.extra_info,
            fields.prompt if isinstance(fields.prompt, list) else None, fields.images,
        )  # fmt: skip

    def looks(self, *others: PromptDataset) -> Looks | None:
        """What an engine has to reckon with that is asked these prompts; None: it sees none."""
        if self.vision is None:
            return None
        most = MostImages.of([self.images, *(other.images for other in others)])
        return Looks(self.vision, most.per_prompt, most.tokens)

    def by_id(self, row: int) -> Prompt:
        """The prompt whose id this is."""
        return self.prompt(int(np.searchsorted(self.rows, row)))


@dataclass(frozen=True)
class PromptFields:
    """What is read from a row of a prompt file, checked."""

    prompt: list[dict[str, Any]] | str
    data_source: str
    ground_truth: Any  # None where there is none
    extra_info: dict[str, Any]
    images: tuple[Picture, ...] = ()

    @property
    def has_parts(self) -> bool:
        return any(isinstance(turn["content"], list) for turn in self.turns)

    @property
    def turns(self) -> list[dict[str, Any]]:
        return self.prompt if isinstance(self.prompt, list) else [{"content": self.prompt}]


PROMPT_COLUMNS = (
    "prompt", "data_source", "reward_model", "ground_truth", "extra_info", "images", "image",
)  # fmt: skip


@dataclass(frozen=True)
class MostImages:
    """What an engine has to reckon with."""

    per_prompt: int = 0
    tokens: int = 0  # of the largest
    blind: int = 0  # prompts that say <image> and have none

    def beside(self, fields: PromptFields, vision: Vision, is_used: bool) -> MostImages:
        """With a prompt's, all of which are decoded once. Raises BadRow."""
        for picture in fields.images:
            picture.open()
        if not fields.images:
            return replace(self, blind=self.blind + says_image(fields.turns))
        if not is_used:
            return self
        largest = max(map(vision.num_tokens, fields.images))
        return replace(
            self, per_prompt=max(self.per_prompt, len(fields.images)),
            tokens=max(self.tokens, largest),
        )  # fmt: skip

    @classmethod
    def of(cls, several: Iterable[MostImages]) -> MostImages:
        each = list(several)
        return cls(
            max(one.per_prompt for one in each), max(one.tokens for one in each),
            sum(one.blind for one in each),
        )  # fmt: skip


def encode(
    fields: PromptFields, encoder: Encoder, config: DataConfig, vision: Vision | None
) -> Encoded:
    """Token ids of a prompt, images included. Raises BadRow, ConfigError."""
    if not fields.images and not fields.has_parts:
        return encoder.prompt(fields.prompt)
    if vision is None:
        raise sees_none()
    if isinstance(fields.prompt, str):
        raise BadRow(f"field 'images': they want a prompt that is a chat list, with {MARK} in it")
    found = encoder.prompt(with_parts(fields.prompt, len(fields.images)))
    if len(found.ids) <= encoder.limit:
        found = found._replace(ids=vision.placed(found.ids, fields.images))
    if len(found.ids) > encoder.limit and config.overlong_prompts == "truncate":
        raise BadRow(
            f"field 'images': a prompt of {len(found.ids)} tokens with images cannot be cut to "
            f"max_prompt_tokens={encoder.limit}: raise it, set image_max_pixels, or set "
            "overlong_prompts to 'filter'"
        )
    return found


def sees_none() -> ConfigError:
    return ConfigError(
        "the data has images, which the model does not see: model types that do are "
        f"{', '.join(FAMILIES)}"
    )


def prompt_fields(row: dict[str, Any], folder: Path, sees: bool = False) -> PromptFields:
    """Raises BadRow naming the first field that is missing, null, empty or of a wrong type.

    A ground truth may be missing: some rewards ask for none. folder: of the file. sees: whether the
    model sees images.
    """
    images = pictures_of(row.get("images"), folder)
    if sees and not images and row.get("image") is not None:
        raise bad_field("image", row["image"], "a column 'images', a list for each prompt")
    prompt = lookup(row, "prompt")
    check_prompt("prompt", prompt, parts=sees or bool(images))
    data_source = lookup(row, "data_source")
    if not isinstance(data_source, str) or not data_source:
        raise bad_field("data_source", data_source, "a name such as 'openai/gsm8k'", row)
    ground_truth = lookup(row, truth_key(row))
    if ground_truth is MISSING or ground_truth != ground_truth:  # NaN
        ground_truth = None
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise bad_field("extra_info", extra_info, "a mapping, or null", row)
    chat = prompt if isinstance(prompt, str) else [without_nulls(turn) for turn in prompt]
    return PromptFields(chat, data_source, ground_truth, extra_info or {}, images)


def truth_key(row: dict[str, Any]) -> str:
    """verl's place, and the one to name where there is none; or a column of its own."""
    own = row.get("reward_model") is None and "ground_truth" in row
    return "ground_truth" if own else "reward_model.ground_truth"


def without_truth(row: dict[str, Any]) -> BadRow:
    key = truth_key(row)
    expected = "the reference answer (or a column 'ground_truth'), which the reward asks for"
    return bad_field(key, lookup(row, key), expected, row)


def check_prompt(field: str, prompt: Any, parts: bool = False) -> None:
    """Raises BadRow unless `prompt` is a non-empty string or a non-empty chat list.

    parts: a content may be a list of parts, which are not looked at.
    """
    expected = "a non-empty string or chat list [{'role': ..., 'content': ...}, ...]"
    if not isinstance(prompt, str | list) or len(prompt) == 0:
        raise bad_field(field, prompt, expected)
    if isinstance(prompt, str):
        return
    for i, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            raise bad_field(f"{field}[{i}]", turn, "{'role': ..., 'content': ...}")
        for key in ("role", "content"):
            kind = str | list if parts and key == "content" else str
            if not isinstance(turn.get(key), kind):
                raise bad_field(f"{field}[{i}].{key}", turn.get(key, MISSING), "a string", turn)
    contents = [turn["content"] for turn in prompt]
    if not any(text.strip() if isinstance(text, str) else text for text in contents):
        raise BadRow(f"field '{field}': every turn is empty, expected {expected}")


def report_escaped(count: int, num_rows: int, topology: Topology) -> None:
    if count and topology.rank == 0:
        logger.warning(
            "%d of %d rows name control tokens of the tokenizer in their text; these are encoded "
            "as ordinary text (data.control_tokens='escape')",
            *(count, num_rows),
        )


def report_blind(count: int, num_rows: int, topology: Topology) -> None:
    if count and topology.rank == 0:
        logger.warning(
            "%d of %d rows say %s and have no images: it stays text", *(count, num_rows, MARK)
        )


def handle_overlong(
    files: Files, rows: np.ndarray, lengths: np.ndarray, overlong: np.ndarray, config: DataConfig
) -> np.ndarray:
    """The rows to keep, by `config.overlong_prompts`. Raises ConfigError if that leaves none."""
    limit, longest = config.max_prompt_tokens, int(lengths.max())
    usable = lengths[rows]
    if config.overlong_prompts == "truncate":
        return rows
    if config.overlong_prompts == "error":
        raise ConfigError(
            f"{files.where(int(overlong[0]))}: the prompt has {lengths[overlong[0]]} tokens, the "
            f"limit max_prompt_tokens is {limit}. {len(overlong)} of {len(rows)} prompts are over "
            f"it, the longest has {longest}. Raise max_prompt_tokens, or set overlong_prompts to "
            "'filter' or 'truncate'."
        )
    if len(overlong) == len(rows):
        raise ConfigError(
            f"{files.names}: all {len(rows)} prompts are longer than max_prompt_tokens={limit} "
            f"(shortest {usable.min()}, longest {longest} tokens), so none is left. "
            f"Raise max_prompt_tokens to {longest}, or set overlong_prompts to 'truncate'."
        )
    return rows[usable <= limit]


class PromptOrder:
    """Which prompts each step asks: a permutation per epoch, walked `prompts_per_step` at a time.

    What is left at the end of an epoch and does not fill a step is not visited in that epoch:
    filling up from the next epoch could put one prompt into a step twice, with the same seeds.
    The permutation depends on (seed, epoch, length) alone, not on the world size.
    """

    def __init__(self, length: int, prompts_per_step: int, seed: int, shuffle: bool = True) -> None:
        if not 1 <= prompts_per_step <= length:
            raise ConfigError(
                f"prompts_per_step={prompts_per_step} does not fit the data: {length} usable "
                f"prompts, and a step asks no prompt twice. Use 1 <= prompts_per_step <= {length}, "
                "add data, or raise max_prompt_tokens if prompts were filtered."
            )
        self.length, self.prompts_per_step = length, prompts_per_step
        self.seed, self.shuffle = seed, shuffle
        self.epoch = 0
        self.offset = 0  # prompts already asked in this epoch
        self._permutation = epoch_permutation(length, seed, 0, shuffle)

    def next_step(self) -> list[int]:
        """`prompts_per_step` different dataset indices; moves the position on."""
        return self.take(self.prompts_per_step)

    def take(self, count: int) -> list[int]:
        """The next `count` different dataset indices, from a new epoch if this one has fewer."""
        if self.offset + count > self.length:
            self.epoch, self.offset = self.epoch + 1, 0
            self._permutation = epoch_permutation(self.length, self.seed, self.epoch, self.shuffle)
        taken = self._permutation[self.offset : self.offset + count]
        self.offset += count
        return taken.tolist()

    def state_dict(self) -> dict[str, Any]:
        """JSON-able: the position, and what it is a position in."""
        return {
            "epoch": self.epoch,
            "offset": self.offset,
            "length": self.length,
            "seed": self.seed,
            "shuffle": self.shuffle,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on exactly where `state` was taken; prompts_per_step may have changed since.

        Raises ConfigError where the data, the seed or `shuffle` differ: the rest of the epoch
        would then be other prompts than those not yet asked.
        """
        for name in ("length", "seed", "shuffle"):
            if state[name] != getattr(self, name):
                raise ConfigError(
                    f"the checkpoint's data position was taken with {name}={state[name]}, this run "
                    f"has {name}={getattr(self, name)}. Use the same data and seed, or start anew "
                    "with --resume never."
                )
        if state["epoch"] != self.epoch:
            self._permutation = epoch_permutation(
                self.length, self.seed, state["epoch"], self.shuffle
            )
        self.epoch, self.offset = state["epoch"], state["offset"]


def epoch_permutation(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """(length,) int64: sorts raw PCG64 words, a stream that numpy never changes, unlike shuffle."""
    if not shuffle:
        return np.arange(length)
    digest = hashlib.sha256(f"prompt order, seed {seed}, epoch {epoch}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return np.argsort(words, kind="stable")
