"""Describes the engine 'hf' before it is built."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from spmdrl.config import LoraConfig, RolloutConfig, require
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.engines.recorded_pass import RecordedPass
from spmdrl.rollout.base import RolloutEngine
from spmdrl.rollout.spec import EngineSpec, accept

OWN_CACHE = ("minimax",)  # model types; transformers gives them no cache of the usual kind


def build(
    model: str, config: RolloutConfig, max_model_len: int, topology: Topology, strict: bool,
    lora: LoraConfig | None, looks: ImageLimits | None, load_weights: bool,
    return_routed_experts: bool, frozen: bool,
) -> RolloutEngine:  # fmt: skip
    from spmdrl.rollout.hf.engine import HfEngine

    assert lora is None  # build.check_adapter
    return HfEngine(
        model, config, max_model_len, topology, strict, looks, load_weights, return_routed_experts
    )


def read_pass(
    engine: Any, token_ids: list[int], rows: Tensor, temperature: float
) -> RecordedPass:  # fmt: skip
    from spmdrl.rollout.hf.recording import record_pass

    return record_pass(engine, token_ids, rows, temperature)


def check(config: RolloutConfig) -> None:
    tp = config.tensor_parallel
    require(tp == 1, f"rollout.engine='hf' has no tensor parallelism: tensor_parallel={tp}")
    require(
        config.enforce_eager is not False,
        "rollout.enforce_eager=False has no effect with rollout.engine='hf', which compiles "
        "nothing: leave it out",
    )


def check_model(model: str, hf: Any, config: RolloutConfig, strict: bool) -> None:
    kind = hf.get_text_config().model_type
    require(
        kind not in OWN_CACHE,
        f"rollout.engine='hf' does not sample model type {kind!r}, whose cache is one of its own",
    )


def check_strict(hf: Any) -> None:
    windows = "sliding_attention" in (getattr(hf.get_text_config(), "layer_types", None) or ())
    require(
        not windows,
        "strict=True with rollout.engine='hf' needs a model without sliding windows, since its "
        "cache drops what has left the window; use rollout.engine='vllm'",
    )


SPEC = EngineSpec(
    name="hf",
    title="transformers",
    library="transformers",
    build=build,
    starts_blank=True,
    leaves_towers=True,
    keeps_floats=True,
    records_supports=True,
    mixes_dtypes=True,
    holds_frozen=True,  # its weights go to the host, and come back
    read_pass=read_pass,
    check_routed_experts=accept,
    check=check,
    check_model=check_model,
    check_strict=check_strict,
)
