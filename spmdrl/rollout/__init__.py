"""Engines that sample: vLLM inside the ranks, or Hugging Face `generate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmdrl.config import RolloutConfig
    from spmdrl.rollout.engine import RolloutEngine
    from spmdrl.topology import Topology


def build_engine(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology
) -> RolloutEngine:
    """The engine that config.engine names; only its library is imported. Collective."""
    if config.engine == "hf":
        from spmdrl.rollout.hf import HfEngine

        return HfEngine(model, config, max_model_len, topology)
    from spmdrl.rollout.vllm import VllmEngine

    return VllmEngine(model, config, max_model_len, topology)
