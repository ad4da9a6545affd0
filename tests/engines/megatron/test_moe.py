"""Mixture-of-experts models end to end: trainer of any layout, weight sync, vLLM, export."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_megatron_models
import torch
from programs import CONFIG, metrics_of, train, write_task
from ranks import groups_that_end, run_ranks
from rollout_checks import rollout_difference
from tiny_models import CHARS, save_tokenizer
from training_batches import CONFIG as TRAIN
from training_batches import on_data_ranks, whole_batch

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.vllm]

TOKENS = {
    "head_dim": 32, "vocab_size": len(CHARS),
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TP_SP = {"tensor_parallel": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One of Qwen3's three layers is dense; an expert is 48 wide, so 24 for each of two ranks."""
    folder = tmp_path_factory.mktemp("models")
    for family in ("qwen3_moe", "mixtral"):
        tiny_megatron_models.save_model(family, folder / family, num_hidden_layers=3, **TOKENS)
        save_tokenizer(folder / family)
    return folder


class Case(NamedTuple):
    family: str
    tp: int  # of vLLM
    layout: dict[str, Any]
    engine: str = "megatron"
    spread: bool = False  # whether a rank of vLLM has whole experts


TWO_RANKS = [
    Case("qwen3_moe", 1, {}, "fsdp"),
    Case("qwen3_moe", 1, {"expert_parallel": 2}),
    Case("qwen3_moe", 1, TP_SP | {"expert_tensor_parallel": 2}),
    Case("qwen3_moe", 2, {}, "fsdp"),
    Case("qwen3_moe", 2, {"expert_parallel": 2}),
    Case("qwen3_moe", 2, {"pipeline_parallel": 2, "num_layers_in_first_pipeline_stage": 2}),
    Case("mixtral", 2, {}, "fsdp"),
    Case("mixtral", 2, {"expert_parallel": 2}, "fsdp"),
    Case("mixtral", 2, TP_SP | {"expert_parallel": 2}),
    Case("mixtral", 2, {"expert_parallel": 2}, spread=True),
    Case("mixtral", 2, {"expert_parallel": 2}, "fsdp", spread=True),
]
FOUR_RANKS = [
    Case("qwen3_moe", 2, {}, "fsdp"),
    Case("qwen3_moe", 2, TP_SP | {"expert_parallel": 2}),
    Case(
        "qwen3_moe",
        2,
        TP_SP
        | {"pipeline_parallel": 2, "expert_parallel": 2, "num_layers_in_last_pipeline_stage": 2},
    ),
    Case("qwen3_moe", 2, TP_SP | {"expert_parallel": 2, "expert_tensor_parallel": 2}),
    Case("qwen3_moe", 2, {"expert_parallel": 2}, "fsdp", spread=True),
    Case("qwen3_moe", 2, TP_SP | {"expert_parallel": 2}, spread=True),
]


def push_on(topology, folder, tuples):
    """Of each case what pushed_of says. Those beside each other with the same vLLM share it."""
    found = []
    alike = groupby((Case(*values) for values in tuples), lambda c: (c.family, c.tp, c.spread))
    for _, cases in alike:  # vLLM has one set of process groups
        with groups_that_end():
            found += pushes_of(topology, Path(folder), list(cases))
    return found


def pushes_of(topology, folder, cases):
    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.vllm.engine import VllmEngine

    first = cases[0]
    settings = RolloutConfig(
        kv_cache_mib=16, tensor_parallel=first.tp, dtype="float32", expert_parallel=first.spread
    )
    engines = Topology.build(topology.device, dp=-1, tp=first.tp)
    rollout = VllmEngine(str(folder / first.family), settings, 64, engines)
    found = [pushed_of(topology, str(folder / case.family), case, rollout) for case in cases]
    rollout.shutdown()
    return found


