"""Carries a plan out: packs, sends, gathers and copies into place, two buckets at a time.

While one bucket is on the wire the next is packed. A bucket's memory holds, one after the other,
what is sent to each receiver and the shares of the block; what arrives lands where it is read from,
so that every element is copied once on its way in (with its cast) and once on its way out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.weights.boxes import Box, numel, view, whole
from spmdrl.weights.plan import Bucket, Plan, Weight, make_plan

HAND_OVER, GATHER = 71, 72  # tags
SLOTS = 2  # buckets under way
CPU_SLOT_BYTES = 8 << 20  # larger messages leave the cache between packing and sending


def slot_bytes(bucket_bytes: int, device: torch.device) -> int:
    """Of one of the slots that together are a bucket."""
    share = max(1, bucket_bytes // SLOTS)
    return min(share, CPU_SLOT_BYTES) if device.type == "cpu" else share


class _End(NamedTuple):
    """One end of a copy whose other end is a part of the slot."""

    part: int
    shape: tuple[int, ...] | None  # the part's, for this copy; None: one-dimensional
    tensor: Tensor


@dataclass
class _Copies:
    """Views on both sides of a bucket, made once."""

    lengths: list[int] = field(default_factory=list)  # of the parts of the slot, in order
    packed: list[_End] = field(default_factory=list)  # tensor -> part
    unpacked: list[_End] = field(default_factory=list)  # part -> tensor
    local: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    sends: list[tuple[int, int, int]] = field(default_factory=list)  # (peer, first, last)
    receives: list[tuple[int, int, int]] = field(default_factory=list)
    shares: list[tuple[int, int]] = field(default_factory=list)  # (first, last) by position
    views: tuple[list[Tensor], list[Tensor]] | None = None  # of the slot, while it is kept


@dataclass
class _Underway:
    """A bucket in flight."""

    copies: _Copies
    slot: Tensor
    unpacked: list[Tensor]
    incoming: list[dist.Work]
    outgoing: list[dist.Work]


def views(copies: _Copies, slot: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The slot's parts as they are packed, and as they are unpacked."""
    parts = slot.split(copies.lengths)
    packed, unpacked = (
        [parts[i] if shape is None else parts[i].view(shape) for i, shape, _ in ends]
        for ends in (copies.packed, copies.unpacked)
    )
    return packed, unpacked


