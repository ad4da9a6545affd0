"""A bucket with this rank's tensors: the messages it sends and takes, and what it copies in place.

What goes from one rank to another in a bucket is cut into messages: a large piece is one by itself,
small ones share one. A message lies in the bucket's memory, its slot, or where it need not be
copied: in a shard that is not cast, in the engine's parameter, where it is cast to and received.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import torch
from spmdrl_kernels.copies import Part
from torch import Tensor

from spmdrl.distributed.p2p import Apart, Spans
from spmdrl.weights.boxes import Box, intersect, numel, slab, view
from spmdrl.weights.plan import Bucket, Plan

HAND_OVER, GATHER, PASS_ON = 71, 72, 73  # tags; gathered: what a rank held, what it was handed
FP8 = torch.float8_e4m3fn
CPU_MESSAGE_BYTES = 2 << 20  # with slots of 16 MiB; neither half nor twice as much is quicker
CPU_ALONE_BYTES = 1 << 20  # a piece of this size is a message by itself

Held = dict[str, list[tuple[Box, Tensor]]]  # by a weight's name, what a rank holds of it
Run = list[tuple[int, Box]]  # of a message: (weight or region, part) each


@dataclass
class Message:
    """Pieces that travel together, from me or another rank to me or others."""

    sender: int
    tag: int
    receivers: list[int]  # whom I send it to, with forward_tag
    forward_tag: int
    lengths: list[int]  # of the pieces, in elements
    first: int  # in the slot
    shards: list[Tensor]  # packed into it; [] where it comes from elsewhere or lies ready
    places: list[Tensor]  # copied into out of it; [] where it lies there, or is for others
    ready: Tensor | None = None  # where it lies, if not in the slot
    parts: list[Part] = field(default_factory=list)  # quantised into it, instead of shards
    memory: Tensor | None = None  # where it lies, while there is a slot
    packed: list[Tensor] = field(default_factory=list)  # views of it, like shards or parts
    unpacked: list[Tensor] = field(default_factory=list)  # like the places
    spans: Spans | None = None  # the places, where it is read into them at once
    left: Spans | None = None  # the shards, where the receiver takes it from them
    apart: Apart | None = None  # how it is taken from shards
    numbers: dict[int, int] = field(default_factory=dict)  # by receiver, where it reads memory

    @property
    def last(self) -> int:
        return self.first if self.ready is not None else self.first + sum(self.lengths)

    @property
    def data(self) -> Tensor:
        assert self.memory is not None
        return self.memory

    def lie_in(self, slot: Tensor | None) -> None:
        """Makes the views, which for small tensors cost as much as the copies."""
        self.memory, self.packed, self.unpacked, self.apart = self.ready, [], [], None
        if slot is not None and self.ready is None:
            self.memory = slot[self.first : self.last]
        if self.memory is None:
            return
        if self.parts:
            like = [part.tensor for part in self.parts]
            self.packed = views(self.memory.view(FP8), self.lengths, like)
        if self.shards:
            self.packed = views(self.memory, self.lengths, self.shards)
        if self.places:
            self.unpacked = views(self.memory, self.lengths, self.places)

    def pack(self) -> None:
        """Packs the message on a CPU; on a GPU a bucket's messages are packed at once."""
        if self.parts:
            for part, row in zip(self.parts, self.packed, strict=True):
                part.quantize(row)
        else:
            copy_all(self.packed, self.shards)


def views(memory: Tensor, lengths: list[int], like: list[Tensor]) -> list[Tensor]:
    parts = memory.split(lengths) if len(lengths) > 1 else [memory]
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


@dataclass
class Bound:
    """A bucket with this rank's tensors."""

    messages: list[Message] = field(default_factory=list)
    local: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    quantized: list[tuple[Part, Tensor]] = field(default_factory=list)  # local too: (from, to)
    shares: list[tuple[int, int]] = field(default_factory=list)  # in the slot, by position
    filled: int = 0  # elements of the slot


