"""The architectures that engine megatron trains, each as one declaration.

A family says which fields of a Hugging Face config it understands, what Megatron's
TransformerConfig gets, and how each parameter of a layer is made up of Hugging Face tensors.
Checks, layouts, memory plans, loading, export and weight sync read it; none of them names a family.
docs/extending.md adds one step by step.

Needs no megatron-core: a dry run reads it without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import gelu

from spmdrl.engines.megatron.splits import (
    DeltaRows,
    GateUp,
    Qkv,
    Split,
    SplitColumns,
    SplitRows,
    Stacked,
    StackedColumns,
    StackedGateUp,
    Whole,
)

Settings = dict[str, Any]  # of TransformerConfig
Names = dict[str, Split]  # by the local name of a layer's parameter
Fields = dict[str, tuple[Any, ...]]  # of a Hugging Face config: the values that are mapped
ANY: tuple[Any, ...] = ()


@dataclass(frozen=True)
class MtpNames:
    """Says where files have layers for multi-token prediction. {layer} is the number that such a
    layer has behind the others, {number} the one that it has among its like, from 0.
    """

    around: Names  # of the parameters beside the layer inside, by megatron-core's names
    prefix: str  # of these
    inside: str  # of those of the layer inside, which are named as in the model
    most: int | None = None  # layers that may be; None: any number


@dataclass(frozen=True)
class Mrope:
    """Says by which of a token's positions in time (0), height (1) and width (2) each frequency is
    rotated. axes: of the numbers of frequencies of the three and how many there are; section: these
    numbers where a config has no mrope_section.
    """

    axes: Callable[[Sequence[int], int], list[int]]
    section: Sequence[int] = ()


def in_runs(section: Sequence[int], count: int) -> list[int]:
    """Qwen2-VL (arXiv 2409.12191): first those of the time, then of the height, then the width."""
    return [axis % 3 for axis, size in enumerate(section) for _ in range(size)][:count]


def in_turn(section: Sequence[int], count: int) -> list[int]:
    """Qwen3-VL (arXiv 2511.21631): the three in turn; those that are left are of the time."""
    found = [0] * count
    for axis in (1, 2):
        for place in range(axis, min(3 * section[axis], count), 3):
            found[place] = axis
    return found


@dataclass(frozen=True)
class Family:
    """Says what sets an architecture apart from a dense model that has nothing but RMSNorm, rotary
    attention and a gated MLP.
    """

    names: Names  # of a layer's parameters, by the name without TransformerEngine
    fields: Fields  # beside COMMON_FIELDS; a field that is not here must have its default
    settings: Callable[[Any], Settings] = lambda hf: {}  # beside model.transformer_config's
    # what a config may ask for and is not mapped, and whether this one does
    refused: Callable[[Any], Mapping[str, bool]] = lambda hf: {}
    latent: bool = False  # DeepSeek's multi-head latent attention
    delta_nets: bool = False  # layer_types may name layers whose attention is a gated delta net
    partial_rotary: bool = False  # partial_rotary_factor is read: part of a head is rotated
    sandwich_norms: bool = False  # attention and MLP have a norm before and one behind
    embedding_scale: Callable[[Any], float] | None = None  # what embeddings are multiplied by
    clamped_swiglu: Callable[[Any], Settings] | None = None  # alpha and limit, of experts
    mtp: MtpNames | None = None  # layers for multi-token prediction; None: they are not trained
    # beside a tower for images (towers.py) tokens have positions in time, height and width
    mrope: Mrope | None = None

    @property
    def is_custom(self) -> bool:
        """Says whether it computes what megatron-core's own layers do not."""
        added = (self.embedding_scale, self.clamped_swiglu)
        return self.sandwich_norms or self.delta_nets or any(one is not None for one in added)


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
    "self_attention.linear_proj.weight": SplitColumns("self_attn.o_proj.weight"),
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
        f"{megatron}.linear_fc2.weight": SplitColumns(down),
    }