def pushed_of(topology, model, case, rollout):
    """Of a case: an update, its weights pushed and proven, and how far logprobs are apart."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine
    from spmdrl.training.weight_sync import WeightSync

    # with the usual eps Adam makes a step of up to lr of a gradient that is all rounding
    steady = replace(TRAIN.optim, eps=1e-5)
    config = replace(TRAIN, engine=case.engine, optim=steady, **case.layout)
    ranks = Topology.build(topology.device, **train_degrees(config))
    actor = build_engine("policy", model, config, ranks)
    weights = WeightSync(
        actor, ranks, rollout, rollout.topology, "float32", WeightsConfig(check=True)
    )
    plain = plain_difference(actor, ranks, model)
    own = ranks.data_ranks
    mine = range(9)[own.index(ranks.rank) :: len(own)] if ranks.rank in own else []
    batch = whole_batch().select(list(mine))
    loss = policy_objective(AlgoConfig(entropy_coef=0.01))
    metrics = [actor.update(batch, loss, temperature=0.8) for _ in range(2)]
    stats = weights.push()
    assert stats.planned_bytes == stats.moved_bytes and stats.opaque_bytes == 0, case
    return {
        "checked": weights.check(),
        "metrics": metrics,
        "plain": plain,
        "rollout": rollout_difference(actor, ranks, rollout),
        "noticed": [
            notices(weights, actor, ".experts.3.", weights.check),
            notices(weights, actor, ".gate.weight", weights.check),
            notices(weights, actor, ".experts.3.", partial(push_stale, weights)),
        ],
        "again": weights.check(),  # after the pushes of what was noticed
        "weights": {n: t.clone() for n, t in actor.named_weights(torch.float32, 1 << 20)},
    }


def plain_difference(actor, ranks, model):
    """Packed logprobs of the trainer against one sequence at a time in plain transformers."""
    from transformers import AutoModelForCausalLM

    batch = on_data_ranks(ranks, whole_batch())
    got = actor.logprobs(batch, 1.0).logprobs
    plain, worst = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 0.0
    for first, last in zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(),
                           strict=True):  # fmt: skip
        ids = batch.token_ids[first:last]
        with torch.no_grad():
            want = plain(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        away = (got[first + 1 : last] - want) * batch.loss_mask[first + 1 : last]
        worst = max(worst, away.abs().max().item())
    return worst


def push_stale(weights):
    """As if vLLM's experts went on with what they were before; to be put right afterwards."""
    from spmdrl.rollout.vllm import cpu as vllm_cpu

    repack, vllm_cpu.repack_experts = vllm_cpu.repack_experts, lambda model: None
    try:
        weights.push()
    finally:
        vllm_cpu.repack_experts = repack


def notices(weights, actor, part, act):
    """What this rank's check says while the last element of a weight has another sign."""
    from spmdrl.rollout.base import WeightMismatch
    from spmdrl.weights.shards import lying

    shards = lying(actor.named_shards())
    name = next(w.name for w in weights.weights if part in w.name)
    shape = next(w.shape for w in weights.weights if w.name == name)
    last = [
        tensor[(-1,) * tensor.dim()]
        for box, tensor in shards.get(name, [])
        if tuple(end for _, end in box) == tuple(shape)
    ]
    with torch.no_grad():
        for element in last:
            element.neg_()
    try:
        act()
        message = ""
    except WeightMismatch as error:
        message = str(error)
    with torch.no_grad():
        for element in last:
            element.neg_()
    weights.push()
    return message


