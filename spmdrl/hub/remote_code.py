"""Python files that a model's folder brings along: run only where the user says so.

transformers knows most architectures itself. A folder of another one names its own classes in
config.json ("auto_map"); loading them runs code that whoever made the folder wrote. Everything here
loads with trust_remote_code=False, which never runs any: such a folder is refused, and one of a
known architecture is loaded by transformers' own classes. `allow_code` runs it, once, and registers
the classes, so that every later part of the process finds them as if transformers had them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.dynamic_module_utils import custom_object_save, get_class_from_dynamic_module

from spmdrl.config import ConfigError
from spmdrl.hub.transformers_compat import model_class

# What transformers raises for files that are not what they should be.
UNREADABLE = (
    OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError,
    RecursionError, StrictDataclassError,
)  # fmt: skip


def allow_code(model: str) -> None:
    """Runs the code of a model's folder and registers its classes. Raises ConfigError."""
    try:
        config: Any = AutoConfig.from_pretrained(model, trust_remote_code=True)
        if type(config).__module__.startswith("spmdrl."):
            return  # kimi_vl.py has all classes of it
        if is_foreign(type(config)):
            AutoConfig.register(config.model_type, type(config), exist_ok=True)
        reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
        if reference:
            kind: Any = get_class_from_dynamic_module(reference, model)
            kind.register_for_auto_class("AutoModelForCausalLM")
            AutoModelForCausalLM.register(type(config), kind, exist_ok=True)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
        if is_foreign(type(tokenizer)):
            AutoTokenizer.register(type(config), tokenizer_class=type(tokenizer), exist_ok=True)
    except UNREADABLE as error:
        raise ConfigError(f"model: the code of {model!r} fails: {reason_of(error)}") from error


def is_foreign(kind: type) -> bool:
    """Whether a class came out of a model's folder."""
    return kind.__module__.partition(".")[0] == "transformers_modules"


def has_foreign_code(config: PreTrainedConfig) -> bool:
    """Whether `allow_code` registered a class for models of this config."""
    return is_foreign(type(config)) or bool(code_files(config))


@dataclass(frozen=True)
class CodeFiles:
    """The files of a model class, to be saved beside its weights and config."""

    kind: type

    def save_pretrained(self, folder: str | Path) -> None:
        custom_object_save(self.kind, str(folder))


def code_files(config: PreTrainedConfig) -> list[CodeFiles]:
    """Empty where transformers has the model's class itself."""
    kind = model_class(AutoModelForCausalLM, type(config))
    return [CodeFiles(kind)] if isinstance(kind, type) and is_foreign(kind) else []


def reason_of(error: Exception) -> str:
    """The first lines of what transformers says, and our name for the option."""
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, KeyError | AttributeError | TypeError | ArithmeticError):
        text = f"{type(error).__name__}: {text}"
    if "trust_remote_code" in text or "custom code" in text:
        return (
            "it brings Python code of its own, which would have to be run to load it. If you trust "
            "who made it, set trust_remote_code=True"
        )
    return text if len(text) <= 300 else text[:297] + "..."
