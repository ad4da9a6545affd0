"""Runs of training engines with adapters on ranks: trained, saved, resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_batches import engine_on, whole_batch

from spmdrl.config import AlgoConfig, TrainConfig
from spmdrl.types import Batch


def share_of(topology: Any) -> Batch:
    return whole_batch().select(list(range(topology.rank, 9, topology.world)))


def trained(
    topology: Any, kind: str, model: str, config: TrainConfig, updates: int = 2
) -> tuple[Any, list[dict[str, float]]]:
    """An engine after some updates, and what they said."""
    engine = engine_on(topology, kind, model, config)
    return engine, [go_on(engine, topology, kind) for _ in range(updates)]


def same_on(
    topology: Any, kind: str, model: str, config: TrainConfig, folder: str | None
) -> tuple[Any, ...]:
    """Trains, saves, trains on. Returns the metrics of the updates until then, those of one more,
    the weights with the adapter, and what a reader of the base sees.
    """
    engine, _ = trained(topology, kind, model, config, updates=0)
    base = frozen_of(engine)
    batch = share_of(topology)
    look = engine.logprobs if kind == "policy" else lambda b, _: (engine.values(b),)
    start = look(batch, 1.0)[0]
    engine, metrics = trained(topology, kind, model, config)
    away: dict[str, Any] = {}
    if kind == "policy":
        off = engine.base()
        away["off"] = (off.logprobs(batch, 1.0).logprobs - start).abs().max().item()
        away["on"] = (engine.logprobs(batch, 1.0).logprobs - start).abs().max().item()
    away["base"] = all(torch.equal(t, base[n]) for n, t in frozen_of(engine).items())
    away["trained"] = sum(p.numel() for p in engine.params)
    if folder is not None:
        engine.save(Path(folder))
    away["saved"] = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 12)}
    more = go_on(engine, topology, kind)
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 12)}
    return metrics, more, weights, away


def go_on(engine: Any, topology: Any, kind: str) -> dict[str, float]:
    from spmdrl.algo.objectives import policy_objective, value_objective

    algo = AlgoConfig(entropy_coef=0.01)
    loss_fn = policy_objective(algo) if kind == "policy" else value_objective(algo)
    return engine.update(share_of(topology), loss_fn, 0.8)


def frozen_of(engine: Any) -> dict[str, torch.Tensor]:
    parameters = engine.module.named_parameters()
    return {n: p.to_local().clone() for n, p in parameters if not p.requires_grad}


def resume_on(topology: Any, kind: str, model: str, config: TrainConfig, folder: str) -> Any:
    """Goes on from a checkpoint: the metrics of one update, and the weights."""
    engine, _ = trained(topology, kind, model, config, updates=0)
    engine.load(Path(folder))
    return go_on(engine, topology, kind), dict(engine.named_weights(torch.float32, 1 << 20))
