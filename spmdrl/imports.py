"""A package that is here for one option, kept out of every rank that does not use it.

torchao has our 8-bit optimizer. transformers and vLLM import it wherever it is installed, for
quantised models: a second for each rank, and lines about libraries that do not load.
"""

from __future__ import annotations

import sys
from typing import Any

MODULES: dict[str, Any] = sys.modules


def hide_torchao() -> None:
    """For programs, before they import transformers: it looks as if it were not installed."""
    MODULES.setdefault("torchao", None)


def show_torchao() -> None:
    if "torchao" in MODULES and MODULES["torchao"] is None:
        del MODULES["torchao"]
