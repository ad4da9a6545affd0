"""What only a GPU shows: NCCL, bf16, the varlen flash kernel, offload. Skipped without one."""

import os

import pytest
import torch
import torch.distributed as dist
from tiny_models import save_qwen3

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="module")
def topology():
    from spmdrl.distributed.topology import Topology

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # fmt: skip
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl")  # as process.py
    yield Topology.build(device, dp=1, fsdp=-1)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_qwen3(tmp_path_factory.mktemp("m"), head_dim=64, num_attention_heads=4))


def batch_of(lens, seed=0):
    from spmdrl.data.packing import empty_batch

    g = torch.Generator().manual_seed(seed)
    batch = empty_batch(torch.tensor(lens))
    batch.token_ids = torch.randint(3, 60, (batch.num_tokens,), generator=g)
    batch.loss_mask = torch.ones(batch.num_tokens)
    batch.loss_mask[batch.cu_seqlens[:-1]] = 0
    batch.advantages = torch.randn(batch.num_tokens, generator=g)
    batch.loss_weights = batch.loss_mask / batch.loss_mask.sum()
    return batch


def engine_of(model, topology, **settings):
    from spmdrl.config import OptimConfig, TrainConfig
    from spmdrl.engines.fsdp.engine import FsdpEngine

    settings = {"micro_batch_tokens": 128, "optim": OptimConfig(lr=1e-3)} | settings
    return FsdpEngine.build("policy", model, TrainConfig(**settings), topology)


def hf_logprobs(model, batch, dtype):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda()
    out = torch.zeros(batch.num_tokens)
    with torch.no_grad():
        for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
            ids = batch.token_ids[start:end].cuda()
            log_p = hf(ids[None]).logits[0].float().log_softmax(-1)[:-1]
            out[start + 1 : end] = log_p.gather(-1, ids[1:, None])[:, 0].cpu()
    return out * batch.loss_mask


def test_nccl_is_asked_for_its_errors(topology, monkeypatch):
    from spmdrl.distributed import torch_compat

    topology.connect()
    assert torch_compat.nccl_errors() == []
    monkeypatch.setattr(torch_compat.ErrorType, "SUCCESS", None)  # what it says is an error
    assert torch_compat.nccl_errors() == ["SUCCESS in the group of ranks 0"]


def test_packed_logprobs_match_transformers(topology, model):
    batch = batch_of([20, 33, 7, 120, 64])
    exact = hf_logprobs(model, batch, torch.float32)
    got32 = engine_of(model, topology, dtype="float32").logprobs(batch, 1.0).logprobs
    torch.testing.assert_close(got32, exact, rtol=1e-4, atol=1e-4)
    # the varlen kernel in bf16 is as near to the truth as transformers in bf16 is
    got16 = engine_of(model, topology, dtype="bfloat16").logprobs(batch, 1.0).logprobs
    theirs = hf_logprobs(model, batch, torch.bfloat16)
    assert (got16 - exact).abs().mean() <= 1.5 * (theirs - exact).abs().mean() + 1e-3


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("prefixes", [None, [-1, 0, 0, -1, 3]], ids=["whole", "prefixes"])
def test_flash_and_padded_attention_agree_in_value_and_gradient(prefixes, window):
    """Flash attention aligns the last query with the last key, as copies of a prefix want it."""
    from spmdrl.engines.fsdp import attention
    from spmdrl.engines.fsdp.packed_rows import Packing

    lens = torch.tensor([40, 130, 1, 64, 33])
    shared = None if prefixes is None else torch.tensor(prefixes)
    packing = Packing.build(lens, torch.device("cuda"), prefixes=shared)
    shapes = [(1, 8, int(lens.sum()), 64), (1, 2, int(lens.sum()), 64), (1, 2, int(lens.sum()), 64)]
    half = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    full = [t.detach().float().requires_grad_() for t in half]
    up = torch.randn(1, int(lens.sum()), 8, 64, device="cuda")
    module = torch.nn.Module()
    got, _ = attention.packed_attention(module, *half, None, packing, sliding_window=window)
    want, _ = attention.packed_attention(module, *full, None, packing, sliding_window=window)
    torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2)
    grads = torch.autograd.grad((got.float() * up).sum(), half)
    wants = torch.autograd.grad((want * up).sum(), full)
    for a, b in zip(grads, wants, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("window", [None, 16])
def test_flash_and_padded_attention_agree_about_sinks(window):
    from spmdrl.engines.fsdp import attention
    from spmdrl.engines.fsdp.packed_rows import Packing

    packing = Packing.build(torch.tensor([40, 130, 1, 64]), torch.device("cuda"))
    shapes = [(1, 8, 235, 64), (1, 2, 235, 64), (1, 2, 235, 64), (8,)]
    half = [torch.randn(s, device="cuda").bfloat16().requires_grad_() for s in shapes]
    full = [t.detach().float().requires_grad_() for t in half]
    up, module = torch.randn(1, 235, 8, 64, device="cuda"), torch.nn.Module()
    outs = [
        attention.packed_attention(module, *t[:3], None, packing, sliding_window=window, s_aux=t[3])
        for t in (half, full)
    ]
    torch.testing.assert_close(outs[0][0].float(), outs[1][0], rtol=2e-2, atol=2e-2)
    grads = [
        torch.autograd.grad((out[0].float() * up).sum(), t)
        for out, t in zip(outs, (half, full), strict=True)
    ]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a.float(), b, rtol=5e-2, atol=5e-2)