class Binder:
    """Finds a plan's parts in this rank's tensors.

    in_slot: whether a bucket's shares are gathered at once, hence lie in the slot side by side.
    scales: of every weight, by name, where they travel in FP8; dtype and places are uint8 then.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Held,
        places: list[Tensor],
        dtype: torch.dtype,
        eager: bool,  # a CPU's, in messages
        in_slot: bool,
        scales: dict[str, Tensor] | None,
    ) -> None:
        self.plan, self.shards, self.places, self.dtype = plan, shards, places, dtype
        self.eager, self.in_slot, self.scales = eager, in_slot, scales

    def bind(self, bucket: Bucket) -> Bound:
        bound = Bound()
        for receiver in sorted(bucket.sends):
            for run in self.cut(bucket.sends[receiver]):
                self.send(bound, receiver, run)
        for position, share in enumerate(bucket.shares):
            start = bound.filled
            for sender, pieces in groupby(share, key=lambda piece: piece.sender):
                for run in self.cut((piece.region, piece.box) for piece in pieces):
                    self.gather(bound, position, sender, run)
            if self.in_slot:  # an all-gather wants shares of one size
                bound.filled = start + bucket.share_numel
            bound.shares.append((start, bound.filled))
        # what is to be passed on comes first
        bound.messages.sort(key=lambda message: message.tag)
        for region, box in bucket.local:
            weight, to = self.plan.regions[region][0], self.place(region, box)
            if self.scales is None:
                bound.local.append((to, self.shard(weight, box)))
            else:
                bound.quantized.append((self.part(weight, box), to.view(FP8)))
        return bound

    def send(self, bound: Bound, receiver: int, run: Run) -> None:
        """Hands parts of weights over."""
        shards, parts = self.sources(run)
        message = Message(
            self.plan.me, HAND_OVER, [receiver], HAND_OVER, [numel(box) for _, box in run],
            bound.filled, shards, [], parts=parts,
        )  # fmt: skip
        self.add(bound, message, shards)
        if message.ready is not None:
            message.shards = []

    def gather(self, bound: Bound, position: int, sender: int, run: Run) -> None:
        """Takes parts of the regions that are that position's share, or gives its own to others.

        sender: who hands them over.
        """
        me, peers = self.plan.me, self.plan.peers
        mine, handed = position == self.plan.position, sender != peers[position]
        targets = [plain(self.place(region, box)) for region, box in run]
        shards: list[Tensor] = []
        parts: list[Part] = []
        if mine and not handed:
            shards, parts = self.sources((self.plan.regions[r][0], box) for r, box in run)
        gathered = PASS_ON if handed else GATHER
        message = Message(
            sender if mine else peers[position], HAND_OVER if mine else gathered,
            [peer for peer in peers if peer != me] if mine else [], gathered,
            [numel(box) for _, box in run], bound.filled, shards, targets, parts=parts,
        )  # fmt: skip
        self.add(bound, message, targets)
        if message.ready is not None:
            message.places = []

    def add(self, bound: Bound, message: Message, ready: list[Tensor]) -> None:
        """ready: tensors that it may lie in."""
        fits = [t for t in ready if t.dtype == self.dtype and t.dim() == 1]
        if len(message.lengths) == 1 and fits and not self.in_slot:
            message.ready = fits[0]
        bound.messages.append(message)
        bound.filled = message.last

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

    def cut(self, pieces: Iterable[tuple[int, Box]]) -> Iterator[Run]:
        """Messages, alike on both ends, of (number, part) each."""
        run: Run = []
        size, limit = 0, CPU_MESSAGE_BYTES // self.dtype.itemsize
        for number, box in pieces:
            added = numel(box)
            alone = self.eager and added * self.dtype.itemsize >= CPU_ALONE_BYTES
            if run and self.eager and (alone or size + added > limit):
                yield run
                run, size = [], 0
            if alone:
                parts = -(-added // limit)
                slabs = [slab(box, parts, part) for part in range(parts)]
                yield from ([(number, cut)] for cut in slabs if cut is not None)
            else:
                run.append((number, box))
                size += added
        if run:
            yield run


def plain(tensor: Tensor) -> Tensor:
    """Returns the tensor in one dimension where it is contiguous, which is quicker to copy."""
    return tensor.view(-1) if tensor.is_contiguous() else tensor


def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)
