"""What single tokens add to the gradient of an update, beside autograd on the whole model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.config import AlgoConfig, LoraConfig
from spmdrl.types import Batch

pytestmark = [pytest.mark.ranks, pytest.mark.strict_nccl]
ALGO = AlgoConfig(entropy_coef=0.01)
TEMPERATURE = 0.8


def small_batch() -> Batch:
    """Three sequences of 18, 3 and 7 tokens. The policy has moved since it sampled them, so that
    some tokens are clipped."""
    batch = whole_batch().select([6, 5, 2])
    n = batch.num_tokens
    draw = torch.Generator().manual_seed(1)
    batch.loss_mask = (torch.rand(n, generator=draw) > 0.3).float()
    batch.loss_mask[batch.cu_seqlens[:-1].long()] = 0
    batch.advantages = torch.randn(n, generator=draw) * batch.loss_mask
    batch.rollout_logprobs = (-4.3 - torch.rand(n, generator=draw)) * batch.loss_mask
    batch.old_logprobs = batch.rollout_logprobs
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def measured_on(topology: Any, model: str, config: Any, seqs: list[int]) -> Any:
    """The token gradients of these sequences, each in turn, and the update that comes after."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.engines.fsdp.token_gradients import token_gradients

    engine = engine_on(topology, "policy", model, config)
    own = list(range(topology.rank, 3, topology.world))
    batch, loss_fn = small_batch().select(own), policy_objective(ALGO)
    heard: list[int] = []
    found = [
        token_gradients(
            engine, batch, own.index(seq) if seq in own else None, loss_fn, TEMPERATURE,
            still_going=partial(heard.append, seq),
        )
        for seq in seqs
    ]  # fmt: skip
    assert [heard.count(seq) for seq in seqs] == [len(each.positions) for each in found]
    assert token_gradients(engine, batch, None, loss_fn, TEMPERATURE) is None
    first = engine.update(batch, loss_fn, TEMPERATURE)
    return found, first, engine.update(batch, loss_fn, TEMPERATURE)["loss"]


def plain_on(topology: Any, model: str, config: Any) -> Any:
    """Two updates without anything measured."""
    from spmdrl.algo.objectives import policy_objective

    engine = engine_on(topology, "policy", model, config)
    batch = small_batch().select(list(range(topology.rank, 3, topology.world)))
    return [engine.update(batch, policy_objective(ALGO), TEMPERATURE) for _ in range(2)]


def by_autograd(model: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(gradient of the update, that of each unmasked token by sequence), by a loss as a plain sum
    over the tokens of each sequence."""
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = list(network.parameters())
    batch = small_batch()
    by_sequence = []
    for seq in range(3):
        own = batch.select([seq])
        logits = network(own.token_ids[None]).logits[0, :-1] / TEMPERATURE
        table = logits.log_softmax(-1)
        gradients = []
        for t in (own.loss_mask > 0).nonzero()[:, 0].tolist():
            logprob = table[t - 1, own.token_ids[t]]
            entropy = -(table[t - 1].exp() * table[t - 1]).sum()
            ratio, advantage = (logprob - own.old_logprobs[t]).exp(), own.advantages[t]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            loss = torch.minimum(loss, -advantage * 3) if advantage < 0 else loss
            loss = own.loss_weights[t] * (loss - ALGO.entropy_coef * entropy)
            parts = torch.autograd.grad(loss, parameters, retain_graph=True)
            gradients.append(torch.cat([part.flatten().double() for part in parts]))
        by_sequence.append(torch.stack(gradients))
    return torch.cat(by_sequence).sum(0), by_sequence


def test_tokens_add_what_autograd_says(tmp_path):
    model = str(save_qwen3(tmp_path / "model", tie_word_embeddings=False))
    lora = replace(CONFIG, lora=LoraConfig(rank=4))
    one, with_lora = run_calls(
        1, [(measured_on, (model, CONFIG, [0, 1, 2])), (measured_on, (model, lora, [0, 1, 2]))]
    )
    two, plain, two_lora = run_calls(2, [
        (measured_on, (model, CONFIG, [0, 1, 2])), (plain_on, (model, CONFIG)),
        (measured_on, (model, lora, [0, 1, 2])),
    ])  # fmt: skip
    whole, by_sequence = by_autograd(model)
    for found, update, _ in (*one, *two):
        assert update["grad_norm"] == pytest.approx(float(whole.norm()), rel=1e-4)
        for measured, gradients in zip(found, by_sequence, strict=True):
            assert measured.whole == pytest.approx(update["grad_norm"], rel=1e-6)
            norms, shares = gradients.norm(dim=1), gradients @ whole / whole.norm()
            torch.testing.assert_close(
                torch.tensor(measured.norms, dtype=torch.float64), norms, rtol=1e-3, atol=1e-6
            )
            torch.testing.assert_close(
                torch.tensor(measured.shares, dtype=torch.float64), shares, rtol=1e-3, atol=1e-6
            )
    for found, update, _ in (*one, *two, *with_lora, *two_lora):
        total = sum(share for measured in found for share in measured.shares)
        assert total == pytest.approx(update["grad_norm"], rel=1e-5)
    clipped = [norm for measured in one[0][0] for norm in measured.norms]
    assert min(clipped) < 0.2 * max(clipped)
    for a, b in zip(with_lora[0][0], two_lora[0][0], strict=True):  # shards of adapters
        assert a.positions == b.positions and a.norms == pytest.approx(b.norms, rel=1e-3)
    assert [plain[0][0], plain[0][1]["loss"]] == [two[0][1], two[0][2]]  # nothing was left behind
