"""Knows which Hugging Face architectures Megatron can run here, and how they may be cut into parts.

Needs no megatron-core: a dry run checks a layout without it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import islice
from math import ceil, gcd, prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmdrl.config import ConfigError

STATIC_ROPE = ("default", "linear", "llama3", "yarn")
MOST_TRIED = 100_000  # as divisors, for an error's text


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
    first_stage: int | None = None  # layers of the first pipeline rank; None: as many as others
    last_stage: int | None = None


@dataclass(frozen=True)
class Family:
    """A family of architectures: what sets it apart from Llama."""

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
    config: Any = hf_config
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"engine megatron: no mapping for architecture {kind!r}; there is one for "
            f"{', '.join(sorted(FAMILIES))}. Use engine fsdp, or add a Family in "
            "spmdrl/engines/megatron/layout.py and its names in hf_mapping.py"
        )
    rope_type, window = config.rope_parameters["rope_type"], getattr(config, "sliding_window", None)
    wrong = {
        f"hidden_act {config.hidden_act!r} (only silu)": config.hidden_act != "silu",
        "attention_bias (only qwen2's bias on q, k and v)": getattr(
            config, "attention_bias", False
        ),
        "mlp_bias": getattr(config, "mlp_bias", False),
        f"sliding_window {window}": window is not None,
        f"rope type {rope_type!r} (only {', '.join(STATIC_ROPE)})": rope_type not in STATIC_ROPE,
        "a rotary embedding of part of the head": _rope_factor(config) != 1.0,
    }
    if FAMILIES[kind].experts:
        wrong["one expert per token"] = config.num_experts_per_tok == 1
    if FAMILIES[kind].latent:
        topk, groups = config.num_experts_per_tok, expert_groups(config)
        scaling = rope_frequencies(config)[1] if rope_type in STATIC_ROPE else 1.0
        wrong |= {
            "norm_topk_prob=False": not config.norm_topk_prob,
            "rope_interleave=False": not config.rope_interleave,
            # Megatron ranks expert groups by their topk // groups best, Hugging Face by two
            f"{topk} experts per token from {config.topk_group} groups": (
                groups is not None and topk // groups[1] != 2
            ),
            "yarn whose mscale is not mscale_all_dim": scaling != 1.0,
        }
    found = [what for what, is_wrong in wrong.items() if is_wrong]
    if found:
        raise ConfigError(
            f"engine megatron: {kind} with {'; '.join(found)} is not mapped. Use engine fsdp"
        )


OPTIONS = {  # of the config, by field of Degrees
    "tensor": "tensor_parallel", "pipeline": "pipeline_parallel", "virtual": "virtual_pipeline",
    "first_stage": "num_layers_in_first_pipeline_stage",
    "last_stage": "num_layers_in_last_pipeline_stage",
    "context": "context_parallel", "expert": "expert_parallel",
    "expert_tensor": "expert_tensor_parallel", "sequence": "sequence_parallel",
}  # fmt: skip


def check_layout(
    hf_config: PreTrainedConfig, degrees: Degrees, world_size: int | None = None
) -> None:
    """Raises ConfigError, with the arithmetic and what would work, where parts are not equal.

    world_size: of the role's ranks; without it the product of the degrees is not looked at.
    """
    check_architecture(hf_config)
    problems = _sizes_below_one(degrees) or [
        *_tensor_problems(hf_config, degrees),
        *_pipeline_problems(hf_config.num_hidden_layers, degrees),
        *_expert_problems(hf_config, degrees),
        *_world_problems(degrees, FAMILIES[hf_config.model_type].experts, world_size),
    ]
    if problems:
        raise ConfigError("engine megatron: " + "; ".join(problems))


def _sizes_below_one(degrees: Degrees) -> list[str]:
    named = {OPTIONS[f.name]: getattr(degrees, f.name) for f in fields(degrees)}
    del named[OPTIONS["sequence"]]
    return [
        f"{name}={size}: must be at least 1"
        for name, size in named.items()
        if size is not None and size < 1
    ]


def _tensor_problems(hf_config: PreTrainedConfig, d: Degrees) -> list[str]:
    problems = _must_divide("tensor_parallel", d.tensor, _tensor_sizes(hf_config))
    heads, groups = hf_config.num_attention_heads, hf_config.num_key_value_heads
    latent = FAMILIES[hf_config.model_type].latent
    if not latent and heads % d.tensor == 0 and groups % d.tensor and d.tensor % groups:
        fit = [n for n in range(1, heads + 1) if groups % n == 0 or n % groups == 0]
        problems.append(
            f"tensor_parallel={d.tensor}: {groups} key-value heads are neither a multiple of it "
            f"nor divide it; it may be {', '.join(str(n) for n in fit if heads % n == 0)}"
        )
    if d.sequence and d.tensor == 1:
        problems.append(
            "sequence_parallel=True: wants tensor_parallel > 1; use sequence_parallel=False"
        )
    return problems


def stage_layers(layers: int, d: Degrees) -> list[int]:
    """Returns how many layers each pipeline rank has. What the sizes of the first and of the last
    stage leave is divided among the others, as Megatron does. The layout has to be sound.
    """
    sizes = [size for size in (d.first_stage, d.last_stage) if size is not None]
    others = d.pipeline - len(sizes)
    found = [(layers - sum(sizes)) // max(others, 1)] * others
    first = [] if d.first_stage is None else [d.first_stage]
    last = [] if d.last_stage is None else [d.last_stage]
    return first + found + last


def _pipeline_problems(layers: int, d: Degrees) -> list[str]:
    given = {OPTIONS[name]: getattr(d, name) for name in ("first_stage", "last_stage")}
    sizes = {name: size for name, size in given.items() if size is not None}
    if d.pipeline == 1:
        alone = sizes | ({"virtual_pipeline": d.virtual} if d.virtual > 1 else {})
        return [
            f"{name}={size}: wants pipeline_parallel > 1; leave it out"
            for name, size in alone.items()
        ]
    left, others = layers - sum(sizes.values()), d.pipeline - len(sizes)
    if not sizes and left % others:
        (problem,) = _must_divide("pipeline_parallel", d.pipeline, {"layers": layers})
        return [problem + _unequal_stages(layers, d)]
    if left < others or left % max(others, 1) or (left and not others):
        named = ", ".join(f"{name}={size}" for name, size in sizes.items())
        return [
            f"pipeline_parallel={d.pipeline}, {named}: {left} of {layers} layers are left for "
            f"{others} other stages, which are to have as many each{_unequal_stages(layers, d)}"
        ]
    stages = stage_layers(layers, d)
    names = [f"layers of pipeline rank {stages.index(size)}" for size in stages]
    if len(set(stages)) == 1:
        names = [f"layers of each of {d.pipeline} pipeline ranks"]
    return _must_divide("virtual_pipeline", d.virtual, dict(zip(names, stages, strict=False)))


def _unequal_stages(layers: int, d: Degrees) -> str:
    """Returns how the layers may be cut in as many stages, as the end of an error's text."""
    units, rest = divmod(layers, d.virtual)
    if rest or units < d.pipeline:
        return ""
    each = ceil(units / d.pipeline)
    if units - each * (d.pipeline - 2) < 2:
        each -= 1
    ends = units - each * (d.pipeline - 2)
    first, last = ceil(ends / 2) * d.virtual, ends // 2 * d.virtual
    return f"; or {OPTIONS['first_stage']}={first}, {OPTIONS['last_stage']}={last}"


