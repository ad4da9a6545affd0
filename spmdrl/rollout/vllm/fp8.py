"""vLLM engines whose linear layers hold FP8: e4m3 in blocks of 128 x 128 with float32 scales.

vLLM takes the model for a checkpoint in DeepSeek's format and is given quantised weights under the
names of one: `<name>.weight` in e4m3 and `<name>.weight_scale_inv`. Embeddings, lm_head and norms
stay in the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from spmdrl_kernels.fp8 import BLOCK, DTYPE, num_blocks, quantize_blocks
from torch import Tensor, nn

from spmdrl.config import ConfigError, RolloutConfig
from spmdrl.distributed.accelerator import is_amd
from spmdrl.distributed.torch_compat import has_amx_tiles, set_parameter
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm.model_types import runs_on_cpu
from spmdrl.weights.engine_layout import Layout, ParamView

SCALE = "_scale_inv"
CPU_TILE = 32
# what EngineArgs needs; weights are loaded by us, since those on disk are not quantised
ENGINE_ARGS: dict[str, Any] = {"load_format": "dummy"}
OVERRIDES: dict[str, Any] = {
    "quantization_config": {
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
        "activation_scheme": "dynamic",
    }
}
# On a GPU these turn weights or scales into a layout of their own, which cannot be written in place
REARRANGING = (
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel",
    "DeepGemmFp8BlockScaledMMKernel",
    "B12xFp8BlockScaledMMKernel",
    "MarlinFP8ScaledMMLinearKernel",
    "HummingFP8ScaledMMLinearKernel",
)


def check_fp8(hf: Any, config: RolloutConfig) -> None:
    """hf: the text model's config. Raises ConfigError where vLLM has no block FP8 for it."""
    asked = f"rollout.quantization={config.quantization!r}"
    if config.dtype == "float32":
        raise ConfigError(f"{asked} computes in half precision: set rollout.dtype='bfloat16'")
    if is_amd():
        raise ConfigError(
            f"{asked} writes NVIDIA's e4m3 into vLLM's weights, and on AMD GPUs vLLM turns these "
            "into a format of AMD's (MI300) or rearranges them: leave it out; see docs/amd.md"
        )
    if runs_on_cpu():
        if not has_amx_tiles():
            raise ConfigError(
                f"{asked} on a CPU needs AMX tiles (Sapphire Rapids or newer), which vLLM's "
                "kernel multiplies with; this one has none: leave it out or use a GPU"
            )
        if config.dtype != "bfloat16":
            raise ConfigError(f"{asked} on a CPU computes in bfloat16: set rollout.dtype to it")
        if hf.hidden_size % CPU_TILE:
            raise ConfigError(
                f"{asked} on a CPU multiplies tiles of {CPU_TILE}, which hidden_size="
                f"{hf.hidden_size} does not divide into"
            )
    if any(getattr(hf, name, None) for name in ("num_experts", "num_local_experts",
                                                "n_routed_experts")):  # fmt: skip
        raise ConfigError(f"{asked} is for dense models: this one has experts")
    tp, heads = config.tensor_parallel, hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    kv_heads = getattr(hf, "num_key_value_heads", None) or heads
    rows = {
        "num_attention_heads x head_dim": heads * head_dim // tp,
        "num_key_value_heads x head_dim": max(1, kv_heads // tp) * head_dim,
        "intermediate_size": hf.intermediate_size // tp,
    }
    for name, size in rows.items():
        if size % BLOCK or hf.intermediate_size % tp:
            raise ConfigError(
                f"{asked} scales blocks of {BLOCK} x {BLOCK}: {name} gives each of "
                f"rollout.tensor_parallel={tp} ranks {size} rows, which {BLOCK} does not divide"
            )


def quantized(
    weights: Iterable[tuple[str, Tensor]], names: Collection[str]
) -> Iterator[tuple[str, Tensor]]:
    """The weights `names` in FP8, each followed by its scales; the others as they are."""
    for name, tensor in weights:
        if name in names:
            q, scale_inv = quantize_blocks(tensor.detach())
            yield name, q
            yield name + SCALE, scale_inv
        else:
            yield name, tensor


@contextmanager
def loadable(model: nn.Module) -> Iterator[None]:
    """Meanwhile FP8 weights and scales are parameters that vLLM's loaders can fill. On GPUs it has
    made plain ones of them, of the same memory, once the first were there."""
    kinds = {"weight": compat.loadable_weight, "weight" + SCALE: compat.loadable_scales}
    plain: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, loadable_form in kinds.items() if "weight" + SCALE in held else ():
            found = held[name]
            if not compat.is_loadable(found):
                plain.append((module, name, found))
                set_parameter(module, name, loadable_form(found))
    try:
        yield
    finally:
        for module, name, found in plain:
            set_parameter(module, name, found)


def fp8_layout(
    record: Callable[[Mapping[str, tuple[int, ...]]], Layout],
    shapes: Mapping[str, tuple[int, ...]],
) -> Layout:
    """Returns the layout of weights and of their scales. record: a layout of tensors with these
    names and shapes.

    Raises ConfigError where the engine keeps either in another form than it was given.
    """
    layout = record(shapes)
    found = {  # in the order of the weights
        name: place
        for (name, _), place in zip(layout.regions, layout.places, strict=True)
        if place.tensor().dtype == DTYPE
    }
    layout.quantized = list(found)
    scales = record({name + SCALE: num_blocks(shapes[name]) for name in found})
    lost = [name for name in (*layout.opaque, *scales.opaque) if name.endswith("weight" + SCALE)]
    if lost or not found:
        raise ConfigError(f"the engine has no FP8 weights with block scales: {lost[:3]}")
    layout.scales = [(name.removesuffix(SCALE), box) for name, box in scales.regions]
    layout.scale_places = scales.places
    for name, place in found.items():
        check_form(name, place)
    return layout


def check_form(name: str, place: ParamView) -> None:
    """Raises ConfigError where a kernel has brought weight or scales into a layout of its own."""
    module: Any = place.module
    weight, scale = getattr(module, place.name), module.weight_scale_inv
    expected = num_blocks(tuple(weight.shape))
    if tuple(scale.shape) != expected or scale.dtype != torch.float32 or not all(
        tensor.is_contiguous() for tensor in (weight, scale)
    ):  # fmt: skip
        kernel = type(getattr(module.quant_method, "fp8_linear", None)).__name__
        raise ConfigError(
            f"rollout.quantization='fp8': vLLM's {kernel} keeps {name} of shape "
            f"{tuple(weight.shape)} with scales {tuple(scale.shape)} {scale.dtype} instead of "
            f"{expected}, float32: add it to VLLM_DISABLED_KERNELS"
        )
