"""Describes the engine 'vllm' without an import of vLLM."""

from __future__ import annotations

import importlib.util
from typing import Any

from spmdrl.config import LoraConfig, RolloutConfig, require
from spmdrl.data.images import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.spec import EngineSpec
from spmdrl.rollout.vllm.core import LEAST_TEMPERATURE, check_attention, check_engine_args
from spmdrl.rollout.vllm.fp8 import check_fp8
from spmdrl.rollout.vllm.lora import check_adapter


def build(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology, strict: bool,
    lora: LoraConfig | None, looks: ImageLimits | None, load_weights: bool,
) -> RolloutEngine:  # fmt: skip
    from spmdrl.rollout.vllm.engine import VllmEngine

    return VllmEngine(model, config, max_model_len, topology, strict, lora, looks, load_weights)


def check(config: RolloutConfig) -> None:
    require(
        config.temperature >= LEAST_TEMPERATURE,
        f"rollout.temperature={config.temperature}: vLLM would raise it to {LEAST_TEMPERATURE}",
    )
    require(
        importlib.util.find_spec("vllm") is not None,
        "rollout.engine='vllm', but vLLM is not installed: docs/install.md, or use 'hf'",
    )


def check_model(model: str, hf: Any, config: RolloutConfig, strict: bool) -> None:
    text = hf.get_text_config()
    if config.quantization is not None:
        check_fp8(text, config)
    check_engine_args(config, strict)
    check_attention(model, getattr(text, "kv_lora_rank", None) is not None)


SPEC = EngineSpec(
    name="vllm",
    title="vLLM",
    library="vllm",
    build=build,
    starts_blank=True,
    library_bytes=300 << 20,  # its modules, engine and scheduler
    shared_bytes=4 << 20,
    has_kv_cache=True,
    least_temperature=LEAST_TEMPERATURE,
    quantizes=True,
    takes_engine_args=True,
    check=check,
    check_model=check_model,
    check_adapter=check_adapter,
)
