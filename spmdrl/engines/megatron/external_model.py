"""Finds out what a model is like that another program has built with Megatron-core."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, require
from spmdrl.engines.megatron.external_model_fields import (
    PRECISION,
    SAME,
    SAME_EXPERTS,
    SAME_LATENT,
    refused_fields,
)
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.hf_mapping import pieces
from spmdrl.engines.megatron.inputs import Form
from spmdrl.engines.megatron.layout import Degrees, check_architecture, head_dim, rope_frequencies
from spmdrl.engines.megatron.model import transformer_config
from spmdrl.engines.megatron.parts import Parts


def check_host_model(parts: Parts, hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError with every difference between the model and its Hugging Face config.

    A difference would not stop training, but the engine would sample from another model. What
    config fields cannot show is measured once the engine stands (embed.measure_gap).
    """
    check_kind(parts)
    check_architecture(hf_config)
    check_layers(parts, hf_config)
    ours = transformer_config(hf_config, Degrees(), parts.config.params_dtype)
    wrong = [
        f"{name}: {here} here, {there} there"
        for name, (here, there) in compared(parts, hf_config, ours).items()
        if here != there
    ]
    wrong += wrong_rotary(parts, hf_config)
    if parts.config.moe_router_load_balancing_type == "sinkhorn" and ours.num_moe_experts:
        wrong.append("router: sinkhorn chooses other experts than the model's own scores")
    if wrong:
        raise ConfigError(
            "attach: the model is not what config.model describes: " + "; ".join(wrong)
        )
    for chunk in parts.raw:  # that every parameter has a Hugging Face name
        for _ in pieces(chunk, hf_config):
            pass


def check_kind(parts: Parts) -> None:
    """Raises ConfigError for models whose passes a step cannot drive; it names what they use."""
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
    require(
        parts.config.params_dtype in (torch.float32, torch.bfloat16),
        f"attach: the host's model is in {parts.config.params_dtype}; use bfloat16 or float32",
    )
    refused = refused_fields(parts.config)
    require(not refused, "attach: the host's config has " + "; ".join(refused))
    for chunk in parts.chunks:
        require(
            not getattr(getattr(chunk, "ddp_config", None), "fp8_param_gather", False),
            f"attach: the host's DistributedDataParallelConfig has fp8_param_gather: {PRECISION}",
        )
    custom = {name for model in parts.raw for name in custom_modules(model)}
    require(
        not custom,
        f"attach: the layer spec (--spec) has modules of its own: {', '.join(sorted(custom))}. "
        "The rollout engine cannot compute what they do; use get_gpt_layer_local_spec or "
        "get_gpt_layer_with_transformer_engine_spec",
    )


def check_layers(parts: Parts, hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError where stock layers do not compute what the architecture does."""
    kind = hf_config.model_type
    built = all(getattr(model, "built_for", None) == kind for model in parts.raw)
    require(
        built or not FAMILIES[kind].is_custom,
        f"attach: {kind} has norms, activations, a scale of its embeddings or states between "
        "tokens that megatron-core's own layers do not compute on packed sequences: build the "
        "model's chunks with spmdrl.engines.megatron.model.build_chunks",
    )


STOCK = ("megatron.core.", "transformer_engine.", "apex.", "torch.nn.", "spmdrl.")
ATTENTIONS = ("SelfAttention", "MLASelfAttention", "GatedDeltaNet", "PackedDeltaNet")


def custom_modules(model: nn.Module) -> set[str]:
    """Classes inside a GPTModel that are neither Megatron's, TransformerEngine's nor ours, and
    Megatron's own that take the place of attention (sparse or cross attention)."""
    decoder: Any = model.decoder
    kinds = {type(module) for module in model.modules() if module is not model}
    found = {
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if not f"{kind.__module__}.".startswith(STOCK)
    }
    for layer in decoder.layers:
        attention = type(getattr(layer, "self_attention", None)).__name__
        across = type(getattr(layer, "cross_attention", None)).__name__
        if attention not in ATTENTIONS:
            found.add(f"{attention} as self_attention")
        if across not in ("IdentityOp", "NoneType"):
            found.add(f"{across} as cross_attention")
    return found


def compared(
    parts: Parts, hf_config: PreTrainedConfig, ours: Any
) -> dict[str, tuple[Any, Any]]:  # fmt: skip
    """Compares what the host's config says with what config.model means, by what it is about."""
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
        "bias of linear layers": (config.add_bias_linear, ours.add_bias_linear),
        "layers that see a window": (window_layers(config), window_layers(ours)),
        "tied embeddings": (
            model.share_embeddings_and_output_weights, bool(hf.tie_word_embeddings)
        ),
        "activation": (config.activation_func, ours.activation_func),
        "no_rope_freq": (without_rope(config), without_rope(ours)),
    }  # fmt: skip
    names = SAME | (SAME_EXPERTS if ours.num_moe_experts else frozenset())
    if ours.num_moe_experts:
        pairs |= {
            "layers with experts": (expert_layers(config), expert_layers(ours)),
            "width of shared experts": (
                config.moe_shared_expert_intermediate_size or 0,
                ours.moe_shared_expert_intermediate_size or 0,
            ),
        }
    if ours.multi_latent_attention:
        names |= SAME_LATENT
    else:
        pairs |= {
            "key-value heads": (config.num_query_groups, hf.num_key_value_heads),
            "head dimension": (config.kv_channels, head_dim(hf_config)),
            "scale of attention scores": (scale_of(config), scale_of(ours)),
        }
    pairs |= {
        name: (getattr(config, name, None), getattr(ours, name, None)) for name in sorted(names)
    }
    rows = parts.groups.tensor.size() * embedding_rows(parts)
    if rows and rows < hf.vocab_size:
        pairs["tokens"] = (rows, hf.vocab_size)
    return pairs


