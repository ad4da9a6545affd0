"""A vLLM engine with FP8 weights: what it holds, what it computes, what is refused."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rollout_checks import load_hf, some_requests, worst_error
from spmdrl_kernels.fp8 import quantize_blocks
from tiny_models import save_qwen3

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import SamplingParams, WeightMismatch
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.fp8 import check_fp8

pytestmark = pytest.mark.vllm

CONFIG = RolloutConfig(quantization="fp8", max_num_seqs=32, kv_cache_mib=32)
needs_amx = pytest.mark.skipif(
    not torch.cpu._is_amx_tile_supported(), reason="vLLM multiplies FP8 with AMX"
)


def save_wide(folder: Path, seed: int = 0) -> Path:
    """Its parts divide into blocks, the hidden size does not."""
    return save_qwen3(
        folder, seed, hidden_size=160, intermediate_size=384, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    torch.set_num_threads(1)
    model = save_wide(tmp_path_factory.mktemp("wide"))
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/pg", rank=0, world_size=1)
        topology = Topology.build(torch.device("cpu"), dp=1, tp=1)
        built = VllmEngine(str(model), CONFIG, 128, topology)
        yield built
        built.shutdown()
        dist.destroy_process_group()


def dequantized(model: Any) -> Any:
    """The model that an FP8 engine of its weights computes, but for rounding to bfloat16."""
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                q, scale_inv = quantize_blocks(module.weight)
                rows, columns = module.weight.shape
                scale = scale_inv.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
                module.weight.copy_(q.float() * scale[:, :columns])
    return model


@needs_amx
def test_it_holds_and_uses_what_is_on_disk(engine: VllmEngine) -> None:
    model = load_hf(Path(engine.model_path))
    assert len(engine.fp8) == 14
    assert engine.check_weights(iter(model.state_dict().items())) == 25 + 14
    params = SamplingParams(temperature=1.0, max_tokens=12)
    plain = worst_error(engine, model, params)
    error = worst_error(engine, dequantized(model), params)
    assert error < 0.02, (error, plain)  # bfloat16
    assert error < plain


@needs_amx
def test_new_weights_are_used_and_a_changed_bit_is_found(
    engine: VllmEngine, tmp_path: Path
) -> None:
    other = load_hf(save_wide(tmp_path, seed=1))
    with pytest.raises(WeightMismatch, match="differs"):
        engine.check_weights(other.named_parameters())
    engine.load_weights(other.named_parameters())
    assert engine.check_weights(other.named_parameters()) == 24 + 14
    params = SamplingParams(temperature=1.0, max_tokens=12)
    assert worst_error(engine, dequantized(other), params) < 0.02
    scale = engine.model.get_parameter("model.layers.1.mlp.gate_up_proj.weight_scale_inv")
    scale.data[3, 1] *= 1.0001
    with pytest.raises(WeightMismatch, match=r"gate_proj.weight_scale_inv differs|up_proj"):
        engine.check_weights(other.named_parameters())


@needs_amx
def test_an_answer_does_not_depend_on_its_company(engine: VllmEngine) -> None:
    requests, params = some_requests(12), SamplingParams(temperature=1.0, max_tokens=16)
    together = engine.generate(requests, params)
    alone = [engine.generate([request], params)[0] for request in requests]
    assert [c.logprobs for c in together] == [c.logprobs for c in alone]


class Hf:
    """A text model's config."""

    num_attention_heads, num_key_value_heads, head_dim = 16, 8, 128
    hidden_size, intermediate_size = 2048, 6144


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
    check_fp8(Hf(), replace(CONFIG, tensor_parallel=4))
    for changes, what in (
        ({"dtype": "float32"}, "bfloat16"),
        ({"dtype": "float16"}, "CPU computes in bfloat16"),
        ({"tensor_parallel": 5}, "409 rows"),
    ):
        with pytest.raises(ConfigError, match=what):
            check_fp8(Hf(), replace(CONFIG, **changes))
    moe, narrow, odd = Hf(), Hf(), Hf()
    odd.hidden_size = 2056
    with pytest.raises(ConfigError, match="hidden_size=2056"):
        check_fp8(odd, CONFIG)
    moe.num_experts, narrow.head_dim = 8, 24  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="experts"):
        check_fp8(moe, CONFIG)
    with pytest.raises(ConfigError, match=r"num_key_value_heads.*192 rows"):
        check_fp8(narrow, CONFIG)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    with pytest.raises(ConfigError, match="AMX"):
        check_fp8(Hf(), CONFIG)
