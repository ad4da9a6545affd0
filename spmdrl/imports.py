"""A package that is here for one option, kept out of every rank that does not use it.

torchao has our 8-bit optimizer. transformers and vLLM import it wherever it is installed, for
quantised models: a second for each rank, and lines about libraries that do not load.
"""

from __future__ import annotations

import sys
from types import ModuleType

HIDDEN: ModuleType | None = None  # in sys.modules: looks as if the package were not installed


def hide_torchao() -> None:
    """For programs, before they import transformers."""
    sys.modules.setdefault("torchao", HIDDEN)  # type: ignore[arg-type]


def show_torchao() -> None:
    if sys.modules.get("torchao", HIDDEN) is HIDDEN:
        sys.modules.pop("torchao", None)
