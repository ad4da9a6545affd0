"""Adapters beside the weights of a vLLM engine: written in place; a request names its own.

vLLM keeps A and B of each layer in padded memory of its own, scale B in place of B. All are
registered when the engine is built; after that the trainer's parts are copied to where they belong
like any weight's, and nothing is loaded or swapped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from spmdrl.config import ConfigError, LoraConfig, RolloutConfig
from spmdrl.distributed.torch_compat import set_child
from spmdrl.engines.fsdp.lora import target_layers
from spmdrl.hub.hf_folder import load_hf_config, meta_model
from spmdrl.rollout.base import WeightMismatch
from spmdrl.rollout.vllm import compat
from spmdrl.rollout.vllm.model_types import untried_layers
from spmdrl.rollout.weight_check import outputs_of_fused, rank_outputs, rows_in_fused
from spmdrl.weights.boxes import Box, sizes, view, whole
from spmdrl.weights.checkpoint_names import AdapterPart, adapter_part, is_adapter
from spmdrl.weights.engine_layout import Layout, ParamView

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has memory for; smaller ones are padded
FIRST_ID = 1  # of the first adapter in vLLM; the others follow
AXES = {"A": 1, "B": 0}  # along which tensor parallelism cuts them


def check_adapter(lora: LoraConfig, config: RolloutConfig, hf: Any) -> None:
    """hf: the text model's config. Raises ConfigError where an adapter cannot be sent by itself."""
    asked = "weights.lora='adapter'"
    remedy = "weights.lora='merge' sends weights with the adapter in them"
    if config.quantization is not None:
        raise ConfigError(
            f"{asked} does not go with rollout.quantization={config.quantization!r}: the base "
            f"would be in FP8 and the adapter not; {remedy}"
        )
    if lora.use_dora:
        raise ConfigError(
            f"{asked}: vLLM's layers have no memory for the magnitudes of actor.lora.use_dora; "
            f"{remedy}"
        )
    if lora.quantization is not None:
        raise ConfigError(
            f"{asked} with actor.lora.quantization={lora.quantization!r}: vLLM would be sent a "
            f"base that is rounded to 4 bits, in {config.dtype}; {remedy}"
        )
    if config.speculative:
        raise ConfigError(f"{asked} was not tried with rollout.speculative; {remedy}")
    untried = untried_layers(hf)
    if untried is not None:
        raise ConfigError(f"{asked} was not tried with {untried}; {remedy}")
    if lora.rank > RANKS[-1]:
        raise ConfigError(f"{asked}: vLLM takes ranks up to {RANKS[-1]}, not {lora.rank}; {remedy}")
    if any(getattr(hf, name, None) for name in ("num_experts", "num_local_experts",
                                                "n_routed_experts")):  # fmt: skip
        raise ConfigError(f"{asked} is for dense models: this one has experts; {remedy}")


def engine_args(lora: LoraConfig, model: str) -> dict[str, Any]:
    """Returns the arguments of EngineArgs for the adapters."""
    layers = target_layers(meta_model(load_hf_config(model)), lora)
    leaves = sorted({name.rpartition(".")[2] for name in layers})
    return {
        "enable_lora": True,
        "max_loras": max(1, len(lora.names)),
        "max_lora_rank": next(rank for rank in RANKS if rank >= lora.rank),
        "lora_target_modules": leaves,
    }


class Slot(NamedTuple):
    """A slot is where a layer's A and B are kept: in a layer of vLLM's, which may hold several."""

    layer: Any
    number: int  # of the part of a fused layer
    adapter: int  # in the order of their names

    @property
    def a(self) -> Tensor:
        """(padded rank, columns)."""
        return self.layer.lora_a_stacked[self.number][self.adapter, 0]

    @property
    def b(self) -> Tensor:
        """(rows, padded rank)."""
        return self.layer.lora_b_stacked[self.number][self.adapter, 0]


