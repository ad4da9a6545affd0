"""A Hugging Face model folder without its weights: its config, model class and tokenizer.

Every loader passes trust_remote_code=False; remote_code.py says what that refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)

from spmdrl.cli.paths import check_model_path
from spmdrl.config import ConfigError
from spmdrl.hub.remote_code import UNREADABLE, reason_of

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # model types whose images are understood


def sees_images(config: PreTrainedConfig) -> bool:
    """Whether the model reads images that stand in its prompts."""
    return config.model_type in FAMILIES


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that finds the model's, with its vision tower where there is one."""
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def load_hf_config(model: str) -> PreTrainedConfig:
    """Raises ConfigError where there is no such model, or only its own code could load it."""
    check_model_path("model", model)
    try:
        hf = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except UNREADABLE as error:
        where = "" if Path(model).is_dir() else " is no folder here and cannot be had from the hub"
        raise ConfigError(f"model: {model!r}{where}: {reason_of(error)}") from error
    for name in SIZES:
        size = getattr(hf.get_text_config(), name, None)
        if not isinstance(size, int) or size < 1:
            raise ConfigError(f"model: {model!r}: its config.json has {name}={size!r}")
    return hf


def vocab_size_of(model: str) -> int:
    """Rows of its embedding: no token may have a higher id. Raises ConfigError."""
    return load_hf_config(model).get_text_config().vocab_size


def check_files(folder: Path) -> None:
    """Raises ConfigError for a safetensors file that is cut short or not one at all."""
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"model: {file} is damaged: {error}. Fetch or copy it again"
            ) from error


def meta_model(config: PreTrainedConfig, auto: Any = None) -> PreTrainedModel:
    """Shapes and layers without memory."""
    with torch.device("meta"):
        hf = (auto or auto_class(config)).from_config(config)
    hf.tie_weights()
    return hf


def load_tokenizer(model: str) -> Any:
    """Raises ConfigError where the model has none, or only its own code could load it."""
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except UNREADABLE as error:
        reason = reason_of(error)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises nothing more specific
            raise
        reason = str(error)
    raise ConfigError(f"model: {model!r} has no tokenizer that loads: {reason}")
