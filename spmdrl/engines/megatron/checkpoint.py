"""Checkpoints of the Megatron engine, in megatron-core's dist_checkpointing format "torch_dist".

Weights and optimizer are stored by global names and whole shapes, so that a checkpoint loads in
another tensor, pipeline and data parallel layout. megatron-core reads what is written here, and
what its own `dist_checkpointing.save` wrote of the same state is read here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from spmdrl.checkpoint.safe_load import ShardReader, read_plain
from spmdrl.config import ConfigError, TrainConfig
from spmdrl.distributed.collectives import together
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines import host_copies as staging
from spmdrl.engines.host_copies import HostCopies, StagedShards
from spmdrl.engines.megatron import compat
from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.hf_mapping import HfSlice, pieces
from spmdrl.engines.megatron.layout import Degrees
from spmdrl.engines.megatron.model import build_chunks, transformer_config
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.engines.megatron.parts import Parts, parallel_sizes, set_hyperparameters
from spmdrl.engines.stored_tensors import StoredTensors, WeightSource
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.weights.boxes import view, whole

COMMON = "common.pt"
MARK = "metadata.json"  # what megatron-core writes last, and FSDP2's checkpoints do not have
BACKEND, VERSION = "torch_dist", 1


@dataclass
class StagedModel:
    """A copy of what megatron_core.dist_checkpointing.save would write, part by part."""

    shards: StagedShards  # with common.pt among its notes

    def write(self, folder: Path, group: dist.ProcessGroup) -> None:
        self.shards.write(folder, group)
        is_first = group.rank() == 0
        together(group, lambda: compat.write_format(folder, BACKEND, VERSION) if is_first else None)


def stage(
    parts: Parts, num_updates: int, topology: Topology, copies: HostCopies | None
) -> StagedModel:
    """Collective over the role; to be called while parts.state is active.

    megatron-core's own saving is done in steps, because its asynchronous form starts processes that
    import the main program anew, and ends in a barrier of the job's own group. copies: see
    staging.stage.
    """
    metadata = layout_metadata()
    kept = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    common = {"num_updates": num_updates, "dtype": str(parts.config.params_dtype)}
    state = {**common, "content_metadata": kept}
    state |= sharded_state(parts, metadata, is_loading=False)
    ready, planner, common = compat.split_state(state)
    shards = staging.stage(ready, planner, topology.rank == 0, copies)
    shards.notes[COMMON] = saved_bytes(common)
    return StagedModel(shards)


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(parts: Parts, folder: Path) -> int:
    """Loads in place; returns the number of updates. Raises ConfigError for FSDP2's checkpoints."""
    from megatron.core import dist_checkpointing

    if not Path(folder, MARK).is_file():
        raise ConfigError(
            f"{folder} was written by engine fsdp. Export it (python -m spmdrl.export) and start a "
            "run from that model, or resume with the engine that wrote it"
        )
    stored = read_common(folder).get("content_metadata") or {}
    wanted = {"num_updates": 0, **sharded_state(parts, layout_metadata() | stored, is_loading=True)}
    ShardReader(str(folder)).read_metadata()  # raises, where megatron-core would wrap it up
    with reading_plain():
        state = dist_checkpointing.load(wanted, str(folder))
    for name, chunk in named_chunks(parts):
        chunk.load_state_dict(state[name])
    if parts.optimizer is not None:
        parts.optimizer.load_state_dict(state["optimizer"])
        if parts.optim is not None:
            set_hyperparameters(parts.optimizer, parts.optim)
    return state["num_updates"]


def read_common(folder: Path) -> dict[str, Any]:
    """Reads what is stored for all ranks. Raises ConfigError for another program's checkpoint."""
    common = read_plain(Path(folder, COMMON))
    if "num_updates" not in common:
        raise ConfigError(
            f"{folder} is a Megatron checkpoint that another program wrote. Write its weights as a "
            "Hugging Face folder (save_hf_weights, docs/embedding.md) and start from that model"
        )
    return common


