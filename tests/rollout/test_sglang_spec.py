"""What the engine 'sglang' refuses, before anything is loaded; SGLang need not be installed."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig
from spmdrl.rollout.build import ENGINES, check_adapter, check_engine

CONFIG = RolloutConfig(engine="sglang")


def hf_config(**options: Any) -> Any:
    config = SimpleNamespace(**{"model_type": "qwen3"} | options)
    config.get_text_config = lambda: config
    return config


@pytest.mark.parametrize(
    ("options", "hf", "said"),
    [
        ({"quantization": "fp8"}, {}, "'fp8' is vLLM's: set rollout.engine='vllm'"),
        ({"engine_args": {"block_size": 16}}, {}, "are vLLM's: set rollout.engine='vllm'"),
        ({}, {"kv_lora_rank": 512}, "multi-head latent attention.*or 'hf'"),
        ({}, {"quantization_config": {"bits": 4}}, "is quantised.*or rollout.engine='vllm'"),
        ({}, {"model_type": "qwen3_vl"}, "sees images.*use rollout.engine='vllm'"),
    ],
)
def test_what_it_cannot_do_is_refused(
    options: dict[str, Any], hf: dict[str, Any], said: str
) -> None:
    check_engine("folder", hf_config(), CONFIG, False)
    with pytest.raises(ConfigError, match=said):
        check_engine("folder", hf_config(**hf), RolloutConfig(engine="sglang", **options), False)


def test_adapters_and_equal_bits_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights\.lora='merge'"):
        check_adapter(LoraConfig(), CONFIG, hf_config())
    with pytest.raises(ConfigError, match=r"strict=True.*use rollout.engine='vllm' or 'hf'"):
        ENGINES["sglang"].check_strict(hf_config())


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is installed")
def test_where_it_is_missing_the_command_is_named() -> None:
    with pytest.raises(ConfigError, match=r"not installed: launch/setup.sh --engine sglang"):
        ENGINES["sglang"].check_installed()
