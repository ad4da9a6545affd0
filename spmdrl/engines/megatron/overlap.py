"""Sums of gradients and gathers of weights over the data-parallel ranks, beside computation.

megatron-core's DistributedDataParallel has both, in buckets of parameters. When it starts which
bucket follows from what a rank computes, and it stops where a parameter has no gradient. The ranks
of a step do not compute the same: one has images in its last micro-batch, another has none. NCCL
needs one order on all ranks, so the order is made here, and DistributedDataParallel's own hooks are
not used:

reduce  The sums of a bucket start when its gradients of the last micro-batch are complete and the
        buckets before it have started. Those that are left at the end of the backward pass start
        then. Pipeline stages behind the first start all of theirs at the end of their last backward
        pass, and interleaved ones each chunk's, as with Megatron-LM's --align-grad-reduce.
gather  After the optimizer's step the gathers of all buckets start, beginning with what the forward
        pass needs first. Each layer waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

from spmdrl.engines.megatron import compat
from spmdrl.engines.megatron.towers import PARTS


class OverlappedChunk:
    """A model chunk in megatron-core's DistributedDataParallel, with overlap_grad_reduce."""

    def __init__(self, chunk: Any) -> None:
        self.groups = in_order(chunk)
        self.gathers: bool = chunk.ddp_config.overlap_param_gather
        self.missing: list[set[Any]] = []  # parameters without their gradient, of each group
        self.num_started = 0
        for number, group in enumerate(self.groups):
            compat.call_when_ready(group, partial(self.take, number))
        if self.gathers:
            chunk.disable_forward_pre_hook(param_sync=False)
            for unit in units_of(chunk.module):
                unit.register_forward_pre_hook(partial(finish, self.groups_of(unit)))
        self.restart()

    def groups_of(self, unit: nn.Module) -> list[Any]:
        own = set(unit.parameters())
        return [group for group in self.groups if own & group.params]

    def restart(self) -> None:
        """Before an update's passes."""
        self.missing, self.num_started = [set(group.params) for group in self.groups], 0

    def take(self, number: int, parameter: Any) -> None:
        """The gradient of a parameter in this bucket group is complete."""
        if parameter not in self.missing[number]:
            raise RuntimeError(
                f"a parameter of {tuple(parameter.shape)} is given a second gradient by one "
                "micro-batch, when its sum over the ranks may have started: use "
                "overlap_grad_reduce=False"
            )
        self.missing[number].remove(parameter)
        while self.num_started < len(self.groups) and not self.missing[self.num_started]:
            self.start_next()

    def start_next(self) -> None:
        self.groups[self.num_started].start_grad_sync()
        self.num_started += 1

    def start_rest(self, *unused: Any) -> None:
        """Starts the sums that have not started; the parameters are no use here."""
        while self.num_started < len(self.groups):
            self.start_next()

    def start_gathers(self) -> None:
        """After the optimizer's step."""
        for group in reversed(self.groups):
            group.start_param_sync()

    def finish_gathers(self) -> None:
        """Before weights are read or written that no forward pass asks for."""
        finish(self.groups)


def finish(groups: list[Any], *unused: Any) -> None:
    """Waits for gathers that are under way. Also a hook before a module's forward pass."""
    for group in groups:
        if group.param_gather_handle is not None:
            group.start_param_sync(force_sync=True)  # waits, and gathers nothing


def in_order(chunk: Any) -> list[Any]:
    """Returns a chunk's bucket groups in the order in which a backward pass completes them.

    Parameters are completed from the last to the first, those of a tower for images at the end.
    """
    named = list(chunk.module.named_parameters())
    tower = [p for name, p in named if name.partition(".")[0] in PARTS]
    others = [p for name, p in named if name.partition(".")[0] not in PARTS]
    places = {parameter: place for place, parameter in enumerate([*tower, *others])}
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    return sorted(groups, key=lambda group: -min(places[p] for p in group.params))


def units_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the parts of a model chunk that a pass calls one after the other: its embedding, its
    layers, norm and head, the parts of a tower. Within a part modules read one another's weights.
    """
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlock

    if not isinstance(module, GPTModel | TransformerBlock | nn.ModuleList):
        yield module
        return
    for child in module.children():
        yield from units_of(child)
