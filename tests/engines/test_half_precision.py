"""What half precision, or a long sum in float32, would round away: values, gradients' norms, steps
on weights in bfloat16, and adapters that are merged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.config import (
    DataConfig,
    LoraConfig,
    OptimConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
    WeightsConfig,
)
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.hosted_actor import FsdpActor
from spmdrl.engines.fsdp.model import TokenValue, backbone_hidden
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.sharding import clip_gradients
from spmdrl.engines.megatron.model import ValueHead
from spmdrl.training.checks.adapters import LEAST_MERGED_LR
from spmdrl.training.checks.rl import warnings_of
from spmdrl.weights.shards import LowRank


def asked_of(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a head's weight, (1, hidden_size), and bias, by which values are about 100."""
    weight = torch.randn(1, hidden.shape[1]).to(hidden.dtype)
    weight *= 100 / (hidden.double() @ weight[0].double()).std()
    return weight, torch.full((1,), 100.0, dtype=hidden.dtype)


def load(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention.NAME
    )


def fsdp_values(folder: Path) -> tuple[Tensor, Tensor]:
    """Returns a critic's values of twelve tokens, and the same by way of float64."""
    module = TokenValue(load(folder, torch.bfloat16)).bfloat16()
    tokens = torch.arange(3, 15)
    positions, packing = torch.arange(12), Packing.build(torch.tensor([12]), torch.device("cpu"))
    with torch.no_grad():
        hidden = backbone_hidden(module.hf, tokens, positions, packing)
        head = module.value_head
        for parameter, value in zip(head.parameters(), asked_of(hidden), strict=True):
            parameter.copy_(value)
    found = module(tokens, positions, packing, positions)
    found.sum().backward()
    assert head.weight.grad is not None
    assert torch.equal(head.weight.grad, hidden.float().sum(0, keepdim=True).bfloat16())
    return found.detach(), hidden.double() @ head.weight[0].double() + head.bias.double()


def megatron_values() -> tuple[Tensor, Tensor]:
    hidden = torch.randn(12, 64).bfloat16()
    weight, bias = asked_of(hidden)
    found = ValueHead.values(SimpleNamespace(weight=weight, bias=bias), hidden)  # type: ignore[arg-type]
    return found[:, 0], hidden.double() @ weight[0].double() + bias.double()


@pytest.mark.parametrize("engine", ["fsdp", "megatron"])
def test_values_in_bfloat16_are_not_rounded(qwen3: Path, engine: str) -> None:
    """bfloat16 knows 100 and 100.5, and nothing between them."""
    torch.manual_seed(0)
    found, exact = fsdp_values(qwen3) if engine == "fsdp" else megatron_values()
    assert found.dtype == torch.float32 and exact.abs().max() > 100
    assert (exact.bfloat16() - exact).abs().max() > 0.1
    assert (found - exact).abs().max() < 1e-3


def test_the_norm_of_a_large_gradient_on_a_cpu(topology: Topology) -> None:
    """Gradients are there with offload_policy, an embedding's in one piece."""
    layout = Topology.build(topology.device, share=topology, dp=1, fsdp=1)

    def clipped(*gradients: Tensor) -> float:
        params = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
        for p, gradient in zip(params, gradients, strict=True):
            p.grad = gradient.clone()
        return clip_gradients(params, 1e9, layout).item()

    large = torch.full((1 << 24,), 1e-3)
    assert abs(torch.linalg.vector_norm(large).item() / (1e-3 * 2**12) - 1) > 5e-3  # torch's own
    assert clipped(large, -large) == pytest.approx(1e-3 * 2**12.5, rel=2e-5)
    shards = [torch.randn(3, 5), torch.randn(7), torch.zeros(0, 4)]
    plain = torch.cat([shard.flatten() for shard in shards]).norm().item()
    assert clipped(*shards) == pytest.approx(plain, rel=1e-6)
    assert clipped() == 0.0


def test_a_host_whose_optimizer_steps_on_rounded_weights_is_told(
    qwen3: Path, topology: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    """At a learning rate of 1e-6 hardly a weight would move. Frozen ones may be in bfloat16."""
    config: Any = SimpleNamespace(model=str(qwen3))
    for dtype, frozen in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        model = load(qwen3, dtype)
        if frozen:
            model.requires_grad_(False)
            model.model.norm.float().requires_grad_(True)
        caplog.clear()
        FsdpActor(model, torch.optim.AdamW(model.parameters(), lr=1e-6), config)
        is_told = dtype == torch.bfloat16 and not frozen
        assert ("AdamW steps on weights in bfloat16" in caplog.text) == is_told, (dtype, frozen)


def kept_share(lr: float, updates: int) -> float:
    """Returns how much of an adapter's product is left where W + scale B A is in bfloat16."""
    torch.manual_seed(0)
    size, scale = 1024, 2.0
    base = (torch.randn(size, size) * 0.02).bfloat16()
    a = torch.nn.Parameter((2 * torch.rand(16, size) - 1) / size**0.5)
    b = torch.nn.Parameter(torch.zeros(size, 16))
    optimizer = torch.optim.AdamW([a, b], lr=lr, weight_decay=0.0)
    steady = torch.randn(size, 8) @ torch.randn(8, size)
    for _ in range(updates):
        gradient = steady + 3 * torch.randn(size, size)
        a.grad, b.grad = b.detach().T @ gradient, gradient @ a.detach().T
        optimizer.step()
    merged = torch.empty(size, size)
    with torch.no_grad():
        LowRank(base, a, b, scale).compute([merged])
        product = scale * b @ a
    kept = merged.bfloat16().float() - base.float()
    return float((kept * product).sum() / product.square().sum())


def test_a_run_warns_of_adapters_that_rounding_takes_from_what_samples() -> None:
    """At the rate from which on it does not most of the adapter is there after ten updates."""
    config = PpoConfig(model="unread", data=DataConfig(train="unread"), reward="math")

    def warns(lr: float, dtype: Any = "bfloat16", how: Any = "merge", **adapter: Any) -> bool:
        actor = TrainConfig(lora=LoraConfig(**adapter), optim=OptimConfig(lr=lr))
        run = replace(
            config, actor=actor, rollout=RolloutConfig(dtype=dtype), weights=WeightsConfig(lora=how)
        )
        return any("rounds W + scale B A" in warning for warning in warnings_of(run))

    assert kept_share(LEAST_MERGED_LR, 10) > 0.75 and kept_share(1e-5, 10) < 0.4
    assert warns(1e-5) and warns(1e-6, dtype="float16") and not warns(LEAST_MERGED_LR)
    assert not warns(1e-5, dtype="float32") and not warns(1e-5, how="adapter")
    assert not warns(1e-5, adapter="one/that/was/trained")
