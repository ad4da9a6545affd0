"""Replaces a Hugging Face model's RMSNorm, SwiGLU MLP, RoPE and attention by faster
implementations.

"spmdrl": float32 forms on CPUs (spmdrl_kernels.linear, .norm), Triton kernels on GPUs. "liger":
those of liger-kernel, on GPUs. "torch": transformers' own. Nothing is replaced by its name alone: a
module or function is tried on small random numbers, and one that computes something else than the
replacement (Gemma's GELU, interleaved or partial rotary embeddings, ...) is left as it is.

Only this model's modules change. Liger's patches reach into the modeling module, which other roles
and rollout engines share: that is put back, and the model's attention gets a forward of its own.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from spmdrl_kernels import switch
from spmdrl_kernels.linear import use_fast_linear
from spmdrl_kernels.norm import FastRmsNorm, use_fast_rms_norm
from spmdrl_kernels.switch import on_triton
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers import AttentionInterface, PreTrainedModel

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.distributed.accelerator import require_compiler
from spmdrl.distributed.torch_compat import copy_with
from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.compat import apply_liger, liger_model_types
from spmdrl.engines.fsdp.float8 import use_fp8
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.per_sequence_layers import run_per_sequence
from spmdrl.hub.hf_folder import sees_images, towers
from spmdrl.hub.tiny_config import FAILURES

BACKEND = "inductor"  # of torch.compile
ROTARY = "apply_rotary_pos_emb"  # the function's name in every modeling module that has one


def check_here(config: TrainConfig, device: torch.device) -> None:
    """Raises ConfigError for what this machine cannot do, with the remedy."""
    on_gpu = device.type == "cuda"
    if config.kernels == "liger":
        if not on_gpu:
            raise ConfigError("kernels='liger': its kernels run on GPUs; on CPUs use 'spmdrl'")
        if importlib.util.find_spec("liger_kernel") is None:
            raise ConfigError("kernels='liger': pip install liger-kernel, or use 'spmdrl'")
    if config.attention == "flash_attn":
        if not on_gpu or config.dtype == "float32":
            raise ConfigError(
                f"attention='flash_attn' on {device.type} in {config.dtype}: it runs on GPUs in "
                "bfloat16; use 'torch'"
            )
        if importlib.util.find_spec("flash_attn") is None:
            raise ConfigError("attention='flash_attn': pip install flash-attn, or use 'torch'")
    if config.activation_offload and not on_gpu:
        raise ConfigError("activation_offload: the activations are on the CPU already; turn it off")
    if config.compile:
        require_compiler("compile", "turn it off")


def use_layers(hf: Any, config: TrainConfig, device: torch.device, strict: bool) -> None:
    """Gives the model the layers that it is trained with, and freezes its tower if asked to."""
    if not strict:
        use_kernels(hf, config, device)
    if config.fp8 is not None:
        use_fp8(hf, config.fp8)
    use_attention(hf, config, device)
    run_per_sequence(hf)
    if config.freeze_vision:
        for part in towers(hf):
            part.requires_grad_(False)


def use_kernels(hf: PreTrainedModel, config: TrainConfig, device: torch.device) -> None:
    """Replaces layers in place, before the model is sharded. The model is on the CPU, in float32.

    Raises ConfigError where Liger does not know the model type.
    """
    if config.kernels == "liger":
        use_liger(hf)
    elif on_fast_cpu(config, device):
        use_fast_linear(hf)
        use_fast_rms_norm(hf)
    elif config.kernels == "spmdrl" and not config.compile and triton_runs(device):
        use_triton(hf)  # a compiled layer's are made by inductor


# ---- ours


def on_fast_cpu(config: TrainConfig, device: torch.device) -> bool:
    """Whether linear layers and norms take the forms that are fast on a CPU, in float32."""
    return config.kernels == "spmdrl" and device.type == "cpu" and config.dtype == "float32"


def triton_runs(device: torch.device) -> bool:
    return device.type == "cuda" and switch.enabled and switch.can_run(device)


def use_triton(hf: nn.Module) -> None:
    """RMSNorm, SwiGLU and rotate-half RoPE by spmdrl_kernels, wherever the model computes these."""
    offsets: dict[tuple[type, float, bool], float | None] = {}
    gated: dict[tuple[type, type], bool] = {}
    for module in list(hf.modules()):
        if type(module).__name__.endswith("RMSNorm") and norm_eps(module) is not None:
            # Gemma 4 has norms of one class with and without a weight
            weighted = getattr(module, "weight", None) is not None
            kind = (type(module), norm_eps(module) or 0.0, weighted)
            if kind not in offsets:
                offsets[kind] = norm_offset(module)
            if (offset := offsets[kind]) is not None:
                module.variance_epsilon, module.offset = kind[1], offset  # type: ignore[assignment]
                module.__class__ = FastRmsNorm
        elif is_gated_mlp(module):
            same = (type(module), type(module.act_fn))
            if same not in gated:
                gated[same] = computes_swiglu(module)
            if gated[same]:
                module.__class__ = SwiGluMlp
    rebind(hf, ROTARY, lambda own: partial(fast_rotary, own) if rotates_halves(own) else None)


def norm_eps(module: nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return found if isinstance(found, float) else None


def norm_offset(module: nn.Module) -> float | None:
    """Returns what is added to the weight (0; Gemma: 1); None where it is not RMSNorm's formula."""
    if [name for name, _ in module.named_parameters()] != ["weight"]:
        return None
    x, weight = draws((3, 8), (8,))
    probe = copy_with(module, parameters={"weight": nn.Parameter(weight)})
    try:
        got = probe(x)
    except FAILURES:  # it takes other arguments: a gate, for example
        return None
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + (norm_eps(module) or 0.0))
    fits = [offset for offset in (0.0, 1.0) if close(got, normed * (weight + offset))]
    return fits[0] if fits else None


