"""Measures in a replayed step what each token of one sample adds to the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from spmdrl.config import ConfigError, PpoConfig
from spmdrl.data.images import BatchImages
from spmdrl.engines.base import LossFn, TrainEngine
from spmdrl.engines.fsdp.token_gradients import TokenGradients, token_gradients
from spmdrl.training.roles import Roles
from spmdrl.types import Batch

if TYPE_CHECKING:
    from spmdrl.engines.fsdp.engine import FsdpEngine


class MeasuredEngine:
    """The actor's engine, which measures one sample before each update that has it."""

    def __init__(
        self, engine: TrainEngine, address: tuple[int, int], still_going: Callable[[], None]
    ) -> None:
        """still_going: says that this rank is no hang, while one phase takes the passes of all
        tokens."""
        self.engine = cast("FsdpEngine", engine)  # check_gradients refuses others
        self.address, self.still_going = address, still_going
        self.last: TokenGradients | None = None  # of the last update with the sample

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def update(
        self, batch: Batch, loss_fn: LossFn, temperature: float, images: BatchImages | None = None
    ) -> dict[str, float]:
        """Does what the engine's update does. Collective over its ranks."""
        pairs = list(zip(batch.groups.tolist(), batch.indices.tolist(), strict=True))
        seq = pairs.index(self.address) if self.address in pairs else None
        found = token_gradients(
            self.engine, batch, seq, loss_fn, temperature, images, self.still_going
        )
        self.last = found or self.last
        return self.engine.update(batch, loss_fn, temperature, images)


def measured(roles: Roles, address: tuple[int, int]) -> MeasuredEngine:
    """Puts a measured engine in the place of the actor's. address: group and index in the step."""
    stride = 1 + roles.config.algo.replay_steps
    placed = address[0] * stride, address[1]
    engine = MeasuredEngine(roles.actor.model, placed, roles.phases.still_going)
    roles.actor.engine = engine
    return engine


def check_gradients(config: PpoConfig, address: tuple[int, int] | None) -> None:
    """Raises ConfigError where --gradients cannot be had."""
    if address is None:
        raise ConfigError("--gradients: --sample P.S says of which sample")
    if config.actor.engine != "fsdp":
        raise ConfigError(
            f"--gradients: the actor's engine is {config.actor.engine}, and gradients of single "
            "tokens are those of engine fsdp; leave it out"
        )
