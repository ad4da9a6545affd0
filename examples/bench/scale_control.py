"""What ranks tell each other, and how that grows with their number; see scale.py.

Real ranks are gloo processes of this machine, forked after the imports, with the store in a
process of its own, as with torchrun. "simulated" is counted from the same functions that the ranks
use, for more ranks than there are; "model" is such a count times what one message takes.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import pickle
import statistics
import tempfile
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable
from math import ceil, log2
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from spmdrl.checkpoint.chunk_index import (
    StoredPart,
    decode,
    encode,
    read_index,
    wanted_boxes,
    write_index,
)
from spmdrl.checkpoint.writer import own_groups
from spmdrl.distributed.agreement import (
    FIRST_BYTES,
    broadcast_from_first,
    children,
    gather_to_first,
    lowest,
    parent,
)
from spmdrl.distributed.faults.watchdog import PERIOD_S, Watchdog
from spmdrl.distributed.stop_votes import StopVotes
from spmdrl.distributed.topology import LAZY_GLOO, Topology
from spmdrl.training.batch_exchange import P2PChannel

LIMIT_S = 150  # of one start of real ranks
NETWORK_S = 25e-6  # one way between hosts, TCP; assumed
NUM_TENSORS = 2160  # of a 70B model: 720 weights and two moments of each
OWN_FILES = 4  # of a gloo group without connections: a socket that listens, an epoll, a pipe
REPEATS = 20


class Point(NamedTuple):
    series: str
    unit: str
    kind: str  # measured, simulated, model
    ranks: int
    value: float


# ---- real ranks


def on_ranks(world: int, work: Callable[..., Any], lazy: bool = True) -> list[Any]:
    """Calls work(rank, world, store) on so many processes; the results in rank order. This process
    has no threads while it forks: the store has a process of its own."""
    context = multiprocessing.get_context("fork")
    port, told = context.Pipe(duplex=False)
    processes = [context.Process(target=serve, args=(told,), daemon=True)]
    processes[0].start()
    pipes, at = [], port.recv()
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, world, at, work, lazy, theirs)
        processes.append(context.Process(target=one_rank, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    end = time.monotonic() + LIMIT_S
    try:
        found = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(max(end - time.monotonic(), 0)):
                raise TimeoutError(f"rank {rank} of {world} has no result after {LIMIT_S} s")
            found.append(pipe.recv())
        for process in processes[1:]:
            process.join(10)
        return found
    finally:
        for process in processes:
            process.kill()
            process.join()


def serve(told: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send(store.port)
    time.sleep(2 * LIMIT_S)


def one_rank(
    rank: int, world: int, port: int, work: Callable[..., Any], lazy: bool, pipe: Any
) -> None:  # fmt: skip
    os.environ[LAZY_GLOO] = str(int(lazy))
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    found = work(rank, world, store)
    pipe.send(found)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def start(rank: int, world: int, store: Any) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# ---- descriptors


def descriptors(real: list[int], simulated: list[int]) -> list[Point]:
    """Files that a rank's groups take: the default group, the control group, the votes' and the
    checkpoints', each used, and with them that of the samples, which is connected at the start."""
    points = []
    series_of = (
        ("before", False, use_before), ("after", True, use_after), ("all groups", True, use_all)
    )  # fmt: skip
    for world in real:
        for series, lazy, use in series_of:
            found = on_ranks(world, use, lazy)
            points.append(Point(f"files, {series}", "files", "measured", world, max(found)))
    for world in [*real, *simulated]:
        most = max(files_of(rank, world) for rank in range(world))
        points.append(Point("files, after", "files", "simulated", world, most))
        most += OWN_FILES + world - 1
        points.append(Point("files, all groups", "files", "simulated", world, most))
    return points


