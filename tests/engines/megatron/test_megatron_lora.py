"""Adapters with engine megatron: trained as FSDP2 trains them, in every layout."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from test_megatron_engine import engine_of, loss_of, save_models, share_of, weights_of
from training_batches import CONFIG, LENS, whole_batch

from spmdrl.config import LoraConfig, OptimConfig

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

LORA = LoraConfig(rank=5, alpha=7, use_rslora=True)  # an odd rank, no power of 2 as scale
SOME = replace(LORA, target_modules=("k_proj", "up_proj", "down_proj", "layers.1.self_attn.o_proj"))
TRAIN = replace(CONFIG, lora=LORA, optim=OptimConfig(lr=3e-3, weight_decay=0.1))


def case(model, kind, ranks, lora=LORA, **layout):
    return model, kind, ranks, replace(TRAIN, engine="megatron", lora=lora, **layout)


LAYOUTS = [
    case("qwen3", "policy", 4, tensor_parallel=2, pipeline_parallel=2),
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
    references = [(*layout[:2], 1, replace(layout[3], **OF_FSDP)) for layout in LAYOUTS]
    ranks = run_ranks(4, results_on, models, references + LAYOUTS, timeout_s=240)
    for number, layout in enumerate(LAYOUTS):
        results = [rank[len(LAYOUTS) + number] for rank in ranks]
        results = [found for found in results if found is not None]
        assert sorted(seq for mine, *_ in results for seq in mine) == list(range(len(LENS))), layout
        for result in results:
            assert_same(result, ranks[0][number], layout)


OF_FSDP = {
    "engine": "fsdp", "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1,
    "sequence_parallel": False, "virtual_pipeline": 1, "expert_parallel": 1,
    "activation_checkpointing": False, "micro_batch_tokens": CONFIG.micro_batch_tokens,
}  # fmt: skip


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
    for name, want in want_weights.items():
        message = f"{layout} {name}"
        torch.testing.assert_close(start[name], want_start[name], rtol=0, atol=0, msg=message)
        torch.testing.assert_close(weights[name], want, rtol=0, atol=1e-5, msg=message)
        moved += not torch.equal(weights[name], start[name])
    assert moved