def prove(world, folder, cases):
    results = run_ranks(world, push_on, str(folder), [tuple(c) for c in cases], timeout_s=160)
    reference = {}  # FSDP2's weights after the updates, by family
    for case, *ranks in zip(cases, *results, strict=True):
        for found in ranks:
            assert found["plain"] < 1e-5, case
            assert found["rollout"] < 1e-4, case
            assert found["checked"] == found["again"] == len(saved(folder / case.family)), case
        words_of = "differs from the engine's model.layers.0", "gate.weight", "older weights"
        for number, words in enumerate(words_of):
            said = [found["noticed"][number] for found in ranks]
            if case.tp == 1 or number == 1:
                assert all(words in message for message in said), (case, said)
            else:  # an expert, or a column of it, is with one rank of each engine
                assert sum(words in message for message in said) == world // case.tp, (case, said)
        whole = {name: tensor for found in ranks for name, tensor in found["weights"].items()}
        assert whole.keys() == saved(folder / case.family).keys(), case
        want = reference.setdefault(case.family, whole)
        for name, tensor in want.items():
            torch.testing.assert_close(whole[name], tensor, rtol=0, atol=5e-5, msg=f"{case} {name}")
        moved = (whole[name] - saved(folder / case.family)[name]).abs().max()
        assert moved > 1e-4, case  # or there was nothing to push


def saved(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_two_ranks(models):
    prove(2, models, TWO_RANKS)


def test_four_ranks(models):
    prove(4, models, FOUR_RANKS)


@pytest.fixture(scope="module")
def runs(models, tmp_path_factory):
    """Two steps of each training engine on two ranks, and what is exported of them; the second step
    of "spread" once more on four, where the same experts lie on two ranks.
    """
    folder = tmp_path_factory.mktemp("runs")
    Path(folder, "model").symlink_to(models / "qwen3_moe")
    write_task(folder)
    Path(folder, "cfg.py").write_text(CONFIG)
    common = ["--config", "cfg.py", "--rollout.engine", "vllm", "--weights.check",
              "--checkpoint.every_steps", "1", "--algo.kl_coef", "0.1", "--ref.dtype", "float32",
              ]  # fmt: skip
    spread = ["--actor.expert_parallel", "2", "--ref.expert_parallel", "2",
              "--rollout.tensor_parallel", "2", "--rollout.expert_parallel"]  # fmt: skip
    engines = {
        "fsdp": [],
        "megatron": ["--actor.engine", "megatron", "--actor.expert_parallel", "2"],
        "spread": spread,
    }
    for name, args in engines.items():
        done = train(folder, 2, *common, *args, "--run_dir", name)
        assert done.code == 0, done.output[-6000:]
        export(folder / name / "checkpoints/step_00000002", folder / f"exported_{name}")
    shutil.copytree(folder / "spread", folder / "wider")
    shutil.rmtree(folder / "wider/checkpoints/step_00000002")
    done = train(folder, 4, *common, *spread, "--run_dir", "wider", "--resume", "auto")
    assert done.code == 0, done.output[-6000:]
    return folder


def export(checkpoint, out):
    from spmdrl.engines.hf_export import export

    export(checkpoint, out, "float32")


def test_runs_of_all_engines_and_layouts_are_alike(runs):
    fsdp = metrics_of(runs / "fsdp")
    for engine in ("megatron", "spread", "wider"):
        rows = metrics_of(runs / engine)
        assert [row["step"] for row in rows][-2:] == [row["step"] for row in fsdp][-2:] == [1, 2]
        assert all(row["actor/logprob_diff_max"] < 1e-4 for row in rows[-2:])
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/entropy"):
            for got, want in zip(rows[-2:], fsdp[-2:], strict=True):
                assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), (engine, name)


@pytest.mark.parametrize("engine", ["fsdp", "megatron", "spread"])
def test_an_export_is_a_checkpoint_as_transformers_writes_it(runs, models, engine):
    from transformers import AutoModelForCausalLM

    folder = runs / f"exported_{engine}"
    before, after = saved(models / "qwen3_moe"), saved(folder)
    assert after.keys() == before.keys()
    assert all(after[name].shape == before[name].shape for name in before)
    expert = "model.layers.0.mlp.experts.2.up_proj.weight"
    assert 1e-6 < (after[expert] - before[expert]).abs().max() < 1e-2
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(model.state_dict()["model.layers.0.mlp.experts.gate_up_proj"][2, 48:],
                       after[expert])  # fmt: skip
    other = saved(runs / "exported_fsdp")
    for name, tensor in after.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=1e-3, msg=name)
