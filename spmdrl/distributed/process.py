"""What only a program may touch: process groups, environment, seeds, logging, signals, exit codes.

Exit codes: 0 done, 1 a failure that a restart may cure, 2 a mistake in the config or the data, 75
stopped by a signal (start it again and it goes on), 130 Ctrl-C.
"""

from __future__ import annotations

import ctypes
import gc
import json
import logging
import os
import random
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from spmdrl.checkpoint.disk_space import check_encodable, check_room, shared_bytes, writing
from spmdrl.checkpoint.earlier_runs import replace_synced
from spmdrl.cli.arguments import as_source, fingerprint
from spmdrl.config import ConfigError
from spmdrl.distributed.exit import GUARD, REQUEUE, exit_config, leave, leave_for_torchrun
from spmdrl.distributed.faults.rendezvous import FOREVER, Start
from spmdrl.distributed.faults.watchdog import Watchdog
from spmdrl.distributed.phases import PhaseError, Phases
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.signals import Stopping
from spmdrl.distributed.topology import Topology
from spmdrl.hub.remote_code import UNREADABLE, reason_of
from spmdrl.rewards.workers.worker import PR_SET_PDEATHSIG

logger = logging.getLogger(__name__)

# What vLLM reads when it is imported; a value of the user's wins.
ENGINE_ENV = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
LARGE_BYTES = 1 << 20
HEAP_BYTES = 6 << 20  # of a tensor that still comes from malloc's heap while steps run
MOST_GROWTH = 0.01  # of resident memory over that of earlier steps, before free pages go back
LEARNING_STEPS = 5


@dataclass
class Runtime:
    """The process side of a run."""

    topology: Topology  # every rank, axis dp
    phases: Phases
    run_dir: Path
    stopping: Stopping = field(default_factory=Stopping)  # unless it listens, nothing stops it
    lock: int | None = None  # rank 0's hold on run_dir
    stopped: str = ""  # what there is to say where a signal ended the run in order
    arguments: tuple[str, ...] = ()  # of the command line
    at_end: Callable[[], None] = lambda: None  # after the last collective; no rank waits for it

    @property
    def is_main(self) -> bool:
        return self.topology.rank == 0


