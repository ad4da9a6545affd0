"""Sequences and per-token results on their way between the ranks of roles.

Point to point, between ranks that have something for each other: no rank holds the whole batch,
none waits for traffic that is not its own, nothing is pickled or padded. Both ends know from the
`BatchAssignment` what is sent, so a message has no header. Sequences leave in the order in which
they were packed and arrive in their place: a field is moved as it lies in memory.

Tensors are on the CPU; engines take a micro-batch to their device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.data.packing import BatchAssignment, empty_batch
from spmdrl.data.reply_images import from_bytes, keys_in, to_bytes
from spmdrl.data.routing import Routing
from spmdrl.distributed.placement import Ranks
from spmdrl.distributed.topology import Topology, new_group
from spmdrl.segments import lengths_to_cu_seqlens
from spmdrl.types import TOKEN_FIELDS, Batch, Picture

FIELDS = ("token_ids", "loss_mask", "rollout_logprobs", "policy_version")  # of the actor
ASKED_FIELDS = ("token_ids", "loss_mask")  # of a role that is only asked about the tokens
SEQ_FLOATS = 4  # rewards, valid, greedy, prompts; the reward keys follow


@dataclass
class P2PChannel:
    """Messages between ranks of the job. What was sent is kept until it has left.

    Made on all ranks of the job together: it has a group of its own, whose ranks are all connected.
    Where gloo connects two ranks at their first message, a send waits until the other rank turns to
    that message, which it may do only when this rank has gone on.
    """

    topology: Topology  # of the job
    step: int = 0  # that new messages belong to
    under_way: list[tuple[int, dist.Work, Tensor]] = field(default_factory=list)
    moved_bytes: int = 0  # received by this rank since it was last read
    group: dist.ProcessGroup = field(init=False)

    def __post_init__(self) -> None:
        self.group = new_group(self.topology.ranks, "gloo", connected=True)

    @property
    def rank(self) -> int:
        return self.topology.rank

    def send(self, values: Tensor, to: int) -> None:
        """Returns at once; `values` must not change before the receiver has it."""
        if values.numel() == 0:
            return
        values = sendable(values.contiguous())
        work = dist.isend(values, to, self.group)
        assert work is not None  # this rank is in the group
        self.under_way.append((self.step, work, values))

    def expect(self, place: Tensor, source: int) -> list[dist.Work]:
        """Returns the receives that fill `place` with what `source` sends next, once they are
        waited for.
        """
        if place.numel() == 0:
            return []
        self.moved_bytes += place.nbytes
        work = dist.irecv(sendable(place), source, self.group)
        assert work is not None  # this rank is in the group
        return [work]

    def begin(self, step: int, delivered: int) -> None:
        """Marks all that is sent from here on as of `step`. Lets go of what was sent up to step
        `delivered`, once it has arrived: that is known of a message only when it is waited for.
        """
        self.step = step
        self.wait_until_delivered(delivered)

    def wait_until_delivered(self, step: int | None = None) -> None:
        """step: of no later messages than its own."""
        for sent_in, work, _ in self.under_way:
            if step is None or sent_in <= step:
                work.wait()
        self.under_way = [each for each in self.under_way if step is not None and each[0] > step]


def sendable(values: Tensor) -> Tensor:
    """Views the memory in a dtype that gloo sends, which int16 is not."""
    return values.view(torch.uint8) if values.dtype == torch.int16 else values


# ---- the batch: from the ranks that sampled to those that train


def packing_order(assignment: BatchAssignment, ranks: Ranks, maker: int) -> Tensor:
    """Rows of `maker`, as it is to pack them: by owner, mini-batch, address."""
    rows = assignment.by_mini_batch((assignment.sample_ranks == maker).nonzero().flatten())
    return rows[torch.argsort(assignment.train_ranks[ranks][rows], stable=True)]


def send_batch(
    batch: Batch,
    assignment: BatchAssignment,
    ranks: Ranks,
    fields: tuple[str, ...],
    post: P2PChannel,
    pictures: Mapping[int, Picture] | None = None,
) -> Batch:
    """Sends each owner its sequences; returns this rank's own share, as `receive_batch` wants it.

    batch: what this rank made, in `packing_order`. pictures: what the numbers in its reply_images
    stand for, where these are among the fields.
    """
    rows = packing_order(assignment, ranks, post.rank)
    assert batch.num_seqs == len(rows), (batch.num_seqs, len(rows))
    floats = seq_floats(batch)
    own = batch.select([])
    for owner in ranks:
        seqs = (assignment.train_ranks[ranks][rows] == owner).nonzero().flatten()
        if len(seqs) == 0:
            continue
        first, end = int(seqs[0]), int(seqs[-1]) + 1
        tokens = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[end]))
        if owner == post.rank:
            own = span(batch, first, end)
            continue
        for name in fields:
            post.send(getattr(batch, name)[tokens], owner)
        post.send(floats[first:end], owner)
        if pictures is not None:
            assert batch.reply_images is not None
            sent = to_bytes(pictures, keys_in(batch.reply_images[tokens]))
            post.send(torch.tensor([len(sent)]), owner)
            post.send(sent, owner)
    return own


def receive_batch(
    own: Batch | None,
    assignment: BatchAssignment,
    ranks: Ranks,
    fields: tuple[str, ...],
    num_keys: int,
    post: P2PChannel,
    routing: Routing | None = None,
    pictures: dict[int, Picture] | None = None,
    support_width: int = 0,
) -> list[Batch]:
    """This rank's Batch of each mini-batch, sequences by address.

    own: what `send_batch` returned; None on a rank that did not sample. A field is put in order
    while the next ones are still under way. routing: of the routed_experts, where they are sent.
    pictures: those of replies, where they are sent; what arrives is added. support_width: columns
    of the support_ids, where they are sent.
    """
    rows = assignment.held(ranks, post.rank)
    makers = assignment.sample_ranks[rows]
    if own is None:
        own = empty_batch(
            rows.new_zeros(0), num_keys, per_turn="turn_rewards" in fields, routing=routing,
            reply_images="reply_images" in fields,
            support_width=support_width if "support_ids" in fields else 0,
        )  # fmt: skip
    senders = [maker for maker in makers.unique().tolist() if maker != post.rank]
    theirs = [rows[makers == sender] for sender in senders]
    lens = torch.cat([assignment.seq_lens[part] for part in [*theirs, rows[:0]]])
    cu_seqlens = lengths_to_cu_seqlens(lens)
    places = {
        name: torch.empty((int(cu_seqlens[-1]), *values.shape[1:]), dtype=values.dtype)
        for name, values in ((name, getattr(own, name)) for name in fields)
    }
    places["floats"] = torch.empty(len(lens), SEQ_FLOATS + num_keys, dtype=torch.float64)
    works: dict[str, list[dist.Work]] = {name: [] for name in places}
    first = 0
    for sender, part in zip(senders, theirs, strict=True):
        seqs = slice(first, first + len(part))
        tokens = slice(int(cu_seqlens[first]), int(cu_seqlens[seqs.stop]))
        for name, place in places.items():
            works[name] += post.expect(place[seqs if name == "floats" else tokens], sender)
        first = seqs.stop
    if pictures is not None:
        pictures |= receive_pictures(senders, post)

    # where each row lies: what arrives, then what is this rank's own
    lying = torch.cat([*theirs, rows[makers == post.rank]])
    by_row = torch.argsort(lying)
    order = by_row[torch.searchsorted(lying[by_row], rows)]
    ids = assignment.mini_batch_ids[rows]
    counts = torch.bincount(ids, minlength=assignment.num_mini_batches).tolist()
    minis = [
        empty_batch(assignment.seq_lens[part], num_keys, without=fields)
        for part in rows.split(counts)
    ]
    for mini, part in zip(minis, rows.split(counts), strict=True):
        mini.groups, mini.indices = assignment.groups[part], assignment.indices[part]
    for name, place in places.items():
        for work in works[name]:
            work.wait()
        if name == "floats":
            floats = torch.cat([place, seq_floats(own)])[order].split(counts)
            for mini, values in zip(minis, floats, strict=True):
                set_seq_floats(mini, values)
            continue
        pieces = place.split(lens.tolist())
        pieces += getattr(own, name).split(own.seq_lens.tolist())
        for mini, part in zip(minis, order.split(counts), strict=True):
            picked = [pieces[i] for i in part.tolist()]
            setattr(mini, name, torch.cat(picked) if picked else place[:0])
    return minis


def receive_pictures(senders: list[int], post: P2PChannel) -> dict[int, Picture]:
    """Returns the images of replies that these ranks send behind all else, by their numbers."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in senders]
    works = [work for size, sender in zip(sizes, senders, strict=True)
             for work in post.expect(size, sender)]  # fmt: skip
    for work in works:
        work.wait()
    places = [torch.empty(int(size), dtype=torch.uint8) for size in sizes]
    works = [work for place, sender in zip(places, senders, strict=True)
             for work in post.expect(place, sender)]  # fmt: skip
    for work in works:
        work.wait()
    return {key: picture for place in places for key, picture in from_bytes(place).items()}


