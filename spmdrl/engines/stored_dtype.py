"""Finds the dtype in which a model is stored: what is made of it is written in the same one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
IN_FILES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def stored_dtype(config: PreTrainedConfig, model: str) -> torch.dtype:
    """The dtype in which transformers loads a model that is asked for no other.

    That is the dtype of its config.json; where there is none, that of the first floating-point
    tensor of its safetensors files; without those float32. config: as it was read, since a model
    that is loaded in another dtype has that one in its config. model: its folder.
    """
    said: Any = config.dtype or config.get_text_config().dtype
    if said is not None:
        return DTYPES.get(str(said).removeprefix("torch."), torch.float32)
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = file.keys()
            kinds = (file.get_slice(name).get_dtype() for name in names)
            found = next((IN_FILES[kind] for kind in kinds if kind in IN_FILES), None)
        if found is not None:
            return found
    return torch.float32


def as_stored(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedConfig:
    """A copy of a model's config to be saved, with `dtype` as that of the model and its parts.

    It has no quantization_config: what is saved beside it are floating-point weights.
    """
    saved: Any = copy.deepcopy(config)
    for part in (saved, *(getattr(saved, name, None) for name in saved.sub_configs)):
        if isinstance(part, PreTrainedConfig):
            part.dtype = dtype
            if hasattr(part, "quantization_config"):
                del part.quantization_config
    return saved


def name_dtype(config: dict[str, Any], dtype: torch.dtype) -> None:
    """Writes a dtype into what was read from a config.json, in place."""
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)  # the older name of the same
    for part in config.values():
        if isinstance(part, dict) and "model_type" in part:
            name_dtype(part, dtype)
