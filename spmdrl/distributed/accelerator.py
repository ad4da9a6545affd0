"""Says which GPUs this host has, NVIDIA's or AMD's, and what differs between them.

PyTorch's build for AMD (ROCm) keeps the names of CUDA: devices are "cuda", and the backend "nccl"
is RCCL. What differs all the same is asked here. The kernels, which import nothing of spmdrl, have
kernels/spmdrl_kernels/device.py. Nothing of it has run on an AMD GPU: docs/amd.md.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

import torch

from spmdrl.config import ConfigError
from spmdrl.config.words import counted

SHARE_GPU = "SPMDRL_SHARE_GPU"  # "1": ranks of a host may share its GPUs; for tests
SHARED_BY_NCCL = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own switch for the same
LEAST_NCCL_TO_SHARE = (2, 30)
HIDES_GPUS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
NVIDIA_DRIVER = Path("/dev/nvidiactl")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# gfx_target_version of the Linux driver: MI100, MI200, MI300 and MI350. Graphics in a processor,
# which the same driver lists, is none of these.
AMD_ACCELERATORS = frozenset({90008, 90010, 90400, 90401, 90402, 90500})


def is_amd() -> bool:
    """Returns whether this PyTorch was built for AMD's GPUs (ROCm); on a CPU False as a rule."""
    return torch.version.hip is not None


def multiplies_fp8() -> bool:
    """Returns whether this rank's GPU has instructions for products in FP8 that torch calls:
    NVIDIA's from Ada and Hopper (compute capability 8.9) on. On AMD's nothing was tried, so that
    the answer is no.
    """
    return not is_amd() and torch.cuda.get_device_capability() >= (8, 9)


def vendor_of_unused_gpus() -> str | None:
    """Returns whose GPUs ("NVIDIA" or "AMD") this host has, for when PyTorch finds none; None where
    there are none, or a variable of the environment hides them.
    """
    if any(os.environ.get(name, "all") in ("", "-1") for name in HIDES_GPUS):
        return None
    if NVIDIA_DRIVER.exists():
        return "NVIDIA"
    return "AMD" if any(map(is_amd_accelerator, AMD_NODES.glob("*/properties"))) else None


def is_amd_accelerator(properties: Path) -> bool:
    """Reads a file of AMD's kernel driver: lines of a name and a number."""
    try:
        rows = [line.split() for line in properties.read_text().splitlines()]
    except OSError:  # a container may not see every GPU of its host
        return False
    versions = [int(row[1]) for row in rows if row[:1] == ["gfx_target_version"]]
    return bool(AMD_ACCELERATORS & {*versions})


def check_no_gpu_is_left_out() -> None:
    """Raises ConfigError where PyTorch finds no GPU on a host that has some."""
    vendor = vendor_of_unused_gpus()
    if vendor is not None:
        build, hide = ("ROCm", HIDES_GPUS[1]) if vendor == "AMD" else ("CUDA", HIDES_GPUS[0])
        raise ConfigError(
            f"this host has {vendor} GPUs that torch {torch.__version__} cannot use: install a "
            f"{build} build that its driver supports, or set {hide}= for a CPU run"
        )


def local_device(local_rank: int, ranks_here: int) -> torch.device:
    """Returns the GPU of one of `ranks_here` ranks on this host: its own or, with
    SPMDRL_SHARE_GPU=1, number local_rank % GPUs.

    Raises ConfigError where there are more ranks than GPUs and they may not or cannot share.
    """
    gpus = torch.cuda.device_count()
    if ranks_here > gpus:
        check_sharing(ranks_here, gpus)
    return torch.device("cuda", local_rank % gpus)


def check_sharing(ranks_here: int, gpus: int) -> None:
    """Lets ranks share GPUs where SPMDRL_SHARE_GPU=1: switches that on in NCCL. Raises ConfigError
    where it is not set, and where NCCL is too old for it.
    """
    if os.environ.get(SHARE_GPU) != "1":
        raise ConfigError(
            f"{counted(ranks_here, 'rank')} on this host, but {counted(gpus, 'GPU')}: use "
            "--nproc-per-node at most that, "
            f"or CUDA_VISIBLE_DEVICES= for a CPU run. For a test, {SHARE_GPU}=1 lets ranks share "
            "GPUs (docs/gpu.md)"
        )
    os.environ.setdefault(SHARED_BY_NCCL, "1")
    found = nccl_version()
    if not is_amd() and found is not None and found < LEAST_NCCL_TO_SHARE:
        raise ConfigError(
            f"{SHARE_GPU}=1 with {counted(ranks_here, 'rank')} on {counted(gpus, 'GPU')} needs "
            "NCCL 2.30 or newer, and "
            f"{'.'.join(map(str, found))} is loaded: pip install --no-deps --target FOLDER "
            "nvidia-nccl-cu13==2.30.7, then set LD_PRELOAD to the libnccl.so.2 in FOLDER"
        )


def nccl_version() -> tuple[int, int, int] | None:
    """Returns the version of the NCCL that this process has loaded, which LD_PRELOAD may have
    replaced; torch.cuda.nccl.version() is the one that PyTorch was compiled with. None: there is no
    such library, or it is part of PyTorch's own.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2")
    except OSError:
        return None
    number = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(number))  # 10000 * major + 100 * minor + patch
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def require_compiler(what: str, remedy: str) -> None:
    """Raises ConfigError where torch.compile finds no C++ compiler.

    what: the option that wants one; remedy: how to do without.
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"{what}: torch.compile wants a C++ compiler, and there is no {compiler!r} on the "
            f"path: install g++, set CXX, or {remedy}"
        )
