"""Rows that are learnt from as they stand: those of fine-tuning and of preferences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmdrl.collectives import sum_over_ranks
from spmdrl.data import report_escaped
from spmdrl.files import BAD_ROW, BadRow, Files, measure_rows
from spmdrl.topology import Topology
from spmdrl.types import Batch

IMAGES = "images"  # a column that must not be passed over in silence
NO_ROOM = 2**62  # a length that no row has: of one that is left out for its length


class Rows(Protocol):
    """The usable rows of some files, the same on every rank."""

    measured: Measured

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> Batch:
        """Those rows, in this order, without loss_weights; what is learnt from is unmasked."""
        ...

    def shown(self) -> list[str]:
        """The first row, for --dry-run: a line for each of its parts."""
        ...


@dataclass(frozen=True)
class Measured:
    """What a pass over all rows of the files found."""

    rows: np.ndarray  # (n,) int64, numbers of the usable rows over all files
    num_tokens: np.ndarray  # (n,) int64
    num_overlong: int  # too long: cut, or left out
    num_bad: int  # rows that cannot be used and were left out (on_bad_row="skip")
    num_escaped: int  # rows whose text names control tokens, which were made ordinary text


def measure(
    files: Files,
    size: Callable[[dict[str, Any]], tuple[int, bool]],
    topology: Topology,
    longest: int,
    on_bad_row: str,
) -> Measured:
    """size: (tokens of a row, or NO_ROOM, and whether any of its text was escaped); raises BadRow.

    longest: tokens of a row; one with more is overlong. A collective; ConfigError on every rank for
    a bad row.
    """
    escaped = 0

    def length(row: dict[str, Any], path: Path) -> int:
        nonlocal escaped
        if row.get(IMAGES):
            raise BadRow(f"field '{IMAGES}': only spmdrl.ppo and spmdrl.evaluate see images")
        tokens, has_escaped = size(row)
        escaped += has_escaped
        return tokens

    lengths = measure_rows(files, length, topology, on_bad_row)
    num_escaped = round(sum_over_ranks(float(escaped), topology))
    report_escaped(num_escaped, len(files), topology)
    rows = np.flatnonzero((lengths != BAD_ROW) & (lengths != NO_ROOM))
    return Measured(
        rows, lengths[rows], int((lengths > longest).sum()), int((lengths == BAD_ROW).sum()),
        num_escaped,
    )  # fmt: skip
