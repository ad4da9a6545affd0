"""Keeps steps of a run for a replay: run_dir/kept_samples/step_N.samples_R.npz of every rank that
samples, and step_N.computed_R.npz of every rank of the actor.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from spmdrl.checkpoint.disk_space import writing
from spmdrl.config import KeepSamplesConfig
from spmdrl.training.collect import RolloutResult
from spmdrl.training.replay.sample_files import packed

FOLDER = "kept_samples"
NAME = re.compile(r"step_(\d+)\.(samples|computed)_(\d+)\.npz")


def is_kept(config: KeepSamplesConfig, step: int) -> bool:
    """Whether the samples of a step are kept, for a while or for good."""
    return config.last > 0 or stays(config, step)


def stays(config: KeepSamplesConfig, step: int) -> bool:
    return config.every > 0 and (step - 1) % config.every == 0


def kept_file(run_dir: Path, step: int, kind: str, rank: int) -> Path:
    """kind: "samples" or "computed". rank: among those that have such a file."""
    return Path(run_dir, FOLDER, f"step_{step}.{kind}_{rank}.npz")


def write_whole(path: Path, content: bytes) -> None:
    """Writes aside and renames: a process that is killed leaves the whole file or none."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        aside.write_bytes(content)
        os.replace(aside, path)


@dataclass
class SampleKeeper:
    """Writes this rank's samples while the step goes on; one step at a time."""

    run_dir: Path
    config: KeepSamplesConfig
    rank: int  # among those that sample
    world: int
    num_rows: int  # of the data
    pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "keep_samples"))
    pending: Future[None] | None = None

    def keep(self, step: int, rollout: RolloutResult) -> None:
        """Begins to write. Raises what the write of the step before has raised."""
        self.wait()
        if is_kept(self.config, step):
            self.pending = self.pool.submit(self.write, step, rollout)

    def wait(self) -> None:
        """Waits until all is written. Raises OSError where that failed."""
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def write(self, step: int, rollout: RolloutResult) -> None:
        content = packed(rollout, self.world, self.num_rows)
        write_whole(kept_file(self.run_dir, step, "samples", self.rank), content)
        remove_older(self.run_dir, self.config, step, "samples", self.rank, self.world)


def remove_older(
    run_dir: Path, config: KeepSamplesConfig, step: int, kind: str, rank: int, world: int
) -> None:
    """Removes this rank's files of steps that are neither among the last nor kept for good; those
    of ranks that are no more are shared out.
    """
    for path in Path(run_dir, FOLDER).iterdir():
        found = NAME.fullmatch(path.name)
        if found is None or found[2] != kind or int(found[3]) % world != rank:
            continue
        if int(found[1]) <= step - config.last and not stays(config, int(found[1])):
            path.unlink()
