"""Supervised fine-tuning: torchrun --nproc-per-node 2 -m spmdrl.sft --config cfg.py

Also runs as python -m spmdrl.sft. Any field of the config is set by its dotted name. Writes the
model to config.out in Hugging Face format; with actor.lora also the adapter, to config.out/adapter.
Saves, stops and resumes as python -m spmdrl.ppo does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli import as_source, load_config
from spmdrl.config import ConfigError, SftConfig
from spmdrl.exits import exit_config
from spmdrl.imports import before_torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from spmdrl.data import PromptOrder
    from spmdrl.engines.engine import TrainEngine
    from spmdrl.metrics import RunLog
    from spmdrl.program import Runtime
    from spmdrl.saver import Saver
    from spmdrl.sft_data import SftDataset
    from spmdrl.stopping import Ending
    from spmdrl.topology import Topology
    from spmdrl.types import Batch

BUCKET_BYTES = 512 << 20  # gathered at once


def main(config: str = "", **overrides: Any) -> None:
    """Trains on the responses of a data set.

    Args:
        config: a Python file that defines `config = SftConfig(...)`
        overrides: any field of the config by its dotted name: --actor.optim.lr 1e-5
    """
    try:
        value = load_config(config, SftConfig, overrides)
    except ConfigError as error:
        exit_config(error)
    before_torch()
    from spmdrl.program import started  # torch comes in here, see spmdrl/ppo.py

    with started(value) as runtime:
        train(value, runtime)


@dataclass
class Run:
    """What the loop works with."""

    config: SftConfig
    runtime: Runtime
    ranks: Topology  # as the actor arranges them
    actor: TrainEngine
    rows: SftDataset
    order: PromptOrder
    tokenizer: Any


def train(config: SftConfig, runtime: Runtime) -> None:
    """Steps over shuffled batches; the loss is the mean over the batch's response tokens."""
    from spmdrl.stopping import Ending

    run = build(config, runtime)
    phases, steps = runtime.phases, config.steps
    done, log = resume(run)
    saver = build_saver(run, log)
    ending = Ending(config, runtime, saver)
    phases.on_change = log.phase
    phases.take_spans()
    for step in range(done + 1, steps + 1):
        log.begin_step(step)
        metrics = one_step(run)
        if step % max(steps // 20, 1) == 0 or step == steps:
            log.step_line(step, metrics, ("sft/loss", "sft/grad_norm"))
        ending.vote(step)
        if saver:
            metrics |= saver.take_metrics()
            if ending.failed:
                saver.wait()  # raises
        log.write(step, metrics)
        if saver and ending.saves:
            save(run, saver, step, metrics, ending)
        if ending.stops:
            log.line(f"spmdrl: {ending.stop(step)}")
            break
    else:
        finish(run, saver, log)
    ending.close()
    log.close()


def build(config: SftConfig, runtime: Runtime) -> Run:
    """Collective."""
    from spmdrl.data import PromptOrder
    from spmdrl.engines import build_engine
    from spmdrl.engines.models import vocab_size_of
    from spmdrl.plan import check_sft
    from spmdrl.program import load_tokenizer
    from spmdrl.sft_data import SftDataset
    from spmdrl.topology import Topology, train_degrees

    phases, topology = runtime.phases, runtime.topology
    check_sft(config, topology.world)
    ranks = Topology.build(topology.device, **train_degrees(config.actor))
    tokenizer = load_tokenizer(config.model)
    with phases("load data"):
        rows = SftDataset.load(
            config.data.train, tokenizer, config.data, topology, vocab_size_of(config.model)
        )
        order = PromptOrder(len(rows), config.data.batch_size, config.seed, config.data.shuffle)
    with phases("build actor"):
        actor = build_engine("policy", config.model, config.actor, ranks)
        assert actor is not None  # on all ranks
    return Run(config, runtime, ranks, actor, rows, order, tokenizer)


def resume(run: Run) -> tuple[int, RunLog]:
    """Loads the checkpoint that config.resume asks for; the steps it had done, and the log."""
    from spmdrl import checkpoint
    from spmdrl.metrics import RunLog
    from spmdrl.resume import find_start, take_folder
    from spmdrl.trackers import open_trackers

    config, runtime, done = run.config, run.runtime, 0
    with runtime.phases("resume"):
        start = find_start(config, runtime)
        if start.folder is not None:
            saved = checkpoint.load(start.folder, {"actor": run.actor}, runtime.topology)
            done = saved["step"]
            run.order.load_state_dict(saved["order"])
    with runtime.phases("resume"):
        take_folder(config, runtime, start, done)
        trackers = open_trackers(config, runtime.run_dir, done) if runtime.is_main else []
    log = RunLog(runtime.run_dir, runtime.is_main, config.steps, trackers, done)
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
    return Saver(root, config.checkpoint, run.runtime.phases, {"actor": run.ranks}, say)


def save(
    run: Run, saver: Saver, step: int, metrics: dict[str, float], ending: Ending
) -> None:  # fmt: skip
    from spmdrl.saver import check_metric

    with run.runtime.phases("checkpoint"):
        if run.runtime.is_main and not ending.stops:
            check_metric(run.config.checkpoint, metrics)
    facts = {
        "engines": ["actor"], "order": run.order.state_dict(), "config": as_source(run.config),
        "metrics": metrics,
    }  # fmt: skip
    saver.save(step, {"actor": run.actor}, facts, [*run.actor.pretrained, run.tokenizer])


def one_step(run: Run) -> dict[str, float]:
    from spmdrl.phases import seconds_of

    phases, topology = run.runtime.phases, run.runtime.topology
    started_at = time.perf_counter()
    with phases("data"):
        given, taken = run.order.next_step(), run.ranks.data_ranks
        mine = [] if topology.rank not in taken else given[
            taken.index(topology.rank) :: len(taken)
        ]  # fmt: skip
        batch, num_tokens = sft_batch(run.rows, mine, topology)
    with phases("update"):
        updated = run.actor.update(batch, cross_entropy, temperature=1.0)
    metrics = {f"sft/{name}": value for name, value in updated.items()}
    seconds = seconds_of(phases.take_spans())
    metrics |= {f"time/{name}_s": s for name, s in seconds.items()}
    metrics["time/step_s"] = time.perf_counter() - started_at
    metrics["throughput/tokens_per_s"] = num_tokens / metrics["time/step_s"]
    return metrics


def finish(run: Run, saver: Saver | None, log: RunLog) -> None:
    """Writes the model, and its average where there is one."""
    import torch

    from spmdrl.engines.fsdp import FsdpEngine
    from spmdrl.engines.lora import save_adapter

    config, actor = run.config, run.actor
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


def sft_batch(rows: SftDataset, indices: list[int], topology: Topology) -> tuple[Batch, float]:
    """This rank's examples, weighted by one over the response tokens of all ranks; that count."""
    import torch

    from spmdrl.collectives import sum_over_ranks
    from spmdrl.packing import empty_batch

    examples = [rows.example(i) for i in indices]
    lens = [len(e.prompt_ids) + len(e.response_ids) for e in examples]
    batch = empty_batch(torch.tensor(lens, dtype=torch.int64))
    batch.token_ids = torch.tensor(
        [t for e in examples for t in (*e.prompt_ids, *e.response_ids)], dtype=torch.int64
    )
    batch.loss_mask = torch.tensor(
        [m for e in examples for m in [0.0] * len(e.prompt_ids) + [1.0] * len(e.response_ids)]
    )
    num_tokens = sum_over_ranks(float(batch.loss_mask.sum()), topology)
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
        for part in (*run.actor.pretrained, run.tokenizer):
            part.save_pretrained(out)
        write_weights(kept, torch.float32, out)


if __name__ == "__main__":
    fire.Fire(main)
