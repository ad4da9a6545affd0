"""The frozen base of adapters in 4 bits: QLoRA (Dettmers et al. 2023, arXiv 2305.14314).

bitsandbytes quantises: each weight is one of 16 values of NF4 times the largest magnitude of its
block of 64, which is itself kept in 8 bits, with a float32 scale for 256 of them (section 3, double
quantization). That is 0.516 bytes for each weight, where bfloat16 takes 2. A layer's weight is
dequantised to the role's dtype when it is multiplied, forward and backward, and not kept.

The codes are buffers, which FSDP leaves alone: each rank holds the whole quantised base. Rank 0
reads and quantises a layer at a time, and sends its codes.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.distributed.env import show_package
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.experts import expert_modules
from spmdrl.engines.fsdp.sharded_loading import RowsChecksum, checksum
from spmdrl.engines.fsdp.weight_files import WeightFiles
from spmdrl.hub.hf_folder import meta_model, sees_images
from spmdrl.weights.boxes import Box
from spmdrl.weights.shards import held_box, local

BLOCK, SCALE_BLOCK = 64, 256  # weights with one scale, scales with one scale
MISSING = "bitsandbytes, which is not installed: pip install 'spmdrl[qlora]'"
BYTES = 0.5 + 1 / BLOCK + 4 / (BLOCK * SCALE_BLOCK)  # of a weight


@cache
def bitsandbytes() -> Any:
    """Returns its functions; before_torch has hidden it. Raises ConfigError where it is missing."""
    show_package("bitsandbytes.functional")
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"a base in 4 bits needs {MISSING}")
    return importlib.import_module("bitsandbytes.functional")


class Nf4Linear(nn.Module):
    """A linear layer whose weight is held in NF4. It has no gradient."""

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor
    scale_offset: Tensor
    values: Tensor
    scale_values: Tensor

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        """linear: whose weight may be on "meta". dtype: that the weight is dequantised to."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype, self.bias = dtype, linear.bias
        blocks = math.ceil(linear.weight.numel() / BLOCK)
        sizes = {
            "codes": ((linear.weight.numel() + 1) // 2, torch.uint8),  # two weights each
            "scales": (blocks, torch.uint8),
            "scale_scales": (math.ceil(blocks / SCALE_BLOCK), torch.float32),
            "scale_offset": (1, torch.float32),
        }
        for name, (size, own) in sizes.items():
            self.register_buffer(name, torch.zeros(size, dtype=own), persistent=False)
        tables = quantized(torch.ones(BLOCK, 1))  # the same of every weight
        for name in ("values", "scale_values"):  # that codes of a weight and of a scale stand for
            self.register_buffer(name, tables[name].clone(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weight, dequantised: (out, in)."""
        library = bitsandbytes()
        scales = library.QuantState(
            absmax=self.scale_scales, blocksize=SCALE_BLOCK, code=self.scale_values,
            dtype=torch.float32,
        )  # fmt: skip
        state = library.QuantState(
            absmax=self.scales, shape=torch.Size((self.out_features, self.in_features)),
            code=self.values, blocksize=BLOCK, quant_type="nf4", dtype=self.dtype,
            offset=self.scale_offset[0], state2=scales,
        )  # fmt: skip
        return library.dequantize_4bit(self.codes[:, None], state)

    def set_weight(self, weight: Tensor) -> None:
        """Quantises a weight of the role's dtype. weight: (out, in), where the buffers are."""
        for name, values in quantized(weight).items():
            getattr(self, name).copy_(values.view_as(getattr(self, name)))

    def codes_of(self) -> list[Tensor]:
        return [getattr(self, name) for name in ("codes", "scales", "scale_scales", "scale_offset")]

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self, self.bias)


class _Product(torch.autograd.Function):
    """x W^T + bias, which keeps the codes of W for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, linear: Nf4Linear, bias: Tensor | None) -> Tensor:
        ctx.linear = linear
        return nn.functional.linear(x, linear.weight.to(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0] @ ctx.linear.weight.to(grads[0].dtype), None, None


def quantized(weight: Tensor) -> dict[str, Tensor]:
    """Returns what Nf4Linear holds of a weight."""
    codes, state = bitsandbytes().quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return {
        "codes": codes, "scales": state.absmax, "scale_scales": state.state2.absmax,
        "scale_offset": state.offset, "values": state.code, "scale_values": state.state2.code,
    }  # fmt: skip


def rounded(weight: Tensor) -> Tensor:
    """Returns what is left of a weight, (out, in), when it was quantised, in its dtype."""
    layer = Nf4Linear(nn.Linear(weight.shape[1], weight.shape[0], bias=False), weight.dtype)
    layer.set_weight(weight)
    return layer.weight


# ---- in a model


def quantize_layers(hf: nn.Module, layers: list[str], dtype: torch.dtype) -> dict[str, Nf4Linear]:
    """Puts Nf4Linear in the place of the base of these layers with an adapter. Weights that are on
    "meta" are read by `read_quantized`. Returns the layers by their names.
    """
    found = {}
    for name in layers:
        adapted: Any = hf.get_submodule(name)
        weight = adapted.base_layer.weight
        found[name] = adapted.base_layer = Nf4Linear(adapted.base_layer, dtype)
        if not weight.is_meta:
            found[name].set_weight(weight.detach())
    return found


@torch.no_grad()
def read_quantized(
    layers: Mapping[str, Nf4Linear], files: WeightFiles, topology: Topology
) -> dict[str, RowsChecksum]:  # fmt: skip
    """Fills the layers of the topology's first rank. Returns the checksums of what it has read, by
    the names of the files' model.
    """
    sums = {}
    for name, layer in layers.items() if topology.rank == 0 else ():
        own = f"{name}.weight"
        rows = files.rows(own, 0, layer.out_features)
        sums[own] = checksum(0, rows)
        layer.set_weight(rows.to(topology.device, layer.dtype))
    files.close()
    return sums


def send_codes(layers: Mapping[str, Nf4Linear], topology: Topology) -> None:
    """Fills the layers of all ranks with those of the first. Collective over the topology."""
    for layer in layers.values():
        for part in layer.codes_of():
            moved = part.to(topology.device)
            dist.broadcast(moved, group=topology.group, group_src=0)
            part.copy_(moved)


class QuantizedLowRank:
    """A dequantised weight with an adapter, of the rows of B that lie on this rank."""

    def __init__(self, layer: Nf4Linear, a: Tensor, b: Tensor, scale: float) -> None:
        """a: (rank, in), b: (out, rank) float32: DTensors that are split by rows, or full."""
        self.layer, self.a, self.b, self.scale = layer, a, b, scale
        self.shape = (layer.out_features, layer.in_features)
        held = held_box(b)
        box: Box = () if held is None else (held[0], (0, layer.in_features))
        self.boxes: tuple[Box, ...] = (box,) if box else ()

    @property
    def device(self) -> torch.device:
        return local(self.b).device

    def compute(self, to: list[Tensor]) -> None:
        a = self.a.full_tensor() if hasattr(self.a, "full_tensor") else self.a
        for part, (rows, _) in zip(to, self.boxes, strict=True):
            base = self.layer.weight[slice(*rows)].float()
            torch.addmm(base, local(self.b), a, alpha=self.scale, out=part)


# ---- what is known before anything is built


def check_quantization(name: str, role: TrainConfig, config: PreTrainedConfig) -> None:
    """Raises ConfigError where the base of a role's adapters cannot be in 4 bits. config: of the
    role's model.
    """
    lora = role.lora
    if lora is None or lora.quantization is None:
        return
    show_package("bitsandbytes.functional")
    asked = f"{name}.lora.quantization={lora.quantization!r}"
    if find_spec("bitsandbytes") is None:
        raise ConfigError(f"{asked} needs {MISSING}")
    reasons = {
        "the layers with an adapter are quantised, and other linear layers would stay as they are: "
        "use target_modules='all-linear'": lora.target_modules != "all-linear",
        "a mixture's experts, most of its weights, are no linear layers and would stay as they "
        "are: leave quantization out": bool(expert_modules(meta_model(config))),
        "DoRA would measure the rows of each weight in every pass, dequantised: leave use_dora "
        "out": lora.use_dora,
        "a model that sees images was not tried: leave quantization out": sees_images(config),
        "torch.compile was not tried with it: leave compile out": role.compile,
        "the quantised base stays on the device, which offload_policy would take it from: leave "
        "one of them out": role.offload_policy,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ConfigError(f"{asked}: {reason}")
