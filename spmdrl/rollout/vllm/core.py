"""vLLM's EngineCore for one rank of its tensor-parallel group, and what it does to the process."""

from __future__ import annotations

import copy
import difflib
import gc
import os
import secrets
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from spmdrl.config import (
    CPU_KV_CACHE_MIB,
    VLLM_ENGINE_ARGS,
    ConfigError,
    LoraConfig,
    RolloutConfig,
    is_eager,
    require,
)
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.accelerator import require_compiler
from spmdrl.distributed.env import without_garbage_collection
from spmdrl.hub.hf_folder import has_tower, language_config, load_hf_config, whole_config
from spmdrl.hub.quantized_weights import is_mxfp4, quantization_of
from spmdrl.hub.remote_code import has_foreign_code
from spmdrl.hub.transformers_compat import kept_config_classes, model_class
from spmdrl.rollout.process_state import frozen_as_before
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm import fp8 as vllm_fp8
from spmdrl.rollout.vllm import images as vllm_vision
from spmdrl.rollout.vllm import lora as vllm_lora
from spmdrl.rollout.vllm.derived_weights import CPU_BACKEND, is_latent
from spmdrl.rollout.vllm.speculative import speculative_config

LEAST_TEMPERATURE = 0.01  # vLLM raises what is above 0 and below this
# of the model's config, for vLLM: its logits are float32, and not rounded to the engine's dtype
FLOAT32_HEAD = {"head_dtype": "float32"}


def check_engine_args(config: RolloutConfig, strict: bool) -> None:
    """Raises ConfigError for one that is not for the user to set, or would have no effect."""
    if not config.engine_args:
        return
    given = f"rollout.engine_args={dict(config.engine_args)}"
    if strict:
        raise ConfigError(f"{given}: strict sets vLLM up by itself; leave them out")
    for name in config.engine_args:
        if name not in VLLM_ENGINE_ARGS:
            near = difflib.get_close_matches(name, VLLM_ENGINE_ARGS, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else "may be set: " + ", ".join(VLLM_ENGINE_ARGS)
            )
            raise ConfigError(f"rollout.engine_args has {name!r}; {hint}")


def import_vllm() -> None:
    """Raises ConfigError where vLLM is installed and cannot be imported."""
    if compat.has_engine():
        return
    gc.collect()  # what is garbage now would be kept with the imported objects
    try:
        with without_garbage_collection():
            compat.import_engine()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # of a library it loads
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"rollout.engine='vllm', but vLLM cannot be imported: {type(error).__name__}: {error} "
            f"({where.filename}:{where.lineno}). Install it as docs/install.md says, or use "
            "rollout.engine='hf'"
        ) from error


def build_core(
    model: str,
    config: RolloutConfig,
    max_model_len: int,
    group: dist.ProcessGroup,
    device: torch.device,
    strict: bool = False,
    lora: LoraConfig | None = None,
    looks: ImageLimits | None = None,
    load_weights: bool = True,
    return_routed_experts: bool = False,
    frozen: bool = False,
) -> Any:
    """vLLM's engine for this rank of its tensor-parallel group. frozen: it sleeps without vLLM's
    allocator, whose sleep is that of all engines of the process. Collective over the group.
    """
    on_cpu = device.type == "cpu"
    eager = is_eager(config, not on_cpu, strict)
    if on_cpu and not eager:
        require_compiler("rollout.enforce_eager=False", "leave it out")
    compat.begin_engine()
    hf = load_hf_config(model)
    # of a model with a tower the language model alone is pushed, but all of it is read from disk
    by_itself = has_tower(model) and not load_weights
    name = model_class(AutoModelForCausalLM, type(hf)).__name__ if by_itself else None
    args = engine_args(model, hf, config, max_model_len, on_cpu, eager, by_itself, load_weights,
                       lora, looks, return_routed_experts and not on_cpu, frozen,
                       strict)  # fmt: skip
    if config.quantization == "fp8" and not on_cpu:
        disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
        os.environ["VLLM_DISABLED_KERNELS"] = ",".join([*disabled, *vllm_fp8.REARRANGING])
    if strict and not on_cpu:  # the other runner's sampler is no object of ours to change
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    with vllm_vision.sizes_of(looks, max_model_len) if looks is not None else nullcontext():
        vllm_vision.import_without_torchvision()
        register_architecture(model, name)
        executor, first_gpu = executor_of(group, device)
        if not on_cpu:
            keep_compiled_code_apart(first_gpu)
        try:
            with frozen_as_before():
                return started(args, executor, return_routed_experts, on_cpu)
        except (ValueError, TypeError) as error:
            fields = {"engine_args": config.engine_args, "speculative": config.speculative}
            given = [f"rollout.{name}={dict(value)}" for name, value in fields.items() if value]
            given += ["rollout.keep_sampling_mask=True"] * config.keep_sampling_mask
            if not given or isinstance(error, ConfigError):
                raise
            raise ConfigError(f"vLLM does not start with {' and '.join(given)}: {error}") from error


