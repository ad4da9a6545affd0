"""Model FLOP/s utilisation: what an update had to compute, over what its GPUs could have.

A token costs 6 operations per weight that it is multiplied with, 2 of them forward, and each pair
of a token and one that it attends to costs 12 per head and head dimension, of which causal
attention has half of the square of the length. The LM head is computed of tokens in the loss alone.
What is computed again (activation checkpointing) does not count, nor does what is not computed
because sequences share it. Source: PaLM, arXiv 2204.02311, appendix B.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.hub.hf_folder import head_size, meta_model, sees_images, towers

# dense bfloat16 TFLOP/s by the vendor's datasheets; the first name that the device's contains
PEAK_TFLOPS = {
    "GB200": 2500.0, "B300": 2250.0, "B200": 2250.0, "GH200": 989.0, "H200": 989.0,
    "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.0, "H800": 989.0, "H20": 148.0,
    "A100": 312.0, "A800": 312.0, "L40S": 362.0, "L40": 181.0, "L4": 121.0, "A10G": 70.0,
    "A10": 125.0, "A40": 150.0, "RTX A6000": 155.0, "RTX 6000 Ada": 364.0, "RTX 4090": 165.0,
    "MI355X": 2500.0, "MI350X": 2300.0, "MI325X": 1307.0, "MI300X": 1307.0, "MI300A": 981.0,
    "MI250X": 191.5, "MI250": 181.0, "MI210": 181.0,  # of MI250 the half that is one device
}  # fmt: skip


def peak_tflops(device: torch.device) -> float | None:
    """None on a CPU, and where the GPU is none of those above."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)


@dataclass(frozen=True)
class Flops:
    """Counts the FLOPs of a forward and a backward pass of a language model; its vision tower does
    not count.
    """

    per_token: float  # of the layers
    per_prediction: float  # of the LM head
    per_pair: float  # of a token and one that it attends to
    window: int | None  # tokens that a layer attends to at most, where all layers have one

    @classmethod
    def of_model(cls, hf: PreTrainedConfig, frozen: bool = False) -> Flops:
        """frozen: of the weights themselves no gradient is computed, as with adapters."""
        text: Any = hf.get_text_config()
        heads = text.num_attention_heads
        width = head_size(text)
        each = 2.0 + (2.0 if frozen else 4.0)
        layers, head = active_weights(hf)
        window = getattr(text, "sliding_window", None)
        kinds = set(getattr(text, "layer_types", None) or ["sliding_attention"])
        return cls(
            each * layers,
            each * head,
            12.0 * text.num_hidden_layers * heads * width,
            window if kinds == {"sliding_attention"} else None,
        )

    def of(self, seq_lens: Tensor, num_predictions: float) -> float:
        """seq_lens: (n,) int64, tokens of each sequence. num_predictions: of all, tokens in the
        loss.
        """
        lens = seq_lens.double()
        reach = lens if self.window is None else lens.clamp(max=self.window)
        pairs = reach * (lens - reach / 2)
        layers = self.per_token * float(lens.sum()) + self.per_pair * float(pairs.sum())
        return layers + self.per_prediction * num_predictions


def active_weights(hf: PreTrainedConfig) -> tuple[float, float]:
    """Counts the weights that a token is multiplied with, in the layers and in the LM head: of
    experts those that it is sent to. The embedding of the inputs is looked up.
    """
    model = meta_model(hf)
    beside = towers(model) if sees_images(hf) else []
    of_towers = {id(parameter) for tower in beside for parameter in tower.parameters()}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    of_experts = experts_per_token(hf.get_text_config())
    layers = head = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in of_towers:
            continue
        size = float(prod(parameter.shape))
        if output is not None and parameter is output.weight:
            head = size
        elif parameter is not embedding.weight:
            layers += size * (of_experts if ".experts." in name else 1.0)
    return layers, head


def experts_per_token(text: Any) -> float:
    """Returns the share of a layer's experts that a token is sent to; 1 where there are none."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    total = next((n for n in (getattr(text, name, None) for name in names) if n), None)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / total if total and chosen else 1.0
