"""Holds a run on CPUs to the rules of NCCL, which gloo does not have.

With --strict-nccl each rank of run_ranks, run_calls (tests/ranks.py), train and torchrun
(tests/programs.py; not with restarts) writes down, in order, each process group that it makes and
each operation over one, with its stack. After the run `check` compares what the ranks wrote. Where
a GPU job would hang or fail it raises RulesBroken, with the stacks of both ranks. Data travel by
gloo as without it, so a run that breaks a rule goes on to its end, and all that it breaks is found.
It is a layer over torch.distributed and no registered backend: torch, vLLM and megatron-core ask
for a backend's name, and would take other ways with a name that is not gloo.

A GPU job's default group is assumed not to be bound to a device, as spmdrl's is not. A host's
program may have bound its own (`init_process_group(device_id=...)`): with SPMDRL_NCCL_BOUND=1 it is
taken for one. "c10d" below is torch/distributed/distributed_c10d.py of torch 2.13. The rules:

creation      All ranks of the parent (the default group of that time) make the same groups in the
              same order, under the same names (c10d.new_group's docstring; a name is a counter,
              c10d._process_group_name, and the prefix of the store's keys by which members meet).
split         The communicator of a bound group is split off the parent's by ncclCommSplit, which
              all ranks of the parent have to call. A member calls it where the group has an NCCL
              backend, a rank outside always (c10d._new_process_group_helper, "split_from",
              pytorch#145376): with a gloo group, or one that only its members make
              (use_local_synchronization), not all ranks do.
hashed name   With a bound default group DeviceMesh makes its groups by one `split_group` per axis,
              which names them by a hash of their ranks and of len(_world.pg_names)
              (c10d._hash_ranks_to_str). The gloo part of a group meets under that name: its members
              need the same one.
time limit    No group has a shorter time limit than the default group. This is a rule of spmdrl and
              not of NCCL: `split_group` and `new_group` have torch's own where they are given none.
first         The communicator of a group that is not split is made at its first operation, which
              all its ranks have to call. A batch of sends and receives that comes first is called
              by all too (c10d.batch_isend_irecv's docstring).
operation     All ranks of a group call the same collectives in the same order, all-reduces and
              broadcasts with the same shape and dtype (NCCL's user guide, "Collective Operations").
order         Two ranks use the communicators that they share in the same order (c10d.new_group's
              docstring; NCCL's user guide, "Using multiple NCCL communicators concurrently").
CPU tensor    No CPU tensor goes over a group which has NCCL alone (ProcessGroupNCCL refuses it).

What a CPU run does not show is read from the source of the caller. A group that is given "gloo" as
a literal, there or where that function is called, is gloo on GPUs too; one that is given a variable
has gloo for CPU tensors and NCCL for those of GPUs, as in topology.group_of; any other has its
parent's backends. A
tensor counts as a CPU tensor where the function that calls the collective assigned it last from
torch.zeros or the like without `device`, or from `.cpu()`; any other counts as a device's. So a CPU
tensor that comes from elsewhere is not found by "CPU tensor", and is held to "order" though gloo
carries it. Of an operation whose tensor one rank makes on the CPU all ranks' are CPU tensors. So
are objects (c10d.all_gather_object and others), where the group has gloo at all
(c10d._get_object_coll_device).

Not seen: collectives of torch.ops._c10d_functional (DTensor), which C++ calls; streams; how long an
operation takes. Sends and receives outside of batches are not compared.
"""

from __future__ import annotations

import ast
import inspect
import os
import pickle
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import combinations, count, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from ranks import RECORDS
from torch.distributed._mesh_layout import _MeshLayout
from torch.distributed.device_mesh import DeviceMesh