def engine_args(
    model: str, hf: Any, config: RolloutConfig, max_model_len: int, on_cpu: bool, eager: bool,
    by_itself: bool, load_weights: bool, lora: LoraConfig | None, looks: ImageLimits | None,
    return_routed_experts: bool, frozen: bool, strict: bool,
) -> Any:  # fmt: skip
    """Returns vLLM's EngineArgs. by_itself: the language model of files with a tower."""
    from vllm import EngineArgs

    in_floats = is_mxfp4(hf) and not load_weights  # as a push has them; from disk in MXFP4
    has_plain_head = not quantization_of(hf) or in_floats
    asks_head = has_plain_head and has_float32_logits(config, on_cpu, strict)
    head: dict[str, Any] = dict(FLOAT32_HEAD) if asks_head else {}
    overrides: Any = partial(config_of_engine, head) if by_itself or in_floats else head
    if overrides and overrides is head and hasattr(whole_config(model), "text_config"):
        head["text_config"] = dict(head)  # with it vLLM builds most language models beside a tower
    by_push = not load_weights and config.quantization != "fp8"
    blank = {"load_format": compat.blank_format()} if by_push else {}
    # None: vLLM measures what gpu_memory_utilization leaves beside weights and activations
    mib = config.kv_cache_mib or (CPU_KV_CACHE_MIB if on_cpu else None)
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        # whoever was not to run code of the model's folder has been refused it before
        trust_remote_code=has_foreign_code(hf),
        dtype=config.dtype,
        seed=0,
        tensor_parallel_size=config.tensor_parallel,
        enable_expert_parallel=config.expert_parallel,
        distributed_executor_backend="external_launcher",
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=eager,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=mib << 20 if mib else None,
        enable_sleep_mode=config.sleep and not on_cpu and not frozen,
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        use_tqdm_on_load=False,
        moe_backend=moe_backend(hf, on_cpu, in_floats),
        hf_overrides=vllm_fp8.OVERRIDES | head if config.quantization == "fp8" else overrides,
        enable_return_routed_experts=return_routed_experts,
        # which vLLM refuses on CPUs: cpu.AddressedNoise does it there
        return_sampling_mask=config.keep_sampling_mask and not on_cpu,
        speculative_config=speculative_config(config),
        **(cpu_args(hf.get_text_config()) if on_cpu else {}) | dict(config.engine_args) | blank,
        **(vllm_fp8.ENGINE_ARGS if config.quantization == "fp8" else {}),
        **(vllm_lora.engine_args(lora, model) if lora is not None else {}),
        **(vllm_vision.engine_args(looks) if looks is not None else {}),
    )


def has_float32_logits(config: RolloutConfig, on_cpu: bool, strict: bool) -> bool:
    """Says whether vLLM is asked not to round its logits to the engine's dtype.

    The trainer's LM head on GPUs does not, and a logit of 20 in bfloat16 is off by up to 0.06: so
    would be every log-probability of the samples. On a GPU the product is summed in float32 anyway.
    On a CPU vLLM would copy the head's weight for every token, and the trainer's head rounds, too.
    With strict both sides have one product of their own.
    """
    return not (on_cpu or strict or config.dtype == "float32")


def started(args: Any, executor: type, return_routed_experts: bool, on_cpu: bool) -> Any:
    """Returns the engine that the EngineArgs describe. Raises what vLLM raises, and ConfigError."""
    with kept_config_classes():
        vllm_config = compat.engine_config(args, on_cpu)
    require(
        not return_routed_experts or vllm_config.cache_config.enable_prefix_caching,
        f"actor.router_replay: vLLM has no prefix cache for {args.model}, by whose blocks it keeps "
        "the experts of its tokens; use rollout.engine='hf'",
    )
    if return_routed_experts and on_cpu:  # which vLLM refuses there
        vllm_config.aux_output_config.enable_return_routed_experts = True
    with compat.kept_transformers_classes(), compat.every_rank_returns_experts():
        core = compat.engine_core(vllm_config, executor)
    if return_routed_experts and on_cpu:
        compat.return_experts(core)
    return core


