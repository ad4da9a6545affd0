"""Planted faults that explain_mismatch finds, in a real vLLM and FSDP2's policy of tiny models.

With pytest's option -s each prints what docs/mismatch.md shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plan_configs import ppo_config
from tiny_models import CHARS, save_qwen3_moe
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
from spmdrl.types import Batch

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

    def explained(self, changed: Callable[[Batch], None] = lambda batch: None) -> MismatchReport:
        """Samples an answer, and explains what is worst about it. changed: changes it first."""
        draw = torch.Generator().manual_seed(3)
        prompt = torch.randint(4, len(CHARS), (NUM_PROMPT,), generator=draw).tolist()
        params = SamplingParams(max_tokens=NUM_TOKENS - NUM_PROMPT, ignore_eos=True)
        (answer,) = self.roles.sampler.engine.generate([Request(prompt, seed=5)], params)
        batch = empty_batch(torch.tensor([NUM_TOKENS]))
        batch.token_ids = torch.tensor([*prompt, *answer.token_ids])
        batch.loss_mask[NUM_PROMPT:] = 1.0
        batch.rollout_logprobs[NUM_PROMPT:] = torch.tensor(answer.logprobs)
        changed(batch)
        actor = self.roles.actor
        batch.old_logprobs = actor.model.logprobs(batch, 1.0).logprobs
        sample = worst_sample(actor, [batch])
        assert sample is not None
        report = explain(self.roles, sample, step=1)
        text = report.text()
        print(f"\n{text}")
        assert 10 <= len(text.splitlines()) <= 30
        assert max(map(len, text.splitlines())) <= 100
        return report


def models_of(topology: Topology, folder: Path, dtype: Any = "float32") -> Models:
    from spmdrl.rollout.vllm.engine import VllmEngine

    rollout = replace(ROLLOUT, dtype=dtype)
    config = ppo_config(folder, rollout=rollout, actor=TrainConfig(dtype=dtype))
    engine = VllmEngine(str(folder), rollout, NUM_TOKENS, topology)
    actor = engine_on(topology, "policy", str(folder), config.actor)
    sync = WeightSync(actor, actor.topology, engine, topology, dtype, WeightsConfig())
    trainer = Trainer("actor", actor.topology, actor)
    sampler = SimpleNamespace(engine=engine, topology=topology)
    roles = SimpleNamespace(
        config=config, topology=topology, actor=trainer, sampler=sampler, weights=sync,
        sleeps=False, temperature=1.0, policy_version=0, critic=None, weight_bytes=0,
    )  # fmt: skip
    return Models(roles, sync)


@pytest.fixture(scope="module")
def models(topology: Topology, qwen3: Path) -> Iterator[Models]:
    made = models_of(topology, qwen3)
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


def test_the_first_flipped_expert_is_named(topology: Topology, tmp_path: Path) -> None:
    """In bfloat16 pairs of experts have nearly the same scores. The first test of the file: vLLM's
    groups of an engine that stands would have no experts.
    """
    made = models_of(topology, twin_experts(tmp_path), "bfloat16")
    found = made.explained()
    made.roles.sampler.engine.shutdown()
    assert found.divergence is not None and found.divergence.kind == "experts"
    flip = found.divergence.flip
    assert flip is not None and flip.router == f"model.layers.{flip.layer}.mlp.gate"
    assert len(flip.engine) == len(flip.trainer) == 1
    assert "The first flipped expert: in layer" in found.verdict[0]
    assert "rounding of bfloat16 explains the flip" in found.verdict[1]


def twin_experts(folder: Path) -> Path:
    """Each router has four pairs of experts whose scores differ by rounding."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(save_qwen3_moe(folder), dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            gate = layer.mlp.gate.weight
            gate[1::2] = gate[::2] + 1e-4 * torch.randn_like(gate[::2])
    model.save_pretrained(folder)
    return folder


def test_sound_models_part_by_rounding_alone(models: Models) -> None:
    found = models.explained()
    assert found.divergence is None and len(found.verdict) == 1
    assert found.verdict[0].startswith("Nothing parts by more than rounding")
    assert "all 24 tensors" in found.weights and found.token["difference"] < 1e-5
    names = [point.name for point in found.points]
    for layer in ("model.layers.0", "model.layers.1"):
        parts = ("input_layernorm", "self_attn.qkv_proj", "self_attn.rotary_emb", "self_attn.attn",
                 "self_attn.o_proj", "post_attention_layernorm", "mlp")  # fmt: skip
        at = [names.index(f"{layer}.{part}") for part in parts]
        assert at == sorted(at) and layer in names
    assert all(point.returned.relative < found.rounding / 4 for point in found.points)
    said = found.token["logprobs"]
    assert said["sampled"] == pytest.approx(said["engine now"], abs=1e-5)


def test_a_weight_that_a_push_missed_is_named(models: Models) -> None:
    with stale_weight(models):
        found = models.explained()
    assert found.verdict[0].startswith("vLLM does not hold the trainer's weights")
    assert "model.layers.1.mlp.down_proj.weight differs" in found.verdict[0]
    assert first_of(found) == ("output", "model.layers.1.mlp.down_proj")


def test_another_rotary_base_is_named(models: Models) -> None:
    with other_rotary_base(models):
        found = models.explained()
    assert first_of(found) == ("output", "model.layers.0.self_attn.rotary_emb")
    assert "the rotary base is 5e+05 in the engine, 1e+04 in the trainer" in found.verdict[1]
    assert "all 24 tensors" in found.weights


def test_another_attention_scale_is_named(models: Models) -> None:
    with other_scale(models):
        found = models.explained()
    assert first_of(found) == ("output", "model.layers.0.self_attn.attn")
    assert "scores by 0.125, the trainer by 0.176777" in found.verdict[1]


def test_what_only_the_sampling_computed_is_told_apart(models: Models) -> None:
    """The modules agree, and the log-probabilities that came with the answer are others."""

    def changed(batch: Batch) -> None:
        batch.rollout_logprobs[50] -= 0.3
        batch.policy_version[60:70] = -1

    found = models.explained(changed)
    assert found.divergence is None and found.token["place"] == 50
    assert "agrees with the trainer when it reads the whole sequence" in found.verdict[0]
    assert found.verdict[-1].startswith("10 of its tokens were chosen with weights of an earlier")


def test_another_head_is_named(models: Models) -> None:
    models.vllm.logits_processor.scale = 1.1
    found = models.explained()
    models.vllm.logits_processor.scale = 1.0
    assert found.divergence is None and "is the LM head" in found.verdict[0]


def first_of(found: MismatchReport) -> tuple[str, str]:
    assert found.divergence is not None
    return found.divergence.kind, found.divergence.name
