"""Estimates the memory of the judge's engine on a rank, which is an engine as the rollout's is."""

from __future__ import annotations

from dataclasses import replace

from spmdrl.config import PpoConfig, TrainConfig, WeightsConfig
from spmdrl.distributed.placement import Placement
from spmdrl.rollout.build import ENGINES
from spmdrl.training.checks.engine_memory import BUFFERS_GIB, EngineMemory, engine_memory
from spmdrl.training.language_judge import engine_config, shares_ranks


def judge_memory(
    config: PpoConfig, placement: Placement, gpu_gib: float | None
) -> EngineMemory | None:  # fmt: skip
    """gpu_gib: of the GPU; None: a CPU. None where there is no judge."""
    if config.judge is None:
        return None
    sleeps = shares_ranks(config, placement)
    num_engines = len(placement.roles["reward"]) // config.judge.tensor_parallel
    found = engine_memory(as_run(config, sleeps), num_engines, gpu_gib)
    if gpu_gib is None or not sleeps:
        return found
    has_buffers = ENGINES[config.judge.engine or config.rollout.engine].has_kv_cache
    asleep = BUFFERS_GIB if has_buffers else 0.0  # it captures no graphs
    return replace(found, asleep=asleep, asleep_on_host=found.weights)


def as_run(config: PpoConfig, sleeps: bool) -> PpoConfig:
    """Returns the config of a run whose engine that samples is the judge's."""
    judge = config.judge
    assert judge is not None
    rollout = replace(engine_config(judge, config.rollout, sleeps), n=config.rollout.n)
    return replace(
        config, model=judge.model, rollout=rollout, strict=False, actor=TrainConfig(),
        weights=WeightsConfig(),
        data=replace(config.data, max_prompt_tokens=judge.max_prompt_tokens),
    )  # fmt: skip


def judge_line(config: PpoConfig, placement: Placement, memory: EngineMemory) -> str:
    assert config.judge is not None
    cache = "" if memory.cache is None else f", KV cache {memory.cache:.2f}"
    asleep = "kept"
    if shares_ranks(config, placement):
        asleep = f"asleep while others work, when it has {memory.asleep:.2f}"
    return f"  judge    weights {memory.weights:.2f}{cache}; {asleep}"
