"""Reads the multi-token prediction layers of a model's files, which RL does not sample.

DeepSeek-V3, GLM-4.5 and others have them after the last layer, as model.layers.61 of 61 layers and
so on (num_nextn_predict_layers of config.json); Qwen3.5 under "mtp.". transformers leaves them
out of the models that it builds. An export takes them from the folder that the run started from.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from spmdrl.hub.quantized_weights import Part, Quantized, quantized_weights
from spmdrl.hub.safetensors_files import INDEX
from spmdrl.hub.transformers_compat import checkpoint_files

# by the end of a name in such a layer: what of the model it is a copy of (arXiv 2412.19437, 2.2)
COPIES = {
    ".embed_tokens.weight": "model.embed_tokens.weight",
    ".shared_head.head.weight": "lm_head.weight",
}
APART = re.compile(r"(model\.)?mtp\.")


def num_mtp_layers(config: PreTrainedConfig) -> int:
    """Returns how many of these layers config.json says that there are."""
    text: Any = config.get_text_config()
    fields = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
    return next((count for name in fields if (count := getattr(text, name, None))), 0)


def is_mtp(name: str, config: PreTrainedConfig) -> bool:
    """Says whether a tensor of the files is of such a layer."""
    text: Any = config.get_text_config()
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return bool(APART.match(name)) or (
        layer is not None and int(layer[1]) >= text.num_hidden_layers
    )


def has_mtp_tensors(folder: Path, config: PreTrainedConfig) -> bool:
    """Says whether the safetensors files of a folder have tensors of such layers: True too where
    there are no files, which is for others to say.
    """
    single, index = Path(folder, "model.safetensors"), Path(folder, INDEX)
    if single.is_file():  # before an index, as transformers reads
        with safe_open(single, "pt") as file:
            names = list(file.keys())
    elif index.is_file():
        names = list(json.loads(index.read_text())["weight_map"])
    else:
        return True
    return any(is_mtp(name, config) for name in names)


def copies_beside(names: Iterable[str], config: PreTrainedConfig) -> dict[str, str]:
    """Returns the copies of the model's own tensors that published files have in each of such
    layers under model.layers, with the names of what they are copies of. names: what is trained.
    """
    layers = {re.match(r"(model\.layers\.\d+)\.", name) for name in names if is_mtp(name, config)}
    found = sorted({layer[1] for layer in layers if layer is not None})
    return {layer + end: own for layer in found for end, own in COPIES.items()}


class MtpTensors:
    """The tensors of these layers; those that are quantised are read in float32."""

    def __init__(self, model: str, config: PreTrainedConfig) -> None:
        """model: a folder or a hub id. Raises OSError where it has no files."""
        self.paths: dict[str, str] = {}
        stored: dict[str, tuple[int, ...]] = {}
        for path in checkpoint_files(model, config):
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118  it is no mapping
                    if is_mtp(name, config):
                        self.paths[name] = path
                        stored[name] = tuple(file.get_slice(name).get_shape())
        self.quantized: dict[str, Quantized]
        self.quantized, parts = quantized_weights(stored, config)
        self.shapes = {name: shape for name, shape in stored.items() if name not in parts}
        self.shapes |= {name: quantized.shape for name, quantized in self.quantized.items()}

    @property
    def copies(self) -> dict[str, str]:
        """Returns the tensors that are copies of the model's own, with the names of these."""
        return {
            name: own for name in self.shapes for end, own in COPIES.items() if name.endswith(end)
        }

    def read(self, name: str) -> Tensor:
        if name in self.quantized:
            return self.quantized[name].read(self.stored, None)
        return self.stored(name)

    def dtype(self, name: str) -> torch.dtype:
        """Returns that of a tensor that is not quantised."""
        return self.stored(name, (slice(0, 0),) if self.shapes[name] else None).dtype

    def stored(self, name: str, part: Part = None) -> Tensor:
        with safe_open(self.paths[name], "pt") as file:
            found = file.get_slice(name)
            return found[...] if part is None else found[part]
