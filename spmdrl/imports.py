"""What a program sees to before it imports torch and transformers.

torchao has our 8-bit optimizer. transformers and vLLM import it wherever it is installed, for
quantised models: a second for each rank, and lines about libraries that do not load.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

MODULES: dict[str, Any] = sys.modules


def before_torch() -> None:
    """For programs."""
    hide_torchao()
    # a rank that ends takes a store along, of which every other's torch shows a C++ stack
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if on_cpus_with_large_pages():
        # for large tensors: a cast of 50 million weights, bound by memory, takes 20 ms, not 31
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def on_cpus_with_large_pages() -> bool:
    """Whether the kernel has pages of 2 MiB for programs that ask, and this one may: with GPUs it
    keeps its allocator, under which each tensor would be a mapping, and their number is limited."""
    try:
        asked_for = "[madvise]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return asked_for and not Path("/dev/nvidiactl").exists()


def hide_torchao() -> None:
    """It looks as if it were not installed."""
    MODULES.setdefault("torchao", None)


def show_torchao() -> None:
    if "torchao" in MODULES and MODULES["torchao"] is None:
        del MODULES["torchao"]
