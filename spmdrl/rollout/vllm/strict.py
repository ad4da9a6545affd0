"""A vLLM engine whose logprobs are bit for bit those of a strict trainer (engines/fsdp/strict.py).

The engine keeps its scheduler, its paged cache and its weights as they are; each layer of its model
is given the operator that the trainer has, on the same operands in the same shapes. So a weight
that vLLM holds as one (queries, keys and values) is multiplied part by part, as the trainer does.

Changes are made on the objects of one engine. Prefix caching, chunked prefill, preemption and the
number of sequences decide what is computed together, which no operator here lets one see.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from spmdrl_kernels import invariant
from torch import Tensor, nn
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.strict import ROPE_TYPES, require_none, require_sound
from spmdrl.engines.fsdp.strict_experts import mixture, product_shapes, route, rule_of
from spmdrl.hub.hf_folder import meta_model
from spmdrl.rollout.vllm import compat

LINEAR = (
    "QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear", "RowParallelLinear",
    "ReplicatedLinear",
)  # fmt: skip
ROPE = (
    "RotaryEmbedding", "LinearScalingRotaryEmbedding", "Llama3RotaryEmbedding",
    "YaRNScalingRotaryEmbedding",
)  # fmt: skip
AS_THEY_ARE = ("VocabParallelEmbedding", "ApplyRotaryEmb", "Identity", "Dropout")
ATTENTION = ("CPUAttentionBackendImpl", "FlashAttentionImpl")


def make_strict(engine: Any) -> None:
    """Changes a VllmEngine in place, once its model is built.

    Raises ConfigError where a layer has no batch-invariant form, or a form is none on this machine.
    """
    model, config = engine.model, engine.core.vllm_config
    dtype, device = config.model_config.dtype, engine.topology.device
    blocks = [m for m in model.modules() if is_mixture(m)]
    inside = {id(part) for block in blocks for part in block.modules() if part is not block}
    layers = {name: m for name, m in model.named_modules() if id(m) not in inside}
    require_none(
        [f"{name} ({type(m).__name__})" for name, m in layers.items() if not is_covered(m)],
        "vLLM's model",
    )
    linears = [m for m in layers.values() if is_linear(m)]
    shapes = {(size, m.weight.shape[1]) for m in linears for size in parts_of(m)}
    shapes |= product_shapes(weight for block in blocks for weight in weights_of(block))
    attentions = [m for m in layers.values() if type(m).__name__ == "Attention"]
    require_sound(shapes, {m.head_size for m in attentions}, dtype, device)
    tables = rope_tables(config.model_config.hf_config, engine.max_model_len, dtype, device)
    for module in layers.values():
        kind: Any = type(module).__name__
        if is_linear(module):
            module.quant_method.apply = linear_by_part
        elif is_mixture(module):
            rule = rule_of(config.model_config.hf_text_config)
            module.forward = partial(mixture_of_experts, module, rule)
        elif kind == "RMSNorm":
            module.forward = partial(rms_norm, module)
        elif kind == "SiluAndMul":
            module.forward = silu_and_mul
        elif kind in ROPE:
            module.forward = partial(rope, *tables)
        elif kind == "Attention":
            impl: Any = module.impl
            impl.forward = partial(paged_attention, impl)
            if engine.on_cpu:  # which would store keys in an order of its own
                impl.do_kv_cache_update = store_keys
    make_sampler_strict(engine)


def weights_of(block: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The router's (num_experts, hidden_size) and the experts' (num_experts, 2 * width,
    hidden_size), (num_experts, hidden_size, width), as vLLM loads them and pushes write them."""
    experts = block.experts.routed_experts
    return block.gate.weight, experts.w13_weight, experts.w2_weight


def mixture_of_experts(block: Any, rule: tuple[int, bool, bool], hidden_states: Tensor) -> Tensor:
    """Stands in for the forward of a block with experts. hidden_states: (num_tokens,
    hidden_size).
    """
    router, gate_up, down = weights_of(block)
    _, weights, chosen = route(hidden_states, router, *rule)
    return mixture(hidden_states, chosen, weights, gate_up, down)


# ---- which layers there are


def is_mixture(module: Any) -> bool:
    """Whether a module is a block with experts, in floats, and without shared ones."""
    if type(module).__name__ not in ("Qwen3MoeSparseMoeBlock", "MixtralMoE"):
        return False
    in_floats = type(module.experts.routed_experts.quant_method).__name__.startswith("Unquantized")
    return in_floats and getattr(module, "shared_expert", None) is None


