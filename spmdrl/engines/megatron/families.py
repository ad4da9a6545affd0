"""The architectures that engine megatron trains, each as one declaration.

A family says which fields of a Hugging Face config it understands, what Megatron's
TransformerConfig gets, and how each parameter of a layer is made up of Hugging Face tensors.
Checks, layouts, memory plans, loading, export and weight sync read it; none of them names a family.
docs/extending.md adds one step by step.

Needs no megatron-core: a dry run reads it without.
"""

from __future__ import annotations

from spmdrl.engines.megatron.family_parts import (
    ANY,
    ATTENTION,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_MTP,
    EXPERT,
    EXPERTS,
    FUSED_MLP,
    GEMMA_FIELDS,
    GLM_NORMS,
    JOINT_QK_NORMS,
    LATENT,
    LATENT_ATTENTION,
    MLP,
    NORMS,
    NORMS_BEHIND,
    QK_NORM,
    QKV_BIAS,
    QWEN3_5,
    QWEN_EXPERTS,
    QWEN_MTP,
    QWEN_NEXT,
    QWEN_NEXT_FIELDS,
    ROUTER_BIAS,
    SANDWICH_NORMS,
    SHARED_EXPERT,
    SHARED_EXPERTS,
    SIGMOID_ROUTER,
    SILU,
    WINDOW,
    WINDOWS,
    Family,
    Mrope,
    deepseek_experts,
    deepseek_groups,
    deepseek_v2_experts,
    experts,
    gated,
    gelu_tanh,
    gemma,
    gpt_oss,
    in_runs,
    in_turn,
    latent_attention,
    minimax_experts,
    of_types,
    qwen_experts,
    qwen_next,
    rotates,
    shared_expert,
    windows_rotate,
)
from spmdrl.engines.megatron.splits import (
    Qkv,
    SplitColumns,
    SplitRows,
    Stacked,
    StackedColumns,
    StackedGateUp,
    Whole,
)

