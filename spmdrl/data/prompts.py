"""Prompts from Parquet and JSONL files.

A prompt row follows verl's schema:

    data_source    "openai/gsm8k"                          picks the reward function
    prompt         [{"role": "user", "content": "2+3?"}]   or a plain string
    reward_model   {"style": "rule", "ground_truth": "5"}  or a column `ground_truth`
    extra_info     {...}                                   optional, handed to the reward
    images         [{"bytes": ...}] or paths               optional, see spmdrl/data/pictures.py
    videos         paths, or lists of frames               optional, see spmdrl/data/videos.py

data.prompt_key and data.ground_truth_key name other columns. Rows of TRL, OpenRLHF and slime are
read by the names of their columns, where these leave no doubt (prompt_fields.py); what has no
data_source has the name of its file for one. A chat list goes through the tokenizer's chat template
with a generation prompt. A plain string is the whole prompt: it is tokenised as it stands, with the
special tokens the tokenizer adds by itself (a base model's BOS), unless data.apply_chat_template
makes one turn of it. Other columns are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from spmdrl.config import ConfigError, DataConfig, SamplerConfig
from spmdrl.config.words import counted, verb
from spmdrl.data.benchmarks import BENCHMARKS
from spmdrl.data.chat import Encoder
from spmdrl.data.demonstrations import DemonstrationReader, report_demonstrations
from spmdrl.data.hints import HintReader
from spmdrl.data.image_limits import ImageLimits
from spmdrl.data.images import ImageProcessor
from spmdrl.data.prompt_checks import MostImages, RowChecker, RowsSeen, handle_overlong
from spmdrl.data.prompt_fields import (
    PROMPTS,
    SCHEMA,
    columns_of,
    data_source_of,
    encode,
    prompt_fields,
)
from spmdrl.data.prompt_stats import PromptRows
from spmdrl.data.table_files import (
    BAD_ROW,
    Files,
    columns_at,
    load_together,
    measure_rows,
)
from spmdrl.distributed.topology import Topology
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
    marked         what a sampler must know of each prompt, where it was asked for
    demonstrated   counts of the rows' demonstrations, where they are read (demonstrations.py)
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
        marked: PromptRows | None = None,
        reader: DemonstrationReader | None = None,
        demonstrated: Mapping[str, int] = MappingProxyType({}),
        hints: HintReader | None = None,
    ) -> None:
        self.files, self.rows = files, rows  # rows: (len(self),) int64, global row numbers
        self.vision, self.images, self.num_tokens = vision, images, num_tokens
        self.encoder, self.config, self.data_sources = encoder, config, data_sources
        self.num_overlong, self.num_bad, self.num_escaped = num_overlong, num_bad, num_escaped
        self.left_out, self.marked = left_out, marked
        self.reader, self.demonstrated, self.hints = reader, demonstrated, hints

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
        benchmark: str = "",
        takes_truth: Callable[[str], bool] = lambda data_source: True,
        sampler: SamplerConfig | None = None,
        demonstration_tokens: int = 0,
        hinted: bool = False,
    ) -> PromptDataset:
        """Opens and checks the files. A collective: every rank of `topology` calls it.

        vocab_size: of the model, if tokens are to be checked against it. needs_truth: whether rows
        of a data_source must have a ground truth; wrong_truth: what is wrong with one, or None.
        vision: of the model, where it sees images. benchmark: the name of the one whose published
        rows the files have. takes_truth: whether the reward of a data_source would be given one, so
        that several columns which may be it are an error.
        sampler: of the run, where these prompts are drawn by it. demonstration_tokens: the most of
        a demonstration, where those of the rows are read (config.demonstration_key); 0: they are
        not. hinted: whether every row must have a hint, where config.hint_key names its column.
        Raises ConfigError, the same on every rank, for a file that cannot be read, for the first
        bad row, for over-long prompts (`overlong_prompts="error"`) and where no prompt is left.
        """
        files = load_together(topology, lambda: open_prompts(paths, config, benchmark))
        written = None if vision is None else vision.family.text
        encoder = Encoder(
            tokenizer, config, config.max_prompt_tokens, vocab_size, image_text=written
        )  # fmt: skip
        key, reader = config.demonstration_key, None
        if key is not None and demonstration_tokens:
            reader = DemonstrationReader.of(key, encoder, demonstration_tokens)
        hints = HintReader.of(config, encoder, vision) if hinted and config.hint_key else None
        checker = RowChecker(
            config, encoder, vision, needs_truth, wrong_truth, takes_truth, sampler, reader, hints
        )
        lengths = measure_rows(files, checker.length, topology, config.on_bad_row)
        rows = np.flatnonzero(lengths != BAD_ROW)
        num_bad = len(files) - len(rows)
        overlong = np.flatnonzero(lengths > config.max_prompt_tokens)
        if len(overlong):
            rows = handle_overlong(files, rows, lengths, overlong, config)
            if topology.rank == 0:
                word = {"filter": "left out", "truncate": "cut to their end"}
                more = "" if hints is None else (
                    f", or with their hint than max_hint_prompt_tokens={hints.encoder.limit},"
                )  # fmt: skip
                logger.info(
                    "%d of %s %s longer than max_prompt_tokens=%d%s and %s %s",
                    *(len(overlong), counted(len(files), "prompt"), verb(len(overlong), "are")),
                    *(config.max_prompt_tokens, more, verb(len(overlong), "were")),
                    word[config.overlong_prompts],
                )
        seen = checker.of_all_ranks(len(files), topology)
        if reader is not None:
            report_demonstrations(seen.demonstrations, len(files), reader, topology)
        return cls(
            files, rows, encoder, config, seen.data_sources, len(overlong), num_bad,
            seen.num_escaped, seen.left_out, vision, seen.images,
            np.minimum(lengths[rows], config.max_prompt_tokens), marked_rows(seen, rows),
            reader, seen.demonstrations, hints,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Prompt:
        """The prompt at 0 <= index < len(self); its id is the row number over all files."""
        row = int(self.rows[index])
        path = self.files.locate(row)[0].path
        content = self.files.row(row)
        fields = prompt_fields(content, path, self.config, self.vision is not None)
        (token_ids, text, _), shown = encode(fields, self.encoder, self.config, self.vision)
        if len(token_ids) > self.config.max_prompt_tokens:
            token_ids = token_ids[-self.config.max_prompt_tokens :]
            text = str(self.encoder.tokenizer.decode(token_ids))
        return Prompt(
            row, token_ids, fields.data_source, fields.ground_truth, text, fields.extra_info,
            fields.prompt if isinstance(fields.prompt, list) else None, shown,
            () if self.reader is None else self.reader.read(content, text),
        )  # fmt: skip

    def hinted(self, row: int) -> Prompt:
        """The prompt whose id this is with the row's hint in it, as a teacher is asked it. Raises
        ConfigError where the data has it no longer.
        """
        assert self.hints is not None
        prompt, content = self.by_id(row), self.files.row(row)
        path = self.files.locate(row)[0].path
        fields = prompt_fields(content, path, self.config, self.vision is not None)
        found = self.hints.encode(fields, content)
        return replace(prompt, token_ids=found.ids, text=found.text)

    def data_source(self, row: int) -> str:
        """The data source of the prompt whose id this is."""
        path = self.files.locate(row)[0].path
        found = data_source_of(self.files.row(row), path, self.config)
        assert isinstance(found, str)  # the row has been checked
        return found

    @property
    def image_tokens(self) -> float:
        """Returns the tokens of a prompt's images and videos, as a mean."""
        return self.images.tokens / max(len(self), 1)

    def looks(self, *others: PromptDataset) -> ImageLimits | None:
        """Returns the limits of images for an engine that is asked these prompts; None where it
        sees none.
        """
        if self.vision is None:
            return None
        most = MostImages.of([self.images, *(other.images for other in others)])
        (tokens, width, height), (video_tokens, *grid) = most.largest, most.largest_video
        return ImageLimits(
            self.vision, most.per_prompt, tokens, (width, height), most.videos, video_tokens,
            (grid[0], grid[1], grid[2]),
        )  # fmt: skip

    def by_id(self, row: int) -> Prompt:
        """The prompt whose id this is. Raises ConfigError where the data has it no longer."""
        index = int(np.searchsorted(self.rows, row))
        if index == len(self.rows) or self.rows[index] != row:
            raise ConfigError(f"{self.files.names}: row {row} is not among the usable prompts")
        return self.prompt(index)


def marked_rows(seen: RowsSeen, rows: np.ndarray) -> PromptRows | None:
    """rows: (num_prompts,) int64, those that can be used."""
    if seen.marks is None:
        return None
    source, difficulty = seen.marks
    return PromptRows(
        seen.data_sources, source[rows], None if difficulty is None else difficulty[rows], rows
    )


def open_prompts(paths: str | tuple[str, ...], config: DataConfig, benchmark: str) -> Files:
    """Opens files in verl's schema, or of a benchmark as it is published. Raises ConfigError."""
    if not benchmark:
        needed = (*columns_at(config.prompt_key), *PROMPTS)
        return Files.open(paths, columns_of(config), SCHEMA, needed=needed)
    known = BENCHMARKS[benchmark]
    return Files.open(
        paths, known.columns, f"The benchmark {benchmark} has the columns of {known.data}",
        partial(known.row, benchmark),
    )  # fmt: skip
