"""Loads transformers' video processors, with torchvision or without it.

A video processor is written for torchvision, of which it calls three functions: they resize and
normalise tensors, and repeat the channel of grey ones. Builds of torchvision are made for one build
of torch, and those for GPUs cannot be imported beside a torch for CPUs (docs/install.md). Where it
is missing, the functions are here: each calls what torchvision calls, so that the pixels are the
same in every bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

NAMES = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2",
         "torchvision.transforms.v2.functional")  # fmt: skip


class InterpolationMode(Enum):
    """The ways of resizing that transformers names, by the value of torch's `interpolate`."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"  # compared with alone: see `resize`


RESAMPLE = {2: InterpolationMode.BILINEAR, 3: InterpolationMode.BICUBIC}  # by Pillow's number


def resize(
    video: Tensor, size: Sequence[int], interpolation: InterpolationMode, antialias: bool = True
) -> Tensor:
    """video: (..., channels, height, width), uint8 or float32; size: (height, width)."""
    if tuple(size) == tuple(video.shape[-2:]):
        return video
    frames = video.reshape(-1, *video.shape[-3:])
    found = interpolate(
        frames, size=list(size), mode=interpolation.value, align_corners=False, antialias=antialias
    )
    return found.reshape(*video.shape[:-2], *size)


def normalize(
    video: Tensor, mean: Sequence[float], std: Sequence[float], inplace: bool = False
) -> Tensor:
    """video: (..., channels, height, width), float32. Returns (video - mean) / std by channel."""
    shift, scale = (torch.as_tensor(part, dtype=video.dtype)[:, None, None] for part in (mean, std))
    return (video - shift) / scale


def grayscale_to_rgb(video: Tensor) -> Tensor:
    """video: (..., channels, height, width); one channel becomes three."""
    return video.expand(*video.shape[:-3], 3, -1, -1) if video.shape[-3] == 1 else video


def load_video_processor(model: str, kind: str, name: str) -> Any:
    """Returns the video processor of a model's folder.

    kind: the model type whose module in transformers has the class `name`. Raises OSError and
    ValueError for files that are missing or broken.
    """
    module = f"transformers.models.{kind}.video_processing_{kind}"
    with stand_ins():
        found = getattr(import_module(module), name)
    return found.from_pretrained(model)


@contextmanager
def stand_ins() -> Iterator[None]:
    """While a video processor's module is imported, the functions above stand for torchvision's,
    where that is missing. transformers goes on calling them; nobody else sees them.
    """
    if find_spec("torchvision") is not None:
        yield
        return
    from transformers import image_processing_backends, video_processing_utils

    modules = [ModuleType(name) for name in NAMES]
    for parent, child in pairwise(modules):
        setattr(parent, child.__name__.rpartition(".")[2], child)
    for own in (InterpolationMode, resize, normalize, grayscale_to_rgb):
        setattr(modules[-1], own.__name__, own)
    for module in (image_processing_backends, video_processing_utils):
        module.tvF = modules[-1]  # type: ignore[attr-defined]
    vars(image_processing_backends)["pil_torch_interpolation_mapping"] = RESAMPLE
    sys.modules.update(zip(NAMES, modules, strict=True))
    try:
        yield
    finally:
        for name in NAMES:
            del sys.modules[name]
