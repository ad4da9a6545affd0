"""Trainer -> engine, after every update."""

from __future__ import annotations

from spmdrl.config import WeightsConfig
from spmdrl.engines.engine import TrainEngine
from spmdrl.engines.fsdp import DTYPES
from spmdrl.rollout.engine import RolloutEngine


def sync_weights(
    actor: TrainEngine, rollout: RolloutEngine, dtype: str, config: WeightsConfig
) -> None:
    """Gathers the actor's shards bucket by bucket, straight into the engine. Collective.

    dtype: the engine's; shards are cast while they are packed. Raises WeightMismatch with
    config.check where the engine does not hold what was sent.
    """
    bucket_bytes = config.bucket_mib << 20
    rollout.load_weights(actor.named_weights(DTYPES[dtype], bucket_bytes))
    if config.check:
        rollout.check_weights(actor.named_weights(DTYPES[dtype], bucket_bytes))
