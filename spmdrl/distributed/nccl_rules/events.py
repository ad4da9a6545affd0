"""Defines what a rank writes down: the process groups that it makes, and its calls over them."""

from __future__ import annotations

from dataclasses import dataclass

RECORDS = "SPMDRL_NCCL_RECORDS"  # in a rank's environment: the folder where it writes this down
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
