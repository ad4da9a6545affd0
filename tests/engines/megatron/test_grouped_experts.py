"""Experts that are multiplied together, against megatron-core's own loop over the same experts."""

from __future__ import annotations

import pytest
import tiny_megatron_models as tiny
import torch
from ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

HIDDEN = 64
COUNTS = {  # tokens of each of the four experts, and how many grouped products they take
    "some tokens each": ([3, 5, 1, 7], 2),
    "none for two of them": ([0, 9, 0, 2], 2),
    "none at all": ([0, 0, 0, 0], 0),
}


def results_of(experts, forward, counts):
    """Output and all gradients of `forward` on tokens drawn from one seed."""
    drawn = torch.Generator().manual_seed(sum(counts))
    rows = torch.randn(sum(counts), HIDDEN, generator=drawn, requires_grad=True)
    probs = torch.rand(sum(counts), generator=drawn, requires_grad=True)
    experts.zero_grad(set_to_none=True)
    output, bias = forward(rows, torch.tensor(counts), probs)
    assert bias is None
    (output * torch.randn(output.shape, generator=drawn)).sum().backward()
    return [output, rows.grad, probs.grad, *(p.grad for p in experts.parameters())]


def compare(topology, family):
    """For each case the largest relative difference and how many grouped products were called."""
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu
    from spmdrl.engines.megatron.model import Degrees, build_chunks, transformer_config

    hf = tiny.make_config(family)
    mcore_cpu.install()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.experts import SequentialMLP

    from spmdrl.engines.megatron import grouped_experts

    calls, product = 0, grouped_experts.grouped_mm

    def counted(*args, **options):
        nonlocal calls
        calls += 1
        return product(*args, **options)

    grouped_experts.grouped_mm = counted
    with mcore_cpu.scope():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        config = transformer_config(hf, Degrees(), torch.float32, moe_grouped_gemm=True)
        (chunk,) = build_chunks(hf, config, "policy")
        experts = chunk.decoder.layers[0].mlp.experts
        drawn = torch.Generator().manual_seed(1)
        for parameter in experts.parameters():
            parameter.data.normal_(std=0.2, generator=drawn)
        found = {}
        for name, (counts, _) in COUNTS.items():
            calls = 0
            with torch.no_grad():
                experts(torch.ones(sum(counts), HIDDEN), torch.tensor(counts),
                        torch.ones(sum(counts)))  # fmt: skip
            forward_calls = calls
            got = results_of(experts, experts, counts)
            want = results_of(experts, lambda *a: SequentialMLP.forward(experts, *a), counts)
            found[name] = forward_calls, max(
                ((a - b).abs().max() / b.abs().max().clamp(min=1e-3)).item() if b.numel() else 0.0
                for a, b in zip(got, want, strict=True)
            )  # fmt: skip
        calls = 0
        experts.local_experts[2].linear_fc2.adapters = torch.nn.Identity()  # as lora.py hangs them
        results_of(experts, experts, [3, 5, 1, 7])
        found["adapters"] = calls, 0.0
        parallel_state.destroy_model_parallel()
    return found


@pytest.mark.parametrize("family", ["gpt_oss", "mixtral"])  # with biases, and without
def test_they_are_the_loop_and_fall_back_to_it(family: str) -> None:
    (found,) = run_ranks(1, compare, family)
    assert found.pop("adapters") == (0, 0.0)
    assert {name: calls for name, (calls, _) in found.items()} == {
        name: calls for name, (_, calls) in COUNTS.items()
    }
    assert all(difference < 1e-5 for _, difference in found.values()), found


def limits(topology):
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from spmdrl.engines.megatron.grouped_experts import can_group

    def taken(dtype, width, device):
        return can_group(
            torch.empty(4, 64, dtype=dtype, device=device),
            torch.empty(2 * width, 64, dtype=dtype, device=device),
            torch.empty(64, width, dtype=dtype, device=device),
        )

    # meta stands for a GPU here: neither is a CPU
    return [
        taken(torch.float32, 48, "cpu"), taken(torch.float32, 48, "meta"),
        taken(torch.bfloat16, 12, "meta"),
    ]  # fmt: skip


def test_the_kernels_of_gpus_take_bfloat16_and_whole_16_bytes() -> None:
    assert run_ranks(1, limits) == [[True, False, False]]
