"""How often an update waits for the device: never in the model, the loss and the backward pass.

On a GPU a value that the host asks for stops it until all that was queued is computed. Here, on a
CPU, the operators that would do so are counted wherever tensors of the device are at work: in the
model, the loss and the backward pass. tests/gpu/test_gpu.py counts on a GPU, by its own
warnings, where what is done on the host to prepare a micro-batch counts too.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training_batches import CONFIG, engine_on, whole_batch, with_shared_prompts

from spmdrl.algo.objectives import policy_objective, value_objective
from spmdrl.config import AlgoConfig, CorrectionConfig
from spmdrl.engines import micro_batches
from spmdrl.segments import to_device

ASKING = {  # their results have a value, or a size, that the host wants
    torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default, torch.ops.aten._unique2.default,
    torch.ops.aten.unique_dim.default, torch.ops.aten.unique_consecutive.default,
}  # fmt: skip


def asks(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    if func in (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default):
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    return func in ASKING


class Waits(TorchDispatchMode):
    """Counts operators that would make the host wait, but for what is done while `paused`."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.paused and asks(func, args, kwargs):
            self.counted[str(func)] += 1
        return func(*args, **kwargs)

    def pausing(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return call


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_an_update_waits_as_often_whatever_the_micro_batches(
    qwen3: Path, topology: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_shared_prompts(whole_batch(), [(3, 6), (2, 11), (4, 2)])
    batch.ref_logprobs = batch.rollout_logprobs - 0.1 * batch.loss_mask
    algo = AlgoConfig(kl_coef=0.1, entropy_coef=0.1, correction=CorrectionConfig(level="token"))
    loss = policy_objective(algo) if kind == "policy" else value_objective(algo)
    found = []
    for budget in (1000, 30):
        engine = engine_on(topology, kind, str(qwen3), replace(CONFIG, micro_batch_tokens=budget))
        num_parts = len(engine.micro_batches(batch))
        waits = Waits()
        prepare = engine._inputs

        def prepared(mb: Any, prepare: Any = prepare) -> Any:
            inputs = prepare(mb)
            assert inputs.packing.groups  # on the host, where a GPU has cu_seqlens in their place
            return inputs

        for name, function in (
            ("_inputs", prepared), ("micro_batches", engine.micro_batches),
        ):  # fmt: skip
            monkeypatch.setattr(engine, name, waits.pausing(function))
        # Adam counts its steps on the host, and metrics are there when they are read
        monkeypatch.setattr(engine.optimizer, "step", waits.pausing(engine.optimizer.step))
        reduce = waits.pausing(micro_batches.reduce_metrics)
        monkeypatch.setattr("spmdrl.engines.fsdp.engine.reduce_metrics", reduce)
        with waits:
            engine.update(batch, loss, 1.0)
        found.append((num_parts, dict(waits.counted)))
    (few, once), (many, often) = found
    assert few == 1 and many >= 5
    assert once == often
    assert sum(once.values()) <= 5  # the number of tokens, loss and norm


def test_the_count_sees_what_waits() -> None:
    waits = Waits()
    values = torch.arange(4)
    with waits:
        float(values.sum())
        values.nonzero()
        values[values > 1]
        torch.repeat_interleave(values, values)
        torch.repeat_interleave(values, values, output_size=6)
    assert sum(waits.counted.values()) == 4, waits.counted


def test_tensors_of_a_cpu_stay_what_they_are() -> None:
    tensors = [torch.arange(3), torch.rand(0), torch.ones(2, 2, dtype=torch.bool)]
    assert all(
        a is b for a, b in zip(to_device(tensors, torch.device("cpu")), tensors, strict=True)
    )
    assert to_device([], torch.device("cpu")) == []