def is_gated_mlp(module: nn.Module) -> bool:
    parts = dict(module.named_children())
    return set(parts) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and all(
        isinstance(part, nn.Linear) for name, part in parts.items() if name != "act_fn"
    )


def computes_swiglu(module: nn.Module) -> bool:
    x, gate, up, down = draws((3, 5), (7, 5), (7, 5), (5, 7))
    small_parts: dict[str, nn.Module] = {}
    for name, weight in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
        small = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        small.weight = nn.Parameter(weight)
        small_parts[name] = small
    probe = copy_with(module, children=small_parts)
    return close(probe(x), linear(silu(linear(x, gate)) * linear(x, up), down))


class SwiGluMlp(nn.Module):
    """Takes the place of a Hugging Face MLP: down(silu(gate(x)) * up(x))."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if on_triton(gate, up):
            from spmdrl_kernels.swiglu_triton import swiglu

            return self.down_proj(swiglu(gate, up))
        return self.down_proj(silu(gate) * up)


def rotates_halves(function: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Returns True if the function turns (a, b), the halves of a head, to (a cos - b sin, b cos + a
    sin).

    cos and sin then have equal halves in every model, or it would not be a rotation.
    """
    q, k, angles = draws((1, 2, 5, 8), (1, 1, 5, 8), (1, 5, 4))
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    try:
        got = function(q, k, cos, sin)
    except FAILURES:  # it takes other arguments (Gemma 4), or other shapes (gpt-oss)
        return False
    if not isinstance(got, tuple) or len(got) != 2:
        return False
    return all(close(mine, turned(x, cos, sin)) for mine, x in zip(got, (q, k), strict=True))


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (1, heads, tokens, size), cos, sin: (1, tokens, size)."""
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-b, a], -1) * sin[:, None]


def fast_rotary(
    own: Callable[..., Any], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """q, k: (1, heads, tokens, size); own: what the model had, for all that is not of this form."""
    whole = len(q) == 1 and cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
    if args or kwargs or not whole or not on_triton(q, k):
        return own(q, k, cos, sin, *args, **kwargs)
    from spmdrl_kernels.rope_triton import rope

    # squeeze and not [0], whose backward pass fills a tensor of zeros and copies into it
    c, s = (t.squeeze(0)[:, : q.shape[3] // 2] for t in (cos, sin))
    return tuple(rope(x.squeeze(0).transpose(0, 1), c, s).transpose(0, 1)[None] for x in (q, k))


def draws(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Random numbers that leave the process's generators alone."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def close(got: Any, want: Tensor) -> bool:
    return isinstance(got, Tensor) and got.shape == want.shape and torch.allclose(
        got, want, rtol=1e-5, atol=1e-5
    )  # fmt: skip


def rebind(hf: nn.Module, name: str, choose: Callable[[Any], Any]) -> None:
    """Modules of `hf` whose forward calls the global function `name` call choose(it) instead.

    Theirs is a copy of the same code with other globals; None leaves a module alone.
    """
    made: dict[type, FunctionType | None] = {}
    for module in hf.modules():
        forward = type(module).forward
        if isinstance(forward, FunctionType) and name in forward.__code__.co_names:
            if type(module) not in made:
                function = choose(forward.__globals__[name])
                made[type(module)] = function and with_globals(forward, {name: function})
            if (copied := made[type(module)]) is not None:
                module.forward = MethodType(copied, module)


def with_globals(function: FunctionType, changed: dict[str, Any]) -> FunctionType:
    names = {**function.__globals__, **changed}
    del names["__name__"]  # by which torch.compile would look names up in the module itself
    found = FunctionType(  # its code an object of its own, by which torch.compile keeps its results
        function.__code__.replace(),
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__, found.__module__ = function.__kwdefaults__, function.__module__
    return found


# ---- Liger's


def use_liger(hf: PreTrainedModel) -> None:
    """Liger's modules in this model alone; the LM head stays ours."""
    known = liger_model_types()
    if hf.config.model_type not in known:
        raise ConfigError(
            f"kernels='liger' has no model type {hf.config.model_type!r}; it has "
            f"{', '.join(sorted(known))}. Use 'spmdrl' or 'torch'"
        )
    shared: ModuleType = sys.modules[type(hf).__module__]
    before = dict(vars(shared))
    try:
        apply_liger(hf, fused_linear_cross_entropy=False, cross_entropy=False)
        patched = vars(shared).get(ROTARY)
    finally:
        vars(shared).update(before)
    if patched is not before.get(ROTARY):
        rebind(hf, ROTARY, lambda own: patched)


