"""Rehearses a run on this machine: python -m spmdrl.rehearse --config cfg.py [--gpus_as 8]

The config's data, template, rewards, tools, agents, algorithm, placement and kinds of parallelism,
with a tiny random model of the same family: two steps, an evaluation, a checkpoint, and a resume
from it. Ends with a report of what ran, what was replaced, and what looks wrong. docs/rehearse.md
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.algo.option_help import option_lines
from spmdrl.cli.arguments import converted, load_config
from spmdrl.cli.help import asks_for_help
from spmdrl.cli.paths import check_paths, check_writable
from spmdrl.config import ConfigError, PpoConfig
from spmdrl.config.words import counted
from spmdrl.distributed.env import without_garbage_collection
from spmdrl.distributed.progress import PROGRESS
from spmdrl.distributed.start import reading

if TYPE_CHECKING:
    from spmdrl.distributed.signals import Stopping
    from spmdrl.rehearse.prepare import Prepared
    from spmdrl.rehearse.runs import Outcome

MARK = "report.txt"  # a folder whose file of this name begins so is a rehearsal's
BEGINNINGS = ("rehearsal of ", "a rehearsal goes on here")  # of a report, and before there is one
MOST_RANKS = 8
FAILED = 1  # exit code where a run of the rehearsal failed


def main(
    config: str = "", ranks: int = 2, gpus_as: int = 0, gpu_gib: float = 80.0, out: str = "",
    **overrides: Any,
) -> None:  # fmt: skip
    """Rehearses the run of a config with a tiny model, and reviews it.

    Args:
        config: a Python file that defines `config = PpoConfig(...)`
        ranks: processes here, 1 to 8; more where the placement needs them
        gpus_as: ranks that the real run will have; 0: as the placement says, or 8
        gpu_gib: GiB of each of its GPUs, for the plan of its memory
        out: folder for the report and the rehearsal's runs; else runs/rehearsal_<name of config>
        overrides: any field of the config by its dotted name, as for spmdrl.ppo
    """
    if asks_for_help(overrides, main, PpoConfig, option_lines):
        return
    with reading(config):
        value = load_config(config, PpoConfig, overrides)
        check_paths(value)
        ranks, gpus_as = converted(ranks, int, "--ranks"), converted(gpus_as, int, "--gpus_as")
        gpu_gib = converted(gpu_gib, float, "--gpu_gib")
        if not 1 <= ranks <= MOST_RANKS:
            raise ConfigError(f"--ranks {ranks}: a rehearsal has 1 to {MOST_RANKS} processes")
        folder = folder_of(out or f"runs/rehearsal_{Path(config).stem}")
    with without_garbage_collection():
        from spmdrl.rehearse.prepare import prepare
        from spmdrl.training.runtime import started
    wrong = Collected()
    with started(replace(value, run_dir=str(folder / "run")), is_plan=True) as runtime:
        logging.getLogger("spmdrl").addHandler(wrong)
        prepared = prepare(value, runtime, folder, ranks, gpus_as, gpu_gib)
        logging.getLogger("spmdrl").removeHandler(wrong)
    outcomes = rehearse(prepared, config, overrides, folder, runtime.stopping)
    tell(prepared, outcomes, wrong.lines, config, folder)
    if not all(outcome.is_done for outcome in outcomes):
        sys.exit(FAILED)


class Collected(logging.Handler):
    """Keeps the warnings that the checks of a config have logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def folder_of(out: str) -> Path:
    """Returns an empty folder for a rehearsal; an earlier one's is emptied. Raises ConfigError."""
    folder = Path(out)
    if folder.is_dir() and any(folder.iterdir()):
        if not is_rehearsals(folder):
            raise ConfigError(f"--out {out}: the folder has files that are no rehearsal's")
        shutil.rmtree(folder)
    check_writable("--out", str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(f"{BEGINNINGS[-1]}\n")
    return folder


def is_rehearsals(folder: Path) -> bool:
    """Whether a rehearsal has made the folder. Other programs write a report.txt as well."""
    mark = folder / MARK
    return mark.is_file() and mark.read_text(errors="replace").startswith(BEGINNINGS)


def rehearse(
    prepared: Prepared, config: str, overrides: dict[str, Any], folder: Path, stopping: Stopping
) -> list[Outcome]:
    """Runs two steps, and where they ran, one more from their checkpoint."""
    from spmdrl.rehearse.runs import run_program
    from spmdrl.rehearse.scale import STEPS

    options, here = overrides | prepared.scaled.options(), (prepared.ranks, folder)
    run = [run_program(f"{STEPS} steps and a checkpoint", config, options, *here, 1, stopping)]
    if run[0].is_done:
        options |= {"steps": STEPS + 1, "resume": "auto"}
        run.append(run_program("a resume, one step more", config, options, *here, 2, stopping))
    return run


def tell(
    prepared: Prepared, outcomes: list[Outcome], warnings: list[str], config: str, folder: Path
) -> None:
    """Prints the report, and writes it into the folder."""
    from spmdrl.rehearse.collectives import broken, compare
    from spmdrl.rehearse.report import report_lines

    title = (
        f"{BEGINNINGS[0]}{config}, a run on {counted(prepared.world, 'rank')}, here on "
        f"{prepared.ranks} "
        f"{'GPUs' if prepared.on_gpu else 'CPU ranks'}"
    )
    failed = [f"{o.what}: it failed, see above" for o in outcomes if not o.is_done]
    compared = [compare(outcome) for outcome in outcomes]
    lines = report_lines(
        title, prepared.scaled.changes, outcomes, folder / "run", prepared.tokens,
        prepared.probes, prepared.memory, [line for each in compared for line in each.lines],
        [*failed, *broken(compared), *dict.fromkeys(warnings), *prepared.wrong],
    )  # fmt: skip
    text = "\n".join(lines)
    (folder / MARK).write_text(f"{text}\n")
    PROGRESS.now("")
    PROGRESS.line(f"{text}\n\nin {folder / MARK}; the runs' output: {folder}{os.sep}run_*.log")


if __name__ == "__main__":
    fire.Fire(main)
