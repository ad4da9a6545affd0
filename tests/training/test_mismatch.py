"""Planted faults that explain_mismatch finds, in a real vLLM and FSDP2's policy of a tiny model.

python tests/training/test_mismatch.py prints what docs/mismatch.md shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_configs import ppo_config
from tiny_models import CHARS
from training_batches import engine_on

from spmdrl.config import RolloutConfig, TrainConfig, WeightsConfig
from spmdrl.data.packing import empty_batch
from spmdrl.distributed.topology import Topology
from spmdrl.rollout.base import Request, SamplingParams
from spmdrl.training.mismatch.explain import explain
from spmdrl.training.mismatch.report import MismatchReport
from spmdrl.training.mismatch.sample import worst_sample
from spmdrl.training.roles import Trainer
from spmdrl.training.weight_sync import WeightSync

pytestmark = pytest.mark.vllm

NUM_PROMPT, NUM_TOKENS = 20, 90
# prompts in pieces of at most 48 tokens
ROLLOUT = RolloutConfig(
    dtype="float32", max_num_seqs=4, kv_cache_mib=16, engine_args={"max_num_batched_tokens": 48}
)


@dataclass
class Models:
    """Both models of a run, and the weights' way from one to the other."""

    roles: Any
    sync: WeightSync

    @property
    def vllm(self) -> Any:
        return self.roles.sampler.engine.model

    def sampled(self) -> MismatchReport:
        """Samples an answer, and explains what is worst about it."""
        draw = torch.Generator().manual_seed(3)
        prompt = torch.randint(4, len(CHARS), (NUM_PROMPT,), generator=draw).tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS - NUM_PROMPT, ignore_eos=True)
        (answer,) = self.roles.sampler.engine.generate([Request(prompt, seed=5)], params)
        batch = empty_batch(torch.tensor([NUM_TOKENS]))
        batch.token_ids = torch.tensor([*prompt, *answer.token_ids])
        batch.loss_mask[NUM_PROMPT:] = 1.0
        batch.rollout_logprobs[NUM_PROMPT:] = torch.tensor(answer.logprobs)
        actor = self.roles.actor
        batch.old_logprobs = actor.model.logprobs(batch, 1.0).logprobs
        sample = worst_sample(actor, [batch])
        assert sample is not None
        return explain(self.roles, sample, step=1)


def models_of(topology: Topology, folder: Path) -> Models:
    from spmdrl.rollout.vllm.engine import VllmEngine

    config = ppo_config(folder, rollout=ROLLOUT, actor=TrainConfig(dtype="float32"))
    engine = VllmEngine(str(folder), ROLLOUT, NUM_TOKENS, topology)
    actor = engine_on(topology, "policy", str(folder), config.actor)
    sync = WeightSync(actor, actor.topology, engine, topology, "float32", WeightsConfig())
    trainer = Trainer("actor", actor.topology, actor)
    sampler = SimpleNamespace(engine=engine, topology=topology)
    roles = SimpleNamespace(
        config=config, topology=topology, actor=trainer, sampler=sampler, weights=sync,
        sleeps=False, temperature=1.0, policy_version=0,
    )  # fmt: skip
    return Models(roles, sync)


@pytest.fixture(scope="module")
def models(topology: Topology, qwen3: Path) -> Iterator[Models]:
    made = models_of(topology, qwen3)
    made.sync.push()
    yield made
    made.roles.sampler.engine.shutdown()


@contextmanager
def stale_weight(models: Models) -> Iterator[None]:
    """The trainer learns, and a push misses one tensor."""
    missed = models.vllm.get_submodule("model.layers.1.mlp.down_proj").weight
    before = missed.detach().clone()
    weights = models.roles.actor.model.module.state_dict()
    learnt = {name: tensor + 1e-3 * torch.randn_like(tensor) for name, tensor in weights.items()}
    with torch.no_grad():
        for name, tensor in weights.items():
            tensor.copy_(learnt[name])
        models.sync.push()
        missed.copy_(before)
    yield
    models.sync.push()


@contextmanager
def other_rotary_base(models: Models) -> Iterator[None]:
    """The engine's rotary embedding has the base 500,000 in place of 10,000."""
    rotary = models.vllm.model.layers[0].self_attn.rotary_emb
    table = rotary.cos_sin_cache.clone()
    base, rotary.base = rotary.base, 500_000.0
    rotary.cos_sin_cache.copy_(rotary._compute_cos_sin_cache())
    yield
    rotary.base = base
    rotary.cos_sin_cache.copy_(table)


@contextmanager
def other_scale(models: Models) -> Iterator[None]:
    """The engine multiplies scores by another number."""
    layers = [layer.self_attn.attn.impl for layer in models.vllm.model.layers]
    scales = [layer.scale for layer in layers]
    for layer in layers:
        layer.scale = 0.125
    yield
    for layer, scale in zip(layers, scales, strict=True):
        layer.scale = scale


def test_sound(models):
    r = models.sampled()
    print(r.text())


@pytest.mark.parametrize("fault", [stale_weight, other_rotary_base, other_scale])
def test_f(models, fault):
    with fault(models):
        r = models.sampled()
    print(r.text())
    assert 0
