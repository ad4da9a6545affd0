"""Messages arrive whole and in order, read from memory or over the socket."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from ranks import run_ranks

from spmdrl.distributed.p2p import READ_BYTES

SIZES = [1, 7, 20_000, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, 3 << 20, 5, 9 << 20]


def content(sender, receiver, number, tag):
    generator = torch.Generator().manual_seed(hash((sender, receiver, number, tag)) % 2**31)
    return torch.randint(256, (SIZES[number],), dtype=torch.uint8, generator=generator)


def exchanged_on(topology, how):
    """Everyone sends everyone all sizes under two tags, and spoils what it sent afterwards."""
    from spmdrl.distributed import p2p as module

    if how == "socket":
        module.LIBC = object()  # of another system: no such call
    wire, me = module.P2PTransport(topology), topology.rank
    others = [rank for rank in topology.ranks if rank != me]
    readable = sorted(wire.readable), sorted(wire.readers)
    if how == "mixed":  # ranks 0 and 1 share a machine, the third has one of its own
        beside = {0: 1, 1: 0}.get(me)
        wire.readable = {r: pid for r, pid in wire.readable.items() if r == beside}
        wire.readers &= {beside}
    sent, come = [], []
    for number in range(len(SIZES)):
        for tag in (3, 4):
            for other in others:
                values = content(me, other, number, tag)
                sent.append((values, wire.isend(values, other, tag)))
                place = torch.zeros(SIZES[number], dtype=torch.uint8)
                come.append((other, number, tag, place, wire.irecv(place, other, tag)))
    wrong = 0
    for other, number, tag, place, work in come:
        work.wait()
        wrong += not torch.equal(place, content(other, me, number, tag))
    for values, work in sent:
        work.wait()
        values.zero_()
    lines = wire.lines.values()
    return readable, wrong, sum(x.shown.total() for x in lines), sum(len(x.heard) for x in lines)


def can_read() -> bool:
    """Whether the kernel lets a process read its sibling's memory; Yama and seccomp may not."""
    return run_ranks(2, readable_on) == [[1], [0]]


def readable_on(topology):
    from spmdrl.distributed.p2p import P2PTransport

    return list(P2PTransport(topology).readable)


@pytest.fixture(scope="module")
def may_read():
    if not can_read():
        pytest.skip("the kernel forbids to read another process's memory")


@pytest.mark.parametrize("how", ["memory", "socket", "mixed"])
def test_messages_arrive_whole_and_in_order(how, may_read):
    for rank, (readable, wrong, shown, left) in enumerate(run_ranks(3, exchanged_on, how)):
        others = [r for r in range(3) if r != rank]
        assert readable == (([], []) if how == "socket" else (others, others))
        assert wrong == 0 and left == 0
        large = 2 * sum(size >= READ_BYTES for size in SIZES)
        assert shown == large * {"memory": 2, "socket": 0, "mixed": int(rank < 2)}[how]


def scattered_on(topology):
    """One message into more tensors than one call takes."""
    from spmdrl.distributed.p2p import P2PTransport, Spans

    wire, count = P2PTransport(topology), 2500
    values = torch.arange(count * 64, dtype=torch.int32)
    if topology.rank == 0:
        assert not wire.reads(1, values.nbytes // 10) and wire.reads(1, values.nbytes)
        wire.isend(values, 1).wait()
        return True
    # every other row, so that none lies beside the next
    rows = list(torch.zeros(2 * count, 64, dtype=torch.int32)[::2])
    wire.irecv(Spans(rows), 0).wait()
    return torch.equal(torch.stack(rows).flatten(), values)


def test_a_message_is_read_into_many_places(may_read):
    assert run_ranks(2, scattered_on) == [True, True]


def waited_for_on(topology):
    """Whether a sender waits for its reader; what comes of waits out of turn, and twice."""
    import time

    from spmdrl.distributed.p2p import P2PTransport

    wire, size = P2PTransport(topology), 1 << 20
    if topology.rank == 0:
        values = torch.ones(size, dtype=torch.uint8)
        begin = time.monotonic()
        wire.isend(values, 1).wait()
        waited = time.monotonic() - begin
        values.zero_()
        both = [torch.full((size,), i, dtype=torch.uint8) for i in (2, 3)]
        for work in [wire.isend(values, 1) for values in both]:
            work.wait()
        return waited
    place = torch.zeros(size, dtype=torch.uint8)
    work = wire.irecv(place, 0)
    time.sleep(1)
    work.wait()
    work.wait()
    found = [int(place.min())]
    places = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
    first, second = (wire.irecv(place, 0) for place in places)
    second.wait()
    first.wait()
    return [*found, *(int(place.min()) for place in places)]


def test_a_sender_waits_for_its_reader_who_reads_in_any_order(may_read):
    waited, found = run_ranks(2, waited_for_on)
    assert waited > 0.5
    assert found == [1, 2, 3]


def paired_on(topology):
    from spmdrl.distributed.p2p import P2PTransport
    from spmdrl.distributed.topology import Topology

    pair = Topology.build(topology.device, ranks=[1, 2], dp=-1)
    return list(P2PTransport(pair).readable) if pair.here else None


def test_ranks_are_named_by_their_numbers_in_the_job(may_read):
    found = run_ranks(3, paired_on)
    assert found == [None, [2], [1]]


def test_memory_that_is_not_there_is_an_error_and_not_garbage(may_read):
    from spmdrl.distributed import p2p as wire

    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    place = torch.full((16,), 7, dtype=torch.uint8)
    spans = wire.Spans([place[:5], place[5:]])
    with pytest.raises(OSError, match=rf"cannot read the memory of process {other.pid}: Bad addr"):
        wire.read_memory(other.pid, 8, spans)
    os.kill(other.pid, signal.SIGKILL)
    other.wait()
    with pytest.raises(ConnectionResetError, match=f"closed by peer: no process {other.pid}"):
        wire.read_memory(other.pid, 8, spans)
    assert (place == 7).all()
