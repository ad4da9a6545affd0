"""The private APIs of peft and Liger Kernel that the FSDP engine uses.

Checked with peft 0.21.2 and liger-kernel 0.8.5. When one of them moves,
tests/hub/test_transformers_compat.py says what broke.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def turn_adapter(layer: Any, off: bool) -> None:
    """Has a LoraLayer compute W x alone, or with its adapter again. Writes its _disable_adapters:
    the public switch would freeze A and B too.
    """
    layer._disable_adapters = off


def set_variant(
    layer: Any, compute: Callable[[Any, Tensor, Tensor], Tensor], adapter: str = "default"
) -> None:
    """Has a LoraLayer, its adapter being on, return compute(layer, x, y) in place of
    y + scale B A x, where y is W x + bias and what earlier adapters of the layer have added. Writes
    its lora_variant, which peft calls likely to change.
    """

    class Variant:
        @staticmethod
        def forward(
            module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
        ) -> Tensor:
            return compute(module, x, result)

    layer.lora_variant[adapter] = Variant


def liger_model_types() -> set[str]:
    """Returns the model types that Liger has kernels for. Reads
    monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.
    """
    from liger_kernel.transformers import monkey_patch

    return set(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN)


def apply_liger(model: Any, **settings: bool) -> None:
    """Gives one model, and for the time being its whole module, Liger's layers. Calls
    monkey_patch._apply_liger_kernel_to_instance.
    """
    from liger_kernel.transformers import monkey_patch

    monkey_patch._apply_liger_kernel_to_instance(model, **settings)


def taken_for_experts(model_type: str) -> set[str]:
    """Returns the ends of layers' names that peft takes for those of routed experts, which
    transformers keeps in one tensor: of such a model it adapts no other layer of that name, a
    shared expert's for example. Reads _MODEL_TO_CONVERSION_PATTERN and _MOE_TARGET_MODULE_MAPPING
    of peft.utils.transformers_weight_conversion.
    """
    from peft.utils import transformers_weight_conversion as conversion

    pattern = conversion._MODEL_TO_CONVERSION_PATTERN.get(model_type) or ""
    return {*conversion._MOE_TARGET_MODULE_MAPPING.get(pattern, {})}
