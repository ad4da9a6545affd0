"""Rows of Parquet and JSONL files, kept in Arrow; a row becomes Python objects when asked for.

Every row is checked at load, which is split over the ranks, and a bad row raises the same
ConfigError on all of them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spmdrl.cli.paths import check_data_file
from spmdrl.config import ConfigError
from spmdrl.config.words import counted, verb
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import all_gather_rows
from spmdrl.distributed.topology import Topology

T = TypeVar("T")
Length = Callable[[dict[str, Any], Path], int]  # of a row of a file
Convert = Callable[[dict[str, Any]], dict[str, Any]]  # of a published row; raises ValueError

logger = logging.getLogger(__name__)

CHUNK_ROWS = 1024  # rows that are Python objects at the same time while a file is checked
SHOWN_BAD_ROWS = 3  # of those that were left out
MISSING = object()
CALLS = ("tool_calls", "function_call")  # keys of a turn: what it says besides its content
BAD_ROW = -1  # stands for a length where a row cannot be used


class BadRow(ValueError):
    """One row is wrong; whoever knows the file and the row number makes a ConfigError of it."""


@dataclass(frozen=True)
class DataFile:
    """One file in Arrow. Parquet: the columns that are read. JSONL: `line` and `number`."""

    path: Path
    table: pa.Table
    is_json: bool
    convert: Convert | None = None

    def decode(self, raw: dict[str, Any] | BadRow) -> dict[str, Any]:
        """The row as a mapping of columns; raises BadRow where a line is not a JSON object, or is
        no row that can be converted.
        """
        if isinstance(raw, BadRow):
            raise raw
        row = parse_line(raw["line"]) if self.is_json else raw
        try:
            return row if self.convert is None else self.convert(row)
        except ValueError as error:
            raise BadRow(str(error)) from error

    def where(self, row: int) -> str:
        if self.is_json:
            return f"{self.path}, line {self.table['number'][row].as_py()}"
        return f"{self.path}, row {row} (counted from 0)"


class Files:
    """Several data files, their rows numbered through."""

    def __init__(self, files: list[DataFile]) -> None:
        self.files = files
        self.starts = np.cumsum([0, *(file.table.num_rows for file in files)])  # (num_files + 1,)

    @classmethod
    def open(
        cls, paths: str | tuple[str, ...], columns: tuple[str, ...], hint: str = "",
        convert: Convert | None = None, needed: tuple[str, ...] = (),
    ) -> Files:  # fmt: skip
        """Reads `columns` (those that exist). Raises ConfigError for what cannot be read.

        hint: what to do where a file has none of them, or none of those `needed`. convert: makes
        the rows that are given out.
        """
        paths = (paths,) if isinstance(paths, str) else tuple(paths)
        if not paths:
            raise ConfigError("no data file is given: set data.train to one path or several")
        return cls([open_file(Path(path), columns, hint, convert, needed) for path in paths])

    @property
    def names(self) -> str:
        return ", ".join(str(file.path) for file in self.files)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def locate(self, row: int) -> tuple[DataFile, int]:
        index = int(np.searchsorted(self.starts, row, side="right")) - 1
        return self.files[index], row - int(self.starts[index])

    def where(self, row: int) -> str:
        file, local = self.locate(row)
        return file.where(local)

    def row(self, row: int) -> dict[str, Any]:
        """The columns of one row. Raises BadRow."""
        file, local = self.locate(row)
        return file.decode(as_rows(file.table.slice(local, 1))[0])

    def share(self, rank: int, world: int) -> Iterator[tuple[DataFile, dict[str, Any] | BadRow]]:
        """Rows rank::world in order, undecoded; a chunk of them at a time is Python objects."""
        for file, start in zip(self.files, self.starts, strict=False):
            for batch in file.table.to_batches(max_chunksize=CHUNK_ROWS):
                picks = np.arange((rank - start) % world, batch.num_rows, world)
                start += batch.num_rows
                yield from ((file, raw) for raw in rows_at(batch, picks))


def columns_at(*keys: str) -> tuple[str, ...]:
    """The columns that `lookup` may find these keys in."""
    return tuple(dict.fromkeys(name for key in keys for name in (key, key.split(".")[0])))


def open_file(
    path: Path, columns: tuple[str, ...], hint: str, convert: Convert | None,
    needed: tuple[str, ...],
) -> DataFile:  # fmt: skip
    check_data_file(path)
    is_json = path.suffix == ".jsonl"
    try:
        table = read_lines(path) if is_json else read_parquet(path, columns, hint, needed)
    except (OSError, ValueError) as error:  # of ConfigErrors, only the text
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"data file '{path}' cannot be read: {error}") from error
    if table.num_rows == 0:
        raise ConfigError(f"data file '{path}' has no rows")
    return DataFile(path, table, is_json, convert)


def read_parquet(
    path: Path, columns: tuple[str, ...], hint: str = "", needed: tuple[str, ...] = ()
) -> pa.Table:
    try:
        with pq.ParquetFile(path) as file:
            found = [name for name in file.schema_arrow.names if name in columns]
            twice = sorted({name for name in found if found.count(name) > 1})
            if twice:
                raise ConfigError(f"data file '{path}' has two columns named {', '.join(twice)}")
            needed = needed or columns
            if not {*found} & {*needed} and file.metadata.num_rows:
                raise ConfigError(
                    f"data file '{path}' has none of the columns {', '.join(needed)}; "
                    f"it has {', '.join(file.schema_arrow.names)}{hint and f'. {hint}'}"
                )
            return file.read(columns=found)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data file '{path}' cannot be read as Parquet: {error}") from error


def as_rows(rows: pa.Table | pa.RecordBatch) -> list[dict[str, Any] | BadRow]:
    """Python objects of all rows; in place of one that Arrow cannot make into them, the reason."""
    try:
        return rows.to_pylist()
    # ValueError: text that is not UTF-8, fields of the same name, times that Python has no type for
    except (pa.ArrowException, ValueError, ArithmeticError, LookupError) as error:
        if rows.num_rows == 1:
            return [BadRow(f"cannot be read: {error}")]
        return [row for i in range(rows.num_rows) for row in as_rows(rows.slice(i, 1))]


def rows_at(batch: pa.RecordBatch, picks: np.ndarray) -> list[dict[str, Any] | BadRow]:
    """Returns those rows as `as_rows` does."""
    try:
        return as_rows(batch.take(pa.array(picks)))
    except pa.ArrowNotImplementedError:  # of string_view, list_view and the like it takes none
        return [row for i in picks.tolist() for row in as_rows(batch.slice(i, 1))]


def parse_line(line: bytes) -> dict[str, Any]:
    """Raises BadRow unless it is a JSON object whose text is Unicode and whose keys differ."""
    try:
        row = json.loads(line.decode("utf-8-sig"), object_pairs_hook=without_duplicates)
        if b"\\ud" in line.lower():  # half of a surrogate pair is valid JSON, but no text
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise BadRow(f"not valid JSON: {error.msg}, column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise BadRow(f"not valid UTF-8: {error}") from error
    except UnicodeEncodeError as error:
        raise BadRow(f"not valid Unicode: {error}") from error
    except RecursionError as error:
        raise BadRow("not valid JSON: nested too deeply") from error
    except BadRow:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise BadRow(f"not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"a JSON {describe(row)}, expected an object {{column: value}}")
    return row


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise BadRow(f"not valid JSON: the key '{twice[:60]}' stands in one object twice")
    return row


# What files start with that are no text in UTF-8.
FOREIGN = {
    b"\xff\xfe": "text in UTF-16", b"\xfe\xff": "text in UTF-16", b"\x1f\x8b": "compressed by gzip",
    b"\x28\xb5\x2f\xfd": "compressed by zstd", b"BZh": "compressed by bzip2",
    b"PK": "a zip archive",
    b"PAR1": "Parquet (name it *.parquet)",
}  # fmt: skip


def read_lines(path: Path) -> pa.Table:
    """The lines of a JSONL file, unparsed, with their numbers from 1; blank ones are skipped."""
    schema = pa.schema({"line": pa.large_binary(), "number": pa.int64()})
    batches, lines, numbers = [], [], []
    with path.open("rb") as file:
        for start, what in FOREIGN.items():
            if file.peek(4).startswith(start):
                raise ConfigError(
                    f"data file '{path}' is {what}; expected lines of JSON in UTF-8, uncompressed"
                )
        for number, line in enumerate(file, start=1):
            if line.strip():
                lines.append(line)
                numbers.append(number)
            if len(lines) == CHUNK_ROWS:
                batches.append(pa.record_batch([lines, numbers], schema))
                lines, numbers = [], []
    batches.append(pa.record_batch([lines, numbers], schema))
    return pa.Table.from_batches(batches)


def measure_rows(
    files: Files, length: Length, topology: Topology, on_bad_row: str
) -> np.ndarray:  # fmt: skip
    """Calls `length` on every row, split over the ranks: -> (num_rows,) int64, the same everywhere.

    Rows in which it raised BadRow are a ConfigError that names the lowest one; on every rank,
    because each then calls it on that row itself. on_bad_row "skip": they are reported, and have
    BAD_ROW for a length, as long as another row is left.
    """

    def measure_share() -> list[int]:
        return [
            measure_row(file, raw, length)
            for file, raw in files.share(topology.rank, topology.world)
        ]

    own = torch.tensor(load_together(topology, measure_share), dtype=torch.int64)
    lengths = np.empty(len(files), dtype=np.int64)
    for rank, part in enumerate(all_gather_rows(own, topology)):
        lengths[rank :: topology.world] = part.numpy()
    bad = np.flatnonzero(lengths == BAD_ROW)
    if len(bad) == 0:
        return lengths
    reasons = [reason_of(files, int(row), length) for row in bad[:SHOWN_BAD_ROWS]]
    more = f" ({len(bad)} of {len(files)} rows are bad)" if len(bad) > 1 else ""
    if on_bad_row == "error":
        raise ConfigError(reasons[0] + more)
    if len(bad) == len(files):
        raise ConfigError(f"{reasons[0]}{more}, so none is left")
    if topology.rank == 0:
        logger.warning(
            "%d of %s %s bad and %s left out; the first: %s",
            *(len(bad), counted(len(files), "row"), verb(len(bad), "are"), verb(len(bad), "were")),
            "; ".join(reasons),
        )
    return lengths


def reason_of(files: Files, row: int, length: Length) -> str:
    """Says what is wrong with a bad row, and where it stands."""
    try:
        length(files.row(row), files.locate(row)[0].path)
    except BadRow as error:
        return f"{files.where(row)}: {error}"
    return f"{files.where(row)} differs between ranks' copies of the file"


def measure_row(file: DataFile, raw: dict[str, Any] | BadRow, length: Length) -> int:
    try:
        return length(file.decode(raw), file.path)
    except BadRow:
        return BAD_ROW


def load_together(topology: Topology, work: Callable[[], T]) -> T:
    """Runs `work`, which holds no collective, on every rank; a failure on any is one on all.

    A ConfigError becomes a ConfigError on all ranks, anything else a RuntimeError that names the
    rank, so that no rank is left alone in the collective that follows.
    """
    failure: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001  raised again on every rank below
        failure = error
    wrong = isinstance(failure, ConfigError)
    mine = None if failure is None else (wrong, str(failure) if wrong else repr(failure))
    problems = gather_to_all(mine, topology.control)
    failed = [rank for rank, problem in enumerate(problems) if problem is not None]
    if not failed:
        return result
    some = "" if len(failed) == topology.world else f" (on ranks {failed} of {topology.world})"
    wrong, text = problems[failed[0]]
    if wrong:
        raise ConfigError(text + some) from failure
    raise RuntimeError(f"rank {failed[0]} cannot read the data: {text}{some}") from failure


def lookup(row: dict[str, Any], key: str) -> Any:
    """The value at a dotted key, or MISSING. A column whose name has the dots in it wins."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = value[part]
    return value


