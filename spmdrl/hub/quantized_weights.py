"""Reads weights that a checkpoint has in FP8 blocks or in MXFP4 as floating-point tensors.

    FP8     W (rows, columns) float8_e4m3fn and W_scale_inv (ceil(rows / b), ceil(columns / b))
            float32: each block of b x b numbers times its scale. DeepSeek-V3's; b is 128.
    MXFP4   X_blocks (experts, rows, n, 16) uint8, X_scales (experts, rows, n) uint8: a byte holds
            two numbers of 4 bits, the lower half first; 32 numbers times 2^(scale - 127). gpt-oss
            has them (experts, rows, 32 n), and its model the transposed (experts, 32 n, rows).

Sources: DeepSeek-V3, arXiv 2412.19437, section 3.3; OCP Microscaling Formats, version 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

FP8_SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # those of the other sign follow
FP4_BIAS = 127

Part = slice | tuple[slice, ...] | None  # rows of a tensor, or a range in each dimension; None: all
Read = Callable[[str, Part], Tensor]  # a tensor of the files by its name, or a part of it


class Quantized(NamedTuple):
    """A weight that several tensors of the files are read for."""

    shape: tuple[int, ...]
    stored: str  # the first of these tensors
    read: Callable[[Read, Part], Tensor]  # float32; ranges in each dimension: of FP8 alone


def is_readable(config: Any) -> bool:
    """Says whether a model's weights are quantised in one of the ways above. config: its own."""
    how = quantization_of(config)
    return is_mxfp4(config) or bool(
        how.get("quant_method") == "fp8" and how.get("weight_block_size")
    )


def is_fp8(config: Any) -> bool:
    """Says whether a model's weights are in FP8 blocks."""
    return is_readable(config) and not is_mxfp4(config)


def is_mxfp4(config: Any) -> bool:
    return quantization_of(config).get("quant_method") == "mxfp4"


def quantization_of(config: Any) -> Mapping[str, Any]:
    """Returns a config's quantization_config; {} where it has none."""
    how = getattr(config, "quantization_config", None) or {}
    return how if isinstance(how, Mapping) else how.to_dict()


def quantized_weights(
    shapes: Mapping[str, Iterable[int]], config: Any
) -> tuple[dict[str, Quantized], set[str]]:
    """Returns the quantised weights among the tensors of the files by their names, and the names of
    the tensors that they are read from. shapes: of all tensors.
    """
    block = tuple(quantization_of(config).get("weight_block_size") or ())
    found: dict[str, Quantized] = {}
    used: set[str] = set()
    for name in shapes:
        if name.endswith(FP8_SCALE) and name.removesuffix(FP8_SCALE) in shapes:
            weight = name.removesuffix(FP8_SCALE)
            found[weight] = fp8_weight(weight, tuple(shapes[weight]), block)
            used |= {weight, name}
        elif name.endswith(BLOCKS) and name.removesuffix(BLOCKS) + SCALES in shapes:
            weight = name.removesuffix(BLOCKS)
            found[weight] = mxfp4_weight(weight, tuple(shapes[name]))
            used |= {name, weight + SCALES}
    return found, used


def fp8_weight(name: str, shape: tuple[int, ...], block: tuple[int, ...]) -> Quantized:
    def read(tensor: Read, part: Part) -> Tensor:
        box = part if isinstance(part, tuple) else (part or slice(None), slice(None))
        ranges = [side.indices(size)[:2] for side, size in zip(box, shape, strict=True)]
        blocks = [
            slice(first // size, -(-last // size))
            for (first, last), size in zip(ranges, block, strict=True)
        ]
        scales = tensor(name + FP8_SCALE, tuple(blocks)).float()
        for axis, ((first, last), size) in enumerate(zip(ranges, block, strict=True)):
            scales = scales.index_select(axis, torch.arange(first, last) // size - first // size)
        return tensor(name, tuple(slice(*side) for side in ranges)).float() * scales

    return Quantized(shape, name, read)


def mxfp4_weight(name: str, blocks: tuple[int, ...]) -> Quantized:
    experts, rows, count, size = blocks

    def read(tensor: Read, which: Part) -> Tensor:
        packed = tensor(name + BLOCKS, which).int()
        values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
        pairs = torch.stack([values[packed & 15], values[packed >> 4]], dim=-1).flatten(-2)
        scales = tensor(name + SCALES, which).int() - FP4_BIAS
        return torch.ldexp(pairs, scales[..., None]).flatten(-2).transpose(1, 2)

    return Quantized((experts, 2 * size * count, rows), name + BLOCKS, read)
