"""Builds the engine that a config names; only its library is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmdrl.distributed.collectives import level_group_count

if TYPE_CHECKING:
    from spmdrl.config import TrainConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.engines.base import TrainEngine


def build_engine(
    kind: str, model: str, config: TrainConfig, topology: Topology, frozen: bool = False,
    job: Topology | None = None, strict: bool = False, load_weights: bool = True,
    in_pairs: bool = False,
) -> TrainEngine | None:  # fmt: skip
    """The engine that config.engine names; only its library is imported.

    kind: "policy", "value", or "reward", which is frozen or trained on pairs; topology: with the
    axes of topology.train_degrees(config); job: all ranks, where torch.distributed's own group
    cannot take CPU tensors. strict: see FsdpEngine. load_weights: without it only the model's
    config is read, and `take_weights` is to follow. in_pairs: as of FsdpEngine.
    Collective over the job: ranks outside of the topology get None.
    """
    engine: TrainEngine | None = None
    if topology.here and config.engine == "megatron":
        from spmdrl.engines.megatron.engine import MegatronEngine
        from spmdrl.engines.megatron.parts import build_parts

        parts = build_parts(kind, model, config, topology, frozen, load_weights)
        engine = MegatronEngine(parts, config, topology, in_pairs)
    elif topology.here:
        from spmdrl.engines.fsdp.engine import FsdpEngine

        engine = FsdpEngine.build(
            kind, model, config, topology, frozen, strict, load_weights, in_pairs
        )
    level_group_count(job.control if job is not None else None)
    return engine