@contextmanager
def started(config: Any) -> Iterator[Runtime]:
    """Starts everything, seeds, compares configs over ranks; ends it all in order, or with a story.

    config: a RunConfig. Exits the process where the body raises.
    """
    PROGRESS.now("connecting the ranks")
    prepare_environment()
    stopping = Stopping()
    stopping.listen()
    neighbour = local_neighbour()
    run_dir = Path(config.run_dir)
    start = Start(config.start_timeout_s, run_dir / "errors")
    try:
        check_encodable({"run_dir": config.run_dir, "model": config.model})
        device = start_process_group(FOREVER, start)
    except ConfigError as error:
        exit_config(error)
    topology = Topology.build(device, dp=-1)
    connection: Any = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore("watchdog", connection.clone())
    one_host = os.environ["LOCAL_WORLD_SIZE"] == os.environ["WORLD_SIZE"]
    master = None if one_host else (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    first_here = topology.rank - int(os.environ["LOCAL_RANK"])
    watchdog = Watchdog(
        store, topology.rank, topology.world, run_dir / "errors", config.stall_timeout_s,
        lost_timeout_s(config), neighbour,
        near_store=os.environ["RANK"] == os.environ["LOCAL_RANK"], master=master,
        first_here=first_here,
    )  # fmt: skip
    start.done()
    phases = Phases(topology, watchdog, PROGRESS.phase)
    PROGRESS.now("preparing the run")
    stopping.failed = lambda: watchdog.heard
    stopping.on_quit = partial(quit_step, phases, watchdog)
    GUARD.tell = partial(end_early, phases, watchdog)
    runtime = Runtime(topology, phases, run_dir, stopping, arguments=tuple(sys.argv[1:]))
    try:
        compare_configs(config, topology)
        with phases("check folders"):
            if int(os.environ["LOCAL_RANK"]) == 0:  # on each host
                check_room(run_dir, shared_here(config, topology))
        seed_everything(config.seed + topology.rank)
        yield runtime
    except PhaseError as error:  # the rank that failed has reported it
        watchdog.tell(asdict(error.story))
        leave(error.story.exit_code)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001  told with rank and phase, then the process ends
        story = asdict(phases.story(error))
        story = watchdog.report(story)
        watchdog.tell(story)
        leave(story["exit_code"])
    watchdog.progress("end")
    dist.barrier(group=topology.control)  # a rank may hang while its engine closes: still watched
    watchdog.close()
    dist.barrier(group=topology.control)  # the store's host leaves last
    GUARD.all_done()
    dist.destroy_process_group()
    PROGRESS.stop()
    if runtime.stopped:
        leave_for_torchrun(runtime.stopped)
        leave(REQUEUE)
    runtime.at_end()
    gc.freeze()  # vLLM has undone that of the start, and Python's end would look through it all


def end_early(phases: Phases, watchdog: Watchdog, cause: str, stack: str) -> None:
    """A function is ending this rank's process: the others hear of it, and end as well."""
    watchdog.tell(watchdog.report(asdict(phases.story_of(cause, stack))))


def shared_here(config: Any, topology: Topology) -> int:
    """Bytes of /dev/shm that the ranks of this host need; on the first of them."""
    if topology.device.type != "cpu":
        return 0
    last = topology.rank + int(os.environ["LOCAL_WORLD_SIZE"])
    return shared_bytes(
        config, list(range(topology.rank, last)), topology.world, torch.get_num_threads()
    )


def quit_step(phases: Phases, watchdog: Watchdog, why: str, code: int) -> None:
    """The other ranks end as well: this one will not be there to finish the step with them."""
    story = asdict(phases.story_of(why, exit_code=code))
    watchdog.tell(watchdog.report(story))


def lost_timeout_s(config: Any) -> float:
    """torch.profiler ends and writes a trace without letting go of the interpreter: no thread of
    that rank gives a sign of life meanwhile, which may be minutes."""
    if config.profile is None:
        return config.lost_timeout_s
    return max(config.lost_timeout_s, config.stall_timeout_s)


def local_neighbour() -> int | None:
    """The next rank on this host, in a circle."""
    rank, local, world = (int(os.environ[n]) for n in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    return None if world == 1 else rank - local + (local + 1) % world


def prepare_environment() -> None:
    for name, value in ENGINE_ENV.items():
        os.environ.setdefault(name, value)
    if "TORCHELASTIC_RUN_ID" in os.environ:  # ranks must not outlive a torchrun that was killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    if "RANK" not in os.environ:  # python -m instead of torchrun
        os.environ.update(alone)
    level = logging.INFO if os.environ["RANK"] == "0" else logging.ERROR
    lines = LineHandler()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", handlers=[lines])
    logging.getLogger("spmdrl").setLevel(level)
    for module in ("torch", "vllm"):  # deprecations between our libraries, nobody's to act on
        warnings.filterwarnings("ignore", category=FutureWarning, module=module)
    warnings.filterwarnings("ignore", module=r"megatron\.")  # that Apex is not there, and the like
    logging.getLogger("vllm").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


class LineHandler(logging.Handler):
    """Prints what is logged, in place of what progress shows on a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            PROGRESS.line(self.format(record))
        except Exception:  # noqa: BLE001  a library's wrong format must not end a run: logging's rule
            self.handleError(record)


@contextmanager
def notes_last(wanted: bool) -> Iterator[None]:
    """With `wanted`, what is logged meanwhile is printed at the end, warnings last: a reader of a
    long plan sees them. Where the body raises, before the error is told."""
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


def start_process_group(timeout: timedelta, start: Start | None = None) -> torch.device:
    """gloo for CPU tensors everywhere, NCCL for those on GPUs. start: sees to the time it takes."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if not torch.cuda.is_available():
        wanted = os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
        if wanted and Path("/dev/nvidiactl").exists():
            raise ConfigError(
                f"this host has NVIDIA GPUs that torch {torch.__version__} cannot use: install a "
                "CUDA build that its driver supports, or set CUDA_VISIBLE_DEVICES= for a CPU run"
            )
        map_large_tensors()
        dist.init_process_group("gloo", timeout=timeout, **(start.meet() if start else {}))
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"{os.environ['LOCAL_WORLD_SIZE']} ranks on this host, but {torch.cuda.device_count()} "
            "GPUs: use --nproc-per-node at most that, or CUDA_VISIBLE_DEVICES= for a CPU run"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    met = start.meet() if start else {}
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout, **met)
    return device


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
    """To be called between the start and the first step.

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


def write_config(config: Any, run_dir: Path) -> None:
    """run_dir/config.py: every field as it was resolved."""
    path = Path(run_dir, "config.py")
    text = (
        "# The config of this run as resolved, every field written out. Functions stand by name:\n"
        f"# take their source from the file that was given.\nconfig = {as_source(config)}\n"
    )
    with writing(path):
        run_dir.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="backslashreplace")


def job() -> str:
    """What stays the same where torchrun or Slurm starts a run again."""
    if "SLURM_JOB_ID" in os.environ:
        return f"slurm {os.environ['SLURM_JOB_ID']}"
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if run_id != "none":
        return f"torchrun {run_id}"
    started_at = (
        Path("/proc", str(os.getppid()), "stat")
        .read_text(errors="replace")
        .rpartition(")")[2]
        .split()[19]
    )
    return f"{socket.gethostname()} {os.getppid()} {started_at}"


def restarts(topology: Topology) -> int:
    """How often the ranks were started before in this job. Collective.

    torchrun counts per node, and only those that its own ranks caused.
    """
    counts = [os.environ.get(f"{by}_RESTART_COUNT", "0") for by in ("TORCHELASTIC", "SLURM")]
    most = torch.tensor([sum(map(int, counts))])
    dist.all_reduce(most, dist.ReduceOp.MAX, group=topology.control)
    return int(most.item())


def began_at(run_dir: Path, topology: Topology) -> int | None:
    """The step after which this run began, where it is started again after a failure. Collective.

    It then goes on from its own checkpoints, whatever config.resume said to the first start.
    None: it is a start of its own. Raises ConfigError where job.json cannot tell.
    """
    answer: list[Any] = [(None, None)]
    known = Path(run_dir, "job.json")
    again = restarts(topology) > 0
    if topology.rank == 0 and again and known.is_file():
        answer = [read_job(known)]
    dist.broadcast_object_list(answer, group=topology.group, group_src=0)
    began, problem = answer[0]
    if problem is not None:
        raise ConfigError(problem)
    return began


def read_job(path: Path) -> tuple[int | None, str | None]:
    """(the step after which this job's run began, what is wrong with the file)."""
    try:
        before = json.loads(path.read_text())
        return (int(before["began_at"]) if before["job"] == job() else None), None
    except (ValueError, KeyError, TypeError) as error:
        return None, (
            f"{path} cannot be read ({type(error).__name__}: {error}), and this run was started "
            "again: whether the checkpoints there are its own cannot be told. Remove the file and "
            "start the run with --resume auto to go on from them"
        )


def write_job(run_dir: Path, began: int) -> None:
    """began: the step after which the run began. A restart needs it, also after a power failure."""
    content = json.dumps({"job": job(), "began_at": began})
    with writing(Path(run_dir, "job.json")):
        replace_synced(Path(run_dir, "job.json"), content.encode())


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def load_tokenizer(model: str) -> Any:
    """Raises ConfigError where the model has none, or only its own code could load it."""
    try:
        return AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except UNREADABLE as error:
        reason = reason_of(error)
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers library raises nothing more specific
            raise
        reason = str(error)
    raise ConfigError(f"model: {model!r} has no tokenizer that loads: {reason}")
