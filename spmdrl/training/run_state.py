"""Saves the state of a run in a checkpoint, and restores it from one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.disk_space import check_room_for_checkpoint, check_shared
from spmdrl.checkpoint.writer import RankState, Saver, check_metric
from spmdrl.cli.arguments import as_source
from spmdrl.cli.hub_names import name_of
from spmdrl.config import RunConfig
from spmdrl.data.prompt_order import PromptOrder
from spmdrl.data.prompt_sampler import PromptSampler
from spmdrl.data.table_files import Files
from spmdrl.distributed.env import has_several_hosts
from spmdrl.distributed.topology import Topology
from spmdrl.engines.base import TrainEngine
from spmdrl.training.elastic import (
    SizeChange,
    check_memory_room,
    in_memory_every,
    is_first_here,
    memory_place,
)
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.trace import SpanLog, TraceFile
from spmdrl.training.logs.trackers import open_trackers
from spmdrl.training.resume import compare, find_start, opening_lines, take_folder
from spmdrl.training.runtime import Runtime
from spmdrl.training.savers import Savers


@dataclass(kw_only=True)
class RunState:
    """Holds what a run carries from step to step, and what tells whether it is the same run."""

    config: RunConfig
    runtime: Runtime
    trained: Mapping[str, Topology]  # ranks of every model that is trained; the same on every rank
    engines: Mapping[str, TrainEngine]  # those of them that this rank has
    order: PromptOrder | PromptSampler  # of the data
    tokenizer: Any
    files: Sequence[Files]  # data sets whose rows name images
    log_rank: int  # knows all metrics: it logs and writes what is the same on every rank
    pretrained: Sequence[Any]  # on that rank: config, tokenizer, ..; they lie beside the weights
    updated: Callable[[dict[str, float]], bool] = lambda metrics: True  # in the step of these
    # what else is saved by a kind of training, JSON-able
    algorithm_state: Callable[[], dict[str, Any]] = dict
    # what each rank keeps for itself, by the name of its file
    of_rank: Mapping[str, RankState] = field(default_factory=dict)
    # takes `algorithm_state` and `of_rank` back: what was saved, its folder, whether the data is
    # the same
    restore: Callable[[dict[str, Any], Path, bool], None] = lambda saved, folder, same_data: None
    identity: dict[str, Any] | None = None  # see run_identity.py; for checkpoints
    hosts: tuple[str, ...] = ()  # of the job, by name
    change: SizeChange | None = None  # of the job's hosts or ranks, before this start

    @property
    def is_log(self) -> bool:
        return self.runtime.topology.rank == self.log_rank


def resume(state: RunState, spans: SpanLog) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
    config, runtime = state.config, state.runtime
    topology, done = runtime.topology, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        same = compare(config, runtime, start, state.tokenizer, state.files)
        state.identity, state.change, goes_on = same.identity, start.change, True
        if start.folder is not None:
            saved = checkpoint.load(start.folder, state.engines, topology)
            done = saved["step"]
            accepts = "data" in config.checkpoint.accept_changes
            goes_on = state.order.load_state_dict(saved["order"], accepts)
            state.restore(saved, start.folder, goes_on and not same.has_other_data)
    with runtime.phases("resume"):
        aside = take_folder(config, runtime, start, done)
    with runtime.phases("resume"):  # of a folder that nothing is moved out of any more
        trackers = open_trackers(config, runtime.run_dir, done) if state.is_log else []
        log = RunLog(
            runtime.run_dir, state.is_log, config.steps, trackers, done, runtime.phases.alone,
            config.show_metrics, config.log_lines,
        )  # fmt: skip
        spans.trace = TraceFile(
            runtime.run_dir, topology.rank, topology.host, done, topology.world, aside
        )
    for line in opening_lines(config, start, same, done, goes_on):
        log.line(line)
    return done, log


def tell_change(state: RunState, log: RunLog) -> None:
    """Says what a change of the job's hosts has cost, now that the next step can begin."""
    if state.change is not None:
        log.line(state.change.line())


def check_folders(config: RunConfig, runtime: Runtime, least_bytes: Callable[[], int]) -> None:
    """Raises ConfigError where checkpoints have no room, or hosts would write them into different
    folders. least_bytes: what one takes at least. Collective.
    """
    if config.checkpoint.every_steps > 0:
        if has_several_hosts():
            check_shared(runtime.run_dir, runtime.topology, is_first_here())
        if runtime.is_main:
            check_room_for_checkpoint(runtime.run_dir, least_bytes())
    if in_memory_every(config, runtime) and is_first_here():
        check_memory_room(config, runtime, least_bytes())


def build_savers(state: RunState, log: RunLog) -> Savers:
    """Collective."""
    config, runtime = state.config, state.runtime
    every, in_memory = config.checkpoint.every_steps, in_memory_every(config, runtime)
    disk = memory = None

    def say(step: int, folder: Path) -> None:
        log.line(f"step {step}/{config.steps} | saved {folder}")

    roles = dict(state.trained)
    if every > 0:
        root = runtime.run_dir / "checkpoints"
        disk = Saver(root, config.checkpoint, runtime.phases, roles, say)
    if in_memory > 0:
        place = memory_place(runtime)
        state.hosts = place.hosts.names
        memory = Saver(
            place.root, config.checkpoint, runtime.phases, roles, lambda step, folder: None, place
        )
        place.connect(memory.groups[runtime.topology.ranks])
    return Savers(disk, every, memory, in_memory)


def started_from(model: str) -> str:
    """Returns the model that a run starts from as it is found from anywhere: a hub's name with its
    commit, else a whole path. model: a folder, which may lie in a hub's cache.
    """
    return name_of(model) or str(Path(model).resolve())


def save(
    state: RunState, saver: Saver, step: int, metrics: dict[str, float], stops: bool
) -> None:  # fmt: skip
    """Begins the checkpoint of a step. stops: the run ends here, by a signal. Collective."""
    with state.runtime.phases("checkpoint"):
        if state.is_log and not stops and state.updated(metrics):
            check_metric(state.config.checkpoint, metrics)
    run_info = {
        "engines": sorted(state.trained),
        "model": started_from(state.config.actor.model or state.config.model),
        "order": state.order.state_dict(),
        "config": as_source(state.config),
        "identity": state.identity,
        "metrics": metrics,
        "hosts": list(state.hosts),
        **state.algorithm_state(),
    }
    saver.save(
        step, state.engines, run_info, list(state.pretrained), dict(state.of_rank), state.log_rank
    )
