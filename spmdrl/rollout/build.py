"""Builds the engine that a config names; only its library is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spmdrl.distributed.collectives import level_group_count

if TYPE_CHECKING:
    from spmdrl.config import LoraConfig, RolloutConfig
    from spmdrl.data.images import ImageLimits
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import RolloutEngine


def build_engine(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology,
    job: Topology | None = None, strict: bool = False, lora: LoraConfig | None = None,
    looks: ImageLimits | None = None, load_weights: bool = True,
) -> RolloutEngine | None:  # fmt: skip
    """The engine that config.engine names; only its library is imported.

    lora: vLLM keeps an adapter beside its weights, which are then the base's. looks: which images
    prompts have, where the model sees any.

    Collective over the job: ranks outside of `topology`, whose axes are dp and tp, get None. job:
    all ranks, where torch.distributed's own group cannot take CPU tensors. strict: logprobs are bit
    for bit those of a strict training engine with the same weights. load_weights: without it only
    the model's config is read, and weights must be given before anything is sampled.
    """
    engine: RolloutEngine | None = None
    if topology.here and config.engine == "hf":
        from spmdrl.rollout.hf.engine import HfEngine

        engine = HfEngine(model, config, max_model_len, topology, strict, looks, load_weights)
    elif topology.here:
        from spmdrl.rollout.vllm.engine import VllmEngine

        engine = VllmEngine(
            model, config, max_model_len, topology, strict, lora, looks, load_weights
        )  # fmt: skip
    level_group_count(job.control if job is not None else None)
    return engine
