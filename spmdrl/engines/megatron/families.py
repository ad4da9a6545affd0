"""The architectures that engine megatron trains, each as one declaration.

A family says which fields of a Hugging Face config it understands, what Megatron's
TransformerConfig gets, and how each parameter of a layer is made up of Hugging Face tensors.
Checks, layouts, memory plans, loading, export and weight sync read it; none of them names a family.
docs/extending.md adds one step by step.

Needs no megatron-core: a dry run reads it without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from spmdrl.engines.megatron.splits import Columns, GateUp, Qkv, Rows, Split, Whole

Settings = dict[str, Any]  # of TransformerConfig
Names = dict[str, Split]  # by the local name of a layer's parameter
Fields = dict[str, tuple[Any, ...]]  # of a Hugging Face config: the values that are mapped
ANY: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart from a dense model that has nothing but RMSNorm, rotary
    attention and a gated MLP.
    """

    names: Names  # of a layer's parameters, by the name without TransformerEngine
    fields: Fields  # beside COMMON_FIELDS; a field that is not here must have its default
    settings: Callable[[Any], Settings] = lambda hf: {}  # beside model.transformer_config's
    # what a config may ask for and is not mapped, and whether this one does
    refused: Callable[[Any], Mapping[str, bool]] = lambda hf: {}
    latent: bool = False  # DeepSeek's multi-head latent attention


COMMON_FIELDS = frozenset({  # read for every family, or without effect on what is computed
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "pad_token_id", "bos_token_id", "eos_token_id", "initializer_range",
    "use_cache", "attention_dropout", "pretraining_tp", "output_router_logits",
    "router_aux_loss_coef", "max_window_layers", "use_sliding_window", "num_mtp_layers",
})  # fmt: skip

# ---- names

