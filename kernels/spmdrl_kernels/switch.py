"""The one place that says whether tensors go to a Triton kernel or to the plain PyTorch form."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from spmdrl_kernels import device as devices

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
enabled = True  # set to False, everything runs in plain PyTorch


def on_triton(*tensors: Tensor | None) -> bool:
    """Whether all lie on a GPU that kernels run on (device.py), and are of one dtype that kernels
    know. Absent tensors (None) do not count."""
    given = [t for t in tensors if t is not None]
    return (
        enabled
        and all(t.is_cuda for t in given)
        and len({t.dtype for t in given}) == 1
        and given[0].dtype in DTYPES
        and can_run(given[0].device)
        and is_current(given[0].device)
    )


@cache
def can_run(device: torch.device) -> bool:
    return devices.triton_runs(device)


def is_current(device: torch.device) -> bool:
    """Returns True. Raises RuntimeError where the current device is another GPU: Triton would
    launch there all the same, and read these tensors in no order with what computes them.
    """
    current = torch.cuda.current_device()
    if device.index in (None, current):
        return True
    raise RuntimeError(
        f"these tensors are on {device}, but the current device is cuda:{current}, where Triton "
        f"would launch its kernels: call torch.cuda.set_device({device.index}) in this thread first"
    )


def dtype_to_store(like: Tensor) -> torch.dtype:
    """What a kernel writes where the result is to have the dtype of `like`, to be cast afterwards.

    Triton's interpreter, on CPUs, cuts float32 off to bfloat16, where a GPU rounds.
    """
    return like.dtype if like.is_cuda else torch.float32