MLP = gated("mlp", "mlp")
EXPERT = "mlp.experts.local_experts.{expert}"
EXPERTS: Names = {
    "mlp.router.weight": Whole("mlp.gate.weight"),
    **gated(EXPERT, "mlp.experts.{expert}"),
}
ROUTER_BIAS: Names = {"mlp.router.expert_bias": Whole("mlp.gate.e_score_correction_bias")}
SHARED_EXPERTS = gated("mlp.shared_experts", "mlp.shared_experts")
SHARED_EXPERT = gated("mlp.shared_experts", "mlp.shared_expert") | {
    "mlp.shared_experts.gate_weight": Whole("mlp.shared_expert_gate.weight")
}
SANDWICH_NORMS: Names = {  # of Gemma 2
    "input_layernorm.weight": Whole("input_layernorm.weight"),
    "self_attn_bda.norm.weight": Whole("post_attention_layernorm.weight"),
    "pre_mlp_layernorm.weight": Whole("pre_feedforward_layernorm.weight"),
    "mlp_bda.norm.weight": Whole("post_feedforward_layernorm.weight"),
}
GLM_NORMS: Names = NORMS | {
    "self_attn_bda.norm.weight": Whole("post_self_attn_layernorm.weight"),
    "mlp_bda.norm.weight": Whole("post_mlp_layernorm.weight"),
}
FUSED_MLP: Names = {
    "mlp.linear_fc1.weight": GateUp("mlp.gate_up_proj.weight", "mlp.gate_up_proj.weight"),
    "mlp.linear_fc2.weight": SplitColumns("mlp.down_proj.weight"),
}
LATENT_ATTENTION: Names = {
    "self_attention.linear_q_proj.weight": SplitRows("self_attn.q_proj.weight"),
    "self_attention.linear_q_down_proj.weight": Whole("self_attn.q_a_proj.weight"),
    "self_attention.q_layernorm.weight": Whole("self_attn.q_a_layernorm.weight"),
    "self_attention.linear_q_up_proj.weight": SplitRows("self_attn.q_b_proj.weight"),
    "self_attention.linear_kv_down_proj.weight": Whole("self_attn.kv_a_proj_with_mqa.weight"),
    "self_attention.kv_layernorm.weight": Whole("self_attn.kv_a_layernorm.weight"),
    "self_attention.linear_kv_up_proj.weight": SplitRows("self_attn.kv_b_proj.weight"),
    "self_attention.linear_proj.weight": SplitColumns("self_attn.o_proj.weight"),
}

GATED_ATTENTION: Names = {
    "self_attention.linear_qkv.weight": Qkv("self_attn.{}_proj.weight", gated=True),
    "self_attention.linear_proj.weight": SplitColumns("self_attn.o_proj.weight"),
}
DELTA: Names = {  # of a gated delta net, whatever its input projections are
    "self_attention.conv1d.weight": DeltaRows({"qkv": "linear_attn.conv1d.weight"}),
    "self_attention.dt_bias": SplitRows("linear_attn.dt_bias"),
    "self_attention.A_log": SplitRows("linear_attn.A_log"),
    "self_attention.out_norm.weight": Whole("linear_attn.norm.weight"),
    "self_attention.out_proj.weight": SplitColumns("linear_attn.out_proj.weight"),
}
QWEN_NEXT: Names = NORMS | GATED_ATTENTION | QK_NORM | DELTA | {
    "self_attention.in_proj.weight": DeltaRows(
        {"qkvz": "linear_attn.in_proj_qkvz.weight", "ba": "linear_attn.in_proj_ba.weight"},
        by_head=True,
    ),
}  # fmt: skip
QWEN3_5: Names = NORMS | GATED_ATTENTION | QK_NORM | DELTA | {
    "self_attention.in_proj.weight": DeltaRows({
        "qkv": "linear_attn.in_proj_qkv.weight", "z": "linear_attn.in_proj_z.weight",
        "b": "linear_attn.in_proj_b.weight", "a": "linear_attn.in_proj_a.weight",
    }),
}  # fmt: skip
DEEPSEEK_MTP = MtpNames(
    {
        "enorm.weight": Whole("enorm.weight"), "hnorm.weight": Whole("hnorm.weight"),
        "eh_proj.weight": SplitRows("eh_proj.weight"),
        "final_layernorm.weight": Whole("shared_head.norm.weight"),
    },
    prefix="model.layers.{layer}.", inside="model.layers.{layer}.",
)  # fmt: skip
QWEN_MTP = MtpNames(
    {
        "enorm.weight": Whole("pre_fc_norm_embedding.weight"),
        "hnorm.weight": Whole("pre_fc_norm_hidden.weight"),
        "eh_proj.weight": SplitRows("fc.weight"), "final_layernorm.weight": Whole("norm.weight"),
    },
    prefix="mtp.", inside="mtp.layers.{number}.", most=1,
)  # fmt: skip

