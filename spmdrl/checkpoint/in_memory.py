"""Checkpoints in the memory of the hosts, from which a job goes on that has lost a rank or a host.

Each host has a folder of its own in /dev/shm. It holds what its ranks wrote of a checkpoint, a copy
of what the ranks of the host before it wrote, and the manifest of the whole:

    host A: step_7/ of A and of C      host B: of B and of A      host C: of C and of B

So the checkpoint is whole where no two neighbours are lost at once. After a change of hosts the
newest step is looked for of which the hosts together have every file, by its checksum, and each
host fetches what it lacks; format.load then reads it as one on disk.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from spmdrl.checkpoint.disk_space import free_bytes, mib, writing
from spmdrl.checkpoint.format import Digest, commit, damaged_file, recover, share_of, steps_in
from spmdrl.config import ConfigError
from spmdrl.config.words import counted
from spmdrl.distributed.agreement import gather_to_all
from spmdrl.distributed.collectives import together

CHUNK_BYTES = 16 << 20  # of a message between hosts
TAG = 0x59A2  # of these messages
MANIFEST = "manifest.json"

Manifest = dict[str, Digest]  # by a file's path within the folder
Piece = tuple[str, int, int]  # file, first byte, number of bytes


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, in the order of their ranks, which are consecutive on each."""

    names: tuple[str, ...]
    ranks: tuple[tuple[int, ...], ...]  # of each
    rank: int  # this process's

    @classmethod
    def gather(cls, group: dist.ProcessGroup, name: str, local_rank: int) -> Hosts:
        """Collective over all ranks. Raises ConfigError where hosts have different numbers of
        ranks."""
        found = gather_to_all((name, local_rank), group)
        firsts = [rank for rank, (_, local) in enumerate(found) if local == 0]
        ends = [*firsts[1:], len(found)]
        ranks = tuple(tuple(range(*part)) for part in zip(firsts, ends, strict=True))
        counts = sorted({len(each) for each in ranks})
        if len(counts) > 1:
            raise ConfigError(
                f"checkpoint.in_memory_every_steps: hosts have {' and '.join(map(str, counts))} "
                "ranks, and each rank keeps a copy of what one of the next host wrote: start as "
                "many ranks on every host, or set in_memory_every_steps to 0"
            )
        return cls(tuple(found[first][0] for first in firsts), ranks, group.rank())

    @property
    def number(self) -> int:
        """This host's."""
        return next(n for n, ranks in enumerate(self.ranks) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        return self.ranks[self.number].index(self.rank)

    @property
    def is_first_here(self) -> bool:
        return self.local_rank == 0

    def beside(self, distance: int) -> int:
        """The rank with this one's place on the host so many hosts further on, in a ring."""
        return self.ranks[(self.number + distance) % len(self.ranks)][self.local_rank]


# ---- files from rank to rank


def pieces_of(sizes: Sequence[tuple[str, int]]) -> list[Piece]:
    """Cuts files into messages."""
    return [
        (name, start, min(CHUNK_BYTES, size - start))
        for name, size in sizes
        for start in range(0, max(size, 1), CHUNK_BYTES)
    ]


def read_piece(folder: Path, piece: Piece) -> torch.Tensor:
    """(n,) uint8; of an empty file one byte, as a message has some."""
    name, start, count = piece
    data = np.zeros(max(count, 1), dtype=np.uint8)
    with Path(folder, name).open("rb") as file:
        file.seek(start)
        got = file.readinto(data[:count].data)
    if got != count:
        raise OSError(f"{Path(folder, name)} has become shorter")
    return torch.from_numpy(data)


def write_piece(folder: Path, piece: Piece, data: torch.Tensor) -> None:
    name, start, count = piece
    path = Path(folder, name)
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if start else "wb") as file:
            file.seek(start)
            file.write(data.numpy()[:count].data)


