"""Declares `Family`, and the names, fields and settings that several architectures of families.py
share.

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
    joint_qk_norms: bool = False  # the norms of queries and of keys are over all heads together
    sandwich_norms: bool = False  # attention and MLP have a norm behind them
    pre_norms: bool = True  # and one before
    embedding_scale: Callable[[Any], float] | None = None  # what embeddings are multiplied by
    clamped_swiglu: Callable[[Any], Settings] | None = None  # alpha and limit, of experts
    mtp: MtpNames | None = None  # layers for multi-token prediction; None: they are not trained
    # beside a tower for images (towers.py) tokens have positions in time, height and width
    mrope: Mrope | None = None

    @property
    def is_custom(self) -> bool:
        """Says whether it computes what megatron-core's own layers do not."""
        added = (self.embedding_scale, self.clamped_swiglu)
        changed = self.sandwich_norms or self.delta_nets or self.joint_qk_norms
        return changed or any(one is not None for one in added)


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

JOINT_QK_NORMS: Names = {
    "self_attention.q_layernorm.weight": SplitRows("self_attn.q_norm.weight"),
    "self_attention.k_layernorm.weight": SplitRows("self_attn.k_norm.weight"),
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
NORMS_BEHIND: Names = {  # of EXAONE 4, which has none before
    "self_attn_bda.norm.weight": Whole("post_attention_layernorm.weight"),
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
LATENT: Fields = {
    "q_lora_rank": ANY, "kv_lora_rank": ANY, "qk_nope_head_dim": ANY, "qk_rope_head_dim": ANY,
    "v_head_dim": ANY,
}  # fmt: skip
SIGMOID_ROUTER: Fields = {
    "num_experts_per_tok": ANY, "moe_intermediate_size": ANY, "routed_scaling_factor": ANY,
    "n_group": ANY, "topk_group": ANY, "norm_topk_prob": (True,),
}  # fmt: skip
DEEPSEEK_EXPERTS: Fields = SIGMOID_ROUTER | {
    "n_routed_experts": ANY, "n_shared_experts": ANY, "first_k_dense_replace": ANY,
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


BIASED_SIGMOIDS: Settings = {  # a router of sigmoids with a bias that pretraining balances
    "moe_router_pre_softmax": False, "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.0,  # pretraining's balance is not RL's to move
}  # fmt: skip


def behind_dense(hf: Any) -> list[bool]:
    """Returns for each layer whether it has experts: all have but the first."""
    return [n >= hf.first_k_dense_replace for n in range(hf.num_hidden_layers)]


def of_types(hf: Any) -> list[bool]:
    """Returns for each layer whether it has experts, as the config lists it."""
    return [kind == "sparse" for kind in hf.mlp_layer_types]


def deepseek_experts(
    hf: Any, sparse: Callable[[Any], list[bool]] = behind_dense, num: str = "n_routed_experts",
    shared: str = "n_shared_experts",
) -> Settings:  # fmt: skip
    """A router of sigmoids with a bias that pretraining balances, and shared experts.

    num, shared: the config's fields for how many experts there are of each.
    """
    groups = (hf.n_group, hf.topk_group) if hf.topk_group != hf.n_group else (None, None)
    return experts(hf, getattr(hf, num), hf.moe_intermediate_size, sparse(hf)) | BIASED_SIGMOIDS | {
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_router_num_groups": groups[0], "moe_router_group_topk": groups[1],
        "moe_shared_expert_intermediate_size":
            hf.moe_intermediate_size * (getattr(hf, shared) or 0) or None,
    }  # fmt: skip


def minimax_experts(hf: Any) -> Settings:
    """A router of sigmoids with a bias that pretraining balances; all layers have experts."""
    return experts(hf, hf.num_local_experts, hf.intermediate_size) | BIASED_SIGMOIDS


def deepseek_v2_experts(hf: Any) -> Settings:
    """A router of a softmax over all experts, which is not normalised, and shared experts."""
    return experts(hf, hf.n_routed_experts, hf.moe_intermediate_size, behind_dense(hf)) | {
        "moe_router_pre_softmax": True,
        "moe_router_topk_scaling_factor": hf.routed_scaling_factor,
        "moe_shared_expert_intermediate_size": hf.moe_intermediate_size * hf.n_shared_experts,
    }  # fmt: skip


def rotates(layers: Sequence[bool]) -> Settings:
    """layers: whether each rotates its queries and keys. The others have no positions."""
    return {"no_rope_freq": [int(not has) for has in layers]} if not all(layers) else {}


def windows_rotate(hf: Any) -> Settings:
    """EXAONE 4 (arXiv 2507.11407): only layers that see a window rotate, where there are such."""
    kinds = hf.layer_types
    return rotates([not hf.sliding_window or kind == "sliding_attention" for kind in kinds])


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
