"""Checkpoints of the Megatron engine, in megatron-core's dist_checkpointing format "torch_dist".

Weights and optimizer are stored by global names and whole shapes, so that a checkpoint loads in
another tensor, pipeline and data parallel layout. megatron-core reads what is written here, and
what its own `dist_checkpointing.save` wrote of the same state is read here.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from spmdrl.checkpoint.safe_load import ShardReader, read_plain
from spmdrl.config import ConfigError, TrainConfig, require
from spmdrl.config.words import counted, verb
from spmdrl.distributed.collectives import together
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.distributed.torch_compat import storage_id
from spmdrl.engines import host_copies as staging
from spmdrl.engines.fsdp.classifier import is_classifier
from spmdrl.engines.fsdp.lora_files import BASE_FILE, check_base
from spmdrl.engines.fsdp.optimizers import require_same_optimizer
from spmdrl.engines.host_copies import HostCopies, StagedShards
from spmdrl.engines.megatron import compat, ema
from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.hf_mapping import pieces
from spmdrl.engines.megatron.layout import Degrees
from spmdrl.engines.megatron.lora import stored_name, trained_parts
from spmdrl.engines.megatron.model import build_chunks, transformer_config
from spmdrl.engines.megatron.optimizer import set_hyperparameters
from spmdrl.engines.megatron.parallel_state import RoleState
from spmdrl.engines.megatron.parts import Parts, parallel_sizes
from spmdrl.engines.megatron.splits import HfSlice
from spmdrl.engines.megatron.towers import language_part
from spmdrl.engines.megatron.vision import add_tower
from spmdrl.engines.stored_tensors import StoredTensors, WeightSource
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.weights.boxes import view, whole

logger = logging.getLogger(__name__)

COMMON = "common.pt"
MTP = "num_mtp_layers"  # in it: the layers for multi-token prediction that were trained
MOMENTS = ("exp_avg", "exp_avg_sq")
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
    if parts.num_mtp_layers:
        common[MTP] = parts.num_mtp_layers
    if parts.optim is not None:
        common["optim_name"] = parts.optim.name
    state = {**common, "content_metadata": kept}
    made: set[int] = set()
    state |= sharded_state(parts, metadata, made)
    if parts.average is not None:
        with parts.average.instead():  # megatron-core copies what it gathers
            average = ema.as_average(sharded_state(parts, metadata, made)["optimizer"])
        state |= {"ema": average} if average else {}
    ready, planner, common = compat.split_state(state)
    shards = staging.stage(ready, planner, topology.rank == 0, copies, made)
    shards.notes[COMMON] = saved_bytes(common)
    if parts.adapters is not None:
        shards.notes[BASE_FILE] = parts.adapters.note()
    return StagedModel(shards)


def saved_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load(parts: Parts, folder: Path, topology: Topology) -> int:
    """Loads in place; returns the number of updates. Raises ConfigError for FSDP2's checkpoints,
    and for those of other adapters or another optimizer. Collective.
    """
    from megatron.core import dist_checkpointing

    common = read_common(folder)
    check_base(parts.adapters, folder, topology)
    if parts.optim is not None:
        require_same_optimizer(folder, common.get("optim_name", "adamw"), parts.optim.name)
    require(
        common.get(MTP, 0) == parts.num_mtp_layers,
        f"{folder} has {counted(common.get(MTP, 0), 'layer')} for multi-token prediction that "
        f"{verb(common.get(MTP, 0), 'were')} trained, "
        f"and this run trains {parts.num_mtp_layers}: resume with the mtp_loss_scaling_factor, 0 "
        "or above 0, that wrote it, or start from an export of it (python -m spmdrl.export)",
    )
    metadata = layout_metadata() | (common.get("content_metadata") or {})
    wanted = {"num_updates": 0, **sharded_models(parts, metadata)}
    with reading_plain():
        state = dist_checkpointing.load(wanted, str(folder))
    num_updates = state["num_updates"]
    take_weights(parts, state)
    del state, wanted
    if parts.optimizer is not None:
        averaged = has_average(parts, folder, topology)
        models = sharded_models(parts, metadata)  # those before were filled
        together(topology.control, lambda: load_optimizer(parts, models, folder, averaged))
    return num_updates


def read_common(folder: Path) -> dict[str, Any]:
    """Reads what all ranks have alike. Raises ConfigError for a checkpoint that is not ours."""
    if not Path(folder, MARK).is_file():
        raise ConfigError(
            f"{folder} was written by engine fsdp. Export it (python -m spmdrl.export) and start a "
            "run from that model, or resume with the engine that wrote it"
        )
    common = read_plain(Path(folder, COMMON))
    if "num_updates" not in common:
        raise ConfigError(
            f"{folder} is a Megatron checkpoint that another program wrote. Write its weights as a "
            "Hugging Face folder (save_hf_weights, docs/embedding.md) and start from that model"
        )
    return common


def has_average(parts: Parts, folder: Path, topology: Topology) -> bool:
    """Says whether there is a moving average to be loaded, and warns where this run and the
    checkpoint differ. Reads the index, which raises where megatron-core would wrap it up.
    """
    stored = ShardReader(str(folder)).read_metadata().state_dict_metadata
    is_stored = any(name.startswith(ema.AVERAGE) for name in stored)
    if (parts.average is not None) != is_stored and topology.rank == 0:
        what = "is dropped: ema is 0" if is_stored else "starts from its weights: it has none"
        logger.warning("%s: the moving average %s", folder, what)
    return is_stored and parts.average is not None


def take_weights(parts: Parts, state: dict[str, Any]) -> None:
    """Takes the weights that were loaded, and of the optimizer what all ranks have alike."""
    for name, chunk in named_chunks(parts):
        if parts.adapters is None:
            chunk.load_state_dict(state[name])
        else:
            take_trained(parts, chunk, state.get(name, {}))
    if parts.optimizer is not None:
        parts.optimizer.load_state_dict(without_parameters(state["optimizer"]))
        if parts.optim is not None:
            set_hyperparameters(parts.optimizer, parts.optim)


def without_parameters(state: Any) -> Any:
    """Returns an optimizer's common state without the place of its parameters' states, which
    megatron-core would go through. It has a state for each of several optimizers.
    """
    if not isinstance(state, dict):
        return state
    return {key: without_parameters(held) for key, held in state.items() if key != "param_state"}


@torch.no_grad()
def load_optimizer(parts: Parts, models: dict[str, Any], folder: Path, averaged: bool) -> None:
    """Reads this rank's shards of the optimizer's state and, with `averaged`, of the average, one
    parameter at a time. models: of sharded_models. Local.

    megatron-core would have every rank hold the states of all parameters of its model-parallel
    part, 12 bytes of the host's memory for each: with 8 ranks on a host 8 times as much.
    """
    stored = StoredTensors(folder)
    entries = {
        id(entry.data): entry for chunk in models.values() for entry in chunk.values()
        if isinstance(getattr(entry, "data", None), Tensor)
    }  # fmt: skip
    for part in compat.optimizer_parts(parts.optimizer):
        for parameter, shard, _ in compat.own_shards(part):
            moments = part.optimizer.state[shard]
            targets = {ema.MASTER: shard}
            targets |= {f"optimizer.state.{name}.": moments[name] for name in MOMENTS}
            if averaged and parts.average is not None:
                targets[ema.AVERAGE] = parts.average.of(shard)
            first, last = compat.range_of(part, parameter)
            for prefix, target in targets.items():
                read = partial(read_sharded, stored, prefixes=(prefix,))
                whole_state = compat.filled(entries[id(parameter)], read)
                target.copy_(whole_state.flatten()[first:last])
    if parts.average is not None and not averaged:
        parts.average.restart()


def weight_sources(folder: Path, hf_folder: Path, average: bool = False) -> list[WeightSource]:
    """The weights of a policy or reward model, to be read one parameter at a time, whatever its
    layout was. average: of the moving average; what was not trained has none and is as it is.

    The float32 weights of the optimizer are read: what was learnt is often less than the last bit
    of a bfloat16. A model without memory, which nothing cuts, says where each one lies.
    """
    common, stored = read_common(folder), StoredTensors(folder)
    seeing = load_hf_config(str(hf_folder))
    kind: Literal["policy", "reward"] = "reward" if is_classifier(seeing) else "policy"
    hf_config = language_part(seeing)
    mcore_cpu.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        topology = Topology.build(
            torch.device("cpu"), **train_degrees(TrainConfig(engine="megatron"))
        )
        state = RoleState.build(topology, **parallel_sizes(Degrees()))
        with state.active(), mcore_cpu.without_memory():
            mega = transformer_config(hf_config, Degrees(), torch.float32)
            (chunk,) = build_chunks(hf_config, mega, kind, common.get(MTP, 0))
            add_tower(chunk, seeing)
            entries = chunk.sharded_state_dict(
                metadata=layout_metadata() | (common.get("content_metadata") or {})
            )
            return [
                weight_source([(entries[name], held) for name, held in parts], stored, average)
                for parts in by_tensors(pieces(chunk, hf_config))
            ]
    finally:
        dist.destroy_process_group()


def by_tensors(
    parameters: Iterable[tuple[str, Tensor, list[HfSlice]]],
) -> list[list[tuple[str, list[HfSlice]]]]:
    """Puts the parameters together that hold parts of the same tensors, as experts of a layer may.

    parameters: of `pieces`. Those that hold only what is tied are left out.
    """
    found: dict[frozenset[str], list[tuple[str, list[HfSlice]]]] = {}
    for name, _, held in parameters:
        tensors = frozenset(piece.name for piece in held if not piece.tied)
        if tensors:
            found.setdefault(tensors, []).append((name, held))
    named = [name for tensors in found for name in tensors]
    assert len(named) == len({*named}), named
    return list(found.values())


def weight_source(
    parameters: list[tuple[Any, list[HfSlice]]], stored: StoredTensors, average: bool
) -> WeightSource:
    """parameters: the entry of each in sharded_state_dict, and what lies in it; together they hold
    all of each tensor.
    """
    shapes = {p.name: p.shape for _, held in parameters for p in held if not p.tied}

    def read() -> Iterator[tuple[str, Tensor]]:
        tensors: dict[str, Tensor] = {}
        for entry, held in parameters:
            prefixes = (*([ema.AVERAGE] if average else []), ema.MASTER, "")
            parameter = compat.filled(entry, partial(read_sharded, stored, prefixes=prefixes))
            for piece in (p for p in held if not p.tied):
                if piece.name not in tensors:
                    tensors[piece.name] = torch.empty(piece.shape, dtype=parameter.dtype)
                part = view(tensors[piece.name], whole(piece.shape), piece.box)
                part.copy_(piece.view(parameter))
        yield from tensors.items()

    return WeightSource(shapes, read)


def read_sharded(stored: StoredTensors, shard: Any, prefixes: tuple[str, ...]) -> Tensor:
    """Reads what is stored of a weight's ShardedTensor. prefixes: of the names that it may have
    there; the first one is read that there is: a weight that is not trained has the model's alone.
    """
    names = [
        prefix + (shard.key.removeprefix("model.") if prefix == ema.AVERAGE else shard.key)
        for prefix in prefixes
    ]
    name = next((name for name in names if name in stored.found), names[-1])
    lengths = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
    box = tuple((o, o + n) for o, n in zip(shard.global_offset, lengths, strict=True))
    return stored.read(name, box).view(shard.local_shape)


def named_chunks(parts: Parts) -> list[tuple[str, Any]]:
    if len(parts.raw) == 1:
        return [("model", parts.raw[0])]
    return [(f"model{i}", chunk) for i, chunk in enumerate(parts.raw)]


def sharded_models(parts: Parts, metadata: dict[str, Any]) -> dict[str, Any]:
    models = {
        name: chunk.sharded_state_dict(metadata=metadata)
        if parts.adapters is None
        else trained_state(parts, chunk)
        for name, chunk in named_chunks(parts)
    }
    # a chunk may have no adapter: what is empty would be stored as if all ranks had it alike
    return {name: held for name, held in models.items() if held}


def sharded_state(parts: Parts, metadata: dict[str, Any], made: set[int]) -> dict[str, Any]:
    """Returns what is saved: the weights, and the optimizer's state, which is gathered into
    storages that are added to `made`. Collective over the data-parallel ranks.
    """
    state = sharded_models(parts, metadata)
    if parts.optimizer is not None:
        with apart(parts.optimizer, made):
            optimizer = parts.optimizer.sharded_state_dict(dict(state), metadata=metadata)
        state["optimizer"] = optimizer
    return state


def trained_state(parts: Parts, chunk: Any) -> dict[str, Any]:
    """Returns what is saved of a chunk with adapters: what is trained, and not the base."""
    from megatron.core import parallel_state

    data, tensor = parallel_state.get_data_parallel_rank(True), parts.groups.tensor.rank()
    found: dict[str, Any] = {}
    for number, (p, part) in enumerate(trained_parts(chunk, parts.hf_config)):
        name = stored_name(part)
        is_cut = getattr(p, "tensor_model_parallel", False)
        found[str(number)] = compat.shard_of(
            name, p, part.shape, tuple(first for first, _ in part.box),
            replica=(0, 0 if is_cut else tensor, data),
        )  # fmt: skip
    return found


@torch.no_grad()
def take_trained(parts: Parts, chunk: Any, state: dict[str, Tensor]) -> None:
    for number, (p, _) in enumerate(trained_parts(chunk, parts.hf_config)):
        p.copy_(state[str(number)])


@contextmanager
def apart(optimizer: Any, made: set[int]) -> Iterator[None]:
    """Meanwhile the distributed optimizer finds every parameter's state where it is. The storages
    into which it was gathered are added to `made`.

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
            _state_with_padding, part, part.get_parameter_state_dp_zero, made
        )
    try:
        yield
    finally:
        for part in parts:
            del part.get_parameter_state_dp_zero


def _state_with_padding(
    part: Any, gather: Callable[..., Any], made: set[int], **settings: Any
) -> Any:
    """Returns what `gather` does: None on all data-parallel ranks but the first where there is a
    state to save. It is sent over the CPU to that rank, which writes all of it anyway; as
    megatron-core is called, every rank's GPU would hold a float32 buffer of all weights meanwhile.
    """
    if part.data_parallel_group_gloo is not None:
        settings |= {"use_gloo_comm": True, "return_on_all_ranks": False}
    state = gather(**settings)
    if state is None:
        return None
    for number, buffer in enumerate(part.buffers):
        for tensors in state[number].values():
            for name, flat in tensors.items():
                if isinstance(flat, Tensor):
                    tensors[name] = _with_padding(flat, buffer.buckets)
                    made.add(storage_id(tensors[name]))
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
