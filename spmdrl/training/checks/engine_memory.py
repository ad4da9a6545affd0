"""Estimates the memory of a rollout engine on a rank, awake and asleep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from spmdrl.config import CPU_KV_CACHE_MIB, PpoConfig, RolloutConfig, is_eager
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import head_size, layer_size, layer_types_of
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks.model_shape import ModelShape, shape_of

GIB = 2**30
# Of vLLM asleep on a GPU, where weights and KV cache are gone (level 2): captured CUDA graphs and
# buffers outside of its pools. Graphs took 0.53 and 1.40 GiB in public logs of vLLM
# (discuss.vllm.ai/t/1542, sgl-project/sglang#8538); sleep_mode_offload_cudagraph is not counted.
GRAPHS_GIB, BUFFERS_GIB = 1.4, 0.3
# tokens of a pass, which vLLM measures with, on CPUs, on GPUs, and on those of so many GiB; it has
# the fewer ones on an A100, whatever its memory
CPU_TOKENS, GPU_TOKENS, MOST_TOKENS, LARGE_GIB = 2048, 8192, 16384, 70


@dataclass(frozen=True)
class EngineMemory:
    """GiB of an engine on a rank."""

    weights: float
    cache: float | None  # of keys and values; None: what the GPU's share leaves
    awake: float
    asleep: float
    needed: float  # the least that it can work with: the longest sequence must fit
    asleep_on_host: float = 0.0


def engine_memory(config: PpoConfig, num_engines: int, gpu_gib: float | None) -> EngineMemory:
    """gpu_gib: of the GPU; None: a CPU."""
    rollout, shape = config.rollout, shape_of(config.model)
    weights = engine_weights(config, shape)
    longest = config.data.max_prompt_tokens + rollout.max_tokens
    tokens = cached_tokens(shape.text, longest, batched_tokens(rollout, gpu_gib))
    one = tokens * cache_bytes_per_token(shape, config) / GIB
    if not ENGINES[rollout.engine].has_kv_cache:  # grows and shrinks with the answers
        samples = config.data.prompts_per_step * rollout.n / num_engines
        cache = min(rollout.max_num_seqs, max(samples, 1)) * one
        if gpu_gib is not None:  # it grows with the answers: a run is not refused for the longest
            cache = one
        awake, asleep = weights + cache, 0.0 if gpu_gib else weights
        away = weights if gpu_gib and rollout.sleep else 0.0
        asleep = asleep if rollout.sleep else weights
        return EngineMemory(weights, cache, awake, asleep, awake, away)
    if gpu_gib is None:
        cache = (rollout.kv_cache_mib or CPU_KV_CACHE_MIB) / 1024
        awake = weights + cache
        return EngineMemory(weights, cache, awake, weights if rollout.sleep else awake, awake)
    return vllm_on_gpu(config, shape, weights, one, gpu_gib)


def vllm_on_gpu(
    config: PpoConfig, shape: ModelShape, weights: float, one: float, gpu_gib: float
) -> EngineMemory:
    """vLLM takes its share of the GPU whole, or with kv_cache_mib what its parts need.

    one: GiB of keys and values of the longest sequence.
    """
    rollout = config.rollout
    graphs = 0.0 if is_eager(rollout, on_gpu=True, strict=config.strict) else GRAPHS_GIB
    working = working_gib(config, shape, batched_tokens(rollout, gpu_gib))
    beside = weights + working + graphs + BUFFERS_GIB
    if rollout.kv_cache_mib is None:
        cache, awake = None, rollout.gpu_memory_utilization * gpu_gib
        if not ENGINES[rollout.engine].share_has_passes:
            awake += beside - weights
    else:
        cache = rollout.kv_cache_mib / 1024
        awake = beside + cache
    asleep = graphs + BUFFERS_GIB if rollout.sleep else awake
    adapter_apart = config.actor.lora is not None and config.weights.lora == "adapter"
    away = weights if adapter_apart and rollout.sleep else 0.0  # level 1
    return EngineMemory(weights, cache, awake, asleep, beside + one, away)


def engine_weights(config: PpoConfig, shape: ModelShape) -> float:
    """GiB of the weights of a tensor-parallel rank; in FP8 the layers' have a byte each."""
    width, ends = DTYPES[config.rollout.dtype].itemsize, shape.matrices * shape.matrix
    layers = 1 if config.rollout.quantization == "fp8" else width
    return ((shape.count - ends) * layers + ends * width) / config.rollout.tensor_parallel / GIB


def batched_tokens(rollout: RolloutConfig, gpu_gib: float | None) -> int:
    """Returns the most tokens of a pass of vLLM. gpu_gib: of the GPU; None: a CPU."""
    given = rollout.engine_args.get("max_num_batched_tokens")
    if given:
        return int(given)
    if gpu_gib is None:
        return CPU_TOKENS
    return MOST_TOKENS if gpu_gib >= LARGE_GIB else GPU_TOKENS


def cached_tokens(text: Any, longest: int, at_once: int) -> float:
    """Returns of how many tokens of a sequence the cache has keys and values, as the mean of the
    layers: those with a sliding window keep the window and what is computed at once; those without
    attention, nothing that grows."""
    window = (getattr(text, "sliding_window", None) or longest) + at_once
    chunk = (getattr(text, "attention_chunk_size", None) or longest) + at_once
    kept = {
        "full_attention": longest, "attention": longest, "hybrid": longest,
        "sliding_attention": min(longest, window), "chunked_attention": min(longest, chunk),
    }  # fmt: skip
    layers = layer_types_of(text) or ["full_attention"]
    return sum(kept.get(kind, 0) for kind in layers) / len(layers)


def cache_bytes_per_token(shape: ModelShape, config: PpoConfig) -> float:
    """Keys and values of all layers, of a tensor-parallel rank; a rank has at least one head."""
    text: Any = shape.text
    width, tensor = DTYPES[config.rollout.dtype].itemsize, config.rollout.tensor_parallel
    if str(config.rollout.engine_args.get("kv_cache_dtype", "")).startswith("fp8"):
        width = 1
    if getattr(text, "kv_lora_rank", None) and ENGINES[config.rollout.engine].has_kv_cache:
        numbers = text.kv_lora_rank + text.qk_rope_head_dim  # the latent ones
    elif getattr(text, "kv_lora_rank", None):
        per_head = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
        numbers = text.num_attention_heads * per_head
    else:
        heads = layer_size(text, "num_key_value_heads") or text.num_attention_heads
        size = head_size(text)
        numbers = 2 * max(heads / tensor, 1) * size
    return text.num_hidden_layers * numbers * width


def working_gib(config: PpoConfig, shape: ModelShape, tokens: int) -> float:
    """The GiB of vLLM's own passes: a layer of the fullest prefill, of so many tokens, and float32
    logits of each sequence three times (as they are, processed, as log-probabilities)."""
    rollout, text = config.rollout, shape.text
    inside = layer_size(text, "intermediate_size") or 4 * text.hidden_size
    numbers = 4 * text.hidden_size + 3 * inside / rollout.tensor_parallel
    layer = tokens * numbers * DTYPES[rollout.dtype].itemsize
    return (layer + 12 * rollout.max_num_seqs * text.vocab_size) / GIB