NORMS: Names = {
    "input_layernorm.weight": Whole("input_layernorm.weight"),
    "pre_mlp_layernorm.weight": Whole("post_attention_layernorm.weight"),
}
ATTENTION: Names = {
    "self_attention.linear_qkv.weight": Qkv("self_attn.{}_proj.weight"),
    "self_attention.linear_proj.weight": Columns("self_attn.o_proj.weight"),
}
QKV_BIAS: Names = {"self_attention.linear_qkv.bias": Qkv("self_attn.{}_proj.bias")}
QK_NORM: Names = {
    "self_attention.q_layernorm.weight": Whole("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": Whole("self_attn.k_norm.weight"),
}


def gated(megatron: str, hf: str, names: str = "gate_proj up_proj down_proj") -> Names:
    """Returns the names of a gated MLP without bias. megatron, hf: what its matrices stand in."""
    gate, up, down = (f"{hf}.{name}.weight" for name in names.split())
    return {
        f"{megatron}.linear_fc1.weight": GateUp(gate, up),
        f"{megatron}.linear_fc2.weight": Columns(down),
    }


MLP = gated("mlp", "mlp")
EXPERT = "mlp.experts.local_experts.{expert}"
EXPERTS: Names = {
    "mlp.router.weight": Whole("mlp.gate.weight"),
    **gated(EXPERT, "mlp.experts.{expert}"),
}
ROUTER_BIAS: Names = {"mlp.router.expert_bias": Whole("mlp.gate.e_score_correction_bias")}
SHARED_EXPERTS = gated("mlp.shared_experts", "mlp.shared_experts")
LATENT_ATTENTION: Names = {
    "self_attention.linear_q_proj.weight": Rows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": Whole("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": Whole("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": Rows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": Whole("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": Whole("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": Rows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": Columns("self_attn.o_proj.weight"),
}

# ---- fields

SILU: Fields = {"hidden_act": ("silu",)}
WINDOWS: Fields = {"sliding_window": (None,), "layer_types": ANY}
QWEN_EXPERTS: Fields = {
    "num_experts": ANY, "num_experts_per_tok": ANY, "moe_intermediate_size": ANY,
    "norm_topk_prob": ANY, "decoder_sparse_step": ANY, "mlp_only_layers": ANY,
}  # fmt: skip
DEEPSEEK_EXPERTS: Fields = {
    "n_routed_experts": ANY, "num_experts_per_tok": ANY, "moe_intermediate_size": ANY,
    "n_shared_experts": ANY, "first_k_dense_replace": ANY, "routed_scaling_factor": ANY,
    "n_group": ANY, "topk_group": ANY, "norm_topk_prob": (True,),
}  # fmt: skip

# ---- settings


def experts(hf: Any, num: int, width: int, layers: list[bool] | None = None) -> Settings:
    """A mixture whose router takes a softmax. layers: whether each has experts; None: all have."""
    return {
        "num_moe_experts": num, "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": [int(has) for has in layers or [True] * hf.num_hidden_layers],
        # the chosen experts' probabilities sum to 1 only where the softmax is over them alone
        "moe_router_pre_softmax": not getattr(hf, "norm_topk_prob", True),
    }  # fmt: skip


def qwen_experts(hf: Any) -> Settings:
    step, dense = hf.decoder_sparse_step, hf.mlp_only_layers
    sparse = [n not in dense and (n + 1) % step == 0 for n in range(hf.num_hidden_layers)]
    return experts(hf, hf.num_experts, hf.moe_intermediate_size, sparse)


def deepseek_experts(hf: Any) -> Settings:
    """A router of sigmoids with a bias that pretraining balances, and shared experts."""
    sparse = [n >= hf.first_k_dense_replace for n in range(hf.num_hidden_layers)]
    groups = (hf.n_group, hf.topk_group) if hf.topk_group != hf.n_group else (None, None)
    return experts(hf, hf.n_routed_experts, hf.moe_intermediate_size, sparse) | {
        "moe_router_pre_softmax": False, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,  # pretraining's balance is not RL's to move
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1],
        "moe_shared_expert_intermediate_size":
            hf.moe_intermediate_size * (hf.n_shared_experts or 0) or None,
    }  # fmt: skip


def deepseek_groups(hf: Any) -> dict[str, bool]:
    """Megatron ranks groups of experts by their topk // groups best, Hugging Face by two."""
    topk, groups = hf.num_experts_per_tok, hf.topk_group
    what = f"{topk} experts per token from {groups} groups"
    return {what: groups != hf.n_group and topk // groups != 2}


def latent_attention(hf: Any) -> Settings:
    rope = hf.rope_parameters
    scaled = rope["rope_type"] != "default"
    return {
        "num_query_groups": hf.num_attention_heads, "kv_channels": hf.v_head_dim,
        "q_lora_rank": hf.q_lora_rank, "kv_lora_rank": hf.kv_lora_rank, "qk_layernorm": True,
        "qk_head_dim": hf.qk_nope_head_dim, "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim, "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": (rope.get("mscale_all_dim") or 0.0) if scaled else 0.0,
        "softmax_scale": None,  # megatron computes it from the two above
    }  # fmt: skip


# ---- families

LLAMA = NORMS | ATTENTION | MLP
FAMILIES: dict[str, Family] = {  # by Hugging Face's model_type
    "llama": Family(
        LLAMA, SILU | {"head_dim": ANY, "attention_bias": (False,), "mlp_bias": (False,)}
    ),
    "qwen2": Family(
        LLAMA | QKV_BIAS, SILU | WINDOWS, lambda hf: {"add_qkv_bias": True}
    ),
    "qwen3": Family(
        LLAMA | QK_NORM, SILU | WINDOWS | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: {"qk_layernorm": True},
    ),
    "qwen3_moe": Family(
        LLAMA | QK_NORM | EXPERTS,
        SILU | WINDOWS | QWEN_EXPERTS | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: qwen_experts(hf) | {"qk_layernorm": True},
    ),
    "mixtral": Family(
        NORMS | ATTENTION | {
            "mlp.router.weight": Whole("block_sparse_moe.gate.weight"),
            **gated(EXPERT, "block_sparse_moe.experts.{expert}", "w1 w3 w2"),
        },
        SILU | WINDOWS | {
            "head_dim": ANY, "num_local_experts": ANY, "num_experts_per_tok": ANY,
            "router_jitter_noise": (0.0,),
        },
        lambda hf: experts(hf, hf.num_local_experts, hf.intermediate_size),
    ),
    "deepseek_v3": Family(
        NORMS | LATENT_ATTENTION | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | DEEPSEEK_EXPERTS | {
            "attention_bias": (False,), "q_lora_rank": ANY, "kv_lora_rank": ANY,
            "qk_nope_head_dim": ANY, "qk_rope_head_dim": ANY, "v_head_dim": ANY,
            "rope_interleave": (True,),
        },
        lambda hf: deepseek_experts(hf) | latent_attention(hf),
        deepseek_groups, latent=True,
    ),
}  # fmt: skip
