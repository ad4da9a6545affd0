"""Knows which Hugging Face architectures Megatron can run here, and how they may be cut into parts.

Needs no megatron-core: a dry run checks a layout without it.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from itertools import islice
from math import ceil, gcd, prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spmdrl.config import ConfigError, require
from spmdrl.config.words import counted, verb
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.family_parts import ANY, COMMON_FIELDS, Settings
from spmdrl.engines.megatron.splits import Stacked
from spmdrl.engines.megatron.towers import deepstack_layers, looks_ahead

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


def check_architecture(hf_config: PreTrainedConfig) -> None:
    """Raises ConfigError where the model, or what its config asks for, has no mapping."""
    config: Any = hf_config
    kind = config.model_type
    if kind not in FAMILIES:
        raise ConfigError(
            f"engine megatron: no mapping for architecture {kind!r}; there is one for "
            f"{', '.join(sorted(FAMILIES))}. Use engine fsdp, or add a Family in "
            "spmdrl/engines/megatron/families.py (docs/extending.md)"
        )
    found = [
        *_unmapped_fields(config), *_unmapped_layers(config), *_unmapped_rotary(config)
    ]  # fmt: skip
    found += [what for what, wanted in FAMILIES[kind].refused(config).items() if wanted]
    if has_experts(config) and config.num_experts_per_tok == 1:
        found.append("one expert per token")
    if found:
        raise ConfigError(
            f"engine megatron: {kind} with {'; '.join(found)} is not mapped. Use engine fsdp"
        )


def _unmapped_fields(config: Any) -> list[str]:
    """Returns the fields of the config whose values the family does not map. transformers reads
    only fields that the config's class declares: others in config.json have no effect.
    """
    known, found = FAMILIES[config.model_type].fields, []
    inherited = {field.name for field in fields(PreTrainedConfig)} | COMMON_FIELDS
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in inherited or value in known.get(field.name, (field.default,)):
            continue
        if field.name not in known:
            found.append(f"{field.name}={value!r}")
        elif known[field.name] != ANY:
            only = " or ".join(map(repr, known[field.name]))
            found.append(f"{field.name}={value!r} (only {only})")
    return found


def _unmapped_rotary(config: Any) -> list[str]:
    found, family = [], FAMILIES[config.model_type]
    for rope in rope_kinds(config).values():
        if rope["rope_type"] not in STATIC_ROPE:
            return [f"rope type {rope['rope_type']!r} (only {', '.join(STATIC_ROPE)})"]
    one = len(rope_kinds(config)) == 1
    factor, scaling = rope_factor(config), rope_frequencies(config)[1]
    if factor != 1.0 and not family.partial_rotary:
        found.append("a rotary embedding of part of the head")
    if scaling != 1.0 and (family.latent or factor != 1.0 or not one):
        # elsewhere the factor on sine and cosine is one on the scores, for all layers
        latent = "yarn whose mscale is not mscale_all_dim"
        found.append(latent if family.latent else f"sine and cosine times {scaling:.3g}")
    return found


def _unmapped_layers(config: Any) -> list[str]:
    known = {"full_attention", "sliding_attention"}
    if FAMILIES[config.model_type].delta_nets:
        known = {"full_attention", "linear_attention"}
    read = "layer_types" in FAMILIES[config.model_type].fields
    wanted = {*config.layer_types} if read else set()
    return [f"layers of {kind}" for kind in sorted(wanted - known)]


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
        *_delta_net_problems(hf_config, degrees),
        *_image_problems(hf_config, degrees),
        *_pipeline_problems(hf_config.num_hidden_layers, degrees),
        *_expert_problems(hf_config, degrees),
        *_world_problems(degrees, has_experts(hf_config), world_size),
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
    family = FAMILIES[hf_config.model_type]
    if family.joint_qk_norms and groups % d.tensor:
        problems.append(
            f"tensor_parallel={d.tensor}: {groups} key-value heads, which have one norm together "
            f"and are not cut among ranks that share one; it may be {divisors(gcd(heads, groups))}"
        )
    elif not family.latent and heads % d.tensor == 0 and groups % d.tensor and d.tensor % groups:
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


def _delta_net_problems(hf_config: PreTrainedConfig, d: Degrees) -> list[str]:
    if not FAMILIES[hf_config.model_type].delta_nets:
        return []
    problems = []
    if hf_config.num_key_value_heads % d.tensor:
        problems.append(
            f"tensor_parallel={d.tensor}: {hf_config.num_key_value_heads} key-value heads, and "
            "megatron-core does not cut the gates of attention among ranks that share one; it may "
            f"be {divisors(hf_config.num_key_value_heads)}"
        )
    if d.context > 1:
        problems.append(
            f"context_parallel={d.context}: a gated delta net has a state that goes from token to "
            "token, and megatron-core has no form of it for tokens on several ranks; use 1"
        )
    return problems


def _image_problems(hf_config: PreTrainedConfig, d: Degrees) -> list[str]:
    problems = []
    if d.context > 1 and looks_ahead(hf_config):
        problems.append(
            f"context_parallel={d.context}: an image's tokens see each other, also those behind "
            "them, and attention over the tokens of several ranks is causal; use 1"
        )
    count, layers = deepstack_layers(hf_config), hf_config.num_hidden_layers
    split = not _pipeline_problems(layers, d)
    first = stage_layers(layers, d)[0] // d.virtual if split else count
    if first < count:
        problems.append(
            f"the first {count} layers are given vectors of the tower, and the pipeline's first "
            f"stage, where the tower is, has {first}; use fewer stages, or "
            f"{OPTIONS['first_stage']}={count * d.virtual}"
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
            f"pipeline_parallel={d.pipeline}, {named}: {left} of {layers} layers "
            f"{verb(left, 'are')} left for {counted(others, 'other stage')}, which "
            f"{verb(others, 'are')} to have as many each{_unequal_stages(layers, d)}"
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
    if not has_experts(hf_config):
        if d.expert == d.expert_tensor == 1:
            return []
        return [
            f"expert_parallel={d.expert}, expert_tensor_parallel={d.expert_tensor}: "
            f"{hf_config.model_type} has no experts; use 1"
        ]
    problems = _must_divide("expert_parallel", d.expert, {"experts": num_experts(hf_config)})
    width = {"is the width of an expert": expert_width(hf_config)}
    problems += _must_divide("expert_tensor_parallel", d.expert_tensor, width)
    stacked = any(isinstance(s, Stacked) for s in FAMILIES[hf_config.model_type].names.values())
    if stacked and d.expert_tensor > 1:
        problems.append(
            f"expert_tensor_parallel={d.expert_tensor}: the experts of {hf_config.model_type} have "
            "rows of gate and up in turn, which are not cut; use expert_tensor_parallel=1 and "
            "expert_parallel"
        )
    if d.tensor > 1 and not d.sequence:
        problems.append(f"tensor_parallel={d.tensor} with experts: wants sequence_parallel=True")
    return problems


def _tensor_sizes(hf_config: PreTrainedConfig) -> dict[str, int]:
    """Returns the sizes that tensor parallelism cuts; the vocabulary is padded instead."""
    family = FAMILIES[hf_config.model_type]
    cut = {"heads": hf_config.num_attention_heads}
    if not has_experts(hf_config) or any(not sparse for sparse in moe_layers(hf_config)):
        cut["intermediate size"] = hf_config.intermediate_size
    if shared_expert_width(hf_config):
        cut["intermediate size of the shared experts"] = shared_expert_width(hf_config)
    if family.delta_nets:
        cut["key heads of gated delta nets"] = hf_config.linear_num_key_heads
        cut["value heads of gated delta nets"] = hf_config.linear_num_value_heads
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


def settings_of(hf_config: PreTrainedConfig) -> Settings:
    """Returns what the family sets in Megatron's TransformerConfig."""
    config: Any = hf_config
    return FAMILIES[config.model_type].settings(config)


