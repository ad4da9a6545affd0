"""Supervised fine-tuning: torchrun --nproc-per-node 2 -m spmdrl.sft --config cfg.py

Also runs as python -m spmdrl.sft. Any field of the config is set by its dotted name. Writes the
model to config.out in Hugging Face format; with actor.lora also the adapter, to config.out/adapter.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fire

from spmdrl.cli import load_config
from spmdrl.config import ConfigError, SftConfig
from spmdrl.exits import exit_config
from spmdrl.imports import hide_torchao

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from spmdrl.program import Runtime
    from spmdrl.sft_data import SftDataset
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
    hide_torchao()
    from spmdrl.program import started  # torch comes in here, see spmdrl/ppo.py

    with started(value) as runtime:
        train(value, runtime)


def train(config: SftConfig, runtime: Runtime) -> None:
    """Steps over shuffled batches; the loss is the mean over the batch's response tokens."""
    import torch

    from spmdrl.data import PromptOrder
    from spmdrl.engines import build_engine
    from spmdrl.engines.fsdp import FsdpEngine
    from spmdrl.engines.lora import save_adapter
    from spmdrl.engines.models import vocab_size_of
    from spmdrl.metrics import RunLog, set_aside_earlier_run
    from spmdrl.phases import seconds_of
    from spmdrl.plan import check_sft
    from spmdrl.program import load_tokenizer, write_config
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
    if runtime.is_main:
        set_aside_earlier_run(runtime.run_dir, 0)
        write_config(config, runtime.run_dir)
    log = RunLog(runtime.run_dir, runtime.is_main, config.steps, config.tensorboard)
    phases.on_change = log.phase
    phases.take_spans()
    for step in range(1, config.steps + 1):
        log.begin_step(step)
        started_at = time.perf_counter()
        with phases("data"):
            given, taken = order.next_step(), ranks.data_ranks
            mine = [] if topology.rank not in taken else given[
                taken.index(topology.rank) :: len(taken)
            ]  # fmt: skip
            batch, num_tokens = sft_batch(rows, mine, topology)
        with phases("update"):
            updated = actor.update(batch, cross_entropy, temperature=1.0)
        metrics = {f"sft/{name}": value for name, value in updated.items()}
        seconds = seconds_of(phases.take_spans())
        metrics |= {f"time/{name}_s": s for name, s in seconds.items()}
        metrics["time/step_s"] = time.perf_counter() - started_at
        metrics["throughput/tokens_per_s"] = num_tokens / metrics["time/step_s"]
        log.write(step, metrics)
        if step % max(config.steps // 20, 1) == 0 or step == config.steps:
            log.step_line(step, metrics, ("sft/loss", "sft/grad_norm"))
    with phases("save"):
        weights = actor.named_weights(torch.float32, BUCKET_BYTES)
        save(weights, actor.pretrained, tokenizer, Path(config.out), topology)
        if config.actor.ema:
            assert isinstance(actor, FsdpEngine)  # check_sft refuses others
            weights = actor.named_average(torch.float32, BUCKET_BYTES)
            save(weights, actor.pretrained, tokenizer, Path(config.out, "ema"), topology)
        if config.actor.lora is not None:
            save_adapter(actor, Path(config.out, "adapter"))
    log.line(f"wrote {config.out}" + (", its average to ema/ in it" if config.actor.ema else ""))
    log.close()


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


def save(
    gathered: Iterator[tuple[str, Tensor]], pretrained: list[Any], tokenizer: Any, out: Path,
    topology: Topology,
) -> None:  # fmt: skip
    """Rank 0 keeps the tensors as they are gathered and writes them. Collective."""
    import torch

    from spmdrl.export import write_weights

    kept = [(name, t.cpu().clone()) for name, t in gathered if topology.rank == 0]
    if topology.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        for part in (*pretrained, tokenizer):
            part.save_pretrained(out)
        write_weights(kept, torch.float32, out)


if __name__ == "__main__":
    fire.Fire(main)
