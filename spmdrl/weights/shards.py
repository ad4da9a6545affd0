"""The shards of the training weights on each rank, as they lie there or as they are worked out.

A layer with an adapter is sent as W + scale B A. Its parts on this rank are computed in float32, a
round of weights at a time, into memory that the next round uses again, so that the model is never
there twice. A whole shard is computed at once, whatever is cut out of it later: the same element
has the same bits in every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from spmdrl.distributed.torch_compat import local_shape_and_offset
from spmdrl.weights.boxes import Box, intersect, numel, sizes, view, whole
from spmdrl.weights.checkpoint_names import Parts, SubTensor
from spmdrl.weights.classes import Holders, Weight


class Shards(NamedTuple):
    """The parts that this rank holds of one weight."""

    shape: tuple[int, ...]  # of the full tensor
    boxes: tuple[Box, ...]  # apart from each other
    # of the boxes' sizes, where they lie now; to be called under torch.no_grad()
    tensors: Callable[[], list[Tensor]]
    derived: Derived | None = None  # by which it is worked out before it is there
    exact: bool = False  # the trainer computes with its float32 numbers, not with rounded ones


def shards_of(weight: Tensor) -> Shards:
    """Returns the shards of a DTensor or a full tensor; it is looked up anew, since its memory may
    move.
    """

    sharded = isinstance(weight, DTensor)

    def local() -> list[Tensor]:
        return [weight.to_local() if sharded else weight]  # type: ignore[attr-defined]

    box = held_box(weight)
    if box is None:
        return Shards(tuple(weight.shape), (), list)
    return Shards(tuple(weight.shape), (box,), local)


def shards_by_part(weights: Mapping[str, Tensor], parts: Parts) -> dict[str, Shards]:
    """Returns the shards of all weights of a model, by the names that a checkpoint has for them and
    their parts.
    """
    named: dict[str, Shards] = {}
    for name, weight in weights.items():
        if name in parts:
            named |= {part.name: _shards_of_part(weight, part) for part in parts[name]}
        else:
            named[name] = shards_of(weight)
    return named


def _shards_of_part(weight: Tensor, part: SubTensor) -> Shards:
    held = held_box(weight)
    common = intersect(held, part.box) if held is not None else None
    if held is None or common is None:
        return Shards(part.shape, (), list)
    box, within = part.inside(common), held

    def local() -> list[Tensor]:
        lies = weight.to_local() if isinstance(weight, DTensor) else weight
        return [view(lies, within, common).view(sizes(box))]

    return Shards(part.shape, (box,), local)


@torch.no_grad()
def fill(named: Mapping[str, Shards], weights: Iterable[tuple[str, Tensor]]) -> set[str]:
    """Copies full tensors into the parts of them that this rank holds; the names that were given.

    weights: (name, full tensor), one at a time; those that are not in `named` are passed over.
    """
    held, given = lying(named), set()
    for name, full in weights:
        given.add(name)
        for box, part in held.get(name, ()):
            part.copy_(view(full, whole(full.shape), box))
    return given


@torch.no_grad()
def lying(
    named: Mapping[str, Shards], device: torch.device | None = None
) -> dict[str, list[tuple[Box, Tensor]]]:  # fmt: skip
    """The parts of every weight that this rank holds, by name. device: where they are to be read;
    what lies elsewhere (offload_policy) is copied there. None: as they lie.
    """
    return {
        name: [
            (box, tensor if device is None else tensor.to(device))
            for box, tensor in zip(shards.boxes, shards.tensors(), strict=True)
        ]
        for name, shards in named.items()
    }


def held_box(weight: Tensor) -> Box | None:
    """The part of the full tensor that lies on this rank; None where there is none.

    Raises ValueError where it is no box.
    """
    if not isinstance(weight, DTensor):
        return whole(weight.shape)
    assert not any(isinstance(p, Partial) for p in weight.placements), weight.placements
    split = [p.dim for p in weight.placements if isinstance(p, Shard)]
    sizes, offsets = local_shape_and_offset(weight.shape, weight.device_mesh, weight.placements)
    if len(split) != len(set(split)):  # two axes share a dimension: its parts may not be boxes
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is split as {weight.placements}: two mesh "
            "axes that share a dimension cannot be resharded"
        )
    if 0 in sizes:
        return None
    return tuple((first, first + size) for first, size in zip(offsets, sizes, strict=True))


class LowRank(NamedTuple):
    """The factors of a weight with an adapter. DTensors that are split by rows, or full tensors."""

    base: Tensor | None  # (out, in); None: scale B alone is wanted
    a: Tensor  # (rank, in) float32
    b: Tensor  # (out, rank) float32
    scale: float

    @property
    def weight(self) -> Tensor:
        """The tensor that has the shape and the split of the result."""
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
        """Notes which names are computed together; others are no matter."""
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
        """Computes the weights of a round. Collective over the ranks that share the weights."""
        if self.memory is None:
            device = local(next(iter(self.made_of.values())).b).device
            self.memory = torch.empty(self.numel, device=device)
        for name in names:
            if name in self.made_of:
                self.made_of[name].compute(self.part(name) if self.boxes[name] else None)

    def parts(self, name: str) -> list[Tensor]:
        return [self.part(name)]

    def part(self, name: str) -> Tensor:
        """Returns where this rank's part of the weight is or will be, float32."""
        box, first = self.boxes[name], self.offsets[name]
        assert box is not None and self.memory is not None, name
        return self.memory[first : first + numel(box)].view(sizes(box))

    def release(self) -> None:
        """Gives the memory back between pushes, on a GPU."""
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
    sizes_of: dict[int, dict[int, int]] = {}  # by id of the holders, which many weights share
    load: dict[int, int] = {}
    for weight in weights:
        if not weight.derived:
            continue
        if id(weight.holders) not in sizes_of:
            sizes_of[id(weight.holders)] = bytes_by_rank(weight.holders)
        mine = sizes_of[id(weight.holders)]
        if any(load.get(rank, 0) + size > limit_bytes for rank, size in mine.items()) and load:
            rounds.append([])
            load = {}
        for rank, size in mine.items():
            load[rank] = load.get(rank, 0) + size
        rounds[-1].append(weight)
    return rounds


def bytes_by_rank(holders: Holders) -> dict[int, int]:
    """Returns the bytes of a float32 weight that each rank holds."""
    found: dict[int, int] = {}
    for box, ranks in holders:
        for rank in ranks:
            found[rank] = found.get(rank, 0) + 4 * numel(box)
    return found
