"""One shard: weights are gathered once for all micro-batches, and no number depends on it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from torch.utils._python_dispatch import TorchDispatchMode
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.config import AlgoConfig, LoraConfig, TrainConfig
from spmdrl.weights.shards import local

COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}
MANY = replace(CONFIG, micro_batch_tokens=30)
OFFLOADED = replace(MANY, offload_policy=True)
ADAPTERS = replace(MANY, lora=LoraConfig(rank=4, alpha=8))


class Gathers(TorchDispatchMode):
    """Counts casts and copies of the shards of a module's weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.count = 0
        self.shards = {storage(local(p)) for p in module.parameters()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        source = args[1 if func is torch.ops.aten.copy_.default else 0] if func in COPIES else None
        self.count += source is not None and storage(source) in self.shards
        return func(*args, **(kwargs or {}))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def loss_of(kind: str) -> Callable[..., Any]:
    from spmdrl.algo.objectives import policy_objective, value_objective

    return (policy_objective if kind == "policy" else value_objective)(AlgoConfig())


def is_sharded(engine: Any) -> bool:
    return all(hasattr(p, "full_tensor") for p in engine.module.parameters())


def gathers_of(topology: Any, model: str, config: TrainConfig) -> tuple[int, int, int, int]:
    """Micro-batches and weights; gathers of weights in an update, and in a pass before it."""
    engine, batch = engine_on(topology, "policy", model, config), whole_batch()
    with Gathers(engine.module) as look:
        engine.logprobs(batch, 1.0)
    assert is_sharded(engine)
    update = Gathers(engine.module)
    engine.optimizer.step = lambda: None  # it reads the shards, too
    with update:
        engine.update(batch, loss_of("policy"), 1.0)
    assert is_sharded(engine)
    num_weights = len(list(engine.module.parameters()))
    return len(engine.micro_batches(batch)), num_weights, update.count, look.count


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gathers_do_not_grow_with_the_micro_batches(qwen3: Path, topology: Any, dtype: str) -> None:
    for budget in (1000, 30):
        config = replace(CONFIG, dtype=dtype, micro_batch_tokens=budget)
        parts, weights, update, look = gathers_of(topology, str(qwen3), config)
        assert parts == 1 if budget == 1000 else parts >= 5
        assert update == look == weights


@pytest.mark.parametrize("config", [OFFLOADED, ADAPTERS], ids=["offload_policy", "lora"])
def test_each_micro_batch_gathers_what_would_be_held_twice(
    qwen3: Path, topology: Any, config: TrainConfig
) -> None:
    config = replace(config, dtype="bfloat16")
    parts, weights, update, look = gathers_of(topology, str(qwen3), config)
    assert look >= parts * (weights - 3) and update >= 2 * look - parts * 3  # the root has three


@contextmanager
def as_with_several_shards() -> Any:
    """Meanwhile engines gather each unit for each pass, as they do with several shards."""
    from spmdrl.engines.fsdp import sharded_model

    rule = sharded_model.gathers_once
    sharded_model.gathers_once = lambda *_: False
    try:
        yield
    finally:
        sharded_model.gathers_once = rule


def learnt_on(topology: Any, model: str, kind: str, config: TrainConfig) -> tuple[Any, Any, Any]:
    """(log-probabilities or values after two updates, metrics, weights)"""
    engine = engine_on(topology, kind, model, config)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    metrics = [engine.update(batch, loss_of(kind), 1.0) for _ in range(2)]
    found = engine.logprobs(batch, 1.0).logprobs if kind == "policy" else engine.values(batch)
    return found, metrics, {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}


CASES = {  # kind of engine, fields of its config
    "float32": ("policy", {}),
    "one micro-batch": ("policy", {"dtype": "bfloat16", "micro_batch_tokens": 1000}),
    "checkpointing": ("policy", {"dtype": "bfloat16", "activation_checkpointing": True}),
    "kept": ("value", {"dtype": "bfloat16", "reshard_after_forward": False}),
}


def both_on(topology: Any, model: str, kind: str, fields: dict[str, Any]) -> Any:
    """What is learnt with one shard, with one that is treated as several are, and by several."""
    config = replace(MANY, fsdp=1, **fields)
    once = learnt_on(topology, model, kind, config)
    with as_with_several_shards():
        each = learnt_on(topology, model, kind, config)
    return once, each, learnt_on(topology, model, kind, replace(config, fsdp=-1))


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_updates_are_equal_in_every_bit_to_those_that_gather_each_time(
    qwen3: Path, world: int
) -> None:
    calls = [(both_on, (str(qwen3), *case)) for case in CASES.values()]
    for name, results in zip(CASES, run_calls(world, calls), strict=True):
        for once, each, shards in results:
            assert torch.equal(once[0], each[0]) and once[1] == each[1], name
            assert all(torch.equal(once[2][part], each[2][part]) for part in each[2]), name
            tolerance = 1e-6 if name == "float32" else 1e-3
            for mine, others in zip(once[1], shards[1], strict=True):
                assert mine["loss"] == pytest.approx(others["loss"], rel=tolerance, abs=1e-6)
                assert mine["grad_norm"] == pytest.approx(others["grad_norm"], rel=tolerance)


@pytest.mark.parametrize(
    ("where", "config"),
    [("loss", MANY), ("layer", MANY), ("loss", replace(MANY, dtype="bfloat16")),
     ("layer", replace(MANY, dtype="bfloat16")), ("loss", OFFLOADED)],
)  # fmt: skip
def test_an_update_that_fails_leaves_nothing_behind(
    qwen3: Path, topology: Any, where: str, config: TrainConfig
) -> None:
    """In the second micro-batch, in the user's loss or within a layer's forward pass; the engine
    then does what a new one does, also where each micro-batch has reduced its gradients."""
    failed, new = (engine_on(topology, "policy", str(qwen3), config) for _ in range(2))
    fault = ValueError if failed.gathers_once else FloatingPointError
    calls = []

    def fail(*_: Any) -> None:
        calls.append(is_sharded(failed))
        if len(calls) == 2:
            raise fault("a fault of the user's")

    def loss(logprobs: torch.Tensor, entropy: torch.Tensor, batch: Any) -> Any:
        if where == "loss":
            fail()
        return loss_of("policy")(logprobs, entropy, batch)

    layer = failed.module.hf.model.layers[1].mlp
    hook = layer.register_forward_pre_hook(fail if where == "layer" else lambda *_: None)
    with pytest.raises(fault, match="fault of the user's"):
        failed.update(whole_batch(), loss, 1.0)
    hook.remove()
    assert calls == [False, False] and is_sharded(failed)
    found = [each.update(whole_batch(), loss_of("policy"), 1.0) for each in (failed, new)]
    assert found[0] == found[1]
    for got, want in zip(failed.params, new.params, strict=True):
        assert torch.equal(local(got), local(want))