BACKENDS = "SPMDRL_NCCL_BACKENDS"  # of the default group on a GPU job
BOUND = "SPMDRL_NCCL_BOUND"  # "1": the default group is bound to the rank's GPU
BOTH = "cpu:gloo,cuda:nccl"
COLLECTIVES = (
    "allreduce", "broadcast", "barrier", "reduce", "allgather", "_allgather_base", "gather",
    "all_gather_single", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "alltoall", "alltoall_base", "all_to_all_single",
    "allreduce_coalesced", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced",
)  # fmt: skip
POINT_TO_POINT = ("send", "recv")
BATCH = "batch_isend_irecv"
ALIKE = ("allreduce", "broadcast")  # with the same shape and dtype on every rank
FACTORIES = {"zeros", "ones", "empty", "full", "tensor", "arange", "from_numpy", "frombuffer"}
TORCH = str(Path(c10d.__file__).parent)
STARTERS = (str(Path(os.__file__).parent / "multiprocessing"), "<")
DEPTH = 10  # frames of a stack that are kept

Stack = tuple[tuple[str, int, str], ...]  # innermost first: file, line, function


@dataclass(frozen=True)
class Group:
    """A process group: names are used again on other ranks, and after the next start."""

    start: int  # the how manieth default group it comes from
    name: str
    members: tuple[int, ...]  # ranks of the job, in the group's order
    backends: str  # on a GPU job

    @property
    def has_nccl(self) -> bool:
        return "nccl" in self.backends

    def __str__(self) -> str:
        return f"group {self.name!r} of ranks {list(self.members)} ({self.backends} on GPUs)"


@dataclass(frozen=True)
class Creation:
    parent: Group
    group: Group  # of a split: this rank's part as it is on GPUs, of no members outside
    parts: tuple[tuple[int, ...], ...]  # of the parent's numbers; more than one for a mesh's axis
    limit_s: float
    default_limit_s: float
    is_split: bool  # of a DeviceMesh
    calls_split: bool  # whether this rank calls ncclCommSplit on a GPU job
    stack: Stack

    @property
    def is_local(self) -> bool:
        """Whether only its members make it: then its name is no counter."""
        return not self.is_split and not self.group.name.isdigit()

    def __str__(self) -> str:
        what = "splits off" if self.is_split else "makes"
        parts = ", ".join(str(list(part)) for part in self.parts)
        name = "" if self.is_split else f" {self.group.name!r}"
        return f"{what} group{name} of {parts} with a limit of {self.limit_s:.0f} s"


@dataclass(frozen=True)
class Operation:
    group: Group
    name: str
    tensors: tuple[str, ...]
    on_cpu: bool  # also on a GPU job
    thread: str
    stack: Stack

    def __str__(self) -> str:
        shapes = f" of {', '.join(self.tensors)}" if self.name in ALIKE else ""
        thread = "" if self.thread == "MainThread" else f" in thread {self.thread!r}"
        return f"{self.name}{shapes} over {self.group}{thread}"


@dataclass(frozen=True)
class Finding:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.text}"


class RulesBroken(AssertionError):
    def __init__(self, findings: list[Finding]) -> None:
        self.findings = findings
        self.rules = {finding.rule for finding in findings}
        super().__init__(
            "\n\n".join(["on GPUs this run breaks rules of NCCL:", *map(str, findings)])
        )


# ---- on each rank


