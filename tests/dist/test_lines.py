"""Notes between ranks of a host: all arrive, whoever is behind; what breaks them says so."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest
from ranks import run_ranks, start_ranks, wait_all

from spmdrl.lines import HELLO, Line, answer, lay_lines

# ---- agreements


def lowest_on(topology, values):
    found = [topology.lowest(value[topology.rank]) for value in values]
    return topology.lines.complete, found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_everyone_hears_the_least_that_anyone_says(world):
    values = [[(7 * rank + turn) % (world + 2) - 1 for rank in range(world)] for turn in range(20)]
    values += [[-(1 << 60)] * world, [1 << 60] * world]
    for complete, found in run_ranks(world, lowest_on, values):
        assert complete
        assert found == [min(each) for each in values]


def apart_on(topology):
    """Of three ranks the last is on another host."""
    from spmdrl import lines as module
    from spmdrl.topology import Topology

    if topology.rank == 2:
        module.machine = lambda: ("another", "host")
    mixed = Topology.build(topology.device, dp=-1)
    part = Topology.build(topology.device, ranks=[0, 2], dp=-1)
    low = [mixed.lowest(rank) for rank in (5 - topology.rank, topology.rank, 3)]
    of_part = part.lowest(topology.rank) if part.here else None
    return mixed.lines.complete, sorted(mixed.lines.by_rank), low, of_part, part.lines.complete


def test_ranks_of_several_hosts_agree_over_gloo():
    found = run_ranks(3, apart_on)
    assert [each[0] for each in found] == [False] * 3
    assert [each[1] for each in found] == [[1], [0], []]
    assert [each[2] for each in found] == [[3, 0, 3]] * 3
    assert [each[3:] for each in found] == [(0, False), (None, False), (0, False)]


# ---- one line


@pytest.fixture
def pair():
    ends = socket.socketpair()
    lines = [Line(end, rank, 0.5) for rank, end in enumerate(ends)]
    yield lines
    for end in ends:
        end.close()


def test_notes_are_told_apart_and_heard_in_any_order(pair):
    here, there = pair
    for number in range(3):
        here.say(1, 0, number, 10 + number)
        here.say(2, 0, number, 20 + number)
        here.say(1, 5, number, -1)
    assert [there.hear(1, 0, number) for number in (2, 0, 1)] == [12, 10, 11]
    assert [there.hear(2, 0, number) for number in (0, 1, 2)] == [20, 21, 22]
    assert [there.hear(1, 5, number) for number in (0, 1, 2)] == [-1, -1, -1]
    assert not there.heard


def test_both_may_say_more_than_a_socket_takes(pair):
    count = 20_000
    found = {}

    def talk(line):
        for number in range(count):
            line.say(1, 0, number, number)
        found[line.rank] = sum(line.hear(1, 0, number) for number in range(count))

    for line in pair:
        line.limit_s = 30.0
    threads = [threading.Thread(target=talk, args=(line,), daemon=True) for line in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: sum(range(count)), 1: sum(range(count))}


def test_silence_and_an_end_are_told_with_the_rank(pair):
    here, there = pair
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match="rank 0 has said nothing"):
        here.hear(1, 0, 0)
    assert 0.4 < time.monotonic() - begin < 5
    there.say(1, 0, 0, 8)
    there.sock.close()
    assert here.hear(1, 0, 0) == 8, "what was said before is heard"
    for what in (lambda: here.hear(1, 0, 1), lambda: here.say(1, 0, 0)):
        with pytest.raises(ConnectionResetError, match="Connection closed by peer: rank 0"):
            what()


def test_a_stranger_at_the_door_is_not_let_in():
    with socket.socket(socket.AF_UNIX) as door:
        door.bind("")
        door.listen(8)
        strangers = [socket.socket(socket.AF_UNIX) for _ in range(4)]
        for stranger in strangers:
            stranger.connect(door.getsockname())
        for stranger, said in zip(strangers, [b"hello", HELLO.pack(3, 11), b""], strict=False):
            stranger.sendall(said)
        strangers[2].close()
        strangers[3].sendall(HELLO.pack(9, 12345))  # the word, and nobody that is expected
        friend = socket.socket(socket.AF_UNIX)
        friend.connect(door.getsockname())
        friend.sendall(HELLO.pack(3, 12345))
        rank, sock = answer(door, {1, 3}, 12345)
        sock.sendall(b"welcome")
        assert rank == 3 and friend.recv(7) == b"welcome"
        for stranger in (strangers[0], strangers[1], strangers[3]):
            assert stranger.recv(1) == b""
        sock.close()
        friend.close()
        for stranger in strangers:
            stranger.close()


# ---- a rank that ends


def left_on(topology, path):
    if topology.rank == 1:
        os._exit(0)
    try:
        topology.lowest(1)
    except ConnectionResetError as error:
        Path(path).write_text(str(error))


def test_who_waits_for_a_rank_that_ended_is_told(tmp_path):
    procs = start_ranks(2, [(left_on, (str(tmp_path / "told"),))], str(tmp_path))
    assert wait_all(procs, 60)
    assert "Connection closed by peer: rank 1" in (tmp_path / "told").read_text()


def number_of_files_on(topology):
    group, before = topology.control, len(os.listdir("/proc/self/fd"))
    lines = lay_lines(topology.ranks, group, 60.0)
    during = len(os.listdir("/proc/self/fd"))
    del lines
    return before, during, len(os.listdir("/proc/self/fd"))


def test_lines_that_are_dropped_leave_no_open_file():
    for before, during, after in run_ranks(3, number_of_files_on):
        assert during == before + 2 and after == before
