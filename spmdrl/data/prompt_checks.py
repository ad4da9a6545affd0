"""Checks of the rows of prompt files when they are opened, and counts of what they hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spmdrl.config import ConfigError, DataConfig, SamplerConfig
from spmdrl.config.words import counted, verb
from spmdrl.data.chat import Encoder
from spmdrl.data.demonstrations import DemonstrationReader
from spmdrl.data.hints import HintReader
from spmdrl.data.images import ImageProcessor
from spmdrl.data.pictures import open_picture, says_image, shown_in, size_of
from spmdrl.data.prompt_fields import (
    PromptFields,
    encode,
    is_in_doubt,
    prompt_fields,
    truth_key,
    without_truth,
)
from spmdrl.data.prompt_stats import needs_difficulty
from spmdrl.data.row_reports import (
    report_blind,
    report_escaped,
    report_left_out,
    sum_by_name,
    unread_tools,
)
from spmdrl.data.table_files import BadRow, Files, bad_field, lookup
from spmdrl.data.visuals import Video
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.topology import Topology
from spmdrl.types import Picture


@dataclass(frozen=True)
class MostImages:
    """Counts the most images and videos, and the largest, that an engine must be ready for."""

    per_prompt: int = 0
    largest: tuple[int, int, int] = (0, 0, 0)  # its tokens, width and height
    blind: int = 0  # prompts that say <image> and have none
    videos: int = 0  # of a prompt
    # its tokens; its steps in time, rows and columns of patches
    largest_video: tuple[int, int, int, int] = (0, 0, 0, 0)
    tokens: int = 0  # of all images and videos of all prompts

    def beside(self, fields: PromptFields, vision: ImageProcessor, is_used: bool) -> MostImages:
        """Returns the limits with a prompt's images added, all of which are decoded once. Raises
        BadRow.
        """
        images = [each for each in fields.images if isinstance(each, Picture)]
        videos = [each for each in fields.images if isinstance(each, Video)]
        for picture in images:
            open_picture(picture)
        if not fields.images:
            return replace(self, blind=self.blind + says_image(fields.turns))
        if not is_used:
            return self
        sizes = [(len(vision.layout(image)), *size_of(image)) for image in images]
        grids = [vision.pixels(video)["image_grid_thw"][0].tolist() for video in videos]
        clips = [
            (len(vision.layout(video)), times, rows, columns)
            for video, (times, rows, columns) in zip(videos, grids, strict=True)
        ]
        return replace(
            self, per_prompt=max(self.per_prompt, len(images)),
            largest=max([self.largest, *sizes]), videos=max(self.videos, len(videos)),
            largest_video=max([self.largest_video, *clips]),
            tokens=self.tokens + sum(tokens for tokens, *_ in [*sizes, *clips]),
        )  # fmt: skip

    @classmethod
    def of(cls, several: Iterable[MostImages]) -> MostImages:
        each = list(several)
        return cls(
            max(one.per_prompt for one in each), max(one.largest for one in each),
            sum(one.blind for one in each), max(one.videos for one in each),
            max(one.largest_video for one in each), sum(one.tokens for one in each),
        )  # fmt: skip


class RowMarks(NamedTuple):
    """Says of each row what a sampler must know. The values of a row that is bad mean nothing."""

    source: np.ndarray  # (num_rows,) int64, a place in RowsSeen.data_sources
    difficulty: np.ndarray | None  # (num_rows,) float64


class RowsSeen(NamedTuple):
    """Counts of what the rows of a data set hold, over all ranks."""

    data_sources: tuple[str, ...]  # sorted
    num_escaped: int
    left_out: dict[str, int]  # by name: see Encoder.left_out
    images: MostImages
    marks: RowMarks | None  # where they were asked for
    demonstrations: dict[str, int]  # of DemonstrationReader.counts; empty where none are read


class RowChecker:
    """Checks and measures rows, and counts what they hold."""

    def __init__(
        self,
        config: DataConfig,
        encoder: Encoder,
        vision: ImageProcessor | None,
        needs_truth: Callable[[str], bool],
        wrong_truth: Callable[[str, Any], str | None],
        takes_truth: Callable[[str], bool],
        sampler: SamplerConfig | None = None,
        demonstrations: DemonstrationReader | None = None,
        hints: HintReader | None = None,
    ) -> None:
        """sampler: of the run, where each row is to be marked for it. demonstrations, hints: where
        those of the rows are read.
        """
        self.config, self.encoder, self.vision = config, encoder, vision
        self.needs_truth, self.wrong_truth = needs_truth, wrong_truth
        self.takes_truth = takes_truth
        self.sources: set[str] = set()
        self.num_escaped = 0
        self.left_out: Counter[str] = Counter()
        self.images = MostImages()
        self.sampler, self.demonstrations, self.hints = sampler, demonstrations, hints
        self.demonstrated: Counter[str] = Counter()
        self.marks: list[tuple[str, float]] = []  # data source and difficulty of each row

    def length(self, row: dict[str, Any], path: Path) -> int:
        """Returns the tokens of the row's prompt. Raises BadRow, ConfigError."""
        if self.sampler is not None:
            self.marks.append(("", 0.0))  # a row that is bad keeps it
        fields = prompt_fields(row, path, self.config, self.vision is not None)
        if self.sampler is not None:
            self.marks[-1] = (fields.data_source, difficulty_of(row, self.sampler))
        self.check_truth(fields, row)
        found, _ = encode(fields, self.encoder, self.config, self.vision)
        length = len(found.ids)
        if self.hints is not None:
            length = self.hints.length(fields, row, length)
        fits = length <= self.config.max_prompt_tokens
        self.sources.add(fields.data_source)
        self.num_escaped += found.escaped
        if fits:
            self.left_out.update(left_out_of(fields, row, self.encoder))
        if self.demonstrations is not None and (fits or self.config.overlong_prompts == "truncate"):
            self.demonstrated.update(self.demonstrations.counts(row, found.text))
        if self.vision is not None:
            self.images = self.images.beside(fields, self.vision, fits)
        return length

    def check_truth(self, fields: PromptFields, row: dict[str, Any]) -> None:
        """Raises BadRow for a ground truth that the reward needs and the row has not, that it would
        take and that is in doubt, or that is none for the reward.
        """
        if fields.ground_truth is None:
            takes = self.takes_truth(fields.data_source) and is_in_doubt(row, self.config)
            if takes or self.needs_truth(fields.data_source):
                raise without_truth(row, self.config)
            return
        wrong = self.wrong_truth(fields.data_source, fields.ground_truth)
        if wrong is not None:
            raise BadRow(f"field '{truth_key(row, self.config)}': {wrong}")

    def of_all_ranks(self, num_rows: int, topology: Topology) -> RowsSeen:
        """Gathers the counts and reports them on the first rank. Collective."""
        # bad rows were looked at once more, behind the others
        num_own = len(range(topology.rank, num_rows, topology.world))
        own = (
            self.sources, self.num_escaped, self.left_out, self.images, self.marks[:num_own],
            self.demonstrated,
        )  # fmt: skip
        sources, escaped, left_out, images, shares, demonstrated = zip(
            *gather_to_all(own, topology.control), strict=True
        )
        names = tuple(sorted(set().union(*sources)))
        seen = RowsSeen(
            names, sum(escaped), sum_by_name(left_out), MostImages.of(images),
            None if self.sampler is None else marks_of(shares, num_rows, names, self.sampler),
            sum_by_name(demonstrated),
        )  # fmt: skip
        report_escaped(seen.num_escaped, num_rows, topology)
        report_left_out(seen.left_out, num_rows, topology)
        report_blind(seen.images.blind, num_rows, topology)
        return seen


