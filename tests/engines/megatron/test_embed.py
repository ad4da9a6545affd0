"""Another program's Megatron model: its updates equal FSDP2's; the program is left as it was."""

import pickle
import shutil
from pathlib import Path

import pytest
import torch
from embedded_models import PP2, TP2, host_model, refusal, rl_config
from ranks import groups_that_end, run_ranks
from training_batches import CONFIG, whole_batch

from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    TrainConfig,
)
from spmdrl.distributed.nccl_rules.recorder import BACKENDS

pytestmark = [pytest.mark.ranks, pytest.mark.megatron, pytest.mark.strict_nccl]


@pytest.fixture
def nccl_alone(monkeypatch):
    """On GPUs the host's groups would have no gloo, as those of most Megatron programs."""
    monkeypatch.setenv(BACKENDS, "nccl")


def host_updates_on(topology, cases, model, folder):
    """Of each (sizes, per_token, padded vocabulary): this rank's sequences; as fsdp_updates_on."""
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    found = []
    with mcore_cpu.scope():
        for number, case in enumerate(cases):
            with groups_that_end():
                found.append(host_updates(topology, model, f"{folder}/{number}", *case))
    return found


def host_updates(topology, model, folder, sizes, per_token, *vocab):
    """What was learnt goes through files of Hugging Face's format and back."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.distributed.topology import Topology
    from spmdrl.engines.megatron.engine import MegatronEngine
    from spmdrl.engines.megatron.hosted_actor import host_parts, hosted_actor

    torch.manual_seed(0)
    chunks, optimizer = host_model(model, per_token, *vocab, **sizes)
    config = rl_config(model)
    parts = host_parts(chunks, optimizer, config)
    everyone = Topology.build(topology.device, hosted=True, dp=-1)
    layout = Topology.from_megatron(everyone)
    engine = MegatronEngine(parts, hosted_actor(config.actor, parts), layout)
    own = layout.data_ranks
    mine = range(9)[own.index(layout.rank) :: len(own)] if layout.rank in own else []
    batch = whole_batch().select(list(mine))
    looked = engine.logprobs(batch, 0.8, True)
    loss_fn = policy_objective(AlgoConfig(entropy_coef=0.01))
    metrics = [engine.update(batch, loss_fn, temperature=0.8) for _ in range(2)]
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    if sizes:
        through_files(chunks, optimizer, engine, folder, model)
    return list(mine), looked, metrics, weights


def through_files(chunks, optimizer, engine, folder, model):
    """save_hf_weights writes the weights as they are, and load_hf_weights brings them back."""
    from transformers import AutoModelForCausalLM

    from spmdrl.embed import load_hf_weights, save_hf_weights

    def weights():
        return {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}

    before = weights()
    save_hf_weights(chunks, folder, like=model)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert before.keys() <= loaded.keys()
    for name, tensor in before.items():
        assert torch.equal(loaded[name], tensor), name
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.zero_()
    load_hf_weights(chunks, folder, optimizer)
    for name, tensor in weights().items():
        assert torch.equal(before[name], tensor), name
    with pytest.raises(ConfigError, match="already holds a model"):
        save_hf_weights(chunks, folder, like=model)


def fsdp_updates_on(topology, model):
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    layout = Topology.build(topology.device, **train_degrees(CONFIG))
    engine, batch = build_engine("policy", model, CONFIG, layout), whole_batch()
    looked = engine.logprobs(batch, 0.8, True)
    loss_fn = policy_objective(AlgoConfig(entropy_coef=0.01))
    metrics = [engine.update(batch, loss_fn, temperature=0.8) for _ in range(2)]
    return looked, metrics, {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}


def test_a_hosts_updates_equal_fsdps(qwen3, tmp_path):
    looked, want_metrics, want_weights = run_ranks(1, fsdp_updates_on, str(qwen3))[0]
    whole = whole_batch()
    cases = [({}, False), ({}, True), (TP2, False), (TP2, True, 256), (PP2, False), (PP2, True),
             ({}, True, 0, True)]  # fmt: skip
    ranks = run_ranks(2, host_updates_on, cases, str(qwen3), str(tmp_path), timeout_s=200)
    padding = 0  # its row's gradient is not stopped in a host's model
    for number, case in enumerate(cases):
        seen = []
        for mine, stats, metrics, weights in (found[number] for found in ranks):
            seen += mine
            rows = torch.cat([torch.zeros(0, dtype=torch.int64)] + [
                torch.arange(int(whole.cu_seqlens[i]), int(whole.cu_seqlens[i + 1])) for i in mine
            ])  # fmt: skip
            for got, want in zip(stats[:3], looked[:3], strict=True):
                torch.testing.assert_close(got, want[rows], rtol=0, atol=1e-5, msg=str(case))
            for got, want in zip(metrics, want_metrics, strict=True):
                for name in want:
                    assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-6), (case, name)
            for name, want in want_weights.items():
                keep = [i for i in range(len(want)) if i != padding or "embed" not in name]
                torch.testing.assert_close(
                    weights[name][keep], want[keep], rtol=0, atol=1e-4, msg=f"{case} {name}"
                )
        assert sorted(seen) == list(range(9)), case


def state_of_process():
    """What a program owns, in a form that can be compared."""
    import logging
    import os
    import random

    import numpy as np
    import torch.distributed.distributed_c10d as c10d
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    root = logging.getLogger()
    return {
        "groups": set(map(id, c10d._world.pg_map)),
        "default": id(c10d._get_default_group()),
        "parallel_state": {
            name: id(value) for name, value in vars(parallel_state).items() if name[0] == "_"
            and name[1:2].isupper()
        },
        "torch": torch.get_rng_state().tolist(),
        "numpy": pickle.dumps(np.random.get_state()),
        "python": random.getstate(),
        "megatron": {k: v.tolist() for k, v in get_cuda_rng_tracker().get_states().items()},
        "environment": dict(os.environ),
        "logger": (root.level, list(map(id, root.handlers))),
    }  # fmt: skip


def attached_on(topology, folder, model, bare, engine):
    """bare: the model's folder without its weights."""
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from dataclasses import replace

    from spmdrl.config import WeightsConfig
    from spmdrl.embed import attach

    with mcore_cpu.scope():
        chunks, optimizer = host_model(model, False, **TP2)
        with torch.no_grad():  # the host's weights are not those of any file
            for parameter in chunks[0].parameters():
                parameter.mul_(1.25)
        optimizer.reload_model_params()
        names = ("variable_seq_lengths", "finalize_model_grads_func", "no_sync_func")
        fields = {name: getattr(chunks[0].module.config, name) for name in names}
        before = state_of_process()
        base = rl_config(bare, folder)
        algo = AlgoConfig(advantage="gae", kl_coef=0.1)
        config = replace(base, weights=WeightsConfig(check=True), algo=algo,
                         critic=TrainConfig(engine="megatron", tensor_parallel=2),
                         rollout=replace(base.rollout, engine=engine, kv_cache_mib=32))  # fmt: skip
        rl = attach(chunks, optimizer, config)
        changed = [set(), set()]
        found = []
        for number in (1, 2):
            middle = state_of_process()
            found.append(rl.step(number))
            after = state_of_process()
            changed[0] |= {k for k in after if after[k] != middle[k]}
        held_out = rl.evaluate(2)
        told = rl.state_dict()
        rl.load_state_dict(told)
        with pytest.raises(ConfigError, match=r"ref\.model"):
            rl.load_state_dict(told | {"reference": "of another start"})
        rl.close()
        after = state_of_process()
        changed[1] |= {k for k in after if after[k] != before[k]}
        config = chunks[0].module.config
        kept = all(getattr(config, field) is value for field, value in fields.items())
        drop = [m.p for m in chunks[0].modules() if isinstance(m, torch.nn.Dropout)]
        optimizer.step()  # the host goes on by itself
    return changed, kept, drop, found, held_out, len(rl.samples), rl.logprob_gap


