"""Sets up what only a program may touch: process groups, environment, seeds, logging, malloc's
heap.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from logging.handlers import MemoryHandler
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from spmdrl.cli.arguments import fingerprint
from spmdrl.config import ConfigError, require
from spmdrl.distributed.accelerator import check_no_gpu_is_left_out, local_device
from spmdrl.distributed.agreement import lowest
from spmdrl.distributed.faults.rendezvous import StartupBarrier
from spmdrl.distributed.nccl_rules.events import RECORDS
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.topology import LAZY_GLOO, Topology

PR_SET_PDEATHSIG = 1  # prctl.h

# What vLLM reads when it is imported; a value of the user's wins.
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
# What torch's gloo reads when a group is made: two ranks connect when they first talk to each
# other. Else each group connects all its ranks with all, which takes a descriptor for each.
GLOO_ENV = {LAZY_GLOO: "1"}
MOST_FILES = 65_536  # enough for the store of 10,000 ranks

# Read by torch's NCCL groups when they are made; a value of the user's wins. Where a rank has died
# torch's watchdog of NCCL would end the others with SIGABRT, before they hear which rank it was
# and why. Ours ends them (faults/watchdog.py), also a rank that hangs in a driver.
NCCL_ENV = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE_BYTES = 1 << 20
HEAP_BYTES = 6 << 20  # of a tensor that still comes from malloc's heap while steps run
MOST_GROWTH = 0.01  # of resident memory over that of earlier steps, before free pages go back
LEARNING_STEPS = 5


def local_neighbour() -> int | None:
    """The next rank on this host, in a circle."""
    rank, local, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None if world == 1 else rank - local + (local + 1) % world


def prepare_environment() -> None:
    for name, value in (ENGINE_ENV | GLOO_ENV | NCCL_ENV).items():
        os.environ.setdefault(name, value)
    raise_file_limit()
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks must not outlive a torchrun that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    if "RANK" not in os.environ:  # python -m instead of torchrun
        os.environ.update(alone)
    level = logging.INFO if os.environ["RANK"] == "0" else logging.ERROR
    lines = LineHandler()
    lines.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[lines])
    logging.getLogger("spmdrl").setLevel(level)
    for module in ("torch", "vllm"):  # deprecations between our libraries, nobody's to act on
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # that Apex is not there, and the like
    logging.getLogger("vllm").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def require_launcher(launched: bool) -> None:
    """Raises ConfigError where Slurm or MPI started several processes that a launcher knows nothing
    of: each would be a run of its own, and all of a host would be on the first GPU. launched: RANK
    was set.
    """
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        tasks = os.environ.get(name, "1")
        require(
            launched or tasks == "1",
            f"{tasks} processes were started ({name}) and none of them has a RANK, so that each "
            "would train by itself: start one process on each host, and in it the ranks: srun "
            "--ntasks-per-node=1 python -m spmdrl.launch ... (launch/ppo.sbatch)",
        )


def raise_file_limit() -> None:
    """Raises the soft limit of open files to the hard one, at most to MOST_FILES.

    Where torchrun has the store (which needs a descriptor for each connection of each rank), its
    process too: it is the parent of the ranks of this host.
    """
    raise_file_limit_of(0)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        with suppress(PermissionError, ProcessLookupError):  # another user's, or it is ending
            raise_file_limit_of(os.getppid())


def raise_file_limit_of(pid: int) -> None:
    """pid: of the process; 0: this one."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (wanted, hard))


class LineFormatter(logging.Formatter):
    """Begins a line of a library with its logger's name, one of ours with "warning" or "spmdrl"."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.name.partition(".")[0] != "spmdrl":
            return f"{record.name}: {text}"
        is_note = record.levelno < logging.WARNING
        return f"{'spmdrl' if is_note else record.levelname.lower()}: {text}"


class LineHandler(logging.Handler):
    """Prints what is logged, in place of what progress shows on a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            PROGRESS.line(self.format(record))
        except Exception:  # noqa: BLE001  a library's wrong format must not end a run: logging's rule
            self.handleError(record)


@contextmanager
def notes_last(wanted: bool) -> Iterator[None]:
    """Prints, with `wanted`, what is logged meanwhile at the end, warnings last: a reader of a long
    plan sees them. Where the body raises, before the error is told.
    """
    root = logging.getLogger()
    if not wanted:
        yield
        return
    before, kept = root.handlers[:], MemoryHandler(capacity=10**6, flushLevel=logging.CRITICAL + 1)
    root.handlers[:] = [kept]
    try:
        yield
    finally:
        root.handlers[:] = before
        for record in sorted(kept.buffer, key=lambda record: record.levelno):
            PROGRESS.line(f"{record.levelname.lower()}: {record.getMessage()}")


