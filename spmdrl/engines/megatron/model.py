"""A Hugging Face architecture as chunks of megatron-core's GPTModel, one per virtual stage.

No TransformerEngine: megatron's own linear layers, with attention and norm from
`megatron_attention`. Everything imports megatron-core when called, never before.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig

from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.layout import (
    FAMILIES,
    Degrees,
    check_architecture,
    check_layout,
    expert_groups,
    expert_width,
    head_dim,
    moe_layers,
    num_experts,
    padded_vocab,
    rope_frequencies,
    shared_expert_width,
    vocab_range,
)

__all__ = [
    "Degrees", "ValueHead", "build_chunks", "check_architecture", "check_layout", "layer_numbers",
    "padded_vocab", "transformer_config", "vocab_range",
]  # fmt: skip

LATENT_NORM_EPS = 1e-6  # of DeepSeek's norms inside attention, whatever rms_norm_eps says


def transformer_config(
    hf_config: PreTrainedConfig, degrees: Degrees, dtype: torch.dtype,
    recompute: bool | Literal["selective"] = False,
    **overrides: Any,
) -> Any:  # fmt: skip
    """Megatron's TransformerConfig.

    recompute: True keeps only the input of every layer; "selective" all but core attention's part.

    Raises ConfigError as `check_layout` does.
    """
    check_layout(hf_config, degrees)
    mcore_cpu.install()
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    family, config, d = FAMILIES[hf_config.model_type], hf_config, degrees
    heads, gpu = config.num_attention_heads, torch.cuda.is_available()
    scaling = rope_frequencies(config)[1]  # on sine and cosine, so squared on the scores
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": heads, "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config), "ffn_hidden_size": config.intermediate_size,
        "softmax_scale": scaling**2 * head_dim(config) ** -0.5,
        "normalization": "RMSNorm", "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False,
        "add_qkv_bias": family.qkv_bias, "qk_layernorm": family.qk_norm,
        "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bias_activation_fusion": False, "bias_dropout_fusion": False,
        "masked_softmax_fusion": False, "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        # weights come from a checkpoint; zeros cost least, and padding rows stay at them.
        # Without initialisation the linear layers would not mark how they are cut
        "perform_initialization": True, "init_method": nn.init.zeros_,
        "output_layer_init_method": nn.init.zeros_, "embedding_init_method": nn.init.zeros_,
        "params_dtype": dtype, "pipeline_dtype": dtype, "autocast_dtype": dtype,
        "bf16": dtype == torch.bfloat16, "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": d.tensor, "sequence_parallel": d.sequence,
        "pipeline_model_parallel_size": d.pipeline,
        "virtual_pipeline_model_parallel_size": d.virtual if d.virtual > 1 else None,
        "num_layers_in_first_pipeline_stage": d.first_stage,
        # of two stages the first says all, and Megatron divides by the number of others
        "num_layers_in_last_pipeline_stage": (
            None if d.pipeline == 2 and d.first_stage is not None else d.last_stage
        ),
        "context_parallel_size": d.context, "expert_model_parallel_size": d.expert,
        "expert_tensor_parallel_size": d.expert_tensor,
        # batches of different length, and one division by one global count
        "variable_seq_lengths": True, "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        # interleaved stages: batched transfers mix up two ranks' messages without a word
        "batch_p2p_comm": d.virtual == 1, "overlap_p2p_comm": d.virtual > 1,
        "deallocate_pipeline_outputs": gpu and d.pipeline > 1,
    }  # fmt: skip
    if recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif recompute:
        settings |= {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }  # fmt: skip
    if family.experts:
        settings |= _expert_settings(hf_config)
    if family.latent:
        settings |= _latent_settings(hf_config)
    kind = MLATransformerConfig if family.latent else TransformerConfig
    return kind(**(settings | overrides))


def _expert_settings(hf_config: PreTrainedConfig) -> dict[str, Any]:
    config: Any = hf_config
    settings: dict[str, Any] = {
        "num_moe_experts": num_experts(config), "moe_router_topk": config.num_experts_per_tok,
        "moe_ffn_hidden_size": expert_width(config),
        "moe_layer_freq": [int(sparse) for sparse in moe_layers(config)],
        "moe_router_dtype": "fp32", "moe_grouped_gemm": False, "moe_permute_fusion": False,
        "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        # the chosen experts' probabilities sum to 1 only where the softmax is over them alone
        "moe_router_pre_softmax": not getattr(config, "norm_topk_prob", True),
        "moe_shared_expert_intermediate_size": shared_expert_width(config) or None,
    }  # fmt: skip
    if FAMILIES[config.model_type].latent:
        groups, chosen_groups = expert_groups(config) or (None, None)
        settings |= {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # pretraining's balance is not RL's to move
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_num_groups": groups, "moe_router_group_topk": chosen_groups,
        }  # fmt: skip
    return settings


def _latent_settings(hf_config: PreTrainedConfig) -> dict[str, Any]:
    config: Any = hf_config
    rope = config.rope_parameters
    scaled = rope["rope_type"] != "default"
    return {
        "num_query_groups": config.num_attention_heads, "kv_channels": config.v_head_dim,
        "q_lora_rank": config.q_lora_rank, "kv_lora_rank": config.kv_lora_rank,
        "qk_head_dim": config.qk_nope_head_dim, "qk_pos_emb_head_dim": config.qk_rope_head_dim,
        "v_head_dim": config.v_head_dim, "rope_type": "rope",
        "rotary_scaling_factor": rope["factor"] if scaled else 1.0,
        "mscale_all_dim": (rope.get("mscale_all_dim") or 0.0) if scaled else 0.0,
        "softmax_scale": None,  # megatron computes it from the two above
    }  # fmt: skip


def build_chunks(
    hf_config: PreTrainedConfig, config: Any, kind: Literal["policy", "value"]
) -> list[Any]:
    """GPTModels of this pipeline rank, one per virtual stage, with weights of zero.

    `parallel_state` is initialised with the degrees of `config`. On a CPU inside mcore_cpu.scope().
    Collective over the embedding group where embeddings are tied over pipeline stages.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from spmdrl.engines.megatron.attention import RmsNorm

    _seed_once()
    hf: Any = hf_config
    virtual = config.virtual_pipeline_model_parallel_size
    stages = range(virtual) if virtual else [None]
    chunks = []
    for stage in stages:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        specs = [layer_spec(config, hf, number) for number in layer_numbers(config, stage)]
        chunk = GPTModel(
            config, TransformerBlockSubmodules(layer_specs=specs, layer_norm=RmsNorm),
            vocab_size=padded_vocab(hf, config.tensor_model_parallel_size),
            max_sequence_length=hf.max_position_embeddings, pre_process=first, post_process=last,
            parallel_output=True, position_embedding_type="rope", vp_stage=stage,
            share_embeddings_and_output_weights=hf.tie_word_embeddings and kind == "policy",
        )  # fmt: skip
        if kind == "value" and last:
            chunk.output_layer = ValueHead(config)
        _set_rope(chunk, hf)
        if FAMILIES[hf.model_type].latent:
            _finish_latent(chunk)
        _mark_experts(chunk)
        chunks.append(chunk)
    return chunks


