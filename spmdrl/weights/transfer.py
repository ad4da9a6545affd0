"""Carries a plan out: packs, sends, gathers and copies into place, two buckets at a time.

The same steps run on a GPU and on a CPU. A bucket's tensors are packed into its slot, a piece of
memory, by one call of spmdrl_kernels.copies, however many tensors it has. What other ranks need is
exchanged point to point (hand over). Then the ranks of a block give each other their shares
(gather): with one all-gather on a GPU, and point to point on a CPU, because gloo's all-gather
copies everything twice more. While a bucket travels, the next one is packed.

Weights that the engine keeps in FP8 are quantised while they are packed, by whoever holds them, and
travel as a byte each. A shard may end within a block of 128 x 128: the ranks have agreed on every
block's scale before (training/weight_sync.py), so nobody needs all of a block and each element has
the same bits wherever it is quantised. Elements are not moved to complete blocks, and the scales
cost 4 bytes per 16,384 elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from spmdrl_kernels.copies import Copies, Quantized
from torch import Tensor

from spmdrl.distributed.topology import Topology
from spmdrl.distributed.torch_compat import storage_id
from spmdrl.weights.boxes import numel
from spmdrl.weights.bucket_messages import Binder, BoundBucket, Held, Message
from spmdrl.weights.classes import Weight
from spmdrl.weights.holders import agree_on_shards
from spmdrl.weights.plan import TransferPlan, plan_of_full_tensor
from spmdrl.weights.shards import Shards, derived_of, lying, rounds_of

SLOTS = 2  # buckets under way
CPU_SLOT_BYTES = 16 << 20
HAND_OVER, GATHER = 71, 72  # tags

T = TypeVar("T")


def slot_bytes(bucket_bytes: int, device: torch.device) -> int:
    """Returns the bytes of one of the slots that together are a bucket."""
    share = max(1, bucket_bytes // SLOTS)
    return min(share, CPU_SLOT_BYTES) if device.type == "cpu" else share


class _Launches:
    """A bucket's copies, each kind in one launch on a GPU. Wire: the dtype of its memory.

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

    def in_place(self, bound: BoundBucket) -> None:
        """Copies what stays on this rank, through the dtype of the wire: all ranks come to hold
        the same values.
        """
        self.local.run([to for to, _ in bound.local], [source for _, source in bound.local])
        quantized = bound.quantized
        self.quantize_local.run([to for _, to in quantized], [part for part, _ in quantized])


def joined(lists: Iterable[list[T]]) -> list[T]:
    return list(chain.from_iterable(lists))


class _Underway:
    """A bucket in flight."""

    def __init__(self, bound: BoundBucket, slot: Tensor, launches: _Launches) -> None:
        self.bound, self.slot, self.launches = bound, slot, launches
        self.works: list[dist.Work] = []

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works = []


