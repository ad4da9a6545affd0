"""Starts the program of a rehearsal on ranks of this machine, and reads what it has left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.cli.arguments import LAUNCHER
from spmdrl.distributed.exit import INTERRUPTED
from spmdrl.distributed.nccl_rules.events import RECORDS
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.signals import Stopping
from spmdrl.rehearse.scale import HOSTED

LIMIT_S = 600.0  # of one run; a run of a tiny model takes a tenth of it
GRACE_S = 20.0  # from SIGTERM to SIGKILL
INTERRUPT_S = 2.0  # from Ctrl-C to SIGTERM
TRACKIO = "TRACKIO_"  # variables of that tracker, some of which name a server to send to
TAIL = 25  # lines of a failed run's output that are shown


@dataclass(frozen=True)
class Outcome:
    """Says how a run has ended."""

    what: str  # what it was to do
    command: list[str]
    log: Path
    exit_code: int | None  # None: it was ended at LIMIT_S
    seconds: float
    records: Path  # of its collectives

    @property
    def is_done(self) -> bool:
        return self.exit_code == 0

    def lines(self) -> list[str]:
        if self.is_done:
            return [f"{self.what}: done in {self.seconds:.0f} s"]
        how = "had not ended after" if self.exit_code is None else "failed after"
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return [
            f"{self.what}: {how} {self.seconds:.0f} s; the end of {self.log}:",
            *(f"  {line}" for line in lines[-TAIL:]),
        ]


def run_program(
    what: str, config: str, options: Mapping[str, Any], ranks: int, folder: Path, number: int,
    stopping: Stopping,
) -> Outcome:  # fmt: skip
    """Runs spmdrl.ppo with these fields of the config to its end. number: of the run, from 1. On
    CPUs its ranks write down their collectives into a folder of the run. A signal that ends this
    process, by `stopping`, ends the run as well.
    """
    flags = [part for key, value in options.items() for part in (f"--{key}", repr(value))]
    launched = ["-m", "spmdrl.launch", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launched, "-m", "spmdrl.ppo", "--config", config, *flags]
    log, begun = folder / f"run_{number}.log", time.monotonic()
    records = folder / f"collectives_{number}"
    records.mkdir()
    PROGRESS.now(f"rehearsing: {what}")
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT,
            env=environment(folder) | {RECORDS: str(records.resolve())},
        )  # fmt: skip
        code = wait(process, stopping)
    return Outcome(what, command, log, code, time.monotonic() - begun, records)


def environment(folder: Path) -> dict[str, str]:
    """Returns the ranks' environment: no place of this process, and trackers that send nothing."""
    env = {
        name: value for name, value in os.environ.items()
        if name not in LAUNCHER and not name.startswith(TRACKIO)
    }  # fmt: skip
    env |= HOSTED | {
        "MLFLOW_TRACKING_URI": f"file:{folder.resolve() / 'mlruns'}",
        "MLFLOW_ALLOW_FILE_STORE": "true",  # which MLflow 3 asks for
        f"{TRACKIO}DIR": str(folder.resolve() / "trackio"),
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    return env


def wait(process: subprocess.Popen[Any], stopping: Stopping) -> int | None:
    """Waits for a process, at most LIMIT_S; None: it was ended then. Ends it with this one."""
    before = stopping.on_quit

    def end_both(why: str, code: int) -> None:
        before(why, code)
        with suppress(subprocess.TimeoutExpired):
            if code == INTERRUPTED:  # a terminal has sent Ctrl-C to both
                process.wait(INTERRUPT_S)
        end(process)

    stopping.on_quit = end_both
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)
        stopping.on_quit = before


def end(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def rows_of(file: Path) -> list[dict[str, Any]]:
    """Returns the rows of a file of JSON lines; none where there is no such file."""
    if not file.is_file():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.strip()]


def samples_of(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the samples of all steps that a run has written."""
    steps = sorted(Path(run_dir, "samples").glob("step_*.jsonl"))
    return [row for file in steps if "_trained" not in file.name for row in rows_of(file)]