def seq_floats(batch: Batch) -> Tensor:
    """(num_seqs, SEQ_FLOATS + num_keys) float64: what it has beside its address and tokens."""
    columns = [batch.rewards, batch.valid.double(), batch.greedy_rewards, batch.prompts.double()]
    return torch.cat([torch.stack(columns, dim=1), batch.reward_components], dim=1)


def set_seq_floats(batch: Batch, values: Tensor) -> None:
    """Sets the fields that `seq_floats` has packed into columns."""
    batch.rewards, batch.greedy_rewards = values[:, 0].contiguous(), values[:, 2].contiguous()
    batch.valid, batch.reward_components = values[:, 1].float(), values[:, SEQ_FLOATS:].contiguous()
    batch.prompts = values[:, 3].long()


def span(batch: Batch, first: int, end: int) -> Batch:
    """Sequences first .. end - 1, as views."""
    tokens = slice(int(batch.cu_seqlens[first]), int(batch.cu_seqlens[end]))
    views = {
        name: value[tokens if name in TOKEN_FIELDS else slice(first, end)]
        for name, value in batch.tensors()
    }
    lens = batch.seq_lens[first:end]
    return Batch(**views, cu_seqlens=lengths_to_cu_seqlens(lens))


# ---- the assignment itself, for ranks that train and did not sample