# ---- attention


def use_attention(hf: PreTrainedModel, config: TrainConfig, device: torch.device) -> None:
    """Has the model call packed attention with the kernel that config.attention names."""
    name = packed_attention_name(hf, config, device)
    if name != attention.NAME:  # which models are built with
        text: Any = hf.base_model.language_model if sees_images(hf.config) else hf
        text.set_attn_implementation(name)


def packed_attention_name(hf: PreTrainedModel, config: TrainConfig, device: torch.device) -> str:
    """Returns the name by which transformers knows packed attention with the kernel that
    config.attention names, and makes it known.

    auto: torch's own, which needs no package, but flash-attn's for soft-capped scores. Raises
    ConfigError where these are wanted on a GPU, and flash-attn is not there.
    """
    softcap = getattr(hf.config.get_text_config(), "attn_logit_softcapping", None)
    on_flash = device.type == "cuda" and config.dtype != "float32"
    wants = config.attention == "flash_attn" or (softcap is not None and on_flash)
    if wants and config.attention == "torch":
        raise ConfigError(
            "attention='torch' has no soft-capped scores on a GPU, which this model has: install "
            "flash-attn and use attention='auto', or dtype='float32'"
        )
    sinks = any(name.endswith(".sinks") for name, _ in hf.named_parameters())
    if wants and sinks:
        raise ConfigError(
            f"attention='flash_attn' has no attention sinks, which model type "
            f"{hf.config.model_type!r} has: use attention='auto'"
        )
    if wants and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            f"model type {hf.config.model_type!r} has soft-capped scores, which on a GPU are "
            "flash-attn's: pip install flash-attn, or use dtype='float32'"
        )
    function: Callable[..., Any] = attention.packed_attention
    if wants:
        function = partial(function, flash=flash_attn_varlen)
    if config.compile:  # what differs from micro-batch to micro-batch stays out of the graph
        function = torch.compiler.disable(function)
    # no name may have "flash" in it, which transformers takes for its own
    name = f"{attention.NAME}{'_fa' * wants}{'_outside' * config.compile}"
    if function is not attention.packed_attention:
        AttentionInterface.register(name, function)
    return name


def flash_attn_varlen(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing, scaling: float | None,
    sliding_window: int | None, softcap: float | None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The flash-attn package (version 2.6 or later); shapes are those of packed_attention."""
    from flash_attn import flash_attn_varlen_func

    if sinks is not None:
        raise ValueError("flash-attn has no attention sinks; use attention='torch'")
    q, k, v, row = attention.varlen_inputs(query, key, value, packing)
    out = flash_attn_varlen_func(
        q, k, v, row.cu_queries, row.cu_keys, row.max_queries, row.max_keys,
        softmax_scale=scaling, causal=True, softcap=softcap or 0.0,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
    )  # fmt: skip
    return out[None]


# ---- torch.compile


def compile_layers(layers: list[nn.Module]) -> None:
    """Compiles what a decoder layer computes; sharding and checkpointing stay around it.

    Token counts are dynamic from the start, so that micro-batches of other sizes need no other
    code. Layers share theirs.
    """
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True, backend=BACKEND)
