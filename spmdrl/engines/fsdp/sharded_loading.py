"""Fills the shards of a model: each rank reads its own rows of the files, or rank 0 scatters them.

A model that is read by rows has parameters without data until it is sharded, so that no rank holds
more than its shards at any time. The ranks of the first replica read; replicas then receive their
shards from it, so that the files are read once, however many replicas there are.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spmdrl.config import ConfigError
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import first_of
from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import set_parameter
from spmdrl.engines.fsdp.classifier import build_classifier, is_classifier
from spmdrl.engines.fsdp.model import build_model, report_unused
from spmdrl.engines.fsdp.weight_files import WeightFiles, open_weights
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.weights.boxes import Box, numel, view, whole
from spmdrl.weights.shards import held_box, local

POLYNOMIAL = 0xEDB88320  # of the CRC-32 of zlib, the bits reversed


class RowsChecksum(NamedTuple):
    """The CRC-32 of rows of a weight in float32."""

    first: int  # row
    num_bytes: int
    crc: int


# ---- what is built before it is sharded


def open_model(
    kind: str, model: str, topology: Topology, load_weights: bool
) -> tuple[PreTrainedModel, WeightFiles | None]:  # fmt: skip
    """Builds a model without weights, and opens the files that each rank reads its rows of.

    Where files cannot be read by rows, it returns None for them, and rank 0 has the whole model.
    """
    hf = build_shell(kind, model, full=False)
    if not load_weights:
        return hf, None
    has_head = is_classifier(load_hf_config(model)) if kind == "reward" else kind != "value"
    files = open_weights(model, hf, has_head)
    if topology.rank == 0 and files is not None:
        report_unused(model, files.found)
    if topology.rank == 0 and files is None:
        hf = build_shell(kind, model, full=True)
    return hf, files


def build_shell(kind: str, model: str, full: bool) -> PreTrainedModel:
    if kind == "reward":
        return build_classifier(model, full)
    return build_model(model, full, has_head=kind != "value")


# ---- parameters without data


def drop_data(module: nn.Module) -> None:
    """Replaces the parameters of a module by ones on "meta"; tied ones stay tied. Buffers stay."""
    replace_parameters(module, lambda p: torch.empty_like(p, device="meta"))


def allocate(module: nn.Module, device: torch.device, offload: bool) -> None:
    """Gives parameters on "meta" memory of any value, after the module was sharded.

    offload: they stay on the CPU; FSDP itself takes them back there, pinned, from a device.
    """
    where = torch.device("cpu") if offload else device
    replace_parameters(module, lambda p: torch.empty_like(p, device=where) if p.is_meta else p)
    module.to(device)  # FSDP looks its parameters up anew, and pads them


def replace_parameters(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    made: dict[nn.Parameter, Any] = {}
    for part in module.modules():
        for name, p in list(part.named_parameters(recurse=False)):
            if p not in made:
                changed = change(p)
                made[p] = p if changed is p else nn.Parameter(changed.detach(), p.requires_grad)
            set_parameter(part, name, made[p])


# ---- each rank its own rows


@torch.no_grad()
def read_shards(
    module: nn.Module, files: WeightFiles | None, initial: Iterable[tuple[str, Tensor]],
    topology: Topology, checksums: bool = False,
) -> dict[str, RowsChecksum]:  # fmt: skip
    """Fills the shards of `module`, whose names are those of the files' model after "hf.".

    initial: (name in module, full tensor) of what begins with other values than the files'. What
    neither has begins with zeros; without files all weights do. Returns the checksums, if they are
    asked for, of what this rank has read, by the names of the files' model. Collective over the
    topology. Raises ConfigError on all ranks where one of them does.
    """
    targets = dict(module.state_dict())
    problem: str | None = None
    sums: dict[str, RowsChecksum] = {}
    try:
        if topology.copies.get_local_rank("dp") == 0:
            for target in targets.values():
                if isinstance(target, DTensor):  # buffers are as they were built
                    target.to_local().zero_()
            sums = read_into(targets, files, checksums) if files is not None else {}
            for name, full in initial:
                take_rows(targets[name], full)
    except (ConfigError, SafetensorError, OSError) as error:
        problem = str(error)
    found = first_of(problem, topology)
    if found is not None:
        raise ConfigError(found[1])
    send_to_replicas(targets, topology)
    return sums


def read_into(
    targets: Mapping[str, Tensor], files: WeightFiles, checksums: bool
) -> dict[str, RowsChecksum]:  # fmt: skip
    """Returns the checksums of what was read, {} if they are not asked for. Targets are taken in
    the order of the files; a value head and adapters are in none.
    """
    names = {name: name.removeprefix("hf.").replace(".base_layer.", ".") for name in targets}
    sums: dict[str, RowsChecksum] = {}
    for name, own in sorted(names.items(), key=lambda item: files.path_of(item[1])):
        target = targets[name]
        box = held_box(target)
        by_other_name = own in files.tied and own not in files.sources
        if own not in files.dtypes or box is None or by_other_name:
            continue
        first, last = box[0] if box else (0, 1)
        rows = files.rows(own, first, last)
        require_tied(own, files, rows, first, last)
        local(target).copy_(view(rows, (box[0], *whole(target.shape[1:])), box) if box else rows)
        if checksums:
            sums[own] = checksum(first, rows)
    files.close()
    return sums


def checksum(first: int, rows: Tensor) -> RowsChecksum:
    data: Any = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return RowsChecksum(first, data.nbytes, zlib.crc32(data))


def require_tied(name: str, files: WeightFiles, rows: Tensor, first: int, last: int) -> None:
    """Raises ConfigError where the files have other values under the name that it is tied to."""
    other = files.tied.get(name)
    if other is None or name not in files.sources or other not in files.sources:
        return
    if not torch.equal(rows, files.rows(other, first, last)):
        raise ConfigError(
            f"model: {files.model!r}: config.json ties {name} to {other}, but the weight files "
            "hold different values for them: set tie_word_embeddings to false in config.json"
        )


def take_rows(target: Tensor, full: Tensor) -> None:
    box = held_box(target)
    if box is not None:
        local(target).copy_(view(full, whole(full.shape), box))


def send_to_replicas(targets: Mapping[str, Tensor], topology: Topology) -> None:
    """Sends the shards of the first replica to the others'. Collective over the topology."""
    if topology.copies.size(0) == 1:
        return
    group = topology.copies.get_group("dp")
    for target in targets.values():
        held = local(target)
        if held.numel():
            moved = held.to(topology.device)
            dist.broadcast(moved, group=group, group_src=0)
            held.copy_(moved)