def is_linear(module: nn.Module) -> bool:
    return type(module).__name__ in (*LINEAR, "ParallelLMHead")


def parts_of(layer: Any) -> list[int]:
    """Rows of the weights of which the trainer has one each."""
    if type(layer).__name__ == "ParallelLMHead":
        return [layer.org_vocab_size]  # vLLM's is filled up
    return list(layer.output_partition_sizes)


def is_covered(module: Any) -> bool:
    """Returns True for modules that strict mode covers; what has no parameters and is not a leaf is
    elementwise, as in engines/fsdp/strict.py.
    """
    kind = type(module).__name__
    if is_linear(module):
        return type(module.quant_method).__name__.startswith("Unquantized")
    if is_mixture(module):
        return True
    if kind == "RMSNorm":
        return module.has_weight and module.variance_size_override is None
    if kind in ROPE:
        return module.rotary_dim == module.head_size and module.is_neox_style
    if kind == "Attention":
        return is_covered_attention(module.impl)
    if kind == "LogitsProcessor":
        return module.scale == 1.0
    if kind in (*AS_THEY_ARE, "SiluAndMul"):
        return True
    has_own = any(True for _ in module.parameters(recurse=False))
    return any(True for _ in module.children()) and not has_own


def is_covered_attention(impl: Any) -> bool:
    return (
        type(impl).__name__ in ATTENTION
        and getattr(impl, "attn_type", "decoder") == "decoder"
        and impl.kv_cache_dtype == "auto"
        and impl.alibi_slopes is None
        and not impl.logits_soft_cap
        and impl.sinks is None
        and impl.kv_sharing_target_layer_name is None
    )


# ---- layers


