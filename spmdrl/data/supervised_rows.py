"""Rows that are learnt from as they stand: those of fine-tuning and of preferences."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.data.row_reports import report_blind, report_escaped, report_left_out, sum_by_name
from spmdrl.data.table_files import BAD_ROW, Files, measure_rows
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.topology import Topology
from spmdrl.types import Batch

if TYPE_CHECKING:
    from spmdrl.data.images import BatchImages

logger = logging.getLogger(__name__)

NO_ROOM = 2**62  # a length that no row has: of one that is left out for its length


class Rows(Protocol):
    """The usable rows of some files, the same on every rank."""

    files: Files
    measured: Measured
    images: BatchImages | None  # those of the rows, where the model sees any

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> Batch:
        """Returns those rows as a Batch, in this order, without loss_weights. The tokens that are
        learnt are unmasked.
        """
        ...

    def shown(self) -> list[str]:
        """The first row, for --dry-run: a line for each of its parts."""
        ...


@dataclass(frozen=True)
class Measured:
    """Holds what a pass over all rows of the files found."""

    rows: np.ndarray  # (n,) int64, numbers of the usable rows over all files
    num_tokens: np.ndarray  # (n,) int64
    num_overlong: int  # too long: cut, or left out
    num_bad: int  # rows that cannot be used and were left out (on_bad_row="skip")
    num_escaped: int  # rows whose text names control tokens, which were made ordinary text
    num_illustrated: int  # rows with images
    # by name, rows that hold something which the chat template does not write (data/left_out.py)
    left_out: Mapping[str, int]
    image_tokens: float = 0.0  # of a row, those of its images and videos, as a mean


class Size(NamedTuple):
    """Holds the size of a row."""

    tokens: int  # or NO_ROOM
    escaped: bool  # whether its text names control tokens, which were made ordinary text
    image_tokens: int = 0  # of its images and videos; 0: it has none
    blind: bool = False  # whether it says where an image stands, and has none
    left_out: frozenset[str] = frozenset()  # names of what it holds and its text does not


def measure(
    files: Files,
    size: Callable[[dict[str, Any], Path], Size],
    topology: Topology,
    longest: int,
    on_bad_row: str,
) -> Measured:
    """size: of a row and the folder that its file is in; raises BadRow.

    longest: tokens of a row; one with more is overlong. A collective; ConfigError on every rank for
    a bad row.
    """
    counts = np.zeros(4)  # of this rank's rows: escaped, illustrated, blind; tokens of images
    missing: Counter[str] = Counter()

    def length(row: dict[str, Any], path: Path) -> int:
        nonlocal counts
        found = size(row, path.parent)
        counts += found.escaped, found.image_tokens > 0, found.blind, found.image_tokens
        missing.update(found.left_out)
        return found.tokens

    lengths = measure_rows(files, length, topology, on_bad_row)
    everyone = torch.from_numpy(counts)
    dist.all_reduce(everyone, group=topology.group)
    num_escaped, num_illustrated, num_blind, image_tokens = map(round, everyone.tolist())
    report_escaped(num_escaped, len(files), topology)
    report_blind(num_blind, len(files), topology)
    left_out = sum_by_name(gather_to_all(missing, topology.control))
    report_left_out(left_out, len(files), topology)
    rows = np.flatnonzero((lengths != BAD_ROW) & (lengths != NO_ROOM))
    return Measured(
        rows, lengths[rows], int((lengths > longest).sum()), int((lengths == BAD_ROW).sum()),
        num_escaped, num_illustrated, left_out, image_tokens / max(len(files), 1),
    )  # fmt: skip


def report_overlong(
    files: Files, measured: Measured, max_tokens: int, what: tuple[str, str], topology: Topology
) -> None:
    """Says how many rows are left out for their length. Raises ConfigError where all are.

    what: a row is, and what in it is too long, such as ("pair", "a conversation").
    """
    usable, (noun, part) = len(files) - measured.num_bad, what
    if len(measured.rows) == 0:
        raise ConfigError(
            f"{files.names}: all {counted(usable, noun)} {verb(usable, 'have')} {part} of more "
            f"than max_tokens={max_tokens} tokens. Raise max_tokens."
        )
    left_out = usable - len(measured.rows)
    if left_out and topology.rank == 0:
        logger.info(
            "%d of %s %s %s of more than max_tokens=%d tokens and %s left out",
            *(left_out, counted(len(files), noun), verb(left_out, "have"), part, max_tokens),
            verb(left_out, "were"),
        )
