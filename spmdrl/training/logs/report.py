"""Tells people what there is to say of a run beside its metrics, on the rank that logs.

Warnings where nothing can be learnt, answers in tensorboard and wandb, and at the end a summary and
a picture. No method is collective; on the other ranks each does nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from spmdrl.config import RunConfig
from spmdrl.training.logs.answers import few_answers
from spmdrl.training.logs.curves import Curve, Row, draw_curve
from spmdrl.training.logs.learning_signs import LearningSigns
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.summary import SUMMARY, FinishedRun, LaunchCommand, read_rows, summary
from spmdrl.training.runtime import Runtime

logger = logging.getLogger(__name__)


class Report:
    """log: of this rank, active or not; it must still be open while steps are reported.

    program: its module, "spmdrl.ppo".
    """

    def __init__(
        self, config: RunConfig, runtime: Runtime, log: RunLog, program: str, curve: Curve,
        signs: LearningSigns,
    ) -> None:  # fmt: skip
        self.config, self.runtime, self.log = config, runtime, log
        self.program, self.curve, self.signs = program, curve, signs

    def after_step(self, step: int, metrics: dict[str, float]) -> None:
        """Adds a step to the report; to be called once its row is written. Step 0 is the evaluation
        before the first step.
        """
        if not self.log.active:
            return
        for text in self.signs.after_step(step, metrics):
            self.log.line(f"warning: {text}")
        if step > 0 and step % max(self.config.steps // 20, 1) == 0:
            self.show_answers(step, f"step_{step}", "samples/train")
        if any(name.startswith("eval/") for name in metrics):
            self.show_answers(step, f"eval_{step}", "samples/eval")

    def show_answers(self, step: int, file: str, name: str) -> None:
        """A few answers of a file in samples/, to the trackers."""
        if not self.log.trackers:
            return
        answers = few_answers(Path(self.log.run_dir, "samples", f"{file}.jsonl"))
        with self.log.named("write metrics"):
            for tracker in self.log.trackers if answers else ():
                tracker.log_answers(step, name, answers)

    def at_end(self, step: int, stopped: bool) -> None:
        """Prints the summary and writes it. The picture, which takes a second, is drawn once the
        other ranks have left; where a signal stopped the run at once, since all leave together."""
        if not self.log.active:
            return
        ended = FinishedRun(
            self.config, self.curve, start_of(self.runtime, self.program), step, stopped
        )
        rows: list[Row] = []

        def tell() -> None:
            rows.extend(read_rows(ended.run_dir))
            text = summary(ended, rows)
            self.log.line("\n" + text)
            file = Path(ended.run_dir, SUMMARY)
            file.write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

        with self.log.named("summary"):
            attempt("summary", tell)
        draw = partial(attempt, "picture", partial(draw_run, ended, rows))
        if stopped:
            draw()
        else:
            self.runtime.at_end = draw


def draw_run(ended: FinishedRun, rows: Sequence[Row]) -> None:
    path = Path(ended.run_dir, ended.curve.picture)
    if not draw_curve(rows, ended.curve, f"{ended.curve.name} of {ended.run_dir}", path):
        logger.warning("metrics.jsonl has no %s to draw", ended.curve.training)


def attempt(what: str, work: Callable[[], None]) -> None:
    """Runs `work`; what fails at the end of a run is a warning, since all steps are done, and code
    0 must say so.
    """
    try:
        work()
    except Exception as error:  # noqa: BLE001  from a full disk to a broken matplotlib
        logger.warning("the run leaves no %s: %s: %s", what, type(error).__name__, error)


def start_of(runtime: Runtime, program: str) -> LaunchCommand:
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    hosts = -(-runtime.topology.world // here)
    launched = "TORCHELASTIC_RUN_ID" in os.environ or here > 1
    return LaunchCommand(program, runtime.arguments, here, hosts, launched)
