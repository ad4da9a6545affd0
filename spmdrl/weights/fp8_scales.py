"""Scales of the weights that an engine keeps in FP8, agreed on by all ranks before each push."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from spmdrl_kernels.fp8 import block_maxima, num_blocks, scales_of
from torch import Tensor

from spmdrl.weights.boxes import Box
from spmdrl.weights.plan import Weight


class BlockScales:
    """One float32 per block of 128 x 128 elements of every weight.

    Every rank has them all: 8 billion weights have 2 MB of them. So a rank can quantise the part
    that it holds, wherever its shard ends, and an engine finds its scales without being sent any.
    """

    def __init__(self, weights: list[Weight], device: torch.device) -> None:
        self.weights = weights
        grids = [num_blocks(weight.shape) for weight in weights]
        numbers = [rows * columns for rows, columns in grids]
        self.flat = torch.ones(sum(numbers), device=device)
        parts = self.flat.split(numbers)
        self.by_name = {  # views: they stay where they are
            weight.name: part.view(grid)
            for weight, part, grid in zip(weights, parts, grids, strict=True)
        }

    def agree(
        self, shards: Mapping[str, list[tuple[Box, Tensor]]], group: dist.ProcessGroup
    ) -> None:  # fmt: skip
        """Collective over `group`. Raises ValueError on every rank where a weight is not finite."""
        self.flat.zero_()
        for weight in self.weights:
            for box, shard in shards.get(weight.name, ()):
                first = (box[0][0], box[1][0])
                block_maxima(shard, first, self.by_name[weight.name])
        dist.all_reduce(self.flat, dist.ReduceOp.MAX, group=group)
        if not self.flat.isfinite().all():
            wrong = [n for n, largest in self.by_name.items() if not largest.isfinite().all()]
            raise ValueError(
                f"{len(wrong)} weights are not finite and have no FP8 form: {wrong[:5]}"
            )
        self.flat.copy_(scales_of(self.flat))