def use_before(rank: int, world: int, store: Any) -> int:
    before = open_files()
    start(rank, world, store)
    groups = [dist.new_group(backend="gloo") for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    dist.all_gather_object([None] * world, rank, group=groups[0])
    dist.barrier()
    return open_files() - before


def use_after(rank: int, world: int, store: Any) -> int:
    before = open_files()
    KEPT.append(groups_of_a_run(rank, world, store))
    return open_files() - before


def use_all(rank: int, world: int, store: Any) -> int:
    before = open_files()
    topology, *rest = groups_of_a_run(rank, world, store)
    KEPT.append((P2PChannel(topology), *rest))
    return open_files() - before


def groups_of_a_run(
    rank: int, world: int, store: Any
) -> tuple[Topology, StopVotes, dict[tuple[int, ...], dist.ProcessGroup]]:
    """Makes the groups that each run has, but for that of the samples, and uses each."""
    start(rank, world, store)
    lowest(0, dist.group.WORLD)  # as start_process_group does
    topology = Topology.build(torch.device("cpu"), dp=-1)
    votes, groups = StopVotes(topology, 0), own_groups([topology])
    topology.lowest(rank)
    broadcast_from_first(gather_to_first(rank, topology.control), topology.control)
    dist.broadcast_object_list([rank], group=topology.control, group_src=0)
    votes.agree(0)
    lowest(rank, groups[topology.ranks])
    dist.barrier(group=topology.control)
    dist.barrier()
    return topology, votes, groups


def files_of(rank: int, world: int) -> int:
    """What use_after takes, counted."""
    return sum(OWN_FILES + len(peers) for peers in peers_of(rank, world))


def peers_of(rank: int, world: int) -> list[set[int]]:
    """The ranks that this one has connections to in each group of use_after: the default group has
    the tree and a barrier, the control group a broadcast too, the votes a ring, the checkpoints the
    tree. A broadcast's are among a barrier's.
    """
    barrier = {(rank + sign * 2**k) % world for k in range(ceil(log2(world))) for sign in (1, -1)}
    tree = {*children(rank, world), *([parent(rank)] if rank else [])}
    ring = {(rank + 1) % world, (rank - 1) % world}
    return [own - {rank} for own in (tree | barrier, tree | barrier, ring, tree)]


# ---- the end of a phase


def phase_end(real: list[int], simulated: list[int]) -> list[Point]:
    points = []
    hop_s = statistics.median(times["hop"] for times in on_ranks(2, time_agreements))
    for world in real:
        found = on_ranks(world, time_agreements)
        for series in ("ring", "tree"):
            most = statistics.median(times[series] for times in found)
            points.append(Point(f"phase end, {series}", "ms", "measured", world, 1e3 * most))
    points.append(Point("one message", "ms", "measured", 2, 1e3 * hop_s))
    hop_s += NETWORK_S
    for world in [*real, *simulated]:
        ring, tree = 2 * (world - 1) * hop_s, tree_seconds(world, hop_s)
        points.append(Point("phase end, ring", "ms", "model", world, 1e3 * ring))
        points.append(Point("phase end, tree", "ms", "model", world, 1e3 * tree))
    return points


def time_agreements(rank: int, world: int, store: Any) -> dict[str, float]:
    start(rank, world, store)
    group = dist.new_group(backend="gloo")
    number = torch.tensor([rank])

    def ring() -> None:
        dist.all_reduce(number, dist.ReduceOp.MIN, group=group)

    found = {"ring": median_s(ring), "tree": median_s(lambda: lowest(rank, group))}
    if world == 2:
        found["hop"] = fastest_s(lambda: lowest(rank, group)) / 2
    return found


def median_s(work: Callable[[], Any], repeats: int = REPEATS) -> float:
    """Seconds of one of `repeats` calls; all ranks begin each at about the same time."""
    work()
    times = []
    for _ in range(repeats):
        dist.barrier()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def fastest_s(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of many calls: other programs have disturbed the others."""
    times = []
    for _ in range(500):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def tree_seconds(world: int, hop_s: float) -> float:
    """When the last rank knows the result: each message takes hop_s, and a rank handles one after
    the other."""
    up = [0.0] * world
    for rank in reversed(range(world)):
        for child in children(rank, world):
            up[rank] = max(up[rank], up[child]) + hop_s
    down = [up[0]] * world
    for rank in range(world):
        sent = down[rank]
        for child in reversed(children(rank, world)):
            sent += hop_s
            down[child] = sent
    return max(down)


# ---- reports


def reports(real: list[int], simulated: list[int]) -> list[Point]:
    """Half a kilobyte from each rank: to all of them, or to one that tells a sum of that size."""
    points = []
    for world in real:
        found = on_ranks(world, time_reports)
        for series in ("to all", "to one"):
            most = statistics.median(times[series] for times in found)
            points.append(Point(f"reports, {series}", "ms", "measured", world, 1e3 * most))
    size = len(pickle.dumps(a_report()))
    for world in [*real, *simulated]:
        points.append(Point("reports, to all", "KB", "simulated", world, size * world / 1e3))
        received = statistics.median(received_bytes(rank, world, size) for rank in range(world))
        points.append(Point("reports, to one", "KB", "simulated", world, received / 1e3))
    return points


def received_bytes(rank: int, world: int, size: int) -> int:
    """What a rank receives of reports of so many bytes that go to the first, which tells the sum:
    a message from each of its children, with the reports of all ranks below that."""
    below = [min(child & -child, world - child) for child in children(rank, world)]
    return sum(max(FIRST_BYTES, size * ranks) for ranks in below) + (FIRST_BYTES if rank else 0)


def a_report() -> dict[str, tuple[float, ...]]:
    return {f"phase {number}": (1.0 / (number + 1), 2.0, 3.0) for number in range(16)}


def time_reports(rank: int, world: int, store: Any) -> dict[str, float]:
    start(rank, world, store)
    mine = a_report()

    def to_one() -> None:
        found = gather_to_first(mine, dist.group.WORLD)
        broadcast_from_first(found and found[0], dist.group.WORLD)

    def to_all() -> None:
        dist.all_gather_object([None] * world, mine)

    return {"to all": median_s(to_all), "to one": median_s(to_one)}


# ---- checkpoints


def checkpoint(real: list[int], simulated: list[int]) -> list[Point]:
    """Everything of a save and a load but the tensors' bytes, of 2,160 tensors in as many parts as
    ranks. Before: torch.distributed.checkpoint's plans, which each rank gathers and merges."""
    points = []
    for world in [n for n in real if n <= 8]:  # plans of all ranks on each of them: gigabytes
        found = on_ranks(world, plan_as_torch)
        add_checkpoint(points, "save, before", world, found, "measured")
    for world in real:
        found = on_ranks(world, index_as_ours)
        add_checkpoint(points, "save, after", world, found, "measured")
    for world in [*real, *simulated]:
        points += index_of_many(tables_of(world), world)
    return points


def add_checkpoint(
    points: list[Point], series: str, world: int, found: list[tuple[float, float]], kind: str
) -> None:  # fmt: skip
    """found: CPU seconds and peak bytes of each rank."""
    points.append(Point(f"{series}, cpu", "s", kind, world, max(cpu_s for cpu_s, _ in found)))
    points.append(Point(f"{series}, memory", "MB", kind, world, max(b for _, b in found) / 1e6))


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """CPU seconds of the process, and then, in a second run, the most bytes that Python held."""
    began = time.process_time()
    work()
    cpu_s = time.process_time() - began
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return cpu_s, peak


def names() -> list[tuple[str, str, list[int]]]:
    return [(f"model.layers.{i}.mlp.weight", "float32", [8192, 8192]) for i in range(NUM_TENSORS)]


def table_of(rank: int) -> bytes:
    parts = [
        StoredPart(name, ((8 * rank, 0), (8, 8192)), 263_000 * number, 263_000 - number % 7)
        for number, (name, _, _) in enumerate(names())
    ]
    return encode(parts, names())


def tables_of(world: int) -> list[bytes]:
    """As table_of of each rank, without encoding each."""
    rows, tables = decode(table_of(0), wanted_boxes(names(), None)).copy(), []
    for rank in range(world):
        rows[:, 3] = 8 * rank
        tables.append(zlib.compress(rows.T.tobytes(), level=1))
    return tables


def index_as_ours(rank: int, world: int, store: Any) -> tuple[float, float]:
    start(rank, world, store)

    def save() -> None:
        tables = gather_to_first(table_of(rank), dist.group.WORLD)
        if tables is not None:
            with tempfile.TemporaryDirectory() as folder:
                write_index(Path(folder), names(), tables)

    return measured(save)


def plan_as_torch(rank: int, world: int, store: Any) -> tuple[float, float]:
    start(rank, world, store)
    size = torch.Size([8 * world, 8192])

    def item(name: str) -> WriteItem:
        offset = torch.Size([8 * rank, 0])
        chunk = ChunkStorageMetadata(offset, torch.Size([8, 8192]))
        data = TensorWriteData(chunk, TensorProperties(dtype=torch.float32), size)
        return WriteItem(MetadataIndex(name, offset), WriteItemType.SHARD, tensor_data=data)

    def save() -> None:
        plans: list[Any] = [None] * world
        dist.all_gather_object(plans, SavePlan([item(name) for name, _, _ in names()]))
        planner = DefaultSavePlanner(flatten_state_dict=False)
        planner.set_up_planner({}, None, rank == 0)
        _, metadata = planner.create_global_plan(plans)
        if rank == 0:
            pickle.dump(metadata, io.BytesIO())

    return measured(save)


def index_of_many(tables: list[bytes], world: int) -> list[Point]:
    """What the first rank does when it has all tables, and a rank that reads."""
    wanted = {name: ((0, 0), (8, 8192)) for name, _, _ in names()}
    apart = {name: ((4, 0), (8, 8192)) for name, _, _ in names()}  # in two ranks' files
    with tempfile.TemporaryDirectory() as folder:
        saved = measured(lambda: write_index(Path(folder), names(), tables))
        own = measured(lambda: read_index(Path(folder), wanted, rank=0))
        every = measured(lambda: read_index(Path(folder), apart, rank=0))
        size = Path(folder, "index.zip").stat().st_size
    points: list[Point] = []
    add_checkpoint(points, "save, after, first rank", world, [saved], "simulated")
    add_checkpoint(points, "load, same ranks", world, [own], "simulated")
    add_checkpoint(points, "load, other ranks", world, [every], "simulated")
    points.append(Point("tables on the first rank", "MB", "simulated", world, size / 1e6))
    return points


# ---- the store


KEPT: list[Any] = []  # groups keep no Python object alive


class CountingStore(dist.Store):
    """Passes calls on, and counts them by name."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store, self.calls = store, Counter[str]()

    def _do(self, name: str, *arguments: Any) -> Any:
        self.calls[name] += 1
        return getattr(self.store, name)(*arguments)

    def set(self, key: Any, value: Any) -> None:
        self._do("set", key, value)

    def get(self, key: Any) -> bytes:
        return self._do("get", key)

    def add(self, key: Any, amount: int) -> int:
        return self._do("add", key, amount)

    def check(self, keys: Any) -> bool:
        return self._do("check", keys)

    def compare_set(self, key: Any, expected: Any, wanted: Any) -> bytes:
        return self._do("compare_set", key, expected, wanted)

    def wait(self, keys: Any, *limit: Any) -> None:
        self._do("wait", keys, *limit)

    def delete_key(self, key: Any) -> bool:
        return self._do("delete_key", key)

    def set_timeout(self, limit: Any) -> None:
        self.store.set_timeout(limit)

    def clone(self) -> CountingStore:
        return self


def store(real: list[int], simulated: list[int]) -> list[Point]:
    """Operations of a rank on the store: to start, in a step, and of its watchdog in a second."""
    points = []
    for world in real:
        found = [{"start, before": n} for n in on_ranks(world, count_before, lazy=False)]
        points.append(most_operations("start, before", world, found))
        found = on_ranks(world, count_operations)
        points += [most_operations(series, world, found) for series in found[0]]
        rate = sum(on_ranks(world, operations_a_second))
        points.append(Point("store, all it can do", "operations/s", "measured", world, rate))
    for world in [*real, *simulated]:
        most = max(sum(1 + 2 * len(own) for own in peers_of(r, world)) for r in range(world))
        points.append(Point("store, start", "operations", "simulated", world, most))
    return points


def most_operations(series: str, world: int, found: list[dict[str, float]]) -> Point:
    most = max(calls[series] for calls in found)
    return Point(f"store, {series}", "operations", "measured", world, most)


def operations_a_second(rank: int, world: int, store: Any) -> float:
    """While all ranks ask as fast as they can, on the cores that the store has to share."""
    store.add("here", 1)
    while store.add("here", 0) < world:
        time.sleep(0.01)
    began, count = time.monotonic(), 0
    while time.monotonic() < began + 1.0:
        store.add(f"asked/{rank}", 1)  # a set has no answer to wait for
        count += 1
    return count / (time.monotonic() - began)


def count_before(rank: int, world: int, store: Any) -> int:
    counting = CountingStore(store)
    KEPT.append(counting)
    use_before(rank, world, counting)
    return counting.calls.total()


def count_operations(rank: int, world: int, store: Any) -> dict[str, float]:
    counting = CountingStore(store)
    KEPT.append(counting)
    topology, votes, groups = groups_of_a_run(rank, world, counting)
    KEPT.append(groups)
    at_start = counting.calls.total()
    KEPT.append(P2PChannel(topology))
    with_samples = counting.calls.total()
    for _ in range(10):
        topology.lowest(rank)
    broadcast_from_first(gather_to_first(a_report(), topology.control), topology.control)
    votes.agree(0)
    in_step = counting.calls.total() - with_samples
    watching = CountingStore(dist.PrefixStore("watchdog", store.clone()))
    with tempfile.TemporaryDirectory() as folder:
        after = (rank + 1) % world
        watchdog = Watchdog(watching, rank, world, Path(folder), 600, LIMIT_S, after)
        time.sleep(4 * PERIOD_S)
        before, began = watching.calls.total(), time.monotonic()
        time.sleep(8 * PERIOD_S)
        each_s = (watching.calls.total() - before) / (time.monotonic() - began)
        topology.lowest(rank)
        watchdog.close()
    return {
        "start": at_start, "start, all groups": with_samples, "ten phases and a report": in_step,
        "watchdog, a second": each_s,
    }  # fmt: skip


def show(points: list[Point]) -> None:
    for point in points:
        print(json.dumps(point._asdict()), flush=True)
