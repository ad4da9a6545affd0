"""Runs the user's commands as a user does: torchrun -m spmdrl.ppo, with a hard time limit."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

import psutil
from metric_pages import without_a_row
from ranks import (
    SERVER,
    become,
    check_records,
    free_port,
    record_if_asked,
    records_in,
    wait_all,
)

ROOT = Path(__file__).parents[1]
RUNNING: list[BaseProcess] = []  # since the test began
CONFIG = """
from spmdrl.config import *

def reward(response, ground_truth):
    return float(response.startswith(ground_truth)) + 0.01 * len(response)

config = PpoConfig(
    model="model",
    data=DataConfig(train="train.jsonl", eval="eval.jsonl", prompts_per_step=8,
                    max_prompt_tokens=16),
    reward=reward,
    rewards=RewardConfig(workers=1),
    steps=2,
    eval_every=0,
    run_dir="run",
    rollout=RolloutConfig(engine="hf", n=4, max_tokens=8, dtype="float32", kv_cache_mib=32),
    actor=TrainConfig(dtype="float32", micro_batch_tokens=128, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=0),
    trackers=(),
)
"""


def write_task(folder: Path) -> None:
    """Sums of two digits in verl's schema: train.jsonl (40 rows) and eval.jsonl (10)."""
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": f"{a}+{b}="}],
         "reward_model": {"style": "rule", "ground_truth": str(a + b)}, "extra_info": {}}
        for a in range(1, 8) for b in range(1, 8)
    ]  # fmt: skip
    for name, part in (("train", rows[:40]), ("eval", rows[39:])):
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))


def set_up(folder: Path, model: Path) -> Path:
    """The task, cfg.py and the model, which is linked."""
    Path(folder, "model").symlink_to(model)
    write_task(folder)
    Path(folder, "cfg.py").write_text(CONFIG)
    return folder


def make_arithmetic(folder: Path) -> None:
    """The arithmetic example's data and untrained model, in folder/runs/arithmetic."""
    script = ROOT / "examples" / "arithmetic" / "make_assets.py"
    made = train(folder, 1, "--out", "runs/arithmetic", program=str(script))
    assert made.code == 0, made.output[-4000:]


# by a clock, or of the number of ranks
MEASURED = ("time", "throughput/", "idle/", "moved/", "checkpoint/", "memory/")


@dataclass
class Done:
    code: int
    output: str
    seconds: float


def start(
    folder: Path, ranks: int, *args: str, program: str = "spmdrl.ppo", before: Sequence[str] = (),
    launcher: str = "torch.distributed.run", forked: bool = True,
) -> BaseProcess:  # fmt: skip
    """torchrun in a session of its own, output to folder/log. before: options of torchrun."""
    command = ["--nproc-per-node", str(ranks), "--master-port", str(free_port()), *before,
               "-m", program, *map(str, args)]  # fmt: skip
    Path(folder, "log").write_text("")  # nobody is to wait for what an earlier run said
    records = records_in(records_of(folder)) if forked and "--max-restarts" not in before else {}
    process = SERVER.Process(
        target=launch, args=(str(folder), launcher, command, environment() | records, forked)
    )
    process.start()
    RUNNING.append(process)
    return process


def records_of(folder: Path) -> Path:
    """Where the ranks of the folder's last run write down what --strict-nccl compares."""
    return Path(folder, "nccl_records")


def end_left() -> None:
    """A test that failed between `start` and `finish` leaves its run to nobody."""
    while RUNNING:
        process = RUNNING.pop()
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its ranks end with it
            process.join(10)


def environment() -> dict[str, str]:
    """A user's: without what the tests have set for engines."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return env | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def launch(
    folder: str, launcher: str, command: list[str], env: dict[str, str], forked: bool
) -> None:
    """What the command `python -m launcher` does, in a process that has imported it already.

    forked: so have its ranks, which are forks of it, where torchrun would start Python. All else
    is torchrun's own; but a killed one, whose pages others share, may take longer to be gone than
    its peers take to leave.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    os.chdir(folder)
    become(Path("log"), env)
    if forked:
        subprocess_handler.Popen = ForkedRank
    sys.exit(importlib.import_module(launcher).main(command))


class ForkedRank:
    """As much of a Popen as torchrun uses. args: python -u -m MODULE ..."""

    def __init__(
        self, args: Sequence[str], env: dict[str, str], stdout: IO[str] | None,
        stderr: IO[str] | None, start_new_session: bool,
    ) -> None:  # fmt: skip
        assert args[1:3] == ("-u", "-m") and start_new_session, args
        streams = [None if file is None else file.fileno() for file in (stdout, stderr)]
        fork, (ready, is_ready) = multiprocessing.get_context("fork"), os.pipe()
        rank = args[3], args[4:], env, streams, is_ready
        self.process = fork.Process(target=run_rank, args=rank)
        self.process.start()
        assert self.process.pid is not None
        os.close(is_ready)
        os.read(ready, 1)  # a Popen returns as late: signals find a session, and no old handlers
        os.close(ready)
        self.pid, self.args = self.process.pid, args

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.process.exitcode) is None:  # join would ask a pipe that is closed there
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.process.exitcode is None:
            os.kill(self.pid, number)