def weight_sources(folder: Path, hf_folder: Path) -> list[WeightSource]:
    """The weights of a policy, to be read one parameter at a time, whatever its layout was.

    The float32 weights of the optimizer are read: what was learnt is often less than the last bit
    of a bfloat16. A model without memory, which nothing cuts, says where each one lies.
    """
    common, stored = read_common(folder), StoredTensors(folder)
    hf_config = load_hf_config(str(hf_folder))
    mcore_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        topology = Topology.build(
            torch.device("cpu"), **train_degrees(TrainConfig(engine="megatron"))
        )
        state = RoleState.build(topology, **parallel_sizes(Degrees()))
        with state.active(), mcore_cpu.without_memory():
            mega = transformer_config(hf_config, Degrees(), torch.float32)
            (chunk,) = build_chunks(hf_config, mega, "policy")
            entries = chunk.sharded_state_dict(
                metadata=layout_metadata() | (common.get("content_metadata") or {})
            )
            return [
                weight_source(stored, entries[name], held)
                for name, _, held in pieces(chunk, hf_config)
            ]
    finally:
        dist.destroy_process_group()


def weight_source(stored: StoredTensors, entry: Any, held: list[HfSlice]) -> WeightSource:
    """entry: of a parameter in sharded_state_dict. held: what lies in it, all of each tensor."""
    shapes = {piece.name: piece.shape for piece in held if not piece.tied}

    def read() -> Iterator[tuple[str, Tensor]]:
        parameter = compat.filled(entry, partial(read_sharded, stored))
        for name, shape in shapes.items():
            tensor = torch.empty(shape, dtype=parameter.dtype)
            for piece in held:
                if piece.name == name:
                    view(tensor, whole(shape), piece.box).copy_(piece.view(parameter))
            yield name, tensor

    return WeightSource(shapes, read)


def read_sharded(stored: StoredTensors, shard: Any) -> Tensor:
    """Reads a ShardedTensor: of a trained weight the optimizer's, of others the model's."""
    own = f"optimizer.state.param.{shard.key}"
    lengths = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    box = tuple((o, o + n) for o, n in zip(shard.global_offset, lengths, strict=True))
    return stored.read(own if own in stored.found else shard.key, box).view(shard.local_shape)


def named_chunks(parts: Parts) -> list[tuple[str, Any]]:
    if len(parts.raw) == 1:
        return [("model", parts.raw[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(parts.raw)]


def sharded_state(parts: Parts, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
    models = {
        name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in named_chunks(parts)
    }
    state: dict[str, Any] = dict(models)
    if parts.optimizer is not None:
        with apart(parts.optimizer):
            state["optimizer"] = parts.optimizer.sharded_state_dict(
                models if len(models) > 1 else models["model"], is_loading=is_loading,
                metadata=metadata,
            )  # fmt: skip
    return state


@contextmanager
def apart(optimizer: Any) -> Iterator[None]:
    """Meanwhile the distributed optimizer finds every parameter's state where it is.

    0.16.1 gathers the state of all buckets end to end, but reads it at places that count the
    padding between buckets. A tied embedding of the last pipeline stage has a bucket of its own:
    what follows it would be stored shifted, without a word.
    """
    parts = [
        part
        for part in compat.optimizer_parts(optimizer)
        if hasattr(part, "get_parameter_state_dp_zero")
    ]
    for part in parts:
        part.get_parameter_state_dp_zero = partial(
            _state_with_padding, part, part.get_parameter_state_dp_zero
        )
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def _state_with_padding(part: Any, gather: Callable[..., Any], **settings: Any) -> Any:
    state = gather(**settings)
    if state is None:
        return None
    for number, buffer in enumerate(part.buffers):
        for tensors in state[number].values():
            for name, flat in tensors.items():
                if isinstance(flat, Tensor):
                    tensors[name] = _with_padding(flat, buffer.buckets)
    return state


def _with_padding(flat: Tensor, buckets: list[Any]) -> Tensor:
    """(numel,) of all buckets without their padding -> with that between them."""
    whole = flat.new_zeros(max(bucket.offset + bucket.numel_unpadded for bucket in buckets))
    sizes = [bucket.numel_unpadded for bucket in buckets]
    for bucket, values in zip(buckets, flat.split(sizes), strict=True):
        whole[bucket.offset : bucket.offset + len(values)] = values
    return whole


def layout_metadata() -> dict[str, Any]:
    """Returns how megatron-core is to name and cut the optimizer's state: not by the layout at
    hand.
    """
    from megatron.core import parallel_state

    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


@contextmanager
def reading_plain() -> Iterator[None]:
    """Meanwhile megatron-core reads with our reader: its own unpickles whatever stands there."""
    try:
        with compat.reading_with(ShardReader):
            yield
    except CheckpointException as error:
        refused = [e for e, _ in error.failures.values() if isinstance(e, ConfigError)]
        raise (refused[0] if refused else error) from error
