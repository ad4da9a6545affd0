"""What a model is like that another program has built with Megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from spmdrl.algo.checks import require
from spmdrl.config import ConfigError
from spmdrl.engines.megatron_inputs import Form
from spmdrl.engines.megatron_layout import (
    Degrees,
    check_architecture,
    head_dim,
    rope_frequencies,
)
from spmdrl.engines.megatron_model import transformer_config
from spmdrl.engines.megatron_names import pieces
from spmdrl.engines.megatron_parts import Parts


def check_host_model(parts: Parts, hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError with every difference between the model and its Hugging Face config.

    A difference would not stop training, but the engine would sample from another model.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel

    for model in parts.raw:
        require(
            isinstance(model, GPTModel),
            f"attach: {type(model).__name__} is not megatron.core.models.gpt.GPTModel",
        )
        require(
            not getattr(model, "mtp_process", False),
            "attach: RL does not train multi-token prediction heads; build the model without them",
        )
    check_architecture(hf_config)
    hf: Any = hf_config.get_text_config()
    config, model = parts.config, parts.raw[0]
    pairs: dict[str, tuple[Any, Any]] = {
        "position embedding": (model.position_embedding_type, "rope"),
        "layers": (config.num_layers, hf.num_hidden_layers),
        "hidden_size": (config.hidden_size, hf.hidden_size),
        "attention heads": (config.num_attention_heads, hf.num_attention_heads),
        "norm epsilon": (config.layernorm_epsilon, hf.rms_norm_eps),
        "normalization": (config.normalization, "RMSNorm"),
        "gated linear unit": (config.gated_linear_unit, True),
        "bias of linear layers": (config.add_bias_linear, False),
        "tied embeddings": (
            model.share_embeddings_and_output_weights, bool(hf.tie_word_embeddings)
        ),
    }  # fmt: skip
    ours = transformer_config(hf_config, Degrees(), config.params_dtype)
    names = SAME + (SAME_EXPERTS if ours.num_moe_experts else ())
    pairs["activation"] = (config.activation_func, ours.activation_func)
    if ours.multi_latent_attention:
        names += SAME_LATENT
    else:
        pairs |= {
            "key-value heads": (config.num_query_groups, hf.num_key_value_heads),
            "head dimension": (config.kv_channels, head_dim(hf_config)),
            "scale of attention scores": (scale_of(config), scale_of(ours)),
        }
    pairs |= {name: (getattr(config, name, None), getattr(ours, name)) for name in names}
    rows = parts.groups.tensor.size() * embedding_rows(parts)
    if rows and rows < hf.vocab_size:
        pairs["tokens"] = (rows, hf.vocab_size)
    wrong = [f"{name}: {ours} here, {theirs} there" for name, (ours, theirs) in pairs.items()
             if ours != theirs]  # fmt: skip
    wanted, _ = rope_frequencies(hf_config)
    for rotary in {getattr(module, "rotary_pos_emb", None) for module in model.modules()}:
        found = getattr(rotary, "inv_freq", wanted).float().cpu()
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-5):
            wrong.append("rotary embedding: other frequencies (rotary_base, rotary_percent or "
                         "their scaling)")  # fmt: skip
    if config.moe_router_load_balancing_type == "sinkhorn" and ours.num_moe_experts:
        wrong.append("router: sinkhorn chooses other experts than the model's own scores")
    if wrong:
        raise ConfigError(
            "attach: the model is not what config.model describes: " + "; ".join(wrong)
        )
    for chunk in parts.raw:  # that every parameter has a Hugging Face name
        for _ in pieces(chunk, hf_config):
            pass


# fields that change what a model computes, or which weights it has, but not their shapes
SAME = (
    "ffn_hidden_size", "add_qkv_bias", "qk_layernorm", "rotary_interleaved",
    "layernorm_zero_centered_gamma", "num_moe_experts", "window_size", "multi_latent_attention",
    "activation_func_clamp_value", "glu_linear_offset",
)  # fmt: skip
SAME_LATENT = (
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "mscale_all_dim",
)  # fmt: skip
SAME_EXPERTS = (
    "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_enable_expert_bias", "moe_expert_capacity_factor",
)  # fmt: skip


def scale_of(config: Any) -> float:
    given = getattr(config, "softmax_scale", None)
    return round(config.kv_channels**-0.5 if given is None else given, 9)


def embedding_rows(parts: Parts) -> int:
    """Of this rank; 0 where another pipeline stage has the embedding."""
    first = parts.raw[0]
    return len(first.embedding.word_embeddings.weight) if first.pre_process else 0


def form_of(parts: Parts) -> Form:
    """How the model's attention takes sequences of different length."""
    names = {
        type(module).__name__
        for model in parts.raw
        for name, module in model.named_modules()
        if name.endswith("self_attention.core_attention")
    }
    if names <= {"PackedAttention"}:
        return "packed"
    if "DotProductAttention" in names:  # Megatron's own knows no packing
        size = parts.groups.context.size()
        require(
            size == 1,
            f"attach: context parallel size {size} wants an attention that takes packed sequences, "
            "as TransformerEngine's does; DotProductAttention does not",
        )
        return "padded"
    return "packed_host"


def silenced_dropout(models: list[Any]) -> list[tuple[nn.Module, str, float]]:
    """(module, attribute, probability) of every dropout that is not 0.

    Old and new logprobs must differ by the update alone, so it is off during our passes.
    """
    return [
        (module, name, value)
        for model in models
        for module in model.modules()
        for name, value in vars(module).items()
        if name in ("hidden_dropout", "attention_dropout", "p")
        and isinstance(value, float)
        and value > 0
    ]
