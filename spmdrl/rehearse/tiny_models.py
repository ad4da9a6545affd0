"""Writes tiny random models of the families that a config names, each with its own tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from spmdrl.cli.paths import model_fields
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.hub.hf_folder import auto_class, load_hf_config, meta_model
from spmdrl.hub.tiny_config import FAILURES, tiny_config

SCORER = "reward_model.model"
# What a folder has of a model's weights, and what is written anew.
WEIGHTS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json",
)  # fmt: skip
MOST_BYTES = 256 << 20  # of a file that is copied; a tokenizer has some 20 MiB


def write_tiny_models(config: PpoConfig, folder: Path) -> dict[str, str]:
    """Writes a model for each that the config names; returns its folder by the field's dotted key.
    Raises ConfigError for a family of which transformers cannot build a tiny model.
    """
    found: dict[str, str] = {}
    names = {k: v for k, v in model_fields(config).items() if not k.endswith("adapter")}
    for number, (key, model) in enumerate(names.items()):
        same = next((found[k] for k in found if names[k] == model and k != SCORER != key), None)
        target = folder / f"model_{number}"
        if same is None:
            write_tiny(model, target, is_scorer=key == SCORER)
        found[key] = same or str(target)
    return found


def write_tiny(model: str, target: Path, is_scorer: bool) -> None:
    """Writes a tiny random model with all tokens of a model's, and what else its folder has."""
    hf: Any = load_hf_config(model)
    auto = AutoModelForSequenceClassification if is_scorer else auto_class(hf)
    vocab = hf.get_text_config().vocab_size
    try:
        tiny = tiny_config(hf, meta_model(hf, auto), vocab)
        if getattr(tiny, "quantization_config", None) is not None:
            del tiny.quantization_config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            made = auto.from_config(tiny, dtype=torch.float32)
        made.save_pretrained(target)
    except FAILURES as error:
        raise ConfigError(
            f"there is no tiny model of the family {hf.model_type!r}: {type(error).__name__}: "
            f"{error}. --dry-run checks what needs none"
        ) from error
    copy_rest(Path(model), target)


def copy_rest(source: Path, target: Path) -> None:
    """Copies the files beside the weights: tokenizer, chat template, generation config, code."""
    for file in source.iterdir():
        is_weights = file.name.endswith(WEIGHTS) or file.name == "config.json"
        if file.is_file() and not is_weights and file.stat().st_size <= MOST_BYTES:
            shutil.copy(file, target / file.name)