def start_process_group(timeout: timedelta, start: StartupBarrier | None = None) -> torch.device:
    """gloo for CPU tensors everywhere, NCCL for those on GPUs. start: sees to the time it takes.

    The group is not bound to the GPU (`device_id`): torch would then make every later group by a
    split of this one's communicator, in which all ranks have to take part, and with gloo groups of
    some ranks they do not (pytorch#145376). So NCCL connects the ranks of a group at the group's
    first operation.
    """
    local_rank = int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available():
        check_no_gpu_is_left_out()
        map_large_tensors()
        record_collectives_if_asked()
        dist.init_process_group("gloo", timeout=timeout, **(start.meet() if start else {}))
        device = torch.device("cpu")
        connect(device)
        return device
    device = local_device(local_rank, int(os.environ["LOCAL_WORLD_SIZE"]))
    torch.cuda.set_device(device)
    met = start.meet() if start else {}
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, **met)
    connect(device)
    return device


def record_collectives_if_asked() -> None:
    """Has this rank write down its collectives where its environment has SPMDRL_NCCL_RECORDS. The
    recorder, which changes torch.distributed, is imported only then.
    """
    if RECORDS in os.environ:
        from spmdrl.distributed.nccl_rules.recorder import record

        record()


def connect(device: torch.device) -> None:
    """Has each rank reach those next to it in the tree of agreements, and NCCL connect all. Both
    connect at first use, and a network that leads nowhere is to be told while the start has its
    limit of time.
    """
    assert dist.group.WORLD is not None
    lowest(0, dist.group.WORLD)
    if device.type != "cpu" and dist.get_world_size() > 1:
        dist.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)


def map_large_tensors() -> None:
    """Gives each large tensor a mapping of its own, on the CPU. To be called at the start.

    What is made before the first step (weights, moments, the engine) stays as long as the run. It
    must not lie among what comes and goes in a step, which would then leave holes between.
    """
    set_malloc(M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_memory() -> None:
    """Keeps what is freed of malloc's heap, and takes tensors of up to HEAP_BYTES from it.

    For the CPU. A larger tensor is a mapping of its own, which leaves no hole in the heap behind:
    micro-batches of ever new lengths left holes twice as large as what lived. The kernel clears
    each mapping, for which a step of the add2 workload takes a third more CPU time where all
    tensors are mapped, and a tenth more where those above HEAP_BYTES are.
    """
    set_malloc(M_MMAP_THRESHOLD, HEAP_BYTES)
    set_malloc(M_TRIM_THRESHOLD, 1 << 30)


def set_malloc(name: int, value: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(name, value)


def keep_what_stands() -> None:
    """Prepares the process for its steps; to be called between the start and the first step.

    A full garbage collection over all that was imported takes half a second: it is left out from
    now on. On the CPU memory that is freed from now on is kept.
    """
    gc.collect()
    gc.freeze()
    if not torch.cuda.is_available():
        keep_freed_memory()


class Heap:
    """Bounds the memory that keep_freed_memory keeps.

    Between steps little of malloc's heap is in use. Small pieces that stay, such as oneDNN's code
    for new shapes, land in its holes and make these too small for later tensors, so the heap grows
    without end. Where resident memory is above what steps took before, free pages go back to the
    system. The next step takes again what it needs, about 1 s per GiB, which is why this is rare:
    what the five steps after it need is never called growth.
    """

    def __init__(self) -> None:
        self.level = 0  # bytes that steps take
        self.learning = LEARNING_STEPS  # so many steps may still raise the level
        self.trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc

    def after_step(self) -> None:
        resident = psutil.Process().memory_info().rss
        if self.learning:
            self.level, self.learning = max(self.level, resident), self.learning - 1
        elif resident > (1 + MOST_GROWTH) * self.level and self.trim is not None:
            self.trim(0)
            self.learning = LEARNING_STEPS


def compare_configs(config: Any, topology: Topology) -> None:
    """A config that differs between ranks would hang them; it is executed once per rank."""
    prints: list[Any] = [None] * topology.world
    dist.all_gather_object(prints, fingerprint(config), group=topology.group)
    other = [rank for rank, print_ in enumerate(prints) if print_ != prints[0]]
    if other:
        raise ConfigError(
            f"the config differs between ranks: {other} do not agree with rank 0. It must not "
            "depend on the rank, the host, the time or random numbers"
        )


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
