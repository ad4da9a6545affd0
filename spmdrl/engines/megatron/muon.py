"""Muon over megatron-core's distributed optimizer, for the matrices of engines/fsdp/muon.py.

The distributed optimizer keeps flat shards, which know no matrices. So a step takes four:

1. each rank works out Nesterov's momentum of its shards, in the gradients' place
2. the data-parallel ranks gather these buffers, and each has all of its tensor rank's part
3. of the matrices, in turn, one data-parallel rank puts together the tensor ranks' parts, by the
   names and rows of the Hugging Face model, makes them orthogonal, and keeps its own part; the
   other data-parallel ranks put zeros there
4. the buffers are summed back to shards, which are the directions to move in

Momentum is kept where Adam keeps its first moment, so that checkpoints, offloading and resuming in
another layout are those of AdamW; the second moment of a matrix stays 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, OptimConfig
from spmdrl.engines.fsdp.muon import RMS, orthogonal
from spmdrl.engines.megatron import compat
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.hf_mapping import pieces
from spmdrl.engines.megatron.splits import HfSlice, Stacked, StackedColumns, StackedGateUp
from spmdrl.weights.boxes import Box, numel, sizes, view, whole

STACKED = (Stacked, StackedGateUp, StackedColumns)


@dataclass
class Matrix:
    """A matrix of the Hugging Face model, as far as it lies in one parameter here."""

    name: str
    shape: tuple[int, ...]
    parameter: Any
    held: list[HfSlice]  # of it; none where this rank has no row
    boxes: list[list[Box]]  # of each rank that shares it
    group: dist.ProcessGroup | None  # these ranks; None: it is whole here

    def views(self) -> list[Tensor]:
        """Returns the parts of the gradient's buffer that are this rank's."""
        return [piece.view(self.parameter.main_grad) for piece in self.held]

    def make_orthogonal(self, compute: torch.dtype) -> None:
        """Collective over the group. compute: dtype of the products."""
        size = RMS * sqrt(max(self.shape))
        direction = orthogonal(self.together().to(compute)).float() * size
        for piece, part in zip(self.held, self.views(), strict=True):
            part.copy_(view(direction, whole(self.shape), piece.box))

    def together(self) -> Tensor:
        """Returns the whole matrix, float32."""
        mine = [part.flatten() for part in self.views()]
        own = torch.cat(mine) if mine else self.parameter.main_grad.new_empty(0)
        parts = [own]
        if self.group is not None:
            longest = max(sum(map(numel, boxes)) for boxes in self.boxes)
            padded = torch.nn.functional.pad(own, (0, longest - len(own)))
            parts = [torch.empty_like(padded) for _ in self.boxes]
            dist.all_gather(parts, padded, group=self.group)
        full = own.new_empty(self.shape)
        for boxes, flat in zip(self.boxes, parts, strict=True):
            first = 0
            for box in boxes:
                last = first + numel(box)
                view(full, whole(self.shape), box).copy_(flat[first:last].view(sizes(box)))
                first = last
        return full

    def clear(self) -> None:
        for part in self.views():
            part.zero_()


class MegatronMuon:
    """Steps on the matrices of one distributed optimizer, and has Adam step on the rest before."""

    def __init__(
        self, part: Any, matrices: list[Matrix], momentum: float, compute: torch.dtype
    ) -> None:
        self.part, self.matrices = part, matrices
        self.momentum, self.compute = momentum, compute
        self.hidden = {id(matrix.parameter) for matrix in matrices}
        self.adam: Callable[[], Any] = part.optimizer.step

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Collective over the data-parallel and the tensor ranks."""
        gradients = [(p, state, group, p.grad) for p, state, group in self.shards()]
        for p, *_ in gradients:
            p.grad = None  # Adam passes over it
        self.adam()
        for p, state, _, gradient in gradients:
            p.grad = gradient  # a part of the gradients' buffer
            state["exp_avg"].lerp_(gradient, 1 - self.momentum)
            gradient.copy_(gradient.lerp(state["exp_avg"], self.momentum))
        group = self.part.data_parallel_group
        buckets = [bucket for buffer in self.part.buffers for bucket in buffer.buckets]
        for bucket in buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()]
            dist.all_gather_into_tensor(bucket.grad_data, own.clone(), group=group)
        for number, matrix in enumerate(self.matrices):
            if number % group.size() == group.rank():
                matrix.make_orthogonal(self.compute)
            else:
                matrix.clear()
        for bucket in buckets:
            own = bucket.grad_data.chunk(group.size())[group.rank()]
            summed = torch.empty_like(own)
            dist.reduce_scatter_tensor(summed, bucket.grad_data, group=group)
            own.copy_(summed)
        for p, _, settings, gradient in gradients:
            p.mul_(1 - settings["lr"] * settings["weight_decay"])
            p.add_(gradient, alpha=-settings["lr"])

    def shards(self) -> Iterator[tuple[Any, dict[str, Tensor], dict[str, Any]]]:
        """Yields this rank's shards of float32 weights, their state and settings."""
        for parameter, p, group in compat.own_shards(self.part):
            if id(parameter) in self.hidden:
                yield p, self.part.optimizer.state[p], group


