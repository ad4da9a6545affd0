"""A Hugging Face architecture as chunks of megatron-core's GPTModel, one per virtual stage.

No TransformerEngine: megatron's own linear layers, with attention and norm from
`megatron_attention`. Everything imports megatron-core when called, never before.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig

from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.layout import (
    Degrees,
    check_architecture,
    check_layout,
    check_scores,
    dense_width,
    has_experts,
    head_dim,
    layer_types,
    moe_layers,
    padded_vocab,
    rope_factor,
    rope_frequencies,
    rope_kinds,
    softcap,
    vocab_range,
)
from spmdrl.engines.megatron.mtp import add_mtp_layers, layers_of
from spmdrl.engines.megatron.rotary import MultimodalRotary
from spmdrl.engines.megatron.towers import mrope_axes, mrope_section

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

    config: Any = hf_config
    family = FAMILIES[config.model_type]
    check_scores(config, degrees.context, dtype)
    heads = config.num_attention_heads
    settings: dict[str, Any] = {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "num_attention_heads": heads, "num_query_groups": config.num_key_value_heads,
        "kv_channels": head_dim(config), "ffn_hidden_size": dense_width(config),
        "softmax_scale": head_dim(config) ** -0.5,
        "normalization": "RMSNorm", "layernorm_epsilon": config.rms_norm_eps,
        "gated_linear_unit": True, "activation_func": silu, "add_bias_linear": False,
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
        # batches of different length, and one division by one global count
        "variable_seq_lengths": True, "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    if recompute == "selective":
        settings |= {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    elif recompute:
        settings |= {
            "recompute_granularity": "full", "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }  # fmt: skip
    if has_experts(config):
        settings |= {
            "moe_router_dtype": "fp32", "moe_permute_fusion": False,
            "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        }  # fmt: skip
    settings |= _layout_settings(degrees) | _window_settings(config) | family.settings(config)
    if mrope_section(config):
        settings["mrope_section"] = mrope_section(config)
    if settings["softmax_scale"] is not None:  # the factor is on sine and cosine
        settings["softmax_scale"] *= rope_frequencies(config)[1] ** 2
    kind = MLATransformerConfig if family.latent else TransformerConfig
    return kind(**(settings | overrides))


def _layout_settings(d: Degrees) -> dict[str, Any]:
    return {
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
        # interleaved stages: batched transfers mix up two ranks' messages without a word
        "batch_p2p_comm": d.virtual == 1, "overlap_p2p_comm": d.virtual > 1,
        "deallocate_pipeline_outputs": torch.cuda.is_available() and d.pipeline > 1,
    }  # fmt: skip


def _window_settings(hf_config: PreTrainedConfig) -> dict[str, Any]:
    config: Any = hf_config
    sees_window = [int(kind == "sliding_attention") for kind in layer_types(config)]
    if not any(sees_window):
        return {}
    return {
        "window_size": (config.sliding_window - 1, 0), "window_attn_skip_freq": sees_window,
    }  # fmt: skip


def build_chunks(
    hf_config: PreTrainedConfig, config: Any, kind: Literal["policy", "value", "reward"],
    num_mtp_layers: int = 0,
) -> list[Any]:  # fmt: skip
    """GPTModels of this pipeline rank, one per virtual stage, with weights of zero.

    num_mtp_layers: layers for multi-token prediction that the last stage has beside (mtp.py).

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
            parallel_output=True, vp_stage=stage,
            position_embedding_type="mrope" if config.mrope_section else "rope",
            rotary_percent=rope_factor(hf),
            share_embeddings_and_output_weights=hf.tie_word_embeddings and kind == "policy",
        )  # fmt: skip
        if kind != "policy" and last:
            chunk.output_layer = ValueHead(config) if kind == "value" else RewardHead(config)
        if num_mtp_layers and last:
            add_mtp_layers(chunk, hf, num_mtp_layers, partial(layer_spec, config, hf))
        _set_rope(chunk, hf)
        _finish(chunk, hf)
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
    """Megatron's own layer without TransformerEngine, with our attention and norm, and what the
    family has beside.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    from spmdrl.engines.megatron.attention import (
        ClampedSwiGlu,
        JointRmsNorm,
        NormedAdd,
        PackedAttention,
        RmsNorm,
    )
    from spmdrl.engines.megatron.delta_net import delta_net_spec
    from spmdrl.engines.megatron.grouped_experts import GroupedExperts

    family, sparse = FAMILIES[hf_config.model_type], moe_layers(hf_config)[number]
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if sparse else None,
        qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention,
        normalization="RMSNorm",
    )  # fmt: skip
    layer, parts = spec.submodules, spec.submodules.self_attention.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm if family.pre_norms else IdentityOp
    if layer_types(hf_config)[number] == "linear_attention":
        layer.self_attention = delta_net_spec()
        return spec
    parts.core_attention = ModuleSpec(PackedAttention, params={
        "softcap": softcap(hf_config, "attn_logit_softcapping"),
        "scale_factor": scale_factor(config, hf_config, number),
    })  # fmt: skip
    if config.multi_latent_attention:
        parts.q_layernorm = parts.kv_layernorm = RmsNorm
    elif family.joint_qk_norms:  # without config.qk_layernorm, by which gradients of norms are
        # summed over the tensor ranks: these have weights of their own on each
        heads, groups = config.num_attention_heads, config.num_query_groups
        parts.q_layernorm = ModuleSpec(JointRmsNorm, params={"heads": heads})
        parts.k_layernorm = ModuleSpec(JointRmsNorm, params={"heads": groups})
    elif config.qk_layernorm:
        parts.q_layernorm = parts.k_layernorm = RmsNorm
    if family.sandwich_norms:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(NormedAdd, params={"config": config})
    if sparse and config.moe_grouped_gemm:
        layer.mlp.submodules.experts.module = GroupedExperts
    if sparse and family.clamped_swiglu is not None:
        layer.mlp.submodules.experts.submodules.activation_func = ModuleSpec(
            ClampedSwiGlu, params=family.clamped_swiglu(hf_config)
        )
    return spec


def scale_factor(config: Any, hf_config: PreTrainedConfig, number: int) -> float:
    """Returns what the scale of a layer's scores is times that of the config, which has the factor
    on sine and cosine (YaRN's) in it: a layer that rotates nothing has no such factor.
    """
    rotates = not config.no_rope_freq or not config.no_rope_freq[number]
    return 1.0 if rotates else rope_frequencies(hf_config)[1] ** -2


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
            kinds = len(rope_kinds(hf_config))  # end to end, see _own_rotary
            assert len(frequencies) == kinds * len(rotary.inv_freq)
            rotary.inv_freq = frequencies.to(rotary.inv_freq.device)
    axes = mrope_axes(hf_config, len(frequencies))
    if axes is not None:
        chunk.rotary_pos_emb = MultimodalRotary(
            chunk.rotary_pos_emb.inv_freq, axes, chunk.config.rotary_interleaved
        )


def _finish(chunk: Any, hf_config: Any) -> None:
    """Gives a chunk what a GPTModel has no field for."""
    family = FAMILIES[hf_config.model_type]
    if family.latent:
        _finish_latent(chunk)
    if chunk.config.add_bias_linear:
        _finish_biased_experts(chunk)
    if len(kinds := list(rope_kinds(hf_config))) > 1:
        types: list[str] = hf_config.layer_types
        for layer in chunk.decoder.layers:
            choose = partial(_own_rotary, kind=kinds.index(types[layer.layer_number - 1]))
            layer.self_attention.register_forward_pre_hook(choose, with_kwargs=True)
    if family.embedding_scale is not None and chunk.pre_process:
        scale = family.embedding_scale(hf_config)
        chunk.embedding.word_embeddings.register_forward_hook(
            lambda layer, args, out: out * torch.tensor(scale, dtype=out.dtype, device=out.device)
        )
    chunk.built_for = hf_config.model_type


def _finish_biased_experts(chunk: Any) -> None:
    """Puts right three things of megatron-core 0.16.1 about the bias of an expert's second matrix:
    behind an all-reduce over one rank it may not be added in place, its gradient is summed over
    the tensor ranks twice, and the gradient's norm counts it on the first tensor rank alone.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    for name, module in chunk.named_modules():
        if ".local_experts." in name and name.endswith(".linear_fc2"):
            module.explicit_expert_comm = True
            module.bias.sequence_parallel = False
            set_tensor_model_parallel_attributes(module.bias, True, 0, 1)


def _own_rotary(attention: Any, args: Any, kwargs: dict[str, Any], kind: int) -> tuple[Any, Any]:
    """Leaves of (tokens, 1, 1, dims), the angles of two kinds twice, those of this kind twice."""
    angles = kwargs["rotary_pos_emb"].unflatten(-1, (2, 2, -1))
    return args, kwargs | {"rotary_pos_emb": angles[..., kind, :].flatten(-2)}


class ValueHead(nn.Module):
    """(tokens, 1, hidden) -> (all tokens, 1, 1) float32, and no bias for the caller to add.

    Every tensor rank holds it whole and computes its own tokens.
    """

    names: ClassVar[dict[str, str]] = {"weight": "value_head.weight", "bias": "value_head.bias"}

    def __init__(self, config: Any) -> None:
        super().__init__()
        device = torch.cuda.current_device()  # on a CPU by mcore_cpu.scope()
        kwargs: Any = {"dtype": config.params_dtype, "device": device}
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, **kwargs))
        if "bias" in self.names:
            self.bias = nn.Parameter(torch.zeros(1, **kwargs))
        self.sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        values = self.values(hidden)
        if self.sequence_parallel:  # every rank then takes the loss of all tokens
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

    def values(self, hidden: Tensor) -> Tensor:
        """Computes in float32: a value of 100 in bfloat16 would be off by up to 0.25."""
        return linear(hidden.float(), self.weight.float(), self.bias.float())


class RewardHead(ValueHead):
    """The score of a sequence classifier. It is computed in float32, or near rewards would be
    equal.
    """

    names: ClassVar[dict[str, str]] = {"weight": "score.weight"}

    def values(self, hidden: Tensor) -> Tensor:
        return linear(hidden.float(), self.weight.float())


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
    for layer in layers_of(chunk):
        attn = layer.self_attention
        attn.linear_kv_down_proj = WholeLinear(config.hidden_size, key_value_dim, config)
        attn.kv_layernorm.eps = LATENT_NORM_EPS
        if config.q_lora_rank is not None:
            attn.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
            attn.q_layernorm.eps = LATENT_NORM_EPS
