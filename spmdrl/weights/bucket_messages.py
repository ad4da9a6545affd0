"""A bucket with this rank's tensors: the messages it sends and takes, and what it copies in place.

What goes from one rank to another in a bucket is one message. A message lies in the bucket's
memory, its slot, or where it need not be copied: in a shard that is not cast, in a parameter of the
engine that is received into. The shares of a block lie in the slot side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby

import torch
from spmdrl_kernels.copies import Part
from torch import Tensor

from spmdrl.weights.boxes import Box, intersect, numel, view
from spmdrl.weights.plan import Bucket, TransferPlan

FP8 = torch.float8_e4m3fn

Held = dict[str, list[tuple[Box, Tensor]]]  # by a weight's name, what a rank holds of it
Run = list[tuple[int, Box]]  # of a message: (weight or region, part) each


@dataclass
class Message:
    """Pieces that travel together, from this rank or to it."""

    sender: int | None  # who hands it over; this rank for what it packs; None: it is gathered
    receiver: int | None  # whom this rank hands it to, if anybody
    lengths: list[int]  # of the pieces, in elements
    first: int  # in the slot
    shards: list[Tensor]  # packed into it; [] where it comes from elsewhere or lies ready
    places: list[Tensor]  # copied into out of it; [] where it lies there, or is for others
    ready: Tensor | None = None  # where it lies, if not in the slot
    parts: list[Part] = field(default_factory=list)  # quantised into it, instead of shards
    memory: Tensor | None = None  # where it lies, while there is a slot
    packed: list[Tensor] = field(default_factory=list)  # views of it, like shards or parts
    unpacked: list[Tensor] = field(default_factory=list)  # like the places

    @property
    def end(self) -> int:
        return self.first if self.ready is not None else self.first + sum(self.lengths)

    @property
    def data(self) -> Tensor:
        assert self.memory is not None
        return self.memory

    def lie_in(self, slot: Tensor) -> None:
        """Makes the views of the message's memory."""
        self.memory = slot[self.first : self.end] if self.ready is None else self.ready
        if self.parts:
            like = [part.tensor for part in self.parts]
            self.packed = views(self.memory.view(FP8), self.lengths, like)
        if self.shards:
            self.packed = views(self.memory, self.lengths, self.shards)
        if self.places:
            self.unpacked = views(self.memory, self.lengths, self.places)


def views(memory: Tensor, lengths: list[int], like: list[Tensor]) -> list[Tensor]:
    parts = memory.split(lengths) if len(lengths) > 1 else [memory]
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass
class BoundBucket:
    """A bucket with this rank's tensors."""

    messages: list[Message] = field(default_factory=list)
    local: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    quantized: list[tuple[Part, Tensor]] = field(default_factory=list)  # local too: (from, to)
    shares: list[tuple[int, int]] = field(default_factory=list)  # in the slot, by position
    filled: int = 0  # elements of the slot


class Binder:
    """Finds a plan's parts in this rank's tensors.

    padded: whether a bucket's shares are of one size, as an all-gather wants them.
    scales: of every weight, by name, where they travel in FP8; dtype and places are uint8 then.
    """

    def __init__(
        self,
        plan: TransferPlan,
        shards: Held,
        places: list[Tensor],
        dtype: torch.dtype,
        padded: bool,
        scales: dict[str, Tensor] | None,
    ) -> None:
        self.plan, self.shards, self.places, self.dtype = plan, shards, places, dtype
        self.padded, self.scales = padded, scales

    def bind(self, bucket: Bucket) -> BoundBucket:
        bound = BoundBucket()
        for receiver in sorted(bucket.sends):
            self.send(bound, receiver, bucket.sends[receiver])
        for position, share in enumerate(bucket.shares):
            start = bound.filled
            for sender, pieces in groupby(share, key=lambda piece: piece.sender):
                self.take(bound, position, sender, [(p.region, p.box) for p in pieces])
            if self.padded:
                bound.filled = start + bucket.share_numel
            bound.shares.append((start, bound.filled))
        for region, box in bucket.local:
            weight, to = self.plan.regions[region][0], self.place(region, box)
            if self.scales is None:
                bound.local.append((to, self.shard(weight, box)))
            else:
                bound.quantized.append((self.part(weight, box), to.view(FP8)))
        return bound

    def send(self, bound: BoundBucket, receiver: int, run: Run) -> None:
        """Adds a message that hands parts of weights over."""
        shards, parts = self.sources(run)
        lengths = [numel(box) for _, box in run]
        message = Message(self.plan.me, receiver, lengths, bound.filled, shards, [], parts=parts)
        message.ready = self.lies_ready(shards)
        if message.ready is not None:
            message.shards = []
        self.add(bound, message)

    def take(self, bound: BoundBucket, position: int, sender: int, run: Run) -> None:
        """Adds a message with parts of this rank's regions, which are that position's share.

        sender: who holds them. This rank packs its own share, is handed it, or gathers another's.
        """
        mine = position == self.plan.position
        lengths = [numel(box) for _, box in run]
        places = [plain(self.place(region, box)) for region, box in run]
        message = Message(sender if mine else None, None, lengths, bound.filled, [], places)
        if sender == self.plan.me:
            message.shards, message.parts = self.sources(
                (self.plan.regions[region][0], box) for region, box in run
            )
        elif self.plan.block == 1:  # else peers gather it too, from the slot
            message.ready = self.lies_ready(places)
        if message.ready is not None:
            message.places = []
        self.add(bound, message)

    def lies_ready(self, tensors: list[Tensor]) -> Tensor | None:
        """Returns the memory that a message can be sent from or received into as it is."""
        fits = len(tensors) == 1 and tensors[0].dtype == self.dtype and tensors[0].dim() == 1
        return tensors[0] if fits else None

    def add(self, bound: BoundBucket, message: Message) -> None:
        bound.messages.append(message)
        bound.filled = message.end

    def sources(self, found: Iterable[tuple[int, Box]]) -> tuple[list[Tensor], list[Part]]:
        """(shards to be copied, parts to be quantised): one of them is empty."""
        if self.scales is None:
            return [plain(self.shard(weight, box)) for weight, box in found], []
        return [], [self.part(weight, box) for weight, box in found]

    def shard(self, weight: int, box: Box) -> Tensor:
        parts = self.shards[self.plan.weights[weight].name]
        held, tensor = next(p for p in parts if intersect(p[0], box) == box)
        return view(tensor, held, box)

    def part(self, weight: int, box: Box) -> Part:
        assert self.scales is not None
        first = (box[0][0], box[1][0])
        return Part(self.shard(weight, box), first, self.scales[self.plan.weights[weight].name])

    def place(self, region: int, box: Box) -> Tensor:
        return view(self.places[region], self.plan.regions[region][1], box)


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor in one dimension where it is contiguous, which is quicker to copy."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor
