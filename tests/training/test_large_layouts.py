"""Configs of models of hundreds of billions of parameters: `--dry-run` says that they fit."""

import json
import multiprocessing
import re
import runpy
from pathlib import Path

import programs
import pytest
import torch
from programs import train
from safetensors.torch import save_file
from test_memory_plan import SHAPES
from tiny_models import save_tokenizer

import spmdrl.training.dry_run
import spmdrl.training.rl  # noqa: F401  for the forks

ROOT = Path(__file__).parents[2]
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
       "weight_block_size": [128, 128]}  # fmt: skip
PUBLISHED = {
    "deepseek_v3": SHAPES["DeepSeek-V3"] | {
        "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1, "quantization_config": FP8,
    },
    "qwen3_235b_a22b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 4096,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "eos_token_id": 151645, "hidden_act": "silu", "torch_dtype": "bfloat16",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def forks(monkeypatch):
    """Plans are made by forks of this process: the server of forks imports much that no plan needs,
    and nothing else of `make check` starts it."""
    monkeypatch.setattr(programs, "SERVER", multiprocessing.get_context("fork"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The published config.json files, each beside a tokenizer and a single small tensor."""
    path = tmp_path_factory.mktemp("published")
    for name, config in PUBLISHED.items():
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config))
        save_tokenizer(path / name)
        save_file({"model.norm.weight": torch.ones(4)}, path / name / "model.safetensors")
    row = {"data_source": "openai/gsm8k", "prompt": "1+1", "ground_truth": "2"}
    (path / "train.jsonl").write_text((json.dumps(row) + "\n") * 256)
    turns = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
    (path / "sft.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 256)
    return path


def dry_run(folder: Path, program: str, config: Path, ranks: int, model: str, *args: str) -> str:
    done = train(
        folder, 1, "--config", str(config), "--dry-run", "--ranks", str(ranks), "--gpu_gib", "80",
        "--model", str(folder / model), *args, program=program,
    )  # fmt: skip
    assert done.code == 0, done.output[-3000:]
    return done.output


# the largest layers of a stage, of each rank's 16 experts or 16, and the stage's row of the table
@pytest.mark.programs
@pytest.mark.parametrize(
    ("name", "model", "ranks", "held", "data"),
    [
        # 4 layers: 16 experts of 3 x 7168 x 2048; 187.1 million of attention, a shared expert and a
        # router that 16 data-parallel ranks share; the experts have no copy
        ("deepseek_v3_grpo_256gpu", "deepseek_v3", 256,
         (4 * 16 * 44.04e6, 4 * (187.1e6 + 44.04e6 + 1.84e6)), (1, 16)),
        # 12 layers: 16 experts of 3 x 4096 x 1536; a quarter of 71.3 million of attention, whose
        # optimizer 4 ranks share; the experts' 2
        ("qwen3_235b_a22b_grpo_128gpu", "qwen3_235b_a22b", 128,
         (12 * 16 * 18.87e6, 12 * (71.3e6 / 4 + 0.52e6)), (2, 4)),
    ],
)  # fmt: skip
def test_grpo_with_vllm_fits(folder, name, model, ranks, held, data):
    config = ROOT / "configs" / f"{name}.py"
    said = dry_run(
        folder, "spmdrl.ppo", config, ranks, model, "--data.train", str(folder / "train.jsonl")
    )
    (line,) = re.findall(r"  actor .*parameters; .*", said)
    weights, gradients, adam = (float(number) for number in re.findall(
        r"weights ([\d.]+), gradients ([\d.]+), Adam ([\d.]+)", line)[0])  # fmt: skip
    experts, dense = held
    assert weights == pytest.approx(2 * (experts + dense) / 2**30, rel=0.01)
    assert gradients == pytest.approx(2 * weights, rel=0.01)
    assert adam == pytest.approx(12 * (experts / data[0] + dense / data[1]) / 2**30, rel=0.01)
    peak = float(re.findall(r"peak +([\d.]+) of 80.0 GiB", said)[0])
    recipes = (ROOT / "docs/recipes.md").read_text()
    assert re.search(rf"^\| `configs/{name}.py`.* {peak:.1f} \|$", recipes, re.M), peak
    assert peak < 80 - 6.5, said  # less what is kept for CUDA, NCCL and fragmentation
    assert f"{ranks // (32 if '671' in line else 8)} vllm engines" in said


def test_fine_tuning_fits(folder):
    values = runpy.run_path(str(ROOT / "configs/deepseek_v3_grpo_256gpu.py"))["LAYOUT"]
    Path(folder, "sft.py").write_text(
        "from spmdrl.config import *\n"
        "config = SftConfig(model='m', out='out', data=SftDataConfig(train='sft.jsonl', "
        f"batch_size=256), actor=TrainConfig(**{values | {'offload_params': False}}))\n"
    )
    said = dry_run(folder, "spmdrl.sft", folder / "sft.py", 256, "deepseek_v3")
    assert "pp 16 x dp 16 x cp 1 x tp 1, layers in stage 0 3" in said
    assert float(re.findall(r"peak +([\d.]+) of 80.0 GiB", said)[0]) < 80 - 6.5, said
