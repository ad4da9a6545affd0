"""Estimates what the passes of a tower for images take on a rank: docs/memory.md has the formula.

Elements are counted from what the backward pass reads of the layers of transformers' towers, by the
parts that these have.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from spmdrl.config import TrainConfig, checkpointing_of
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.vision_families import FAMILIES
from spmdrl.training.checks.model_shape import ModelShape

AROUND = 6  # hidden sizes of a patch before the layers and in the projector behind them


class TowerMemory(NamedTuple):
    """Bytes of a pass through the tower with the images of a micro-batch."""

    kept: float  # for the backward pass
    at_work: float  # of one layer


def tower_memory(
    role: TrainConfig, shape: ModelShape, image_tokens: float, trained: bool, on_gpu: bool,
    keep_share: float,
) -> TowerMemory:  # fmt: skip
    """image_tokens: those of the micro-batch that stand for images. keep_share: of a layer's
    elements, what is kept where role.activation_checkpointing is "selective", or 1.
    """
    found = {layer: kept_of_layer(layer) for layer in shape.tower_layers}
    layers = [kept for kept in found.values() if kept]
    if not layers or not image_tokens:
        return TowerMemory(0.0, 0.0)
    patches = image_tokens * FAMILIES[shape.hf.model_type].patches(shape.hf)
    each = patches * DTYPES[role.dtype].itemsize
    hidden = hidden_of(shape.tower_layers)
    if not trained or role.freeze_vision:
        return TowerMemory(0.0, max(there_at_once(m) for m, kept in found.items() if kept) * each)
    around = pixels_of_patch(shape.towers) + AROUND * hidden
    if role.activation_offload:
        return TowerMemory(0.0, (max(layers) + around) * each)
    if checkpointing_of(role, on_gpu) is True:
        return TowerMemory((len(layers) * hidden + around) * each, max(layers) * each)
    return TowerMemory((sum(layers) * keep_share + around) * each, 0.0)


def kept_of_layer(layer: nn.Module) -> int:
    """Returns the elements that a layer keeps of a patch; 0 for what is no layer.

    A norm with a bias keeps its input and output, one without also what it has normalised. Where
    queries, keys and values are one product, that is kept beside the rotated ones. An MLP keeps
    what goes into its activation and what comes out, with a gate also the other factor and the
    product.
    """
    linears = {name: part for name, part in layer.named_modules() if isinstance(part, nn.Linear)}
    if len(linears) < 3:
        return 0
    hidden, inside = hidden_of([layer]), max(part.in_features for part in linears.values())
    norms = [part for part in layer.modules() if type(part).__name__.endswith("Norm")]
    of_norms = sum(2 if getattr(norm, "bias", None) is not None else 3 for norm in norms)
    is_one = any(name.endswith("qkv") for name in linears)
    gated = sum(part.out_features == inside for part in linears.values()) > 1
    scales = len(list(layer.parameters(recurse=False)))  # of the layer's parts, learnt
    attention = 7 if is_one else 4
    return (of_norms + attention + scales) * hidden + (4 if gated else 2) * inside


def there_at_once(layer: nn.Module) -> int:
    """Returns the most elements of a patch that are there at once in a pass without gradient.

    Attention has the layer's input, its norm, queries, keys and values, the rotated queries and
    keys, three tensors that make these, and the output. An MLP has the input, its norm, what comes
    out of the activation, with a gate also the other factor, and what the last product is given.
    """
    linears = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    hidden, inside = hidden_of([layer]), max(part.in_features for part in linears)
    gated = sum(part.out_features == inside for part in linears) > 1
    return max(11 * hidden, 2 * hidden + (3 if gated else 2) * inside)


def hidden_of(layers: list[nn.Module]) -> int:
    """Returns the width of a tower's layers: what the first of their linear layers is given."""
    parts = (part for layer in layers for part in layer.modules())
    return next(part.in_features for part in parts if isinstance(part, nn.Linear))


def pixels_of_patch(towers: list[nn.Module]) -> int:
    """Returns the numbers of a patch, which its embedding keeps."""
    for part in (part for tower in towers for part in tower.modules()):
        if isinstance(part, nn.Conv2d | nn.Conv3d):
            return part.weight[0].numel()
    return 0
