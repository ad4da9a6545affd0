"""Reading what may come from elsewhere without running what is in it.

A pickle may name any function, and unpickling calls it. torch.load(weights_only=True) admits
tensors and plain values only; torch.distributed.checkpoint does without it in two places, its
metadata and what is not a tensor, which are read here.
"""

from __future__ import annotations

import io
import pickle
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from spmdrl.checkpoint.chunk_index import INDEX, Box, read_index
from spmdrl.config import ConfigError
from spmdrl.distributed.collectives import first_of
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import CHECKPOINT_INDEX_NAMES

_METADATA = (
    "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
    "TensorProperties", "TensorStorageMetadata",
)  # fmt: skip
# megatron-core's own dist_checkpointing.save keeps in its index who wrote which tensor.
_PLANS = ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
# What the metadata of torch.distributed.checkpoint is made of: data without behaviour.
ADMITTED = {
    *(("torch.distributed.checkpoint.metadata", name) for name in _METADATA),
    *(("torch.distributed.checkpoint.planner", name) for name in _PLANS),
    *CHECKPOINT_INDEX_NAMES,
    ("torch", "Size"),
    ("pathlib", "Path"), ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
}  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Admits what ADMITTED names, and torch's dtypes."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        if module.startswith("pathlib"):  # no class whose attributes a pickle could set
            return partial(PurePosixPath)
        return super().find_class(module, name)


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raises ConfigError where the file holds more than data, or is none of torch's."""
    try:
        yield
    except (pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().splitlines()
        named = [line for line in reason if "GLOBAL" in line or "names" in line]
        why = (named or reason or ["it ends too early"])[0]
        raise ConfigError(
            f"{path} is not read: stored weights and states are tensors and plain values only, and "
            f"this could run code ({why.strip()})"
        ) from error


def read_plain(path: Path) -> Any:
    """Reads what torch.save wrote: tensors, numbers, strings and containers of them. Raises
    ConfigError for anything else.
    """
    with refused(path):
        return torch.load(path, weights_only=True, map_location="cpu")


class ShardReader(FileSystemReader):
    """torch.distributed.checkpoint's reader, which would unpickle whatever stands there.

    It knows two kinds of index: chunk_index.py, which it reads once, and torch's own.
    """

    def __init__(
        self, path: str, wanted: Mapping[str, Box] | None = None, rank: int | None = None
    ) -> None:
        """wanted and rank: see chunk_index.read_index."""
        super().__init__(path)
        self.wanted, self.own = wanted, rank
        self.index: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path, INDEX)
        if not path.exists():
            return self._read_torchs_index()
        if self.index is None:
            try:
                self.index = read_index(Path(self.path), self.wanted, self.own)
            except (
                ValueError, KeyError, IndexError, AttributeError, TypeError, zipfile.BadZipFile,
                zlib.error,
            ) as error:  # fmt: skip
                raise ConfigError(f"{path} is not read: it is no index ({error})") from error
        return self.index

    def _read_torchs_index(self) -> Metadata:
        path = Path(self.path, ".metadata")
        with path.open("rb") as file, refused(path):
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise ConfigError(f"{path} holds a {type(metadata).__name__}, not a checkpoint's index")
        for info in (metadata.storage_data or {}).values():
            name = info.relative_path
            if not isinstance(name, str) or "/" in name or name in ("", ".."):
                raise ConfigError(f"{path} names a file outside its folder: {info.relative_path}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """First what is no tensor: planners unpickle it, so they are given plain values only."""
        for item in [item for item in plan.items if item.type == LoadItemType.BYTE_IO]:
            planner.load_bytes(item, self._plain_bytes(self.storage_data[item.storage_index]))
        rest = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        return super().read_data(LoadPlan(rest, plan.storage_data, plan.planner_data), planner)

    def _plain_bytes(self, info: Any) -> io.BytesIO:
        """Returns what stands there, read as plain values and written anew."""
        path = Path(self.path, info.relative_path)
        with path.open("rb") as file, refused(path):
            file.seek(info.offset)
            content = io.BytesIO(file.read(info.length))
            value = torch.load(content, weights_only=True, map_location="cpu")
        written = io.BytesIO()
        torch.save(value, written)
        written.seek(0)
        return written


def load_parts(state: dict[str, Any], reader: ShardReader, topology: Topology) -> None:
    """Fills the tensors of `state` in place, as dcp.load does, but without plans that one rank
    gathers: each rank knows what it reads. Collective over the topology.

    Raises CheckpointException on all ranks where one of them fails.
    """
    failure: BaseException | None = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it loads in a single process
        try:
            dcp.load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            [(failure, _)] = error.failures.values()
    found = first_of(failure, topology)
    if found is not None:
        rank, cause = found
        trace = traceback.extract_tb(cause.__traceback__)
        raise CheckpointException("load", {rank: (cause, trace)})
