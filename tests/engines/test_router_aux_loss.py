"""The load-balancing loss of routers: an update's gradient and metric against slow loops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from tiny_megatron_models import save_model
from torch import Tensor, nn
from training_batches import LENS, engine_on, whole_batch, with_shared_prompts

from spmdrl.algo.objectives import policy_objective, value_objective
from spmdrl.config import AlgoConfig, LoraConfig, OptimConfig, TrainConfig
from spmdrl.engines.fsdp.router_aux_loss import output_of, read
from spmdrl.engines.fsdp.router_replay import Routers
from spmdrl.types import Batch

COEF = 0.5
FAMILIES = ("qwen3_moe", "deepseek_v3", "gpt_oss")
R3 = {"router_replay": "R3", "shared_prefix": False}


def some_batch(replays: bool = False) -> Batch:
    """Nine answers to three prompts, two of them without a token to be trained on."""
    batch = with_shared_prompts(whole_batch(), [(3, 6), (3, 2), (3, 8)])
    if replays:  # experts that no router has chosen
        scores = torch.rand(sum(LENS), 3, 4, generator=torch.Generator().manual_seed(1))
        batch.routed_experts = scores.argsort(-1)[..., :2].to(torch.uint8)
    return batch


# ---- the loops


def parts_of(batch: Batch) -> Iterator[tuple[slice, bool]]:
    """The tokens of each sequence, and whether one of them is trained on."""
    bounds = batch.cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        yield slice(start, end), bool(batch.loss_mask[start:end].any())


def balance(logits: Tensor, chosen: list[list[int]], sigmoid: bool) -> Tensor:
    """Equations 17 to 20 of arXiv 2412.19437 without alpha, of one sequence and layer."""
    num_tokens, num_experts = logits.shape
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    total = torch.zeros((), dtype=logits.dtype)
    for i in range(num_experts):
        sent = sum(experts.count(i) for experts in chosen)
        f = num_experts / (len(chosen[0]) * num_tokens) * sent
        p = sum((scores[t, i] / scores[t].sum() for t in range(num_tokens)), torch.zeros(()))
        total = total + f * p / num_tokens
    return total


def golden(folder: Path, replays: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The metric, and the gradient of the policy loss with COEF times the loss of the routers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    found: list[tuple[Tensor, list[list[int]]]] = []
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter")]
    for router in routers:
        router.register_forward_hook(lambda _, __, out: found.append((out[0], out[2].tolist())))
    replayed = Routers(model) if replays else None
    batch = some_batch(replays)
    loss, aux = torch.zeros(()), torch.zeros(())
    for tokens, is_trained in parts_of(batch):
        found.clear()
        with replayed.replaying(batch.routed_experts[tokens]) if replayed else nullcontext():
            ids = batch.token_ids[tokens]
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(-1, ids[1:, None])[:, 0]
        loss = loss - (own * (batch.advantages * batch.loss_weights)[tokens][1:]).sum()
        for logits, chosen in found if is_trained else ():
            aux = aux + balance(logits.double(), chosen, model.config.model_type == "deepseek_v3")
    aux = aux / sum(is_trained for _, is_trained in parts_of(batch))
    (loss + COEF * aux).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return aux.item() / len(routers), grads


# ---- the engine


def work(
    topology: Any, folder: Path, settings: dict[str, Any], kind: str = "policy"
) -> tuple[float, dict[str, Tensor]]:
    """What `golden` gives, of an update; (norm of an update without the loss's part, {}) too."""
    from spmdrl.distributed.topology import Topology, resolve_degrees, train_degrees
    from spmdrl.engines.build import build_engine

    torch.set_num_threads(1)
    settings = {"dtype": "float32", "router_aux_loss_coef": COEF} | settings
    strict = settings.pop("strict", False)
    config = TrainConfig(optim=OptimConfig(clip_norm=1e9), **settings)
    ranks = Topology.build(
        topology.device, **resolve_degrees(train_degrees(config), topology.world)
    )
    engine: Any = build_engine(kind, str(folder), config, ranks, strict=strict)
    batch = some_batch(config.router_replay is not None)
    if ranks.rank not in ranks.data_ranks:
        batch = batch.select([])
    elif config.fsdp == -1:
        batch = batch.select(range(ranks.data_ranks.index(ranks.rank), 9, len(ranks.data_ranks)))
    elif ranks.rank != ranks.data_ranks[0]:  # it computes stand-ins
        batch = batch.select([])
    grads: dict[str, Tensor] = {}

    def keep() -> None:
        for name, p in engine.trained.items():
            if p.grad is not None:
                grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
                grads[name.removeprefix("hf.")] = grad.clone()

    engine.optimizer.step = keep
    objective = policy_objective if kind == "policy" else value_objective
    metrics = engine.update(batch, objective(AlgoConfig()), 1.0)
    return metrics["router_aux_loss"], grads


CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [
        ("qwen3_moe", {"shared_prefix": True, "micro_batch_tokens": 1000}),
        ("qwen3_moe", {"shared_prefix": True, "micro_batch_tokens": 50,
                       "activation_checkpointing": "selective"}),
        ("qwen3_moe", {"shared_prefix": False, "micro_batch_tokens": 45,
                       "activation_checkpointing": True}),
        ("qwen3_moe", {"micro_batch_tokens": 50, **R3}),
        ("qwen3_moe", {"strict": True, "shared_prefix": False}),
        ("deepseek_v3", {"micro_batch_tokens": 50, "activation_checkpointing": True}),
        ("gpt_oss", {"micro_batch_tokens": 100}),
    ],
    2: [
        ("qwen3_moe", {"micro_batch_tokens": 50}),
        ("qwen3_moe", {"fsdp": 1, "offload_policy": True, "kernels": "torch"}),
        ("qwen3_moe", {"ulysses": 2, "micro_batch_tokens": 25, "activation_checkpointing": True}),
        ("deepseek_v3", {"expert_parallel": 2, "shared_prefix": True, "micro_batch_tokens": 90}),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("balanced")
    for family in FAMILIES:
        save_model(family, root / family)
    return root


@pytest.fixture(scope="module")
def wanted(models: Path) -> dict[Any, tuple[float, dict[str, Tensor]]]:
    found: dict[Any, Any] = {family: golden(models / family) for family in FAMILIES}
    return found | {"replayed": golden(models / "qwen3_moe", replays=True)}


@pytest.mark.ranks
@pytest.mark.parametrize("world", CASES)
def test_an_update_is_that_of_the_loops_however_sequences_are_cut(
    world: int, models: Path, wanted: dict[Any, tuple[float, dict[str, Tensor]]]
) -> None:
    calls = [(work, (models / family, settings)) for family, settings in CASES[world]]
    for (family, settings), results in zip(CASES[world], run_calls(world, calls), strict=True):
        metric, grads = wanted["replayed" if "router_replay" in settings else family]
        for found_metric, found in results:
            assert found_metric == pytest.approx(metric, rel=1e-5), settings
            assert found.keys() == grads.keys()
            for name, grad in grads.items():
                torch.testing.assert_close(
                    found[name].double(), grad.double(), rtol=1e-3,
                    atol=1e-4 * float(grad.abs().max()), msg=f"{family} {settings} {name}",
                )  # fmt: skip


def test_critics_adapters_and_half_precision_have_the_same_metric(
    models: Path, wanted: dict[Any, tuple[float, dict[str, Tensor]]], topology: Any
) -> None:
    """The gradient of the routers is there too, and with an adapter it comes to what is before."""
    folder, (metric, grads) = models / "qwen3_moe", wanted["qwen3_moe"]
    half, rounded = work(topology, folder, {"dtype": "bfloat16"})
    value, of_critic = work(topology, folder, {}, kind="value")
    adapted, of_adapter = work(topology, folder, {"lora": LoraConfig(rank=2)})
    assert half == pytest.approx(metric, rel=2e-2)
    assert value == pytest.approx(metric, rel=1e-5) == adapted
    gates = [name for name in grads if name.endswith("gate.weight")]
    assert len(gates) == 3
    for name in gates:
        assert of_critic[name].abs().max() > 0
        # as a whole: rounding may send a token to another expert, where its gradient is another
        assert (rounded[name].double() - grads[name]).norm() < 0.1 * grads[name].norm()
    assert any(grad.abs().max() > 0 for grad in of_adapter.values())


def test_the_loops_have_the_value_of_transformers_for_one_sequence_and_layer() -> None:
    """But for the k in f, which transformers leaves out."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = torch.randn(12, 6)
    ours = balance(logits, logits.topk(3).indices.tolist(), sigmoid=False)
    torch.testing.assert_close(3 * ours, load_balancing_loss_func((logits,), 6, 3))


def test_the_loss_falls_as_it_is_learnt(models: Path, topology: Any) -> None:
    optim = OptimConfig(lr=3e-3, weight_decay=0.0)
    config = TrainConfig(dtype="float32", router_aux_loss_coef=1.0, optim=optim)
    engine = engine_on(topology, "policy", str(models / "qwen3_moe"), config)
    batch = some_batch()
    batch.advantages = torch.zeros_like(batch.advantages)
    loss = policy_objective(AlgoConfig())
    found = [engine.update(batch, loss, 1.0)["router_aux_loss"] for _ in range(12)]
    assert found[0] > 1.25 and found[-1] < 1.1, found
    engine.logprobs(batch, 1.0)  # a pass that is not of an update adds nothing
    assert len(engine.aux_loss.totals) == 1 and not engine.aux_loss.num_seqs


class Router(nn.Module):
    """Scores a token by a function of its logits, and has one of two experts for it."""

    def __init__(self, score: Any, top_k: int) -> None:
        super().__init__()
        self.weight, self.score, self.top_k = nn.Parameter(torch.empty(4, 8)), score, top_k

    def forward(self, hidden: Tensor) -> Any:
        logits = hidden @ self.weight.T
        weights, chosen = self.score(logits).topk(self.top_k)
        return chosen, weights, logits


def test_a_router_is_read_by_what_it_returns() -> None:
    softmax = output_of(Router(lambda z: 3 * z.softmax(-1), 2), logits=2, width=8)
    assert softmax == (2, 1, 0, "softmax")
    assert output_of(Router(torch.sigmoid, 3), logits=2, width=8) == (2, 1, 0, "sigmoid")
    assert output_of(Router(lambda z: z.exp().sqrt(), 2), logits=2, width=8) is None
    assert output_of(Router(torch.sigmoid, 1), logits=2, width=8) is None  # nothing tells which
    probs = torch.rand(5, 4).softmax(-1)
    assert read((probs, *probs.topk(2)), 0) == (0, 1, 2, "none")
    assert read(probs, 0) is None and read((probs, probs), 0) is None
