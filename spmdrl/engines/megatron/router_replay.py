"""The rollout engine's experts in a Megatron model, by megatron-core's own RouterReplay.

Of each micro-batch the routers of a chunk are told their experts before its forward pass. Where
layers are computed again for the backward pass, they take those of the micro-batch whose turn it
is: the schedules go backward through a chunk's micro-batches in the order of their forward passes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from spmdrl.engines.megatron import compat


class ReplayedRouters:
    """The routers of this rank's model chunks."""

    def __init__(self, chunks: list[Any], moe_layers: list[bool], recomputes: bool) -> None:
        """moe_layers: for each layer of the model whether it has experts; recomputes: whether
        layers are computed again for the backward pass.
        """
        self.recomputes = recomputes
        self.of_chunk = {
            id(chunk): [
                (sum(moe_layers[:number]), replay)
                for number, replay in compat.router_replays(chunk)
            ]
            for chunk in chunks
        }

    @contextmanager
    def forward(self, chunk: Any, experts: Tensor, forward_only: bool) -> Iterator[None]:
        """Around the forward pass of a chunk. experts: (num_local, num_moe_layers, top_k), of the
        tokens that routers of this rank are given.
        """
        routers = self.of_chunk[id(chunk)]
        for column, replay in routers:
            compat.replay_forward(replay, experts[:, column].long())
        yield
        for _, replay in routers:
            compat.replay_backward(replay, wanted=self.recomputes and not forward_only)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around a schedule, behind which routers choose for themselves again."""
        try:
            yield
        finally:
            for routers in self.of_chunk.values():
                for _, replay in routers:
                    compat.forget_experts(replay)
