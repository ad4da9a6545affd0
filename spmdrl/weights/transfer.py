"""Carries a plan out: packs, sends, gathers and copies into place, two buckets at a time.

On a CPU each message leaves as soon as it is packed and is passed on as soon as it is there, while
the next is packed and the next bucket's are on their way. Between ranks of one host some are not
packed at all: the receiver reads the shards and casts them. On a GPU what a bucket packs, copies in
place and unpacks is a launch each, however many tensors it has (spmdrl_kernels.copies).

Weights that the engine keeps in FP8 are quantised while they are packed, by whoever holds them, and
travel as a byte each. A shard may end within a block of 128 x 128: the ranks have agreed on every
block's scale before (training/weight_sync.py), so nobody needs all of a block and each element has
the same bits wherever it is quantised. Elements are not moved to complete blocks, and the scales
cost 4 bytes per 16,384 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from spmdrl_kernels.copies import Copies, Quantized, plain_copies
from torch import Tensor

from spmdrl.distributed.p2p import IOV_MAX, Apart, P2PTransport, Spans, Work
from spmdrl.distributed.topology import Topology
from spmdrl.weights.boxes import numel, whole
from spmdrl.weights.bucket_messages import HAND_OVER, Binder, Bound, Held, Message, copy_all, views
from spmdrl.weights.plan import Plan, Weight, make_plan
from spmdrl.weights.shards import Shards, agree_on_shards, derived_of, lying, rounds_of

SLOTS = 2  # buckets under way
CPU_SLOT_BYTES = 16 << 20
CPU_SCRATCH_NUMEL = 128 << 10  # stays in a core's own cache
# Of a bucket's messages of small tensors the first are left to their receivers, which would wait
# for packed ones: to pack takes twice as long as to read, and to read and cast shards about as long
LEFT_SHARE, LEFT_DTYPE = 0.25, torch.float32


def slot_bytes(bucket_bytes: int, device: torch.device) -> int:
    """Returns the bytes of one of the slots that together are a bucket."""
    share = max(1, bucket_bytes // SLOTS)
    return min(share, CPU_SLOT_BYTES) if device.type == "cpu" else share


T = TypeVar("T")


def runs_of(lengths: list[int]) -> Iterator[tuple[int, int]]:
    """(first, end) of as many as fit into the scratch together."""
    first = filled = 0
    for number, length in enumerate(lengths):
        if filled + length > CPU_SCRATCH_NUMEL or number - first == IOV_MAX:
            yield first, number
            first, filled = number, 0
        filled += length
    yield first, len(lengths)


class _Launches:
    """A bucket's copies on a GPU, each kind in one launch. Wire: the dtype of its memory.

    They outlive the tensors they are given: in the next push only what has moved is looked at anew.
    """

    def __init__(self, wire: torch.dtype) -> None:
        self.pack, self.local, self.unpack = (Copies(via=wire) for _ in range(3))
        self.quantize, self.quantize_local = Quantized(), Quantized()

    def fill(self, messages: list[Message]) -> None:
        plain = [m for m in messages if m.shards]
        self.pack.run(joined(m.packed for m in plain), joined(m.shards for m in plain))
        parted = [m for m in messages if m.parts]
        self.quantize.run(joined(m.packed for m in parted), joined(m.parts for m in parted))

    def empty(self, messages: list[Message]) -> None:
        self.unpack.run(joined(m.places for m in messages), joined(m.unpacked for m in messages))

    def in_place(self, bound: Bound) -> None:
        self.local.run([to for to, _ in bound.local], [source for _, source in bound.local])
        quantized = bound.quantized
        self.quantize_local.run([to for _, to in quantized], [part for part, _ in quantized])


def joined(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


class _Underway:
    """A bucket in flight."""

    def __init__(self, bound: Bound, slot: Tensor, launches: _Launches) -> None:
        self.bound, self.slot, self.launches = bound, slot, launches
        self.incoming: list[tuple[Message, Work]] = []
        self.outgoing: list[Work] = []


class Transfer:
    """A plan bound to a rank's tensors. Shards and places may move in memory between runs.

    wire: among the ranks that hand over; on a GPU `block_group`, the peers', gathers.
    scales: of every weight, by name, where they travel in FP8; dtype and places are uint8 then.
    """

    def __init__(
        self,
        plan: Plan,
        shards: Callable[[], Held],  # my parts of the training weights
        places: Callable[[], list[Tensor]],  # where my regions belong, in the engine
        addresses: Callable[[], tuple[object, ...]],  # changes where shards or places have moved
        dtype: torch.dtype,
        device: torch.device,
        wire: P2PTransport,
        block_group: dist.ProcessGroup | None = None,
        scales: dict[str, Tensor] | None = None,
    ) -> None:
        self.scales = scales
        self.plan, self.shards, self.places, self.addresses = plan, shards, places, addresses
        self.dtype, self.device, self.wire, self.block_group = dtype, device, wire, block_group
        self.eager = device.type == "cpu"  # gloo; NCCL wants what travels at a time in one call
        self.bound: tuple[object, ...] = ()  # addresses for which the buckets were bound
        self.buckets: list[Bound] = []
        self.slots: list[Tensor] = []
        self.scratch: Tensor | None = None
        self.launches = [_Launches(dtype) for _ in plan.buckets]
        self.moved = 0  # bytes that this rank sent, so far

    @torch.no_grad()
    def run(self) -> int:
        """Collective over both roles' ranks; returns the bytes that this rank sent."""
        addresses = self.addresses()
        if addresses != self.bound or not self.buckets:
            binder = Binder(
                self.plan, self.shards(), self.places(), self.dtype, self.eager,
                self.block_group is not None, self.scales,
            )  # fmt: skip
            self.buckets = [binder.bind(bucket) for bucket in self.plan.buckets]
            self.bound = addresses
            self.slots = []
        before = self.moved
        if not self.slots:
            self.make_slots()
        underway: _Underway | None = None
        for number, bound in enumerate(self.buckets):
            following = self.start(bound, self.slots[number % SLOTS], self.launches[number])
            if underway is not None:
                self.finish(underway)
            underway = following
        if underway is not None:
            self.finish(underway)
        if not self.eager:
            # but for addresses nothing of the device is held between pushes: not the slots (small
            # on a CPU, where views of them are worth keeping), and not shards that offload() frees
            self.slots, self.buckets, self.bound = [], [], ()
        return self.moved - before

    def make_slots(self) -> None:
        most = max((bound.filled for bound in self.buckets), default=0)
        self.slots = [
            torch.empty(most, dtype=self.dtype, device=self.device)
            for _ in range(min(SLOTS, len(self.buckets)))
        ]
        for number, bound in enumerate(self.buckets):
            may_be_left: dict[int, list[Message]] = {}  # by receiver
            for m in bound.messages:
                m.lie_in(self.slots[number % SLOTS])
                m.spans = Spans(m.places) if self.goes_straight(m) else None
                if self.may_be_left(m):
                    may_be_left.setdefault(m.receivers[0], []).append(m)
            for found in may_be_left.values():
                for m in found[: round(LEFT_SHARE * len(found))]:
                    m.left = Spans(m.shards)

    def goes_straight(self, m: Message) -> bool:
        """Returns True if the message is read into its places at once, and no slot is needed."""
        if not self.eager or m.sender == self.plan.me or m.receivers or not m.places:
            return False
        lie_so = all(p.is_contiguous() and p.dtype == self.dtype for p in m.places)
        return lie_so and self.wire.reads(m.sender, m.data.nbytes)

    def may_be_left(self, m: Message) -> bool:
        """Whether its receiver can take it from many small shards and cast it."""
        if not self.eager or len(m.shards) < 2 or m.places or len(m.receivers) != 1:
            return False
        small = max(shard.numel() for shard in m.shards) <= CPU_SCRATCH_NUMEL
        lie_so = all(s.is_contiguous() and s.dtype == LEFT_DTYPE for s in m.shards)
        return small and lie_so and self.wire.shows(m.receivers[0], m.data.nbytes)

    def taken(self, m: Message) -> Apart:
        """Returns how m is taken from its sender's shards."""
        if m.apart is not None:
            return m.apart
        if self.scratch is None:
            self.scratch = torch.empty(CPU_SCRATCH_NUMEL, dtype=LEFT_DTYPE)
        m.apart = Apart(self.scratch, [])
        targets = m.places if m.spans is not None else list(m.data.split(m.lengths))
        for first, end in runs_of(m.lengths):
            lengths = m.lengths[first:end]
            rows = views(self.scratch[: sum(lengths)], lengths, targets[first:end])
            m.apart.runs.append((lengths, partial(copy_all, targets[first:end], rows)))
        return m.apart

    def start(self, bound: Bound, slot: Tensor, launches: _Launches) -> _Underway:
        """Packs, and puts on the wire what need not wait for others."""
        now = _Underway(bound, slot, launches)
        mine = [m for m in bound.messages if m.sender == self.plan.me]
        if not self.eager:
            launches.fill(mine)
            self.exchange(now)
            if not self.plan.handover:
                self.gather(now)
            launches.in_place(bound)
            return now
        for m in bound.messages:
            if m.sender != self.plan.me:
                place = m.spans or m.data
                work = self.wire.irecv(place, m.sender, m.tag, partial(self.taken, m))
                now.incoming.append((m, work))
        for m in mine:
            m.numbers = {
                to: self.wire.number(to, m.forward_tag)
                for to in m.receivers if self.wire.shows(to, m.data.nbytes)
            }  # fmt: skip
        for m in sorted(mine, key=lambda m: m.left is None):
            if m.left is None:
                m.pack()
            self.send(m, now)
            copy_all(m.places, m.unpacked)
        copy_local(bound.local, self.dtype)
        for part, quantized in bound.quantized:
            part.quantize(quantized)
        return now

    def finish(self, now: _Underway) -> None:
        if self.eager:
            for m, work in now.incoming:
                work.wait()
                self.send(m, now)
                if m.spans is None:
                    copy_all(m.places, m.unpacked)
            wait(now.outgoing)
            return
        if self.plan.handover:
            wait(now.outgoing)
            now.outgoing = []
            self.gather(now)
        wait(now.outgoing)
        now.launches.empty(now.bound.messages)

    def send(self, m: Message, now: _Underway) -> None:
        for receiver in m.receivers:
            values = m.data if m.left is None else m.left
            number = m.numbers.get(receiver)
            now.outgoing.append(self.wire.isend(values, receiver, m.forward_tag, number))
            self.moved += m.data.nbytes

    def exchange(self, now: _Underway) -> None:
        """Exchanges at once what is handed over in a bucket."""
        ops = []
        for m in now.bound.messages:
            if m.tag == HAND_OVER and m.sender != self.plan.me:
                ops.append(dist.P2POp(dist.irecv, m.data, m.sender, self.wire.group))
            if m.tag == HAND_OVER and m.forward_tag == HAND_OVER:
                for receiver in m.receivers:
                    ops.append(dist.P2POp(dist.isend, m.data, receiver, self.wire.group))
                    self.moved += m.data.nbytes
        now.outgoing += dist.batch_isend_irecv(ops) if ops else []

    def gather(self, now: _Underway) -> None:
        """Every peer's share to every peer.

        gloo's all-gather copies twice more and needs the memory again: on a CPU the same shares
        travel point to point.
        """
        shares, position = now.bound.shares, self.plan.position
        if self.plan.block == 1 or position < 0 or shares[0][0] == shares[-1][1]:
            return
        both = now.slot[shares[0][0] : shares[-1][1]]
        mine = now.slot[slice(*shares[position])]
        work = dist.all_gather_into_tensor(both, mine, group=self.block_group, async_op=True)
        self.moved += (self.plan.block - 1) * mine.nbytes
        now.outgoing.append(work)