def layer_numbers(config: Any, stage: int | None) -> range:
    """Returns the numbers, in the whole model and from 0, of the layers in a chunk of this pipeline
    rank.
    """
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(config, vp_stage=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=stage))


def layer_spec(config: Any, hf_config: PreTrainedConfig, number: int) -> Any:
    """Megatron's own layer without TransformerEngine, with our attention and norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from spmdrl.engines.megatron.attention import PackedAttention, RmsNorm

    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe_layers(hf_config)[number] else None,
        qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )  # fmt: skip
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RmsNorm
    parts = spec.submodules.self_attention.submodules
    parts.core_attention = PackedAttention
    if config.multi_latent_attention:
        parts.q_layernorm = parts.kv_layernorm = RmsNorm
    elif config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RmsNorm
    return spec


def _seed_once() -> None:
    """Megatron draws initial weights from a generator that must exist, even for zeros."""
    from megatron.core.tensor_parallel.random import (
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    if not get_cuda_rng_tracker().get_states():
        with torch.random.fork_rng(devices):
            model_parallel_cuda_manual_seed(0)


def _mark_experts(chunk: Any) -> None:
    """Gradients of experts are summed over the ranks that hold the same expert.

    0.16.1 sums them over the data ranks where expert=1, although with tensor > expert_tensor the
    tensor ranks too hold copies, and see other tokens.
    """
    for name, parameter in chunk.named_parameters():
        if ".local_experts." in name:
            parameter.allreduce = False


def _set_rope(chunk: Any, hf_config: PreTrainedConfig) -> None:
    """Hugging Face's own frequencies: every kind of scaling that does not look at the length."""
    frequencies, _ = rope_frequencies(hf_config)
    for module in chunk.modules():
        rotary = getattr(module, "rotary_pos_emb", None)
        if rotary is not None:
            assert rotary.inv_freq.shape == frequencies.shape
            rotary.inv_freq = frequencies.to(rotary.inv_freq.device)


class ValueHead(nn.Module):
    """(tokens, 1, hidden) -> (all tokens, 1, 1) float32, and no bias for the caller to add.

    Every tensor rank holds it whole and computes its own tokens.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        kwargs: Any = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, **kwargs))
        self.bias = nn.Parameter(torch.zeros(1, **kwargs))
        self.sequence_parallel = config.sequence_parallel
        for parameter in (self.weight, self.bias):
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = linear(hidden, self.weight, self.bias).float()
        if self.sequence_parallel:  # every rank then takes the loss of all tokens
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class WholeLinear(nn.Module):
    """A projection that every tensor rank holds whole and applies to its own tokens."""

    def __init__(self, in_dim: int, out_dim: int, config: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        zeros = torch.zeros(out_dim, in_dim, dtype=config.params_dtype, device=device)
        self.weight = nn.Parameter(zeros)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return linear(x, self.weight), None


def _finish_latent(chunk: Any) -> None:
    """Puts right what megatron-core 0.16.1 has only with TransformerEngine.

    Its column-parallel down projections lose the gradient that other ranks' heads have for the
    rotated part of the key. Whole ones keep it where tokens are cut over the tensor ranks, which
    mixtures of experts want anyway. And these norms have an epsilon of their own.
    """
    config = chunk.config
    assert config.sequence_parallel or config.tensor_model_parallel_size == 1
    key_value_dim = config.kv_lora_rank + config.qk_pos_emb_head_dim
    for layer in chunk.decoder.layers:
        attn = layer.self_attention
        attn.linear_kv_down_proj = WholeLinear(config.hidden_size, key_value_dim, config)
        attn.kv_layernorm.eps = LATENT_NORM_EPS
        if config.q_lora_rank is not None:
            attn.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
            attn.q_layernorm.eps = LATENT_NORM_EPS
