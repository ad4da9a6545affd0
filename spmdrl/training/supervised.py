"""Programs that learn from rows as they stand, in the loop (`loop.py`): fine-tuning, preference
optimisation, reward models.

Steps over shuffled rows, evaluations on held-out ones, and the model at the end. A Task says what
tells one program from another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from spmdrl.checkpoint.disk_space import writing
from spmdrl.cli.arguments import Dry, shown_config
from spmdrl.config import (
    AnswerDataConfig,
    ConfigError,
    DataConfig,
    PreferenceDataConfig,
    SftDataConfig,
    SupervisedConfig,
    require,
)
from spmdrl.config.words import counted
from spmdrl.data.answers import as_sft
from spmdrl.data.images import BatchImages, ImageProcessor
from spmdrl.data.prompt_order import PromptOrder
from spmdrl.data.row_reports import left_out_lines
from spmdrl.data.sft import SftDataset
from spmdrl.data.supervised_rows import Rows
from spmdrl.distributed.collectives import sum_over_ranks
from spmdrl.distributed.placement import training_roles
from spmdrl.distributed.progress import PROGRESS, model_text
from spmdrl.distributed.topology import Topology, train_degrees
from spmdrl.engines.base import LossFn, TrainEngine
from spmdrl.engines.build import build_engine
from spmdrl.engines.hf_export import beside, write_weights
from spmdrl.engines.stored_dtype import DTYPES
from spmdrl.hub.hf_folder import load_hf_config, load_tokenizer
from spmdrl.hub.mtp_layers import MtpTensors, num_mtp_layers
from spmdrl.training import loop
from spmdrl.training.checks.describe import describe_supervised
from spmdrl.training.checks.length import check_steps
from spmdrl.training.checks.memory_fit import supervised_planner
from spmdrl.training.checks.memory_plan import gpu_gib_here, least_checkpoint_bytes
from spmdrl.training.checks.packing import trial_lines
from spmdrl.training.elastic import check_memory_of_sizes
from spmdrl.training.logs.curves import Curve
from spmdrl.training.logs.learning_signs import signs_of_supervised
from spmdrl.training.logs.metrics import RunLog
from spmdrl.training.logs.step_line import of_rows
from spmdrl.training.logs.trace import SpanLog
from spmdrl.training.loop import TrainingRun
from spmdrl.training.measurements import report, timing
from spmdrl.training.roles import Trainer, update
from spmdrl.training.row_share import Share, take_share
from spmdrl.training.run_length import with_length
from spmdrl.training.run_state import RunState
from spmdrl.training.runtime import Runtime
from spmdrl.training.teacher import Teacher, ask_teacher, build_teacher
from spmdrl.types import Batch
from spmdrl.weights.holders import agree_on_shards
from spmdrl.weights.transfer import gathered

BUCKET_BYTES = 512 << 20  # gathered at once


@dataclass(frozen=True)
class Objective:
    """Says what is learnt from a share, or measured in it."""

    loss_fn: LossFn
    # of held-out rows: sums over what this rank has, float64; the same names on all ranks
    measure: Callable[[TrainEngine, Batch, BatchImages | None], dict[str, Tensor]]
    count: float  # the means of an evaluation divide these sums by it: of all ranks


def over_tokens(
    loss_fn: LossFn,
    measure: Callable[[TrainEngine, Batch, BatchImages | None], dict[str, Tensor]],
    share: Share,
) -> Objective:
    """Returns a share's objective for a loss that is the same in all shares. Means are over the
    unmasked tokens of all ranks.
    """
    return Objective(loss_fn, measure, share.num_tokens)


def as_they_are(means: dict[str, float]) -> dict[str, float]:
    return means


@dataclass(frozen=True)
class Task:
    """A task tells what is learnt, and by which loss."""

    name: str  # of the metrics: <name>/loss
    kind: str  # of engine: see build_engine
    load: Callable[..., Rows]  # what load_data gives it; collective
    objective: Callable[[Share], Objective]  # collective
    summary: Callable[[dict[str, float]], dict[str, float]]  # means -> what is logged as eval/...
    shown: tuple[str, ...]  # metrics in the line of a step
    curve: Curve  # what is to improve
    row_sequences: int  # of at most config.data.max_tokens, in a row; 2: they are a pair
    # what the model's config.json is to say of how it was trained, if it is true
    notes: Mapping[str, bool] = field(default_factory=dict)
    # what an update returns -> what is logged as <name>/...
    step_summary: Callable[[dict[str, float]], dict[str, float]] = as_they_are
    # called with what `build` made, before a checkpoint is loaded; collective
    prepare: Callable[[SupervisedRun], None] = loop.nothing


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
    teacher: Teacher | None  # of distillation


def train(task: Task, config: SupervisedConfig, runtime: Runtime) -> None:
    """A whole run. Collective."""
    least_bytes = partial(least_checkpoint_bytes, {"actor": config.actor}, config.model, task.kind)
    loop.train(config, runtime, partial(training_run, task, config, runtime), least_bytes)


def training_run(task: Task, config: SupervisedConfig, runtime: Runtime) -> TrainingRun:
    """Builds the run and says what the loop is to call. Collective."""
    run = build(task, config, runtime)
    return TrainingRun(
        state=state_of(run),
        spans=run.spans,
        program=f"spmdrl.{task.name}",
        curve=task.curve,
        signs=signs_of_supervised(task.name),
        line_every=max(run.config.steps // 20, 1),
        step=partial(one_step, run),
        shown=partial(of_rows, names=task.shown),
        evaluate=partial(evaluate, run, run.held_out) if run.held_out else None,
        finish=partial(finish, run),
    )


def build(task: Task, config: SupervisedConfig, runtime: Runtime) -> SupervisedRun:
    """Collective."""
    phases, topology = runtime.phases, runtime.topology
    ranks = Topology.build(topology.device, **train_degrees(config.actor))
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        rows, held_out, order = load_data(task, config, tokenizer, topology)
        config = with_length(config, len(rows))
        check_steps(config, topology.world)
        measured = rows.measured
        planner = supervised_planner(
            task.kind, measured.num_tokens, gpu_gib_here(), measured.image_tokens
        )
        check_memory_of_sizes(config, topology.world, planner, runtime)
    with phases("build actor"):
        PROGRESS.detail(model_text(config.model))
        in_pairs = task.row_sequences == 2
        engine = build_engine(task.kind, config.model, config.actor, ranks, in_pairs=in_pairs)
    actor = Trainer("actor", ranks, engine, rows.images)
    if task.kind == "reward":
        name_padding(actor.model.pretrained[0], tokenizer)
    for name, value in task.notes.items():
        note(actor.model.pretrained[0], name, value)
    teacher = build_teacher(config, runtime, actor)
    run = SupervisedRun(
        task, config, runtime, actor, rows, held_out, order, tokenizer, SpanLog(runtime.phases),
        teacher,
    )  # fmt: skip
    task.prepare(run)
    return run


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
    if isinstance(data, SftDataConfig | AnswerDataConfig):
        asked = data if isinstance(data, SftDataConfig) else as_sft(data)
        own["vision"] = ImageProcessor.load(config.model, hf, asked)
    elif isinstance(data, PreferenceDataConfig):
        own["vision"] = ImageProcessor.load(config.model, hf, DataConfig(""))
    load = partial(
        task.load, tokenizer=tokenizer, config=data, topology=topology,
        vocab_size=hf.get_text_config().vocab_size, **own,
    )  # fmt: skip
    rows = load(data.train)
    held_out = None
    if data.eval is not None:
        held_out = load(data.eval)
    for each in (rows, held_out):
        if isinstance(each, SftDataset):
            each.route(config.actor.lora, topology, trained=each is rows)
    require(
        data.batch_size <= len(rows),
        f"data.batch_size={data.batch_size} is above the {counted(len(rows), 'row')} that can be "
        "learnt, and "
        "a step takes none twice",
    )
    return rows, held_out, PromptOrder(len(rows), data.batch_size, config.seed, data.shuffle)


def state_of(run: SupervisedRun) -> RunState:
    """Returns the state of the run that a checkpoint holds."""
    actor = run.actor
    return RunState(
        config=run.config,
        runtime=run.runtime,
        trained={"actor": actor.topology},
        engines={"actor": actor.model},
        order=run.order,
        tokenizer=run.tokenizer,
        files=[run.rows.files] if run.rows.images is not None else [],
        log_rank=0,
        pretrained=[*actor.model.pretrained, run.tokenizer],
        updated=lambda metrics: f"{run.task.name}/loss" in metrics,  # else it was passed over
    )


def one_step(run: SupervisedRun, step: int) -> dict[str, float]:
    task, phases, nan_updates = run.task, run.runtime.phases, run.config.nan_updates
    started_at = time.perf_counter()
    with phases("data"):
        indices = run.order.next_step()
        share = take_share(run.rows, indices, run.actor)
    if run.teacher is not None:
        with phases("ref_logprobs"):
            ask_teacher(run.teacher, share)
    with phases("update"):
        loss_fn = task.objective(share).loss_fn
        updated = update(run.actor, share.batch, loss_fn, 1.0, nan_updates)
    found = task.step_summary(updated)
    metrics = {f"{task.name}/{name}": value for name, value in found.items()}
    if nan_updates:
        metrics[f"{task.name}/skipped_updates"] = float(not updated)
    num_tokens = float(run.rows.measured.num_tokens[indices].sum())
    spent = report(run.spans, step, run.runtime.topology, moved_bytes={})
    return metrics | timing(spent, num_tokens, time.perf_counter() - started_at)


def evaluate(run: SupervisedRun, rows: Rows, step: int, log: RunLog) -> dict[str, float]:
    """Means over the rows, or over all of their unmasked tokens, whatever ranks have them.
    Collective.
    """
    config, phases, topology = run.config, run.runtime.phases, run.runtime.topology
    sums: dict[str, float] = {}  # of this rank
    total = 0.0  # of all
    with phases("evaluate"):
        for first in range(0, len(rows), config.data.batch_size):
            chosen = range(first, min(first + config.data.batch_size, len(rows)))
            share = take_share(rows, list(chosen), run.actor)
            if run.teacher is not None:
                ask_teacher(run.teacher, share)
            objective = run.task.objective(share)
            measured = objective.measure(run.actor.model, share.batch, rows.images)
            for name, value in measured.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            total += objective.count
            phases.still_going()
            PROGRESS.count(chosen.stop, len(rows), "rows")
        means = {name: sum_over_ranks(sums[name], topology) / total for name in sums}
    found = run.task.summary(means)
    log.held_out_line(step, of_rows(found, tuple(found)), counted(len(rows), "row"))
    return {f"eval/{name}": value for name, value in found.items()}


def finish(run: SupervisedRun, log: RunLog) -> None:
    """Writes the model, and its average where there is one; of several adapters these alone."""
    config, actor = run.config, run.actor.model
    lora = config.actor.lora
    if lora is not None and lora.by_source:
        with run.runtime.phases("save"):
            actor.save_adapter(Path(config.out, "adapter"))
        log.line(f"wrote {config.out}/adapter: {', '.join(lora.names)}")
        return
    with run.runtime.phases("save"):
        # gathered as they were trained, and rounded once, when they are written
        topology = run.actor.topology
        shards = actor.named_shards()
        weights = gathered(shards, torch.float32, BUCKET_BYTES, topology, to_first=True)
        held = agree_on_shards(shards, topology.control)
        shapes = {weight.name: weight.shape for weight in held}  # also of other pipeline stages
        export(weights, shapes, run, Path(config.out))
        if config.actor.ema:
            weights = actor.named_average(torch.float32, BUCKET_BYTES)
            export(weights, shapes, run, Path(config.out, "ema"))
        if lora is not None:
            actor.save_adapter(Path(config.out, "adapter"))
    log.line(f"wrote {config.out}" + (", its average to ema/ in it" if config.actor.ema else ""))


def export(
    named: Iterator[tuple[str, Tensor]], shapes: Mapping[str, tuple[int, ...]],
    run: SupervisedRun, out: Path,
) -> None:  # fmt: skip
    """Rank 0 writes the tensors as they are gathered. shapes: of all of them. Collective."""
    if not run.runtime.is_main:
        for _ in named:
            pass
        return
    config, *others = run.actor.model.pretrained
    has_mtp = run.task.kind == "policy" and num_mtp_layers(config) > 0
    copies, mtp = beside(shapes, config, lambda: stored_mtp(run) if has_mtp else None)
    dtype = DTYPES.get(run.config.out_dtype or "", config.dtype)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for part in (config, *others, run.tokenizer):
            part.save_pretrained(out)
        write_weights(named, shapes, dtype, out, copies, mtp)


def stored_mtp(run: SupervisedRun) -> MtpTensors | None:
    """Opens the files that have the model's layers for multi-token prediction. Where they cannot be
    opened any more it says so and returns None: what was trained is written without them.
    """
    model = run.config.model
    try:
        return MtpTensors(model, load_hf_config(model))
    except (OSError, SafetensorError, ConfigError) as error:
        PROGRESS.line(
            f"spmdrl: the model is written without its multi-token prediction layers, which stand "
            f"in {model}: {error}. python -m spmdrl.export --base writes a checkpoint with them"
        )
        return None


def show_plan(task: Task, config: SupervisedConfig, runtime: Runtime, dry: Dry) -> None:
    """--dry-run: the config, arithmetic, memory, and one example per data set.

    Raises ConfigError, on every rank, where the GPUs cannot hold the run.
    """
    ranks, gpu_gib = dry.ranks or runtime.topology.world, dry.gpu_gib or gpu_gib_here()
    tokenizer = load_tokenizer(config.model)
    rows, held_out, _ = load_data(task, config, tokenizer, runtime.topology)
    config = with_length(config, len(rows))
    check_steps(config, ranks)
    lines = shown("train", rows) + (shown("eval", held_out) if held_out else [])
    tried = [role for role in training_roles(config).values() if role.engine == "fsdp"]
    lines += trial_lines([role.model or config.model for role in tried])
    if runtime.is_main:
        plan = describe_supervised(
            config, ranks, len(rows), task.kind, task.row_sequences, rows.measured.num_tokens,
            gpu_gib, rows.measured.image_tokens,
        )  # fmt: skip
        PROGRESS.line("\n".join([shown_config(config, dry.show_config), *lines, plan]))
    measured = rows.measured
    planner = supervised_planner(task.kind, measured.num_tokens, gpu_gib, measured.image_tokens)
    check_memory_of_sizes(config, ranks, planner, runtime)


def shown(name: str, rows: Rows) -> list[str]:
    """A data set's counts and its first row."""
    found = rows.measured
    return [
        f"{name} data: {counted(len(rows), 'row')} of {found.num_tokens.sum():,} tokens, the "
        "longest "
        f"{found.num_tokens.max()}; {found.num_overlong} over max_tokens, "
        f"{counted(found.num_bad, 'bad row')} "
        f"left out, {found.num_escaped} with control tokens in their text",
        *left_out_lines(found.left_out),
        *rows.shown(),
    ]
