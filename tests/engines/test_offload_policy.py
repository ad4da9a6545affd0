"""FSDP2's CPU offload while a role trains: gradients of micro-batches are summed on the CPU, and
every number is what it is without."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.config import AlgoConfig, ConfigError, LoraConfig, OptimConfig
from spmdrl.distributed.progress import PROGRESS

SMALL = replace(CONFIG, micro_batch_tokens=41)  # several micro-batches an update
CASES = {  # kind of engine, config
    "accumulated": ("policy", SMALL),
    "replicas": ("policy", replace(SMALL, fsdp=1)),
    "critic": ("value", replace(SMALL, dtype="bfloat16", activation_checkpointing=True)),
    "8 bits and average": ("policy", replace(SMALL, optim=OptimConfig(name="adamw8bit"), ema=0.9)),
    "adapters": ("policy", replace(SMALL, dtype="bfloat16", lora=LoraConfig(rank=4, alpha=8))),
}  # fmt: skip


def both_ways_on(topology, model, kind, config, folder):
    """(metrics, weights, average, what a resumed engine does) without the policy and with it."""
    from spmdrl.algo.objectives import policy_objective, value_objective

    found = []
    algo = AlgoConfig(entropy_coef=0.01)
    loss = policy_objective(algo) if kind == "policy" else value_objective(algo)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    for offload in (False, True):
        settings = replace(config, offload_policy=offload)
        engine = engine_on(topology, kind, model, settings, topology)
        groups = [m._get_fsdp_state()._fsdp_param_group for m in engine.module.modules()
                  if hasattr(m, "_get_fsdp_state")]  # fmt: skip
        assert {p.offload_to_cpu for g in groups for p in g.fsdp_params} == {offload}
        assert len(engine.micro_batches(batch)) > 2
        summed = []  # after each micro-batch, whether gradients are summed where they are computed
        PROGRESS.heard = lambda groups=groups, summed=summed: summed.append(
            any(group._partial_reduce_output is not None for group in groups)
        )
        metrics = [engine.update(batch, loss, temperature=0.8) for _ in range(2)]
        on_device = not engine.offloads_gradients and not engine.gathers_once
        assert any(summed) == on_device and engine.offloads_gradients == (
            offload and config.fsdp != 1
        )
        where = Path(folder, str(offload))
        if topology.rank == 0:
            where.mkdir()
        torch.distributed.barrier()
        engine.save(where)
        weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
        average = {n: t.clone() for n, t in engine.named_average(torch.float32, 1 << 20)}
        again = engine_on(topology, kind, model, settings, topology)
        again.load(Path(folder, str(not offload)) if offload else where)  # each reads the other's
        metrics.append(engine.update(batch, loss, temperature=0.8))
        metrics.append(again.update(batch, loss, temperature=0.8))
        found.append((metrics, weights, average))
    return found


@pytest.mark.ranks
def test_numbers_are_those_without_offload(tmp_path):
    model = str(save_qwen3(tmp_path / "model"))
    calls = []
    for i, (kind, config) in enumerate(CASES.values()):
        (tmp_path / str(i)).mkdir()
        calls.append((both_ways_on, (model, kind, config, str(tmp_path / str(i)))))
    for name, results in zip(CASES, run_calls(2, calls), strict=True):
        for plain, offloaded in results:
            assert plain[0] == offloaded[0], name
            assert plain[0][2] == plain[0][3], name  # resumed from what was saved
            for want, got in zip(plain[1:], offloaded[1:], strict=True):
                assert want.keys() == got.keys()
                assert all(torch.equal(want[n], t) for n, t in got.items()), name
            start = plain[0][0]["grad_norm"]
            assert start > 0 and plain[0][1]["grad_norm"] != start


def test_what_does_not_go_with_it():
    from spmdrl.training.checks.common import check_training_role

    role = replace(CONFIG, offload_policy=True)
    check_training_role("actor", role, (0, 1), 10)
    for change, words in (
        ({"offload_params": True}, "actor.offload_params has no effect with actor.offload_policy"),
        ({"offload_optimizer": True}, "actor.offload_optimizer has no effect"),
        ({"engine": "megatron"}, "actor.offload_policy=True has no effect with actor.engine="),
        ({"optim": OptimConfig(name="muon")}, "actor.offload_policy with actor.optim.name='muon'"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_training_role("actor", replace(role, **change), (0, 1), 10)