def any_of(pattern: Any) -> bool:
    """Whether a frequency of Megatron's, an integer or a list of 0 and 1, chooses any layer."""
    return any(pattern) if isinstance(pattern, list | tuple) else bool(pattern)


def without_rope(config: Any) -> list[int] | None:
    """Returns 1 for each layer without a rotary embedding and 0 for the others; None where all have
    one. Megatron makes a list of an integer.
    """
    return config.no_rope_freq if any_of(config.no_rope_freq) else None


def window_layers(config: Any) -> list[int]:
    """Returns the layers whose attention sees a window of keys, from 0."""
    from megatron.core.transformer.utils import is_layer_window_attention

    return [
        layer
        for layer in range(config.num_layers)
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer + 1)
    ]


def expert_layers(config: Any) -> list[int]:
    """1 for each layer with experts, from moe_layer_freq, an integer or a list."""
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [int(number % every == 0) for number in range(config.num_layers)]
    return [int(has) for has in every]


def wrong_rotary(parts: Parts, hf_config: PreTrainedConfig) -> list[str]:
    """Returns what differs in the rotary embeddings of all chunks."""
    wanted, _ = rope_frequencies(hf_config)
    wrong = set()
    modules = {
        getattr(module, "rotary_pos_emb", None) for raw in parts.raw for module in raw.modules()
    }
    for rotary in modules:
        found = getattr(rotary, "inv_freq", wanted).float().cpu()
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-5):
            wrong.add("rotary embedding: other frequencies (rotary_base, rotary_percent or their "
                      "scaling)")  # fmt: skip
        factor = getattr(rotary, "seq_len_interpolation_factor", None)
        if factor not in (None, 1, 1.0):
            wrong.add(f"rotary embedding: seq_len_interpolation_factor={factor} here, None there")
    return sorted(wrong)


def scale_of(config: Any) -> float:
    given = getattr(config, "softmax_scale", None)
    return round(config.kv_channels**-0.5 if given is None else given, 9)


def check_wrapper(chunk: Any) -> None:
    """Raises ConfigError where a model chunk is not in Megatron's DistributedDataParallel."""
    from megatron.core.distributed import DistributedDataParallel

    name = type(chunk).__name__
    fsdp = "FullyShardedDataParallel" in name or "FSDP" in name
    require(
        not fsdp and not getattr(getattr(chunk, "ddp_config", None), "use_megatron_fsdp", False),
        f"attach: {name} is Megatron-FSDP or torch's FSDP2, which keep weights and gradients in "
        "buffers of their own; leave --use-megatron-fsdp and --use-torch-fsdp2 out and take "
        "--use-distributed-optimizer",
    )
    require(
        isinstance(chunk, DistributedDataParallel),
        f"attach: {name} is not megatron.core.distributed."
        "DistributedDataParallel, in which every model chunk has to be wrapped",
    )


def check_optimizer(optimizer: Any, offload: bool) -> None:
    """Raises ConfigError for an optimizer that a step cannot drive. offload: the actor's
    offload_optimizer."""
    kind = type(optimizer).__name__
    for name in ("prepare_grads", "get_grad_norm", "step", "zero_grad"):
        require(
            hasattr(optimizer, name),
            f"attach: the optimizer ({kind}) has no {name}(): it must be what "
            "megatron.core.optimizer.get_megatron_optimizer returns",
        )
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        require(
            getattr(part, "grad_scaler", None) is None,
            f"attach: the optimizer ({type(part).__name__}) scales losses, and skips steps by it; "
            "train in bfloat16 or float32, without --loss-scale",
        )
        inner = type(getattr(part, "optimizer", None)).__name__
        require(
            not (offload and inner == "HybridDeviceOptimizer"),
            "actor.offload_optimizer: the host's optimizer is on the CPU already "
            "(--optimizer-cpu-offload); leave one of them out",
        )


def embedding_rows(parts: Parts) -> int:
    """Returns the rows of the embedding on this rank; 0 where another pipeline stage has it."""
    first = parts.raw[0]
    return len(first.embedding.word_embeddings.weight) if first.pre_process else 0


def form_of(parts: Parts) -> Form:
    """Returns how the model's attention takes sequences of different length."""
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