def _expert_problems(hf_config: PreTrainedConfig, d: Degrees) -> list[str]:
    if not FAMILIES[hf_config.model_type].experts:
        if d.expert == d.expert_tensor == 1:
            return []
        return [
            f"expert_parallel={d.expert}, expert_tensor_parallel={d.expert_tensor}: "
            f"{hf_config.model_type} has no experts; use 1"
        ]
    problems = _must_divide("expert_parallel", d.expert, {"experts": num_experts(hf_config)})
    width = {"is the width of an expert": expert_width(hf_config)}
    problems += _must_divide("expert_tensor_parallel", d.expert_tensor, width)
    if d.tensor > 1 and not d.sequence:
        problems.append(f"tensor_parallel={d.tensor} with experts: wants sequence_parallel=True")
    return problems


def _tensor_sizes(hf_config: PreTrainedConfig) -> dict[str, int]:
    """Returns the sizes that tensor parallelism cuts; the vocabulary is padded instead."""
    family = FAMILIES[hf_config.model_type]
    cut = {"heads": hf_config.num_attention_heads}
    if not family.experts or any(not sparse for sparse in moe_layers(hf_config)):
        cut["intermediate size"] = hf_config.intermediate_size
    if shared_expert_width(hf_config):
        cut["intermediate size of the shared experts"] = shared_expert_width(hf_config)
    if family.latent:
        cut["kv_lora_rank + qk_rope_head_dim"] = hf_config.kv_lora_rank + hf_config.qk_rope_head_dim
        if hf_config.q_lora_rank is not None:
            cut["q_lora_rank"] = hf_config.q_lora_rank
    return cut