def planned_bytes(plan: Plan, itemsize: int, padded: bool) -> int:
    """Returns how many bytes rank plan.me is to send in one run; padded: with an all-gather's
    shares of one size.
    """
    total = 0
    for bucket in plan.buckets:
        total += sum(numel(box) for pieces in bucket.sends.values() for _, box in pieces)
        if plan.block > 1 and plan.position >= 0:
            mine = sum(numel(piece.box) for piece in bucket.shares[plan.position])
            total += (plan.block - 1) * (bucket.share_numel if padded else mine)
    return total * itemsize


def copy_local(copies: list[tuple[Tensor, Tensor]], wire: torch.dtype) -> None:
    """Copies through the dtype of the wire, so that all ranks come to hold the same."""
    plain_copies([to for to, _ in copies], [source for _, source in copies], wire)


def wait(works: list[Work]) -> None:
    for work in works:
        work.wait()


@torch.no_grad()
def full_tensors(
    weights: list[Weight],
    shards: Callable[[], Held],
    table: list[list[int]],
    dtype: torch.dtype,
    num_bytes: int,
    device: torch.device,
    wire: P2PTransport,
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
        Transfer(plan, lambda: held, lambda full=full: full, tuple, dtype, device, wire).run()  # type: ignore[misc]
        if full:
            yield weight.name, full[0]


def gathered(
    named: Mapping[str, Shards], dtype: torch.dtype, bucket_bytes: int, topology: Topology
) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of every weight on every rank of the topology, over which it is
    collective until it is exhausted.
    """
    weights, derived = agree_on_shards(named, topology.control), derived_of(named)
    rounds = rounds_of(weights, bucket_bytes // 2)
    if derived is not None:
        derived.arrange([[weight.name for weight in group] for group in rounds])
    wire = P2PTransport(topology)
    for group in rounds:
        if derived is not None:
            derived.compute([weight.name for weight in group])
        yield from full_tensors(
            group, lambda: lying(named), [[rank] for rank in topology.ranks], dtype,
            slot_bytes(bucket_bytes, topology.device), topology.device, wire,
        )  # fmt: skip