class Recorder:
    """Appends what this rank does to a file. One per process."""

    def __init__(self, file: Path, backends: str, bound: bool) -> None:
        self.file, self.backends, self.bound = file.open("ab"), backends, bound
        self.bound_name = ""  # of the group that is bound to a device
        self.groups: dict[str, Group] = {}  # this process's own, by name
        self.starts, self.limit_s = 0, 0.0
        self.lock, self.inside = threading.Lock(), threading.local()

    def write(self, event: Creation | Operation) -> None:
        with self.lock:
            pickle.dump(event, self.file)
            self.file.flush()  # a rank may end by a signal

    def is_inside(self) -> bool:
        """Whether this thread is in a call that is written down as a whole."""
        return getattr(self.inside, "depth", 0) > 0

    def within(self, call: Callable[[], Any]) -> Any:
        self.inside.depth = getattr(self.inside, "depth", 0) + 1
        try:
            return call()
        finally:
            self.inside.depth -= 1

    def started(self, size: int, name: str) -> None:
        self.starts += 1
        self.groups = {name: Group(self.starts, name, tuple(range(size)), self.backends)}
        self.bound_name = name if self.bound else ""

    def splits(self) -> bool:
        """Whether a group that is made now is split off the default group's communicator."""
        parent = self.parent()
        return parent.has_nccl and parent.name == self.bound_name

    def parent(self) -> Group:
        return self.groups[c10d._get_default_group().group_name]

    def created(self, ranks: Sequence[int], name: str, limit_s: float) -> None:
        parent, frame = self.parent(), caller()
        backends = parent.backends if self.is_inside() else backends_of(frame, parent.backends)
        members = tuple(parent.members[rank] for rank in ranks)
        group = Group(self.starts, name, members, backends)
        mine = c10d._get_default_group().rank() in ranks
        if mine:
            self.groups[name] = group
        if not self.is_inside():
            calls = self.splits() and (group.has_nccl or not mine)
            parts = (tuple(ranks),)
            self.write(
                Creation(parent, group, parts, limit_s, self.limit_s, False, calls, stack(frame))
            )

    def split(self, table: list[list[int]], limit_s: float) -> None:
        """As DeviceMesh on GPUs: c10d.split_group."""
        parent = self.parent()
        me = c10d._get_default_group().rank()
        mine = sorted(next((part for part in table if me in part), []))
        name = c10d._process_group_name(mine, use_hashed_name=True)
        members = tuple(parent.members[rank] for rank in mine)
        group = Group(self.starts, name, members, parent.backends)
        parts = tuple(map(tuple, table))
        found = stack(caller())
        self.write(Creation(parent, group, parts, limit_s, self.limit_s, True, True, found))

    def called(self, group: dist.ProcessGroup, name: str, tensors: list[torch.Tensor]) -> None:
        known = self.groups.get(group.group_name)
        if known is None or not known.has_nccl or self.is_inside():
            return  # made around torch.distributed, or of no interest to NCCL
        frame = caller()
        shown = tuple(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in tensors)
        on_cpu = "cpu" in known.backends and carries_objects()
        on_cpu = on_cpu or any(made_on_cpu(frame, tensor) for tensor in tensors)
        thread = threading.current_thread().name
        self.write(Operation(known, name, shown, on_cpu, thread, stack(frame)))


def install() -> None:
    """Has this rank write down what it does. To be called before its first group is made."""
    file = Path(os.environ[RECORDS], f"rank_{os.environ['RANK']}")
    backends, bound = os.environ.get(BACKENDS, BOTH), os.environ.get(BOUND) == "1"
    recorder = Recorder(file, backends, bound)
    watch_binding(recorder)
    watch_groups(recorder)
    watch_meshes(recorder)
    watch_batches(recorder)
    for name in (*COLLECTIVES, *POINT_TO_POINT):
        watch_method(recorder, name)


@contextmanager
def watched_groups(recorder: Recorder) -> Iterator[None]:
    """Meanwhile groups are written down, in a process that goes on to do other things."""
    make = c10d._new_process_group_helper
    watch_groups(recorder)
    try:
        yield
    finally:
        c10d._new_process_group_helper = make


def watch_groups(recorder: Recorder) -> None:
    make = c10d._new_process_group_helper

    @wraps(make)
    def helper(size: int, rank: Any, ranks: Any, backend: Any, store: Any, name: str, **kw: Any):
        if len(ranks) == 0:
            recorder.started(size, name)
            recorder.limit_s = kw["timeout"].total_seconds()
        else:
            recorder.created(ranks, name, kw["timeout"].total_seconds())
        return make(size, rank, ranks, backend, store, name, **kw)

    c10d._new_process_group_helper = helper


def watch_binding(recorder: Recorder) -> None:
    """Has ProcessGroup.bound_device_id say and keep what it would on a GPU job. To torch itself it
    says that no group is bound: gloo's cannot be split.
    """

    def device_of(group: dist.ProcessGroup) -> torch.device | None:
        asks = sys._getframe(1).f_code.co_filename
        asks_torch = asks.startswith(TORCH)
        bound = group.group_name == recorder.bound_name and bool(recorder.bound_name)
        return torch.device("cuda", 0) if bound and not asks_torch else None

    def bind(group: dist.ProcessGroup, device: torch.device | None) -> None:
        recorder.bound_name = "" if device is None else group.group_name

    dist.ProcessGroup.bound_device_id = property(device_of, bind)  # type: ignore[misc]


