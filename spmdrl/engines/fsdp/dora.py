"""DoRA: an adapter that learns the length of each row of a weight apart from its direction.

Liu et al. 2024, arXiv 2402.09353, equation 5, where the rows are the outputs of a layer:

    W' = m (W + scale B A) / |W + scale B A|    each row by its own norm and its own element of m

The norm is a constant in the backward pass (section 4.3). m starts as |W|, so that the model starts
as its base. What is trained is m - |W|, the offset, which starts at 0 and has the gradient of m:
FSDP computes with parameters that are rounded to bfloat16, which moves m by 0.2 per cent and an
offset by as much of itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from spmdrl.engines.fsdp.compat import set_variant
from spmdrl.weights.shards import held_box, local, row_norms

OFFSET = "lora_magnitude_offset"  # in a layer: m - |W|, (out,) float32
MAGNITUDE = ".lora_magnitude_vector"  # after a layer's name, in peft's files: m


def add_offsets(hf: nn.Module, layers: Iterable[str]) -> None:
    """Makes peft's layers with an adapter compute what DoRA says, with offsets of 0."""
    for name in layers:
        layer: Any = hf.get_submodule(name)
        weight = layer.base_layer.weight
        zeros = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
        layer.register_parameter(OFFSET, nn.Parameter(zeros))
        set_variant(layer, add_dora)


def add_dora(layer: Any, x: Tensor, result: Tensor) -> Tensor:
    """Returns m / |W + scale B A| (W x + scale B A x) + bias.

    layer: peft's, x: what it is given, result: W x + bias, of which the factor's difference from 1
    is added: rounding leaves it as it is where that is 0.
    """
    a, b = layer.lora_A["default"], layer.lora_B["default"]
    scale, weight, bias = layer.scaling["default"], layer.base_layer.weight, layer.base_layer.bias
    with torch.no_grad():
        whole = weight.to(torch.float32, copy=True)
        whole.addmm_(b.weight.float(), a.weight.float(), alpha=scale)
        norm, before = row_norms(whole), row_norms(weight)
        del whole
    factor = (before + getattr(layer, OFFSET).float()) / norm  # (out,)
    plain = result if bias is None else result - bias
    return (result + (factor - 1) * plain + factor * (scale * b(a(x)))).to(result.dtype)


@torch.no_grad()
def subtract_norms(parameters: Mapping[str, Tensor], layers: Iterable[str]) -> None:
    """Makes offsets of magnitudes, in place, of this rank's rows. parameters: of hf, by name."""
    for layer in layers:
        weight = parameters[f"{layer}.base_layer.weight"]
        local(parameters[f"{layer}.{OFFSET}"]).sub_(row_norms(local(weight)))


class Magnitudes:
    """m of one layer, which is worked out of the offset and W."""

    def __init__(self, offset: Tensor, weight: Tensor) -> None:
        """offset: (out,), weight: (out, in): DTensors that are split by rows, or full tensors."""
        self.offset, self.weight = offset, weight
        self.shape: tuple[int, ...] = tuple(offset.shape)
        box = held_box(offset)
        self.boxes = () if box is None else (box,)

    @property
    def device(self) -> torch.device:
        return local(self.offset).device

    def compute(self, to: list[Tensor]) -> None:
        for part in to:
            torch.add(local(self.offset), row_norms(local(self.weight)), out=part)
