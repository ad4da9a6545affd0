"""Describes the engine 'vllm' without an import of vLLM."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import LoraConfig, RolloutConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.hub.hf_folder import has_tower
from spmdrl.hub.transformers_compat import model_class
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.spec import EngineSpec
from spmdrl.rollout.vllm.core import (
    LEAST_TEMPERATURE,
    check_engine_args,
    check_expert_parallel,
)
from spmdrl.rollout.vllm.derived_weights import is_latent
from spmdrl.rollout.vllm.fp8 import check_fp8
from spmdrl.rollout.vllm.lora import check_adapter
from spmdrl.rollout.vllm.model_types import (
    NOT_STRICT,
    check_frozen_sleep,
    check_images,
    check_model_type,
    check_routed_experts,
)
from spmdrl.rollout.vllm.speculative import check_speculative

BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"


def build(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology, strict: bool,
    lora: LoraConfig | None, looks: ImageLimits | None, load_weights: bool,
    return_routed_experts: bool, frozen: bool,
) -> RolloutEngine:  # fmt: skip
    from spmdrl.rollout.vllm.engine import VllmEngine

    return VllmEngine(
        model, config, max_model_len, topology, strict, lora, looks, load_weights,
        return_routed_experts, frozen,
    )  # fmt: skip


def read_pass(
    engine: Any, token_ids: list[int], rows: Tensor, temperature: float
) -> RecordedPass:  # fmt: skip
    from spmdrl.rollout.vllm.recording import record_pass

    return record_pass(engine, token_ids, rows, temperature)


def check(config: RolloutConfig) -> None:
    require(
        config.temperature >= LEAST_TEMPERATURE,
        f"rollout.temperature={config.temperature}: vLLM would raise it to {LEAST_TEMPERATURE}",
    )
    require(
        os.environ.get(BATCH_INVARIANT, "0") in ("", "0"),
        f"{BATCH_INVARIANT} is set: on a GPU vLLM would put operators without a gradient in the "
        "place of torch's in this whole process, in which the trainer needs them. Unset it, and "
        "for log-probabilities that are alike bit for bit set strict=True",
    )


def check_installed() -> None:
    require(
        importlib.util.find_spec("vllm") is not None,
        "rollout.engine='vllm', but vLLM is not installed: docs/install.md, or use 'hf'",
    )


def check_strict(hf: Any) -> None:
    """Raises ConfigError for a model that vLLM runs by transformers' code. Imports vLLM, which a
    run does later anyway.
    """
    from spmdrl.rollout.vllm import compat

    text = hf.get_text_config()
    require(
        text.model_type not in NOT_STRICT and not is_latent(text),
        f"strict=True: vLLM's layers of model type {text.model_type!r} have no batch-invariant "
        "form; use rollout.engine='hf', or strict=False",
    )
    alone = model_class(AutoModelForCausalLM, type(hf))
    require(
        alone is None or not compat.runs_transformers_code(alone.__name__),
        f"strict=True: vLLM runs model type {text.model_type!r} by transformers' "
        "code, whose layers have no batch-invariant form in it; use rollout.engine='hf'",
    )


def check_model(model: str, hf: Any, config: RolloutConfig, strict: bool) -> None:
    text = hf.get_text_config()
    if config.quantization is not None:
        require(
            not has_tower(model),
            f"rollout.quantization={config.quantization!r} is not for the language model of files "
            "with a tower for images or sounds: leave it out",
        )
        check_fp8(text, config)
    check_model_type(text, config)
    check_expert_parallel(hf, config)
    check_images(hf)
    check_engine_args(config, strict)
    check_speculative(hf, config, strict)


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
    leaves_towers=True,
    takes_engine_args=True,
    speculates=True,
    records_supports=True,
    spreads_experts=True,
    holds_frozen=True,
    check_frozen_sleep=check_frozen_sleep,
    read_pass=read_pass,
    reads_eager=True,
    check_installed=check_installed,
    check=check,
    check_model=check_model,
    check_adapter=check_adapter,
    check_routed_experts=check_routed_experts,
    check_strict=check_strict,
)