def watch_meshes(recorder: Recorder) -> None:
    make = DeviceMesh._init_one_process_group

    def axis(layout: Any, rank_map: Any, dim_name: str, override: tuple[Any, Any]) -> Any:
        arguments = (layout, rank_map, dim_name, override)
        whole = layout.numel() == dist.get_world_size() and override == (None, None)
        if whole or not recorder.splits():  # the default group serves, or new_group makes each
            return make(*arguments)
        table = _MeshLayout([layout]).remap_to_tensor(rank_map).tolist()
        given = override[1]._timeout if override[1] else c10d.default_pg_timeout
        recorder.split(table, given.total_seconds())
        return recorder.within(lambda: make(*arguments))

    DeviceMesh._init_one_process_group = staticmethod(axis)


def watch_batches(recorder: Recorder) -> None:
    batch = c10d.batch_isend_irecv

    @wraps(batch)
    def watched(ops: list[dist.P2POp]) -> Any:
        recorder.called(ops[0].group or c10d._get_default_group(), BATCH, [ops[0].tensor])
        return recorder.within(lambda: batch(ops))

    c10d.batch_isend_irecv = dist.batch_isend_irecv = watched


def watch_method(recorder: Recorder, name: str) -> None:
    method = getattr(dist.ProcessGroup, name)

    @wraps(method)
    def watched(group: dist.ProcessGroup, *args: Any, **kw: Any) -> Any:
        recorder.called(group, name, list(tensors_in([*args, *kw.values()])))
        return method(group, *args, **kw)

    setattr(dist.ProcessGroup, name, watched)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


# ---- what the source of a caller says


def caller() -> FrameType:
    """The innermost frame that is neither torch.distributed's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        frame = frame.f_back
    assert frame is not None
    return frame


def carries_objects() -> bool:
    """Whether the operation is part of an object collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, __file__)):
        if frame.f_code.co_name.endswith(("_object", "_object_list")):
            return True
        frame = frame.f_back
    return False


def stack(frame: FrameType | None) -> Stack:
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < DEPTH:
        file = frame.f_code.co_filename
        if not file.startswith(STARTERS):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def backends_of(frame: FrameType | None, inherited: str) -> str:
    """What a group has on GPUs, by the arguments of the call and of the function around it."""
    call = call_at(frame)
    given = backend_in(call)
    if isinstance(given, ast.Constant):
        return str(given.value or inherited)
    outer = call_at(frame.f_back) if frame is not None else None  # a function that hands it on
    if given is None and (given := backend_in(outer)) is None:
        return inherited
    values = [*outer.args, *(k.value for k in outer.keywords)] if outer is not None else []
    literal = any(isinstance(value, ast.Constant) and value.value == "gloo" for value in values)
    return "gloo" if literal else BOTH


def backend_in(call: ast.Call | None) -> ast.expr | None:
    keywords = call.keywords if call is not None else []
    return next((keyword.value for keyword in keywords if keyword.arg == "backend"), None)


def call_at(frame: FrameType | None) -> ast.Call | None:
    """The call that a frame is in."""
    place = inspect.getframeinfo(frame, context=0).positions if frame is not None else None
    if frame is None or place is None:
        return None
    return calls_of(frame.f_code.co_filename).get(tuple(place))


@lru_cache(None)
def tree_of(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError):  # made at run time
        return ast.Module([], [])


@lru_cache(None)
def calls_of(file: str) -> dict[tuple[Any, ...], ast.Call]:
    """By first line, last line, first column, last column."""
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    return {(c.lineno, c.end_lineno, c.col_offset, c.end_col_offset): c for c in calls}


