"""Supervised fine-tuning: torchrun --nproc-per-node 2 -m spmdrl.sft --config cfg.py

Also runs as python -m spmdrl.sft. Options: --dry-run checks everything that needs no engine and
prints the plan; any field of the config is set by its dotted name. Writes the model to config.out
in Hugging Face format; with actor.lora also the adapter, to config.out/adapter. Saves, stops and
resumes as python -m spmdrl.ppo does.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli import as_source, converted, load_config
from spmdrl.config import ConfigError, SftConfig
from spmdrl.exits import exit_config
from spmdrl.help import asks_for_help
from spmdrl.imports import before_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from spmdrl.data import PromptOrder
    from spmdrl.metrics import RunLog
    from spmdrl.program import Runtime
    from spmdrl.roles import Trainer
    from spmdrl.saver import Saver
    from spmdrl.sft_data import SftDataset
    from spmdrl.stopping import Ending
    from spmdrl.topology import Topology
    from spmdrl.trace import SpanLog
    from spmdrl.types import Batch

BUCKET_BYTES = 512 << 20  # gathered at once


def main(config: str = "", dry_run: bool = False, ranks: int = 0, **overrides: Any) -> None:
    """Trains on the responses of a data set.

    Args:
        config: a Python file that defines `config = SftConfig(...)`
        dry_run: check, print the plan and an example of each data set, and stop
        ranks: with --dry-run, plan for so many ranks instead of those that run
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-5
    """
    if asks_for_help(overrides, __doc__, SftConfig):
        return
    try:
        dry_run, ranks = converted(dry_run, bool, "--dry-run"), converted(ranks, int, "--ranks")
        if ranks and not dry_run:
            raise ConfigError(f"--ranks {ranks} is for --dry-run; torchrun says how many run")
        value = load_config(config, SftConfig, overrides)
    except ConfigError as error:
        exit_config(error)
    before_torch()
    from spmdrl.plan import check_sft  # torch comes in here, see spmdrl/ppo.py
    from spmdrl.program import started

    with started(value) as runtime:
        check_sft(value, ranks or runtime.topology.world)
        if dry_run:
            show_plan(value, runtime, ranks or runtime.topology.world)
        else:
            train(value, runtime)


@dataclass
class Run:
    """What the loop works with."""

    config: SftConfig
    runtime: Runtime
    actor: Trainer  # on all ranks
    rows: SftDataset
    held_out: SftDataset | None
    order: PromptOrder
    tokenizer: Any
    spans: SpanLog


def train(config: SftConfig, runtime: Runtime) -> None:
    """Steps over shuffled batches; the loss is the mean over the batch's learnt tokens."""
    from spmdrl.stopping import Ending

    run = build(config, runtime)
    phases, steps = runtime.phases, config.steps
    done, log = resume(run)
    saver = build_saver(run, log)
    ending = Ending(config, runtime, saver)
    phases.on_change = log.phase
    if run.held_out and done == 0:
        log.write(0, evaluate(run, run.held_out, 0, log))
    run.spans.report(done)  # of what comes before the first step
    step = done
    for step in range(done + 1, steps + 1):
        log.begin_step(step)
        metrics = one_step(run, step)
        if step % max(steps // 20, 1) == 0 or step == steps:
            log.step_line(step, metrics, ("sft/loss", "sft/grad_norm"))
        ending.vote(step)
        due = step == steps or (config.eval_every > 0 and step % config.eval_every == 0)
        if run.held_out and due and not ending.stops:
            metrics |= evaluate(run, run.held_out, step, log)
        if saver:
            metrics |= saver.take_metrics()
            if ending.failed:
                saver.wait()  # raises
        log.write(step, metrics)
        if saver and ending.saves:
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


def build(config: SftConfig, runtime: Runtime) -> Run:
    """Collective."""
    from spmdrl.engines import build_engine
    from spmdrl.program import load_tokenizer
    from spmdrl.roles import Trainer
    from spmdrl.topology import Topology, train_degrees
    from spmdrl.trace import SpanLog

    phases, topology = runtime.phases, runtime.topology
    ranks = Topology.build(topology.device, **train_degrees(config.actor))
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        rows, held_out, order = load_data(config, tokenizer, topology)
    with phases("build actor"):
        engine = build_engine("policy", config.model, config.actor, ranks)
    actor = Trainer("actor", ranks, engine)
    return Run(
        config, runtime, actor, rows, held_out, order, tokenizer, SpanLog(runtime.phases)
    )  # fmt: skip


def load_data(
    config: SftConfig, tokenizer: Any, topology: Topology
) -> tuple[SftDataset, SftDataset | None, PromptOrder]:
    """The rows to learn, those to evaluate on, and the order of the former. Collective."""
    from spmdrl.algo.checks import require
    from spmdrl.data import PromptOrder
    from spmdrl.engines.models import vocab_size_of
    from spmdrl.sft_data import SftDataset

    data, size = config.data, vocab_size_of(config.model)
    rows = SftDataset.load(data.train, tokenizer, data, topology, size)
    held_out = None
    if data.eval is not None:
        held_out = SftDataset.load(data.eval, tokenizer, data, topology, size)
    require(
        data.batch_size <= len(rows),
        f"data.batch_size={data.batch_size} is above the {len(rows)} rows that can be learnt, and "
        "a step takes none twice",
    )
    return rows, held_out, PromptOrder(len(rows), data.batch_size, config.seed, data.shuffle)


def resume(run: Run) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the logs."""
    from spmdrl import checkpoint
    from spmdrl.metrics import RunLog
    from spmdrl.resume import find_start, take_folder
    from spmdrl.trace import TraceFile
    from spmdrl.trackers import open_trackers

    config, runtime, done = run.config, run.runtime, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        if start.folder is not None:
            saved = checkpoint.load(start.folder, {"actor": run.actor.model}, runtime.topology)
            done = saved["step"]
            run.order.load_state_dict(saved["order"])
    with runtime.phases("resume"):
        take_folder(config, runtime, start, done)
        trackers = open_trackers(config, runtime.run_dir, done) if runtime.is_main else []
    log = RunLog(runtime.run_dir, runtime.is_main, config.steps, trackers, done)
    topology = runtime.topology
    run.spans.trace = TraceFile(runtime.run_dir, topology.rank, topology.host, done, topology.world)
    if start.folder is not None:
        log.line(f"resumed from {start.folder}: {done} steps done")
    return done, log


def build_saver(run: Run, log: RunLog) -> Saver | None:
    from spmdrl.saver import Saver

    config = run.config
    if config.checkpoint.every_steps <= 0:
        return None

    def say(step: int, folder: Path) -> None:
        log.line(f"step {step}/{config.steps} | saved {folder}")

    root = run.runtime.run_dir / "checkpoints"
    return Saver(root, config.checkpoint, run.runtime.phases, {"actor": run.actor.topology}, say)


def save(
    run: Run, saver: Saver, step: int, metrics: dict[str, float], ending: Ending
) -> None:  # fmt: skip
    from spmdrl.saver import check_metric

    with run.runtime.phases("checkpoint"):
        updated = "sft/loss" in metrics  # not passed over
        if run.runtime.is_main and not ending.stops and updated:
            check_metric(run.config.checkpoint, metrics)
    facts = {
        "engines": ["actor"], "order": run.order.state_dict(), "config": as_source(run.config),
        "metrics": metrics,
    }  # fmt: skip
    actor = run.actor.model
    saver.save(step, {"actor": actor}, facts, [*actor.pretrained, run.tokenizer])


def one_step(run: Run, step: int) -> dict[str, float]:
    from spmdrl.step import update

    phases, nan_updates = run.runtime.phases, run.config.nan_updates
    started_at = time.perf_counter()
    with phases("data"):
        batch, num_tokens = sft_batch(run.rows, run.order.next_step(), run.actor)
    with phases("update"):
        updated = update(run.actor, batch, cross_entropy, 1.0, nan_updates)
    metrics = {f"sft/{name}": value for name, value in updated.items()}
    if nan_updates:
        metrics["sft/skipped_updates"] = float(not updated)
    return metrics | timing(run, step, num_tokens, started_at)


def timing(run: Run, step: int, num_tokens: float, started_at: float) -> dict[str, float]:
    """As trainer.timing: seconds by phase over the ranks, idle share, the most memory of a rank."""
    import torch.distributed as dist

    from spmdrl.metrics import memory_of_process
    from spmdrl.trace import phase_metrics

    topology = run.runtime.topology
    everyone: list[Any] = [None] * topology.world
    mine = run.spans.report(step), memory_of_process()
    dist.all_gather_object(everyone, mine, group=topology.control)
    step_s = time.perf_counter() - started_at
    metrics = phase_metrics([spans for spans, _ in everyone])
    for what in mine[1]:
        metrics[f"memory/{what}"] = max(memory[what] for _, memory in everyone)
    return metrics | {"time/step_s": step_s, "throughput/tokens_per_s": num_tokens / step_s}


def evaluate(run: Run, rows: SftDataset, step: int, log: RunLog) -> dict[str, float]:
    """The mean loss over all learnt tokens of the rows, whatever ranks have them. Collective."""
    import torch

    from spmdrl.collectives import sum_over_ranks

    config, phases = run.config, run.runtime.phases
    loss_sum = num_tokens = 0.0  # of this rank; of all
    with phases("evaluate"):
        for first in range(0, len(rows), config.data.batch_size):
            chosen = range(first, min(first + config.data.batch_size, len(rows)))
            batch, count = sft_batch(rows, list(chosen), run.actor)
            logprobs = run.actor.model.logprobs(batch, temperature=1.0).logprobs
            loss_sum -= float(logprobs.sum(dtype=torch.float64))  # 0 where nothing is learnt
            num_tokens += count
            phases.still_going()
        loss = sum_over_ranks(loss_sum, run.runtime.topology) / num_tokens
    perplexity = math.exp(min(loss, 700.0))  # what a float holds
    log.line(
        f"step {step}/{config.steps} | held out: loss {loss:.4g}, perplexity {perplexity:.4g} "
        f"({len(rows)} rows)"
    )
    return {"eval/loss": loss, "eval/perplexity": perplexity}


def finish(run: Run, saver: Saver | None, log: RunLog) -> None:
    """Writes the model, and its average where there is one."""
    import torch

    from spmdrl.engines.fsdp import FsdpEngine
    from spmdrl.engines.lora import save_adapter

    config, actor = run.config, run.actor.model
    if saver:
        saver.wait()
    with run.runtime.phases("save"):
        weights = actor.named_weights(torch.float32, BUCKET_BYTES)
        export(weights, run, Path(config.out))
        if config.actor.ema:
            assert isinstance(actor, FsdpEngine)  # check_sft refuses others
            weights = actor.named_average(torch.float32, BUCKET_BYTES)
            export(weights, run, Path(config.out, "ema"))
        if config.actor.lora is not None:
            save_adapter(actor, Path(config.out, "adapter"))
    log.line(f"wrote {config.out}" + (", its average to ema/ in it" if config.actor.ema else ""))


def cross_entropy(logprobs: Tensor, entropy: Tensor, mb: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of every response token (the seam of engines/engine.py)."""
    assert mb.loss_weights is not None
    loss = -(logprobs * mb.loss_weights).sum()
    return loss, {"entropy": (entropy.detach() * mb.loss_mask).sum()}


def share_of(rows: SftDataset, indices: list[int], actor: Trainer) -> list[int]:
    """Those of the rows that this rank is given; all that are given any have the same work."""
    import torch

    from spmdrl.packing import partition, sequence_work

    rank = actor.topology.rank
    if rank not in actor.ranks:
        return []
    work = sequence_work(torch.from_numpy(rows.num_tokens[indices]))
    mine = partition(work.tolist(), len(actor.ranks))[actor.ranks.index(rank)]
    return [indices[i] for i in mine]


def sft_batch(rows: SftDataset, indices: list[int], actor: Trainer) -> tuple[Batch, float]:
    """This rank's share of the rows, weighted by one over the learnt tokens of all ranks; their
    number. Collective."""
    import torch

    from spmdrl.collectives import sum_over_ranks
    from spmdrl.packing import empty_batch

    examples = [rows.example(i) for i in share_of(rows, indices, actor)]
    batch = empty_batch(torch.tensor([len(e.token_ids) for e in examples], dtype=torch.int64))
    batch.token_ids = torch.tensor([t for e in examples for t in e.token_ids], dtype=torch.int64)
    batch.loss_mask = torch.tensor([float(m) for e in examples for m in e.loss_mask])
    num_tokens = sum_over_ranks(float(batch.loss_mask.sum()), actor.topology)
    batch.loss_weights = batch.loss_mask / max(num_tokens, 1.0)
    return batch, num_tokens


def export(gathered: Iterator[tuple[str, Tensor]], run: Run, out: Path) -> None:
    """Rank 0 keeps the tensors as they are gathered and writes them. Collective."""
    import torch

    from spmdrl.export import write_weights

    is_first = run.runtime.is_main
    kept = [(name, t.cpu().clone()) for name, t in gathered if is_first]
    if is_first:
        out.mkdir(parents=True, exist_ok=True)
        for part in (*run.actor.model.pretrained, run.tokenizer):
            part.save_pretrained(out)
        write_weights(kept, torch.float32, out)


def show_plan(config: SftConfig, runtime: Runtime, ranks: int) -> None:
    """--dry-run: resolved config, arithmetic, and one example per data set."""
    from spmdrl.describe import describe_sft
    from spmdrl.program import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    rows, held_out, _ = load_data(config, tokenizer, runtime.topology)
    lines = shown("train", rows) + (shown("eval", held_out) if held_out else [])
    if runtime.is_main:
        print(as_source(config), describe_sft(config, ranks, len(rows)), *lines, sep="\n")


def shown(name: str, rows: SftDataset) -> list[str]:
    """A data set's counts and its first row, cut into what is learnt and what is not."""
    example = rows.example(0)
    decode = rows.encoder.tokenizer.decode
    return [
        f"{name} data: {len(rows)} rows of {rows.num_tokens.sum():,} tokens, the longest "
        f"{rows.num_tokens.max()}; {rows.num_overlong} over max_tokens, {rows.num_bad} bad rows "
        f"left out, {rows.num_escaped} with control tokens in their text",
        f"  row {example.id}:",
        *(
            f"    {'learnt' if learnt else 'given '} {decode(ids)[-200:]!r}"
            for learnt, ids in example.parts()
        ),
    ]


if __name__ == "__main__":
    fire.Fire(main)
