"""The checks of the package if-verifiable for IFEval, without its loader of data.

The package's __init__ imports `datasets`, which brings pandas and is needed for nothing here: its
modules are imported without running that. Checked with if-verifiable 0.1.2.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec, module_from_spec

PACKAGE = "if_verifiable"
spec = find_spec(PACKAGE)  # finds it and runs nothing
assert spec is not None, "instructions.check_installed comes first"
if PACKAGE not in sys.modules:
    sys.modules[PACKAGE] = module_from_spec(spec)

from if_verifiable.common import evaluate_instructions  # noqa: E402
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT  # noqa: E402
from langdetect import DetectorFactory  # noqa: E402

DetectorFactory.seed = 0  # it draws, and the same text is to have the same verdict

__all__ = ["INSTRUCTION_DICT", "evaluate_instructions"]
