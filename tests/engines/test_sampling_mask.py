"""Log-probabilities of the tokens that sampling left (rollout.keep_sampling_mask), against loops in
float64 over these tokens alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3
from torch import Tensor
from training_batches import pair_up

from spmdrl.algo.objectives import policy_objective
from spmdrl.config import AlgoConfig, LoraConfig, TrainConfig
from spmdrl.data.packing import empty_batch
from spmdrl.engines.policy_head import head_results
from spmdrl.types import Batch

LENS = [9, 14, 5, 11, 8, 3]
PROMPT, WIDTH, VOCAB = 4, 6, 90
ENTROPY_COEF, TEMPERATURE = 0.3, 0.7


def by_loops(logits: list[float], target: int, kept: list[int]) -> Any:
    """Log-probability of the target, entropy and sum of squares, of these logits alone. logits:
    float64 tensors, so that gradients flow.
    """
    weights = {v: torch.exp(logits[v]) for v in kept}
    total = sum(weights.values())
    probs = {v: weight / total for v, weight in weights.items()}
    entropy = -sum(p * torch.log(p) for p in probs.values())
    return torch.log(probs[target]), entropy, sum(p * p for p in probs.values())


def some_supports(tokens: Tensor, width: int, vocab: int, draw: torch.Generator) -> Tensor:
    """(n, width) int32: for each token some ids, it among them, ascending; 1 to `width` of them."""
    found = torch.full((len(tokens), width), -1, dtype=torch.int32)
    for row, token in zip(found, tokens.tolist(), strict=True):
        others = [v for v in torch.randperm(vocab, generator=draw).tolist() if v != token]
        count = int(torch.randint(width, (1,), generator=draw))
        row[: count + 1] = torch.tensor(sorted([token, *others[:count]]))
    return found


@pytest.mark.parametrize(("with_bias", "softcap"), [(False, None), (True, 3.0)])
def test_values_and_gradients_are_those_of_a_loop_over_the_support(with_bias, softcap):
    """One row's token is the only one that was left: it is sure, and nothing flows."""
    draw = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 8, generator=draw, dtype=torch.float64) for n in (11, 37))
    bias = torch.randn(37, generator=draw, dtype=torch.float64) if with_bias else None
    inputs = [t.requires_grad_() for t in (hidden, weight, bias) if t is not None]
    targets = torch.randint(0, 37, (11,), generator=draw)
    support = some_supports(targets, 7, 37, draw)
    support[0, :2] = torch.tensor([targets[0], -1])
    support[0, 1:] = -1
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / TEMPERATURE
    rows = [
        by_loops(row, token, [v for v in kept if v >= 0])
        for row, token, kept in zip(logits, targets.tolist(), support.tolist(), strict=True)
    ]
    want = [torch.stack(column) for column in zip(*rows, strict=True)]
    got = head_results(
        hidden, weight, targets, TEMPERATURE, True, 0, None, support.long(), bias=bias,
        softcap=softcap,
    )  # fmt: skip
    up = torch.randn(2, 11, generator=draw, dtype=torch.float64)

    def gradients(results: Any) -> tuple[Tensor, ...]:
        loss = (up[0] * results[0] + up[1] * results[1]).sum()
        return torch.autograd.grad(loss, inputs, retain_graph=True)

    for a, b in zip((*got, *gradients(got)), (*want, *gradients(want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
    assert got[0][0].item() == 0 and got[1][0].item() == 0
    assert gradients(got)[0][0].abs().max() < 1e-12


def some_batch() -> Batch:
    """Three groups of two answers to one prompt each; masked tokens have no support."""
    draw = torch.Generator().manual_seed(0)
    batch = empty_batch(torch.tensor(LENS), support_width=WIDTH)
    batch.token_ids = torch.randint(3, VOCAB, (sum(LENS),), generator=draw)
    pair_up(batch, PROMPT, [batch.token_ids])
    supports = some_supports(batch.token_ids, WIDTH, VOCAB, draw)
    batch.support_ids = supports.masked_fill(batch.loss_mask[:, None] == 0, -1)
    batch.advantages = torch.randn(sum(LENS), generator=draw) * batch.loss_mask
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def reference(folder: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logprobs, entropy and sums of squares of all tokens, each sequence by itself, and the norm of
    the loss's gradient; in float64.
    """
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    batch, loss = some_batch(), torch.zeros((), dtype=torch.float64)
    found = torch.zeros(3, batch.num_tokens, dtype=torch.float64)
    for start, end in zip(
        batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True
    ):
        logits = model(input_ids=batch.token_ids[None, start:end]).logits[0] / TEMPERATURE
        for at in range(start, end):
            if batch.loss_mask[at] == 0:
                continue
            kept = [v for v in batch.support_ids[at].tolist() if v >= 0]
            results = by_loops(logits[at - start - 1], int(batch.token_ids[at]), kept)
            for row, value in zip(found, results, strict=True):
                row[at] = value.detach()
            gain = results[0] * batch.advantages[at] + ENTROPY_COEF * results[1]
            loss = loss - gain * batch.loss_weights[at]
    loss.backward()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
    return *found.float(), norm


def work(topology: Any, folder: Path, settings: dict[str, Any]) -> tuple[Any, float, Tensor]:
    """(PolicyStats, gradient norm of an update, logprobs of the base of an adapter)."""
    from spmdrl.distributed.topology import Topology, resolve_degrees, train_degrees
    from spmdrl.engines.build import build_engine

    torch.set_num_threads(1)
    config = TrainConfig(dtype="float32", micro_batch_tokens=20, **settings)
    ranks = Topology.build(
        topology.device, **resolve_degrees(train_degrees(config), topology.world)
    )
    engine: Any = build_engine("policy", str(folder), config, ranks)
    is_given = ranks.rank == ranks.data_ranks[0]
    batch = some_batch() if is_given else some_batch().select([])
    seen = engine.logprobs(batch, TEMPERATURE, pi_squared=True)
    base = engine.base().logprobs(batch, TEMPERATURE).logprobs if config.lora else seen.logprobs
    batch.old_logprobs = seen.logprobs
    objective = policy_objective(AlgoConfig(entropy_coef=ENTROPY_COEF))
    return seen, engine.update(batch, objective, TEMPERATURE)["grad_norm"], base


CASES: dict[int, list[dict[str, Any]]] = {
    1: [
        {"shared_prefix": True},
        {"shared_prefix": False, "activation_checkpointing": True, "kernels": "torch"},
        {"lora": LoraConfig(rank=2)},
    ],
    2: [
        {"ulysses": 2, "activation_checkpointing": True},
        {"fsdp": 2},  # rank 1 computes stand-ins
    ],
}
MEGATRON: list[dict[str, Any]] = [
    {"tensor_parallel": 2, "sequence_parallel": True},  # each rank has half of the vocabulary
    {"pipeline_parallel": 2},
    {"context_parallel": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("masked"), initializer_range=0.3)


def compare(folder: Path, world: int, cases: list[dict[str, Any]]) -> None:
    *wanted, norm = reference(folder)
    calls = [(work, (folder, settings)) for settings in cases]
    for settings, results in zip(cases, run_calls(world, calls), strict=True):
        seen, grad_norm, base = max(results, key=lambda result: len(result[2]))
        for found, want in zip(seen[:3], wanted, strict=True):
            torch.testing.assert_close(found, want, rtol=0, atol=2e-5, msg=str(settings))
        torch.testing.assert_close(base, wanted[0], rtol=0, atol=2e-5)
        if "lora" not in settings:
            assert grad_norm == pytest.approx(float(norm), rel=1e-4), settings


@pytest.mark.ranks
@pytest.mark.parametrize("world", CASES)
def test_engine_fsdp_computes_the_same_as_a_loop(world, folder):
    compare(folder, world, CASES[world])


@pytest.mark.ranks
@pytest.mark.megatron
def test_engine_megatron_computes_the_same_as_a_loop(folder):
    compare(folder, 2, [{"engine": "megatron", **case} for case in MEGATRON])