# ---- rank 0 the whole model


@torch.no_grad()
def scatter_weights(module: nn.Module, full: dict[str, Tensor], topology: Topology) -> None:
    """Fills the shards of `module` from the full tensors that the topology's first rank has."""
    group, targets = topology.group, module.state_dict()
    mine = {name: held_box(t) for name, t in targets.items() if isinstance(t, DTensor)}
    boxes: list[dict[str, Box | None]] = gather_to_all(mine, topology.control)
    for name, target in targets.items():
        if not isinstance(target, DTensor):
            value = full[name].clone() if topology.rank == 0 else torch.empty_like(target).cpu()
            dist.broadcast(value, group=group, group_src=0)
            target.copy_(value)
            continue
        theirs = [box[name] for box in boxes]
        most = max(numel(box) for box in theirs if box is not None)
        own = torch.zeros(most, dtype=target.dtype)  # all of one size, as NCCL has them
        parts = None
        if topology.rank == 0:
            parts = [padded_part(full[name], box, most) for box in theirs]
        dist.scatter(own, parts, group=group, group_src=0)
        held = target.to_local()
        held.copy_(own[: held.numel()].view(held.shape))


def padded_part(full: Tensor, box: Box | None, length: int) -> Tensor:
    """(length,): the elements of the box of a full tensor, then zeros."""
    found = torch.zeros(length, dtype=full.dtype)
    if box is not None:
        found[: numel(box)] = view(full, whole(full.shape), box).reshape(-1)
    return found


# ---- the fingerprint of what was read


def fingerprint_of(
    files: WeightFiles, sums: dict[str, RowsChecksum], topology: Topology
) -> str | None:  # fmt: skip
    """Returns lora.fingerprint of the weights that were read, of the checksums of their rows, on
    the topology's first rank; None on the others. Collective over the topology.
    """
    everyone: list[Any] | None = [None] * topology.world if topology.rank == 0 else None
    dist.gather_object(sums, everyone, group=topology.control, group_dst=0)
    if everyone is None:
        return None
    digest = hashlib.sha256()
    for name, parameter in sorted(files.meta.named_parameters()):
        parts = sorted({theirs[name] for theirs in everyone if name in theirs})
        if parts:
            crc = 0
            for part in parts:
                crc = joined(crc, part.crc, part.num_bytes)
            digest.update(f"{name} {tuple(parameter.shape)} {crc}\n".encode())
    return digest.hexdigest()


def joined(first: int, second: int, num_bytes: int) -> int:
    """Returns the CRC-32 of two byte strings end to end, from that of each; num_bytes: of the
    second. As crc32_combine of zlib: the first is multiplied by x^(8 num_bytes) modulo the
    polynomial.
    """
    return product(power(num_bytes), first) ^ second


@lru_cache(maxsize=4096)
def power(num_bytes: int) -> int:
    """Returns x^(8 num_bytes) modulo the polynomial; bit 31 is x^0."""
    result, base = 1 << 31, 1 << 23
    while num_bytes:
        if num_bytes & 1:
            result = product(result, base)
        base, num_bytes = product(base, base), num_bytes >> 1
    return result


def product(a: int, b: int) -> int:
    """Returns a b modulo the polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (POLYNOMIAL if b & 1 else 0)
    return result


def require_written_by_fsdp(folder: Path) -> None:
    """Raises ConfigError for the folder of a checkpoint that engine megatron has written."""
    if Path(folder, "metadata.json").exists():
        raise ConfigError(
            f"{folder} was written by engine megatron. Export it (python -m spmdrl.export) and "
            "start a run from that model, or resume with the engine that wrote it"
        )
