"""The experts that the tokens of a batch were sent to, where the rollout engine says so."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routing(NamedTuple):
    """Says how many experts a token is sent to, and out of how many, in each layer with experts."""

    num_layers: int
    top_k: int
    num_experts: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest dtype that holds an expert's number and that gloo or NCCL send as bytes."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def unknown(self, num_tokens: int) -> Tensor:
        """(num_tokens, num_layers, top_k): the first experts, for tokens of which nobody knows
        where they were sent. They differ, as a router's choice does.
        """
        row = torch.arange(self.top_k, dtype=self.dtype)
        return row.expand(num_tokens, self.num_layers, -1).clone()