def run_rank(
    module: str, args: Sequence[str], env: dict[str, str], streams: list[int | None], is_ready: int
) -> None:
    """Leaves torchrun's session, its signal handlers, its sockets and what else it has open."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        if signal.getsignal(number) == signal.SIG_IGN:  # a new program ignores it, too
            continue
        default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, default)
    os.setsid()
    os.write(is_ready, b"1")
    for own, given in zip((1, 2), streams, strict=True):
        if given is not None:
            os.dup2(given, own)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    resource_tracker._resource_tracker._fd = None  # its number will be another file's
    os.environ.clear()
    os.environ.update(env)
    show_environment(env)
    sys.stdout.reconfigure(write_through=True)  # as by -u
    record_if_asked()
    sys.argv[1:] = args
    runpy.run_module(module, run_name="__main__", alter_sys=True)


SHOWN: list[Any] = []  # what the kernel reads it from has to stay


def show_environment(env: dict[str, str]) -> bool:
    """/proc/PID/environ of this process becomes `env`: a watchdog looks there before it kills a
    rank. False where Linux cannot do it (CONFIG_CHECKPOINT_RESTORE). prctl(2), PR_SET_MM_MAP.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_size_t
    text = "".join(f"{name}={value}\0" for name, value in env.items()).encode()
    SHOWN.append(ctypes.create_string_buffer(text, len(text)))
    place = ctypes.addressof(SHOWN[-1])
    stat = [0, 0, 0, *Path("/proc/self/stat").read_text().rpartition(")")[2].split()]
    code, stack, data, heap, args = ([int(x) for x in stat[first : first + count]] for first, count
                                     in ((26, 2), (28, 1), (45, 2), (47, 1), (48, 2)))  # fmt: skip
    places = [*code, *data, *heap, libc.sbrk(0), *stack, *args, place, place + len(text), 0]
    as_it_is = struct.pack("=12Q2I", *places, 0, 2**32 - 1)  # prctl_mm_map, of linux/prctl.h
    set_mm, whole_map = 35, 14
    words = (whole_map, as_it_is, ctypes.c_ulong(len(as_it_is)), ctypes.c_ulong(0))
    return libc.prctl(set_mm, *words) == 0


def pids_of(launcher: int) -> list[int]:
    """The ranks' processes in rank order: the children of torchrun, which has no others, in the
    order of their start. Their numbers are no order: after the largest there is, small ones follow.
    One that ends while it is looked at is left out.
    """
    lists = Path(f"/proc/{launcher}/task").glob("*/children")
    alive = []
    for pid in [int(pid) for found in lists for pid in found.read_text().split()]:
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.append(pid)
    return alive


def finish(proc: BaseProcess, folder: Path, timeout_s: float) -> Done:
    """Waits; over the limit every rank shows its stack (SIGABRT) and the test fails."""
    begin = time.monotonic()
    proc.join(timeout_s)
    if proc.exitcode is None:
        assert proc.pid is not None
        os.killpg(proc.pid, signal.SIGABRT)
        time.sleep(2)
        with suppress(ProcessLookupError):
            os.killpg(proc.pid, signal.SIGKILL)
        proc.join()
        text = Path(folder, "log").read_text()[-8000:]
        check_records(records_of(folder), ended=False)  # says more than that ranks hang
        raise AssertionError(f"over {timeout_s} s:\n{text}")
    check_records(records_of(folder), ended=proc.exitcode == 0)
    return Done(proc.exitcode, Path(folder, "log").read_text(), time.monotonic() - begin)


def torchrun(folder: Path, ranks: int, *args: str, timeout_s: float = 300, **kwargs: Any) -> Done:
    return finish(start(folder, ranks, *args, **kwargs), folder, timeout_s)


def train(
    folder: Path, ranks: int, *args: str, program: str = "spmdrl.ppo", timeout_s: float = 400
) -> Done:
    """As `torchrun`, where only the numbers matter: the ranks are processes that have imported
    torch already, started as by Slurm with their number in the environment. The code is that of the
    first rank that failed. program: a module's name, or the path of a script.
    """
    begin = time.monotonic()
    Path(folder, "log").write_text("")
    port, records = str(free_port()), records_of(folder)
    alike = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **records_in(records)}  # fmt: skip
    procs = []
    for rank in range(ranks):
        env = environment() | alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        run = (str(folder), program, list(map(str, args)), env)
        procs.append(SERVER.Process(target=run_module, args=run))
        procs[-1].start()
    finished = wait_all(procs, timeout_s, kill_after_s=60)
    text = Path(folder, "log").read_text()
    if not finished:
        check_records(records, ended=False)  # says more than that ranks hang
    assert finished, f"over {timeout_s} s:\n{text[-8000:]}"
    codes = [process.exitcode for process in procs]
    check_records(records, ended=not any(codes))
    return Done(next(filter(None, codes), 0), text, time.monotonic() - begin)


def run_module(folder: str, program: str, args: list[str], env: dict[str, str]) -> None:
    os.chdir(folder)
    become(Path("log"), env)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    record_if_asked()
    sys.argv[1:] = args
    if program.endswith(".py"):
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def wait_for(folder: Path, text: str, proc: BaseProcess, timeout_s: float = 120) -> None:
    """Until the log holds `text`."""
    end = time.monotonic() + timeout_s
    log = Path(folder, "log")
    while text not in log.read_text():
        assert proc.exitcode is None, log.read_text()[-6000:]
        assert time.monotonic() < end, log.read_text()[-6000:]
        time.sleep(0.05)


def metrics_of(run_dir: Path) -> list[dict]:
    """Rows of metrics.jsonl without what a clock measured. Each metric is in docs/metrics.md."""
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").open()]
    assert not without_a_row(set().union(*rows))
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows]


def samples_of(run_dir: Path, step: int) -> list[dict]:
    """Rows of samples/ of a step."""
    return [json.loads(line) for line in Path(run_dir, f"samples/step_{step}.jsonl").open()]
