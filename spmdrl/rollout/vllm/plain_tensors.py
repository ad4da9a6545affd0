"""Keeps the tensors of an engine of vLLM that a sleep drops and that nothing brings back.

A sleep of level 2 drops all memory that was taken while the model was loaded. Parameters come back
by a push of weights, and vLLM itself keeps registered buffers. A tensor that a layer or the model
runner holds as a plain attribute is lost: after the wake-up its memory holds anything. Qwen3-VL,
for example, adds such tensors to the hidden states of its first layers in every pass, and counts on
zeros where a batch has no image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.rollout.vllm import compat

# objects of these packages are looked into; those of others, such as communicators, are not
PACKAGES = ("vllm.model_executor.", "vllm.v1.attention.", "vllm.v1.sample.", "vllm.v1.worker.")


class PlainTensors:
    """Holds what `save` has found, which `restore` puts back where it was."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor | None]] | None = None  # None: nothing is asleep

    @torch.inference_mode()  # some were made in passes, where vLLM is in it
    def save(self, runner: Any) -> None:
        """Copies them to the host; of one that holds zeros nothing is kept. runner: vLLM's model
        runner. Does nothing a second time before `restore`, as their memory may be gone.
        """
        if self.kept is None:
            found = plain_tensors(runner, compat.memory_of_weights())
            self.kept = [
                (whole, whole.to("cpu", copy=True) if whole.any() else None) for whole in found
            ]

    @torch.inference_mode()
    def restore(self) -> None:
        for tensor, copy in self.kept or ():
            if copy is None:
                tensor.zero_()
            else:
                tensor.copy_(copy)
        self.kept = None


def plain_tensors(runner: Any, memory: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Returns the bytes, (n,) uint8 each, of the tensors in this memory, (address, bytes), that the
    model runner and objects of vLLM within it hold, but for parameters and buffers.
    """
    model = runner.get_model()
    registered = [*model.parameters(), *model.buffers()]
    known = {place_of(tensor) for tensor in registered}
    found: list[Tensor] = []
    for tensor in within([runner, model]):
        place = place_of(tensor)
        if place not in known and any(first <= place < first + size for first, size in memory):
            known.add(place)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found.append(whole.set_(tensor.untyped_storage()))
    return found


def place_of(tensor: Tensor) -> int:
    """Returns the address of a tensor's memory; -1 where it is made of others, as torchao's are."""
    return -1 if hasattr(tensor, "__tensor_flatten__") else tensor.untyped_storage().data_ptr()


def within(holders: list[Any]) -> Iterator[Tensor]:
    """Yields the tensors that these objects hold, and those that what they hold does."""
    waiting, seen = list(holders), set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            yield value
        elif id(value) not in seen:
            seen.add(id(value))
            waiting += parts_of(value)


def parts_of(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, nn.Module) or type(value).__module__.startswith(PACKAGES):
        return getattr(value, "__dict__", {}).values()
    return ()