def made_on_cpu(frame: FrameType, tensor: torch.Tensor) -> bool:
    """Whether the function makes the tensor without a device, by what it assigned last, above the
    line of the call, to one of its names.
    """
    code = frame.f_code
    for name, assigned in assignments(code.co_filename, code.co_firstlineno).items():
        above = [on_cpu for line, on_cpu in assigned if line <= frame.f_lineno]
        if above and above[-1] and frame.f_locals.get(name) is tensor:
            return True
    return False


@lru_cache(None)
def assignments(file: str, line: int) -> dict[str, list[tuple[int, bool]]]:
    """By name: the lines where the function at this line assigns to it, and whether a tensor that
    it makes on the CPU.
    """
    found: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef) and starts_at(node) == line:
            for part in ast.walk(node):
                if isinstance(part, ast.Assign):
                    names = [t.id for t in part.targets if isinstance(t, ast.Name)]
                    for name in names:
                        found[name].append((part.lineno, makes_on_cpu(part.value)))
    return {name: sorted(lines) for name, lines in found.items()}


def starts_at(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def makes_on_cpu(value: ast.expr) -> bool:
    return any(is_cpu_tensor(part) for part in ast.walk(value) if isinstance(part, ast.Call))


def is_cpu_tensor(call: ast.Call) -> bool:
    """torch.zeros(...) and the like without a device, or x.cpu()."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id == "torch":
        given = [keyword.arg for keyword in call.keywords]
        return function.attr in FACTORIES and "device" not in given
    return function.attr == "cpu" and not call.args


# ---- where the run was started


def check(folder: Path, ended: bool) -> None:
    """Compares what the ranks of a run wrote. ended: all came to their end, so nothing is missing
    because a rank was stopped. Raises RulesBroken.
    """
    found = findings(read(folder), ended)
    if found:
        raise RulesBroken(found)


Events = dict[int, list[Any]]  # by rank, in order


def read(folder: Path) -> Events:
    events: Events = {}
    for path in folder.glob("rank_*"):
        rank = int(path.name[5:])
        events[rank] = []
        with path.open("rb") as file:
            while file.peek(1):
                try:
                    events[rank].append(pickle.load(file))
                except (EOFError, pickle.UnpicklingError):
                    break  # the rank was killed as it wrote
    return events


def findings(events: Events, ended: bool) -> list[Finding]:
    rules = (creations, local_creations, limits, operations, orders, cpu_tensors)
    return [finding for rule in rules for finding in rule(events, ended)]


def both(rule: str, said: str, one: tuple[int, Any], other: tuple[int, Any]) -> Finding:
    """With two ranks' stacks. one, other: (rank, event)."""
    shown = "".join(f"\n  rank {rank} {event}:{text(event.stack)}" for rank, event in (one, other))
    return Finding(rule, said + shown)


def lone(rule: str, said: str, one: tuple[int, Any], other: int, events: Events) -> Finding:
    """The other rank does not come there: what it did last is shown."""
    last = events[other][-1:]
    did = "".join(f" {event}:{text(event.stack)}" for event in last) or " nothing"
    rank, event = one
    return Finding(
        rule, f"{said}\n  rank {rank} {event}:{text(event.stack)}\n  rank {other} did last{did}"
    )


def text(stack: Stack) -> str:
    return "".join(f"\n    {file}:{line} in {function}" for file, line, function in stack)


def by_group(events: Events, kind: type, key: Callable[[Any], Any]) -> dict[Any, Events]:
    """The events of a kind by group and rank."""
    sorted_: dict[Any, Events] = defaultdict(lambda: defaultdict(list))
    for rank, own in events.items():
        for event in own:
            if isinstance(event, kind) and key(event) is not None:
                sorted_[key(event)][rank].append(event)
    return sorted_


def aligned(ranks: Sequence[int], own: Events) -> Iterator[dict[int, Any]]:
    """The n-th event of each rank; None on a rank that has fewer."""
    for row in zip_longest(*(own.get(rank, []) for rank in ranks)):
        yield dict(zip(ranks, row, strict=True))


def creations(events: Events, ended: bool) -> Iterator[Finding]:
    """creation, split and hashed name: what all ranks of a parent do together. Once
    per place in the source."""
    seen: set[Any] = set()
    made = by_group(events, Creation, lambda event: None if event.is_local else event.parent)
    for parent, own in made.items():
        for row in aligned(parent.members, own):
            finding = differing(parent, row, events, ended)
            if finding is not None:
                yield finding
                break
            places = tuple(event.stack[:2] for event in row.values() if event is not None)
            for finding in (*unsplit(parent, row), *misnamed(row)):
                if (finding.rule, places) not in seen:
                    yield finding
                seen.add((finding.rule, places))


def differing(
    parent: Group, row: dict[int, Creation | None], events: Events, ended: bool
) -> Finding | None:
    """The n-th creation of each rank has the same arguments and the same name."""
    there = [(rank, event) for rank, event in row.items() if event is not None]
    one = there[0]
    for other in there[1:]:
        if agreed(one[1]) != agreed(other[1]):
            said = f"ranks of {parent} do not make the same groups in the same order:"
            return both("creation", said, one, other)
    missing = [rank for rank, event in row.items() if event is None]
    if missing and ended:
        said = f"not every rank of {parent} makes a group:"
        return lone("creation", said, one, missing[0], events)
    return None


def agreed(event: Creation) -> tuple[Any, ...]:
    name = None if event.is_split else event.group.name
    return event.is_split, event.parts, event.limit_s, name, event.group.backends


def unsplit(parent: Group, row: dict[int, Creation | None]) -> Iterator[Finding]:
    calls = {rank: event for rank, event in row.items() if event and event.calls_split}
    spared = {rank: event for rank, event in row.items() if event and not event.calls_split}
    if calls and spared:
        said = (
            f"ranks {sorted(calls)} call ncclCommSplit on {parent} and wait there for ranks "
            f"{sorted(spared)}, which do not:"
        )
        yield both("split", said, next(iter(calls.items())), next(iter(spared.items())))


def misnamed(row: dict[int, Creation | None]) -> Iterator[Finding]:
    """Each rank's own part of a split, by members."""
    parts: dict[tuple[int, ...], list[tuple[int, Creation]]] = defaultdict(list)
    for rank, event in row.items():
        if event is not None and event.is_split and event.group.members:
            parts[event.group.members].append((rank, event))
    for members, named in parts.items():
        other = [pair for pair in named if pair[1].group.name != named[0][1].group.name]
        if other:
            names = {rank: event.group.name[:8] for rank, event in named}
            said = (
                f"DeviceMesh names the group of ranks {list(members)} by how many groups "
                f"a rank is in (_world.pg_names), which differs: {names}:"
            )
            yield both("hashed name", said, named[0], other[0])


def local_creations(events: Events, ended: bool) -> Iterator[Finding]:
    for rank, own in events.items():
        for event in own:
            if isinstance(event, Creation) and event.is_local and event.calls_split:
                outside = [r for r in event.parent.members if r not in event.group.members]
                if outside:
                    said = f"{event.group} is split off {event.parent} by its members alone:"
                    yield lone("split", said, (rank, event), outside[0], events)


def limits(events: Events, ended: bool) -> Iterator[Finding]:
    """Once per place in the source, by the first rank that has it."""
    places = set()
    for rank, own in sorted(events.items()):
        for event in own:
            if isinstance(event, Creation) and event.limit_s < event.default_limit_s:
                place = event.stack[0]
                if place not in places:
                    said = f"the default group has a limit of {event.default_limit_s:.0f} s, but"
                    shown = f"{said}\n  rank {rank} {event}:{text(event.stack)}"
                    yield Finding("time limit", shown)
                places.add(place)


def operations(events: Events, ended: bool) -> Iterator[Finding]:
    """first and operation: what the members of a group call, in order."""
    used = by_group(events, Operation, lambda event: event.group)
    by_gloo = {key for own in events.values() for key, event in numbers(own) if event.on_cpu}
    for group, own in used.items():
        starts = {rank: first_of(own.get(rank, []), by_gloo) for rank in group.members}
        batch = next(((r, e) for r, e in starts.items() if e and e.name == BATCH), None)
        for rank, event in starts.items():
            if batch is not None and event is not None and event.name != BATCH:
                said = f"a batch is the first call of {group} on some of its ranks only:"
                yield both("first", said, batch, (rank, event))
                break
        calls = [(r, e) for r, e in starts.items() if e and e.name not in POINT_TO_POINT]
        absent = [rank for rank, event in starts.items() if event is None]
        if ended and calls and absent:
            said = f"not every rank calls the first operation of {group}:"
            yield lone("first", said, calls[0], absent[0], events)
        else:
            yield from unmatched(group, own, events, ended)


def first_of(own: list[Operation], by_gloo: set[tuple[Group, int]]) -> Operation | None:
    """The first operation of a rank over a group that is NCCL's on a GPU job."""
    carried = {id(event) for key, event in numbers(own) if key in by_gloo}
    return next((e for e in own if not e.on_cpu and id(e) not in carried), None)


def unmatched(group: Group, own: Events, events: Events, ended: bool) -> Iterator[Finding]:
    collectives = {r: [e for e in mine if e.name in COLLECTIVES] for r, mine in own.items()}
    for row in aligned(group.members, collectives):
        there = [(rank, event) for rank, event in row.items() if event is not None]
        other = [pair for pair in there if alike(pair[1]) != alike(there[0][1])]
        missing = [rank for rank, event in row.items() if event is None]
        if other:
            said = f"ranks of {group} do not call the same operations in the same order:"
            yield both("operation", said, there[0], other[0])
        elif missing and ended:
            said = f"not every rank of {group} calls an operation:"
            yield lone("operation", said, there[0], missing[0], events)
        if other or missing:
            return


def alike(event: Operation) -> tuple[Any, ...]:
    return event.name, event.tensors if event.name in ALIKE else ()


def orders(events: Events, ended: bool) -> Iterator[Finding]:
    """Collectives of device tensors over the groups that two ranks share, the n-th of each. Once
    per pair of places in the source."""
    numbered = {rank: list(numbers(own)) for rank, own in events.items()}
    by_gloo = {key for own in numbered.values() for key, event in own if event.on_cpu}
    seen: set[Any] = set()
    for one, other in combinations(sorted(events), 2):
        shared = [
            [(key, event) for key, event in numbered[rank]
             if key not in by_gloo and {one, other} <= set(event.group.members)]
            for rank in (one, other)
        ]  # fmt: skip
        pairs = zip(*shared, strict=False)
        differs = next(((a, b) for (i, a), (j, b) in pairs if i != j), None)
        places = differs and tuple(event.stack[0] for event in differs)
        if differs is not None and places not in seen:
            said = "two communicators are used in different orders:"
            yield both("order", said, (one, differs[0]), (other, differs[1]))
        seen.add(places)


def numbers(own: list[Any]) -> Iterator[tuple[tuple[Group, int], Operation]]:
    """The collectives, each with how many there were before it over its group."""
    counters: dict[Group, Iterator[int]] = defaultdict(count)
    for event in own:
        if isinstance(event, Operation) and event.name in COLLECTIVES:
            yield (event.group, next(counters[event.group])), event


def cpu_tensors(events: Events, ended: bool) -> Iterator[Finding]:
    """Once per place in the source, with the stacks of two ranks where two do it."""
    places: dict[Any, list[tuple[int, Operation]]] = defaultdict(list)
    for rank, own in sorted(events.items()):
        for event in own:
            if isinstance(event, Operation) and event.on_cpu and "cpu" not in event.group.backends:
                places[event.stack[0]].append((rank, event))
    for pairs in places.values():
        one = pairs[0]
        other = next((pair for pair in pairs if pair[0] != one[0]), None)
        said = "a CPU tensor goes over a group that has NCCL alone:"
        if other is not None:
            yield both("CPU tensor", said, one, other)
        else:
            yield Finding("CPU tensor", f"{said}\n  rank {one[0]} {one[1]}:{text(one[1].stack)}")
