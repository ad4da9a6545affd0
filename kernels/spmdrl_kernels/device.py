"""Which GPU a kernel would run on, NVIDIA's or AMD's: the one module of the kernels that tells.

PyTorch's build for AMD calls its devices "cuda" too, and torch.cuda.get_device_capability() then
counts AMD's architectures: an MI300 says (9, 4), and has nothing of Hopper's (9, 0). No kernel has
run on an AMD GPU yet, so they are off there until SPMDRL_AMD_KERNELS=1; see docs/amd.md.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

ON_AMD = "SPMDRL_AMD_KERNELS"


def is_amd() -> bool:
    return torch.version.hip is not None


def triton_runs(device: torch.device) -> bool:
    """Returns whether our Triton kernels are to run on this GPU: on NVIDIA's from Ampere on, on
    AMD's where SPMDRL_AMD_KERNELS=1 asks for it.
    """
    if find_spec("triton") is None:
        return False
    if is_amd():
        return os.environ.get(ON_AMD) == "1"
    return torch.cuda.get_device_capability(device) >= (8, 0)


def has_tensor_memory_accelerator(device: torch.device) -> bool:
    """Returns whether the GPU has Hopper's unit for bulk copies, or a later one's."""
    return not is_amd() and torch.cuda.get_device_capability(device) >= (9, 0)


def allows_tf32() -> bool:
    """Returns whether the program allows products of float32 on NVIDIA's GPUs to be TF32's, by the
    older or the newer of torch's settings; torch.get_float32_matmul_precision() raises where the
    newer were used.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def dot_precision(exact: bool) -> str:
    """Returns the input_precision of tl.dot for float32: TF32 is NVIDIA's, and only where the
    program allows it.
    """
    return "ieee" if exact or is_amd() else "tf32"