class FileTransfer:
    """The files of one rank in an exchange. Where one cannot be read or written (memory full, say),
    the first failure is kept and the messages go on: other ranks wait for them, for days.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failure: OSError | None = None

    def read(self, piece: Piece) -> torch.Tensor:
        """(n,) uint8; zeros after a failure."""
        if self.failure is None:
            try:
                return read_piece(self.folder, piece)
            except OSError as error:
                self.failure = error
        return torch.zeros(max(piece[2], 1), dtype=torch.uint8)

    def write(self, piece: Piece, data: torch.Tensor) -> None:
        """Does nothing after a failure."""
        if self.failure is None:
            try:
                write_piece(self.folder, piece, data)
            except OSError as error:
                self.failure = error


def swap(
    folder: Path, sends: Sequence[tuple[str, int]], to: int, source: int, group: dist.ProcessGroup
) -> None:
    """Sends files of `folder` to one rank while another's come into it. Collective over the ring.

    sends: path within the folder and size of each. Both go on message by message, so that no rank
    waits for one that waits for it. Raises OSError at the end on the rank whose file could not be
    read or written.
    """
    header = json.dumps(list(sends)).encode()
    length = torch.tensor([len(header)])
    theirs = torch.empty(1, dtype=torch.int64)
    exchange(group, length, to, theirs, source)
    text = torch.empty(int(theirs), dtype=torch.uint8)
    exchange(group, torch.frombuffer(bytearray(header), dtype=torch.uint8), to, text, source)
    receives = [(str(name), int(size)) for name, size in json.loads(text.numpy().tobytes())]
    outgoing, incoming, files = pieces_of(sends), pieces_of(receives), FileTransfer(folder)
    for number in range(max(len(outgoing), len(incoming))):
        out = files.read(outgoing[number]) if number < len(outgoing) else None
        into = None
        if number < len(incoming):
            into = torch.empty(max(incoming[number][2], 1), dtype=torch.uint8)
        exchange(group, out, to, into, source)
        if into is not None:
            files.write(incoming[number], into)
    if files.failure is not None:
        raise files.failure


def exchange(
    group: dist.ProcessGroup, out: torch.Tensor | None, to: int, into: torch.Tensor | None,
    source: int,
) -> None:  # fmt: skip
    """Sends one message while another is received; None: there is none."""
    works: list[Any] = []
    if out is not None:
        works.append(group.send([out], to, TAG))
    if into is not None:
        works.append(group.recv([into], source, TAG))
    for work in works:
        work.wait()


# ---- writing


class InMemory:
    """The place of a Saver's checkpoints: the hosts' memory. See writer.Destination.

    root: of this host; the same checkpoints stand in those of all hosts, in parts.
    """

    def __init__(self, root: Path, hosts: Hosts) -> None:
        self.root, self.hosts = root, hosts

    def connect(self, group: dist.ProcessGroup) -> None:
        """Connects this rank with those that it will exchange copies with. gloo connects at first
        use, by the default store, and not in a thread (writer.own_groups). Collective.
        """
        if len(self.hosts.ranks) > 1:
            word = torch.zeros(1, dtype=torch.int64)
            exchange(group, word, self.hosts.beside(1), word.clone(), self.hosts.beside(-1))

    def make(self, aside: Path, folders: list[str]) -> None:
        if self.hosts.is_first_here:
            shutil.rmtree(aside, ignore_errors=True)
            for folder in folders:
                Path(aside, folder).mkdir(parents=True)

    def commit(self, aside: Path, own: Manifest, group: dist.ProcessGroup) -> Path:
        """Copies this rank's files to the next host, and lets the checkpoint stand on all hosts.
        Those before it go when it stands on all of them. Collective.
        """
        hosts, first = self.hosts, self.hosts.is_first_here
        manifest = {name: d for part in gather_to_all(own, group) for name, d in part.items()}
        if len(hosts.ranks) > 1:
            sizes = [(name, size) for name, (size, _) in own.items()]
            to, source = hosts.beside(1), hosts.beside(-1)
            together(group, lambda: swap(aside, sizes, to, source, group))
        final = aside.with_suffix("")
        together(group, lambda: commit(aside, final, manifest, in_part=True) if first else None)
        together(group, lambda: self.remove_others(final) if first else None)
        return final

    def remove_others(self, kept: Path) -> None:
        for _, folder in steps_in(self.root):
            if folder != kept:
                shutil.rmtree(folder)

    def discard(self, aside: Path) -> None:
        if self.hosts.is_first_here:
            shutil.rmtree(aside, ignore_errors=True)


# ---- finding


@dataclass(frozen=True)
class InMemoryCheckpoint:
    """A checkpoint in memory, which stands whole on every host now."""

    folder: Path  # on this host
    step: int
    age_s: float  # since it was written, by the clock of a host that had it


Part = tuple[Manifest, float]  # of a host: the manifest, and the age in seconds


def find_in_memory(
    root: Path, hosts: Hosts, group: dist.ProcessGroup, after: int
) -> tuple[InMemoryCheckpoint | None, list[str]]:
    """Looks for the newest checkpoint of a step beyond `after` that the hosts have together, and
    has each host fetch what it lacks of it. What ranks that were killed had not completed goes
    first, as it would take the room. Collective.

    Returns it, and what is wrong with each that was passed over, the same on every rank.
    """
    together(group, lambda: recover(root) if hosts.is_first_here else None)
    parts = parts_in(root, after) if hosts.is_first_here else {}
    of_ranks: list[dict[int, Part]] = gather_to_all(parts, group)
    passed: list[str] = []
    for step in sorted({step for parts in of_ranks for step in parts}, reverse=True):
        known = [parts[step] for parts in of_ranks if step in parts]
        manifest, folder = known[0][0], Path(root, f"step_{step:08d}")
        if any(other != manifest for other, _ in known):
            passed.append(f"step {step}: hosts have two checkpoints of this step")
            continue
        wrong = fetch(folder, manifest, hosts, group)
        if wrong is None:
            return InMemoryCheckpoint(folder, step, max(age for _, age in known)), passed
        passed.append(f"step {step}: {wrong}")
    return None, passed


def parts_in(root: Path, after: int) -> dict[int, Part]:
    """The checkpoints of which this host has a part. What has no manifest that can be read is
    none."""
    found: dict[int, Part] = {}
    for step, folder in steps_in(root):
        path = Path(folder, MANIFEST)
        if step <= after or not path.is_file():
            continue
        try:
            read = json.loads(path.read_text())
            manifest = {str(name): (int(size), str(sha)) for name, (size, sha) in read.items()}
        except (ValueError, TypeError, AttributeError):
            continue
        found[step] = manifest, max(time.time() - path.stat().st_mtime, 0.0)
    return found


def fetch(
    folder: Path, manifest: Manifest, hosts: Hosts, group: dist.ProcessGroup
) -> str | None:  # fmt: skip
    """Completes the folder on every host from the others. Collective.

    Returns why it cannot be, the same on every rank.
    """
    sizes = {name: size for name, (size, _) in manifest.items()}
    here = hosts.ranks[hosts.number]
    mine = share_of(sizes, hosts.local_rank, len(here))
    good = [name for name in mine if damaged_file(folder, name, manifest[name]) is None]
    of_ranks = gather_to_all(good, group)
    held = [{n for r in ranks for n in of_ranks[r]} for ranks in hosts.ranks]
    missing = sorted(manifest.keys() - set().union(*held))
    if missing:
        more = f" and {counted(len(missing) - 1, 'more file')}" if len(missing) > 1 else ""
        return f"no host has {missing[0]}{more} as it was written"
    short = gather_to_all(no_room(folder, sizes, held[hosts.number]), group)
    if any(short):
        return next(filter(None, short))
    together(group, lambda: begin(folder, manifest) if hosts.is_first_here else None)
    transfers = list(transfers_of(sizes, held, hosts))
    failure = together(group, lambda: run_transfers(folder, transfers, hosts.rank, group))
    arrived = [name for (name, _), _, to in transfers if to == hosts.rank]
    if failure is not None:
        wrong = [str(failure)]
    else:
        wrong = [text for name in arrived if (text := damaged_file(folder, name, manifest[name]))]
    torn = [text for texts in gather_to_all(wrong, group) for text in texts]
    return torn[0] if torn else None


def no_room(folder: Path, sizes: dict[str, int], held: set[str]) -> str:
    """Says what this host lacks to hold the whole checkpoint; "" where it has room."""
    needed = sum(size for name, size in sizes.items() if name not in held)
    free = free_bytes(folder.parent)
    if needed <= free:
        return ""
    return (
        f"{folder.parent} has {mib(free)} MiB free, and what is to be fetched takes {mib(needed)}"
    )


def begin(folder: Path, manifest: Manifest) -> None:
    """Makes the folder of a host that had no part of the checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    path = Path(folder, MANIFEST)
    if not path.is_file():
        path.write_text(json.dumps(manifest))
    for name in manifest:
        Path(folder, name).parent.mkdir(parents=True, exist_ok=True)


