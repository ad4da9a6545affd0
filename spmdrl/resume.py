"""Where a run begins: what it goes on from, and what becomes of an earlier run's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spmdrl import checkpoint
from spmdrl.config import RunConfig
from spmdrl.metrics import set_aside_earlier_run
from spmdrl.program import Runtime, began_at, write_config, write_job
from spmdrl.run_lock import lock_run_dir


@dataclass(frozen=True)
class Start:
    """The same on every rank."""

    folder: Path | None  # of the checkpoint to load
    began: int | None  # see program.began_at


def find_start(config: RunConfig, runtime: Runtime) -> Start:
    """Takes the run's folder and looks for what config.resume asks for. Collective."""
    topology, on_damage = runtime.topology, config.checkpoint.on_damage
    root = runtime.run_dir / "checkpoints"
    runtime.lock = lock_run_dir(runtime.run_dir, topology)
    if runtime.is_main:
        checkpoint.recover(root)
    began = began_at(runtime.run_dir, topology)
    resume = config.resume if began is None else "auto"
    folder = checkpoint.find(resume, root, topology, began or 0, on_damage)
    if folder is None and began is not None:  # it had saved nothing yet
        folder = checkpoint.find(config.resume, root, topology, on_damage=on_damage)
    return Start(folder, began)


def take_folder(config: RunConfig, runtime: Runtime, start: Start, done: int) -> None:
    """On rank 0, once what is to be loaded is loaded: `done` steps of this run stand."""
    if not runtime.is_main:
        return
    set_aside_earlier_run(runtime.run_dir, done)
    write_config(config, runtime.run_dir)
    if start.began is None:
        write_job(runtime.run_dir, done)