def without_nulls(turn: dict[str, Any]) -> dict[str, Any]:
    """A chat turn as it was written: Arrow gives every turn the keys of all others, with null.

    So it does with the arguments of calls. A turn that calls tools and has no content says nothing
    besides: its content is "".
    """
    written = {key: value for key, value in turn.items() if value is not None}
    for key in CALLS:
        if key in written:
            written[key] = all_without_nulls(written[key])
    written.setdefault("content", "")
    return written


def all_without_nulls(value: Any) -> Any:
    """Keeps, of mappings at any depth, the keys that have a value."""
    if isinstance(value, dict):
        return {key: all_without_nulls(v) for key, v in value.items() if v is not None}
    return [all_without_nulls(item) for item in value] if isinstance(value, list) else value


def bad_field(field: str, found: Any, expected: str, row: dict[str, Any] | None = None) -> BadRow:
    fields = "" if row is None else f"; the row has {', '.join(row)}"
    shown = f"missing{fields}" if found is MISSING else f"found {describe(found)}"
    return BadRow(f"field '{field}': {shown}, expected {expected}")


def describe(value: Any) -> str:
    if value is None:
        return "null"
    # of a long text its start is enough, and repr() of all of it would take as much memory again
    text = repr(value[:60]) if isinstance(value, str | bytes | list) else repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
