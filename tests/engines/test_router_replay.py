"""Engine fsdp with replayed experts, against a slow reference, on each path of a pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from tiny_megatron_models import save_model
from torch import Tensor, nn
from training_batches import pair_up

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, LoraConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.data.routing import Routing
from spmdrl.types import Batch

LENS = [9, 14, 5, 11, 8, 3]
PROMPT = 4
ROUTING = Routing(num_layers=3, top_k=2, num_experts=4)


def some_batch() -> Batch:
    """Three groups of two answers to one prompt each, with experts that no router has chosen; those
    of a prompt are the same in its group.
    """
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.tensor(LENS), routing=ROUTING)
    batch.token_ids = torch.randint(3, 97, (sum(LENS),), generator=draw)
    scores = torch.rand(sum(LENS), ROUTING.num_layers, ROUTING.num_experts, generator=draw)
    batch.routed_experts = scores.argsort(-1)[..., : ROUTING.top_k].to(ROUTING.dtype)
    pair_up(batch, PROMPT, [batch.token_ids, batch.routed_experts])
    batch.advantages = torch.randn(sum(LENS), generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


class ReplayedRouter(nn.Module):
    """The formula of Qwen3-MoE's weights, written down once more."""

    def __init__(self, router: Any) -> None:
        super().__init__()
        self.weight, self.normalised, self.chosen = router.weight, router.norm_topk_prob, None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = hidden @ self.weight.T
        probs = logits.softmax(-1)
        weights = torch.stack([probs[i, row] for i, row in enumerate(self.chosen)])
        if self.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, self.chosen


def reference(folder: Path) -> tuple[Tensor, Tensor]:
    """Logprobs of all tokens, each sequence by itself, and the norm of the loss's gradient."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    for block in blocks:
        block.gate = ReplayedRouter(block.gate)
    batch, found, loss = some_batch(), [], torch.zeros(())
    for start, end in zip(
        batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
    ):
        for column, block in enumerate(blocks):
            block.gate.chosen = batch.routed_experts[start:end, column].long()
        ids = batch.token_ids[start:end]
        logits = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1)
        logprobs = torch.cat([torch.zeros(1), logits.gather(-1, ids[1:, None])[:, 0]])
        found.append(logprobs * batch.loss_mask[start:end])
        loss = loss - (found[-1] * (batch.advantages * batch.loss_weights)[start:end]).sum()
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    return torch.cat(found).detach(), norm.detach()


def work(topology: Any, folder: Path, settings: dict[str, Any]) -> tuple[Tensor, float, Tensor]:
    """(logprobs of all tokens, gradient norm of an update, logprobs of the base of an adapter)."""
    from spmdrl.distributed.topology import Topology, resolve_degrees, train_degrees
    from spmdrl.engines.build import build_engine

    torch.set_num_threads(1)
    config = TrainConfig(dtype="float32", router_replay="R3", **settings)
    ranks = Topology.build(
        topology.device, **resolve_degrees(train_degrees(config), topology.world)
    )
    engine: Any = build_engine("policy", str(folder), config, ranks)
    is_given = ranks.rank == ranks.data_ranks[0]
    batch = some_batch() if is_given else some_batch().select([])
    seen = engine.logprobs(batch, 1.0).logprobs
    base = engine.base().logprobs(batch, 1.0).logprobs if config.lora else seen
    batch.old_logprobs = seen
    norm = engine.update(batch, policy_objective(AlgoConfig()), 1.0)["grad_norm"]
    return seen, norm, base


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"shared_prefix": True, "micro_batch_tokens": 20},
        {"shared_prefix": False, "activation_checkpointing": True, "micro_batch_tokens": 20},
        {"activation_checkpointing": "selective", "kernels": "torch"},
        {"lora": LoraConfig(rank=2)},
    ],
    2: [
        {"ulysses": 2, "activation_checkpointing": True, "micro_batch_tokens": 7},
        {"fsdp": 2, "micro_batch_tokens": 20},  # rank 1 computes stand-ins
        {"fsdp": 1, "offload_policy": True},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replayed")
    save_model("qwen3_moe normalised", path)
    return path


MEGATRON: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "sequence_parallel": True, "activation_checkpointing": True},
    {"pipeline_parallel": 2, "activation_checkpointing": True},
    {"context_parallel": 2, "activation_checkpointing": "selective"},
    {"expert_parallel": 2},
    {"lora": LoraConfig(rank=2)},
]


@pytest.mark.ranks
@pytest.mark.megatron
def test_engine_megatron_computes_the_same(folder):
    wanted, norm = reference(folder)
    cases = [{"engine": "megatron", "micro_batch_tokens": 20, **case} for case in MEGATRON]
    calls = [(work, (folder, settings)) for settings in cases]
    for settings, results in zip(cases, run_calls(2, calls), strict=True):
        found, found_norm, base = max(results, key=lambda result: len(result[0]))
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5, msg=str(settings))
        if "lora" in settings:
            assert (base - wanted).abs().max() > 1e-3
        else:
            assert found_norm == pytest.approx(float(norm), rel=1e-3), settings


@pytest.mark.ranks
@pytest.mark.parametrize("world", CASES)
def test_engine_fsdp_computes_what_a_slow_reference_does_with_these_experts(world, folder):
    wanted, norm = reference(folder)
    calls = [(work, (folder, settings)) for settings in CASES[world]]
    for settings, results in zip(CASES[world], run_calls(world, calls), strict=True):
        found, found_norm, base = results[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5, msg=str(settings))
        if "lora" in settings:  # the reference model, which is the base, chooses for itself
            assert (base - wanted).abs().max() > 1e-3
        else:
            assert found_norm == pytest.approx(float(norm), rel=1e-3), settings
