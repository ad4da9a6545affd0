"""Adapters with engine megatron: trained as FSDP2 trains them, in every layout."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from test_megatron_engine import (
    engine_of,
    loss_of,
    of_single_experts,
    save_models,
    share_of,
    weights_of,
)
from training_batches import CONFIG, LENS, whole_batch

from spmdrl.config import LoraConfig, OptimConfig

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

LORA = LoraConfig(rank=5, alpha=7, use_rslora=True)  # an odd rank, no power of 2 as scale
SOME = replace(LORA, target_modules=("k_proj", "up_proj", "down_proj", "layers.1.self_attn.o_proj"))
ONLY_K = replace(LORA, target_modules=("k_proj",))
TRAIN = replace(CONFIG, lora=LORA, optim=OptimConfig(lr=3e-3, weight_decay=0.1))


def case(model, kind, ranks, lora=LORA, **layout):
    return model, kind, ranks, replace(TRAIN, engine="megatron", lora=lora, **layout)


LAYOUTS = [
    case("qwen3", "policy", 4, tensor_parallel=2, pipeline_parallel=2),
    case("qwen3", "value", 2, tensor_parallel=2, sequence_parallel=True,
         activation_checkpointing=True),
    case("qwen3", "policy", 4),
    case("qwen3", "policy", 2, lora=SOME, pipeline_parallel=2, virtual_pipeline=2,
         activation_checkpointing=True),
    case("qwen2", "policy", 4, lora=SOME, tensor_parallel=2, sequence_parallel=True,
         context_parallel=2),
    # a key-value head on two ranks: one of them holds keys alone, the other values alone
    case("odd", "policy", 2, tensor_parallel=2, micro_batch_tokens=30),
    case("odd", "policy", 2, lora=ONLY_K, tensor_parallel=2, sequence_parallel=True),
    case("moe", "policy", 4, tensor_parallel=2, sequence_parallel=True, expert_parallel=2),
]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return save_models(tmp_path_factory.mktemp("models"))


def results_on(topology, models, cases):
    """Of each case its sequences, two updates' metrics, all weights, merged and apart, then, and
    the logprobs with adapters and without."""
    found = []
    for case in cases:
        engine = engine_of(topology, models, case)
        if engine is None:
            found.append(None)
            continue
        batch = whole_batch().select(share_of(engine))
        start = weights_of(engine)
        metrics = [engine.update(batch, loss_of(case[1]), temperature=0.8) for _ in range(2)]
        looked = []
        if case[1] == "policy":
            looked = [e.logprobs(batch, 0.8).logprobs for e in (engine, engine.base())]
        found.append((share_of(engine), looked, metrics, start, weights_of(engine)))
    return found


def test_adapters_learn_as_fsdps_in_every_layout(models):
    of = {(*layout[:2], layout[3].lora): replace(TRAIN, lora=layout[3].lora) for layout in LAYOUTS}
    references = [(*key[:2], 1, config) for key, config in of.items()]
    ranks = run_ranks(4, results_on, models, references + LAYOUTS, timeout_s=240)
    base = dict(zip(of, ranks[0], strict=False))
    for number, layout in enumerate(LAYOUTS, len(of)):
        results = [rank[number] for rank in ranks if rank[number] is not None]
        assert sorted(seq for mine, *_ in results for seq in mine) == list(range(len(LENS))), layout
        for result in results:
            assert_same(result, base[*layout[:2], layout[3].lora], layout)


def assert_same(result, reference, layout):
    cu_seqlens = whole_batch().cu_seqlens.tolist()
    mine, looked, metrics, start, weights = result
    _, want_looked, want_metrics, want_start, want_weights = reference
    rows = [row for seq in mine for row in range(cu_seqlens[seq], cu_seqlens[seq + 1])]
    for got, want in zip(metrics, want_metrics, strict=True):
        assert got == pytest.approx(want, rel=1e-5, abs=1e-6), layout
    for got, want in zip(looked, want_looked, strict=True):
        torch.testing.assert_close(got, want[rows], rtol=0, atol=1e-5, msg=str(layout))
    moved = 0
    want_start, want_weights = (of_single_experts(w) for w in (want_start, want_weights))
    assert weights.keys() == want_weights.keys()
    for name, want in want_weights.items():
        message = f"{layout} {name}"
        torch.testing.assert_close(start[name], want_start[name], rtol=0, atol=0, msg=message)
        away = float((weights[name] - want).abs().max())
        assert away <= 2e-5, (away, message)  # Adam divides by roots of tiny second moments
        moved += not torch.equal(weights[name], start[name])
    assert moved