LLAMA = NORMS | ATTENTION | MLP
QWEN2_VL = Family(
    LLAMA | QKV_BIAS, SILU | WINDOWS, lambda hf: {"add_qkv_bias": True}, mrope=Mrope(in_runs)
)
FAMILIES: dict[str, Family] = {  # by Hugging Face's model_type
    "llama": Family(
        LLAMA, SILU | {"head_dim": ANY, "attention_bias": (False,), "mlp_bias": (False,)}
    ),
    "qwen2": Family(
        LLAMA | QKV_BIAS, SILU | WINDOWS, lambda hf: {"add_qkv_bias": True}
    ),
    "qwen2_vl_text": QWEN2_VL,
    "qwen2_5_vl_text": QWEN2_VL,
    "qwen3_vl_text": Family(
        LLAMA | QK_NORM, SILU | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: {"qk_layernorm": True}, mrope=Mrope(in_turn, (24, 20, 20)),
    ),
    "qwen3_vl_moe_text": Family(
        LLAMA | QK_NORM | {
            "mlp.router.weight": Whole("mlp.gate.weight"),
            f"{EXPERT}.linear_fc1.weight": StackedGateUp("mlp.experts.gate_up_proj"),
            f"{EXPERT}.linear_fc2.weight": StackedColumns("mlp.experts.down_proj"),
        },
        SILU | {name: values for name, values in QWEN_EXPERTS.items() if name != "norm_topk_prob"}
        | {"head_dim": ANY, "attention_bias": (False,)},
        # its probabilities sum to 1 whatever norm_topk_prob says
        lambda hf: qwen_experts(hf) | {"qk_layernorm": True, "moe_router_pre_softmax": False},
        mrope=Mrope(in_turn, (24, 20, 20)),
    ),
    "qwen3": Family(
        LLAMA | QK_NORM, SILU | WINDOWS | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: {"qk_layernorm": True},
    ),
    "qwen3_moe": Family(
        LLAMA | QK_NORM | EXPERTS,
        SILU | WINDOW | QWEN_EXPERTS | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: qwen_experts(hf) | {"qk_layernorm": True},
    ),
    "mixtral": Family(
        NORMS | ATTENTION | {
            "mlp.router.weight": Whole("block_sparse_moe.gate.weight"),
            **gated(EXPERT, "block_sparse_moe.experts.{expert}", "w1 w3 w2"),
        },
        SILU | WINDOW | {
            "head_dim": ANY, "num_local_experts": ANY, "num_experts_per_tok": ANY,
            "router_jitter_noise": (0.0,),
        },
        lambda hf: experts(hf, hf.num_local_experts, hf.intermediate_size),
    ),
    "deepseek_v3": Family(
        NORMS | LATENT_ATTENTION | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | DEEPSEEK_EXPERTS | LATENT | {
            "attention_bias": (False,), "rope_interleave": (True,),
        },
        lambda hf: deepseek_experts(hf) | latent_attention(hf),
        deepseek_groups, latent=True, mtp=DEEPSEEK_MTP,
    ),
    "glm4_moe_lite": Family(
        NORMS | LATENT_ATTENTION | MLP | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | LATENT | SIGMOID_ROUTER | {
            "n_routed_experts": ANY, "n_shared_experts": ANY, "mlp_layer_types": ANY,
            "attention_bias": (False,), "rope_interleave": (True,),
        },
        lambda hf: deepseek_experts(hf, of_types) | latent_attention(hf),
        deepseek_groups, latent=True, mtp=DEEPSEEK_MTP,
    ),
    "deepseek_v2": Family(
        NORMS | LATENT_ATTENTION | MLP | EXPERTS | SHARED_EXPERTS,
        SILU | LATENT | DEEPSEEK_EXPERTS | {
            "head_dim": ANY, "attention_bias": (False,), "mlp_bias": (False,),
            "topk_method": ANY, "norm_topk_prob": ANY,
        },
        lambda hf: deepseek_v2_experts(hf) | latent_attention(hf),
        # Megatron ranks groups of experts by the sum of their best, DeepSeek-V2 by their best
        lambda hf: {"topk_method='group_limited_greedy'": hf.topk_method != "greedy"},
        latent=True,
    ),
    "dots1": Family(
        LLAMA | QK_NORM | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | WINDOWS | DEEPSEEK_EXPERTS | {"head_dim": ANY, "attention_bias": (False,)},
        lambda hf: deepseek_experts(hf) | {"qk_layernorm": True},
        deepseek_groups,
    ),
    "exaone_moe": Family(
        LLAMA | QK_NORM | EXPERTS | SHARED_EXPERTS | {
            "mlp.router.expert_bias": Whole("mlp.e_score_correction_bias"),
        },
        SILU | WINDOWS | SIGMOID_ROUTER | {
            "head_dim": ANY, "num_experts": ANY, "num_shared_experts": ANY, "mlp_layer_types": ANY,
            "sliding_window_pattern": ANY, "first_k_dense_replace": ANY,
        },
        lambda hf: deepseek_experts(hf, of_types, "num_experts", "num_shared_experts")
        | windows_rotate(hf) | {"qk_layernorm": True},
        deepseek_groups,
    ),
    "exaone4": Family(
        NORMS_BEHIND | ATTENTION | QK_NORM | MLP,
        SILU | WINDOWS | {"head_dim": ANY, "sliding_window_pattern": ANY},
        lambda hf: windows_rotate(hf) | {"qk_layernorm": True},
        sandwich_norms=True, pre_norms=False,
    ),
    "minimax_m2": Family(
        NORMS | ATTENTION | JOINT_QK_NORMS | {
            "mlp.router.weight": Whole("block_sparse_moe.gate.weight"),
            "mlp.router.expert_bias": Whole("block_sparse_moe.e_score_correction_bias"),
            **gated(EXPERT, "block_sparse_moe.experts.{expert}", "w1 w3 w2"),
        },
        SILU | {
            "head_dim": ANY, "num_local_experts": ANY, "num_experts_per_tok": ANY,
            "router_jitter_noise": (0.0,),
        },
        minimax_experts, partial_rotary=True, joint_qk_norms=True,
    ),
    "olmo2": Family(
        NORMS_BEHIND | ATTENTION | JOINT_QK_NORMS | MLP,
        SILU | {"attention_bias": (False,)},
        joint_qk_norms=True, sandwich_norms=True, pre_norms=False,
    ),
    "olmoe": Family(
        NORMS | ATTENTION | JOINT_QK_NORMS | EXPERTS,
        SILU | {
            "attention_bias": (False,), "clip_qkv": (None,), "num_experts": ANY,
            "num_experts_per_tok": ANY, "norm_topk_prob": ANY,
        },
        lambda hf: experts(hf, hf.num_experts, hf.intermediate_size), joint_qk_norms=True,
    ),
    "smollm3": Family(
        LLAMA,
        SILU | WINDOWS | {
            "no_rope_layers": ANY, "no_rope_layer_interval": ANY, "attention_bias": (False,),
            "mlp_bias": (False,),
        },
        lambda hf: rotates([bool(has) for has in hf.no_rope_layers]),
    ),
    "phi3": Family(
        NORMS | FUSED_MLP | {
            "self_attention.linear_qkv.weight": Qkv("self_attn.qkv_proj.weight"),
            "self_attention.linear_proj.weight": SplitColumns("self_attn.o_proj.weight"),
        },
        SILU | WINDOW | {
            "original_max_position_embeddings": ANY, "resid_pdrop": ANY, "embd_pdrop": ANY,
        },
        partial_rotary=True,
    ),
    "ministral": Family(LLAMA, SILU | WINDOWS | {"head_dim": ANY}),
    "gemma": Family(
        LLAMA,
        {
            "hidden_act": ("gelu_pytorch_tanh",), "head_dim": ANY, "attention_bias": (False,),
            "use_bidirectional_attention": (None, False),
        },
        lambda hf: {"layernorm_zero_centered_gamma": True, "activation_func": gelu_tanh},
        embedding_scale=lambda hf: hf.hidden_size**0.5,
    ),
    "mistral": Family(LLAMA, SILU | WINDOW | {"head_dim": ANY}),
    "seed_oss": Family(
        LLAMA | QKV_BIAS,
        SILU | {
            "head_dim": ANY, "attention_bias": ANY, "attention_out_bias": (False,),
            "mlp_bias": (False,), "residual_dropout": ANY,
        },
        lambda hf: {"add_qkv_bias": hf.attention_bias},
    ),
    "qwen2_moe": Family(
        LLAMA | QKV_BIAS | EXPERTS | SHARED_EXPERT,
        SILU | WINDOWS | QWEN_EXPERTS | {"qkv_bias": ANY, "shared_expert_intermediate_size": ANY},
        lambda hf: qwen_experts(hf) | {
            "add_qkv_bias": hf.qkv_bias, **shared_expert(hf),
        },
    ),
    "qwen3_next": Family(
        QWEN_NEXT | MLP | EXPERTS | SHARED_EXPERT,
        QWEN_NEXT_FIELDS | QWEN_EXPERTS | {"shared_expert_intermediate_size": ANY},
        lambda hf: qwen_next(hf) | qwen_experts(hf) | shared_expert(hf),
        delta_nets=True, partial_rotary=True,
    ),
    "qwen3_5_text": Family(
        QWEN3_5 | MLP, QWEN_NEXT_FIELDS, qwen_next, delta_nets=True, partial_rotary=True,
        mtp=QWEN_MTP, mrope=Mrope(in_turn, (11, 11, 10)),
    ),
    "qwen3_5_moe_text": Family(
        QWEN3_5 | EXPERTS | SHARED_EXPERT,
        QWEN_NEXT_FIELDS | {
            "num_experts": ANY, "num_experts_per_tok": ANY, "moe_intermediate_size": ANY,
            "shared_expert_intermediate_size": ANY,
        },
        lambda hf: qwen_next(hf) | shared_expert(hf) | experts(
            hf, hf.num_experts, hf.moe_intermediate_size
        ),
        delta_nets=True, partial_rotary=True, mtp=QWEN_MTP, mrope=Mrope(in_turn, (11, 11, 10)),
    ),
    "glm4_moe": Family(
        LLAMA | QKV_BIAS | QK_NORM | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | DEEPSEEK_EXPERTS | {"attention_bias": ANY, "use_qk_norm": ANY},
        lambda hf: deepseek_experts(hf) | {
            "add_qkv_bias": hf.attention_bias, "qk_layernorm": hf.use_qk_norm,
        },
        deepseek_groups, partial_rotary=True, mtp=DEEPSEEK_MTP,
    ),
    "glm4": Family(
        GLM_NORMS | ATTENTION | QKV_BIAS | FUSED_MLP,
        SILU | {"head_dim": ANY, "attention_bias": ANY},
        lambda hf: {"add_qkv_bias": hf.attention_bias, "rotary_interleaved": True},
        partial_rotary=True, sandwich_norms=True,
    ),
    "glm4v_text": Family(
        GLM_NORMS | ATTENTION | QKV_BIAS | FUSED_MLP, SILU,
        lambda hf: {"add_qkv_bias": True, "rotary_interleaved": True},
        partial_rotary=True, sandwich_norms=True, mrope=Mrope(in_runs, (8, 12, 12)),
    ),
    "glm4v_moe_text": Family(
        LLAMA | QKV_BIAS | EXPERTS | ROUTER_BIAS | SHARED_EXPERTS,
        SILU | DEEPSEEK_EXPERTS | {"attention_bias": ANY},
        lambda hf: deepseek_experts(hf) | {"add_qkv_bias": hf.attention_bias},
        deepseek_groups, partial_rotary=True, mrope=Mrope(in_runs, (8, 12, 12)),
    ),
    "gemma2": Family(
        SANDWICH_NORMS | ATTENTION | MLP, WINDOWS | GEMMA_FIELDS, gemma,
        sandwich_norms=True, embedding_scale=lambda hf: hf.hidden_size**0.5,
    ),
    "gemma3_text": Family(
        SANDWICH_NORMS | ATTENTION | QK_NORM | MLP, WINDOWS | GEMMA_FIELDS,
        lambda hf: gemma(hf) | {"qk_layernorm": True},
        lambda hf: {"attn_logit_softcapping": hf.attn_logit_softcapping is not None},
        sandwich_norms=True, embedding_scale=lambda hf: hf.hidden_size**0.5,
    ),
    "gpt_oss": Family(
        NORMS | ATTENTION | QKV_BIAS | {
            "self_attention.linear_proj.bias": Whole("self_attn.o_proj.bias"),
            "self_attention.core_attention.softmax_offset": SplitRows("self_attn.sinks"),
            "mlp.router.weight": Whole("mlp.router.weight"),
            "mlp.router.bias": Whole("mlp.router.bias"),
            f"{EXPERT}.linear_fc1.weight": Stacked("mlp.experts.gate_up_proj"),
            f"{EXPERT}.linear_fc1.bias": Stacked("mlp.experts.gate_up_proj_bias"),
            f"{EXPERT}.linear_fc2.weight": Stacked("mlp.experts.down_proj"),
            f"{EXPERT}.linear_fc2.bias": Stacked("mlp.experts.down_proj_bias"),
        },
        SILU | WINDOWS | {
            "head_dim": ANY, "attention_bias": (True,), "num_local_experts": ANY,
            "num_experts_per_tok": ANY, "swiglu_alpha": ANY, "swiglu_limit": ANY,
        },
        gpt_oss,
        clamped_swiglu=lambda hf: {"alpha": hf.swiglu_alpha, "limit": hf.swiglu_limit},
    ),
}  # fmt: skip
