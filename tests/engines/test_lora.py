"""Adapters on real ranks: trained, pushed into vLLM, resumed and exported."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from adapter_runs import resume_on, same_on, share_of, trained
from ranks import run_calls
from tiny_models import save_qwen3
from training_batches import CONFIG

from spmdrl.config import AlgoConfig, ConfigError, LoraConfig, OptimConfig

pytestmark = [pytest.mark.ranks, pytest.mark.vllm]

LORA = LoraConfig(
    rank=5, alpha=7, use_rslora=True
)  # an odd rank, and a scale that is no power of 2
TRAIN = replace(CONFIG, lora=LORA, optim=OptimConfig(lr=3e-3, weight_decay=0.0))
TARGETS = ("k_proj", "up_proj", "down_proj", "layers.1.self_attn.o_proj")
# weights.lora, rollout.tensor_parallel, rollout.dtype, targets, weights.bucket_mib; merged: DoRA's
PUSHES = {
    "merge": ("merge", 1, "float32", ("q_proj", "down_proj"), 0),
    "adapter": ("adapter", 2, "float32", TARGETS, 512),
}


def refused_on(topology, folder, cases):
    found = []
    for model, config in cases:
        engine, _ = trained(topology, "policy", model, config, updates=0)
        try:
            engine.load(Path(folder))
            found.append("")
        except ConfigError as error:
            found.append(str(error))
    return found


def push_on(topology, model, case):
    """Pushes after two updates and again after two more: what went, what was proven."""
    from rollout_checks import rollout_difference

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import RolloutConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import WeightMismatch
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.training import weight_sync

    mode, tp, dtype, targets, bucket = PUSHES[case]
    lora = replace(LORA, target_modules=targets, use_dora=mode == "merge")
    actor, _ = trained(topology, "policy", model, replace(TRAIN, lora=lora))
    settings = RolloutConfig(kv_cache_mib=16, tensor_parallel=tp, dtype=dtype)
    ranks = Topology.build(topology.device, dp=-1, tp=tp)
    rollout = VllmEngine(model, settings, 64, ranks, lora=lora if mode == "adapter" else None)
    config = WeightsConfig(check=True, lora=mode, bucket_mib=bucket)
    # a bucket of no bytes makes many rounds; in each there are some buckets, not one for each row
    slot = weight_sync.slot_bytes if bucket else lambda bucket, device: 8192
    with mock.patch.object(weight_sync, "slot_bytes", slot):
        weights = weight_sync.WeightSync(actor, actor.topology, rollout, ranks, dtype, config)
    found = {"stats": [], "away": []}
    for _ in range(2):
        rollout.sleep()
        rollout.wake()
        found["stats"].append(weights.push())
        found["away"].append(rollout_difference(actor, actor.topology, rollout))
        loss = policy_objective(AlgoConfig(entropy_coef=0.01))
        for _ in range(2):
            actor.update(share_of(topology), loss, temperature=0.8)
    weights.push()
    found["checked"], found["rounds"] = weights.check(), len(weights.rounds)
    found["noticed"] = []
    for spoil in spoils(rollout) if topology.rank == 1 else [lambda: None] * 3:
        spoil()
        try:
            weights.check()
            found["noticed"].append(None)
        except WeightMismatch as error:
            found["noticed"].append(str(error))
        if rollout.slots is not None:
            for module in rollout.slots.manager.modules.values():
                module.reset_lora(0)
        rollout.load_weights(weights.all_tensors())  # as whole tensors, which puts it right
    found["right"] = weights.check()
    rollout.shutdown()
    return found


def spoils(rollout):
    """Each changes one element that vLLM computes with."""
    parameters = dict(rollout.model.named_parameters())

    def weight(end):
        next(p for n, p in parameters.items() if n.endswith(end)).data[0, -1] += 0.5

    def padding():  # of rank 5 to 8
        modules = rollout.slots.manager.modules
        name = next(name for name in modules if name.endswith("gate_up_proj"))
        modules[name].lora_b_stacked[0][0, 0, 3, -1] += 0.5

    down = next(n for n in parameters if "down_proj" in n)
    last = (lambda: weight("o_proj.weight")) if rollout.slots is None else padding
    return [lambda: weight("embed_tokens.weight"), lambda: weight(down), last]


SAME = [(1, TRAIN), (2, TRAIN), (2, replace(TRAIN, fsdp=1, activation_checkpointing=True)),
        (2, replace(TRAIN, micro_batch_tokens=41, dtype="bfloat16"))]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


@pytest.fixture(scope="module")
def runs(qwen3, folder):
    """{(case, ...): what each rank got}; each world starts once."""
    model, other = str(qwen3), str(save_qwen3(folder / "other", seed=1))
    calls = {(2, "push", case): (push_on, (model, case)) for case in PUSHES}
    for kind in ("policy", "value"):
        for i, (world, config) in enumerate(SAME):
            saved = str(folder / f"{kind}{i}") if i < 2 else None
            calls[world, "same", kind, i] = (same_on, (kind, model, config, saved))
        saved = str(folder / f"{kind}1")
        for world in (2, 1):  # what two ranks wrote
            calls[world, "resumed", kind] = (resume_on, (kind, model, TRAIN, saved))
    wrong = [(other, TRAIN), (model, CONFIG), (model, replace(TRAIN, lora=LoraConfig(rank=4))),
             (model, replace(TRAIN, lora=replace(LORA, target_modules=("q_proj",))))]  # fmt: skip
    calls[2, "refused"] = (refused_on, (str(folder / "policy1"), wrong))
    found = {}
    for world in (2, 1):
        mine = {key: call for key, call in calls.items() if key[0] == world}
        found |= dict(zip(mine, run_calls(world, mine.values(), timeout_s=230), strict=True))
    return found


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_training_does_not_depend_on_ranks_and_leaves_the_base(runs, kind):
    metrics, more, weights, away = runs[1, "same", kind, 0][0]
    num = away["trained"]
    assert num == 2 * 5 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 128)) + 65 * (
        kind == "value"
    )
    for i, (world, config) in enumerate(SAME):
        tight = config.dtype == "float32"
        for other, other_more, other_weights, away in runs[world, "same", kind, i]:
            assert away["base"]
            assert away.get("off", 0.0) <= (0 if world == 1 else 1e-6) and away.get("on", 1) > 1e-3
            for got, want in zip([*other, other_more], [*metrics, more], strict=True):
                for name in ("loss", "grad_norm"):
                    near = 1e-6 if tight else 0.05
                    assert got[name] == pytest.approx(want[name], rel=near, abs=near), (i, name)
            for name, want in weights.items():
                atol = 2e-5 if tight else 0.02
                torch.testing.assert_close(other_weights[name], want, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("kind", ["policy", "value"])
def test_adapters_resume_bit_for_bit_and_on_other_ranks(runs, folder, kind):
    _, more, weights, _ = runs[2, "same", kind, 1][0]
    for metrics, resumed in runs[2, "resumed", kind]:
        assert metrics == more
        assert all(torch.equal(resumed[name], want) for name, want in weights.items())
    metrics, resumed = runs[1, "resumed", kind][0]
    assert metrics["loss"] == pytest.approx(more["loss"], rel=1e-6)
    for name, want in weights.items():
        torch.testing.assert_close(resumed[name], want, rtol=0, atol=2e-5, msg=name)
    from spmdrl.checkpoint.safe_load import ShardReader

    stored = ShardReader(str(folder / f"{kind}1")).read_metadata().state_dict_metadata
    kept = {key.partition(".")[2] for key in stored if key.startswith("model.")}
    assert len(kept) == 28 + 2 * (kind == "value")
    assert all(".lora_" in key or "value_head" in key for key in kept)


def test_a_checkpoint_of_something_else_is_refused(runs):
    for other_base, no_lora, other_rank, fewer_layers in runs[2, "refused"]:
        assert "other weights" in other_base and "fingerprint" in other_base
        assert "this run has no lora" in no_lora
        assert "lora.rank=5, this run has 4" in other_rank
        assert "14 layers, this run on 2" in fewer_layers


@pytest.mark.parametrize("case", PUSHES)
def test_vllm_computes_with_the_adapter(runs, case):
    mode, _, dtype, _, bucket = PUSHES[case]
    for found in runs[2, "push", case]:
        assert max(found["away"]) < (1e-5 if dtype == "float32" else 0.05)
        first, second = found["stats"]
        assert first.moved_bytes == first.planned_bytes
        assert second.moved_bytes == second.planned_bytes
        if mode == "adapter":
            assert found["rounds"] == 2 and second.planned_bytes < first.planned_bytes / 3
        elif bucket == 0:
            assert found["rounds"] == 4
    noticed = runs[2, "push", case][1]["noticed"]
    assert all(noticed), noticed
