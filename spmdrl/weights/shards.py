"""What each rank holds of the training weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, combinations
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from spmdrl.weights.boxes import Box, intersect, numel, sizes, view, whole
from spmdrl.weights.checkpoint_names import Part, Parts
from spmdrl.weights.plan import Weight

if TYPE_CHECKING:
    from spmdrl.weights.derived import Derived


class Shards(NamedTuple):
    """What this rank holds of one weight: parts of the full tensor."""

    shape: tuple[int, ...]  # of the full tensor
    boxes: tuple[Box, ...]  # apart from each other
    # of the boxes' sizes, where they lie now; to be called under torch.no_grad()
    tensors: Callable[[], list[Tensor]]
    derived: Derived | None = None  # by which it is worked out before it is there
    weight: Tensor | None = None  # of which `tensors` are views


class Addresses:
    """Where shards lie. A transfer asks before each run, so there is no Python per tensor in it."""

    def __init__(self, named: Mapping[str, Shards]) -> None:
        weights = {id(s.weight): s.weight for s in named.values() if s.weight is not None}
        self.sharded = [w for w in weights.values() if isinstance(w, DTensor)]
        self.full = [w for w in weights.values() if not isinstance(w, DTensor)]
        self.others = [s.tensors for s in named.values() if s.weight is None]

    def __call__(self) -> Iterator[int]:
        """Others where tensors have moved. To be called under torch.no_grad()."""
        local = map(attrgetter("_local_tensor"), self.sharded)
        others = (tensor for tensors in self.others for tensor in tensors())
        return map(Tensor.data_ptr, chain(local, self.full, others))


def shards_of(weight: Tensor) -> Shards:
    """Of a DTensor or a full tensor; it is looked up anew, since its memory may move."""

    sharded = isinstance(weight, DTensor)

    def local() -> list[Tensor]:
        return [weight.to_local() if sharded else weight]  # type: ignore[attr-defined]

    box = held_box(weight)
    if box is None:
        return Shards(tuple(weight.shape), (), list)
    return Shards(tuple(weight.shape), (box,), local, weight=weight)


def shards_by_part(weights: Mapping[str, Tensor], parts: Parts) -> dict[str, Shards]:
    """Of all weights of a model, by the names that a checkpoint has for them and their parts."""
    named: dict[str, Shards] = {}
    for name, weight in weights.items():
        if name in parts:
            named |= {part.name: _shards_of_part(weight, part) for part in parts[name]}
        else:
            named[name] = shards_of(weight)
    return named


def _shards_of_part(weight: Tensor, part: Part) -> Shards:
    held = held_box(weight)
    common = intersect(held, part.box) if held is not None else None
    if held is None or common is None:
        return Shards(part.shape, (), list)
    box, within = part.inside(common), held

    def local() -> list[Tensor]:
        lies = weight.to_local() if isinstance(weight, DTensor) else weight
        return [view(lies, within, common).view(sizes(box))]

    return Shards(part.shape, (box,), local, weight=weight)


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
def lying(named: Mapping[str, Shards]) -> dict[str, list[tuple[Box, Tensor]]]:
    """The parts of every weight that this rank holds, by name."""
    return {
        name: list(zip(shards.boxes, shards.tensors(), strict=True))
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
    sizes, offsets = compute_local_shape_and_global_offset(
        weight.shape, weight.device_mesh, weight.placements
    )
    if len(split) != len(set(split)):  # two axes share a dimension: its parts may not be boxes
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} is split as {weight.placements}: two mesh "
            "axes that share a dimension cannot be resharded"
        )
    if 0 in sizes:
        return None
    return tuple((first, first + size) for first, size in zip(offsets, sizes, strict=True))


def agree_on_shards(named: Mapping[str, Shards], group: dist.ProcessGroup) -> list[Weight]:
    """Every weight of the job and who holds what of it; a rank without weights gives {}.

    Collective over `group`, where CPU tensors can travel. Raises ValueError where the parts of a
    weight do not make up the whole.
    """
    mine = {n: (held.shape, held.boxes, held.derived is not None) for n, held in named.items()}
    everyone: list[dict[str, tuple[tuple[int, ...], tuple[Box, ...], bool]]]
    everyone = [{}] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    shapes = {name: shape for theirs in everyone for name, (shape, _, _) in theirs.items()}
    derived = {name for theirs in everyone for name, (_, _, is_so) in theirs.items() if is_so}
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in shapes}
    for number, theirs in enumerate(everyone):
        for name, (_, held, _) in theirs.items():
            for box in held:
                rank = dist.get_global_rank(group, number)
                holders[name].setdefault(box, []).append(rank)
    for name, parts in holders.items():
        boxes = list(parts)
        apart = all(intersect(a, b) is None for a, b in combinations(boxes, 2))
        if not apart or sum(map(numel, boxes)) != numel(whole(shapes[name])):
            raise ValueError(f"the shards of {name} {shapes[name]} do not make it up: {boxes}")
    return [
        Weight(
            name, shape, tuple((box, tuple(ranks)) for box, ranks in holders[name].items()),
            name in derived,
        )
        for name, shape in shapes.items()
    ]  # fmt: skip
