"""Configs of how samples are made: engine, turns, agents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CPU_KV_CACHE_MIB = 512
# of vLLM's EngineArgs: what decides how fast an engine is and how much memory it has, and neither
# what it computes nor how its weights lie
VLLM_ENGINE_ARGS = (
    "async_scheduling", "attention_backend", "attention_config", "block_size",
    "compilation_config", "cudagraph_capture_sizes", "disable_cascade_attn",
    "disable_custom_all_reduce", "enable_chunked_prefill", "enable_flashinfer_autotune",
    "enable_prefix_caching", "kv_cache_dtype", "long_prefill_token_threshold",
    "max_cudagraph_capture_size", "max_num_batched_tokens", "max_num_scheduled_tokens",
    "num_gpu_blocks_override", "optimization_level", "performance_mode",
    "sleep_mode_offload_cudagraph",
)  # fmt: skip


@dataclass(frozen=True)
class RolloutConfig:
    """The engine that samples, and how it samples while training."""

    engine: Literal["vllm", "hf", "sglang"] = "vllm"
    n: int = 8  # samples per prompt
    temperature: float = 1.0
    # below 1, like top_k, min_p, min_tokens and repetition_penalty, samples from another policy:
    # needs algo.correction or keep_sampling_mask
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # tokens less likely than this times the likeliest are not drawn; 0: off
    # logits of tokens that prompt or answer have are divided by this where they are above 0, else
    # multiplied; 1: off
    repetition_penalty: float = 1.0
    # record which tokens top_k, top_p, min_p and min_tokens left when each token was drawn;
    # log-probabilities and entropy of all policies are then of these tokens alone. Needs top_k.
    # docs/correction.md
    keep_sampling_mask: bool = False
    min_tokens: int = 0
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    tensor_parallel: int = 1
    # vLLM's: each tensor-parallel rank has whole experts of a layer, not a part of every expert.
    # docs/experts.md
    expert_parallel: bool = False
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    quantization: Literal["fp8"] | None = None  # linear layers in e4m3, 128 x 128 blocks: vLLM
    max_num_seqs: int = 256  # sequences decoded at once, per engine
    # vLLM's and SGLang's: compile nothing, capture no CUDA graphs. auto: True on CPUs, where False
    # makes vLLM compile: some 20 s, then 0.7 of the time of a token; docs/placement.md
    enforce_eager: bool | Literal["auto"] = "auto"
    gpu_memory_utilization: float = 0.5  # vLLM's, on a GPU
    # vLLM's, per rank. None: on a CPU CPU_KV_CACHE_MIB, on a GPU what gpu_memory_utilization leaves
    kv_cache_mib: int | None = None
    # further ones of vLLM's EngineArgs, by name: {"max_num_batched_tokens": 16384}; any of
    # VLLM_ENGINE_ARGS
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    # vLLM's speculative decoding: {"method": "ngram", "num_speculative_tokens": 4}, or by a draft
    # model: {"model": "runs/small", "num_speculative_tokens": 4}. docs/speculative.md
    speculative: Mapping[str, Any] = field(default_factory=dict)
    sleep: bool = True  # give the engine's memory back while training, where ranks do both
    # engine e takes a fixed share, whatever its speed: for GPU and hf runs that are to repeat bit
    # for bit
    static_split: bool = False
    # ask so many times the prompts, stop when prompts_per_step are complete, and go on with the
    # rest in the next step; above 1 needs algo.correction
    oversample: float = 1.0
    greedy_baseline: bool = False  # ask each prompt once more, greedily: the baseline of remax


def is_eager(rollout: RolloutConfig, on_gpu: bool, strict: bool = False) -> bool:
    """Returns what enforce_eager means where the engine runs. strict: of the run."""
    return strict or (not on_gpu if rollout.enforce_eager == "auto" else rollout.enforce_eager)


def support_width(rollout: RolloutConfig) -> int:
    """Returns for how many token ids a token's support has room, 0 where none is recorded. More
    than top_k are left where logits are equal, as many are in bfloat16.
    """
    return 2 * rollout.top_k if rollout.keep_sampling_mask else 0


@dataclass(frozen=True)
class MultiTurnConfig:
    """Turns of a sample, where `PpoConfig.tools` or `.environment` answer. docs/multi_turn.md"""

    max_turns: int = 8  # of the policy, per sample
    max_calls: int = 16  # of tools, per turn; more are answered with an error
    parser: str = "hermes"  # vLLM's name for how the model writes a tool call
    max_reply_tokens: int = 512  # of a message; the middle of a longer one is left out
    max_images: int = 0  # that replies may show in a sample; 0: they are text. docs/vision.md
    max_image_tokens: int = 1024  # of each of these images
    workers: int = 2  # processes per engine for plain functions; async ones share another
    timeout_s: float = 30.0  # per call, from when its turn has come
    max_concurrent: int = 0  # async calls at a time, of all engines together; 0: no limit
    max_per_minute: float = 0.0  # async calls begun, of all engines together; 0: no limit


@dataclass(frozen=True)
class AgentConfig:
    """Sets how `PpoConfig.agent` runs. docs/agents.md"""

    workers: int = 2  # processes per engine for plain functions; async ones, programs share another
    timeout_s: float = 600.0  # of a trajectory, from when its turn has come
    retries: int = 0  # times that a trajectory is begun anew after its agent failed
    max_turns: int = 64  # requests that are answered in a trajectory
    max_concurrent: int = 0  # async agents and programs at a time, of all engines; 0: no limit
    max_per_minute: float = 0.0  # async agents and programs begun, of all engines; 0: no limit
    # with rollout.oversample: a trajectory that goes on from step to step is begun anew where its
    # first token is of weights older by more steps than this; None: it goes on
    max_staleness: int | None = None
    parser: str = "hermes"  # vLLM's name for how the model writes a tool call
    max_images: int = 0  # that the messages of a request may show; 0: they are text
    max_image_tokens: int = 1024  # of each of these images
    # where an agent that is a command line runs; bubblewrap: with the host's network, and its file
    # system read-only but /tmp
    runner: Literal["process", "bubblewrap", "docker", "podman", "srun"] = "process"
    runner_args: tuple[str, ...] = ()  # behind the runner's own: ("--image", ...), ("my/image",)


@dataclass(frozen=True)
class ServeConfig:
    """The HTTP endpoint that each rollout engine has for `PpoConfig.agent`. docs/agents.md"""

    host: str = "127.0.0.1"  # the address that it listens at; others are open to the network
    port: int = 0  # of engine 0; engine e listens at port + e. 0: any that is free
    max_body_mib: float = 16.0  # of a request
    max_requests: int = 4096  # that an endpoint answers at a time; more get status 429
