"""Whether engine fsdp can train a kind of model, by a trial of a tiny copy of its layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from transformers import AutoModelForCausalLM, PreTrainedConfig

from spmdrl.config import ConfigError, require
from spmdrl.config.words import counted
from spmdrl.engines.fsdp.per_sequence_layers import ATTENTION
from spmdrl.engines.fsdp.trial import CannotShrink, Trial, try_packing
from spmdrl.hub.hf_folder import (
    config_text,
    has_language_model,
    layer_types_of,
    load_hf_config,
    sees_images,
)
from spmdrl.hub.transformers_compat import is_stateful, model_class, takes_attention_functions

TRIED: dict[str, Trial] = {}  # in this process, by the whole config as text


def check_packing(hf: PreTrainedConfig) -> Trial | None:
    """Tries a tiny copy of a model's layers; a second time it knows what it found.

    Returns None for a model with images, which is not tried. Raises ConfigError where the layers
    mix the sequences of a packed row or do not run on one, and CannotShrink where it cannot try
    layers that are attention alone. Others that it cannot try are refused too.
    """
    if sees_images(hf):
        return None
    require(
        has_language_model(hf),
        f"engine 'fsdp' has no model type {hf.model_type!r}: transformers has no class of its "
        "language model alone, and its images or sounds are not understood here",
    )
    key = config_text(hf)
    if key not in TRIED:
        try:
            TRIED[key] = try_packing(hf)
        except CannotShrink as error:
            require_attention(hf, str(error))
            raise
    return TRIED[key]


def require_attention(hf: PreTrainedConfig, reason: str) -> None:
    """Raises ConfigError for a model that could not be tried and has layers that may mix packed
    sequences: all but attention.
    """
    text: Any = hf.get_text_config()
    own = model_class(AutoModelForCausalLM, type(text))
    others = {*layer_types_of(text)} - ATTENTION
    if is_stateful(own) or others or not takes_attention_functions(own):
        raise ConfigError(
            f"engine 'fsdp' cannot train model type {hf.model_type!r}: its layers may mix packed "
            f"sequences, or carry a state from one into the next, and it could not be tried: "
            f"{reason}"
        )


def trial_lines(models: Sequence[str]) -> list[str]:
    """Tries each model and returns lines for people. models: folders or hub ids. Raises ConfigError
    as check_packing does.
    """
    lines = []
    for model in dict.fromkeys(models):
        hf, start = load_hf_config(model), time.monotonic()
        kind = hf.get_text_config().model_type
        try:
            trial = check_packing(hf)
        except CannotShrink as error:
            lines.append(f"  {kind}: not tried: {error}")
            continue
        if trial is None:
            lines.append(f"  {kind}: not tried, its tiny copy would need images")
            continue
        lines.append(
            f"  {kind}: {counted(trial.num_layers, 'tiny layer')} on packed sequences and on each "
            "alone: "
            f"log-probabilities differ by {trial.logprobs:.1g}, gradients by "
            f"{trial.gradients:.1g} of themselves ({time.monotonic() - start:.1f} s)"
        )
    return ["layers, tried on this machine", *lines] if lines else []
