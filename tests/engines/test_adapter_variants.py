"""DoRA, adapters on the experts of a mixture, and a base in 4 bits: as peft computes them, the same
on every number of ranks, resumed, exported, and merged into vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from adapter_runs import go_on, resume_on, same_on, trained
from ranks import run_calls
from tiny_models import save_qwen3_moe
from torch import Tensor, nn
from training_batches import CONFIG

from spmdrl.config import ConfigError, LoraConfig, OptimConfig, TrainConfig

# Adam divides by the size of a gradient: where one is almost zero its rounding would show
TRAIN = replace(CONFIG, optim=OptimConfig(lr=3e-3, weight_decay=0.0, eps=1e-6))
DORA = LoraConfig(rank=5, alpha=7, use_rslora=True, use_dora=True)
STACKS = ("experts.gate_up_proj", "experts.down_proj")
EXPERTS = LoraConfig(rank=8, alpha=7, target_modules=("o_proj",), target_parameters=STACKS)
LORA = {"dora": DORA, "experts": EXPERTS}
if find_spec("bitsandbytes") is not None:
    LORA["nf4"] = LoraConfig(rank=4, quantization="nf4")
# parameters that are trained: 7 layers' A, B and magnitudes; of 8 experts A and B, and o_proj's
COUNTS = {
    "dora": 2 * (5 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 128)) + 3 * 64 + 128 + 2 * 128
                 + 64),
    "experts": 2 * (8 * 8 * (64 + 64 + 32 + 64) + 8 * (128 + 64)),
    "nf4": 2 * 4 * (64 + 128 + 2 * (64 + 64) + 128 + 64 + 3 * (64 + 128)),
}  # fmt: skip


def pushed_on(topology: Any, model: str, config: TrainConfig) -> list[float]:
    """Pushes after two updates and after three, each weight compared bit by bit; returns how far
    vLLM's log-probabilities are from the trainer's.
    """
    from rollout_checks import rollout_difference

    from spmdrl.config import RolloutConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology
    from spmdrl.rollout.vllm.engine import VllmEngine
    from spmdrl.training import weight_sync

    actor, _ = trained(topology, "policy", model, config)
    ranks = Topology.build(topology.device, dp=-1, tp=1)
    rollout = VllmEngine(model, RolloutConfig(kv_cache_mib=16, dtype="float32"), 64, ranks)
    many = WeightsConfig(check=True, bucket_mib=0)  # rounds; in each some buckets, not one per row
    with mock.patch.object(weight_sync, "slot_bytes", return_value=8192):
        sync = weight_sync.WeightSync(actor, actor.topology, rollout, ranks, "float32", many)
    found = []
    for _ in range(2):
        sync.push()
        found.append(rollout_difference(actor, actor.topology, rollout))
        go_on(actor, topology, "policy")
    rollout.shutdown()
    return found


def started_on(topology: Any, model: str, config: TrainConfig) -> dict[str, Tensor]:
    """The weights of an engine that has not learnt anything."""
    engine, _ = trained(topology, "policy", model, config, updates=0)
    return {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def models(qwen3: Path, folder: Path) -> dict[str, str]:
    mixture = str(save_qwen3_moe(folder / "mixture"))
    return {"dora": str(qwen3), "experts": mixture, "nf4": str(qwen3)}


@pytest.fixture(scope="module")
def runs(models: dict[str, str], folder: Path) -> dict[Any, Any]:
    """{(ranks, what, case): what each rank got}"""
    found: dict[Any, Any] = {}
    for world in (2, 1):
        calls: dict[Any, Any] = {}
        if world == 2:  # first: the ranks find all functions where the first one is
            own = (models["experts"], replace(TRAIN, lora=EXPERTS))
            calls[world, "pushed"] = (pushed_on, own)
        if world == 2 and "nf4" in LORA:
            own = (models["nf4"], replace(TRAIN, lora=LORA["nf4"]))
            calls[world, "started"] = (started_on, own)
        for case, lora in LORA.items():
            config, saved = replace(TRAIN, lora=lora), str(folder / case)
            if world == 2:
                config = replace(config, activation_checkpointing=True, micro_batch_tokens=41)
            own = (models[case], config)
            calls[world, "same", case] = (same_on, ("policy", *own, saved if world == 2 else None))
            calls[world, "resumed", case] = (resume_on, ("policy", *own, saved))
        found |= dict(zip(calls, run_calls(world, calls.values(), timeout_s=360), strict=True))
    return found


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize("case", LORA)
def test_training_does_not_depend_on_ranks_and_leaves_the_base(runs: Any, case: str) -> None:
    metrics, more, weights, seen = runs[1, "same", case][0]
    assert seen["trained"] == COUNTS[case]
    assert seen["base"] and seen["off"] == 0.0 and seen["on"] > 1e-3
    for theirs, their_more, their_weights, away in runs[2, "same", case]:
        assert away["base"] and away["off"] <= 1e-6 and away["on"] > 1e-3
        for got, want in zip([*theirs, their_more], [*metrics, more], strict=True):
            for name in ("loss", "grad_norm"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-6), name
        for name, tensor in weights.items():
            torch.testing.assert_close(their_weights[name], tensor, rtol=0, atol=2e-5, msg=name)


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize("case", LORA)
def test_a_run_resumes_bit_for_bit_and_on_other_ranks(runs: Any, case: str) -> None:
    _, more, weights, _ = runs[2, "same", case][0]
    for metrics, resumed in runs[2, "resumed", case]:
        assert metrics == more
        assert all(torch.equal(resumed[name], tensor) for name, tensor in weights.items())
    metrics, resumed = runs[1, "resumed", case][0]
    assert metrics["loss"] == pytest.approx(more["loss"], rel=1e-6)
    for name, tensor in weights.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=2e-5, msg=name)


@pytest.mark.ranks
@pytest.mark.vllm
def test_vllm_computes_with_adapters_on_experts(runs: Any) -> None:
    """DoRA's push is one of test_lora.py."""
    for away in runs[2, "pushed"]:
        assert max(away) < 1e-5


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize("case", LORA)
def test_a_checkpoint_is_exported_merged_and_for_peft(
    runs: Any, models: dict[str, str], folder: Path, tmp_path: Path, case: str
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from spmdrl.engines.fsdp.lora_files import (
        adapter_tensors,
        lora_of,
        merged_sources,
        read_base,
        with_magnitudes,
        write_adapter,
    )
    from spmdrl.engines.hf_export import in_parts, reader_of
    from spmdrl.hub.hf_folder import load_hf_config
    from spmdrl.weights.checkpoint_names import checkpoint_parts

    saved = read_base(folder / case)
    assert saved is not None and lora_of(saved) == replace(LORA[case], seed=0)
    tensors = adapter_tensors(reader_of(folder / case), saved)
    parts = checkpoint_parts(load_hf_config(models[case]))
    want = runs[2, "same", case][0][3]["saved"]
    merged = {}
    for name, shape, read in merged_sources(tensors, saved, ""):
        merged[name] = tensor = read()
        for own, part in in_parts(parts, name, shape, lambda whole=tensor: whole).read():
            torch.testing.assert_close(part, want[own], rtol=0, atol=1e-6)
    files = with_magnitudes(tensors, saved, "")
    write_adapter(tmp_path, files, lora_of(saved), saved["layers"], models[case], saved["stacks"])
    base = AutoModelForCausalLM.from_pretrained(models[case], dtype=torch.float32)
    ids = torch.randint(4, 60, (3, 13))
    whole = AutoModelForCausalLM.from_pretrained(models[case], dtype=torch.float32)
    whole.load_state_dict(merged, strict=False)
    start, wanted = base(ids).logits, whole(ids).logits
    if case == "nf4":  # the adapter belongs to the base as it was rounded
        round_layers(base, saved["layers"])
    got = PeftModel.from_pretrained(base, tmp_path).eval()(ids).logits
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    assert (got - start).abs().max() > 1e-3


@pytest.mark.ranks
@pytest.mark.vllm
def test_a_checkpoint_of_another_kind_of_adapter_is_refused(runs: Any, folder: Path) -> None:
    from spmdrl.engines.fsdp.lora import Adapters
    from spmdrl.engines.fsdp.lora_files import difference, read_base

    for case, changes, said in (
        ("dora", {"use_dora": False}, "lora.use_dora=True, this run has False"),
        ("experts", {"target_parameters": ()}, "4 stacked weights of experts, this run on 0"),
    ):
        saved = read_base(folder / case)
        assert saved is not None
        lora = replace(LORA[case], **changes)
        stacks = saved["stacks"] if lora.target_parameters else []
        print_ = saved["fingerprint"]
        mine = Adapters(lora, saved["model"], "float32", saved["layers"], stacks, False, {}, print_)
        assert said in str(difference(mine, folder / case))


# ---- a base in 4 bits


def round_layers(hf: Any, layers: list[str]) -> None:
    """Rounds weights of a model to NF4 by bitsandbytes alone."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    for name in layers:
        weight = hf.get_parameter(f"{name}.weight").data
        weight.copy_(dequantize_4bit(*quantize_4bit(
            weight, blocksize=64, quant_type="nf4", compress_statistics=True
        )))  # fmt: skip


def test_a_quantised_layer_computes_with_the_nearest_values_and_is_a_quarter_as_large() -> None:
    """Of a weight's block of 64: 16 values times its largest magnitude, whose 8 bits are exact to
    1 per cent.
    """
    pytest.importorskip("bitsandbytes")
    from spmdrl.engines.fsdp.quantized_base import BYTES, Nf4Linear

    values = torch.tensor([
        -1.0, -0.6961928, -0.52507305, -0.39491748, -0.28444138, -0.18477343, -0.09105003, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
    ])  # fmt: skip
    torch.manual_seed(0)
    linear = nn.Linear(192, 512)
    layer = Nf4Linear(linear, torch.float32)
    layer.set_weight(linear.weight.detach())
    blocks = linear.weight.detach().view(-1, 64)
    largest = blocks.abs().amax(1, keepdim=True)
    nearest = values[(blocks[..., None] / largest[..., None] - values).abs().argmin(-1)] * largest
    got = layer.weight.view(-1, 64)
    assert (got - nearest).abs().div(largest).max() < 0.01
    assert (got - blocks).abs().div(largest).max() < 0.16  # the widest gap is 0.30
    x = torch.randn(5, 192, requires_grad=True)
    out = layer(x)
    wanted = nn.functional.linear(x, layer.weight, linear.bias)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-6)
    (gradient,) = torch.autograd.grad(out.square().sum(), x)
    (other,) = torch.autograd.grad(wanted.square().sum(), x)
    torch.testing.assert_close(gradient, other, rtol=0, atol=1e-5)
    held = sum(part.nbytes for part in layer.codes_of())
    assert held == pytest.approx(linear.weight.numel() * BYTES, rel=1e-3) and 2 / BYTES > 3.8
    assert [*layer.state_dict()] == ["bias"]


@pytest.mark.ranks
@pytest.mark.vllm
def test_without_its_adapter_the_model_is_the_rounded_base(
    runs: Any, models: dict[str, str]
) -> None:
    """And the weights that were not quantised are the base's, bit by bit."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM

    start = runs[2, "started"][0]
    hf = AutoModelForCausalLM.from_pretrained(models["nf4"], dtype=torch.float32)
    layers = [n.removesuffix(".weight") for n in start if ".layers." in n and start[n].ndim == 2]
    assert len(layers) == 14
    before = {n: p.clone() for n, p in hf.named_parameters()}
    round_layers(hf, layers)
    for name, tensor in hf.named_parameters():
        assert torch.equal(start[name], tensor.data), name
        assert torch.equal(tensor, before[name]) == (name.removesuffix(".weight") not in layers)


# ---- against peft


class Engine(nn.Module):
    """Names its parameters as an engine's module does."""

    def __init__(self, hf: nn.Module) -> None:
        super().__init__()
        self.hf = hf


def adapted(model: str, lora: LoraConfig, dtype: str = "float32") -> tuple[Any, Any]:
    from spmdrl.engines.fsdp.lora import add_adapters
    from spmdrl.engines.fsdp.model import build_model

    hf = build_model(model, full=True)
    hf.set_attn_implementation("eager")
    config = TrainConfig(dtype=dtype, lora=lora)
    adapters = add_adapters(hf, model, config, {}, full=True, fast_cpu=False)
    adapters.start(Engine(hf), None)  # nothing is quantised
    return hf.eval(), adapters


def peft_model(model: str, **settings: Any) -> Any:
    """peft's adapter on the model, none of whose tensors is as it starts."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, attn_implementation="eager"
    )
    torch.manual_seed(3)
    made = get_peft_model(base, PeftConfig(lora_alpha=4, init_lora_weights=False, **settings))
    for name, p in made.named_parameters():
        if "magnitude" in name:
            p.data *= 1 + 0.3 * torch.rand_like(p)
        elif "lora_B" in name:
            p.data *= 0.3
    return made.eval()


def peft_gradients(hf: Any, adapters: Any) -> Iterator[tuple[str, Tensor]]:
    """Yields the gradients of a model's adapters by the names of peft's parameters."""
    from spmdrl.engines.fsdp.dora import OFFSET
    from spmdrl.engines.fsdp.expert_adapters import factor_names, peft_tensors
    from spmdrl.weights.checkpoint_names import ADAPTER

    stacked = {
        stack + part: hf.get_parameter(name).grad
        for stack in adapters.stacks
        for part, name in zip(ADAPTER, factor_names(stack), strict=True)
    }
    for name, tensor in peft_tensors(adapters.stacks, stacked).items():
        yield name.replace(".weight", ".default.weight"), tensor
    for name, p in hf.named_parameters():
        if p.requires_grad and "lora_A_" not in name and "lora_B_" not in name:
            yield name.replace(OFFSET, "lora_magnitude_vector.default.weight"), p.grad


@pytest.fixture(scope="module")
def families(models: dict[str, str], folder: Path) -> dict[str, str]:
    """gpt_oss: its experts' weights are transposed, and have biases."""
    from test_expert_parallel import save_family

    save_family("gpt_oss", folder / "gpt_oss")
    return models | {"gpt_oss": str(folder / "gpt_oss")}


@pytest.mark.parametrize("case", ["dora", "experts", "gpt_oss"])
def test_forward_and_gradients_are_those_of_peft(
    families: dict[str, str], tmp_path: Path, case: str
) -> None:
    """And what peft has written is what a run starts from."""
    from spmdrl.engines.fsdp.lora import check_lora
    from spmdrl.hub.hf_folder import load_hf_config

    model = families[case]
    settings: dict[str, Any] = {"target_modules": ["v_proj", "down_proj"], "use_dora": True}
    if case != "dora":
        settings = {"target_modules": ["v_proj"], "target_parameters": list(STACKS)}
    theirs = peft_model(model, r=8, **settings)
    theirs.save_pretrained(tmp_path)
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    lora = LoraConfig(rank=8, alpha=4, adapter=str(tmp_path), **settings)
    check_lora("actor", TrainConfig(lora=lora), load_hf_config(model))
    ours, adapters = adapted(model, lora)
    ids = torch.randint(4, 60, (2, 11))
    want, got = theirs(ids).logits, ours(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    for logits in (want, got):
        logits.log_softmax(-1)[..., 7].sum().backward()
    named = dict(theirs.named_parameters())
    compared = 0
    for name, gradient in peft_gradients(ours, adapters):
        wanted = named[f"base_model.model.{name}"].grad
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5, msg=name)
        compared += bool(gradient.any())
    assert compared == {"dora": 12, "experts": 12, "gpt_oss": 12}[case]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dora_starts_as_its_base_and_a_row_of_zeros_stays_one(qwen3: Path, dtype: str) -> None:
    from spmdrl.engines.fsdp.lora import adapters_off

    ours, _ = adapted(str(qwen3), DORA, dtype)
    ours.get_submodule("model.layers.0.mlp.up_proj").base_layer.weight.data[3] = 0
    ours.to(getattr(torch, dtype))
    ids = torch.randint(4, 60, (2, 11))
    got = ours(ids).logits
    with adapters_off(ours):
        assert torch.equal(got, ours(ids).logits)
    got.float().logsumexp(-1).sum().backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.requires_grad)


