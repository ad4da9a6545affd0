"""Checkpoints in FP8 blocks and in MXFP4: each rank reads its rows of them as floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_sharded_loading import save_family

from spmdrl.config import RolloutConfig
from spmdrl.hub.hf_folder import load_hf_config
from spmdrl.hub.quantized_weights import BLOCKS, SCALES, is_readable, mxfp4_weight
from spmdrl.rollout.build import is_filled_by_push
from spmdrl.rollout.vllm.core import FLOAT32_HEAD, config_of_engine, moe_backend

BLOCK = 24  # divides no size of the tiny models


Weights = dict[str, torch.Tensor]


def weights_on(topology: Any, model: str, *layouts: dict[str, Any]) -> list[Weights]:
    """All weights as FSDP2 has read them; then as engine megatron has in each of the layouts."""
    from spmdrl.config import TrainConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    found = []
    for engine, layout in (("fsdp", {}), *(("megatron", layout) for layout in layouts)):
        config = TrainConfig(dtype="float32", engine=engine, **layout)
        ranks = Topology.build(topology.device, **train_degrees(config))
        built = build_engine("policy", model, config, ranks, frozen=True)
        named = built.named_weights(torch.float32, 1 << 20)
        found.append({name: t.clone() for name, t in named})
    return found


CUTS = {
    "qwen3": ({"tensor_parallel": 2}, {"pipeline_parallel": 2}),
    "deepseek_v3": (
        {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
        {"expert_parallel": 2},
    ),
    "minimax_m2": ({"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},),
}  # fmt: skip


def vllm_from_disk(topology: Any, model: str) -> None:
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.build import build_engine

    places = Topology.build(topology.device, dp=-1, tp=1)
    build_engine(model, RolloutConfig(kv_cache_mib=8, dtype="bfloat16"), 32, places)


def quantize(folder: Path, how: dict[str, Any], change: Any) -> None:
    """Rewrites the files of a model: `change` returns what a tensor becomes, by name."""
    file = folder / "model.safetensors"
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        stored |= change(name, tensor)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": how}))


@pytest.mark.ranks
@pytest.mark.megatron
@pytest.mark.parametrize("family", CUTS)
def test_ranks_read_their_rows_of_fp8_blocks(family: str, tmp_path: Path) -> None:
    model = save_family(tmp_path / "model", family)
    wanted: dict[str, torch.Tensor] = {}

    def in_fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if tensor.ndim != 2 or "embed" in name or "lm_head" in name:
            wanted[name] = tensor.float()
            return {name: tensor}
        rows, columns = tensor.shape
        grid = torch.rand(-(-rows // BLOCK), -(-columns // BLOCK)) + 0.5
        scales = grid.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :columns]
        stored = (tensor.float() / scales).to(torch.float8_e4m3fn)
        wanted[name] = stored.float() * scales
        return {name: stored, name + "_scale_inv": grid}

    quantize(model, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, in_fp8)
    for found in run_ranks(2, weights_on, str(model), *CUTS[family]):
        for weights in found:
            assert weights.keys() >= wanted.keys()
            assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())


@pytest.mark.ranks
@pytest.mark.vllm
def test_ranks_read_their_experts_of_mxfp4(tmp_path: Path) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=64, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(tmp_path)
    wanted: dict[str, torch.Tensor] = {}

    def in_fp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        wanted[name] = tensor.float()
        if not name.endswith(("gate_up_proj", "down_proj")):
            return {name: tensor}
        experts, columns, rows = tensor.shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, rows, columns // 32), dtype=torch.uint8)
        wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        read = mxfp4_weight("x", tuple(blocks.shape)).read
        parts = {"x" + BLOCKS: blocks, "x" + SCALES: scales}
        assert torch.equal(read(lambda key, rows: parts[key], None), wanted[name])
        return {name + BLOCKS: blocks, name + SCALES: scales}

    quantize(tmp_path, {"quant_method": "mxfp4"}, in_fp4)
    assert is_filled_by_push(str(tmp_path), RolloutConfig())  # in floats, whatever the files have
    hf = load_hf_config(str(tmp_path))
    backends = [moe_backend(hf, on_cpu=False, in_floats=pushed) for pushed in (True, False)]
    assert backends == ["triton", "auto"]
    told = config_of_engine(FLOAT32_HEAD, hf)
    assert not hasattr(told, "quantization_config") and told.head_dtype == "float32"
    assert is_readable(hf)
    for read in run_ranks(2, weights_on, str(tmp_path), {"pipeline_parallel": 2}):
        for found in read:
            assert found.keys() == wanted.keys()
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    # without a trainer (spmdrl.evaluate) vLLM reads MXFP4 itself, for which it has GPUs alone
    with pytest.raises(AssertionError, match="no kernels for MXFP4 experts on CPUs"):
        run_ranks(1, vllm_from_disk, str(tmp_path))
