"""The loop around the step: build, resume, then steps with evaluations and checkpoints between."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from spmdrl.checkpoint.disk_space import check_room_for_checkpoint, writing
from spmdrl.config import PpoConfig
from spmdrl.distributed.placement import training_roles
from spmdrl.distributed.process import Heap, keep_what_stands
from spmdrl.distributed.progress import PROGRESS
from spmdrl.rollout.multi_turn.conversation import has_replies
from spmdrl.training.build import RlRun, build, close
from spmdrl.training.checks.describe import least_checkpoint_bytes
from spmdrl.training.collect import PromptSource, RolloutResult, collect, evaluate
from spmdrl.training.logs.curves import REWARD
from spmdrl.training.logs.learning_signs import signs_of_rl
from spmdrl.training.logs.metrics import RunLog, write_samples
from spmdrl.training.logs.profiler import Profiler
from spmdrl.training.logs.report import Report
from spmdrl.training.logs.step_line import of_evaluation, of_sampling
from spmdrl.training.measurements import reports, timing, utilisation
from spmdrl.training.overlap import can_overlap, collect_overlapping
from spmdrl.training.push_weights import push_weights, take_weights
from spmdrl.training.run_state import build_saver, resume, save
from spmdrl.training.runtime import Runtime
from spmdrl.training.step import train_step
from spmdrl.training.stop import StopController
from spmdrl.types import Sample


def train(config: PpoConfig, runtime: Runtime) -> None:
    """Every rank runs it from the first line to the last."""
    profiled = Profiler(config, runtime)
    with runtime.phases("check folders"):
        trained = {name: role for name, role in training_roles(config).items() if name != "ref"}
        if runtime.is_main and config.checkpoint.every_steps > 0:
            least = least_checkpoint_bytes(trained, config.model)
            check_room_for_checkpoint(runtime.run_dir, least)
    run = build(config, runtime)
    roles, steps = run.roles, config.steps
    done, log = resume(run)
    roles.policy_version = done - 1  # of what the engine was built with: not to be sampled from
    push_weights(roles, version=done)
    take_weights(roles, done)
    keep_what_stands()
    heap = Heap()
    write_transfers(run)
    saver = build_saver(run, log)
    ending = StopController(config, runtime, saver, lag=config.async_steps)
    report = Report(config, runtime, log, "spmdrl.ppo", REWARD, signs_of_rl(config))
    PROGRESS.now("")
    if run.held_out and done == 0:
        metrics = held_out_metrics(run, 0, log)
        log.write(0, metrics)
        report.after_step(0, metrics)
    run.spans.report(done)  # of what comes before the first step
    met = step = done  # met: the last step after which all ranks did
    for step in range(done + 1, steps + 1):
        with profiled(step), PROGRESS.step(step, steps):
            metrics = run_step(run, step)
        heap.after_step()
        if metrics:
            log.step_line(step, metrics, of_sampling(metrics, with_tools=bool(config.tools)))
        if roles.sampling.here:
            # a rank that samples ahead stays within async_steps of what the trainers have learnt;
            # before the vote, for which trainers come when their weights are taken
            take_weights(roles, max(step - config.async_steps, met))
        ending.vote(step)
        evaluating = bool(run.held_out) and not ending.stops
        evaluating &= step == steps or is_due(step, config.eval_every)
        if evaluating or ending.saves or ending.failed:
            take_weights(roles, step)
            met = step
        if saver and (evaluating or ending.failed):
            saver.wait()
        if evaluating:
            metrics |= held_out_metrics(run, step, log)
        if saver:
            metrics |= saver.take_metrics()
        log.write(step, metrics)
        report.after_step(step, metrics)
        if saver and ending.saves:
            log.sync()
            save(run, saver, step, metrics, ending)
        run.spans.note(step)
        if ending.stops:
            log.line(f"spmdrl: {ending.stop(step)}")
            break
    if saver:
        saver.wait()
    take_weights(roles, step)
    ending.close()
    roles.post.wait_until_delivered()
    run.spans.note(step)
    log.close()
    PROGRESS.now("ending the run")
    close(roles)
    PROGRESS.now("")
    report.at_end(step, ending.stops)


def run_step(run: RlRun, step: int, push: bool = True) -> dict[str, float]:
    """Runs one training step, and measures it.

    push: see train_step. Returns the step's metrics; {} on ranks that sample only.
    """
    roles, started_at = run.roles, time.perf_counter()
    ahead = run.config.async_steps > 0
    batches = train_step(roles, partial(generate_and_score, run), step, push)
    # ranks that sample ahead have reported with their answers: they are elsewhere in time
    everyone = [] if ahead else reports(run, step, roles.topology)
    if batches is None:
        return {}
    run.order.load_state_dict(batches.step_info["order"])
    if ahead:
        everyone = batches.step_info["reports"] + reports(run, step, roles.training)
    metrics = batches.metrics
    metrics |= timing(metrics, everyone, time.perf_counter() - started_at)
    return metrics | utilisation(run, batches, metrics)


def generate_and_score(run: RlRun, step: int) -> RolloutResult:
    """Makes this rank's answers of a step, with rewards, and writes some of them to samples/.

    On the ranks that sample or score. step_info["order"] says where the data stood for this step.
    """
    roles, source = run.roles, PromptSource(run.take, run.prompts.by_id)
    if can_overlap(roles):
        rollout, run.asked = collect_overlapping(
            roles, source, step, run.asked, run.order.state_dict, asks_next=not ends_here(run, step)
        )
    else:
        rollout = collect(roles, source, step)
        rollout.step_info = {"order": run.order.state_dict()}
    run.samples = rollout.asked
    show_samples(run, f"step_{step}", rollout.asked)
    if run.config.async_steps > 0:
        rollout.step_info["reports"] = reports(run, step, roles.sampling)
    return rollout


def ends_here(run: RlRun, step: int) -> bool:
    """Whether all ranks meet after this step, so that none may be ahead of it: at the end, and
    where the run evaluates or saves."""
    config = run.config
    evaluates = bool(run.held_out) and is_due(step, config.eval_every)
    return step == config.steps or evaluates or is_due(step, config.checkpoint.every_steps)


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def write_transfers(run: RlRun) -> None:
    """run_dir/weights.txt: which ranks send how much to which when the engine gets new weights."""
    if run.is_log:
        path = Path(run.runtime.run_dir, "weights.txt")
        with writing(path):
            path.write_text("\n".join([*run.roles.weights.describe(), ""]))


def held_out_metrics(run: RlRun, step: int, log: RunLog) -> dict[str, float]:
    roles = run.roles
    told: list[Any] = [None]
    if roles.sampling.here:
        show = partial(show_samples, run, f"eval_{step}")
        told[0] = evaluate(roles, run.held_out, step, show)
    # the rank that logs may not sample
    with roles.phases("evaluate" if roles.sampling.here else "wait evaluation"):
        dist.broadcast_object_list(told, src=roles.sampling.ranks[0], group=roles.topology.control)
    metrics = told[0]
    log.held_out_line(step, of_evaluation(metrics), f"{len(run.held_out)} prompts")
    return metrics


def show_samples(run: RlRun, name: str, samples: list[Sample]) -> None:
    if run.config.log_samples == 0:
        return
    path = Path(run.runtime.run_dir, "samples", f"{name}.jsonl")
    with run.roles.phases("log samples", run.roles.sampling):
        write_samples(
            path, samples, run.config.log_samples, run.roles.sampling, has_replies(run.config)
        )
