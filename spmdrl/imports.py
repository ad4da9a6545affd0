"""What a program sees to before it imports torch and transformers.

torchao has our 8-bit optimizer. transformers and vLLM import it wherever it is installed, for
quantised models: a second for each rank, and lines about libraries that do not load.
"""

from __future__ import annotations

import os
import sys
from typing import Any

MODULES: dict[str, Any] = sys.modules


def before_torch() -> None:
    """For programs."""
    hide_torchao()
    # a rank that ends takes a store along, of which every other's torch shows a C++ stack
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # large tensors in pages of 2 MiB where the kernel leaves that to programs (madvise): to cast
    # 50 million weights, which is bound by reading memory, takes 20 ms instead of 31
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def hide_torchao() -> None:
    """It looks as if it were not installed."""
    MODULES.setdefault("torchao", None)


def show_torchao() -> None:
    if "torchao" in MODULES and MODULES["torchao"] is None:
        del MODULES["torchao"]
