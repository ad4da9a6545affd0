"""Megatron models against transformers, on real gloo ranks: outputs, gradients, every weight."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import tiny_megatron_models as tiny
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tiny_megatron_models import Case

pytestmark = [pytest.mark.ranks, pytest.mark.megatron]

SEQUENCE = {"tensor": 2, "sequence": True}
NEW = ["mistral", "seed_oss", "glm4", "gemma2", "gemma3_text"]
SPARSE = ["qwen2_moe", "glm4_moe", "gpt_oss"]
DELTA = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
LATER = ["exaone4", "smollm3", "phi3", "ministral", "gemma", "olmo2"]
LATER_EXPERTS = ["glm4_moe_lite", "deepseek_v2", "dots1", "exaone_moe", "minimax_m2", "olmoe"]
TWO_RANKS = [
    Case(SEQUENCE, [*LATER, *LATER_EXPERTS]),
    Case({"pipeline": 2}, [*LATER, *LATER_EXPERTS]),
    Case({"context": 2}, ["exaone4", "smollm3", "glm4_moe_lite"]),
    Case(SEQUENCE | {"expert": 2}, LATER_EXPERTS, recompute=True),
    Case({"tensor": 2}, ["gemma2", "glm4", "qwen3_5_text"]),
    Case(SEQUENCE, [*NEW, *SPARSE, *DELTA]),
    Case(SEQUENCE, ["gemma3_text", "gpt_oss"], recompute="selective"),
    Case(SEQUENCE | {"expert": 2}, [*SPARSE, "qwen3_next"], recompute=True),
    Case({"pipeline": 2}, [*NEW, *SPARSE, *DELTA]),
    Case({"context": 2}, [*NEW, *SPARSE]),
    Case({"tensor": 2}, ["qwen3", "qwen2", "llama"]),
    Case(SEQUENCE, ["qwen3", "qwen2", "qwen3_moe", "deepseek_v3"]),
    Case(SEQUENCE | {"expert_tensor": 2}, ["mixtral"]),
    Case(SEQUENCE | {"expert": 2}, ["qwen3_moe normalised", "deepseek_v3"], recompute=True),
    Case(SEQUENCE, ["qwen3_moe", "deepseek_v3"], recompute="selective"),
    Case({"expert_tensor": 2}, ["deepseek_v3 ungrouped"]),
    Case({"pipeline": 2}, ["qwen3", "llama", "deepseek_v3", "deepseek_v3 ungrouped"]),
    Case({"pipeline": 2, "virtual": 2}, ["qwen3", "qwen2", "qwen3_moe"]),
    Case({"pipeline": 2, "virtual": 2}, ["llama"], recompute=True),
    Case({"context": 2}, ["qwen3", "llama", "mixtral", "deepseek_v3"]),
    Case({"expert": 2}, ["qwen3_moe", "mixtral", "deepseek_v3"]),
    Case({"tensor": 2}, ["qwen2"], kind="value"),
    Case(SEQUENCE, ["qwen3", "deepseek_v3"], kind="value"),
    Case({"pipeline": 2}, ["qwen3"], kind="value"),
]
FOUR_RANKS = [
    Case({"tensor": 4}, ["qwen3", "qwen2", "phi3"]),  # more ranks than the two key-value heads
    Case(SEQUENCE | {"context": 2}, ["qwen3", "deepseek_v3"]),
    Case({"tensor": 2, "pipeline": 2}, ["qwen3"]),
    Case(SEQUENCE | {"pipeline": 2, "virtual": 2, "expert": 2}, ["qwen3_moe", "mixtral"]),
    Case(SEQUENCE | {"expert": 2, "expert_tensor": 2}, ["mixtral"]),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in tiny.FAMILIES:
        model = tiny.save_model(family, folder / family)
        tiny.save_reference(model, folder / family)
    return folder


@contextmanager
def arranged(degrees: Any):
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from megatron.core import parallel_state

    with mcore_cpu.scope():
        parallel_state.initialize_model_parallel(
            degrees.tensor, degrees.pipeline, degrees.virtual if degrees.virtual > 1 else None,
            context_parallel_size=degrees.context, expert_model_parallel_size=degrees.expert,
            expert_tensor_parallel_size=degrees.expert_tensor, create_gloo_process_groups=False,
        )  # fmt: skip
        yield
        parallel_state.destroy_model_parallel()


def train_pass(degrees, chunks, config, kind, true, softcap=None):
    """Forward and backward of two micro-batches. The largest difference of their outputs."""
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from spmdrl.engines.megatron.attention import held_rows, packed_params

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    cp, rank = degrees.context, parallel_state.get_context_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank() if kind == "policy" else 0
    differences = []

    def step(numbers, model):
        number = next(numbers)
        lens = torch.tensor(tiny.BATCHES[number])
        rows = held_rows(lens, cp, rank)
        params = packed_params(lens, torch.device("cpu"), cp, rank)
        ids = tiny.token_ids(number)[rows][None]

        def loss(out):
            expected = true[number][rows]
            first = tensor_rank * out.shape[-1]
            last = min(first + out.shape[-1], expected.shape[1])
            mine = out[0, :, : last - first]
            if softcap is not None:  # which the engine's own head does
                mine = softcap * torch.tanh(mine / softcap)
            differences.append((mine - expected[:, first:last]).abs().max().item())
            weights = tiny.weights_of_loss(number, expected.shape[1])[rows, first:last]
            return (mine * weights).sum(), torch.tensor(len(rows), dtype=torch.int), {}

        return model(ids, None, None, packed_seq_params=params), loss

    iterators = [iter(range(2)) for _ in wrapped]
    one = len(wrapped) == 1
    get_forward_backward_func()(
        forward_step_func=step, data_iterator=iterators[0] if one else iterators,
        model=wrapped[0] if one else wrapped, num_microbatches=2, seq_length=1,
        micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    return max(differences, default=0.0)


def gradient_difference(named_parts, grads):
    """The largest, relative to the largest element of its tensor, and where it is."""
    worst = 0.0, ""
    for name, parameter, parts in named_parts:
        for piece in parts if isinstance(parameter, torch.nn.Parameter) else ():
            true = grads[piece.name]
            away = piece.view(parameter.main_grad) - true[tuple(slice(*ab) for ab in piece.box)]
            size = max(true.abs().max().item(), 1e-30)  # 0: an expert that no token chose
            worst = max(worst, (away.abs().max().item() / size, name))
    return worst


def balances(named, held):
    """Of each router the bias now and the one that was loaded, which no training may change."""
    loaded = {name: tensor for name, _, _, tensor in held}
    for name, tensor, parts in named:
        if name.endswith("expert_bias"):
            yield tensor, loaded[parts[0].name]


def work(topology, folder, cases):
    """For every case what differs from transformers, and this rank's parts of all weights."""
    from transformers import AutoConfig

    from spmdrl.engines.megatron.hf_mapping import load_pretrained, pieces
    from spmdrl.engines.megatron.layout import softcap
    from spmdrl.engines.megatron.model import Degrees, build_chunks, transformer_config

    results = {}
    for case in cases:
        degrees = Degrees(**case.degrees)
        with arranged(degrees):
            for family in case.families:
                hf_config = AutoConfig.from_pretrained(folder / family)
                config = transformer_config(
                    hf_config, degrees, torch.float32, case.recompute,
                    moe_grouped_gemm="context" not in case.degrees,  # there: one by one
                )  # fmt: skip
                chunks = build_chunks(hf_config, config, case.kind)
                load_pretrained(chunks, folder / family, hf_config)
                named = [part for chunk in chunks for part in pieces(chunk, hf_config)]
                held = [
                    (p.name, p.shape, p.box, p.view(tensor).detach().clone())
                    for _, tensor, parts in named for p in parts if not p.tied
                ]  # fmt: skip
                if case.kind == "value" and chunks[-1].post_process:
                    assert not any(p.any() for p in chunks[-1].output_layer.parameters())
                    chunks[-1].output_layer.weight.data.copy_(tiny.value_weight())
                reference = torch.load(folder / family / "reference.pt")[case.kind]
                cap = (
                    softcap(hf_config, "final_logit_softcapping") if case.kind == "policy" else None
                )
                outputs = train_pass(degrees, chunks, config, case.kind, reference["outputs"], cap)
                gradients = gradient_difference(named, reference["grads"])
                assert all(torch.equal(*pair) for pair in balances(named, held)), "a router moved"
                results[str(case.degrees), family, case.kind] = outputs, gradients, held
    return results


def check(folder, results):
    """results: of all ranks."""
    for case in results[0]:
        outputs = max(rank[case][0] for rank in results)
        gradients = max(rank[case][1] for rank in results)
        print(*case, outputs, *gradients)
        assert 0 < outputs < 1e-5, (case, outputs)
        assert 0 < gradients[0] < 1e-5, (case, gradients)
        files = load_file(folder / case[1] / "model.safetensors")
        if case[2] == "value":
            files.pop("lm_head.weight", None)
            files |= {"value_head.weight": torch.zeros(1, 64), "value_head.bias": torch.zeros(1)}
        seen = {name: torch.zeros_like(tensor) for name, tensor in files.items()}
        for rank in results:
            for name, shape, box, tensor in rank[case][2]:
                where = tuple(slice(a, b) for a, b in box)
                assert shape == files[name].shape
                assert torch.equal(tensor, files[name][where]), (case, name, box)
                seen[name][where] = 1
        assert not [name for name, mask in seen.items() if not mask.all()], case


def test_two_ranks_are_transformers(models):
    check(models, run_ranks(2, work, models, TWO_RANKS, timeout_s=240))


def test_four_ranks_are_transformers(models):
    check(models, run_ranks(4, work, models, FOUR_RANKS, timeout_s=150))