def difficulty_of(row: dict[str, Any], sampler: SamplerConfig) -> float:
    """The number in the column that data.sampler names; 0 where it names none. Raises BadRow."""
    if not needs_difficulty(sampler):
        return 0.0
    found = lookup(row, sampler.difficulty_key)
    if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
        expected = "a number, by which data.sampler.curriculum='difficulty' sorts"
        raise bad_field(sampler.difficulty_key, found, expected, row)
    return float(found)


def marks_of(
    shares: Sequence[list[tuple[str, float]]], num_rows: int, names: tuple[str, ...],
    sampler: SamplerConfig,
) -> RowMarks:  # fmt: skip
    """shares: of each rank the marks of its rows, rank::world."""
    source, difficulty = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
    number = {name: i for i, name in enumerate(names)}
    for rank, marks in enumerate(shares):
        source[rank :: len(shares)] = [number.get(name, 0) for name, _ in marks]
        difficulty[rank :: len(shares)] = [value for _, value in marks]
    return RowMarks(source, difficulty if needs_difficulty(sampler) else None)


def left_out_of(fields: PromptFields, row: dict[str, Any], encoder: Encoder) -> set[str]:
    """Names of what the row holds and the prompt's text does not. Raises BadRow, ConfigError."""
    if isinstance(fields.prompt, str):
        return set()
    parts = fields.images or fields.has_parts
    chat = shown_in(fields.prompt, fields.images) if parts else fields.prompt
    return encoder.left_out(chat) | unread_tools(row, encoder)


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
            f"limit max_prompt_tokens is {limit}. {len(overlong)} of "
            f"{counted(len(rows), 'prompt')} {verb(len(overlong), 'are')} over "
            f"it, the longest has {longest}. Raise max_prompt_tokens, or set overlong_prompts to "
            "'filter' or 'truncate'."
        )
    if len(overlong) == len(rows):
        raise ConfigError(
            f"{files.names}: all {counted(len(rows), 'prompt')} {verb(len(rows), 'are')} longer "
            f"than max_prompt_tokens={limit} "
            f"(shortest {usable.min()}, longest {longest} tokens), so none is left. "
            f"Raise max_prompt_tokens to {longest}, or set overlong_prompts to 'truncate'."
            + (
                " With their hints they may be longer than max_hint_prompt_tokens="
                f"{config.max_hint_prompt_tokens}, too."
                if config.hint_key
                else ""
            )
        )
    return rows[usable <= limit]
