"""Counts the parameters of a model and of its parts on the meta device: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from spmdrl.config import TrainConfig
from spmdrl.engines.fsdp.classifier import classifier_config, meta_classifier
from spmdrl.engines.fsdp.expert_adapters import factor_shapes, target_stacks
from spmdrl.engines.fsdp.experts import expert_modules
from spmdrl.engines.fsdp.lora import target_layers
from spmdrl.engines.fsdp.model import decoder_layers
from spmdrl.engines.fsdp.optimizers import state_bytes
from spmdrl.engines.fsdp.source_adapters import names_of
from spmdrl.hub.hf_folder import load_hf_config, meta_model, sees_images, towers
from spmdrl.weights.checkpoint_names import checkpoint_parts


@dataclass(frozen=True)
class ModelShape:
    """The numbers of parameters of a model and of its parts."""

    kind: str  # "policy", "value" or "reward"
    hf: PreTrainedConfig
    shell: PreTrainedModel  # the model on the meta device
    count: int
    layer: int  # of the largest decoder layer, which FSDP gathers at once
    matrix: int  # vocabulary x hidden size: the embedding, or the head
    has_head: bool  # the head has weights of its own, apart from the embedding's
    experts: int  # of all routed experts that transformers keeps in stacked weights
    layer_experts: int  # those of the layer that has most
    known: dict[Any, float] = field(default_factory=dict, compare=False)  # what was counted before

    @property
    def text(self) -> Any:
        """The config of the language model, without that of a vision tower."""
        return self.hf.get_text_config()

    @cached_property
    def towers(self) -> list[nn.Module]:
        """Returns what the model has beside its language model."""
        return towers(self.shell) if sees_images(self.hf) else []

    @cached_property
    def language_layers(self) -> list[nn.Module]:
        """Returns the layers of the language model."""
        others = {module for tower in self.towers for module in tower.modules()}
        return [layer for layer in decoder_layers(self.shell) if layer not in others]

    @cached_property
    def tower_layers(self) -> list[nn.Module]:
        """Returns the layers of its towers for images, and what cannot be split beside them."""
        return [layer for layer in decoder_layers(self.shell) if layer not in self.language_layers]

    @property
    def matrices(self) -> int:
        """Says how many matrices of the vocabulary's size there are."""
        return 2 if self.has_head else 1


def shape_of(model: str, kind: str = "policy") -> ModelShape:
    """Counts a model by its folder or hub id. kind: "policy", "value" or "reward".

    A model is counted once per process, unless its config.json has changed since.
    """
    file = Path(model, "config.json")
    changed_at = file.stat().st_mtime_ns if file.is_file() else 0
    return _shape_of(model, kind, changed_at)


@lru_cache(maxsize=32)
def _shape_of(model: str, kind: str, changed_at: int) -> ModelShape:
    hf = classifier_config(model) if kind == "reward" else load_hf_config(model)
    shell = meta_classifier(hf) if kind == "reward" else meta_model(hf)
    text: Any = hf.get_text_config()
    matrix, head = text.vocab_size * text.hidden_size, shell.get_output_embeddings()
    tied = head is not None and head.weight is shell.get_input_embeddings().weight
    count = parameters_in(shell)
    if kind == "value":  # the backbone with a head of one output
        count += text.hidden_size + 1 - (0 if tied else matrix)
    layer = max(parameters_in(layer) for layer in decoder_layers(shell))
    has_head = kind == "policy" and not tied
    experts = [
        sum(parameters_in(module) for module in expert_modules(layer))
        for layer in decoder_layers(shell)
    ]
    return ModelShape(
        kind, hf, shell, count, layer, matrix, has_head, sum(experts), max(experts)
    )  # fmt: skip


def parameters_in(module: nn.Module) -> int:
    return sum(prod(p.shape) for p in module.parameters())


def optimizer_bytes(shape: ModelShape, name: str) -> float:
    """Returns the bytes that the optimizer `name` keeps of all weights of the model."""
    if name not in shape.known:
        parts = checkpoint_parts(shape.hf) if name == "muon" else {}
        whole = state_bytes(shape.shell, parts, name)
        # of a critic too, whose head is another
        shape.known[name] = whole * shape.count / parameters_in(shape.shell)
    return shape.known[name]


def layers_in_float32(shape: ModelShape, role: TrainConfig) -> int:
    """Returns the weights of the largest layer, of which DoRA measures the rows in float32; 0
    without it.
    """
    if role.lora is None or not role.lora.use_dora:
        return 0
    return max(adapted_weights(shape.hf, role), default=0)


def quantized_weights(shape: ModelShape, role: TrainConfig) -> tuple[int, int]:
    """Returns how many weights of a role's base are held in 4 bits (lora.quantization), and how
    many the largest of these layers has.
    """
    if role.lora is None or role.lora.quantization is None:
        return 0, 0
    weights = adapted_weights(shape.hf, role)
    return sum(weights), max(weights)


def adapter_parameters(shape: ModelShape, role: TrainConfig) -> int:
    """Returns the number of parameters of all of a role's adapters."""
    key = (role.lora, role.freeze_vision)
    if key not in shape.known:
        shape.known[key] = adapter_count(shape.hf, role)
    return int(shape.known[key])


def adapted_weights(config: PreTrainedConfig, role: TrainConfig) -> list[int]:
    """Returns how many weights each linear layer has that is given an adapter."""
    assert role.lora is not None
    model: Any = meta_model(config)
    names = target_layers(model, role.lora, role.freeze_vision)
    return [model.get_submodule(name).weight.numel() for name in names]


def adapter_count(config: PreTrainedConfig, role: TrainConfig) -> int:
    """Parameters of all of a role's adapters on a model."""
    assert role.lora is not None
    model: Any = meta_model(config)
    names = target_layers(model, role.lora, role.freeze_vision)
    layers = [model.get_submodule(name) for name in names]
    pairs = sum(role.lora.rank * (layer.in_features + layer.out_features) for layer in layers)
    for stack in target_stacks(model, role.lora):
        pairs += sum(prod(s) for s in factor_shapes(model, stack, role.lora.rank))
    pairs *= len(names_of(role.lora))
    return pairs + (sum(layer.out_features for layer in layers) if role.lora.use_dora else 0)
