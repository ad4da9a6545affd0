"""The loop of every training: build, resume, then steps with evaluations and checkpoints between.

What tells one kind of training from another is a TrainingRun: `rl.py` makes that of reinforcement
learning, `supervised.py` that of fine-tuning and of reward models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spmdrl.config import RunConfig
from spmdrl.distributed.process import Heap, keep_what_stands
from spmdrl.distributed.progress import PROGRESS
from spmdrl.training.logs.curves import Curve
from spmdrl.training.logs.learning_signs import LearningSigns
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.profiler import Profiler
from spmdrl.training.logs.report import Report
from spmdrl.training.logs.step_line import Shown
from spmdrl.training.logs.trace import SpanLog
from spmdrl.training.run_state import (
    RunState,
    build_savers,
    check_folders,
    resume,
    save,
    tell_change,
)
from spmdrl.training.runtime import Runtime
from spmdrl.training.stop import StopController

Metrics = dict[str, float]


def nothing(*_: Any) -> None:
    """Stands where a kind of training has nothing to do in a part of the loop."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One run, as the loop sees it. Every function is called on every rank."""

    state: RunState  # what checkpoints hold
    spans: SpanLog
    program: str  # its module, "spmdrl.ppo"
    curve: Curve  # the number that training is to improve
    signs: LearningSigns  # warn where nothing can be learnt
    line_every: int  # steps; the last has a line too
    # step -> metrics, {} on ranks that do not know them; the log's rank does
    step: Callable[[int], Metrics]
    shown: Callable[[Metrics], Shown]  # what the line of a step shows
    evaluate: Callable[[int, RunLog], Metrics] | None  # step; None: there is no held-out data
    saves_first: bool = False  # an evaluation begins when the last checkpoint has been written
    begin: Callable[[int], None] = nothing  # before the first step, when so many are done
    # ranks may be `lag` steps ahead of others; catch_up(step) waits until this one has the weights
    # of that step
    lag: int = 0
    catch_up: Callable[[int], None] = nothing
    finish: Callable[[RunLog], None] = nothing  # after the last step, unless a signal stopped it
    close: Callable[[], None] = nothing  # at the very end


def train(
    config: RunConfig,
    runtime: Runtime,
    build: Callable[[], TrainingRun],
    least_bytes: Callable[[], int],
) -> None:
    """Builds the run, resumes it and runs its steps to the end. Every rank runs every line.

    build: loads data and models; collective. least_bytes: what a checkpoint takes at least.
    """
    profiled = Profiler(config, runtime)
    with runtime.phases("check folders"):
        check_folders(config, runtime, least_bytes)
    run = build()
    config = run.state.config  # with the number of steps
    profiled.plan(config)
    done, log = resume(run.state, run.spans)
    run.begin(done)
    tell_change(run.state, log)
    keep_what_stands()  # garbage collection leaves it alone from here on
    heap = Heap()
    savers = build_savers(run.state, log)
    ending = StopController(config, runtime, savers, run.lag)
    report = Report(config, runtime, log, run.program, run.curve, run.signs)
    PROGRESS.now("")
    if run.evaluate and done == 0:
        metrics = run.evaluate(0, log)
        log.write(0, metrics)
        report.after_step(0, metrics)
    run.spans.report(done)  # of what comes before the first step
    step = done
    for step in range(done + 1, config.steps + 1):
        with profiled(step), PROGRESS.step(step, config.steps):
            metrics = run.step(step)
        heap.after_step()
        if log.active and (step % run.line_every == 0 or step == config.steps):
            log.step_line(step, metrics, run.shown(metrics))
        # a rank that samples ahead stays within `lag` steps of what the trainers have learnt;
        # before the vote, for which trainers come when their weights are taken
        run.catch_up(step - run.lag)
        ending.vote(step)
        evaluate = run.evaluate if evaluates(config, step) and not ending.stops else None
        if evaluate or ending.saves or ending.keeps or ending.failed:
            run.catch_up(step)
        if ending.failed or (evaluate and run.saves_first):
            savers.wait()  # raises where a save failed
        if evaluate:
            metrics |= evaluate(step, log)
        metrics |= savers.take_metrics()
        log.write(step, metrics)
        report.after_step(step, metrics)
        for saver in ending.savers_of_step():
            log.sync()
            savers.wait(but=saver)  # they write from the engines' one copy; it waits for itself
            save(run.state, saver, step, metrics, ending.stops)
        run.spans.note(step)
        if ending.stops:
            log.line(f"spmdrl: {ending.stop(step)}")
            break
    savers.wait()
    run.catch_up(step)
    ending.leave(step)  # raises where a `break` of yours has ended the loop on some ranks alone
    if not ending.stops:
        run.finish(log)
    ending.close()
    run.spans.note(step)
    log.close()
    run.close()
    if not ending.regroups:  # the run goes on
        report.at_end(step, ending.stops)


def evaluates(config: RunConfig, step: int) -> bool:
    """Whether held-out data, if there is any, is evaluated after this step."""
    return step == config.steps or is_due(step, config.eval_every)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
