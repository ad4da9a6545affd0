"""The Megatron engine on real gloo ranks: the same update as FSDP2's from the same batch."""

from dataclasses import replace

import pytest
import torch
from ranks import run_ranks
from test_engine_ranks import CONFIG, whole_batch

from spmdrl.config import AlgoConfig

MEGATRON = replace(CONFIG, engine="megatron")


def results_on(topology, cases, model):
    """Of each (kind, config): logprobs or values, two updates' metrics, and all weights then."""
    from spmdrl.algo.objectives import policy_objective, value_objective
    from spmdrl.engines import build_engine
    from spmdrl.topology import Topology, train_degrees

    found = []
    for kind, config in cases:
        ranks = Topology.build(topology.device, **train_degrees(config))
        engine = build_engine(kind, model, config, ranks)
        own = ranks.data_ranks
        mine = range(9)[own.index(ranks.rank) :: len(own)] if ranks.rank in own else []
        batch = whole_batch().select(list(mine))
        algo = AlgoConfig(entropy_coef=0.01)
        if kind == "policy":
            loss_fn, looked = policy_objective(algo), engine.logprobs(batch, 0.8, True)
        else:
            loss_fn, looked = value_objective(algo), [engine.values(batch)]
        metrics = [engine.update(batch, loss_fn, temperature=0.8) for _ in range(2)]
        weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
        found.append((list(mine), looked, metrics, weights))
    return found


def assert_same_updates(model, kind, layouts, world):
    """Every layout on `world` ranks against FSDP2 on one."""
    (base,) = run_ranks(1, results_on, [(kind, CONFIG)], model)[0]
    cases = [(kind, replace(MEGATRON, **layout)) for layout in layouts]
    ranks = run_ranks(world, results_on, cases, model, timeout_s=240)
    whole, (_, looked, want_metrics, want_weights) = whole_batch(), base
    for number, layout in enumerate(layouts):
        seen = []
        for mine, stats, metrics, weights in (results[number] for results in ranks):
            seen += mine
            rows = torch.cat([torch.arange(159)[0:0]] + [
                torch.arange(int(whole.cu_seqlens[i]), int(whole.cu_seqlens[i + 1])) for i in mine
            ])  # fmt: skip
            for got, want in zip(stats, looked, strict=True):
                torch.testing.assert_close(got, want[rows], rtol=0, atol=1e-5, msg=str(layout))
            for got, want in zip(metrics, want_metrics, strict=True):
                assert got.keys() == want.keys()
                for name in want:
                    assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), (
                        layout, name,
                    )  # fmt: skip
            assert weights.keys() >= want_weights.keys() - {"value_head.weight", "value_head.bias"}
            for name, want in want_weights.items():
                if name in weights:
                    torch.testing.assert_close(
                        weights[name], want, rtol=0, atol=5e-5, msg=f"{layout} {name}"
                    )
        assert sorted(seen) == list(range(9)), layout


def test_policy_updates_equal_fsdps(qwen3):
    assert_same_updates(
        str(qwen3), "policy",
        [
            {"tensor_parallel": 2},
            {"tensor_parallel": 2, "sequence_parallel": True, "activation_checkpointing": True},
            {"pipeline_parallel": 2},
            {"context_parallel": 2},
            {"micro_batch_tokens": 1000},
        ],
        world=2,
    )  # fmt: skip
