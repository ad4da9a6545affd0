"""The models with a tower for images that engine megatron trains, each as one declaration.

The language model is a Family of families.py, and the tower is transformers' own module
(vision.py). What differs between models is how their checkpoints name both, and how many layers of
the language model are given vectors of the tower.

Needs no megatron-core: a dry run reads it without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.hub import vision_families
from spmdrl.hub.hf_folder import sees_images, text_config
from spmdrl.hub.language_model import language_key

# what transformers' models have beside their language model; a chunk has them by the same names
PARTS = ("visual", "vision_tower", "multi_modal_projector")


@dataclass(frozen=True)
class Tower:
    """Says how the checkpoints of a model with a tower name its weights.

    prefix: what stands before the names of the tower's parts. language: what the language model's
    names begin with, by what they begin with where it has no tower. deepstack: how many of its
    first layers are given vectors of the tower of their own (Qwen3-VL, arXiv 2511.21631), by the
    tower's config.
    """

    prefix: str = ""
    language: Mapping[str, str] = field(default_factory=dict)
    deepstack: Callable[[Any], int] = lambda vision: 0


QWEN2_VL = Tower()
INSIDE = Tower("model.", {"model.": "model.language_model."})
DEEPSTACK = Tower(
    INSIDE.prefix, INSIDE.language, lambda vision: len(vision.deepstack_visual_indexes)
)
BESIDE = Tower(
    "", {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
)  # fmt: skip

TOWERS: dict[str, Tower] = {  # by transformers' model type of the whole model
    "qwen2_vl": QWEN2_VL, "qwen2_5_vl": QWEN2_VL,
    "qwen3_vl": DEEPSTACK, "qwen3_vl_moe": DEEPSTACK,
    "qwen3_5": INSIDE, "qwen3_5_moe": INSIDE,
    "glm4v": INSIDE, "glm4v_moe": INSIDE, "glm46v": INSIDE,
    "gemma3": BESIDE, "internvl": BESIDE, "mistral3": BESIDE,
}  # fmt: skip


def untrained_tower(hf_config: PreTrainedConfig) -> str | None:
    """Returns why the tower of a model that sees images is not trained here; None where it is."""
    text, kind = hf_config.get_text_config().model_type, hf_config.model_type
    if text not in FAMILIES:
        return f"its language model ({text!r}) is no architecture that engine megatron maps"
    if kind not in TOWERS:
        return f"engine megatron does not map the names that files of {kind!r} have for its tower"
    return None


def has_trained_tower(hf_config: PreTrainedConfig) -> bool:
    """Says whether it is the config of a model that sees images whose tower is built here too."""
    return sees_images(hf_config) and untrained_tower(hf_config) is None


def language_part(hf_config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns what megatron-core builds: of a model with a tower the language model's config, which
    knows that of the whole model (`seeing_config`).
    """
    if not has_trained_tower(hf_config):
        return hf_config
    text: Any = text_config(hf_config)
    text.seeing_config = hf_config
    return text


def seeing_config(hf_config: PreTrainedConfig) -> Any:
    """Returns the config of the whole model, of a language model's that `language_part` gave; None
    where the model has no tower.
    """
    return getattr(hf_config, "seeing_config", None)


def deepstack_layers(hf_config: PreTrainedConfig) -> int:
    """Returns how many layers of a language model are given vectors of the tower of their own."""
    whole = seeing_config(hf_config)
    return 0 if whole is None else TOWERS[whole.model_type].deepstack(whole.vision_config)


def looks_ahead(hf_config: PreTrainedConfig) -> bool:
    """Says whether an image's tokens see each other in the language model, also those behind."""
    whole = seeing_config(hf_config)
    if whole is None:
        return False
    return vision_families.FAMILIES[whole.model_type].looks_ahead(whole) is not None


def mrope_axes(hf_config: PreTrainedConfig, count: int) -> list[int] | None:
    """Returns for each of `count` rotary frequencies whether its angle is of a token's position in
    time (0), height (1) or width (2); None where tokens have one position.
    """
    mrope, section = FAMILIES[hf_config.model_type].mrope, mrope_section(hf_config)
    return None if mrope is None or not section else mrope.axes(section, count)


def mrope_section(hf_config: PreTrainedConfig) -> list[int]:
    """Returns how many rotary frequencies are of the time, the height and the width; [] where
    tokens have one position.
    """
    config: Any = hf_config
    mrope = FAMILIES[config.model_type].mrope
    if mrope is None or seeing_config(config) is None:
        return []
    return list(config.rope_parameters.get("mrope_section", mrope.section))


# ---- names


def stored_name(hf_config: PreTrainedConfig, name: str) -> str:
    """Returns how a model's checkpoints name a weight. name: as `own_name` gives it."""
    whole = seeing_config(hf_config)
    if whole is None:
        return name
    tower = TOWERS[whole.model_type]
    if is_of_tower(name):
        return tower.prefix + name
    for start, there in tower.language.items():
        if name.startswith(start):
            return there + name.removeprefix(start)
    return name


def own_name(name: str) -> str:
    """Returns a weight's name without what checkpoints put before it: a part of the tower comes
    first, and the language model's weights are named as in a model without a tower.
    """
    inside = name.removeprefix("model.")
    if is_of_tower(inside):
        return inside.replace("vision_tower.vision_model.", "vision_tower.", 1)  # Gemma 3's
    return language_key(name) or name


def is_of_tower(name: str) -> bool:
    return name.split(".", 1)[0] in PARTS
