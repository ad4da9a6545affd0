"""The loop of programs that learn from rows as they stand: fine-tuning and reward models.

Steps over shuffled rows, evaluations on held-out ones, checkpoints, and the model at the end. A
Task says what tells one program from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.checkpoint import format as checkpoint
from spmdrl.checkpoint.disk_space import check_room_for_checkpoint
from spmdrl.checkpoint.writer import Saver, check_metric
from spmdrl.cli.arguments import as_source, shown_config
from spmdrl.config import SftDataConfig, SupervisedConfig, require
from spmdrl.data.images import ImageProcessor
from spmdrl.data.packing import partition, sequence_work
from spmdrl.data.prompts import PromptOrder, left_out_lines
from spmdrl.data.supervised_rows import Rows
from spmdrl.distributed.collectives import sum_over_ranks
from spmdrl.distributed.process import Heap, keep_what_stands
from spmdrl.distributed.progress import PROGRESS, model_text
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.base import LossFn, TrainEngine
from spmdrl.engines.build import build_engine
from spmdrl.engines.fsdp.engine import FsdpEngine
from spmdrl.engines.fsdp.lora import save_adapter
from spmdrl.engines.hf_export import write_weights
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer, vocab_size_of
from spmdrl.training.checks.describe import describe_supervised, least_checkpoint_bytes
from spmdrl.training.logs.curves import Curve
from spmdrl.training.logs.learning_signs import signs_of_supervised
from spmdrl.training.logs.metrics import RunLog, memory_of_process
from spmdrl.training.logs.profiler import Profiler
from spmdrl.training.logs.report import Report
from spmdrl.training.logs.step_line import of_rows
from spmdrl.training.logs.trace import SpanLog, TraceFile, phase_metrics
from spmdrl.training.logs.trackers import open_trackers
from spmdrl.training.resume import compare, find_start, opening_lines, take_folder
from spmdrl.training.roles import Trainer, update
from spmdrl.training.runtime import Runtime
from spmdrl.training.stop import StopController
from spmdrl.types import Batch

BUCKET_BYTES = 512 << 20  # gathered at once


@dataclass(frozen=True)
class Task:
    """A task tells what is learnt, and by which loss. Losses and measures are means over the
    unmasked tokens of all ranks.
    """

    name: str  # of the metrics: <name>/loss
    kind: str  # of engine: see build_engine
    load: Callable[..., Rows]  # what load_data gives it; collective
    loss_fn: LossFn
    # of held-out rows: sums over this rank's unmasked tokens, float64; the same names on all ranks
    measure: Callable[[TrainEngine, Batch], dict[str, Tensor]]
    summary: Callable[[dict[str, float]], dict[str, float]]  # means -> what is logged as eval/...
    shown: tuple[str, ...]  # metrics in the line of a step
    curve: Curve  # what is to improve
    row_sequences: int  # of at most config.data.max_tokens, in a row
    # what the model's config.json is to say of how it was trained, if it is true
    notes: Mapping[str, bool] = field(default_factory=dict)


@dataclass
class SupervisedRun:
    """A run of supervised learning: all that its loop works with."""

    task: Task
    config: SupervisedConfig
    runtime: Runtime
    actor: Trainer  # on all ranks
    rows: Rows
    held_out: Rows | None
    order: PromptOrder
    tokenizer: Any
    spans: SpanLog
    identity: dict[str, Any] | None = None  # see spmdrl/training/run_identity.py; for checkpoints


def train(task: Task, config: SupervisedConfig, runtime: Runtime) -> None:
    """Steps over shuffled batches; the loss is a mean over the batch's unmasked tokens."""
    profiled = Profiler(config, runtime)
    with runtime.phases("check folders"):
        if runtime.is_main and config.checkpoint.every_steps > 0:
            least = least_checkpoint_bytes({"actor": config.actor}, config.model, task.kind)
            check_room_for_checkpoint(runtime.run_dir, least)
    run = build(task, config, runtime)
    steps = config.steps
    done, log = resume(run)
    saver = build_saver(run, log)
    ending = StopController(config, runtime, saver)
    signs = signs_of_supervised(config, task.name)
    report = Report(config, runtime, log, f"spmdrl.{task.name}", task.curve, signs)
    keep_what_stands()
    heap = Heap()
    PROGRESS.now("")
    if run.held_out and done == 0:
        metrics = evaluate(run, run.held_out, 0, log)
        log.write(0, metrics)
        report.after_step(0, metrics)
    run.spans.report(done)  # of what comes before the first step
    step = done
    for step in range(done + 1, steps + 1):
        with profiled(step), PROGRESS.step(step, steps):
            metrics = one_step(run, step)
        heap.after_step()
        if step % max(steps // 20, 1) == 0 or step == steps:
            log.step_line(step, metrics, of_rows(metrics, task.shown))
        ending.vote(step)
        due = step == steps or (config.eval_every > 0 and step % config.eval_every == 0)
        if run.held_out and due and not ending.stops:
            metrics |= evaluate(run, run.held_out, step, log)
        if saver:
            metrics |= saver.take_metrics()
            if ending.failed:
                saver.wait()  # raises
        log.write(step, metrics)
        report.after_step(step, metrics)
        if saver and ending.saves:
            log.sync()
            save(run, saver, step, metrics, ending)
        run.spans.note(step)
        if ending.stops:
            log.line(f"spmdrl: {ending.stop(step)}")
            break
    else:
        finish(run, saver, log)
    ending.close()
    run.spans.note(step)
    log.close()
    report.at_end(step, ending.stops)


def build(task: Task, config: SupervisedConfig, runtime: Runtime) -> SupervisedRun:
    """Collective."""
    phases, topology = runtime.phases, runtime.topology
    ranks = Topology.build(topology.device, **train_degrees(config.actor))
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        rows, held_out, order = load_data(task, config, tokenizer, topology)
    with phases("build actor"):
        PROGRESS.detail(model_text(config.model))
        engine = build_engine(task.kind, config.model, config.actor, ranks)
    actor = Trainer("actor", ranks, engine)
    if task.kind == "reward":
        name_padding(actor.model.pretrained[0], tokenizer)
    for name, value in task.notes.items():
        note(actor.model.pretrained[0], name, value)
    return SupervisedRun(
        task, config, runtime, actor, rows, held_out, order, tokenizer, SpanLog(runtime.phases)
    )


def name_padding(hf: Any, tokenizer: Any) -> None:
    """Sets a classifier's pad_token_id where its config lacks it, which transformers asks for in
    batches.
    """
    text = hf.get_text_config()
    if text.pad_token_id is None:
        text.pad_token_id = tokenizer.pad_token_id


def note(hf: Any, name: str, value: bool) -> None:
    """Writes it into a config, or takes out what the model said before."""
    if value:
        setattr(hf, name, value)
    elif hasattr(hf, name):
        delattr(hf, name)


def load_data(
    task: Task, config: SupervisedConfig, tokenizer: Any, topology: Topology
) -> tuple[Rows, Rows | None, PromptOrder]:
    """The rows to learn, those to evaluate on, and the order of the former. Collective."""
    data, hf = config.data, load_hf_config(config.model)
    own: dict[str, Any] = {}
    if isinstance(data, SftDataConfig):
        own["vision"] = ImageProcessor.load(config.model, hf, data)
    load = partial(
        task.load, tokenizer=tokenizer, config=data, topology=topology,
        vocab_size=vocab_size_of(config.model), **own,
    )  # fmt: skip
    rows = load(data.train)
    held_out = None
    if data.eval is not None:
        held_out = load(data.eval)
    require(
        data.batch_size <= len(rows),
        f"data.batch_size={data.batch_size} is above the {len(rows)} rows that can be learnt, and "
        "a step takes none twice",
    )
    return rows, held_out, PromptOrder(len(rows), data.batch_size, config.seed, data.shuffle)


def resume(run: SupervisedRun) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the logs."""
    config, runtime, topology, done = run.config, run.runtime, run.runtime.topology, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        seen = [run.rows.files] if run.rows.sight is not None else []
        same = compare(config, runtime, start, run.tokenizer, seen)
        run.identity, goes_on = same.identity, True
        if start.folder is not None:
            saved = checkpoint.load(start.folder, {"actor": run.actor.model}, runtime.topology)
            done = saved["step"]
            accepts = "data" in config.checkpoint.accept_changes
            goes_on = run.order.load_state_dict(saved["order"], accepts)
    with runtime.phases("resume"):
        aside = take_folder(config, runtime, start, done)
        trackers = open_trackers(config, runtime.run_dir, done) if runtime.is_main else []
        log = RunLog(
            runtime.run_dir, runtime.is_main, config.steps, trackers, done, runtime.phases.alone,
            config.show_metrics,
        )  # fmt: skip
        run.spans.trace = TraceFile(
            runtime.run_dir, topology.rank, topology.host, done, topology.world, aside
        )
    for line in opening_lines(config, start, same, done, goes_on):
        log.line(line)
    return done, log


def build_saver(run: SupervisedRun, log: RunLog) -> Saver | None:
    config = run.config
    if config.checkpoint.every_steps <= 0:
        return None

    def say(step: int, folder: Path) -> None:
        log.line(f"step {step}/{config.steps} | saved {folder}")

    root = run.runtime.run_dir / "checkpoints"
    return Saver(root, config.checkpoint, run.runtime.phases, {"actor": run.actor.topology}, say)


def save(
    run: SupervisedRun, saver: Saver, step: int, metrics: dict[str, float], ending: StopController
) -> None:  # fmt: skip
    with run.runtime.phases("checkpoint"):
        updated = f"{run.task.name}/loss" in metrics  # not passed over
        if run.runtime.is_main and not ending.stops and updated:
            check_metric(run.config.checkpoint, metrics)
    facts = {
        "engines": ["actor"], "order": run.order.state_dict(), "config": as_source(run.config),
        "identity": run.identity, "metrics": metrics,
    }  # fmt: skip
    actor = run.actor.model
    saver.save(step, {"actor": actor}, facts, [*actor.pretrained, run.tokenizer])


def one_step(run: SupervisedRun, step: int) -> dict[str, float]:
    task, phases, nan_updates = run.task, run.runtime.phases, run.config.nan_updates
    started_at = time.perf_counter()
    with phases("data"):
        indices = run.order.next_step()
        batch, _ = weighted_batch(run.rows, indices, run.actor)
    with phases("update"):
        updated = update(run.actor, batch, task.loss_fn, 1.0, nan_updates)
    metrics = {f"{task.name}/{name}": value for name, value in updated.items()}
    if nan_updates:
        metrics[f"{task.name}/skipped_updates"] = float(not updated)
    num_tokens = float(run.rows.measured.num_tokens[indices].sum())
    return metrics | timing(run, step, num_tokens, started_at)


def timing(run: SupervisedRun, step: int, num_tokens: float, started_at: float) -> dict[str, float]:
    """Returns seconds by phase over the ranks, the idle share, and the most memory of a rank."""
    topology = run.runtime.topology
    everyone: list[Any] = [None] * topology.world
    mine = run.spans.report(step), memory_of_process()
    dist.all_gather_object(everyone, mine, group=topology.control)
    step_s = time.perf_counter() - started_at
    metrics = phase_metrics([spans for spans, _ in everyone])
    for what in mine[1]:
        metrics[f"memory/{what}"] = max(memory[what] for _, memory in everyone)
    return metrics | {"time/step_s": step_s, "throughput/tokens_per_s": num_tokens / step_s}


def evaluate(run: SupervisedRun, rows: Rows, step: int, log: RunLog) -> dict[str, float]:
    """Means over all unmasked tokens of the rows, whatever ranks have them. Collective."""
    config, phases, topology = run.config, run.runtime.phases, run.runtime.topology
    sums: dict[str, float] = {}  # of this rank
    num_tokens = 0.0  # of all
    with phases("evaluate"):
        for first in range(0, len(rows), config.data.batch_size):
            chosen = range(first, min(first + config.data.batch_size, len(rows)))
            batch, count = weighted_batch(rows, list(chosen), run.actor)
            for name, total in run.task.measure(run.actor.model, batch).items():
                sums[name] = sums.get(name, 0.0) + float(total)
            num_tokens += count
            phases.still_going()
            PROGRESS.count(chosen.stop, len(rows), "rows")
        means = {name: sum_over_ranks(sums[name], topology) / num_tokens for name in sums}
    found = run.task.summary(means)
    log.held_out_line(step, of_rows(found, tuple(found)), f"{len(rows)} rows")
    return {f"eval/{name}": value for name, value in found.items()}


def finish(run: SupervisedRun, saver: Saver | None, log: RunLog) -> None:
    """Writes the model, and its average where there is one."""
    config, actor = run.config, run.actor.model
    if saver:
        saver.wait()
    with run.runtime.phases("save"):
        # gathered as they were trained, and rounded once, when they are written
        weights = actor.named_weights(torch.float32, BUCKET_BYTES)
        export(weights, run, Path(config.out))
        if config.actor.ema:
            assert isinstance(actor, FsdpEngine)  # checks/common.py refuses others
            weights = actor.named_average(torch.float32, BUCKET_BYTES)
            export(weights, run, Path(config.out, "ema"))
        if config.actor.lora is not None:
            save_adapter(actor, Path(config.out, "adapter"))
    log.line(f"wrote {config.out}" + (", its average to ema/ in it" if config.actor.ema else ""))


def share_of(rows: Rows, indices: list[int], actor: Trainer) -> list[int]:
    """Returns the rows that this rank is given; all ranks that are given any have the same work."""
    rank = actor.topology.rank
    if rank not in actor.ranks:
        return []
    work = sequence_work(torch.from_numpy(rows.measured.num_tokens[indices]))
    mine = partition(work.tolist(), len(actor.ranks))[actor.ranks.index(rank)]
    return [indices[i] for i in mine]


def weighted_batch(rows: Rows, indices: list[int], actor: Trainer) -> tuple[Batch, float]:
    """This rank's share of the rows, weighted by one over the unmasked tokens of all ranks; their
    number. From now on the model looks at their images. Collective."""
    if isinstance(actor.model, FsdpEngine):  # others are refused where there are images
        actor.model.sight = rows.sight
    batch = rows.batch(share_of(rows, indices, actor))
    num_tokens = sum_over_ranks(float(batch.loss_mask.sum()), actor.topology)
    batch.loss_weights = batch.loss_mask / max(num_tokens, 1.0)
    return batch, num_tokens


def export(gathered: Iterator[tuple[str, Tensor]], run: SupervisedRun, out: Path) -> None:
    """Rank 0 keeps the tensors as they are gathered and writes them. Collective."""
    is_first = run.runtime.is_main
    kept = [(name, t.cpu().clone()) for name, t in gathered if is_first]
    if is_first:
        out.mkdir(parents=True, exist_ok=True)
        config, *others = run.actor.model.pretrained
        for part in (config, *others, run.tokenizer):
            part.save_pretrained(out)
        write_weights(kept, DTYPES.get(run.config.out_dtype or "", config.dtype), out)


def show_plan(
    task: Task, config: SupervisedConfig, runtime: Runtime, ranks: int, show_config: bool
) -> None:
    """--dry-run: the config, arithmetic, and one example per data set."""
    tokenizer = load_tokenizer(config.model)
    rows, held_out, _ = load_data(task, config, tokenizer, runtime.topology)
    lines = shown("train", rows) + (shown("eval", held_out) if held_out else [])
    if runtime.is_main:
        plan = describe_supervised(
            config, ranks, len(rows), task.kind, task.row_sequences, rows.measured.num_tokens
        )
        PROGRESS.line("\n".join([shown_config(config, show_config), *lines, plan]))


def shown(name: str, rows: Rows) -> list[str]:
    """A data set's counts and its first row."""
    found = rows.measured
    return [
        f"{name} data: {len(rows)} rows of {found.num_tokens.sum():,} tokens, the longest "
        f"{found.num_tokens.max()}; {found.num_overlong} over max_tokens, {found.num_bad} bad rows "
        f"left out, {found.num_escaped} with control tokens in their text",
        *left_out_lines(found.left_out),
        *rows.shown(),
    ]
