"""Weights that are worked out before they are sent, a round of them at a time.

A layer with an adapter is sent as W + scale B A. Its parts on this rank are computed in float32
into memory that the next round uses again, so that the model is never there twice. A whole shard is
computed at once, whatever is cut out of it later: the same element has the same bits in every cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.weights.boxes import numel, sizes, whole
from spmdrl.weights.plan import Weight
from spmdrl.weights.shards import Shards, held_box


class LowRank(NamedTuple):
    """What a weight is made of. DTensors that are split by rows, or full tensors."""

    base: Tensor | None  # (out, in); None: scale B alone is wanted
    a: Tensor  # (rank, in) float32
    b: Tensor  # (out, rank) float32
    scale: float

    @property
    def weight(self) -> Tensor:
        """Of the shape and the split of the result."""
        return self.b if self.base is None else self.base

    def compute(self, to: Tensor | None) -> None:
        """Into `to`, this rank's part, if it has one. Collective over the ranks that share it."""
        if self.base is None:
            if to is not None:
                torch.mul(local(self.b), self.scale, out=to)
            return
        a = self.a.full_tensor() if isinstance(self.a, DTensor) else self.a
        if to is not None:
            torch.addmm(local(self.base).float(), local(self.b), a, alpha=self.scale, out=to)


class Derived:
    """This rank's parts of computed weights, and their memory."""

    def __init__(self, made_of: Mapping[str, LowRank]) -> None:
        self.made_of = dict(made_of)
        self.boxes = {name: held_box(source.weight) for name, source in made_of.items()}
        self.offsets: dict[str, int] = {}  # in the memory, in elements
        self.memory: Tensor | None = None
        self.numel = 0

    def shards(self) -> dict[str, Shards]:
        """Their tensors are there from the `compute` of their round to that of the next."""
        found: dict[str, Shards] = {}
        for name, source in self.made_of.items():
            box = self.boxes[name]
            shape = tuple(source.weight.shape)
            if box is None:
                found[name] = Shards(shape, (), list, self)
            else:
                found[name] = Shards(shape, (box,), partial(self.parts, name), self)
        return found

    def arrange(self, rounds: Sequence[Sequence[str]]) -> None:
        """Which names are computed together; others are no matter."""
        self.memory, self.numel = None, 0
        for names in rounds:
            offset = 0
            for name in names:
                box = self.boxes.get(name)
                if box is not None:
                    self.offsets[name] = offset
                    offset += numel(box)
            self.numel = max(self.numel, offset)

    @torch.no_grad()
    def compute(self, names: Sequence[str]) -> None:
        """Of a round. Collective over the ranks that share the weights."""
        if self.memory is None:
            device = local(next(iter(self.made_of.values())).b).device
            self.memory = torch.empty(self.numel, device=device)
        for name in names:
            if name in self.made_of:
                self.made_of[name].compute(self.part(name) if self.boxes[name] else None)

    def parts(self, name: str) -> list[Tensor]:
        return [self.part(name)]

    def part(self, name: str) -> Tensor:
        """Where this rank's part of the weight is or will be, float32."""
        box, first = self.boxes[name], self.offsets[name]
        assert box is not None and self.memory is not None, name
        return self.memory[first : first + numel(box)].view(sizes(box))

    def release(self) -> None:
        """On a GPU the memory is given back between pushes."""
        if self.memory is not None and self.memory.device.type != "cpu":
            self.memory = None


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def derived_of(named: Mapping[str, Shards]) -> Derived | None:
    return next((held.derived for held in named.values() if held.derived is not None), None)


def rounds_of(weights: Sequence[Weight], limit_bytes: int) -> list[list[Weight]]:
    """Weights that go together, in their order; those that are not computed go with the first.

    In float32 a round's computed weights take limit_bytes at most on any rank, or are one.
    """
    rounds = [[weight for weight in weights if not weight.derived]]
    load: dict[int, int] = {}
    for weight in weights:
        if not weight.derived:
            continue
        ranks = {rank for _, holders in weight.holders for rank in holders}
        mine = {rank: 4 * weight.held_numel(rank, whole(weight.shape)) for rank in ranks}
        if any(load.get(rank, 0) + size > limit_bytes for rank, size in mine.items()) and load:
            rounds.append([])
            load = {}
        for rank, size in mine.items():
            load[rank] = load.get(rank, 0) + size
        rounds[-1].append(weight)
    return rounds
