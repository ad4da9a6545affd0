"""The configs of published models: each is sound on its GPUs and its planned memory fits.

The models are their published config.json files alone. `--dry-run --ranks N` makes the same checks;
tests/training/test_large_layouts.py runs it for those of hundreds of billions of parameters.
"""

import json
import re
from pathlib import Path

import pytest
from test_memory_plan import SHAPES

from spmdrl.cli.arguments import load_config
from spmdrl.config import PpoConfig
from spmdrl.training.checks.memory_fit import check_memory, rl_planner
from spmdrl.training.checks.memory_plan import memory_plan
from spmdrl.training.checks.rl import require_sound

CONFIGS = Path(__file__).parents[2] / "configs"
RECIPES = Path(__file__).parents[2] / "docs" / "recipes.md"
PUBLISHED = SHAPES | {
    "Qwen3-4B": SHAPES["Qwen3-8B"] | {
        "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": SHAPES["Llama-3.3-70B"] | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "gemma-3-12b-it": {
        "model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106], "mm_tokens_per_image": 256, "image_token_index": 262144,
        "text_config": {
            "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360,
            "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8,
            "head_dim": 256, "sliding_window": 1024, "vocab_size": 262208,
            "max_position_embeddings": 131072, "query_pre_attn_scalar": 256,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
            "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 896, "patch_size": 14,
        },
    },
    "Qwen2.5-VL-7B": {
        "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "max_position_embeddings": 128000, "rope_theta": 1e6, "tie_word_embeddings": False,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "eos_token_id": 151645,
        "image_token_id": 151655, "vision_start_token_id": 151652,
        "vision_config": {
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
            "temporal_patch_size": 2,
        },
    },
}  # fmt: skip
# config, model -> millions of parameters
RUNS = {
    ("qwen3_0.6b_gsm8k_grpo_8gpu", "Qwen3-0.6B"): 596.0,
    ("qwen3_4b_math_grpo_8gpu", "Qwen3-4B"): 4022.5,
    ("qwen3_8b_math_grpo_8gpu", "Qwen3-8B"): 8190.7,
    ("qwen3_30b_a3b_gsm8k_grpo_16gpu", "Qwen3-30B-A3B"): 30532.1,
    ("llama3_8b_math_grpo_8gpu", "Llama-3.1-8B"): 8030.3,
    ("llama3_70b_math_grpo_64gpu", "Llama-3.3-70B"): 70553.7,
    ("gemma3_12b_math_grpo_8gpu", "gemma-3-12b-it"): 11766.0,
    ("qwen2_5_vl_7b_geometry3k_grpo_8gpu", "Qwen2.5-VL-7B"): 8292.2,
}


@pytest.mark.parametrize(("name", "model"), RUNS, ids=[name for name, _ in RUNS])
def test_it_is_sound_and_fits(name, model, tmp_path):
    Path(tmp_path, "config.json").write_text(json.dumps(PUBLISHED[model]))
    path = CONFIGS / f"{name}.py"
    config = load_config(str(path), PpoConfig, {"model": str(tmp_path)})
    ranks = int(name.rpartition("_")[2].removesuffix("gpu"))
    require_sound(config, ranks)
    check_memory(config, ranks, rl_planner(None, 80.0))
    plan = memory_plan(config, ranks, gpu_gib=80.0)
    (said,) = re.findall(r"actor .*?([\d,.]+)M parameters", "\n".join(plan.lines))
    assert float(said.replace(",", "")) == pytest.approx(RUNS[name, model], rel=1e-3)
    assert plan.too_much == 0
    peak = f"{plan.fullest.peak.total:.1f} in {plan.fullest.peak.name}"
    row = rf"^\| `configs/{name}.py` \|.*\| {ranks} \|.*\| {peak} \|$"
    assert re.search(row, RECIPES.read_text(), re.M), peak
    text = path.read_text()
    assert f"configs/{name}.py" in text and f"{ranks} GPUs" in text.replace("two nodes of 8", "16")


def test_every_config_of_a_published_model_is_here_or_among_the_large_ones():
    known = {name for name, _ in RUNS} | {"deepseek_v3_grpo_256gpu", "qwen3_235b_a22b_grpo_128gpu"}
    assert {path.stem for path in CONFIGS.glob("*gpu.py")} == known