# ---- what is refused


CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({"use_dora": True, "target_parameters": STACKS}, ["use_dora", "no DoRA of stacked weights"]),
    ({"rank": 12, "target_parameters": STACKS}, ["rank=12", "multiple of 8"]),
    ({"target_parameters": ("experts.up",)}, ["'experts.up'", "nearest", "experts.gate_up_proj"]),
]


@pytest.mark.parametrize(("changes", "said"), CASES)
def test_what_cannot_be_is_refused(
    models: dict[str, str], changes: dict[str, Any], said: list[str]
) -> None:
    from plan_configs import ppo_config

    from spmdrl.training.checks.rl import check

    lora = TrainConfig(lora=LoraConfig(**changes))
    with pytest.raises(ConfigError) as error:
        check(ppo_config(models["experts"], actor=lora), 1)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_what_others_cannot_do_is_refused(models: dict[str, str]) -> None:
    from plan_configs import ppo_config

    from spmdrl.config import WeightsConfig
    from spmdrl.training.checks.memory import memory_of
    from spmdrl.training.checks.rl import check

    apart = WeightsConfig(lora="adapter")
    for case, weights, engine, said in (
        ("dora", apart, "fsdp", "no memory for the magnitudes"),
        ("experts", apart, "fsdp", "this one has experts"),
        ("dora", WeightsConfig(), "megatron", "use_dora with engine megatron"),
        ("experts", WeightsConfig(), "megatron", "target_parameters with engine megatron"),
        ("nf4", apart, "fsdp", "a base that is rounded to 4 bits"),
        ("nf4", WeightsConfig(), "megatron", "holds its weights in floating point"),
    ):
        if case not in LORA:
            continue
        role = TrainConfig(engine=engine, lora=LORA[case], dtype="float32")
        with pytest.raises(ConfigError, match=said):
            check(ppo_config(models[case], actor=role, weights=weights), 1)
    for case, lora in LORA.items():
        role = TrainConfig(lora=lora)
        check(ppo_config(models[case], actor=role), 1)
        assert memory_of("actor", role, models[case], 2).trainable == COUNTS[case]


