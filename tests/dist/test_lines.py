"""Notes between ranks of a host: all arrive, whoever is behind; what breaks them says so."""

import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from ranks import run_ranks, start_ranks, wait_all

from spmdrl.distributed.local_sockets import (
    HELLO,
    NOTE,
    Line,
    Switchboard,
    _Word,
    answer,
    call,
    lay_lines,
    machine,
    open_door,
)

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
    from spmdrl.distributed import local_sockets as module
    from spmdrl.distributed.topology import Topology

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
    # each as if in a process of its own
    lines = [Line(end, rank, 0.5, Switchboard()) for rank, end in enumerate(ends)]
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


def test_ranks_that_wait_in_a_circle_get_on():
    """0 says more to 1 than a socket takes, and then what 2 waits for, for whom 1 waits."""
    boards, lines, count = [Switchboard() for _ in range(3)], {}, 3000
    for one, other in ((0, 1), (1, 2), (0, 2)):
        for me, them, end in zip((one, other), (other, one), socket.socketpair(), strict=True):
            lines[me, them] = Line(end, them, 30.0, boards[me])
    found = {}

    def first():
        for number in range(count):
            lines[0, 1].say(1, 0, number)
        lines[0, 2].say(1, 0, 0, 5)

    def second():
        found[1] = lines[1, 2].hear(1, 0, 0)
        found[0] = [lines[1, 0].hear(1, 0, number) for number in range(count)]

    def third():
        lines[2, 1].say(1, 0, 0, lines[2, 0].hear(1, 0, 0) + 1)

    threads = [threading.Thread(target=work, daemon=True) for work in (first, second, third)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {1: 6, 0: [0] * count}


def test_an_end_elsewhere_does_not_disturb():
    board, ends = Switchboard(), [socket.socketpair() for _ in range(3)]
    lines = [Line(here, rank, 0.5, board) for rank, (here, _) in enumerate(ends)]
    ends[1][1].close()
    del lines[2]
    ends[2][0].close()  # as when a topology is dropped
    begin, used = time.monotonic(), time.thread_time()
    with pytest.raises(TimeoutError, match="rank 0"):
        lines[0].hear(1, 0, 0)
    assert time.monotonic() - begin > 0.4 and time.thread_time() - used < 0.2
    ends[0][1].sendall(NOTE.pack(1, 0, 0, 7))
    assert lines[0].hear(1, 0, 0) == 7
    with pytest.raises(ConnectionResetError, match="rank 1"):
        lines[1].hear(1, 0, 0)


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


STRANGER = """
import socket, sys, time
found = []
for _ in range(int(sys.argv[2])):
    found.append(socket.socket(socket.AF_UNIX))
    found[-1].setblocking(False)
    try:
        found[-1].connect(chr(0) + sys.argv[1])
        found[-1].send(bytes.fromhex(sys.argv[3]))
    except OSError as error:
        pass
print("there", flush=True)
time.sleep(60)
"""


def strangers_at(name, number, said=b""):
    command = [sys.executable, "-c", STRANGER, name[1:], str(number), said.hex()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    return process


def test_strangers_at_the_door_are_not_let_in_and_cost_no_time():
    """Others on this host, who may even know the word."""
    secret = 12345
    with socket.socket(socket.AF_UNIX) as door:
        name = open_door(door, 8)
        strangers = [strangers_at(name, 2, HELLO.pack(3, secret)), strangers_at(name, 3)]
        word = _Word(machine(), os.getpid(), secret, name)
        friend = call(word, 3)
        assert call(replace(word, pid=strangers[0].pid), 3) is None, "somebody else's door"
        begin = time.monotonic()
        found = answer(door, {3: os.getpid()}, secret)
        assert time.monotonic() - begin < 1
        found[3].sendall(b"welcome")
        assert friend.recv(7) == b"welcome"
        found[3].close(), friend.close()
        for stranger in strangers:
            stranger.kill(), stranger.wait()


def test_a_door_that_others_keep_busy_is_no_line(monkeypatch):
    from spmdrl.distributed import local_sockets as module

    monkeypatch.setattr(module, "CALL_S", 0.5)
    with socket.socket(socket.AF_UNIX) as door:
        name = open_door(door, 1)
        stranger = strangers_at(name, 5)
        begin = time.monotonic()
        assert call(_Word(machine(), os.getpid(), 1, name), 3) is None
        assert answer(door, {3: os.getpid()}, 1) == {}
        assert time.monotonic() - begin < 2
        stranger.kill(), stranger.wait()


def shut_out_on(topology, how):
    """Rank 0 cannot open a door, or hears nobody at it."""
    from spmdrl.distributed import local_sockets as module
    from spmdrl.distributed.topology import Topology

    if topology.rank == 0 and how == "no door":
        module.open_door = lambda door, callers: ""
    if topology.rank == 2 and how == "deaf":
        module.answer = lambda door, callers, secret: {}
    built = Topology.build(topology.device, dp=-1)
    low = built.lowest(7 - topology.rank)
    return sorted(built.lines.by_rank), built.lines.complete, low


@pytest.mark.parametrize(
    ("how", "lines"), [("no door", [[], [2], [1]]), ("deaf", [[1], [0], []])], ids=lambda x: x
)
def test_ranks_do_without_a_line_that_cannot_be_laid(how, lines):
    found = run_ranks(3, shut_out_on, how)
    assert found == [(each, False, 5) for each in lines]


# ---- a rank that ends


def left_on(topology, path):
    if topology.rank == 1:
        os._exit(0)
    try:
        topology.lowest(1)
    except ConnectionResetError as error:
        Path(path, str(topology.rank)).write_text(str(error))


def test_who_waits_for_a_rank_that_ended_is_told(tmp_path):
    """Of four, two wait for it; the other two for those, whom here nobody ends."""
    procs = start_ranks(4, [(left_on, (str(tmp_path),))], str(tmp_path))
    wait_all(procs, 60)
    told = {path.name: path.read_text() for path in tmp_path.glob("[0-9]")}
    assert "Connection closed by peer: rank 1" in told["2"]
    assert all("Connection closed by peer: rank" in text for text in told.values())


def number_of_files_on(topology):
    group, before = topology.control, len(os.listdir("/proc/self/fd"))
    lines = lay_lines(topology.ranks, group, 60.0)
    during = len(os.listdir("/proc/self/fd"))
    del lines
    return before, during, len(os.listdir("/proc/self/fd"))


def test_lines_that_are_dropped_leave_no_open_file():
    for before, during, after in run_ranks(3, number_of_files_on):
        assert during == before + 2 and after == before