def cpu_args(text: Any) -> dict[str, Any]:
    """Returns arguments of vLLM on CPUs. text: the language model's config.

    Its own block of 128 tokens is more than many a prompt has, and only whole blocks are shared. Of
    its backends of latent attention one alone keeps the weight that pushes write to.
    """
    latent = {"attention_backend": CPU_BACKEND} if is_latent(text) else {}
    return {"block_size": 32} | latent


def num_experts(text: Any) -> int:
    """Returns how many routed experts a layer has; 0 where there are none. Of layers that have
    different numbers it is the largest.
    """
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    found = [getattr(text, name, None) or 0 for name in names]
    return max(max(n) if isinstance(n, list | tuple) else n for n in found)


def check_expert_parallel(hf: Any, config: RolloutConfig) -> None:
    """Raises ConfigError where the engine's ranks cannot have whole experts each. hf: the model's
    config.
    """
    if not config.expert_parallel:
        return
    tp, experts = config.tensor_parallel, num_experts(hf.get_text_config())
    if experts == 0:
        raise ConfigError(
            f"rollout.expert_parallel=True: model type {hf.model_type!r} has no routed experts; "
            "leave it out"
        )
    if tp == 1:
        raise ConfigError(
            "rollout.expert_parallel=True with rollout.tensor_parallel=1 has no effect: the ranks "
            "of an engine are those of tensor_parallel, and engines answer their own requests at "
            "their own pace, so that experts cannot be shared between them. Set tensor_parallel"
        )
    if experts % tp:
        raise ConfigError(
            f"rollout.expert_parallel=True: rollout.tensor_parallel={tp} does not divide the "
            f"{experts} experts of a layer"
        )
    if config.quantization is not None or (quantization_of(hf) and not is_mxfp4(hf)):
        raise ConfigError(
            "rollout.expert_parallel=True was not tried with quantised weights: leave it out, or "
            "use weights and rollout.quantization that are not"
        )


def moe_backend(hf: Any, on_cpu: bool, in_floats: bool) -> Any:
    """Chooses, on a GPU, Triton's kernel for experts that are not quantised: the others keep the
    weights in an order of their own (FlashInfer swaps gate and up), which an update in place would
    miss.

    in_floats: whatever the files have, the engine's weights are no quantised ones.
    Raises ConfigError for experts in MXFP4 on CPUs, for which vLLM has no kernels.
    """
    require(
        not on_cpu or in_floats or not is_mxfp4(hf),
        "rollout.engine='vllm' has no kernels for MXFP4 experts on CPUs; use rollout.engine='hf'",
    )
    quantized = bool(quantization_of(hf)) and not in_floats
    has_experts = num_experts(hf.get_text_config()) > 0
    return "triton" if has_experts and not quantized and not on_cpu else "auto"


def executor_of(group: dist.ProcessGroup, device: torch.device) -> tuple[type, int]:
    """Returns vLLM's executor for ranks that a launcher started, told its rank instead of reading
    RANK; and the GPU of the group's first rank. Collective over the group.

    The name of the rendezvous, which vLLM never opens since torch.distributed is up, also names
    shared memory on a CPU: random, so that two engines on one host, be they of one job or of two,
    do not write into each other's.
    """
    gpu = device.index or 0
    told = [(secrets.token_hex(8), gpu)]
    dist.broadcast_object_list(told, group=group, group_src=0)
    name, first_gpu = told[0]
    return compat.rank_executor(f"spmdrl:{name}", dist.get_rank(group), gpu), first_gpu


def keep_compiled_code_apart(first_gpu: int) -> None:
    """Gives the engines of each GPU a folder of their own for vLLM's compiled code, until the
    environment is put back. vLLM files it by the rank within an engine, and the code has the number
    of its GPU in it: an engine that found another's would die at its first pass
    (vllm-project/vllm#53312). first_gpu: of the engine's first rank.
    """
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(compat.cache_root(), f"gpu_{first_gpu}")


def config_of_engine(head: Mapping[str, str], whole: Any) -> Any:
    """Gives vLLM the config of the language model alone with the name of its class, and leaves out
    that weights are in MXFP4 on disk: those that are pushed are not. vLLM asks first with an empty
    config, which is returned as it is. head: FLOAT32_HEAD or nothing.
    """
    text: Any = language_config(whole)
    if text is not whole:
        text.architectures = [model_class(AutoModelForCausalLM, type(text)).__name__]
    if is_mxfp4(text):
        text = copy.deepcopy(text)
        del text.quantization_config
    text.update(head)
    return text


def register_architecture(model: str, name: str | None) -> None:
    """Imports the model's class here; vLLM would inspect it in a process of its own (7-18 s).

    name: of the class; None: those that the model's config.json names.
    """
    own = whole_config(model).architectures or []
    for architecture in own if name is None else [name]:
        compat.load_architecture(architecture)
