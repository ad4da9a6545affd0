"""Prompts from Parquet and JSONL files, and the order they are visited in.

A prompt row follows verl's schema:

    data_source    "openai/gsm8k"                          picks the reward function
    prompt         [{"role": "user", "content": "2+3?"}]   or a plain string
    reward_model   {"style": "rule", "ground_truth": "5"}  or a column `ground_truth`
    extra_info     {...}                                   optional, handed to the reward
    images         [{"bytes": ...}] or paths               optional, see spmdrl/data/images.py

data.prompt_key and data.ground_truth_key name other columns; without a column data_source a row has
the name of its file for one, where data.prompt_key is another than the default. A chat list goes
through the tokenizer's chat template with a generation prompt. A plain string is
the whole prompt: it is tokenised as it stands, with the special tokens the tokenizer adds by itself
(a base model's BOS). Other columns are not read.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist

from spmdrl.config import ConfigError, DataConfig
from spmdrl.data.chat import Encoded, Encoder
from spmdrl.data.images import (
    MARK,
    ImageLimits,
    ImageProcessor,
    Picture,
    open_picture,
    pictures_of,
    says_image,
    with_parts,
)
from spmdrl.data.left_out import calls_of
from spmdrl.data.table_files import (
    BAD_ROW,
    MISSING,
    BadRow,
    Files,
    bad_field,
    columns_at,
    load_together,
    lookup,
    measure_rows,
    without_nulls,
)
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import FAMILIES
from spmdrl.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class PromptDataset:
    """The usable prompts of some files. `prompt(i)` tokenises on demand.

    num_overlong   rows longer than max_prompt_tokens, filtered or truncated
    num_bad        rows that cannot be used and were left out (on_bad_row="skip")
    num_escaped    rows whose text names control tokens, which were made ordinary text
    left_out       by name, rows that hold something which the chat template does not write
    data_sources   every data_source of the files, sorted; the same on every rank
    images         the most that a prompt has, and the tokens of the largest; 0 where there is none
    num_tokens     (len(self),) int64, of each prompt
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
        left_out: dict[str, int],
        vision: ImageProcessor | None,
        images: MostImages,
        num_tokens: np.ndarray,
    ) -> None:
        self.files, self.rows = files, rows  # rows: (len(self),) int64, global row numbers
        self.vision, self.images, self.num_tokens = vision, images, num_tokens
        self.encoder, self.config, self.data_sources = encoder, config, data_sources
        self.num_overlong, self.num_bad, self.num_escaped = num_overlong, num_bad, num_escaped
        self.left_out = left_out

    @classmethod
    def load(
        cls,
        paths: str | tuple[str, ...],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig,
        topology: Topology,
        vocab_size: int | None = None,
        needs_truth: Callable[[str], bool] = lambda data_source: True,
        wrong_truth: Callable[[str, Any], str | None] = lambda data_source, truth: None,
        vision: ImageProcessor | None = None,
    ) -> PromptDataset:
        """Opens and checks the files. A collective: every rank of `topology` calls it.

        vocab_size: of the model, if tokens are to be checked against it. needs_truth: whether rows
        of a data_source must have a ground truth; wrong_truth: what is wrong with one, or None.
        vision: of the model, where it sees images.
        Raises ConfigError, the same on every rank, for a file that cannot be read, for the first
        bad row, for over-long prompts (`overlong_prompts="error"`) and where no prompt is left.
        """
        files = load_together(topology, lambda: Files.open(paths, columns_of(config), SCHEMA))
        encoder = Encoder(tokenizer, config, config.max_prompt_tokens, vocab_size)
        sources: set[str] = set()
        escaped = 0
        missing: Counter[str] = Counter()  # by name: see Encoder.left_out
        most = MostImages()

        def length(row: dict[str, Any], path: Path) -> int:
            nonlocal escaped, most
            fields = prompt_fields(row, path, config, vision is not None)
            if fields.ground_truth is None and needs_truth(fields.data_source):
                raise without_truth(row, config)
            if fields.ground_truth is not None:
                wrong = wrong_truth(fields.data_source, fields.ground_truth)
                if wrong is not None:
                    raise BadRow(f"field '{truth_key(row, config)}': {wrong}")
            found = encode(fields, encoder, config, vision)
            sources.add(fields.data_source)
            escaped += found.escaped
            if len(found.ids) <= config.max_prompt_tokens:
                missing.update(left_out_of(fields, row, encoder))
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
        dist.all_gather_object(gathered, (sources, escaped, missing, most), group=topology.group)
        data_sources = tuple(sorted(set().union(*(theirs for theirs, *_ in gathered))))
        num_escaped = sum(count for _, count, *_ in gathered)
        report_escaped(num_escaped, len(files), topology)
        left_out = sum_by_name(theirs for *_, theirs, _ in gathered)
        report_left_out(left_out, len(files), topology)
        most = MostImages.of(images for *_, images in gathered)
        report_blind(most.blind, len(files), topology)
        return cls(
            files, rows, encoder, config, data_sources, len(overlong), num_bad, num_escaped,
            left_out, vision, most, np.minimum(lengths[rows], config.max_prompt_tokens),
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Prompt:
        """The prompt at 0 <= index < len(self); its id is the row number over all files."""
        row = int(self.rows[index])
        path = self.files.locate(row)[0].path
        fields = prompt_fields(self.files.row(row), path, self.config, self.vision is not None)
        token_ids, text, _ = encode(fields, self.encoder, self.config, self.vision)
        if len(token_ids) > self.config.max_prompt_tokens:
            token_ids = token_ids[-self.config.max_prompt_tokens :]
            text = str(self.encoder.tokenizer.decode(token_ids))
        return Prompt(
            row, token_ids, fields.data_source, fields.ground_truth, text, fields.extra_info,
            fields.prompt if isinstance(fields.prompt, list) else None, fields.images,
        )  # fmt: skip

    def looks(self, *others: PromptDataset) -> ImageLimits | None:
        """Returns the limits of images for an engine that is asked these prompts; None where it
        sees none.
        """
        if self.vision is None:
            return None
        most = MostImages.of([self.images, *(other.images for other in others)])
        return ImageLimits(self.vision, most.per_prompt, most.tokens)

    def by_id(self, row: int) -> Prompt:
        """The prompt whose id this is. Raises ConfigError where the data has it no longer."""
        index = int(np.searchsorted(self.rows, row))
        if index == len(self.rows) or self.rows[index] != row:
            raise ConfigError(f"{self.files.names}: row {row} is not among the usable prompts")
        return self.prompt(index)


@dataclass(frozen=True)
class PromptFields:
    """The fields that are read from a row of a prompt file, checked."""

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


SCHEMA = (
    "data.prompt_key and data.ground_truth_key name other columns; examples/gsm8k/prepare.py "
    "writes a file with the usual ones"
)


def columns_of(config: DataConfig) -> tuple[str, ...]:
    others = ("data_source", "ground_truth", "extra_info", "images", "image", "tools")
    return (*columns_at(config.prompt_key, config.ground_truth_key), *others)


@dataclass(frozen=True)
class MostImages:
    """Counts the most images, and the largest, that an engine must be ready for."""

    per_prompt: int = 0
    tokens: int = 0  # of the largest
    blind: int = 0  # prompts that say <image> and have none

    def beside(self, fields: PromptFields, vision: ImageProcessor, is_used: bool) -> MostImages:
        """Returns the limits with a prompt's images added, all of which are decoded once. Raises
        BadRow.
        """
        for picture in fields.images:
            open_picture(picture)
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
    fields: PromptFields, encoder: Encoder, config: DataConfig, vision: ImageProcessor | None
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


def prompt_fields(
    row: dict[str, Any], path: Path, config: DataConfig, sees: bool = False
) -> PromptFields:
    """Raises BadRow naming the first field that is missing, null, empty or of a wrong type.

    A ground truth may be missing: some rewards ask for none. path: of the file. sees: whether the
    model sees images.
    """
    images = pictures_of(row.get("images"), path.parent)
    if sees and not images and row.get("image") is not None:
        raise bad_field("image", row["image"], "a column 'images', a list for each prompt")
    prompt = lookup(row, config.prompt_key)
    if prompt is MISSING:
        raise bad_field(config.prompt_key, prompt, f"{PROMPT}. {SCHEMA}", row)
    check_prompt(config.prompt_key, prompt, parts=sees or bool(images))
    data_source = lookup(row, "data_source")
    if data_source is MISSING and config.prompt_key != DataConfig.prompt_key:
        data_source = path.stem
    if not isinstance(data_source, str) or not data_source:
        expected = "a name such as 'openai/gsm8k'"
        hint = f". {SCHEMA}" if data_source is MISSING else ""
        raise bad_field("data_source", data_source, expected + hint, row)
    ground_truth = lookup(row, truth_key(row, config))
    if ground_truth is MISSING or ground_truth != ground_truth:  # NaN
        ground_truth = None
    extra_info = row.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, dict):
        raise bad_field("extra_info", extra_info, "a mapping, or null", row)
    chat = prompt if isinstance(prompt, str) else [without_nulls(turn) for turn in prompt]
    return PromptFields(chat, data_source, ground_truth, extra_info or {}, images)


