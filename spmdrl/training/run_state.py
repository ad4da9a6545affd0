"""Saves the state of a run of reinforcement learning in a checkpoint, and restores it from one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from spmdrl.algo.advantages import reward_keys_of
from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.writer import RankState, Saver, check_metric
from spmdrl.cli.arguments import as_source
from spmdrl.training.build import RlRun
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.trace import TraceFile
from spmdrl.training.logs.trackers import open_trackers
from spmdrl.training.resume import compare, find_start, opening_lines, take_folder
from spmdrl.training.stop import StopController

logger = logging.getLogger(__name__)


def resume(run: RlRun) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
    config, runtime = run.config, run.runtime
    topology, done = runtime.topology, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        seen = [run.prompts.files] if run.prompts.vision is not None else []
        same = compare(config, runtime, start, run.roles.tokenizer, seen)
        run.identity, goes_on = same.identity, True
        if start.folder is not None:
            saved = checkpoint.load(start.folder, run.engines, topology)
            done = saved["step"]
            accepts = "data" in config.checkpoint.accept_changes
            goes_on = run.order.load_state_dict(saved["order"], accepts)
            restore(run, saved, start.folder, goes_on and not same.has_other_data)
    with runtime.phases("resume"):
        aside = take_folder(config, runtime, start, done)
    with runtime.phases("resume"):  # of a folder that nothing is moved out of any more
        trackers = open_trackers(config, runtime.run_dir, done) if run.is_log else []
        log = RunLog(
            runtime.run_dir, run.is_log, config.steps, trackers, done, runtime.phases.alone,
            config.show_metrics,
        )  # fmt: skip
        run.spans.trace = TraceFile(
            runtime.run_dir, topology.rank, topology.host, done, topology.world, aside
        )
    for line in opening_lines(config, start, same, done, goes_on):
        log.line(line)
    return done, log


def restore(run: RlRun, saved: dict[str, Any], folder: Path, same_data: bool) -> None:
    """Restores what the algorithm carries from step to step; a coefficient where it did and does
    adapt. Answers that were begun are gone on with where the prompts are the same.
    """
    roles = run.roles
    algo, sampling = roles.config.algo, roles.sampling
    adaptive = saved.get("adaptive", {})
    if algo.kl_target is not None and adaptive.get("kl_coef") is not None:
        roles.kl_coef = adaptive["kl_coef"]
    if algo.entropy_target is not None and adaptive.get("entropy") is not None:
        roles.entropy_coef, roles.entropy = adaptive["entropy_coef"], adaptive["entropy"]
    if not sampling.here:
        return
    shares = sorted(folder.glob("replay_*.pt"))
    if roles.replay is not None and shares:
        roles.replay.load(
            shares, sampling.rank, sampling.world, num_keys=len(reward_keys_of(algo)),
            per_turn=roles.config.rewards.per_turn,
        )  # fmt: skip
    shares = sorted(folder.glob("leftover_*.pt"))
    if shares and not same_data:
        logger.warning("the data is not what it was: what %s had begun is not asked again", folder)
    elif roles.leftover is not None and shares:
        roles.leftover.load(
            shares, run.prompts.by_id, roles.tokenizer, sampling.rank, sampling.world
        )
    elif shares and sampling.rank == 0:
        logger.warning("rollout.oversample is off: what %s had begun is not asked again", folder)


def build_saver(run: RlRun, log: RunLog) -> Saver | None:
    config = run.config
    if config.checkpoint.every_steps <= 0:
        return None

    def say(step: int, folder: Path) -> None:
        log.line(f"step {step}/{config.steps} | saved {folder}")

    root, phases = run.runtime.run_dir / "checkpoints", run.runtime.phases
    trained = {t.name: t.topology for t in run.roles.trainers if t.name != "ref"}
    return Saver(root, config.checkpoint, phases, trained, say)


def save(
    run: RlRun, saver: Saver, step: int, metrics: dict[str, float], ending: StopController
) -> None:  # fmt: skip
    roles = run.roles
    with roles.phases("checkpoint"):
        if run.is_log and not ending.stops:
            check_metric(run.config.checkpoint, metrics)
    facts = {
        "engines": sorted(trainer.name for trainer in roles.trainers if trainer.name != "ref"),
        "order": run.order.state_dict(),
        "config": as_source(run.config),
        "identity": run.identity,
        "metrics": metrics,
        "adaptive": {
            "kl_coef": roles.kl_coef if run.config.algo.kl_target else None,
            "entropy_coef": roles.entropy_coef if roles.entropy is not None else None,
            "entropy": roles.entropy,
        },
    }
    writer = roles.actor.topology.ranks[0]
    parts = [*roles.actor.model.pretrained, roles.tokenizer] if run.is_log else []
    own: dict[str, RankState] = {}
    if roles.sampling.here:
        if roles.replay is not None:
            own["replay"] = roles.replay
        if roles.leftover is not None:
            own["leftover"] = roles.leftover
    saver.save(step, run.engines, facts, parts, own, writer)