def check_matrices(hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError where a matrix of the layers is a part of a larger tensor."""
    names = FAMILIES[hf_config.model_type].names
    stacked = [split.name for split in names.values() if isinstance(split, STACKED)]
    if stacked:
        raise ConfigError(
            f"optim.name='muon': engine megatron has no Muon for {hf_config.model_type!r}, whose "
            f"experts are parts of one tensor ({stacked[0]}): use engine fsdp or optim.name='adamw'"
        )


def use_muon(
    optimizer: Any, chunks: list[Any], hf_config: PreTrainedConfig, config: OptimConfig,
    compute: torch.dtype,
) -> None:  # fmt: skip
    """Has an optimizer of distributed AdamW use Muon for the matrices of the layers. Collective."""
    found = [matrix for chunk in chunks for matrix in matrices_of(chunk, hf_config)]
    for part in compat.optimizer_parts(optimizer):
        mine = {id(p) for buffer in part.buffers for p in buffer.param_index_map}
        matrices = [matrix for matrix in found if id(matrix.parameter) in mine]
        matrices.sort(key=lambda matrix: -numel(whole(matrix.shape)))  # alike in turn
        muon = MegatronMuon(part, matrices, config.muon_momentum, compute)
        part.optimizer.step = muon.step


def matrices_of(chunk: Any, hf_config: PreTrainedConfig) -> list[Matrix]:
    """Returns the matrices of a chunk's layers, as fsdp.muon.hidden_matrices finds them. Collective
    over the ranks that share them.
    """
    while hasattr(chunk, "module"):
        chunk = chunk.module
    groups = chunk.pg_collection
    of_tower = getattr(chunk, "tower_layers", ())
    dense: list[tuple[str, Any, list[HfSlice]]] = []
    experts: list[tuple[str, Any, list[HfSlice]]] = []
    for name, parameter, held in pieces(chunk, hf_config):
        is_hidden = name.startswith(("decoder.layers.", "mtp.layers.", *of_tower))
        if is_hidden and parameter.ndim == 2:
            (experts if ".local_experts." in name else dense).append((name, parameter, held))
    return [*shared(dense, groups.tp), *shared(experts, groups.expt_tp)]


def shared(
    parameters: list[tuple[str, Any, list[HfSlice]]], group: dist.ProcessGroup
) -> list[Matrix]:
    """Collective over the group, whose ranks have parameters of the same names."""
    mine = [[(p.name, p.shape, p.box) for p in held] for _, _, held in parameters]
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    found: list[Matrix] = []
    for number, (_, parameter, held) in enumerate(parameters):
        shapes = {n: shape for theirs in everyone for n, shape, _ in theirs[number]}
        for name in sorted(shapes):
            boxes = [[box for n, _, box in theirs[number] if n == name] for theirs in everyone]
            is_cut = any(theirs != boxes[0] for theirs in boxes)
            here = [piece for piece in held if piece.name == name]
            if min(shapes[name]) > 1:
                found.append(
                    Matrix(
                        name, shapes[name], parameter, here, boxes if is_cut else boxes[:1],
                        group if is_cut else None,
                    )
                )  # fmt: skip
    return found
