"""A Hugging Face architecture as chunks of megatron-core's GPTModel, one per virtual stage.

No TransformerEngine: megatron's own linear layers, with attention and norm from
`megatron_attention`. Everything imports megatron-core when called, never before.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmdrl.config import ConfigError
from spmdrl.engines import mcore_cpu

LATENT_NORM_EPS = 1e-6  # of DeepSeek's norms inside attention, whatever rms_norm_eps says
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Degrees:
    """Into how many parts a model is cut. World size / (tensor * pipeline * context) is data."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # model chunks per pipeline rank
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: bool = False  # activations between layers are cut over the tensor ranks too


@dataclass(frozen=True)
class Family:
    """What sets an architecture apart from Llama."""

    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    latent: bool = False  # DeepSeek's multi-head latent attention


FAMILIES = {  # by Hugging Face's model_type
    "llama": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
    "qwen3_moe": Family(qk_norm=True, experts=True),
    "mixtral": Family(experts=True),
    "deepseek_v3": Family(experts=True, latent=True),
}


def check_architecture(hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError where the model, or what its config asks for, has no mapping."""
    kind = hf_config.model_type
    family = FAMILIES.get(kind)
    if family is None:
        raise ConfigError(
            f"engine megatron: no mapping for architecture {kind!r}; there is one for "
            f"{', '.join(sorted(FAMILIES))}. Use engine fsdp, or add a Family in "
            "spmdrl/engines/megatron_model.py and its names in megatron_names.py"
        )
    get = lambda name, other=None: getattr(hf_config, name, other)  # noqa: E731
    rope_type = hf_config.rope_parameters["rope_type"]
    topk, groups = get("num_experts_per_tok"), get("topk_group")
    wrong = {
        f"hidden_act {get('hidden_act')!r} (only silu)": get("hidden_act") != "silu",
        "attention_bias (only qwen2's bias on q, k and v)": bool(get("attention_bias")),
        "mlp_bias": bool(get("mlp_bias")),
        f"sliding_window {get('sliding_window')}": get("sliding_window") is not None,
        f"rope type {rope_type!r} (only {', '.join(STATIC_ROPE)})": rope_type not in STATIC_ROPE,
        "a rotary embedding of part of the head": _rope_factor(hf_config) != 1.0,
        "one expert per token": family.experts and topk == 1,
    }
    if family.latent:
        wrong |= {
            "norm_topk_prob=False": not get("norm_topk_prob"),
            "rope_interleave=False": not get("rope_interleave", True),
            # Megatron ranks expert groups by their topk // topk_group best, Hugging Face by two
            f"{topk} experts per token from {groups} groups": topk // groups != 2,
            "yarn whose mscale is not mscale_all_dim": rope_type in STATIC_ROPE
            and rope_frequencies(hf_config)[1] != 1.0,
        }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(
            f"engine megatron: {kind} with {'; '.join(found)} is not mapped. Use engine fsdp"
        )


def check_layout(
    hf_config: PreTrainedConfig, degrees: Degrees, world_size: int | None = None
) -> None:
    """Raises ConfigError, with the arithmetic and what would work, where parts are not equal."""
    check_architecture(hf_config)
    family, d = FAMILIES[hf_config.model_type], degrees
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    layers = hf_config.num_hidden_layers
    problems = [f"{k}={v}: must be at least 1" for k, v in asdict(d).items() if v < 1 and k[0] != "s"]
    if problems:
        raise ConfigError("engine megatron: " + "; ".join(problems))
    problems += _must_divide("tensor", d.tensor, _tensor_sizes(hf_config))
    if not family.latent and groups % d.tensor and d.tensor % groups:
        problems.append(
            f"tensor={d.tensor}: {groups} key-value heads are neither a multiple nor a divisor; "
            f"tensor may be {_divisors(groups, heads)}"
        )
    problems += _must_divide("pipeline", d.pipeline, {"layers": layers})
    if layers % d.pipeline == 0:
        here = {f"layers of each of {d.pipeline} pipeline ranks": layers // d.pipeline}
        problems += _must_divide("virtual", d.virtual, here)
    if d.virtual > 1 and d.pipeline == 1:
        problems.append(f"virtual={d.virtual}: wants pipeline > 1; use virtual=1")
    if family.experts:
        problems += _must_divide("expert", d.expert, {"experts": num_experts(hf_config)})
        width = {"intermediate size of an expert": expert_width(hf_config)}
        problems += _must_divide("expert_tensor", d.expert_tensor, width)
        if d.tensor > 1 and not d.sequence:
            problems.append(f"tensor={d.tensor} with experts: wants sequence=True")
    elif d.expert > 1 or d.expert_tensor > 1:
        problems.append(
            f"expert={d.expert}, expert_tensor={d.expert_tensor}: {hf_config.model_type} has no "
            "experts; use 1"
        )
    if d.sequence and d.tensor == 1:
        problems.append("sequence=True: wants tensor > 1")
    if world_size is not None:
        problems += _world_problems(d, family.experts, world_size)
    if problems:
        raise ConfigError("engine megatron: " + "; ".join(problems))


def _tensor_sizes(hf_config: PreTrainedConfig) -> dict[str, int]:
    """What tensor parallelism cuts; the vocabulary is padded instead."""
    family = FAMILIES[hf_config.model_type]
    cut = {"attention heads": hf_config.num_attention_heads}
    if not family.experts or any(not sparse for sparse in moe_layers(hf_config)):
        cut["intermediate size"] = hf_config.intermediate_size
    if shared_expert_width(hf_config):
        cut["intermediate size of the shared experts"] = shared_expert_width(hf_config)
    if family.latent:
        cut["kv_lora_rank + qk_rope_head_dim"] = (
            hf_config.kv_lora_rank + hf_config.qk_rope_head_dim
        )
        if hf_config.q_lora_rank is not None:
            cut["q_lora_rank"] = hf_config.q_lora_rank
    return cut


def _must_divide(name: str, degree: int, sizes: dict[str, int]) -> list[str]:
    return [
        f"{name}={degree}: {size} {what} do not divide by {degree} (remainder {size % degree}); "
        f"{name} may be {_divisors(size)}"
        for what, size in sizes.items()
        if size % degree
    ]


def _world_problems(d: Degrees, experts: bool, world_size: int) -> list[str]:
    dense = d.tensor * d.pipeline * d.context
    sizes = {f"tensor {d.tensor} * pipeline {d.pipeline} * context {d.context} = {dense}": dense}
    if experts:
        sparse = d.expert_tensor * d.expert * d.pipeline
        sizes[
            f"expert_tensor {d.expert_tensor} * expert {d.expert} * pipeline {d.pipeline} = {sparse}"
        ] = sparse
    return [
        f"{world_size} ranks are no multiple of {what}: use {_divisors(world_size)} in all, or "
        f"{-(-world_size // size) * size} ranks"
        for what, size in sizes.items()
        if world_size % size
    ]


def _divisors(size: int, *others: int) -> str:
    """At most twelve."""
    upto = max(size, *others) if others else size
    good = [n for n in range(1, upto + 1) if size % n == 0 or (others and n % size == 0)]
    good = [n for n in good if all(other % n == 0 for other in others)]
    return ", ".join(map(str, good[:12])) + (", ..." if len(good) > 12 else "")


def num_experts(hf_config: PreTrainedConfig) -> int:
    """Routed experts of a layer."""
    config: Any = hf_config
    return config.num_local_experts  # every family has this name, or maps it


def expert_width(hf_config: PreTrainedConfig) -> int:
    config: Any = hf_config
    return config.moe_intermediate_size if hasattr(config, "moe_intermediate_size") else (
        config.intermediate_size
    )


def shared_expert_width(hf_config: PreTrainedConfig) -> int:
    """Of all shared experts of a layer together; 0 where there are none."""
    config: Any = hf_config
    if not FAMILIES[config.model_type].latent:
        return 0
    return config.moe_intermediate_size * (config.n_shared_experts or 0)


def moe_layers(hf_config: PreTrainedConfig) -> list[bool]:
    """For each layer whether its MLP is a mixture of experts."""
    config: Any = hf_config
    numbers = range(config.num_hidden_layers)
    if not FAMILIES[config.model_type].experts:
        return [False for _ in numbers]
    if config.model_type == "qwen3_moe":
        step, dense = config.decoder_sparse_step, config.mlp_only_layers
        return [n not in dense and (n + 1) % step == 0 for n in numbers]
    if config.model_type == "deepseek_v3":
        return [n >= config.first_k_dense_replace for n in numbers]
    return [True for _ in numbers]


def head_dim(hf_config: PreTrainedConfig) -> int:
    config: Any = hf_config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_factor(hf_config: PreTrainedConfig) -> float:
    config: Any = hf_config
    return config.rope_parameters.get("partial_rotary_factor") or getattr(
        config, "partial_rotary_factor", None
    ) or 1.0


def rope_frequencies(hf_config: PreTrainedConfig) -> tuple[Tensor, float]:
    """(rotated dims / 2,) float32 inverse frequencies and the factor on sine and cosine."""
    config: Any = hf_config
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        dim = config.qk_rope_head_dim if FAMILIES[config.model_type].latent else head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))


def padded_vocab(hf_config: PreTrainedConfig, tensor: int) -> int:
    return -(-hf_config.vocab_size // tensor) * tensor


def vocab_range(hf_config: PreTrainedConfig, tensor: int, rank: int) -> tuple[int, int]:
    """First and one past the last token id whose rows a tensor rank holds; the rest is padding."""
    rows = padded_vocab(hf_config, tensor) // tensor
    last = min((rank + 1) * rows, hf_config.vocab_size)
    return min(rank * rows, last), last


def transformer_config(
    hf_config: PreTrainedConfig, degrees: Degrees, dtype: torch.dtype, recompute: bool = False,
    **overrides: Any,
) -> Any:  # fmt: skip
    """Megatron's TransformerConfig. recompute: keep only the input of every layer.

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
        "context_parallel_size": d.context, "expert_model_parallel_size": d.expert,
        "expert_tensor_parallel_size": d.expert_tensor,
        # batches of different length, and one division by one global count
        "variable_seq_lengths": True, "calculate_per_token_loss": True,
        "moe_token_dispatcher_type": "alltoall",
        # interleaved stages: batched transfers mix up two ranks' messages without a word
        "batch_p2p_comm": d.virtual == 1, "overlap_p2p_comm": d.virtual > 1,
        "deallocate_pipeline_outputs": gpu and d.pipeline > 1,
    }  # fmt: skip
    if recompute:
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
        settings |= {
            "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,  # pretraining's balance is not RL's to move
            "moe_router_topk_scaling_factor": config.routed_scaling_factor,
            "moe_router_num_groups": config.n_group, "moe_router_group_topk": config.topk_group,
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

    from spmdrl.engines.megatron_attention import RmsNorm

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
        chunks.append(chunk)
    return chunks


def layer_numbers(config: Any, stage: int | None) -> range:
    """Of the whole model, from 0: those of a chunk of this pipeline rank."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    first = get_transformer_layer_offset(config, vp_stage=stage)
    return range(first, first + get_num_layers_to_build(config, vp_stage=stage))


def layer_spec(config: Any, hf_config: PreTrainedConfig, number: int) -> Any:
    """Megatron's own layer without TransformerEngine, with our attention and norm."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from spmdrl.engines.megatron_attention import PackedAttention, RmsNorm

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

    if not get_cuda_rng_tracker().get_states():
        with torch.random.fork_rng():
            model_parallel_cuda_manual_seed(0)


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
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
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
            values = gather_from_sequence_parallel_region(
                values, tensor_parallel_output_grad=False
            )
        return values, None


class WholeLinear(nn.Module):
    """A projection that every tensor rank holds whole.

    shared_dims: so many last dims of the output go into every rank's heads as they are, so their
    gradient is the sum over ranks. Under sequence parallelism the gather behind them does that.
    """

    def __init__(self, weight: Tensor, out_dim: int, config: Any, shared_dims: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.new_zeros(out_dim, weight.shape[1]))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.kept_dims = out_dim if config.sequence_parallel else out_dim - shared_dims

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        out = linear(x, self.weight)
        if self.kept_dims == out.shape[-1]:
            return out, None
        kept, shared = out.split([self.kept_dims, out.shape[-1] - self.kept_dims], -1)
        return torch.cat([kept, copy_to_tensor_model_parallel_region(shared)], -1), None


def _finish_latent(chunk: Any) -> None:
    """Puts right what megatron-core 0.16.1 has only with TransformerEngine.

    Its column-parallel down projections lose the gradient that other ranks' heads have for the
    rotated part of the key. And these norms have an epsilon of their own.
    """
    config = chunk.config
    for layer in chunk.decoder.layers:
        attn = layer.self_attention
        attn.linear_kv_down_proj = WholeLinear(
            attn.linear_kv_down_proj.weight, config.kv_lora_rank + config.qk_pos_emb_head_dim,
            config, config.qk_pos_emb_head_dim,
        )  # fmt: skip
        attn.kv_layernorm.eps = LATENT_NORM_EPS
        if config.q_lora_rank is not None:
            attn.linear_q_down_proj = WholeLinear(
                attn.linear_q_down_proj.weight, config.q_lora_rank, config, 0
            )
            attn.q_layernorm.eps = LATENT_NORM_EPS
