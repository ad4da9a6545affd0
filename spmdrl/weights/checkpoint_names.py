"""Finds what a checkpoint calls the parameters of a transformers model, and the parts of them.

transformers keeps the experts of a layer in one tensor. Checkpoints have each expert's matrices by
themselves, and so do vLLM's loader and engine megatron: that is how weights are named here.

    model.layers.0.mlp.experts.gate_up_proj    (num_experts, 2 * width, hidden)
      [3, :width]  is  model.layers.0.mlp.experts.3.gate_proj.weight    (width, hidden)
      [3, width:]  is  model.layers.0.mlp.experts.3.up_proj.weight
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights

from spmdrl.config import ConfigError
from spmdrl.distributed.torch_compat import TorchDispatchMode, storage_id
from spmdrl.hub.hf_folder import auto_class
from spmdrl.weights.boxes import Box, box_of, view, whole
from spmdrl.weights.buffers import kept_tensors

ADAPTER = (".lora_A.weight", ".lora_B.weight")  # after the name of a layer
STACKED = ("experts.gate_up_proj", "experts.down_proj")  # all experts' in one


# the same of one of several adapters, <layer>.lora_A.<name>.weight
OF_NAMED = re.compile(r"^(.+)\.lora_([AB])(?:\.([^.]+))?\.weight$")


class AdapterPart(NamedTuple):
    """Holds what the name of an adapter's weight says."""

    layer: str
    kind: str  # "A" | "B"
    adapter: str  # "" where there are not several


def adapter_parts(adapter: str = "") -> tuple[str, str]:
    """Returns what follows on a layer's name in those of A and B of an adapter."""
    within = f".{adapter}" if adapter else ""
    return f".lora_A{within}.weight", f".lora_B{within}.weight"


def adapter_part(name: str) -> AdapterPart | None:
    """Reads the name of an adapter's weight; None of another weight."""
    found = OF_NAMED.match(name)
    return None if found is None else AdapterPart(found[1], found[2], found[3] or "")


def is_adapter(name: str) -> bool:
    return adapter_part(name) is not None


class SubTensor(NamedTuple):
    """A part of a parameter that is a tensor of its own in a checkpoint."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]  # there: dimensions of size 1 may be left out
    box: Box  # of the parameter

    @property
    def axes(self) -> list[int]:
        """Returns the parameter's axes that the checkpoint's tensor has too."""
        found: list[int] = []
        for axis, (first, last) in enumerate(self.box):
            if len(found) < len(self.shape) and last - first == self.shape[len(found)]:
                found.append(axis)
        assert len(found) == len(self.shape), self
        return found

    def inside(self, box: Box) -> Box:
        """Returns which part of the checkpoint's tensor a box of the parameter is; it must lie
        within this one.
        """
        return tuple(
            (box[axis][0] - self.box[axis][0], box[axis][1] - self.box[axis][0])
            for axis in self.axes
        )

    def of(self, parameter: Tensor) -> Tensor:
        return view(parameter, whole(parameter.shape), self.box).view(self.shape)


Parts = Mapping[str, Sequence[SubTensor]]  # of each parameter that a checkpoint has in another form


def checkpoint_name(name: str, shape: Sequence[int], parts: Parts) -> str | None:
    """A parameter's in a checkpoint; None where it is not there as one tensor of that shape."""
    mine = parts.get(name)
    if mine is None:
        return name
    return mine[0].name if len(mine) == 1 and mine[0].shape == tuple(shape) else None


def checkpoint_parts(config: PreTrainedConfig) -> Parts:
    """Returns what save_pretrained makes of the parameters that it does not write as they are.

    It is run on a model without data. Raises ConfigError where a parameter of the checkpoint is not
    simply a part of one of the model's, so that it could not be sent from where it lies.
    """
    with torch.device("meta"), no_init_weights():
        model: Any = auto_class(config).from_config(copy.deepcopy(config))
    kept = kept_tensors(model)
    given = {name: torch.empty(tensor.shape, device="meta") for name, tensor in kept.items()}
    owners = {storage_id(tensor): name for name, tensor in given.items()}
    with _Views():
        written = revert_weight_conversion(model, dict(given))
    parts: dict[str, list[SubTensor]] = {}
    for name, tensor in written.items():
        owner = owners.get(storage_id(tensor))
        box = box_of(tensor, given[owner]) if owner is not None else None
        if owner is None or box is None:
            raise ConfigError(
                f"model {config.name_or_path}: a checkpoint's {name} is more than a part of what "
                f"transformers keeps for {config.model_type}; engine fsdp cannot hand it over"
            )
        parts.setdefault(owner, []).append(SubTensor(name, tuple(tensor.shape), box))
    return {owner: mine for owner, mine in parts.items() if [part.name for part in mine] != [owner]}


def is_turned(kind: str, name: str) -> bool:
    """Says whether the published checkpoints of a model type have a tensor with its last two axes
    the other way round than transformers keeps and writes it: of Qwen3-VL-MoE's experts. vLLM reads
    the published form alone; transformers reads both and tells them apart by the shape, so that it
    takes square ones for its own.
    """
    return kind == "qwen3_vl_moe" and name.endswith(STACKED)


def published_shape(kind: str, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape that published checkpoints have of a tensor; see `is_turned`."""
    turned = is_turned(kind, name)
    return (shape[0], shape[2], shape[1]) if turned else tuple(shape)


def as_published(
    kind: str, weights: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yields weights of a model type as its published checkpoints have them; see `is_turned`."""
    for name, tensor in weights:
        yield name, tensor.transpose(1, 2) if is_turned(kind, name) else tensor


def by_checkpoint_name(parts: Parts) -> dict[str, tuple[str, SubTensor]]:
    """(parameter, part) of every name that is no parameter's."""
    return {part.name: (owner, part) for owner, mine in parts.items() for part in mine}


class _Views(TorchDispatchMode):
    """Meanwhile copies of tensors are views of them: of tensors without data it makes no odds."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.clone.default:
            return torch.ops.aten.alias.default(args[0])
        return func(*args, **(kwargs or {}))
