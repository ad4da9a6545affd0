"""Tiny checkpoints of every family that the Megatron engine maps, and what transformers does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen2": {"rope_parameters": YARN},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "qwen3_moe": {
        "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "norm_topk_prob": False, "mlp_only_layers": [1],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 8, "num_experts_per_tok": 4,
        "moe_intermediate_size": 32, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
        "n_shared_experts": 2, "rms_norm_eps": 1e-5,
        "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
}  # fmt: skip
WINDOWED = ["sliding_attention", "full_attention"] * 2
GEMMA = {
    "head_dim": 32, "tie_word_embeddings": True, "sliding_window": 5, "query_pre_attn_scalar": 24,
    "layer_types": WINDOWED, "rms_norm_eps": 1e-5,
}  # fmt: skip
FAMILIES |= {
    "mistral": {"head_dim": 32, "sliding_window": 5},
    "seed_oss": {"head_dim": 32, "attention_out_bias": False},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80, "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "head_dim": 32, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8,
        "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
    },
    "glm4": {"head_dim": 32},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3_text": GEMMA | {"rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }},
    "gpt_oss": {
        "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5,
        "layer_types": WINDOWED, "intermediate_size": 48, "swiglu_limit": 0.3,
    },
}  # fmt: skip
DELTA_NETS = {
    "head_dim": 32, "num_key_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}  # fmt: skip
FAMILIES |= {
    "qwen3_5_text": DELTA_NETS,
    "qwen3_5_moe_text": DELTA_NETS | QWEN_EXPERTS,
    "qwen3_next": DELTA_NETS | QWEN_EXPERTS | {"mlp_only_layers": [1]},
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 20,
}  # fmt: skip
DEEPSEEK_EXPERTS = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
}  # fmt: skip
TYPED = {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}
FAMILIES |= {
    "glm4_moe_lite": LATENT | DEEPSEEK_EXPERTS | TYPED,
    "deepseek_v2": LATENT | DEEPSEEK_EXPERTS | {
        "norm_topk_prob": False, "first_k_dense_replace": 1, "q_lora_rank": None,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "dots1": DEEPSEEK_EXPERTS | {
        "head_dim": 32, "first_k_dense_replace": 1, "sliding_window": 5, "layer_types": WINDOWED,
    },
    "exaone_moe": {
        "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "num_shared_experts": 1, "sliding_window": 5, "layer_types": WINDOWED, **TYPED,
    },
    "exaone4": {"head_dim": 32, "sliding_window": 5, "layer_types": WINDOWED},
    "minimax_m2": {
        "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    },
    "olmo2": {},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48},
    "smollm3": {"no_rope_layers": [1, 0, 1, 1], "rope_parameters": YARN},
    "phi3": {"sliding_window": 5, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    }},
    "ministral": {"head_dim": 32, "sliding_window": 5, "layer_types": WINDOWED},
    "gemma": {"head_dim": 32, "tie_word_embeddings": True},
}  # fmt: skip
FAMILIES["qwen3_moe normalised"] = FAMILIES["qwen3_moe"] | {"norm_topk_prob": True}
FAMILIES["deepseek_v3 ungrouped"] = FAMILIES["deepseek_v3"] | {
    "q_lora_rank": None, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 3,
    "first_k_dense_replace": 2,
}  # fmt: skip
# two micro-batches of packed sequences, each length and total fit for 2 * 2 chunks
BATCHES = ((8, 16, 12), (4, 24))


class Case(NamedTuple):
    degrees: dict[str, int]
    families: list[str]
    kind: str = "policy"
    recompute: bool | str = False


def make_config(family: str, **overrides: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(family.split()[0], **(SIZES | FAMILIES[family] | overrides))


def save_model(family: str, folder: Path, **overrides: Any) -> Any:
    """Random float32 weights, with norms that are not 1 and biases that are not 0."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family, **overrides))
    named = dict(model.named_parameters())
    named |= {name: b for name, b in model.named_buffers() if name.endswith("correction_bias")}
    with torch.no_grad():
        for name, tensor in named.items():
            if tensor.dim() > 1:
                tensor.normal_(0, 0.08)
            elif name.endswith("A_log"):  # states that last: one that leaked would be seen
                tensor.uniform_(-3, -1)
            else:
                tensor.add_(torch.randn_like(tensor) * 0.2)
    model.save_pretrained(folder)
    return model


def token_ids(batch: int) -> Tensor:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(0, SIZES["vocab_size"], (sum(BATCHES[batch]),), generator=generator)


def weights_of_loss(batch: int, width: int) -> Tensor:
    """(num_tokens, width): the loss is the sum of the outputs times these, per token."""
    generator = torch.Generator().manual_seed(100 + batch)
    return torch.randn(sum(BATCHES[batch]), width, generator=generator)


def value_weight() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(1, SIZES["hidden_size"], generator=generator) * 0.1


def save_reference(model: Any, folder: Path) -> None:
    """Beside the model, for policy and value: outputs of both micro-batches, and gradients."""
    model.eval()
    model.set_attn_implementation("eager")
    weight, bias = value_weight().requires_grad_(), torch.zeros(1, requires_grad=True)
    head = {"value_head.weight": weight, "value_head.bias": bias}
    functions = {
        "policy": (lambda ids: model(ids, use_cache=False).logits[0], {}),
        "value": (
            lambda ids: linear(model.model(ids, use_cache=False)[0][0], weight, bias), head,
        ),
    }  # fmt: skip
    reference = {}
    for kind, (function, extra) in functions.items():
        model.zero_grad()
        outputs = []
        for batch, lens in enumerate(BATCHES):
            ids = token_ids(batch).split(lens)
            outputs.append(torch.cat([function(seq[None]) for seq in ids]))
            weights = weights_of_loss(batch, outputs[-1].shape[1])
            ((outputs[-1] * weights).sum() / sum(map(sum, BATCHES))).backward()
        named = dict(model.named_parameters()) | extra
        grads = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        reference[kind] = {
            "outputs": [x.detach() for x in outputs], "grads": checkpoint_names(model, grads),
        }  # fmt: skip
    torch.save(reference, folder / "reference.pt")


def checkpoint_names(model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as save_pretrained writes them."""
    mixtral = model.config.model_type in ("mixtral", "minimax_m2")
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    out = {}
    for name, tensor in named.items():
        if mixtral:
            name = name.replace(".mlp.", ".block_sparse_moe.")
        stacked = re.fullmatch(r"(.*\.experts)\.(gate_up_proj|down_proj)", name)
        if stacked is None or model.config.model_type == "gpt_oss":
            out[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            prefix = f"{stacked[1]}.{number}."
            if stacked[2] == "down_proj":
                out[f"{prefix}{down}.weight"] = expert
            else:
                out[f"{prefix}{gate}.weight"], out[f"{prefix}{up}.weight"] = expert.chunk(2)
    return out
