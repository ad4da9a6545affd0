"""Linear layers that multiply in FP8 while they are trained, through torchao (TrainConfig.fp8).

torchao's Float8Linear rounds both factors of each of its three products (output, gradient of the
input, gradient of the weight) to 8 bits just before it multiplies them, by a scale that it finds in
the values themselves: 448 / amax for e4m3, 57344 / amax for e5m2 (Micikevicius et al. 2022, arXiv
2209.05433). Weights and gradients stay what they are without it, in the same tensors with the same
names, so that nothing else of the engine knows of it.

| recipe | output | gradient of the input | gradient of the weight |
|---|---|---|---|
| tensorwise | a scale for each tensor, e4m3 | the same, the gradient in e5m2 | the same |
| rowwise | a scale for each row, e4m3 | a scale for each row | a scale for each row |
| rowwise_with_gw_hp | as rowwise | as rowwise, a scale for the whole weight | in bfloat16 |
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from torch import nn
from transformers import PreTrainedModel

from spmdrl.config import ConfigError
from spmdrl.distributed.env import show_package
from spmdrl.engines.fsdp.model import decoder_layers
from spmdrl.engines.fsdp.per_sequence_layers import is_recurrent

# Scales are rounded down to powers of two with every recipe; torchao's own tensorwise has others.
# With these a value is rounded alike under every scale, unless it is so much smaller than the
# largest one that FP8 has fewer bits for it: what stands beside it in a micro-batch counts less.
POWERS_OF_TWO = True
MULTIPLE = 16  # of both widths of a layer: torch._scaled_mm takes no others
# the recipe whose gradient of a weight is no product in FP8: nothing is as long as the tokens
WEIGHT_GRADIENT_IN_BFLOAT16 = "rowwise_with_gw_hp"


def fp8_layers(hf: PreTrainedModel) -> dict[str, nn.Linear]:
    """Returns the layers that TrainConfig.fp8 is about, by their names: the linear ones of the
    decoder layers, both widths of which are multiples of 16.

    Head, embedding and what has other widths stay in the role's dtype. So do the layers of a mixer
    that keeps a state (Mamba, gated delta net): some of them make the state's decays and gates, and
    fused kernels take the weights of others without calling them.
    """
    inside = {part for layer in decoder_layers(hf) for part in layer.modules()}
    inside -= {part for mixer in hf.modules() if is_recurrent(mixer) for part in mixer.modules()}
    return {
        name: part for name, part in hf.named_modules()
        if part in inside and type(part) is nn.Linear
        and part.in_features % MULTIPLE == 0 and part.out_features % MULTIPLE == 0
    }  # fmt: skip


def use_fp8(hf: PreTrainedModel, recipe: str) -> None:
    """Puts torchao's Float8Linear in the place of the layers of `fp8_layers`, before the model is
    sharded. The parameters stay the same objects.

    A product of FP8 sums over a multiple of 16, and a micro-batch has any number of tokens: where
    the gradient of a weight, which sums over tokens, is in FP8, torchao pads with zeros.
    """
    require_torchao(f"fp8={recipe!r}")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    chosen = fp8_layers(hf)
    config = replace(
        Float8LinearConfig.from_recipe_name(recipe),
        round_scales_to_power_of_2=POWERS_OF_TWO,
        pad_inner_dim=recipe != WEIGHT_GRADIENT_IN_BFLOAT16,
    )
    convert_to_float8_training(
        hf, config=config, module_filter_fn=lambda module, name: name in chosen
    )


def require_torchao(asked: str) -> None:
    """Raises ConfigError where torchao is not installed. before_torch has hidden it until now."""
    show_package("torchao.float8")
    if find_spec("torchao") is None:
        raise ConfigError(f"{asked}, but torchao is not installed: pip install torchao")
