"""A Hugging Face model folder without its weights: its config, model class and tokenizer.

Every loader passes trust_remote_code=False; remote_code.py says what that refuses.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
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
from spmdrl.hub import kimi_vl  # noqa: F401 (transformers finds its classes from here on)
from spmdrl.hub.remote_code import UNREADABLE, reason_of
from spmdrl.hub.transformers_compat import model_class
from spmdrl.hub.vision_families import FAMILIES

SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")

# whose towers are kept though they have a language model that could be loaded alone
WITH_TOWER: set[str] = set()


def keep_tower(*models: str) -> None:
    """Has these models, folders or hub ids, loaded with their towers from here on: a program calls
    it where the user says so (vision_tower=True).
    """
    WITH_TOWER.update(models)


def sees_images(config: PreTrainedConfig) -> bool:
    """Whether the model reads images that stand in its prompts."""
    return config.model_type in FAMILIES


def auto_class(config: PreTrainedConfig) -> Any:
    """transformers' class that finds the model's, with its vision tower where there is one."""
    return AutoModelForImageTextToText if sees_images(config) else AutoModelForCausalLM


def towers(model: Any) -> list[nn.Module]:
    """Returns all that a model that sees images has beside its language model: its towers, for
    sounds too, and what brings their vectors to the language model's width.
    """
    return [child for name, child in model.base_model.named_children() if name != "language_model"]


def load_hf_config(model: str) -> PreTrainedConfig:
    """Returns the config of a model: of its language model alone where its tower is left out.
    Raises ConfigError where there is no such model, or only its own code could load it.
    """
    return language_config(whole_config(model))


def whole_config(model: str) -> PreTrainedConfig:
    """Returns the config of all that a model's files have. Raises ConfigError as load_hf_config."""
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


def language_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the language model alone, where a model has a tower for images or
    sounds that is not to be kept: it is trained and sampled without (language_model.py). Every
    other config is returned as it is, also where the language model cannot be had alone.
    """
    text: Any = whole.get_text_config()
    kept = sees_images(whole) and whole.name_or_path in WITH_TOWER
    if text is whole or kept or not has_language_model(text):
        return whole
    return text_config(whole)


def text_config(whole: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config of the language model inside, with what only the whole config says."""
    text: Any = copy.deepcopy(whole.get_text_config())
    text.name_or_path, text.tie_word_embeddings = whole.name_or_path, whole.tie_word_embeddings
    text.dtype = text.dtype or whole.dtype
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(whole, name, None) is not None:
            setattr(text, name, getattr(whole, name))
    if getattr(whole, "quantization_config", None) is not None:
        text.quantization_config = whole.quantization_config
    return text


def has_language_model(config: PreTrainedConfig) -> bool:
    """Says whether transformers has a class of language models for a config."""
    return model_class(AutoModelForCausalLM, type(config)) is not None


def has_tower(model: str) -> bool:
    """Says whether a model's files have more than the language model that is trained of them."""
    whole = whole_config(model)
    return language_config(whole) is not whole


def config_text(hf: PreTrainedConfig) -> str:
    """Returns all of a config but the folder it was read from, as text: the key of what is worked
    out once for each config, such as that of a model and of the reference beside it.
    """
    values = {name: value for name, value in hf.to_dict().items() if name != "_name_or_path"}
    return json.dumps([hf.model_type, values], sort_keys=True, default=str)


def layer_types_of(text: Any) -> list[str]:
    """Returns the kind of each layer of a language model, in the words of its config; [] where the
    config does not say it.
    """
    return getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []


def layer_size(text: Any, name: str) -> int | None:
    """Returns a size of a language model's layers by the name of its field, the largest where
    layers differ (Gemma 3n and 4); None where the config has none.
    """
    try:
        found = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to give one of several
        whole = text.to_dict()
        own = (layer.get(name) for layer in whole.get("per_layer_config", {}).values())
        found = [size for size in (whole.get(name), *own) if size is not None]
    return max(found) if isinstance(found, list) else found


def head_size(text: Any) -> int:
    """Returns the width of a language model's attention heads, the largest where layers differ."""
    return layer_size(text, "head_dim") or text.hidden_size // text.num_attention_heads


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
    """Raises ConfigError where the model has none, or only its own code could load it.

    transformers makes some kinds of tokenizers without any file, with special tokens alone: of
    Qwen's a text has no token then, of Gemma's each text is <unk>.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        if len(tokenizer) > len(set(tokenizer.all_special_ids)):
            return tokenizer
        files = ", ".join(dict.fromkeys(tokenizer.vocab_files_names.values()))
        reason = f"it has no token but special ones. Copy its files ({files}) to the model's folder"
    except UNREADABLE as error:
        reason = reason_of(error)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises nothing more specific
            raise
        reason = str(error)
    raise ConfigError(f"model: {model!r} has no tokenizer that loads: {reason}")
