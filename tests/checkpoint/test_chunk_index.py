"""The index of a sharded state: any part of any cut is found, and little is read for it."""

from __future__ import annotations

import io
import pickle
import time
import tracemalloc
import zlib
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from spmdrl.checkpoint import chunk_index
from spmdrl.checkpoint.chunk_index import (
    StoredPart,
    decode,
    encode,
    read_index,
    wanted_boxes,
    write_index,
)
from spmdrl.checkpoint.safe_load import ShardReader, _Unpickler
from spmdrl.config import ConfigError

NAMES = [("count", None, None), ("scale", "float32", []), ("weight", "bfloat16", [10, 6])]
ROWS_OF = ((0, 4), (4, 7), (7, 10))  # of "weight", on three ranks


def write_three(folder):
    """The file of a rank has its rows of `weight`; rank 0's the others as well."""
    tables = []
    for rank, (first, end) in enumerate(ROWS_OF):
        parts = [StoredPart("weight", ((first, 0), (end - first, 6)), 100 * rank, 50)]
        if rank == 0:
            parts += [StoredPart("count", ((), ()), 7, 9), StoredPart("scale", ((), ()), 20, 30)]
        tables.append(encode(parts, NAMES))
    write_index(folder, NAMES, tables)


def found_in(metadata, name):
    return {
        tuple(index.offset): (info.relative_path, info.offset, info.length)
        for index, info in metadata.storage_data.items()
        if index.fqn == name and index.offset is not None
    }


def test_all_of_it_is_what_was_written(tmp_path):
    write_three(tmp_path)
    found = read_index(tmp_path)
    weight = found.state_dict_metadata["weight"]
    assert weight.size == (10, 6) and weight.properties.dtype == torch.bfloat16
    assert [tuple(chunk.offsets) for chunk in weight.chunks] == [(0, 0), (4, 0), (7, 0)]
    assert [tuple(chunk.sizes) for chunk in weight.chunks] == [(4, 6), (3, 6), (3, 6)]
    assert found_in(found, "weight") == {
        (0, 0): ("__0_0.distcp", 0, 50), (4, 0): ("__1_0.distcp", 100, 50),
        (7, 0): ("__2_0.distcp", 200, 50),
    }  # fmt: skip
    assert found_in(found, "scale") == {(): ("__0_0.distcp", 20, 30)}
    assert len(found.storage_data) == 5


@pytest.mark.parametrize(
    ("start", "size", "rows"),
    [((4, 0), (3, 6), [4]), ((3, 2), (2, 1), [0, 4]), ((0, 0), (10, 6), [0, 4, 7]),
     ((10, 0), (0, 6), [])],
)  # fmt: skip
@pytest.mark.parametrize("rank", [None, 1, 5])
def test_what_overlaps_is_found_whoever_asks(tmp_path, start, size, rows, rank):
    write_three(tmp_path)
    found = read_index(tmp_path, {"weight": (start, size)}, rank)
    assert sorted(first for first, _ in found_in(found, "weight")) == rows
    assert not found_in(found, "scale")
    assert found.state_dict_metadata.keys() == {"count", "scale", "weight"}


def test_a_rank_with_the_same_cut_reads_its_own_table_and_the_first(tmp_path, monkeypatch):
    """The first has what is no tensor."""
    write_three(tmp_path)
    tables = []
    monkeypatch.setattr(
        chunk_index, "decode", lambda table, boxes: tables.append(table) or decode(table, boxes)
    )
    found = read_index(tmp_path, {"weight": ((4, 0), (3, 6))}, 1)
    assert len(tables) == 2 and len(found.storage_data) == 2
    tables.clear()
    read_index(tmp_path, {"weight": ((4, 0), (4, 6))}, 1)
    assert len(tables) == 3


def test_missing_parts_and_numbers_without_a_name_are_refused(tmp_path):
    rest = [StoredPart("count", ((), ()), 7, 9), StoredPart("scale", ((), ()), 20, 30)]
    weight = StoredPart("weight", ((0, 0), (9, 6)), 0, 50)
    write_index(tmp_path, NAMES, [encode([weight, *rest], NAMES)])
    for wanted in (None, {"weight": ((8, 0), (2, 6))}):
        with pytest.raises(ValueError, match="parts of tensors are missing"):
            read_index(tmp_path, wanted, 0)
    assert len(read_index(tmp_path, {"weight": ((0, 0), (9, 6))}, 0).storage_data) == 2
    for number in (-1, 3):
        table = decode(encode(rest, NAMES), wanted_boxes(NAMES, None)).copy()
        table[0, 0] = number
        write_index(tmp_path, NAMES, [zlib.compress(table.T.astype("<i8").tobytes())])
        with pytest.raises(ValueError, match="does not name"):
            read_index(tmp_path)


def test_a_thousand_ranks_are_read_in_a_second_and_100_mb(tmp_path):
    """720 tensors of a 70B model and two moments of each, cut over 1,024 ranks: 2.2 million parts.
    All tables are read only where the cut is another: here that of 745 ranks."""
    names = [(f"model.layers.{i}.weight", "float32", [8192, 8192]) for i in range(2160)]
    parts = [
        StoredPart(name, ((0, 0), (8, 8192)), 300_000 * i, 263_000)
        for i, (name, _, _) in enumerate(names)
    ]
    rows, tables = decode(encode(parts, names), wanted_boxes(names, None)).copy(), []
    for rank in range(1024):  # as encode would, which takes half a minute for all
        rows[:, 3] = 8 * rank
        tables.append(zlib.compress(rows.T.tobytes(), level=1))
    write_index(tmp_path, names, tables)
    assert sum(map(len, tables)) < 50e6

    own = {name: ((8 * 700, 0), (8, 8192)) for name, _, _ in names}
    other = {name: ((11 * 700, 0), (11, 8192)) for name, _, _ in names}
    for wanted, limit_s, num_parts in ((own, 1.0, 2160), (other, 4.0, 2 * 2160)):
        tracemalloc.start()
        began = time.process_time()
        found = read_index(tmp_path, wanted, 700)
        took_s = time.process_time() - began
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(found.storage_data) == num_parts
        assert took_s < limit_s, took_s
        assert peak < 100e6, peak


@pytest.mark.parametrize("path", ["../outside.distcp", "..", "", "a/b.distcp"])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, path):
    metadata = Metadata({}, storage_data={MetadataIndex("a"): _StorageInfo(path, 0, 1)})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="outside its folder"):
        ShardReader(str(tmp_path)).read_metadata()


def test_an_index_changes_no_class_of_paths():
    """A pickle may set attributes of what it names: here the name of all paths."""
    sets_name = b"cpathlib\nPosixPath\nN}X\x04\x00\x00\x00nameX\x01\x00\x00\x00xs\x86b."
    with pytest.raises((TypeError, AttributeError, pickle.UnpicklingError)):
        _Unpickler(io.BytesIO(b"\x80\x02" + sets_name)).load()
    assert isinstance(PosixPath.name, property) and PosixPath("/a/b").name == "b"
