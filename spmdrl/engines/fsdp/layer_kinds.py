"""Limits of a model's kinds of layers: a prefix that is computed once, tokens that ranks share."""

from __future__ import annotations

from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from spmdrl.config import ConfigError, TrainConfig
from spmdrl.engines.fsdp.per_sequence_layers import is_recurrent, is_sparse
from spmdrl.hub.hf_folder import (
    config_text,
    has_language_model,
    layer_types_of,
    meta_model,
    sees_images,
)
from spmdrl.hub.tiny_config import FAILURES, tiny_config
from spmdrl.hub.transformers_compat import model_class, takes_attention_functions

FOUND: dict[str, list[str]] = {}  # in this process, by the whole config as text


def per_sequence_layers(hf: PreTrainedConfig) -> list[str]:
    """Returns the class names of a model's layers that are given each sequence by itself. They are
    looked for in a tiny copy without data; of one that cannot be shrunk, in the model's own shell.
    """
    key = config_text(hf)
    if key not in FOUND:
        text: Any = hf.get_text_config()
        alone = has_language_model(text)
        config, auto = (text, AutoModelForCausalLM) if alone else (hf, None)
        try:
            shell = meta_model(tiny_config(config), auto)
        except FAILURES:
            shell = meta_model(config, auto)
        FOUND[key] = sorted(
            {type(m).__name__ for m in shell.modules() if is_recurrent(m) or is_sparse(m)}
        )
    return FOUND[key]


def prefix_obstacle(role: TrainConfig, strict: bool, hf: PreTrainedConfig) -> str | None:
    """Returns why a role cannot compute a shared prefix once; None where it can.

    hf: of the role's model. strict: the role's log-probabilities are the engine's bit for bit.
    """
    if role.engine != "fsdp":
        return f"engine {role.engine!r} counts a token's position from the begin of its own run"
    if strict:
        return "with strict=True a token has the same bits in any company, and is computed in each"
    if sees_images(hf):
        return f"model type {hf.model_type!r} sees images, whose places are those in whole prompts"
    apart = per_sequence_layers(hf)
    if apart:
        return f"{apart[0]} is given each sequence of model type {hf.model_type!r} by itself"
    if "chunked_attention" in layer_types_of(hf.get_text_config()):
        return f"model type {hf.model_type!r} has attention in chunks of a whole sequence"
    model: Any = model_class(AutoModelForCausalLM, type(hf))
    if model is not None and not takes_attention_functions(model):
        return f"the layers of model type {hf.model_type!r} compute attention by themselves"
    return None


def shares_prefixes(role: TrainConfig, strict: bool, hf: PreTrainedConfig) -> bool:
    """Says whether a role computes a shared prefix once (TrainConfig.shared_prefix)."""
    return role.shared_prefix is not False and prefix_obstacle(role, strict, hf) is None


def check_tokens_shared(hf: PreTrainedConfig, ulysses: int) -> None:
    """Raises ConfigError where ranks were to share the tokens of layers that need all of them."""
    apart = per_sequence_layers(hf) if ulysses > 1 else []
    if apart:
        raise ConfigError(
            f"ulysses={ulysses}: {apart[0]} of model type {hf.model_type!r} is given each sequence "
            "whole, of which a rank would have a part; use ulysses=1"
        )