def send_assignment(
    assignment: BatchAssignment, step_info: dict[str, Any], to: int, post: P2PChannel
) -> None:
    """Called on one rank. step_info: JSON-able, a few numbers."""
    columns = [
        assignment.groups, assignment.indices, assignment.seq_lens, assignment.sample_ranks,
        assignment.mini_batch_ids, assignment.prefix_lens, *assignment.train_ranks.values(),
    ]  # fmt: skip
    table = torch.stack(columns, dim=1)
    text = torch.frombuffer(bytearray(json.dumps(step_info).encode()), dtype=torch.uint8)
    sizes = torch.tensor([len(table), assignment.num_mini_batches, len(text)])
    for values in (sizes, text, table):
        post.send(values, to)


def receive_assignment(
    source: int, roles: list[Ranks], post: P2PChannel
) -> tuple[BatchAssignment, dict[str, Any]]:
    """roles: as they were given to `assign_to_ranks`, in that order."""

    def receive(place: Tensor) -> Tensor:
        for work in post.expect(place, source):
            work.wait()
        return place

    num_seqs, num_mini_batches, length = receive(torch.zeros(3, dtype=torch.int64)).tolist()
    step_info = json.loads(bytes(receive(torch.zeros(length, dtype=torch.uint8)).tolist()))
    table = receive(torch.zeros(num_seqs, 6 + len(roles), dtype=torch.int64))
    groups, indices, seq_lens, sample_ranks, mini_batch_ids, prefix_lens, *by_role = (
        column.contiguous() for column in table.unbind(1)
    )
    assignment = BatchAssignment(
        groups, indices, seq_lens, sample_ranks, mini_batch_ids, prefix_lens,
        train_ranks=dict(zip(roles, by_role, strict=True)), num_mini_batches=num_mini_batches,
    )  # fmt: skip
    return assignment, step_info


# ---- what one role says of the tokens, to another


def send_results(
    values: list[Tensor],
    assignment: BatchAssignment,
    source: Ranks,
    target: Ranks,
    post: P2PChannel,
) -> None:
    """values: of each mini-batch of this rank as one of `source`, (num_tokens,) or (num_tokens, k).

    Returns at once, as `P2PChannel.send` does.
    """
    rows = assignment.held(source, post.rank)
    lens = assignment.seq_lens[rows]
    everything = torch.cat(values)
    for owner in target:
        if owner != post.rank:
            chosen = assignment.train_ranks[target][rows] == owner
            post.send(everything[torch.repeat_interleave(chosen, lens)], owner)


def receive_results(
    own: list[Tensor] | None,
    assignment: BatchAssignment,
    source: Ranks,
    target: Ranks,
    post: P2PChannel,
    like: Tensor | None = None,
) -> list[Tensor]:
    """(num_tokens,) or (num_tokens, k) of each mini-batch of this rank as one of `target`.

    own: what this rank itself has of them as one of `source`; None where it is not. like: has their
    dtype and the axes behind the first; None: float32, (num_tokens,).
    """
    like = torch.zeros(0) if like is None else like
    rows = assignment.held(target, post.rank)
    lens = assignment.seq_lens[rows]
    senders = assignment.train_ranks[source][rows]
    result = like.new_zeros(int(lens.sum()), *like.shape[1:])
    works: list[tuple[list[dist.Work], Tensor, Tensor]] = []
    for sender in senders.unique().tolist():
        places = torch.repeat_interleave(senders == sender, lens)
        if sender == post.rank:
            assert own is not None
            held = assignment.held(source, post.rank)
            chosen = assignment.train_ranks[target][held] == post.rank
            wanted = torch.repeat_interleave(chosen, assignment.seq_lens[held])
            result[places] = torch.cat(own)[wanted]
        else:
            values = like.new_zeros(int(places.sum()), *like.shape[1:])
            works.append((post.expect(values, sender), places, values))
    for pending, places, values in works:
        for work in pending:
            work.wait()
        result[places] = values
    ids = assignment.mini_batch_ids[rows]
    sizes = [int(lens[ids == m].sum()) for m in range(assignment.num_mini_batches)]
    return list(result.split(sizes))
