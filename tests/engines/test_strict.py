"""Strict engines against the strict trainer's model, bit for bit; what cannot be strict is refused.

One process; whole runs are in training/test_strict_runs.py.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CHARS, save_qwen3, save_tokenizer
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    CorrectionConfig,
    DataConfig,
    PpoConfig,
    RolloutConfig,
    TrainConfig,
)
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp.model import TokenPolicy, build_model
from spmdrl.engines.fsdp.packed_rows import Packing
from spmdrl.engines.fsdp.strict import make_strict
from spmdrl.rollout.base import Completion, Request, SamplingParams
from spmdrl.rollout.hf.engine import HfEngine
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.strict import LogprobsDiffer, check_strict_model, require_equal

CPU = torch.device("cpu")
PARAMS = SamplingParams(temperature=0.7, max_tokens=45, ignore_eos=True)
CONFIG = RolloutConfig(dtype="float32", max_num_seqs=7, kv_cache_mib=32)


def save_qwen2(folder: Path) -> Path:
    """Biases, no norm of queries and keys, a head of its own; sizes that no vector divides."""
    torch.manual_seed(1)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(CHARS) + 4, hidden_size=96, intermediate_size=76, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=512, eos_token_id=2,
        tie_word_embeddings=False,
    ))  # fmt: skip
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


EXPERTS = {
    "vocab_size": len(CHARS), "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "eos_token_id": 2,
    "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def save_experts(folder: Path, config: Any) -> Path:
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data = torch.randn_like(weight) * 0.1 + (weight.ndim == 1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_qwen3_moe(folder: Path) -> Path:
    """Weights of the experts that are not divided by their sum, and a layer without experts."""
    return save_experts(folder, Qwen3MoeConfig(
        **EXPERTS, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=48,
        intermediate_size=96, norm_topk_prob=False, mlp_only_layers=[1],
    ))  # fmt: skip


def save_mixtral(folder: Path) -> Path:
    return save_experts(folder, MixtralConfig(
        **EXPERTS, num_local_experts=6, num_experts_per_tok=2, intermediate_size=64,
        sliding_window=None,
    ))  # fmt: skip


def requests(count: int) -> list[Request]:
    """Prompts of 1 to 90 tokens, some of which share their first 70."""
    chosen = random.Random()
    shared = [chosen.randrange(4, len(CHARS)) for _ in range(70)]
    drawn = [
        [chosen.randrange(4, len(CHARS)) for _ in range(chosen.choice([1, 2, 20, 31, 32, 33]))]
        for _ in range(count)
    ]
    return [
        Request(shared * (i % 3 == 0) + tokens, chosen.randrange(2**63))
        for i, tokens in enumerate(drawn)
    ]


def policy(folder: Path, strict: bool, dtype: torch.dtype = torch.float32) -> TokenPolicy:
    built = TokenPolicy(build_model(str(folder), full=True))
    if strict:
        make_strict(built, dtype, CPU)
    return cast(built, dtype)


def cast(built: TokenPolicy, dtype: torch.dtype) -> TokenPolicy:
    """As sharding does: parameters alone, no buffers."""
    for weight in built.parameters():
        weight.data = weight.data.to(dtype)
    return built


@torch.no_grad()
def packed_logprobs(
    model: TokenPolicy, asked: list[Request], answers: list[Completion]
) -> list[list[float]]:
    """All sequences in one packed row of tokens."""
    lens = [len(a.prompt_ids) + len(c.token_ids) for a, c in zip(asked, answers, strict=True)]
    ids = [[*a.prompt_ids, *c.token_ids] for a, c in zip(asked, answers, strict=True)]
    starts = torch.tensor([0, *lens]).cumsum(0).tolist()
    rows = [torch.arange(start + len(a.prompt_ids), start + n)
            for start, n, a in zip(starts, lens, asked, strict=False)]  # fmt: skip
    places = torch.cat([torch.arange(n) for n in lens])
    tokens = torch.tensor([token for row in ids for token in row])
    chosen = torch.cat(rows)
    found = model(tokens, places, Packing.build(torch.tensor(lens), CPU), chosen - 1,
                  tokens[chosen], PARAMS.temperature)  # fmt: skip
    return [part.tolist() for part in found[0].split([len(r) for r in rows])]


def interrupted(engine: Any, asked: list[Request]) -> list[Completion]:
    """All are preempted now and then, and their tokens so far prefilled anew."""
    engine.forget_prefixes()
    ids, ended, steps = engine.add(asked, PARAMS), {}, 0
    while len(ended) < len(ids):
        ended.update(engine.step())
        steps += 1
        if steps % 17 == 0:
            engine.forget_prefixes()
    return [ended[id] for id in ids]


@pytest.mark.vllm
@pytest.mark.parametrize("save", [save_qwen3, save_qwen2, save_qwen3_moe, save_mixtral])
def test_vllm_gives_the_trainers_bits(save: Any, tmp_path: Path, topology: Topology) -> None:
    """Whatever is computed with a sequence: few or many others, its prefix from the cache or not, a
    prefill in chunks, a preemption in its middle. And tokens are the same then."""
    folder, asked = save(tmp_path), requests(11)
    engine = VllmEngine(str(folder), CONFIG, 200, topology, strict=True)
    answers = engine.generate(asked, PARAMS)
    given = [c.logprobs for c in answers]
    model = policy(folder, strict=True)
    assert packed_logprobs(model, asked, answers) == given
    order = random.sample(range(11), 11)
    mixed = packed_logprobs(model, [asked[i] for i in order], [answers[i] for i in order])
    assert mixed == [given[i] for i in order]
    plain = policy(folder, strict=False)
    assert packed_logprobs(plain, asked, answers) != given  # the comparison can tell
    engine.core.scheduler.max_num_scheduled_tokens = 29  # prompts are prefilled in chunks
    assert interrupted(engine, asked) == answers
    assert [engine.generate([request], PARAMS)[0] for request in asked[:2]] == answers[:2]
    engine.shutdown()


@pytest.mark.vllm
@pytest.mark.parametrize("experts", [False, True])
def test_bfloat16_and_greedy_answers(
    qwen3: Path, experts: bool, topology: Topology, tmp_path: Path
) -> None:
    qwen3 = save_qwen3_moe(tmp_path) if experts else qwen3
    asked, greedy = requests(5), replace(PARAMS, temperature=0.0)
    engine = VllmEngine(str(qwen3), replace(CONFIG, dtype="bfloat16"), 200, topology, strict=True)
    answers = engine.generate(asked, PARAMS)
    model = policy(qwen3, True, torch.bfloat16)
    assert packed_logprobs(model, asked, answers) == [c.logprobs for c in answers]
    together = engine.generate(asked, greedy)
    assert [engine.generate([request], greedy)[0] for request in asked[:2]] == together[:2]
    engine.shutdown()


@pytest.mark.engine
@pytest.mark.parametrize("experts", [False, True])
def test_the_transformers_engine_gives_the_trainers_bits(
    qwen3: Path, experts: bool, topology: Topology, tmp_path: Path
) -> None:
    qwen3 = save_mixtral(tmp_path) if experts else qwen3
    asked = requests(6)
    for num_seqs in (2, 6):
        config = replace(CONFIG, engine="hf", max_num_seqs=num_seqs)
        engine = HfEngine(str(qwen3), config, 200, topology, strict=True)
        answers = engine.generate(asked, PARAMS)
        found = packed_logprobs(policy(qwen3, strict=True), asked, answers)
        assert found == [c.logprobs for c in answers]
        engine.shutdown()


@pytest.mark.parametrize("save", [save_qwen3_moe, save_mixtral])
def test_gradients_of_experts_are_those_of_the_ordinary_layers(save: Any, tmp_path: Path) -> None:
    folder, tokens = save(tmp_path), torch.randint(4, len(CHARS), (60,))
    found = []
    for strict in (False, True):
        model = policy(folder, strict)
        packing = Packing.build(torch.tensor([35, 25]), CPU)
        places = torch.cat([torch.arange(35), torch.arange(25)])
        states = torch.cat([torch.arange(34), torch.arange(35, 59)])
        logprobs, _, _ = model(tokens, places, packing, states, tokens[states + 1], 1.0)
        (logprobs * torch.linspace(-1, 1, 58)).sum().backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert any("gate.weight" in name for name in found[0])
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-3, atol=1e-4, msg=name)


def config_of(model: Path, **changes: Any) -> PpoConfig:
    base = PpoConfig(
        model=str(model), data=DataConfig(train="-", prompts_per_step=4, max_prompt_tokens=20),
        reward="gsm8k", strict=True, actor=TrainConfig(dtype="float32"),
        rollout=RolloutConfig(dtype="float32", max_tokens=20),
    )  # fmt: skip
    return replace(base, **changes)


def test_what_cannot_be_strict_is_refused(qwen3: Path) -> None:
    good = config_of(qwen3)
    check(good, 2)
    rollout = good.rollout
    cases: list[tuple[str, dict[str, Any]]] = [
        ("rollout.dtype='bfloat16' and", {"rollout": replace(rollout, dtype="bfloat16")}),
        ("min_tokens=3", {"rollout": replace(rollout, min_tokens=3),
                          "algo": AlgoConfig(correction=CorrectionConfig(level="token"))}),
        ("tensor_parallel=2", {"rollout": replace(rollout, tensor_parallel=2)}),
        ("Megatron", {"actor": TrainConfig(dtype="float32", engine="megatron")}),
        ("top_k=5", {"rollout": replace(rollout, top_k=5),
                     "algo": AlgoConfig(correction=CorrectionConfig(level="token"))}),
        ("min_p=0.1", {"rollout": replace(rollout, min_p=0.1),
                       "algo": AlgoConfig(correction=CorrectionConfig(level="token"))}),
        ("repetition_penalty=1.1", {
            "rollout": replace(rollout, repetition_penalty=1.1),
            "algo": AlgoConfig(correction=CorrectionConfig(level="token"))}),
        ("off_policy_mask_threshold=0.5", {"algo": AlgoConfig(off_policy_mask_threshold=0.5)}),
        ("enforce_eager=False", {"rollout": replace(rollout, enforce_eager=False)}),
        ("actor.shared_prefix=True cannot be: with strict=True", {
            "actor": replace(good.actor, shared_prefix=True)}),
        ("and 2 updates", {"algo": AlgoConfig(mini_batches=2,
                                              correction=CorrectionConfig(bypass=True))}),
    ]  # fmt: skip
    for words, changes in cases:
        with pytest.raises(ConfigError, match=words):
            check(config_of(qwen3, **changes), 2)
        if "engine" not in words and words != "Megatron":
            check(replace(config_of(qwen3, **changes), strict=False), 2)


def test_layers_without_a_form_are_named() -> None:
    moe = Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_experts=4,
        num_attention_heads=2, num_key_value_heads=1, moe_intermediate_size=16,
        decoder_sparse_step=1,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"mlp\.experts \(Qwen2MoeExperts\)"):
        check_strict_model(moe, "vllm")
    dense: Any = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ConfigError, match=r"rotary_emb \(Qwen2RotaryEmbedding\)"):
        check_strict_model(Qwen2Config(num_hidden_layers=1, rope_parameters=dense), "vllm")


def test_a_difference_ends_the_run() -> None:
    require_equal({"actor/logprob_diff_max": 0.0, "staleness/max": 0.0}, 3)
    require_equal({"actor/logprob_diff_max": 0.1, "staleness/max": 1.0}, 3)
    require_equal({"rollout/loss_tokens": 0.0}, 3)
    for value in (1e-7, float("nan")):
        with pytest.raises(LogprobsDiffer, match=f"in step 3 .* by {value:g}"):
            require_equal({"actor/logprob_diff_max": value, "staleness/max": 0.0}, 3)