def has_experts(hf_config: PreTrainedConfig) -> bool:
    return "num_moe_experts" in settings_of(hf_config)


def num_experts(hf_config: PreTrainedConfig) -> int:
    """Routed experts of a layer; 0 where there are none."""
    return settings_of(hf_config).get("num_moe_experts", 0)


def expert_width(hf_config: PreTrainedConfig) -> int:
    """Hidden size inside one routed expert."""
    return settings_of(hf_config)["moe_ffn_hidden_size"]


def dense_width(hf_config: PreTrainedConfig) -> int:
    """Returns the width of an MLP without experts; of an expert where no layer has such an MLP."""
    return getattr(hf_config, "intermediate_size", None) or expert_width(hf_config)


def shared_expert_width(hf_config: PreTrainedConfig) -> int:
    """Returns the width of all shared experts of a layer together; 0 where there are none."""
    return settings_of(hf_config).get("moe_shared_expert_intermediate_size") or 0


def moe_layers(hf_config: PreTrainedConfig) -> list[bool]:
    """Returns for each layer whether its MLP is a mixture of experts."""
    config: Any = hf_config
    none = [0] * config.num_hidden_layers
    return [bool(has) for has in settings_of(config).get("moe_layer_freq", none)]


def head_dim(hf_config: PreTrainedConfig) -> int:
    config: Any = hf_config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def layer_types(hf_config: PreTrainedConfig) -> list[str]:
    """Returns for each layer whether its attention sees a window ("sliding_attention") or all
    tokens before ("full_attention"), or is a gated delta net ("linear_attention").
    """
    config: Any = hf_config
    if FAMILIES[config.model_type].delta_nets:
        return list(config.layer_types)
    known = FAMILIES[config.model_type].fields
    if "sliding_window" not in known or not config.sliding_window:
        return ["full_attention"] * config.num_hidden_layers
    every = ["sliding_attention"] * config.num_hidden_layers
    return list(config.layer_types) if "layer_types" in known else every