def linear_by_part(layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Stands in for the apply of an unquantised layer: (num_tokens, in) -> (num_tokens, out)."""
    sizes = parts_of(layer)
    weights = layer.weight[: sum(sizes)].split(sizes)
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    outs = [invariant.product(x, w, b) for w, b in zip(weights, biases, strict=True)]
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=-1)


def rms_norm(layer: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """Returns the sum of x and residual as well, where there is one."""
    if residual is None:
        return invariant.rms_norm(x, layer.weight, layer.variance_epsilon)
    x = residual + x
    return invariant.rms_norm(x, layer.weight, layer.variance_epsilon), x


def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return invariant.silu(gate) * up


def rope_tables(
    config: PreTrainedConfig, num_positions: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin, (num_positions, 1, head_dim) each, from transformers' own module.

    Raises ConfigError where angles do not depend on the position alone.
    """
    modules = meta_model(config).modules()
    found: list[Any] = [m for m in modules if type(m).__name__.endswith("RotaryEmbedding")]
    if len(found) != 1 or getattr(found[0], "rope_type", None) not in ROPE_TYPES:
        raise ConfigError(
            f"strict=True: {config.model_type} has {len(found)} kinds of position embeddings, "
            f"{[getattr(m, 'rope_type', None) for m in found]}; one of {ROPE_TYPES} is supported"
        )
    rotary = type(found[0])(config=found[0].config).to(device)
    cos, sin = rotary(torch.empty(0, dtype=dtype, device=device),
                      torch.arange(num_positions, device=device)[None])  # fmt: skip
    return cos[0, :, None], sin[0, :, None]


def rope(
    cos: Tensor, sin: Tensor, positions: Tensor, query: Tensor, key: Tensor, offsets: Any = None
) -> tuple[Tensor, Tensor]:
    """query, key: (num_tokens, heads * head_dim) -> the same, turned by their positions."""
    cos, sin = cos[positions], sin[positions]  # (num_tokens, 1, head_dim)
    return turned(query, cos, sin), turned(key, cos, sin)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    heads = x.unflatten(-1, (-1, cos.shape[-1]))
    first, second = heads.chunk(2, dim=-1)
    return (heads * cos + torch.cat([-second, first], dim=-1) * sin).reshape(x.shape)


# ---- attention


@dataclass(frozen=True)
class LengthBucket:
    """Requests of like length, whose attention is computed together."""

    rows: Tensor  # (num_seqs, most queries) int64: of the step's tokens; the last is repeated
    places: Tensor  # like rows: their positions
    own: Tensor  # like rows, bool: whether it is no repetition
    blocks: Tensor  # (num_seqs, most blocks) int64: of the cache


def paged_attention(
    impl: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
    metadata: Any, output: Tensor, output_scale: Any = None, output_block_scale: Any = None,
) -> Tensor:  # fmt: skip
    """Stands in for the forward of an attention backend.

    query, output: (num_tokens, heads, head_dim); kv_cache: (num_blocks, kv_heads, block_size, 2 *
    head_dim), keys before values, in which those of this step are already.
    """
    if metadata is None:  # a trial run, for its use of memory
        return output
    assert output_scale is None and output_block_scale is None
    window = own_window(impl)
    for bucket in buckets_of(metadata, kv_cache.shape[2]):
        found = attend(query[bucket.rows], kv_cache, bucket, impl.scale, window)
        output[bucket.rows[bucket.own]] = found[bucket.own].view(-1, *output.shape[1:])
    return output


def attend(
    query: Tensor, kv_cache: Tensor, bucket: LengthBucket, scale: float, window: int | None
) -> Tensor:
    """query: (num_seqs, num_queries, heads, head_dim) -> the same."""
    caches = kv_cache.split(query.shape[-1], dim=-1)
    if kv_cache.shape[2] == invariant.KEYS and not query.is_cuda:
        order = bucket.blocks.T
        key, value = (c.index_select(0, order.flatten()).unflatten(0, order.shape) for c in caches)
        return invariant.attend(query, key, value, bucket.places, scale, window)
    # (num_seqs, blocks, kv_heads, block_size, head_dim) -> (num_seqs, keys, kv_heads, head_dim)
    key, value = (c[bucket.blocks].transpose(2, 3).flatten(1, 2) for c in caches)
    return invariant.attention(query, key, value, bucket.places, scale, window)


def own_window(impl: Any) -> int | None:
    """Keys that a query sees, itself included. A GPU's backend keeps (how many before, after)."""
    window = impl.sliding_window
    if isinstance(window, tuple | list):
        return None if window[0] < 0 else window[0] + 1
    return None if window is None or window < 0 else window


def buckets_of(metadata: Any, block_size: int) -> list[LengthBucket]:
    """Returns the buckets of this step; found once for all layers that share its metadata."""
    if not hasattr(metadata, "strict_buckets"):
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        alike: dict[tuple[int, int], list[int]] = {}
        for i, length in enumerate(lengths):
            count = starts[i + 1] - starts[i]
            if count:
                sizes = (count - 1).bit_length(), ((length - 1) // block_size).bit_length()
                alike.setdefault(sizes, []).append(i)
        metadata.strict_buckets = [
            bucket_of(members, starts, lengths, metadata.block_table, block_size)
            for members in alike.values()
        ]
    return metadata.strict_buckets


def bucket_of(
    members: list[int], starts: list[int], lengths: list[int], table: Tensor, block_size: int
) -> LengthBucket:
    start = torch.tensor([starts[i] for i in members])[:, None]
    count = torch.tensor([starts[i + 1] - starts[i] for i in members])[:, None]
    length = torch.tensor([lengths[i] for i in members])[:, None]
    order = torch.arange(int(count.max()))[None]
    own = order < count
    order = order.minimum(count - 1)
    num_blocks = -(-int(length.max()) // block_size)
    device = table.device
    return LengthBucket(
        (start + order).to(device),
        (length - count + order).to(device),
        own.to(device),
        table[torch.tensor(members, device=device), :num_blocks].long(),
    )


def store_keys(
    layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
) -> None:
    """key, value: (num_tokens, kv_heads, head_dim) into their slots of the cache, as they are."""
    block_size = kv_cache.shape[2]
    slots = slot_mapping[: len(key)].long()
    kv_cache[slots // block_size, :, slots % block_size] = torch.cat([key, value], dim=-1)


# ---- sampling


def make_sampler_strict(engine: Any) -> None:
    sampler = engine.runner.sampler
    sampler.compute_logprobs = invariant.log_softmax  # of greedy answers
    if engine.on_cpu:
        engine.noise.log_softmax = invariant.log_softmax
    else:
        sampler.topk_topp_sampler.forward = partial(draw, sampler)


def draw(
    sampler: Any, logits: Tensor, generators: Any, top_k: Tensor | None, top_p: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Stands in for TopKTopPSampler.forward on a GPU."""
    logprobs = invariant.log_softmax(compat.mask_top_k_top_p(logits, top_k, top_p))
    return compat.draw_tokens(logprobs.exp(), generators, sampler.use_fp64_gumbel), logprobs