class Transfer:
    """A plan bound to a rank's tensors. Shards and places may move in memory between runs.

    group: ranks that hand over, as global ranks; on a GPU `block_group`, the peers', gathers.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Callable[[], dict[str, Tensor]],  # my parts of the training weights, by name
        places: Callable[[], list[Tensor]],  # where my regions belong, in the engine
        addresses: Callable[[], tuple[int, ...]],  # changes where shards or places have moved
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        block_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.plan, self.shards, self.places, self.addresses = plan, shards, places, addresses
        self.dtype, self.device, self.group, self.block_group = dtype, device, group, block_group
        self.bound: tuple[int, ...] = ()  # addresses for which the copies were made
        self.copies: list[_Copies] = []
        self.slots: list[Tensor] = []
        self.moved = 0  # bytes that this rank sent, so far

    @torch.no_grad()
    def run(self) -> int:
        """Collective over both roles' ranks; returns the bytes that this rank sent."""
        addresses = self.addresses()
        if addresses != self.bound or not self.copies:
            shards, places = self.shards(), self.places()
            self.copies = [self.bind(bucket, shards, places) for bucket in self.plan.buckets]
            self.bound = addresses
            self.slots = []
        before = self.moved
        most = max((sum(c.lengths) for c in self.copies), default=0)
        while len(self.slots) < min(SLOTS, len(self.copies)):
            self.slots.append(torch.empty(most, dtype=self.dtype, device=self.device))
        underway: _Underway | None = None
        for number, copies in enumerate(self.copies):
            following = self.start(copies, self.slots[number % SLOTS])
            if underway is not None:
                self.finish(underway)
            underway = following
        if underway is not None:
            self.finish(underway)
        if self.device.type != "cpu":  # small on a CPU, where views of them are worth keeping
            self.slots = []
        return self.moved - before

    def start(self, copies: _Copies, slot: Tensor) -> _Underway:
        """Packs, and puts on the wire what need not wait for others."""
        slot = slot[: sum(copies.lengths)]
        packed, unpacked = copies.views or views(copies, slot)
        if self.device.type == "cpu":
            copies.views = packed, unpacked
        now = _Underway(copies, slot, unpacked, [], [])
        now.incoming += self.exchange(slot, [], copies.receives, HAND_OVER)
        copy_all(packed, [end.tensor for end in copies.packed])
        now.outgoing += self.exchange(slot, copies.sends, [], HAND_OVER)
        if not self.plan.handover:
            self.gather(now)
        copy_local(copies.local, self.dtype)
        return now

    def finish(self, now: _Underway) -> None:
        if self.plan.handover:
            wait(now.incoming)
            now.incoming = []
            self.gather(now)
        wait(now.incoming)
        copy_all([end.tensor for end in now.copies.unpacked], now.unpacked)
        wait(now.outgoing)

    def gather(self, now: _Underway) -> None:
        """Every peer's share to every peer.

        gloo's all-gather copies twice more and needs the memory again: on a CPU the same shares
        travel point to point.
        """
        shares, position = now.copies.shares, self.plan.position
        if self.plan.block == 1 or position < 0 or shares[0][0] == shares[-1][1]:
            return
        if self.block_group is not None:
            both = now.slot[shares[0][0] : shares[-1][1]]
            mine = now.slot[slice(*shares[position])]
            work = dist.all_gather_into_tensor(both, mine, group=self.block_group, async_op=True)
            self.moved += (self.plan.block - 1) * mine.nbytes
            now.incoming.append(work)
            return
        others = [(p, *shares[i]) for i, p in enumerate(self.plan.peers) if i != position]
        sends = [(p, *shares[position]) for p, _, _ in others]
        now.incoming += self.exchange(now.slot, [], others, GATHER)
        now.outgoing += self.exchange(now.slot, sends, [], GATHER)

    def exchange(
        self, slot: Tensor, sends: list[tuple[int, int, int]],
        receives: list[tuple[int, int, int]], tag: int,
    ) -> list[dist.Work]:  # fmt: skip
        """(peer, first, last) each: the slot's elements that go to the peer or come from it."""
        ops = [
            dist.P2POp(function, slot[first:last], peer, self.group, tag)
            for function, ends in ((dist.irecv, receives), (dist.isend, sends))
            for peer, first, last in ends
            if last > first
        ]
        self.moved += slot.itemsize * sum(last - first for _, first, last in sends)
        return dist.batch_isend_irecv(ops) if ops else []

    def bind(self, bucket: Bucket, shards: dict[str, Tensor], places: list[Tensor]) -> _Copies:
        plan, copies, filled = self.plan, _Copies(), 0

        def shard(weight: int, box: Box) -> Tensor:
            held = plan.weights[weight].held(plan.me)
            assert held is not None
            return view(shards[plan.weights[weight].name], held, box)

        def place(region: int, box: Box) -> Tensor:
            return view(places[region], plan.regions[region][1], box)

        def end(part: int, tensor: Tensor) -> _End:
            if tensor.is_contiguous():
                return _End(part, None, tensor.view(-1))
            return _End(part, tuple(tensor.shape), tensor)

        for receiver in sorted(bucket.sends):
            first = filled
            for weight, box in bucket.sends[receiver]:
                copies.packed.append(end(len(copies.lengths), shard(weight, box)))
                copies.lengths.append(numel(box))
                filled += numel(box)
            copies.sends.append((receiver, first, filled))
        for position, share in enumerate(bucket.shares):
            mine, start = position == plan.position, filled
            for sender, pieces in groupby(share, key=lambda piece: piece.sender):
                first = filled
                for _, region, box in pieces:
                    copies.unpacked.append(end(len(copies.lengths), place(region, box)))
                    if mine and sender == plan.me:
                        source = shard(plan.regions[region][0], box)
                        copies.packed.append(end(len(copies.lengths), source))
                    copies.lengths.append(numel(box))
                    filled += numel(box)
                if mine and sender != plan.me:
                    copies.receives.append((sender, first, filled))
            if self.block_group is not None:  # an all-gather wants shares of one size
                copies.lengths.append(start + bucket.share_numel - filled)
                filled += copies.lengths[-1]
            copies.shares.append((start, filled))
        for region, box in bucket.local:
            copies.local.append((place(region, box), shard(plan.regions[region][0], box)))
        return copies


def planned_bytes(plan: Plan, itemsize: int, padded: bool) -> int:
    """What rank plan.me is to send in one run; padded: with an all-gather's shares of one size."""
    total = 0
    for bucket in plan.buckets:
        total += sum(numel(box) for pieces in bucket.sends.values() for _, box in pieces)
        if plan.block > 1 and plan.position >= 0:
            mine = sum(numel(piece.box) for piece in bucket.shares[plan.position])
            total += (plan.block - 1) * (bucket.share_numel if padded else mine)
    return total * itemsize


def copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, source)


def copy_local(copies: list[tuple[Tensor, Tensor]], wire: torch.dtype) -> None:
    """As if over the wire, so that all ranks come to hold the same."""
    copy_all(
        [to for to, _ in copies],
        [s if wire in (s.dtype, to.dtype) else s.to(wire) for to, s in copies],
    )


def wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


@torch.no_grad()
def full_tensors(
    weights: list[Weight],
    shards: Callable[[], dict[str, Tensor]],
    table: list[list[int]],
    dtype: torch.dtype,
    num_bytes: int,
    device: torch.device,
    group: dist.ProcessGroup,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor in `dtype`), one at a time, on the ranks of `table`.

    Collective over these and the holders, which must exhaust it although they are given nothing.
    num_bytes: of a slot. A tensor is the caller's: it may be kept.
    """
    me = dist.get_rank()
    held = shards()
    for weight in weights:
        box = whole(weight.shape)
        needed = [[(0, box)] for _ in table[0]]
        plan = make_plan(me, [weight], needed, table, dtype.itemsize, num_bytes)
        full = [torch.empty(weight.shape, dtype=dtype, device=device)] if plan.peers else []
        Transfer(plan, lambda: held, lambda full=full: full, tuple, dtype, device, group).run()  # type: ignore[misc]
        if full:
            yield weight.name, full[0]
