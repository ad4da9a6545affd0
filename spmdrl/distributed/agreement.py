"""Words that ranks pass each other along a tree: the least of their numbers, objects for the first
rank.

Rank r talks to r without its lowest set bit, its parent, and to its children r + 1, r + 2, r + 4,
..., as long as these are below r's own lowest bit and below the size of the group:

    7 -> 6 -> 4 -> 0      5 -> 4      3 -> 2 -> 0      1 -> 0

With 8 ranks on each host, three rounds stay within hosts; from then on one leader per host
talks to others. A rank that waits has waited for at most log2(size) others, and sends and receives
two messages on average, where a ring of `size` ranks makes 2 * (size - 1) steps one after the
other. The functions use the methods of the group alone, so that a thread whose group no other
thread uses may call them. The group is gloo or has gloo for CPU tensors.
"""

from __future__ import annotations

import pickle
import struct
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

TAG = 0x59A1  # of these messages, so that no other receive on the group takes one
FIRST_BYTES = 4096  # of a message with objects; most need no second one


def children(rank: int, size: int) -> list[int]:
    """Returns the ranks whose messages come to `rank`, the nearest first."""
    found, distance = [], 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            found.append(rank + distance)
        distance *= 2
    return found


def parent(rank: int) -> int:
    """Returns the rank that `rank` reports to; rank 0 reports to nobody."""
    return rank & (rank - 1)


def lowest(value: int, group: dist.ProcessGroup) -> int:
    """Returns the least that any rank of the group says, on all of them. Collective."""
    rank, below = group.rank(), children(group.rank(), group.size())
    least, heard = torch.tensor([value]), torch.empty(1, dtype=torch.int64)
    for child in below:
        group.recv([heard], child, TAG).wait()
        torch.minimum(least, heard, out=least)
    if rank > 0:
        group.send([least], parent(rank), TAG).wait()
        group.recv([least], parent(rank), TAG).wait()
    # the farthest has the longest way to go on
    for work in [group.send([least], child, TAG) for child in reversed(below)]:
        work.wait()
    return int(least)


def gather_to_first(value: Any, group: dist.ProcessGroup) -> list[Any] | None:
    """Returns every rank's value in rank order on the group's rank 0, None on all others.
    Collective.

    Values are pickled once, on the rank that they come from; other ranks pass the bytes on.
    """
    rank = group.rank()
    parts = [pickle.dumps(value)]  # of the ranks from this one on, consecutive
    for child in children(rank, group.size()):
        parts += receive_parts(group, child)
    if rank > 0:
        send_parts(parts, group, parent(rank))
        return None
    return [pickle.loads(part) for part in parts]


def broadcast_from_first(value: Any, group: dist.ProcessGroup) -> Any:
    """Returns the value of the group's rank 0 on all its ranks. Collective."""
    rank = group.rank()
    parts = [pickle.dumps(value)] if rank == 0 else receive_parts(group, parent(rank))
    for child in reversed(children(rank, group.size())):
        send_parts(parts, group, child)
    return value if rank == 0 else pickle.loads(parts[0])


def gather_to_all(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Returns every rank's value in rank order, on all ranks: dist.all_gather_object in log2(size)
    rounds, for what is small. Collective.
    """
    return broadcast_from_first(gather_to_first(value, group), group)


def send_parts(parts: list[bytes], group: dist.ProcessGroup, to: int) -> None:
    """Sends a first message of FIRST_BYTES, and what does not fit into it in a second one.

    It has the number of parts and the length of what follows: the sizes of the parts, and the
    parts end to end. Numbers are int64, little-endian.
    """
    body = struct.pack(f"<{len(parts)}q", *map(len, parts)) + b"".join(parts)
    message = struct.pack("<qq", len(parts), len(body)) + body
    first = bytearray(message[:FIRST_BYTES].ljust(FIRST_BYTES, b"\0"))
    group.send([torch.frombuffer(first, dtype=torch.uint8)], to, TAG).wait()
    if len(message) > FIRST_BYTES:
        rest = torch.frombuffer(bytearray(message[FIRST_BYTES:]), dtype=torch.uint8)
        group.send([rest], to, TAG).wait()


def receive_parts(group: dist.ProcessGroup, source: int) -> list[bytes]:
    """Receives what `send_parts` sends."""
    first = torch.empty(FIRST_BYTES, dtype=torch.uint8)
    group.recv([first], source, TAG).wait()
    message = first.numpy().tobytes()
    count, length = struct.unpack_from("<qq", message)
    body = message[16 : 16 + length]
    if len(body) < length:
        rest = torch.empty(length - len(body), dtype=torch.uint8)
        group.recv([rest], source, TAG).wait()
        body += rest.numpy().tobytes()
    places = list(accumulate(struct.unpack_from(f"<{count}q", body), initial=8 * count))
    return [body[start:end] for start, end in pairwise(places)]
