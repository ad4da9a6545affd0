"""Sequence classifiers of models that see images, which transformers has of few families.

They are what transformers' own are: the model without its head, and a linear score.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification

from spmdrl.hub.transformers_compat import has_model_class, model_class
from spmdrl.hub.vision_families import FAMILIES

SUFFIX = "ForSequenceClassification"


def register_classifier(config: PreTrainedConfig) -> None:
    """Has AutoModelForSequenceClassification know a class for the config of a model that sees
    images, if it knows none. Its weights on disk have the names of the model with its head.
    """
    kind = type(config)
    if config.model_type not in FAMILIES or has_model_class(
        AutoModelForSequenceClassification, kind
    ):
        return
    seeing: Any = model_class(AutoModelForImageTextToText, kind)
    base = next(each for each in seeing.__mro__[1:] if issubclass(each, PreTrainedModel))
    name = seeing.__name__.replace("ForConditionalGeneration", SUFFIX)
    bases = (GenericForSequenceClassification, base)
    made = type(name, bases, {"__module__": base.__module__})
    conversions = get_checkpoint_conversion_mapping(seeing.__name__)
    if conversions is not None:
        register_checkpoint_conversion_mapping(name, conversions, overwrite=True)
    AutoModelForSequenceClassification.register(kind, made, exist_ok=True)
