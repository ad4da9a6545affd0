"""Describes the engine 'sglang' without an import of SGLang."""

from __future__ import annotations

import importlib.util
from typing import Any

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.hub.hf_folder import sees_images
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.sglang.compat import INSTALL
from spmdrl.rollout.spec import EngineSpec


def build(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology, strict: bool,
    lora: LoraConfig | None, looks: ImageLimits | None, load_weights: bool,
    return_routed_experts: bool, frozen: bool,
) -> RolloutEngine:  # fmt: skip
    from spmdrl.rollout.sglang.engine import SglangEngine

    assert not strict and lora is None and looks is None  # refused below
    assert not return_routed_experts and not frozen
    return SglangEngine(model, config, max_model_len, topology, load_weights)


def check_installed() -> None:
    require(
        importlib.util.find_spec("sglang") is not None,
        f"rollout.engine='sglang', but SGLang is not installed: {INSTALL} (docs/sglang.md), or use "
        "'vllm' or 'hf'",
    )


def check_model(model: str, hf: Any, config: RolloutConfig, strict: bool) -> None:
    text = hf.get_text_config()
    asked = f"rollout.engine='sglang': {model}"
    require(
        not sees_images(hf),
        f"{asked} sees images, which are not given to SGLang here; use rollout.engine='vllm'",
    )
    require(
        getattr(text, "kv_lora_rank", None) is None,
        f"{asked} has multi-head latent attention, for which SGLang computes from products of "
        "weights that an update does not renew; use rollout.engine='vllm' or 'hf'",
    )
    require(
        getattr(hf, "quantization_config", None) is None,
        f"{asked} is quantised, and SGLang keeps such weights in an order of its own, which an "
        "update in place would miss; use a checkpoint that is not, or rollout.engine='vllm'",
    )


def check_strict(hf: Any) -> None:
    raise ConfigError(
        "strict=True: rollout.engine='sglang' has no layers whose logprobs are equal in every bit "
        "to the trainer's; use rollout.engine='vllm' or 'hf'"
    )


SPEC = EngineSpec(
    name="sglang",
    runs_on_cpus=False,
    title="SGLang",
    library="sglang",
    build=build,
    library_bytes=300 << 20,
    has_kv_cache=True,
    share_has_passes=False,
    check_installed=check_installed,
    check_model=check_model,
    check_strict=check_strict,
)
