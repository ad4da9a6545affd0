"""Checkpoints in the memory of hosts: copied, damaged, lost with a host, fetched, passed over."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import run_calls

from spmdrl.checkpoint import in_memory
from spmdrl.checkpoint.format import digest
from spmdrl.checkpoint.in_memory import Hosts, InMemory, find_in_memory
from spmdrl.config import ConfigError
from spmdrl.distributed.collectives import FailedElsewhere

pytestmark = pytest.mark.ranks

in_memory.CHUNK_BYTES = 4096  # in the ranks too
FILES = ("__{}_0.distcp", "rng_{}.pt", "empty_{}")  # of each rank


def content(name: str, step: int) -> bytes:
    """Of more than one message, of one, or none."""
    size = (
        0
        if "empty" in name
        else 3 * in_memory.CHUNK_BYTES + 77
        if name.endswith("distcp")
        else 1000
    )
    return (f"{name} of step {step} ".encode() * (size // 8 + 1))[:size]


def hosts_of(topology, per_host):
    rank = topology.rank
    return Hosts.gather(topology.control, f"host{rank // per_host}", rank % per_host)


def root_of(folder, hosts):
    """Each host has a folder of its own."""
    root = Path(folder, hosts.names[hosts.number])
    root.mkdir(exist_ok=True)
    return root


def save(topology, folder, per_host, step):
    """Every rank writes its files, as a Saver's thread would; the folders of all hosts."""
    hosts = hosts_of(topology, per_host)
    place = InMemory(root_of(folder, hosts), hosts)
    place.connect(topology.control)
    aside = Path(place.root, f"step_{step:08d}.tmp")
    place.make(aside, ["actor"])
    dist.barrier()
    names = [f"actor/{FILES[0].format(topology.rank)}"]
    names += [name.format(topology.rank) for name in FILES[1:]]
    for name in names:
        Path(aside, name).write_bytes(content(name, step))
    final = place.commit(
        aside, {name: digest(Path(aside, name)) for name in names}, topology.control
    )
    return sorted(path.name for path in final.rglob("*") if path.is_file())


def lose(topology, folder, host):
    if topology.rank == 0:
        shutil.rmtree(Path(folder, host))
    dist.barrier()


def flip(topology, folder, host, name):
    """A byte of a file of a host's checkpoint changes, in the memory, say."""
    if topology.rank == 0:
        [path] = Path(folder, host).glob(f"step_*/{name}")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    dist.barrier()


def find(topology, folder, per_host, after=0):
    """(step, what was passed over, whether the checkpoint is whole and right on this host)."""
    hosts = hosts_of(topology, per_host)
    found, passed = find_in_memory(root_of(folder, hosts), hosts, topology.control, after)
    if found is None:
        return None, passed, False
    files = [path for path in found.folder.rglob("*") if path.name != "manifest.json"]
    right = [
        path.read_bytes() == content(str(path.relative_to(found.folder)), found.step)
        for path in files
        if path.is_file()
    ]
    assert found.age_s < 600
    return found.step, passed, len(right) == 12 and all(right)


@contextmanager
def full_after(topology, rank, pieces):
    """Meanwhile the memory of this rank's host is full when it has written so many messages."""
    written, write = [], in_memory.write_piece

    def refuse(folder, piece, data):
        if len(written) == pieces:
            raise OSError(errno.ENOSPC, f"no room for {piece[0]}")
        written.append(piece)
        write(folder, piece, data)

    in_memory.write_piece = refuse if topology.rank == rank else write
    try:
        yield
    finally:
        in_memory.write_piece = write


def save_without_room(topology, folder, per_host, step):
    """What is raised; rank 1 has no room for the second message of a copy."""
    with full_after(topology, 1, 1), pytest.raises((OSError, FailedElsewhere)) as told:
        save(topology, folder, per_host, step)
    return f"{type(told.value).__name__}: {told.value}"


def find_without_room(topology, folder, per_host):
    with full_after(topology, 3, 2):
        return find(topology, folder, per_host)


def leave_half(topology, folder, host, step):
    """Ranks were killed while they wrote the checkpoint of a step."""
    if topology.rank == 0:
        Path(folder, host, f"step_{step:08d}.tmp").mkdir()
        Path(folder, host, f"step_{step:08d}.tmp", "half").write_bytes(b"x")
    dist.barrier()


def one_size(topology):
    """Hosts with different numbers of ranks."""
    with pytest.raises(ConfigError, match="hosts have 1 and 3 ranks"):
        Hosts.gather(topology.control, "a", max(topology.rank - 1, 0))


def test_what_hosts_have_together(tmp_path):
    folder = str(tmp_path)
    calls = [
        (save, (folder, 2, 1)),
        (save, (folder, 2, 2)),
        (leave_half, (folder, "host0", 7)),
        (lose, (folder, "host1")),
        (find, (folder, 2)),
        (find, (folder, 2, 2)),  # nothing beyond step 2
        (save, (folder, 2, 3)),
        (flip, (folder, "host0", "actor/__1_0.distcp")),
        (find, (folder, 2)),  # from the copy, which mends it
        (lose, (folder, "host1")),
        (find, (folder, 2)),
        (flip, (folder, "host0", "rng_3.pt")),
        (flip, (folder, "host1", "rng_3.pt")),
        (find, (folder, 2)),
        (save, (folder, 1, 4)),  # four hosts: two neighbours are one too many
        (lose, (folder, "host2")),
        (find, (folder, 1)),
        (one_size, ()),
    ]
    results = run_calls(4, calls)
    told = {number: results[number] for number, (call, _) in enumerate(calls) if call is find}
    assert results[1][0] == results[1][3] and len(results[1][0]) == 13  # with the manifest
    assert not list(tmp_path.glob("*/step_00000001"))  # step 2 took its place
    assert not list(tmp_path.glob("*/step_*.tmp"))
    assert told[4] == [(2, [], True)] * 4
    assert told[5] == [(None, [], False)] * 4
    assert told[8] == told[10] == [(3, [], True)] * 4
    wrong = "step 3: no host has rng_3.pt as it was written"
    assert told[13] == [(None, [wrong], False)] * 4
    assert told[16] == [(4, [], True)] * 4


def test_no_rank_waits_for_one_whose_memory_is_full(tmp_path):
    folder = str(tmp_path)
    calls = [
        (save, (folder, 2, 1)),
        (save_without_room, (folder, 2, 2)),
        (lose, (folder, "host1")),
        (find_without_room, (folder, 2)),
        (find, (folder, 2)),
    ]
    _, raised, _, passed, found = run_calls(4, calls, timeout_s=60)
    assert raised[1] == "OSError: [Errno 28] no room for actor/__3_0.distcp"
    assert {raised[rank] for rank in (0, 2, 3)} == {"FailedElsewhere: rank 1 of 4 failed"}
    [(step, (why,), _)] = {(step, tuple(why), whole) for step, why, whole in passed}
    assert step is None and why.startswith("step 1: [Errno 28] no room for ")
    assert found == [(1, [], True)] * 4  # step 2 does not stand anywhere