def test_dora_of_another_adapter_is_said(models: dict[str, str], tmp_path: Path) -> None:
    from plan_configs import ppo_config

    from spmdrl.training.checks.rl import check

    peft_model(models["dora"], r=3, target_modules=["v_proj"]).save_pretrained(tmp_path)
    lora = LoraConfig(3, 4, ("v_proj",), adapter=str(tmp_path), use_dora=True)
    settings = json.loads(Path(tmp_path, "adapter_config.json").read_text())
    assert not settings["use_dora"]
    with pytest.raises(ConfigError, match="has use_dora False, not True: set"):
        check(ppo_config(models["dora"], actor=TrainConfig(lora=lora)), 1)


NF4_CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("nf4", {"target_modules": ("q_proj",)}, {}, "use target_modules='all-linear'"),
    ("nf4", {"use_dora": True}, {}, "leave use_dora out"),
    ("experts", {}, {}, "a mixture's experts"),
    ("nf4", {}, {"compile": True}, "torch.compile was not tried"),
    ("nf4", {}, {"offload_policy": True}, "stays on the device"),
]


@pytest.mark.parametrize(("model", "lora", "role", "said"), NF4_CASES)
def test_what_a_base_in_4_bits_cannot_be_is_refused(
    models: dict[str, str], model: str, lora: dict[str, Any], role: dict[str, Any], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from plan_configs import ppo_config

    from spmdrl.engines.fsdp import quantized_base
    from spmdrl.training.checks.rl import check

    found = {"there": True}
    monkeypatch.setattr(quantized_base, "find_spec", lambda name: found["there"] or None)
    actor = TrainConfig(lora=LoraConfig(quantization="nf4", **lora), **role)
    with pytest.raises(ConfigError, match=said):
        check(ppo_config(models[model], actor=actor), 1)
    found["there"] = False
    with pytest.raises(ConfigError, match="is not installed: pip install"):
        check(ppo_config(models[model], actor=actor), 1)


def test_the_plan_counts_a_quantised_base_on_each_rank(
    models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmdrl.training.checks.memory import memory_of

    plain = memory_of("actor", TrainConfig(lora=LoraConfig(rank=4)), models["nf4"], 2)
    four = memory_of("actor", TrainConfig(lora=LoraConfig(rank=4, quantization="nf4")),
                     models["nf4"], 2)  # fmt: skip
    layers = 2 * (64 * 128 * 2 + 2 * 64 * 64 + 3 * 64 * 128)
    bytes_of = 0.5 + 1 / 64 + 4 / (64 * 256)
    saved = layers * (2 / 2 - bytes_of) / 2**30  # bfloat16 is shared by two ranks
    assert plain.weights - four.weights == pytest.approx(saved)
    assert plain.trainable == four.trainable == COUNTS["nf4"]
