"""Muon with engine megatron: whole matrices by Hugging Face's names, as FSDP2 has them."""

from dataclasses import replace

import pytest
from ranks import run_ranks
from test_megatron_engine import (
    assert_same,
    case,
    results_on,
    save_models,
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


def test_muon_updates_equal_fsdps(tmp_path):
    cases = REFERENCES + LAYOUTS
    ranks = run_ranks(4, results_on, save_models(tmp_path), cases, timeout_s=240)
    base = {case[:2]: found for case, found in zip(REFERENCES, ranks[0], strict=False)}
    for number, layout in enumerate(LAYOUTS, len(REFERENCES)):
        results = [rank[number] for rank in ranks if rank[number] is not None]
        assert len(results) == layout[2]
        for result in results:
            assert_same(result, base[layout[:2]], layout)
