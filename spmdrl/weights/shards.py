"""What each rank holds of the training weights."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from spmdrl.weights.boxes import Box, intersect, numel, whole
from spmdrl.weights.plan import Weight


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


def local_shard(weight: Tensor) -> Tensor:
    """To be called under torch.no_grad()."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def agree_on_shards(named: Mapping[str, Tensor], group: dist.ProcessGroup) -> list[Weight]:
    """Every weight of the job and who holds what of it; a rank without weights gives {}.

    Collective over `group`, where CPU tensors can travel. Raises ValueError where the parts of a
    weight do not make up the whole.
    """
    mine = {name: (tuple(w.shape), held_box(w)) for name, w in named.items()}
    everyone: list[dict[str, tuple[tuple[int, ...], Box | None]]] = [{}] * dist.get_world_size(
        group
    )
    dist.all_gather_object(everyone, mine, group=group)
    shapes = {name: shape for theirs in everyone for name, (shape, _) in theirs.items()}
    holders: dict[str, dict[Box, list[int]]] = {name: {} for name in shapes}
    for number, theirs in enumerate(everyone):
        for name, (_, box) in theirs.items():
            if box is not None:
                rank = dist.get_global_rank(group, number)
                holders[name].setdefault(box, []).append(rank)
    for name, parts in holders.items():
        boxes = list(parts)
        apart = all(intersect(a, b) is None for a, b in pairwise(boxes))
        if not apart or sum(map(numel, boxes)) != numel(whole(shapes[name])):
            raise ValueError(f"the shards of {name} {shapes[name]} do not make it up: {boxes}")
    return [
        Weight(name, shape, tuple((box, tuple(ranks)) for box, ranks in holders[name].items()))
        for name, shape in shapes.items()
    ]
