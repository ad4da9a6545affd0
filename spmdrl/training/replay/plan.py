"""Finds in the folder of a run what a step can be replayed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdrl.checkpoint.format import read_run, steps_in
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.config.words import counted
from spmdrl.training.logs.summary import read_rows
from spmdrl.training.replay.keeper import FOLDER, NAME, kept_file
from spmdrl.training.replay.sample_files import KeptFile, read
from spmdrl.training.replay.sequence_sums import SequenceSums, merged_sums, read_sums
from spmdrl.training.run_length import with_length


@dataclass(frozen=True)
class ReplayPlan:
    """The step, and where its state comes from."""

    run_dir: Path
    config: PpoConfig  # of the run, with the number of steps
    step: int
    start: Path | None  # the checkpoint before it; None: the models as the run began with them
    done: int  # steps that it has done; those between are replayed too
    row: Mapping[str, Any]  # of metrics.jsonl
    computed: SequenceSums | None  # what the run has kept of it
    actor_ranks: int  # of the run; 0: not known

    def described(self) -> str:
        """Says what is replayed, and from where."""
        start = f"{self.start}" if self.start else "the models as the run began"
        between = self.step - 1 - self.done
        more = f" and {counted(between, 'step')} between" if between else ""
        return f"step {self.step} of {self.run_dir}: replayed from {start}{more}"


def make_plan(run_dir: Path, config: PpoConfig, step: int) -> ReplayPlan:
    """Raises ConfigError where the run has not done the step, or has not kept what it takes."""
    rows = {row["step"]: row for row in read_rows(run_dir)}
    done = max(rows, default=0)
    if not done:
        raise ConfigError(f"{run_dir} has no step yet: its metrics.jsonl has none, or is not there")
    if step < 1 or step not in rows:
        raise ConfigError(
            f"--step {step}: {run_dir} has no such step; its metrics.jsonl has the steps "
            f"{max(min(rows, default=1), 1)} to {done}"
        )
    kept = kept_steps(run_dir)
    if step not in kept:
        raise ConfigError(
            f"--step {step}: its samples were not kept; {said(kept)} --keep_samples.last and "
            "--keep_samples.every of a run say which are (docs/replay.md)"
        )
    start, done = find_start(run_dir, config, step, kept)
    first = read(kept_file(run_dir, step, "samples", 0))
    config = with_length(config, first.num_rows)
    computed, actor_ranks = computed_by_run(run_dir, step)
    return ReplayPlan(run_dir, config, step, start, done, rows[step], computed, actor_ranks)


def kept_steps(run_dir: Path) -> set[int]:
    """Steps of which the first rank's samples are there."""
    found = [NAME.fullmatch(path.name) for path in Path(run_dir, FOLDER).glob("*.npz")]
    return {int(m[1]) for m in found if m and m[2] == "samples" and m[3] == "0"}


def said(kept: set[int]) -> str:
    if not kept:
        return "the run has kept none."
    return f"those of the steps {', '.join(map(str, sorted(kept)))} were."


def find_start(
    run_dir: Path, config: PpoConfig, step: int, kept: set[int]
) -> tuple[Path | None, int]:
    """(the newest checkpoint from which all steps up to `step` have samples, its step); None and 0
    where the run itself began so. Raises ConfigError where there is neither.
    """
    found = steps_in(run_dir / "checkpoints")
    if config.resume not in ("never", "auto") and Path(config.resume).is_dir():
        folder = Path(config.resume)
        found.append((read_run(folder)["step"], folder))
    found = sorted(each for each in found if each[0] < step)
    for done, folder in reversed(found):
        if not missing(done, step, kept):
            return folder, done
    if not missing(0, step, kept):
        return None, 0
    where, done = "there is no checkpoint before it", 0
    if found:
        done, newest = found[-1]
        where = f"the checkpoint before it is {newest}"
    lacking = ", ".join(map(str, missing(done, step, kept)[:8]))
    raise ConfigError(
        f"--step {step}: {where}, and the samples of step {lacking} between were not kept. Keep at "
        "least as many steps as there are between two checkpoints: --keep_samples.last"
    )


def missing(done: int, step: int, kept: set[int]) -> list[int]:
    return [between for between in range(done + 1, step) if between not in kept]


def read_share(run_dir: Path, step: int, rank: int, world: int) -> KeptFile:
    """Reads what this rank of a replay takes: of every `world` files one. The first file's samples
    are left out where others take them. Raises ConfigError where a file is not there.
    """
    first = read(kept_file(run_dir, step, "samples", 0))
    paths = [kept_file(run_dir, step, "samples", r) for r in range(first.world)]
    lost = [path.name for path in paths if not path.is_file()]
    if lost:
        raise ConfigError(f"{run_dir / FOLDER} lacks {', '.join(lost[:4])} of step {step}")
    own = [read(path).rollout for path in paths[rank::world]]
    result = first.rollout
    result.samples = [sample for part in own for sample in part.samples]
    result.all_samples = [sample for part in own for sample in part.all_samples]
    return first


def computed_by_run(run_dir: Path, step: int) -> tuple[SequenceSums | None, int]:
    """(what the run has computed of each sequence, its number of actor's ranks); None and 0 where
    the files are not there.
    """
    first = kept_file(run_dir, step, "computed", 0)
    if not first.is_file():
        return None, 0
    _, world = read_sums(first)
    paths = [kept_file(run_dir, step, "computed", rank) for rank in range(world)]
    return merged_sums([read_sums(path)[0] for path in paths]), world