def softcap(hf_config: PreTrainedConfig, field: str) -> float | None:
    """Returns what scores or logits are soft-capped at. field: attn_logit_softcapping or
    final_logit_softcapping.
    """
    config: Any = hf_config
    known = field in FAMILIES[config.model_type].fields
    return getattr(config, field) if known else None


def check_scores(hf_config: PreTrainedConfig, context: int, dtype: torch.dtype) -> None:
    """Raises ConfigError where soft-capped scores cannot be had on the device that is here."""
    capped = softcap(hf_config, "attn_logit_softcapping") is not None
    if not capped or not torch.cuda.is_available() or dtype == torch.float32:
        return
    require(
        importlib.util.find_spec("flash_attn") is not None,
        f"engine megatron: {hf_config.model_type} has soft-capped scores, which on a GPU are "
        "flash-attn's: pip install flash-attn, or use dtype='float32'",
    )
    require(
        context == 1,
        f"engine megatron: context_parallel={context} with soft-capped scores, which flash-attn "
        "computes here for whole sequences only: use context_parallel=1, or dtype='float32'",
    )


# ---- rotary embeddings


def rope_kinds(hf_config: PreTrainedConfig) -> dict[str | None, dict[str, Any]]:
    """Returns the rotary parameters, by type of layer where they differ, else under None."""
    config: Any = hf_config
    rope = config.rope_parameters
    kinds = ("full_attention", "sliding_attention")
    return {kind: rope[kind] for kind in kinds} if kinds[0] in rope else {None: rope}


def rope_factor(hf_config: PreTrainedConfig) -> float:
    """Returns the part of a head that is rotated."""
    config: Any = hf_config
    inside = next(iter(rope_kinds(config).values())).get("partial_rotary_factor")
    return inside or getattr(config, "partial_rotary_factor", None) or 1.0


def rope_frequencies(hf_config: PreTrainedConfig) -> tuple[Tensor, float]:
    """Returns (rotated dims / 2,) float32 inverse frequencies and the factor on sine and cosine;
    of the kinds of `rope_kinds` end to end, and the largest factor.
    """
    found = [_frequencies(hf_config, kind, rope) for kind, rope in rope_kinds(hf_config).items()]
    return torch.cat([frequencies for frequencies, _ in found]), max(factor for _, factor in found)


def _frequencies(
    hf_config: PreTrainedConfig, kind: str | None, rope: dict[str, Any]
) -> tuple[Tensor, float]:
    config: Any = hf_config
    if rope["rope_type"] == "default":
        size = config.qk_rope_head_dim if FAMILIES[config.model_type].latent else head_dim(config)
        dim = int(size * rope_factor(config))
        exponents = torch.arange(0, dim, 2, dtype=torch.int64, device="cpu").float() / dim
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    cpu = torch.device("cpu")
    with cpu:  # also where a model without memory is built
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, cpu, layer_type=kind)


def padded_vocab(hf_config: PreTrainedConfig, tensor: int) -> int:
    return -(-hf_config.vocab_size // tensor) * tensor


def vocab_range(hf_config: PreTrainedConfig, tensor: int, rank: int) -> tuple[int, int]:
    """First and one past the last token id whose rows a tensor rank holds; the rest is padding."""
    rows = padded_vocab(hf_config, tensor) // tensor
    last = min((rank + 1) * rows, hf_config.vocab_size)
    return min(rank * rows, last), last
