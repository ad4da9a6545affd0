"""The families of models that docs/models.md has a row for, each by the config of its first model.

A test makes a tiny model of each (spmdrl/hub/tiny_config.py). Where a config's own defaults are of
no model that exists, the fields that differ stand here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sights import SIGHTS, add_tower, num_tokens, save_processor
from tiny_models import CHARS, save_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from spmdrl.hub.hf_folder import meta_model
from spmdrl.hub.tiny_config import tiny_config


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    title: str
    kind: str  # transformers' model type: of its language model, or of all with its tower
    fields: dict[str, Any] = field(default_factory=dict)
    rollout_dtype: str = "float32"  # in which vLLM samples here
    tower: bool = False  # whether its checkpoints have one, which is left out
    images: bool = False  # whether it is kept, and prompts have images

    @property
    def key(self) -> str:
        """Returns what the table calls its row."""
        return f"{self.kind} with images" if self.images else self.kind


NEMOTRON_H = ["linear_attention", "mlp", "full_attention", "mlp"] * 8
GRANITE = ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 8
CONV = ["conv", "conv", "full_attention", "conv"] * 4
LFM2 = {"layer_types": CONV, "num_hidden_layers": 16, "conv_dim": 2048, "block_dim": 2048}
GROUPS = {"topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8}
FAMILIES = [
    Family("Qwen2, Qwen2.5", "qwen2"),
    Family("Qwen3", "qwen3", {"num_key_value_heads": 8}),
    Family("Qwen2-MoE", "qwen2_moe"),
    Family("Qwen3-MoE", "qwen3_moe"),
    Family("Qwen3-Next", "qwen3_next", rollout_dtype="bfloat16"),
    Family("Qwen3.5", "qwen3_5_text", rollout_dtype="bfloat16"),
    Family("Qwen3.5-MoE", "qwen3_5_moe_text", rollout_dtype="bfloat16"),
    Family("Llama 2, 3", "llama", {"num_key_value_heads": 8}),
    Family("Llama 4", "llama4_text"),
    Family("Mistral", "mistral"),
    Family("Ministral", "ministral", {"head_dim": 128, "num_key_value_heads": 8}),
    Family("Ministral 3", "ministral3"),
    Family("Mixtral", "mixtral"),
    Family("Gemma", "gemma"),
    Family("Gemma 2", "gemma2"),
    Family("Gemma 3", "gemma3_text"),
    Family("Gemma 3n", "gemma3n_text"),
    Family("Gemma 4", "gemma4_text"),
    Family("DeepSeek V2", "deepseek_v2", {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 6,
                                          "first_k_dense_replace": 1}),
    Family("DeepSeek V3, R1; Kimi K2; Moonlight", "deepseek_v3", GROUPS),
    Family("DeepSeek V3.2", "deepseek_v32", GROUPS),
    Family("DeepSeek V4", "deepseek_v4"),
    Family("Kimi Linear", "kimi_linear", rollout_dtype="bfloat16"),
    Family("GLM 4 (glm)", "glm"),
    Family("GLM 4 (glm4)", "glm4"),
    Family("GLM 4.5, 4.6 (glm4_moe)", "glm4_moe", {"head_dim": 128}),
    Family("GLM 4.7 Flash (glm4_moe_lite)", "glm4_moe_lite", {"first_k_dense_replace": 1}),
    Family("GLM 5 (glm_moe_dsa)", "glm_moe_dsa"),
    Family("gpt-oss", "gpt_oss"),
    Family("MiniMax Text 01, M1", "minimax"),
    Family("MiniMax M2", "minimax_m2", {"rotary_dim": 64, "head_dim": 128,
                                          "scoring_func": "sigmoid", "use_routing_bias": True}),
    Family("Nemotron 4, Minitron", "nemotron", {"head_dim": 128, "num_key_value_heads": 8}),
    Family("Nemotron-H", "nemotron_h", {"layers_block_type": NEMOTRON_H}),
    Family("Granite", "granite", {"logits_scaling": 8.0, "embedding_multiplier": 12.0}),
    Family("Granite-MoE", "granitemoe", {"logits_scaling": 6.0}),
    Family("Granite 4 hybrid", "granitemoehybrid", {"logits_scaling": 6.0, "layer_types": GRANITE}),
    Family("OLMo", "olmo"),
    Family("OLMo 2", "olmo2"),
    Family("OLMo 3", "olmo3"),
    Family("OLMo hybrid", "olmo_hybrid", rollout_dtype="bfloat16"),
    Family("OLMoE", "olmoe"),
    Family("Phi 1, 2", "phi"),
    Family("Phi 3, 4", "phi3"),
    Family("Phi 3.5-MoE", "phimoe"),
    Family("SmolLM3", "smollm3"),
    Family("Falcon-H1", "falcon_h1"),
    Family("Seed-OSS", "seed_oss"),
    Family("Hunyuan", "hunyuan_v1_dense", {"head_dim": 128, "num_key_value_heads": 8}),
    Family("Hunyuan-MoE", "hunyuan_v1_moe", {"head_dim": 128, "num_key_value_heads": 8,
                                             "num_experts": 16}),
    Family("Ernie 4.5", "ernie4_5"),
    Family("Ernie 4.5-MoE", "ernie4_5_moe"),
    Family("Cohere Command R", "cohere"),
    Family("Cohere Command A", "cohere2"),
    Family("EXAONE 4", "exaone4"),
    Family("EXAONE-MoE", "exaone_moe"),
    Family("Jamba", "jamba"),
    Family("Bamba", "bamba", {"attn_layer_indices": [2, 10]}),
    Family("LFM2", "lfm2", LFM2),
    Family("LFM2-MoE", "lfm2_moe", LFM2),
    Family("Falcon", "falcon"),
    Family("StarCoder 2", "starcoder2"),
    Family("StableLM 2", "stablelm"),
    Family("GPT-2", "gpt2"),
    Family("GPT-NeoX, Pythia", "gpt_neox"),
    Family("OPT", "opt"),
    Family("Apertus", "apertus"),
    Family("MiniCPM 3", "minicpm3"),
    Family("dots.llm1", "dots1", {"n_group": 1, "topk_group": 1, "norm_topk_prob": True,
                                  "num_experts_per_tok": 6, "n_routed_experts": 128,
                                  "n_shared_experts": 2, "first_k_dense_replace": 1}),
]  # fmt: skip
KIMI_VL = {"text_config": {  # config.json of Kimi-VL-A3B
    "vocab_size": 163840, "hidden_size": 2048, "intermediate_size": 11264, "n_shared_experts": 2,
    "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_routed_experts": 64, "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 6, "moe_layer_freq": 1, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "scoring_func": "sigmoid", "rms_norm_eps": 1e-5, "rope_theta": 8e5,
    "rope_scaling": None, "max_position_embeddings": 131072,
}}  # fmt: skip
FAMILIES += [
    Family("Qwen3.5, all published", "qwen3_5", rollout_dtype="bfloat16", tower=True),
    Family("Qwen3.5-MoE, all published", "qwen3_5_moe", rollout_dtype="bfloat16", tower=True),
    Family("Gemma 3 4B to 27B", "gemma3", tower=True),
    Family("Gemma 4, all published", "gemma4", tower=True),
    Family("Mistral Small 3", "mistral3", tower=True),
    Family("Llama 4 Scout, Maverick", "llama4", tower=True),
    Family("Kimi-VL", "kimi_vl", KIMI_VL, tower=True),
]
GEMMA4 = {"vision_config": {}, "text_config": {"use_bidirectional_attention": "vision"}}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
THIRDS = MROPE | {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
QUARTER = MROPE | {"mrope_section": [11, 11, 10], "mrope_interleaved": True,
                   "partial_rotary_factor": 0.25}  # fmt: skip
HALF_MROPE = MROPE | {"mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
QWEN_VL = {"text_config": {"rope_parameters": MROPE}}
QWEN3_VL = {"text_config": {"rope_parameters": THIRDS}}
# transformers tells by the shape which way round experts lie in a file: they may not be square
NOT_SQUARE = {"moe_intermediate_size": 32}
QWEN3_VL_MOE = {"text_config": {"rope_parameters": THIRDS, "norm_topk_prob": True} | NOT_SQUARE}
QWEN35 = {"text_config": {"rope_parameters": QUARTER}}
GLM_V_TEXT = {"rope_parameters": HALF_MROPE, "attention_bias": True, "head_dim": 128}
GLM_V = {"text_config": GLM_V_TEXT}
GLM_V_MOE = {"text_config": GLM_V_TEXT | {"use_qk_norm": False}}
FAMILIES += [
    Family("Qwen2-VL", "qwen2_vl", QWEN_VL, images=True),
    Family("Qwen2.5-VL", "qwen2_5_vl", QWEN_VL, images=True),
    Family("Qwen3-VL", "qwen3_vl", QWEN3_VL, images=True),
    Family("Qwen3-VL-MoE", "qwen3_vl_moe", QWEN3_VL_MOE, images=True),
    Family("Qwen3.5", "qwen3_5", QWEN35, "bfloat16", images=True),
    Family("Qwen3.5-MoE", "qwen3_5_moe", QWEN35, "bfloat16", images=True),
    Family("Gemma 3 4B to 27B", "gemma3", images=True),
    Family("Gemma 4", "gemma4", GEMMA4, images=True),
    Family("GLM 4.1V (glm4v)", "glm4v", GLM_V, images=True),
    Family("GLM 4.5V (glm4v_moe)", "glm4v_moe", GLM_V_MOE, images=True),
    Family("GLM 4.6V (glm46v)", "glm46v", GLM_V, images=True),
    Family("Kimi-VL", "kimi_vl", KIMI_VL, images=True),
    Family("InternVL 2.5 to 3.5", "internvl", images=True),
    Family("Mistral Small 3", "mistral3", images=True),
]
TOWER = {
    "depth": 2, "num_hidden_layers": 2, "hidden_size": 64, "num_heads": 2, "num_attention_heads": 2,
    "intermediate_size": 96, "out_hidden_size": 128, "deepstack_visual_indexes": [],
}  # fmt: skip
BY_KIND = {family.key: family for family in FAMILIES}


def config_of(family: Family) -> PreTrainedConfig:
    """Returns the config of a model as large as published ones."""
    return CONFIG_MAPPING[family.kind](**family.fields)


def save_tiny(family: Family, folder: Path, seed: int = 0) -> Path:
    """A tiny model with random float32 weights, and a tokenizer of one token for each character."""
    large = config_of(family)
    sight = SIGHTS[family.kind] if family.images else None
    shell = None if family.tower or family.images else meta_model(large)
    vocab = len(CHARS) if sight is None else num_tokens(sight)
    config: Any = tiny_config(large, shell, vocab=vocab)
    for name, size in TOWER.items() if family.tower else ():
        if hasattr(config.vision_config, name):
            setattr(config.vision_config, name, size)
    for name, token in {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}.items():
        setattr(config, name, token)
    if sight is not None:
        add_tower(config, sight)
    torch.manual_seed(seed)
    whole = family.tower or family.images
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    kept = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    for tensor in (*model.parameters(), *model.buffers()):
        plain = tensor.ndim < 2 or not tensor.any()  # Gemma 3's projection starts at 0
        if id(tensor) in kept and plain and tensor.is_floating_point():
            tensor.data += 0.1 * torch.randn_like(tensor)  # zeros and ones would hide their use
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    if sight is None:
        save_tokenizer(folder)
    else:
        save_processor(sight, folder)
    return folder