class AdapterSlots:
    """An engine's memory for the adapters."""

    def __init__(self, runner: Any, lora: LoraConfig) -> None:
        """Registers adapters of zeros, so that vLLM finds them when requests name them."""
        self.rank, self.names = lora.rank, lora.names or ("",)
        self.manager = compat.adapter_manager(runner)
        self.requests: list[Any] = []  # what a request says of its adapter
        for number, name in enumerate(self.names):
            self.requests.append(compat.adapter_request(name or "policy", FIRST_ID + number))
            runner.lora_manager.add_dummy_lora(self.requests[-1], lora.rank)
            self.manager.activate_adapter(FIRST_ID + number)
            for layer in self.manager.modules.values():
                layer.reset_lora(number)

    def slot(self, part: AdapterPart) -> Slot:
        """Returns the slot of a layer, by its Hugging Face name. Raises ValueError where vLLM has
        none for it.
        """
        modules, packed = self.manager.modules, self.manager.packed_modules
        name, adapter = part.layer, self.names.index(part.adapter)
        if name in modules and name not in packed:
            return Slot(modules[name], 0, adapter)
        for fused, parts in packed.items():
            if name in parts and fused in modules:
                return Slot(modules[fused], parts.index(name), adapter)
        raise ValueError(
            f"vLLM has no adapter for layer {name}: leave it out of lora.target_modules, or use "
            "weights.lora='merge'"
        )

    def layout(self, shapes: Mapping[str, tuple[int, ...]]) -> Layout:
        """Returns the layout of A and scale B; which part of them belongs on this rank is asked of
        vLLM's layers.
        """
        found = Layout()
        for name, shape in shapes.items():
            part = part_of(name)
            slot = self.slot(part)
            held = (slot.a[: self.rank] if part.kind == "A" else slot.b[:, : self.rank]).detach()
            holder = nn.Module()  # the memory itself stays for as long as the engine
            holder.register_buffer("held", held)
            axis, start = AXES[part.kind], 0
            for box in parts_on_rank(slot, part.kind, shape):
                size, offset = sizes(box), start * held.stride(axis)
                found.regions.append((name, box))
                found.places.append(ParamView(holder, "held", offset, size, held.stride()))
                start += size[axis]
            assert start == held.shape[axis], (name, start, held.shape)
        return found

    def load(self, given: Mapping[str, Tensor]) -> None:
        """Full tensors, A and scale B."""
        found = self.layout({name: tuple(tensor.shape) for name, tensor in given.items()})
        for (name, box), place in zip(found.regions, found.places, strict=True):
            place.tensor().copy_(view(given[name], whole(given[name].shape), box))

    def check(self, given: Mapping[str, Tensor]) -> int:
        """Compares bit by bit; the rest of the memory must be 0. Returns the number of tensors.

        Which part belongs here is worked out from shapes and the rank, as in weight_check.py.
        """
        proven: set[int] = set()
        for name, tensor in given.items():
            part = part_of(name)
            slot = self.slot(part)
            stack = slot.a if part.kind == "A" else slot.b
            full = torch.zeros_like(stack)
            here = expected_part(slot, part.kind, tensor, stack).to(stack)
            full[: here.shape[0], : here.shape[1]] = here
            proven.add(stack.data_ptr())
            if not torch.equal(full, stack):
                raise WeightMismatch(f"{name} is not what the engine holds of it")
        for layer, module in self.manager.modules.items():
            for stack in (*module.lora_a_stacked, *module.lora_b_stacked):
                unproven = (own[0] for own in stack if own[0].data_ptr() not in proven)
                if any(own.any() for own in unproven):
                    raise WeightMismatch(f"the engine has an adapter on {layer} that nobody sent")
        return len(given)


def part_of(name: str) -> AdapterPart:
    part = adapter_part(name)
    assert part is not None, name
    return part


def parts_on_rank(slot: Slot, kind: str, shape: Sequence[int]) -> list[Box]:
    """Returns which rows of B, or columns of A, vLLM's layer would take of the full tensor, in
    their order: of the one adapter of a fused layer (Phi-3's qkv_proj) a run of each of its
    outputs. kind: as of AdapterPart.
    """
    axis, layer = AXES[kind], slot.layer
    if layer.tp_size == 1:
        return [whole(shape)]
    full = torch.arange(shape[axis]).unsqueeze(1 - axis).expand(*shape)
    cut = layer.slice_lora_a if kind == "A" else layer.slice_lora_b
    if layer.n_slices > 1:
        tensors: list[Tensor | None] = [None] * layer.n_slices
        tensors[slot.number] = full
        part = cut(tensors)[slot.number]
    else:
        part = cut(full)
    numbers = part.select(1 - axis, 0)
    begins = (numbers.diff() != 1).nonzero().flatten() + 1
    found: list[Box] = []
    for run in numbers.tensor_split(begins.tolist()):
        box = [(0, size) for size in shape]
        box[axis] = int(run[0]), int(run[-1]) + 1
        found.append(tuple(box))
    return found


def expected_part(slot: Slot, kind: str, tensor: Tensor, stack: Tensor) -> Tensor:
    """Returns what must stand on this rank of a full A or B."""
    base = slot.layer.base_layer
    rank, size = slot.layer.tp_rank, slot.layer.tp_size
    if kind == "A":  # all of it, or this rank's columns
        width = stack.shape[1]
        return tensor if width == tensor.shape[1] else tensor.narrow(1, rank * width, width)
    if hasattr(base, "output_sizes") and slot.layer.n_slices > 1:
        _, rows, first = rows_in_fused(base, slot.number, tensor, rank, size, unit=1)
        return tensor[first : first + rows]
    if stack.shape[0] == len(tensor):
        return tensor
    return rank_outputs(tensor, outputs_of_fused(base, len(tensor), size), rank, size)


@contextmanager
def unwrapped(model: nn.Module) -> Iterator[None]:
    """Meanwhile the model has its own layers in place of those with adapters, under their names."""
    wrapper = compat.adapter_layer_class()
    found = [
        (parent, name, child)
        for parent in model.modules()
        if not isinstance(parent, wrapper)
        for name, child in parent.named_children()
        if isinstance(child, wrapper)
    ]
    for parent, name, child in found:
        set_child(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in found:
            set_child(parent, name, child)


def split_off(
    weights: Iterator[tuple[str, Tensor]], adapter: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The base's weights; those of the adapter are put into `adapter`."""
    for name, tensor in weights:
        if is_adapter(name):
            adapter[name] = tensor
        else:
            yield name, tensor