class Transfer:
    """A plan bound to a rank's tensors. Shards and places may move in memory between runs.

    group: ranks that hand over; it takes tensors of `device`. block_group: the peers of this rank's
    block, for the all-gathers on a GPU; without it shares are gathered point to point.
    scales: of every weight, by name, where they travel in FP8; dtype and places are uint8 then.
    in_place: the memory of shards and places is not given back between runs, so that views of it
    may be kept.
    """

    def __init__(
        self,
        plan: TransferPlan,
        shards: Callable[[], Held],  # my parts of the training weights
        places: Callable[[], list[Tensor]],  # where my regions belong, in the engine
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
        block_group: dist.ProcessGroup | None = None,
        scales: dict[str, Tensor] | None = None,
        in_place: bool = False,
    ) -> None:
        self.in_place = in_place
        self.plan, self.shards, self.places, self.scales = plan, shards, places, scales
        self.dtype, self.device, self.group, self.block_group = dtype, device, group, block_group
        self.launches = [_Launches(dtype) for _ in plan.buckets]
        self.moved = 0  # bytes that this rank sent, so far
        self.lies: list[tuple] = []  # where the tensors lay that the buckets were bound to
        self.buckets: list[BoundBucket] = []
        self.slots: list[Tensor] = []

    @torch.no_grad()
    def run(self) -> int:
        """Collective over both roles' ranks; returns the bytes that this rank sent.

        What was bound serves again as long as all tensors lie in the same storages. Between runs
        the slots have no memory. Without in_place nothing of the device is kept but the addresses
        that `launches` remember.
        """
        shards, places = self.shards(), self.places()
        lies = [_lies(tensor) for tensor in (*_tensors_of(shards), *places)]
        if lies != self.lies or not self.buckets:
            self.bind(shards, places)
            self.lies = lies
        before = self.moved
        if self.plan.block > 1 or any(bound.messages for bound in self.buckets):
            self.exchange()
        else:  # all that this rank has to do with stays on it
            for bound, launches in zip(self.buckets, self.launches, strict=True):
                launches.in_place(bound)
        self.release()
        return self.moved - before

    def exchange(self) -> None:
        """Sends and receives bucket by bucket, while the one before is unpacked."""
        for slot in self.slots:
            slot.untyped_storage().resize_(slot.nbytes)
        underway: _Underway | None = None
        for number, bound in enumerate(self.buckets):
            following = self.start(bound, self.slots[number % SLOTS], self.launches[number])
            if underway is not None:
                self.finish(underway)
            underway = following
        if underway is not None:
            self.finish(underway)

    def bind(self, shards: Held, places: list[Tensor]) -> None:
        """Makes the views of this rank's tensors and of the slots that the plan needs."""
        padded = self.block_group is not None
        binder = Binder(self.plan, shards, places, self.dtype, padded, self.scales)
        self.buckets = [binder.bind(bucket) for bucket in self.plan.buckets]
        size = max((bound.filled for bound in self.buckets), default=0)
        self.slots = [
            torch.empty(size, dtype=self.dtype, device=self.device)
            for _ in range(min(SLOTS, len(self.buckets)))
        ]
        for number, bound in enumerate(self.buckets):
            for message in bound.messages:
                message.lie_in(self.slots[number % SLOTS])

    def release(self) -> None:
        """Gives the slots' memory back; the views of them stay and are good again in the next run,
        if all are kept.
        """
        for slot in self.slots:
            slot.untyped_storage().resize_(0)
        if not self.in_place:
            self.buckets, self.slots, self.lies = [], [], []

    def start(self, bound: BoundBucket, slot: Tensor, launches: _Launches) -> _Underway:
        """Packs, and sends what need not wait for others."""
        now = _Underway(bound, slot, launches)
        launches.fill([m for m in bound.messages if m.sender == self.plan.me])
        self.hand_over(now)
        if not self.plan.handover:
            self.gather(now)
        launches.in_place(bound)
        return now

    def finish(self, now: _Underway) -> None:
        """Waits for the bucket and unpacks it."""
        now.wait()
        if self.plan.handover:
            self.gather(now)
            now.wait()
        now.launches.empty(now.bound.messages)

    def hand_over(self, now: _Underway) -> None:
        """Sends what others are to share or to keep, and takes what is this rank's."""
        ops = []
        for m in now.bound.messages:
            if m.receiver is not None:
                ops.append(dist.P2POp(dist.isend, m.data, m.receiver, self.group, HAND_OVER))
                self.moved += m.data.nbytes
            elif m.sender is not None and m.sender != self.plan.me:
                ops.append(dist.P2POp(dist.irecv, m.data, m.sender, self.group, HAND_OVER))
        now.works += dist.batch_isend_irecv(ops) if ops else []

    def gather(self, now: _Underway) -> None:
        """Gives this rank's share to every peer of its block, and takes theirs."""
        spans, position = now.bound.shares, self.plan.position
        if self.plan.block == 1 or position < 0 or spans[0][0] == spans[-1][1]:
            return
        shares = [now.slot[first:end] for first, end in spans]
        mine = shares[position]
        self.moved += (self.plan.block - 1) * mine.nbytes
        if self.block_group is not None:
            both = now.slot[spans[0][0] : spans[-1][1]]
            work = dist.all_gather_into_tensor(both, mine, group=self.block_group, async_op=True)
            now.works.append(work)
            return
        ops = []
        for peer, share in zip(self.plan.peers, shares, strict=True):
            if peer == self.plan.me:
                continue
            if len(share):
                ops.append(dist.P2POp(dist.irecv, share, peer, self.group, GATHER))
            if len(mine):
                ops.append(dist.P2POp(dist.isend, mine, peer, self.group, GATHER))
        now.works += dist.batch_isend_irecv(ops) if ops else []


def _tensors_of(held: Held) -> Iterator[Tensor]:
    return (tensor for parts in held.values() for _, tensor in parts)


def _lies(tensor: Tensor) -> tuple:
    """Returns where a tensor lies: in which storage, wherever this has its memory at the time."""
    return storage_id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()


def planned_bytes(plan: TransferPlan, itemsize: int, padded: bool) -> int:
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


@torch.no_grad()
def full_tensors(
    weights: list[Weight],
    shards: Callable[[], Held],
    table: list[list[int]],
    dtype: torch.dtype,
    num_bytes: int,
    topology: Topology,
) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, full tensor in `dtype`), one at a time, on the ranks of `table`.

    Collective over these and the holders, which must exhaust it although they are given nothing.
    All of them are ranks of `topology`. num_bytes: of a slot. A tensor is the caller's: it may be
    kept.
    """
    me, device = dist.get_rank(), topology.device
    held, ranks = shards(), tuple(tuple(row) for row in table)
    for weight in weights:
        plan = plan_of_full_tensor(me, weight, ranks, dtype.itemsize, num_bytes)
        full = [torch.empty(weight.shape, dtype=dtype, device=device)] if plan.peers else []
        # its own parts alone: a run looks at all that it is given, of every weight
        own = {weight.name: held[weight.name]} if weight.name in held else {}
        fill_one(plan, own, full, dtype, topology)
        if full:
            yield weight.name, full[0]


def fill_one(
    plan: TransferPlan, own: Held, full: list[Tensor], dtype: torch.dtype, topology: Topology
) -> None:
    """Makes one tensor whole, in the tensor of `full`, of this rank's parts and those of others."""
    Transfer(plan, lambda: own, lambda: full, dtype, topology.device, topology.group).run()


def gathered(
    named: Mapping[str, Shards], dtype: torch.dtype, bucket_bytes: int, topology: Topology,
    to_first: bool = False,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """(name, full tensor) of every weight on every rank of the topology, over which it is
    collective until it is exhausted. to_first: on its first rank alone, which writes them, say; to
    the others nothing is sent.
    """
    receivers = topology.ranks[:1] if to_first else topology.ranks
    if to_first:
        topology.connect()  # some ranks may have nothing to send
    weights, derived = agree_on_shards(named, topology.control), derived_of(named)
    rounds = rounds_of(weights, bucket_bytes // 2)
    if derived is not None:
        derived.arrange([[weight.name for weight in group] for group in rounds])
    for group in rounds:
        if derived is not None:
            derived.compute([weight.name for weight in group])
        table = [[rank] for rank in receivers]
        yield from full_tensors(
            group, lambda: lying(named, topology.device), table, dtype,
            slot_bytes(bucket_bytes, topology.device), topology,
        )  # fmt: skip
