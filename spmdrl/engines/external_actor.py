"""The protocol of an actor that another program has built and trains: what embed.attach asks."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch

from spmdrl.config import TrainConfig
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import TrainEngine


class ExternalActor(Protocol):
    """A host's model and optimizer on this rank, which fit `config.model`."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in."""
        ...

    @property
    def has_experts(self) -> bool:
        """Whether a token's experts depend on rounding."""
        ...

    def role(self, given: TrainConfig) -> TrainConfig:
        """Returns the actor's config with the host's layout in it. Raises ConfigError where `given`
        says what is the host's to say.
        """
        ...

    def engine(self, role: TrainConfig, everyone: Topology) -> TrainEngine:
        """Returns an engine around the model and the optimizer.

        everyone: all ranks of the program, whose groups serve for the engine's layout too.
        Collective over them.
        """
        ...

    def driven_by_us(self) -> AbstractContextManager[None]:
        """Around all that reads or trains the model: what the host had under way is ended."""
        ...