def truth_key(row: dict[str, Any], config: DataConfig) -> str:
    """The one of the config; of the default, where verl has it, or a column of its own."""
    key = config.ground_truth_key
    if key != DataConfig.ground_truth_key:
        return key
    own = row.get("reward_model") is None and "ground_truth" in row
    return "ground_truth" if own else key


def without_truth(row: dict[str, Any], config: DataConfig) -> BadRow:
    key = truth_key(row, config)
    expected = "the reference answer, which the reward asks for"
    if key == DataConfig.ground_truth_key:
        expected += f" (or a column 'ground_truth'). {SCHEMA}"
    return bad_field(key, lookup(row, key), expected, row)


PROMPT = "a non-empty string or chat list [{'role': ..., 'content': ...}, ...]"
# how the text of a chat list begins, as JSON or as Python writes it
CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(["'])(role|content)\1\s*:""")
AS_A_LIST = "the model would be asked its brackets and quotes. Write it as a list, e.g. json.loads"


def check_prompt(field: str, prompt: Any, parts: bool = False) -> None:
    """Raises BadRow unless `prompt` is a non-empty string or a non-empty chat list.

    parts: a content may be a list of parts, which are not looked at.
    """
    if not isinstance(prompt, str | list) or len(prompt) == 0:
        raise bad_field(field, prompt, PROMPT)
    if isinstance(prompt, str):
        if CHAT_AS_TEXT.match(prompt):
            raise bad_field(field, prompt, f"{PROMPT}; this is the text of a list: {AS_A_LIST}")
        return
    for i, turn in enumerate(prompt):
        if not isinstance(turn, dict):
            raise bad_field(f"{field}[{i}]", turn, "{'role': ..., 'content': ...}")
        for key in ("role", "content"):
            kind = str | list if parts and key == "content" else str
            if key == "content" and turn.get(key) is None and calls_of(turn):
                continue
            if not isinstance(turn.get(key), kind):
                raise bad_field(f"{field}[{i}].{key}", turn.get(key, MISSING), "a string", turn)
    contents = [turn.get("content") or calls_of(turn) for turn in prompt]
    if not any(text.strip() if isinstance(text, str) else text for text in contents):
        raise BadRow(f"field '{field}': every turn is empty, expected {PROMPT}")


def report_escaped(count: int, num_rows: int, topology: Topology) -> None:
    if count and topology.rank == 0:
        logger.warning(
            "%d of %d rows name control tokens of the tokenizer in their text; these are encoded "
            "as ordinary text (data.control_tokens='escape')",
            *(count, num_rows),
        )


def left_out_of(fields: PromptFields, row: dict[str, Any], encoder: Encoder) -> set[str]:
    """Names of what the row holds and the prompt's text does not. Raises BadRow, ConfigError."""
    if isinstance(fields.prompt, str):
        return set()
    parts = fields.images or fields.has_parts
    chat = with_parts(fields.prompt, len(fields.images)) if parts else fields.prompt
    return encoder.left_out(chat) | unread_tools(row, encoder)


def unread_tools(row: dict[str, Any], encoder: Encoder) -> set[str]:
    """A column of tools is not read: those of all rows are given to the template by the config."""
    is_unread = row.get("tools") and "tools" not in encoder.config.chat_template_kwargs
    return {"column tools"} if is_unread else set()


def sum_by_name(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in counts:
        total.update(part)
    return dict(sorted(total.items()))


def report_left_out(counts: Mapping[str, int], num_rows: int, topology: Topology) -> None:
    if counts and topology.rank == 0:
        logger.warning(
            "the chat template leaves out of the text what some of the %d rows hold: %s; give the "
            "tokenizer a template that writes it (data.chat_template_kwargs has tools and settings "
            "of a template)", num_rows, shown_counts(counts),
        )  # fmt: skip


def left_out_lines(counts: Mapping[str, int]) -> list[str]:
    """Returns lines for --dry-run about what the template leaves out."""
    return [f"  left out by the chat template: {shown_counts(counts)}"] if counts else []


def shown_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} in {count} rows" for name, count in counts.items())


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
    """Says which prompts each step asks: a permutation per epoch, walked `prompts_per_step` at a
    time.

    What is left at the end of an epoch and does not fill a step is not visited in that epoch:
    filling up from the next epoch could put one prompt into a step twice, with the same seeds. The
    permutation depends on (seed, epoch, length) alone, not on the world size.
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

    def load_state_dict(self, state: dict[str, Any], may_differ: bool = False) -> bool:
        """Goes on exactly where `state` was taken; prompts_per_step may have changed since.

        Where the number of rows, the seed or `shuffle` differ, the rest of the epoch would be other
        rows than those not yet asked: a ConfigError, or with may_differ the next epoch begins.
        Returns whether it goes on where it was.
        """
        own = {"length": self.length, "seed": self.seed, "shuffle": self.shuffle}
        differ = [name for name in own if state[name] != own[name]]
        if differ and not may_differ:
            changes = "; ".join(
                f"{name}={state[name]}, this run has {name}={own[name]}" for name in differ
            )
            raise ConfigError(
                f"the checkpoint's data position was taken with {changes} (length: usable rows). "
                "Use the same data and seed, begin a new epoch of these rows with "
                "--checkpoint.accept_changes data, or start anew with --resume never."
            )
        epoch, offset = (state["epoch"] + 1, 0) if differ else (state["epoch"], state["offset"])
        if epoch != self.epoch:
            self._permutation = epoch_permutation(self.length, self.seed, epoch, self.shuffle)
        self.epoch, self.offset = epoch, offset
        return not differ


def epoch_permutation(length: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """(length,) int64: sorts raw PCG64 words, a stream that numpy never changes, unlike shuffle."""
    if not shuffle:
        return np.arange(length)
    digest = hashlib.sha256(f"prompt order, seed {seed}, epoch {epoch}".encode()).digest()
    words = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(length)
    return np.argsort(words, kind="stable")
