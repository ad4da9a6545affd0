"""Sequence classifiers with one output, which is a reward.

They are loaded as such, or begun from a causal language model: its backbone, and a score of zeros.
"""

from __future__ import annotations

import torch.nn as nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp.model import build_model
from spmdrl.hub.hf_folder import load_hf_config, meta_model
from spmdrl.hub.transformers_compat import has_model_class
from spmdrl.hub.vision_classifiers import register_classifier

SUFFIX = "ForSequenceClassification"


def is_classifier(hf: PreTrainedConfig) -> bool:
    return any(name.endswith(SUFFIX) for name in hf.architectures or ())


def classifier_config(model: str) -> PreTrainedConfig:
    """Returns the config of the classifier that the model is, or that is begun from it. Raises
    ConfigError.
    """
    hf = load_hf_config(model)
    register_classifier(hf)
    if is_classifier(hf):
        return hf
    if not has_model_class(AutoModelForSequenceClassification, type(hf)):
        raise ConfigError(
            f"model: {model!r}: transformers has no sequence classifier of type {hf.model_type!r}"
        )
    hf.num_labels = 1
    hf.architectures = [type(meta_classifier(hf)).__name__]
    return hf


def build_classifier(model: str, full: bool) -> PreTrainedModel:
    """Builds a classifier, as build_model builds a language model. A score that the model does not
    have yet is 0. Raises ConfigError.
    """
    is_there = is_classifier(load_hf_config(model))
    hf = build_model(
        model, full, has_head=is_there, auto=AutoModelForSequenceClassification,
        config=classifier_config(model),
    )  # fmt: skip
    if full and not is_there:
        for parameter in hf.get_submodule("score").parameters():
            nn.init.zeros_(parameter)
    return hf


def meta_classifier(hf: PreTrainedConfig) -> PreTrainedModel:
    """Shapes and layers without memory."""
    register_classifier(hf)
    return meta_model(hf, AutoModelForSequenceClassification)


def check_classifier(name: str, model: str, hf: PreTrainedConfig) -> None:
    """Raises ConfigError unless it has one output, of a linear layer over hidden states.

    name: of the config's field that has the model. hf: its config as a classifier.
    """
    if hf.num_labels != 1:
        raise ConfigError(f"{name}={model!r} has {hf.num_labels} outputs, expected one")
    if not isinstance(getattr(meta_classifier(hf), "score", None), nn.Linear):
        raise ConfigError(
            f"{name}={model!r}: a classifier of type {hf.model_type!r} has no linear layer `score` "
            "over its hidden states, as causal language models' classifiers do; use one of these"
        )