def transfers_of(
    sizes: dict[str, int], held: list[set[str]], hosts: Hosts
) -> Iterator[tuple[tuple[str, int], int, int]]:
    """((file, size), from rank, to rank) of all that is to be sent, in the same order on all.

    Files go in turn by the ranks of a host, and come from the hosts that have them in turn.
    """
    for number, (name, size) in enumerate(sorted(sizes.items())):
        sources = [host for host, names in enumerate(held) if name in names]
        takers = [host for host, names in enumerate(held) if name not in names]
        for turn, host in enumerate(takers):
            source = hosts.ranks[sources[(number + turn) % len(sources)]]
            taker = hosts.ranks[host]
            yield (name, size), source[number % len(source)], taker[number % len(taker)]


def run_transfers(
    folder: Path, transfers: Sequence[tuple[tuple[str, int], int, int]], rank: int,
    group: dist.ProcessGroup,
) -> OSError | None:  # fmt: skip
    """Sends and receives what is this rank's of it. Returns its first failure to read or write."""
    files = FileTransfer(folder)
    for file, source, to in transfers:
        if rank not in (source, to):
            continue
        for piece in pieces_of([file]):
            if rank == source:
                group.send([files.read(piece)], to, TAG).wait()
            else:
                data = torch.empty(max(piece[2], 1), dtype=torch.uint8)
                group.recv([data], source, TAG).wait()
                files.write(piece, data)
    return files.failure