def _must_divide(name: str, degree: int, sizes: dict[str, int]) -> list[str]:
    wrong = [
        f"{size} {what}, and {size} % {degree} = {size % degree}"
        for what, size in sizes.items()
        if size % degree
    ]
    if not wrong:
        return []
    return [f"{name}={degree}: {'; '.join(wrong)}; it may be {divisors(gcd(*sizes.values()))}"]


def _world_problems(d: Degrees, experts: bool, world_size: int | None) -> list[str]:
    if world_size is None:
        return []
    products = {
        "tensor_parallel * pipeline_parallel * context_parallel": (d.tensor, d.pipeline, d.context)
    }
    if experts:
        names = "expert_tensor_parallel * expert_parallel * pipeline_parallel"
        products[names] = (d.expert_tensor, d.expert, d.pipeline)
    return [
        f"{names} = {' * '.join(map(str, parts))} = {prod(parts)} does not divide {world_size} "
        f"ranks; it may be {divisors(world_size)}, or have {ceil(world_size / prod(parts))} * "
        f"{prod(parts)} = {ceil(world_size / prod(parts)) * prod(parts)} ranks"
        for names, parts in products.items()
        if world_size % prod(parts)
    ]


def divisors(size: int) -> str:
    """The smallest twelve divisors of a number, as text. The number may be of any size."""
    candidates = range(1, min(size, MOST_TRIED) + 1)
    good = list(islice((n for n in candidates if size % n == 0), 13))
    more = len(good) > 12 or size > MOST_TRIED
    return ", ".join(map(str, good[:12])) + (", ..." if more else "")


def num_experts(hf_config: PreTrainedConfig) -> int:
    """Routed experts of a layer."""
    config: Any = hf_config
    return config.num_local_experts  # every family has this name, or maps it


def expert_groups(hf_config: PreTrainedConfig) -> tuple[int, int] | None:
    """Groups of experts and how many of them a token may use; None where it may use all."""
    config: Any = hf_config
    if not FAMILIES[config.model_type].latent or config.topk_group == config.n_group:
        return None
    return config.n_group, config.topk_group


def expert_width(hf_config: PreTrainedConfig) -> int:
    """Hidden size inside one routed expert."""
    config: Any = hf_config
    return getattr(config, "moe_intermediate_size", config.intermediate_size)


def shared_expert_width(hf_config: PreTrainedConfig) -> int:
    """Returns the width of all shared experts of a layer together; 0 where there are none."""
    config: Any = hf_config
    if not FAMILIES[config.model_type].latent:
        return 0
    return config.moe_intermediate_size * (config.n_shared_experts or 0)


def moe_layers(hf_config: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether its MLP is a mixture of experts."""
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


def _rope_factor(config: Any) -> float:
    inside = config.rope_parameters.get("partial_rotary_factor")
    return inside or getattr(config, "partial_rotary_factor", None) or 1.0


def rope_frequencies(hf_config: PreTrainedConfig) -> tuple[Tensor, float]:
    """(rotated dims / 2,) float32 inverse frequencies and the factor on sine and cosine."""
    config: Any = hf_config
    parameters = config.rope_parameters
    if parameters["rope_type"] == "default":
        dim = config.qk_rope_head_dim if FAMILIES[config.model_type].latent else head_dim(config)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0
    cpu = torch.device("cpu")
    with cpu:  # also where a model without memory is built
        return ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, cpu)


def padded_vocab(hf_config: PreTrainedConfig, tensor: int) -> int:
    return -(-hf_config.vocab_size // tensor) * tensor


def vocab_range(hf_config: PreTrainedConfig, tensor: int, rank: int) -> tuple[int, int]:
    """First and one past the last token id whose rows a tensor rank holds; the rest is padding."""
    rows = padded_vocab(hf_config, tensor) // tensor
    last = min((rank + 1) * rows, hf_config.vocab_size)
    return min(rank * rows, last), last
