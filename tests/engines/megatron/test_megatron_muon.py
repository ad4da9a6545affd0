"""Muon with engine megatron: whole matrices by Hugging Face's names, as FSDP2 has them."""

from dataclasses import replace

import pytest
from ranks import run_calls
from test_megatron_engine import (
    assert_same,
    case,
    engine_of,
    results_on,
    save_models,
    weights_of,
)
from training_batches import CONFIG

from spmdrl.config import OptimConfig

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]

MUON = OptimConfig(name="muon", lr=1e-3, weight_decay=0.1, muon_momentum=0.9)


def muon(*args, **layout):
    return case(*args, **layout, optim=MUON)


LAYOUTS = [
    muon("qwen3", "policy", 4, tensor_parallel=2, pipeline_parallel=2),
    muon("qwen3", "policy", 3, pipeline_parallel=1),  # three data-parallel ranks take turns
    muon("odd", "value", 4, tensor_parallel=2, sequence_parallel=True),
    muon("moe", "policy", 4, tensor_parallel=2, sequence_parallel=True, expert_parallel=2),
]


REFERENCES = [
    (*reference, 1, replace(CONFIG, optim=MUON)) for reference in sorted({c[:2] for c in LAYOUTS})
]


def shards_on(topology, models):
    """The elements of all float32 weights that this rank's distributed optimizers have."""
    from spmdrl.engines.megatron import compat

    engine = engine_of(topology, models, muon("moe", "policy", 4, expert_parallel=2))
    parts = compat.optimizer_parts(engine.parts.optimizer)
    found = [p.numel() for part in parts for _, p, _ in compat.own_shards(part)]
    weights = weights_of(engine)
    return len(parts), sum(found), sum(t.numel() for t in weights.values())


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    models = save_models(tmp_path_factory.mktemp("models"))
    calls = [(results_on, (models, REFERENCES + LAYOUTS)), (shards_on, (models,))]
    return run_calls(4, calls, timeout_s=240)


def test_megatron_still_lists_the_shards_of_a_distributed_optimizer(runs):
    parts, held, (whole, *_) = (list(column) for column in zip(*runs[1], strict=True))
    assert parts == [2] * 4  # dense, and of experts
    assert sum(held) == whole


def test_muon_updates_equal_fsdps(runs):
    ranks = runs[0]
    base = {case[:2]: found for case, found in zip(REFERENCES, ranks[0], strict=False)}
    for number, layout in enumerate(LAYOUTS, len(REFERENCES)):
        results = [rank[number] for rank in ranks if rank[number] is not None]
        assert len(results) == layout[2]
        for result in results:
            assert_same(result, base[layout[:2]], layout)