def test_an_update_waits_for_the_gpu_as_often_whatever_the_micro_batches(topology, model):
    import warnings

    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig

    batch, found = batch_of([20, 33, 7, 120, 64, 18, 90, 31]), []
    for budget in (1000, 64):
        engine = engine_of(model, topology, micro_batch_tokens=budget)
        engine.update(batch, policy_objective(AlgoConfig()), 1.0)  # compiles kernels
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                engine.update(batch, policy_objective(AlgoConfig()), 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append(sum("synchronizing" in str(each.message) for each in seen))
    assert found[0] == found[1] <= 10, found


def test_updates_with_offload_and_checkpointing_are_the_same(topology, model):
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig

    results = []
    for settings in ({}, {"offload_params": True, "offload_optimizer": True,
                          "activation_checkpointing": True}):  # fmt: skip
        engine = engine_of(model, topology, dtype="float32", **settings)
        for _ in range(3):
            engine.offload()
            if settings:
                assert all(p.device.type == "cpu" for p in engine.params)
            engine.onload()
            metrics = engine.update(batch_of([20, 33, 7]), policy_objective(AlgoConfig()), 1.0)
        results.append(metrics)
    assert results[0] == pytest.approx(results[1], rel=1e-5, abs=1e-7)


def test_offload_gives_the_memory_back(topology, tmp_path):
    big = save_qwen3(tmp_path / "big", hidden_size=1024, intermediate_size=4096, head_dim=64)
    engine = engine_of(str(big), topology, offload_params=True, offload_optimizer=True)
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig

    engine.update(batch_of([20, 33]), policy_objective(AlgoConfig()), 1.0)
    held = torch.cuda.memory_allocated()
    weights = sum(p.numel() for p in engine.params) * 4
    engine.offload(keep_weights=True)
    assert 1.9 * weights < held - torch.cuda.memory_allocated() < 2.5 * weights  # two moments
    engine.offload()
    assert held - torch.cuda.memory_allocated() > 2.9 * weights  # weights and two moments


def test_hf_rollout_and_trainer_agree(topology, model):
    from spmdrl.config import RolloutConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.base import Request, SamplingParams
    from spmdrl.rollout.build import build_engine

    ranks = Topology.build(topology.device, dp=-1, tp=1)
    rollout = build_engine(model, RolloutConfig(engine="hf", dtype="float32"), 200, ranks)
    actor = engine_of(model, topology, dtype="float32")
    rollout.sleep()
    rollout.wake()
    rollout.load_weights(actor.named_weights(torch.float32, 1 << 20))
    assert rollout.check_weights(actor.named_weights(torch.float32, 1 << 20)) == 24
    requests = [Request([5, 6, 7 + i], seed=i) for i in range(4)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    done = rollout.generate(requests, params)
    assert done == rollout.generate(requests, params)
    batch = batch_of([3 + len(c.token_ids) for c in done])
    batch.token_ids = torch.tensor(
        [t for r, c in zip(requests, done, strict=True) for t in r.prompt_ids + c.token_ids]
    )
    got = actor.logprobs(batch, 1.0).logprobs
    for i, c in enumerate(done):
        end = int(batch.cu_seqlens[i + 1])
        torch.testing.assert_close(got[end - 20 : end], torch.tensor(c.logprobs), rtol=0, atol=1e-3)


def test_recurrent_layers_compute_packed_rows_by_varlen_kernels(monkeypatch):
    """Where flash-linear-attention and causal-conv1d are installed beside the GPU's packages."""
    pytest.importorskip("fla")
    pytest.importorskip("causal_conv1d")
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    from spmdrl.engines.fsdp import attention, per_sequence_layers
    from spmdrl.engines.fsdp.trial import logprobs_one_by_one, logprobs_packed

    decisions, own = [], per_sequence_layers.keeps_apart
    monkeypatch.setattr(
        per_sequence_layers, "keeps_apart", lambda *a: decisions.append(own(*a)) or decisions[-1]
    )
    config = Qwen3_5TextConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, head_dim=64,
        num_attention_heads=2, num_key_value_heads=2, linear_num_key_heads=2,
        linear_num_value_heads=2, linear_key_head_dim=64, linear_value_head_dim=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    sequences = [torch.randint(256, (n,), device="cuda") for n in (70, 200, 130)]
    with torch.no_grad():
        want = logprobs_one_by_one(model, sequences)
        per_sequence_layers.run_per_sequence(model)
        model.set_attn_implementation(attention.NAME)
        got = logprobs_packed(model, sequences)
    assert decisions == [True]
    torch.testing.assert_close(got.float(), want.float(), rtol=0, atol=0.05)


def test_grouped_experts_of_megatron_are_the_loop(topology):
    """In bfloat16, where the GPU's grouped products run; the time of both is printed."""
    from time import perf_counter

    import tiny_megatron_models as tiny

    from spmdrl.engines.megatron import cpu_shim

    cpu_shim.install()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.experts import SequentialMLP

    from spmdrl.engines.megatron.grouped_experts import can_group
    from spmdrl.engines.megatron.model import Degrees, build_chunks, transformer_config

    hf = tiny.make_config(
        "qwen3_moe", num_experts=64, hidden_size=512, moe_intermediate_size=256,
        num_hidden_layers=1, mlp_only_layers=[],
    )  # fmt: skip
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    config = transformer_config(hf, Degrees(), torch.bfloat16, moe_grouped_gemm=True)
    (chunk,) = build_chunks(hf, config, "policy")
    experts = chunk.decoder.layers[0].mlp.experts
    for parameter in experts.parameters():
        parameter.data.normal_(std=0.05)
    counts = torch.randint(0, 200, (64,), generator=torch.Generator().manual_seed(0))
    counts[torch.tensor([0, 10, 63])] = 0
    rows = torch.randn(int(counts.sum()), 512, dtype=torch.bfloat16, device="cuda")
    probs = torch.rand(len(rows), device="cuda")
    first = experts.local_experts[0]
    assert can_group(rows, first.linear_fc1.weight, first.linear_fc2.weight)
    results = {}
    for name, forward in {"together": experts, "loop": SequentialMLP.forward}.items():
        arguments = (rows.requires_grad_(), counts, probs)
        for _ in range(3):
            experts.zero_grad(set_to_none=True)
            rows.grad = None
            torch.cuda.synchronize()
            start = perf_counter()
            output, _ = forward(*arguments) if forward is experts else forward(experts, *arguments)
            output.float().square().sum().backward()
            torch.cuda.synchronize()
            seconds = perf_counter() - start
        print(f"64 experts, {len(rows)} tokens, {name}: {seconds * 1e3:.2f} ms")
        results[name] = [output, rows.grad, *(p.grad for p in experts.parameters())]
    parallel_state.destroy_model_parallel()
    for ours, loop in zip(*results.values(), strict=True):
        assert (ours - loop).float().norm() <= 0.01 * loop.float().norm()