# ---- fields

SILU: Fields = {"hidden_act": ("silu",)}
WINDOW: Fields = {"sliding_window": ANY}  # of all layers
WINDOWS: Fields = WINDOW | {"layer_types": ANY}  # of some
GEMMA_FIELDS: Fields = {
    "hidden_activation": ("gelu_pytorch_tanh",), "head_dim": ANY, "attention_bias": (False,),
    "query_pre_attn_scalar": ANY, "attn_logit_softcapping": ANY, "final_logit_softcapping": ANY,
    "use_bidirectional_attention": (None, False),
}  # fmt: skip
QWEN_EXPERTS: Fields = {
    "num_experts": ANY, "num_experts_per_tok": ANY, "moe_intermediate_size": ANY,
    "norm_topk_prob": ANY, "decoder_sparse_step": ANY, "mlp_only_layers": ANY,
}  # fmt: skip
QWEN_NEXT_FIELDS: Fields = SILU | {
    "layer_types": ANY, "head_dim": ANY, "attention_bias": (False,), "linear_conv_kernel_dim": ANY,
    "linear_key_head_dim": ANY, "linear_value_head_dim": ANY, "linear_num_key_heads": ANY,
    "linear_num_value_heads": ANY,
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


def gelu_tanh(x: Tensor) -> Tensor:
    return gelu(x, approximate="tanh")


def gemma(hf: Any) -> Settings:
    return {
        "layernorm_zero_centered_gamma": True, "activation_func": gelu_tanh,
        "softmax_scale": hf.query_pre_attn_scalar**-0.5,
    }  # fmt: skip


def qwen_next(hf: Any) -> Settings:
    """Gated delta nets (arXiv 2412.06464) in most layers, attention with a gate in the others."""
    return {
        "layernorm_zero_centered_gamma": True, "qk_layernorm": True, "attention_output_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in hf.layer_types],
        "linear_conv_kernel_dim": hf.linear_conv_kernel_dim,
        "linear_key_head_dim": hf.linear_key_head_dim,
        "linear_value_head_dim": hf.linear_value_head_dim,
        "linear_num_key_heads": hf.linear_num_key_heads,
        "linear_num_value_heads": hf.linear_num_value_heads,
    }  # fmt: skip


def shared_expert(hf: Any) -> Settings:
    """The shared expert of Qwen's mixtures, with a gate."""
    return {
        "moe_shared_expert_gate": True,
        "moe_shared_expert_intermediate_size": hf.shared_expert_intermediate_size,
    }  # fmt: skip


def gpt_oss(hf: Any) -> Settings:
    """Every linear layer has a bias, the router's too. The experts' activation is a module of ours
    (model.layer_spec), for which megatron-core's switch is named after TransformerEngine.
    """
    return experts(hf, hf.num_local_experts, hf.intermediate_size) | {
        "add_bias_linear": True, "softmax_type": "learnable", "use_te_activation_func": True,
    }  # fmt: skip


# ---- families

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
        SILU | DEEPSEEK_EXPERTS | {
            "attention_bias": (False,), "q_lora_rank": ANY, "kv_lora_rank": ANY,
            "qk_nope_head_dim": ANY, "qk_rope_head_dim": ANY, "v_head_dim": ANY,
            "rope_interleave": (True,),
        },
        lambda hf: deepseek_experts(hf) | latent_attention(hf),
        deepseek_groups, latent=True, mtp=DEEPSEEK_MTP,
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
