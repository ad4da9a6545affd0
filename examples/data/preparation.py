"""What the scripts of this folder share: the command line, reading a data set, writing Parquet.

A script says how one published row becomes one of verl's schema; `main` does the rest. The source
is a folder or file here, or a name on a hub (docs/hubs.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from spmdrl.cli.hub_names import HubName, data_name
from spmdrl.config import ConfigError
from spmdrl.data.benchmarks import files_of_split, only_file
from spmdrl.data.table_files import BadRow, Files
from spmdrl.hub.download import fetch_data

Row = dict[str, Any]


def verl_row(source: str, prompt: str, truth: Any, **extra: Any) -> Row:
    """Returns a row of verl's schema. source: the data_source, by which rewards are chosen."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **({"extra_info": extra} if extra else {}),  # Parquet has no mapping without a key
    }


def main(
    about: str, source: str, config: str, splits: Sequence[str], columns: Sequence[str],
    convert: Callable[[Row], Row | None], also: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> Path:  # fmt: skip
    """Reads the command line, and writes OUT/<split>.parquet for every split that the source has.
    Returns OUT.

    source, config: the default, on the Hugging Face Hub. columns: what every row must have; also:
    what is read besides, where it is there. convert: returns None for a row that is to be left out,
    and raises ValueError for a bad one. arguments: in place of the command line.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    told = f"folder or file with the published rows, or a name on a hub; default {source}"
    parser.add_argument("--source", default=source, help=told)
    parser.add_argument("--config", default=config, help="of a data set on a hub, or a subfolder")
    parser.add_argument("--out", type=Path, required=True, help="folder for the .parquet files")
    args = parser.parse_args(arguments)
    if Path(args.source).is_dir() and args.out.resolve().is_relative_to(
        Path(args.source).resolve()
    ):
        sys.exit(f"error: --out {args.out} lies in --source, of which it would become a part")
    try:
        files = files_of(args.source, args.config, splits)
        rows = {split: converted(paths, columns, convert, also) for split, paths in files.items()}
    except (ConfigError, ValueError) as error:
        sys.exit(f"error: {error}")
    for split, found in rows.items():
        write(args.out / f"{split}.parquet", found)
    return args.out


def files_of(source: str, config: str, splits: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns the files of each split. Raises ConfigError, ValueError where there are none."""
    path = Path(source)
    if path.is_file():
        return named(path, splits)
    if path.is_dir():
        found = {split: tuple(map(str, files_of_split(path, config, split))) for split in splits}
        if not any(found.values()) and (only := only_file(path, config)):
            return named(only, splits)
        if not any(found.values()):
            raise ValueError(
                f"{source} has no .parquet or .jsonl files of the splits {', '.join(splits)}: "
                "expected train.jsonl, train-00000-of-00001.parquet, or a folder with such a name"
            )
        return {split: paths for split, paths in found.items() if paths}
    name = data_name("--source", source)
    if name is None:
        raise ValueError(f"--source {source}: no such folder or file, and no name on a hub")
    if name.split or name.files:  # one split
        return {name.split or splits[0]: fetch_data(name, name.split)}
    names = {split: HubName("dataset", name.repo, name.revision, "", config, split,
                            name.on_modelscope) for split in splits}  # fmt: skip
    return {split: fetch_data(named, split) for split, named in names.items()}


def named(path: Path, splits: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Returns a data set's only file, by the split that its name has in it, or else the first."""
    return {next((s for s in splits if s in path.stem), splits[0]): (str(path),)}


def converted(
    paths: Sequence[str],
    columns: Sequence[str],
    convert: Callable[[Row], Row | None],
    also: Sequence[str] = (),
) -> list[Row]:
    """Raises ValueError that names the file and the row."""
    files, found = Files.open(tuple(paths), (*columns, *also)), []
    for number in range(len(files)):
        try:
            given = files.row(number)
            missing = [name for name in columns if given.get(name) is None]
            if missing:
                raise ValueError(
                    f"expected the columns {', '.join(columns)}; {', '.join(missing)} is missing"
                )
            row = convert(given)
        except (BadRow, ValueError) as error:
            raise ValueError(f"{files.where(number)}: {error}") from error
        found += [] if row is None else [row]
    return found


def write(path: Path, rows: Iterable[Row]) -> None:
    table = pa.Table.from_pylist(list(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path)
    print(f"{path}: {table.num_rows} rows")