def without_weights(model, folder):
    """A copy of the folder that has config and tokenizer alone."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    return str(folder)


def differing_on(topology, folder, model):
    """What attach says where the host computes something else that no field of its config shows."""
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from spmdrl.embed import attach

    with mcore_cpu.scope():
        chunks, optimizer = host_model(model, False, **PP2)
        for layer in chunks[0].module.decoder.layers:
            layer.mlp.register_forward_hook(lambda _, __, out: (0.9 * out[0], out[1]))
        said = refusal(attach, chunks, optimizer, rl_config(model, folder))
        rl = attach(chunks, optimizer, rl_config(model, folder), tolerance=10.0)
        rl.close()
    return said, rl.logprob_gap


@pytest.mark.usefixtures("nccl_alone")
def test_a_host_that_computes_something_else_is_refused_with_the_gap(qwen3, tmp_path):
    from programs import write_task

    write_task(tmp_path)
    for said, gap in run_ranks(2, differing_on, str(tmp_path), str(qwen3)):
        assert f"differ by {gap:.3g} on average" in said and "0.0003 is allowed" in said
        assert gap > 3e-4


@pytest.mark.usefixtures("nccl_alone")
@pytest.mark.vllm
@pytest.mark.parametrize("engine", ["hf", "vllm"])
def test_the_program_is_left_as_it_was(qwen3, tmp_path, engine):
    from programs import write_task

    write_task(tmp_path)
    bare = without_weights(qwen3, tmp_path / "bare")
    ranks = run_ranks(2, attached_on, str(tmp_path), str(qwen3), bare, engine, timeout_s=200)
    for changed, kept, dropout, metrics, held_out, num_samples, gap in ranks:
        assert 0 <= gap < 1e-5
        # the reference is the host's model at attach, which the first step has not changed yet
        assert abs(metrics[0]["actor/ref_kl"]) < min(1e-5, metrics[1]["actor/ref_kl"])
        assert changed == [set(), set()]
        assert kept and dropout and set(dropout) == {0.1}
        assert [m["rollout/loss_tokens"] > 0 for m in metrics] == [True, True]
        assert metrics[1]["actor/grad_norm"] > 0 and metrics[0]["actor/logprob_diff_max"] < 1e-4
        assert held_out.keys() >= {"eval/reward"} and num_samples > 0
    assert ranks[0][3][1]["reward/mean"] == ranks[1][3][1]["reward/mean"]
    written = [path.name for path in Path(tmp_path, "run").rglob("*") if path.is_file()]
    samples = [f"step_{step}{part}.jsonl" for step in (1, 2) for part in ("", "_trained")]
    assert sorted(written) == sorted(samples)  # and no log of ours


def refused_on(topology, model, other):
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from dataclasses import replace
    from unittest import mock

    from megatron.core.optimizer.grad_scaler import ConstantGradScaler

    from spmdrl.config import OptimConfig
    from spmdrl.embed import attach

    class FullyShardedDataParallel(torch.nn.Module):
        pass

    class OwnLinear(torch.nn.Linear):
        pass

    said = []
    with mcore_cpu.scope():
        chunks, optimizer = host_model(model, False)
        base = rl_config(model, "nowhere")
        attempts = [
            (chunks, optimizer, replace(base, model=other)),
            ([chunks[0].module], optimizer, base),
            ([FullyShardedDataParallel()], optimizer, base),
            (chunks, torch.optim.AdamW(chunks[0].parameters()), base),
            (chunks, optimizer, replace(base, actor=TrainConfig(tensor_parallel=2))),
            (chunks, optimizer, replace(base, actor=TrainConfig(optim=OptimConfig(lr=1.0)))),
            (chunks, optimizer, replace(base, actor=TrainConfig(ema=0.9))),
            (chunks, optimizer, replace(base, actor=TrainConfig(mtp_loss_scaling_factor=0.1))),
            (chunks, optimizer, replace(base, actor=TrainConfig(moe_grouped_gemm=False))),
            (chunks, optimizer, replace(base, actor=TrainConfig(overlap_grad_reduce=True))),
            (chunks, optimizer, replace(base, async_steps=1)),
            (chunks, optimizer, replace(base, resume="auto")),
            (chunks, optimizer, replace(base, trackers=("wandb",))),
        ]
        for attempt in attempts:
            said.append(refusal(attach, *attempt))
        raw = chunks[0].module
        for name, value in FIELDS.items():
            with mock.patch.object(raw.config, name, value):
                said.append(refusal(attach, chunks, optimizer, base))
        layer = raw.decoder.layers[0]
        with mock.patch.dict(layer.mlp._modules, linear_fc2=OwnLinear(2, 2)):
            said.append(refusal(attach, chunks, optimizer, base))
        with mock.patch.object(raw.rotary_pos_emb, "seq_len_interpolation_factor", 2.0):
            said.append(refusal(attach, chunks, optimizer, base))
        part = optimizer.chained_optimizers[0]
        with mock.patch.object(part, "grad_scaler", ConstantGradScaler(8.0), create=True):
            said.append(refusal(attach, chunks, optimizer, base))
    return said


# fields of the host's config that a step does not do, or config.model does not have
FIELDS = {
    "fp8": "hybrid", "fp4": "e2m1", "cuda_graph_impl": "local", "enable_cuda_graph": True,
    "external_cuda_graph": True, "qk_clip": True, "mtp_num_layers": 1, "fp16": True,
    "delay_wgrad_compute": True, "no_rope_freq": [0, 1], "softmax_type": "off-by-one",
    "qk_l2_norm": True, "attention_output_gate": True, "window_size": (4, 0),
    "apply_residual_connection_post_layernorm": True,
}  # fmt: skip


def test_what_does_not_fit_is_said(qwen3, tmp_path):
    from tiny_models import save_qwen3

    other = save_qwen3(tmp_path, num_hidden_layers=3, rope_theta=50_000.0)
    (said,) = run_ranks(1, refused_on, str(qwen3), str(other))
    wanted = ["layers: 2 here, 3 there", "DistributedDataParallel", "--use-megatron-fsdp",
              "get_megatron_optimizer", "actor.tensor_parallel=2", "actor.optim has no effect",
              "actor.ema has no effect", "actor.mtp_loss_scaling_factor has no effect",
              "actor.moe_grouped_gemm has no effect", "actor.overlap_grad_reduce has no effect",
              "async_steps", "resume has no effect", "trackers has no effect", *FIELDS,
              "OwnLinear", "seq_len_interpolation_factor=2.0", "--loss-scale"]  # fmt: skip
    assert len(said) == len(wanted), said
    for text, message in zip(wanted, said, strict=True):
        assert text in message
