"""The shards of the training weights on each rank, as they lie there or as they are worked out.

A layer with an adapter is sent as W + scale B A. Its parts on this rank are computed in float32, a
round of weights at a time, into memory that the next round uses again, so that the model is never
there twice. A whole shard is computed at once, whatever is cut out of it later: the same element
has the same bits in every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

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


class TensorSource(Protocol):
    """Says what a weight is worked out from, before it is there."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full weight."""
        ...

    @property
    def boxes(self) -> tuple[Box, ...]:
        """The parts that this rank works out, apart from each other."""
        ...

    @property
    def device(self) -> torch.device:
        """Says where these are to lie."""
        ...

    def compute(self, to: list[Tensor]) -> None:
        """Into `to`, which are float32 and of the boxes' sizes. Collective where parts are shared
        in such a way that a rank needs another's.
        """
        ...


class LowRank:
    """A weight with an adapter, made of DTensors that are split by rows, or of full tensors."""

    def __init__(
        self, base: Tensor | None, a: Tensor, b: Tensor, scale: float, offset: Tensor | None = None
    ) -> None:
        """base: (out, in); None: scale B alone is wanted. a: (rank, in), b: (out, rank) float32.
        offset: (out,) float32, of DoRA: how much longer each row is than in the base."""
        self.base, self.a, self.b, self.scale, self.offset = base, a, b, scale, offset
        weight = b if base is None else base  # it has the shape and the split of the result
        box = held_box(weight)
        self.shape: tuple[int, ...] = tuple(weight.shape)
        self.boxes: tuple[Box, ...] = () if box is None else (box,)

    @property
    def device(self) -> torch.device:
        return local(self.b).device

    def compute(self, to: list[Tensor]) -> None:
        if self.base is None:
            for part in to:
                torch.mul(local(self.b), self.scale, out=part)
            return
        a = self.a.full_tensor() if isinstance(self.a, DTensor) else self.a
        for part in to:
            torch.addmm(local(self.base).float(), local(self.b), a, alpha=self.scale, out=part)
            if self.offset is not None:
                set_lengths(part, row_norms(local(self.base)) + local(self.offset))


def row_norms(weight: Tensor) -> Tensor:
    """(rows, columns) -> (rows,) float32, above 0: a row of zeros is one whatever divides it."""
    norms = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.clamp_min(torch.finfo(torch.float32).tiny)


def set_lengths(weight: Tensor, lengths: Tensor) -> None:
    """Gives each row of a float32 matrix this norm, in place; a row of zeros stays one."""
    weight.mul_((lengths / row_norms(weight))[:, None])


class Derived:
    """This rank's parts of computed weights, and their memory."""

    def __init__(self, made_of: Mapping[str, TensorSource]) -> None:
        self.made_of = dict(made_of)
        self.offsets: dict[str, int] = {}  # in the memory, in elements
        self.memory: Tensor | None = None
        self.numel = 0

    def shards(self) -> dict[str, Shards]:
        """Their tensors are there from the `compute` of their round to that of the next."""
        return {
            name: Shards(source.shape, source.boxes, partial(self.parts, name), self)
            for name, source in self.made_of.items()
        }

    def arrange(self, rounds: Sequence[Sequence[str]]) -> None:
        """Notes which names are computed together; others are no matter."""
        self.memory, self.numel = None, 0
        for names in rounds:
            offset = 0
            for name in (name for name in names if name in self.made_of):
                self.offsets[name] = offset
                offset += sum(numel(box) for box in self.made_of[name].boxes)
            self.numel = max(self.numel, offset)

    @torch.no_grad()
    def compute(self, names: Sequence[str]) -> None:
        """Computes the weights of a round. Collective over the ranks that share the weights."""
        if self.memory is None:
            device = next(iter(self.made_of.values())).device
            self.memory = torch.empty(self.numel, device=device)
        for name in names:
            if name in self.made_of:
                self.made_of[name].compute(self.parts(name))

    def parts(self, name: str) -> list[Tensor]:
        """Returns where this rank's parts of the weight are or will be, float32."""
        first, found = self.offsets[name], []
        assert self.memory is not None, name
        for box in self.made_of[name].boxes:
            last = first + numel(box)
            found.append(self.memory[first:last].view(sizes(box)))
            first = last
        return found

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
