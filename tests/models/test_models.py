"""A part of docs/models.md's table, and what refuses the rest of it."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import proofs
import pytest
import table
import torch
from families import BY_KIND, FAMILIES, config_of, save_tiny
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from spmdrl.checkpoint.format import commit, digest
from spmdrl.config import ConfigError, LoraConfig, RolloutConfig
from spmdrl.data.image_limits import ImageLimits
from spmdrl.distributed.topology import Topology
from spmdrl.engines.fsdp import attention
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.layer_kinds import per_sequence_layers
from spmdrl.engines.fsdp.layers import use_triton
from spmdrl.engines.fsdp.lora import adapt_layers, peft_config, target_layers
from spmdrl.engines.fsdp.lora_files import write_adapter
from spmdrl.engines.fsdp.model import logit_factor
from spmdrl.engines.fsdp.per_sequence_layers import run_per_sequence
from spmdrl.engines.fsdp.trial import (
    CannotShrink,
    gradients_of,
    logprobs_one_by_one,
    logprobs_packed,
    random_sequences,
    tiny_copy,
    try_packing,
)
from spmdrl.hub.hf_folder import keep_tower, load_hf_config
from spmdrl.hub.tiny_config import tiny_config
from spmdrl.rollout.vllm import core
from spmdrl.rollout.vllm.engine import VllmEngine
from spmdrl.rollout.vllm.model_types import check_model_type
from spmdrl.rollout.weight_check import (
    outputs_of,
    outputs_of_mixer,
    rank_outputs,
    several_outputs,
)
from spmdrl.training.checks.packing import check_packing

# families whose layers differ from each other in kind: recurrent, latent, sinks, experts, windows,
# chunks, dropout, what vLLM runs by transformers' code, two tensor-parallel ranks
TRIED = {
    "qwen3_5_text": ["fsdp", "lora", "vllm_tp2"],
    "nemotron_h": ["fsdp", "vllm_tp2"],
    "falcon_h1": ["fsdp"],
    "minimax": ["fsdp"],
    "granitemoehybrid": ["vllm"],
    "deepseek_v3": ["export", "vllm_tp2"],
    "deepseek_v32": ["hf"],
    "gpt_oss": ["fsdp", "vllm_tp2"],
    "llama4_text": ["fsdp", "vllm_tp2"],
    "qwen3_moe": ["megatron"],
    "gemma2": ["vllm"],
    "gemma3": ["export", "vllm"],
    "cohere2": ["fsdp"],
    "seed_oss": ["vllm"],
    "qwen3_5": ["vllm"],
    "gemma3 with images": ["fsdp", "hf"],
    "mistral3 with images": ["vllm"],
    "qwen3_5 with images": ["fsdp"],
    "internvl with images": ["vllm_tp2"],
    "kimi_vl with images": ["fsdp", "vllm_tp2"],
}


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "column"), [(kind, column) for kind, mine in TRIED.items() for column in mine]
)
def test_a_family_of_the_table(kind: str, column: str, tmp_path: Path) -> None:
    cell = table.try_cell(BY_KIND[kind], column, tmp_path)
    assert "proven" in cell, cell
    if column in ("fsdp", "megatron"):
        assert cell["proven"]["logprobs"] < 1e-4
    if column == "fsdp":
        assert cell["proven"]["gradients"] < 1e-3


@pytest.mark.ranks
@pytest.mark.vllm
def test_vllm_sees_images_where_their_tokens_look_back_alone(tmp_path: Path) -> None:
    """The smaller ones of Gemma 4; the row of the table is one of the larger."""
    family = BY_KIND["gemma4 with images"]
    cell = table.try_cell(replace(family, fields={"vision_config": {}}), "vllm", tmp_path)
    assert cell["proven"]["max"] < 1e-4, cell


@pytest.mark.vllm
def test_logits_beside_a_tower_are_not_rounded_on_a_gpu(
    tmp_path: Path, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM builds this language model with a config of its own, inside that of the whole."""
    model = str(save_tiny(BY_KIND["mistral3 with images"], tmp_path))
    monkeypatch.setattr(core, "has_float32_logits", lambda *_: True)
    images = proofs.images_of(model)
    assert images is not None
    settings = RolloutConfig(dtype="bfloat16", max_num_seqs=8, kv_cache_mib=proofs.KV_MIB)
    limits = ImageLimits(images.vision, 2, 80, (32, 16))
    engine = VllmEngine(model, settings, 256, topology, looks=limits)
    hidden = torch.randn(3, load_hf_config(model).get_text_config().hidden_size)
    try:
        logits = engine.model.compute_logits(hidden.bfloat16())
    finally:
        engine.shutdown()
    assert logits.dtype == torch.float32


def exported(topology: Topology, model: str) -> int:
    """Exports a model by its checkpoint and by its weights as they are gathered; the number of
    weights that vLLM, which reads the files itself, has in every bit.
    """
    from spmdrl.engines.hf_export import export
    from spmdrl.rollout.build import build_engine

    folder = Path(model).parent
    proofs.export(topology, model)  # transformers reads it
    actor, _ = proofs.actor_of(topology, model)
    actor.save(folder / "aside/actor")
    shutil.copytree(model, folder / "aside/hf", ignore=lambda *_: ["model.safetensors"])
    (folder / "aside/run.json").write_text("{}")
    files = [str(f.relative_to(folder / "aside")) for f in folder.glob("aside/*/*") if f.is_file()]
    files.append("run.json")
    commit(folder / "aside", folder / "saved", {f: digest(folder / "aside" / f) for f in files})
    export(folder / "saved", folder / "out")
    keep_tower(str(folder / "out"))
    images = proofs.images_of(str(folder / "out"))
    limits = None if images is None else ImageLimits(images.vision, 2, 80, (32, 16))
    settings = RolloutConfig(kv_cache_mib=proofs.KV_MIB, dtype="float32")
    places = Topology.build(topology.device, dp=-1, tp=1)
    engine: Any = build_engine(str(folder / "out"), settings, 256, places, looks=limits)
    count = engine.check_weights(actor.named_weights(torch.float32, 1 << 20))
    engine.shutdown()
    return count


@pytest.mark.ranks
@pytest.mark.vllm
def test_an_export_has_the_published_form_which_vllm_reads(tmp_path: Path) -> None:
    """Published experts of Qwen3-VL-MoE are (experts, in, out), and transformers' own (out, in)."""
    family = BY_KIND["qwen3_vl_moe with images"]
    given = load_file(save_tiny(family, tmp_path / "model") / "model.safetensors")
    (count,) = run_ranks(1, exported, str(tmp_path / "model"), timeout_s=240)
    assert count >= len(given) > 20
    both = [load_file(tmp_path / f"{name}/model.safetensors") for name in ("out", "export")]
    turned = [name for name in given if name.endswith((".gate_up_proj", ".down_proj"))]
    assert len(turned) >= 2
    for name, tensor in given.items():
        want = tensor.transpose(1, 2) if name in turned else tensor
        assert all(torch.equal(files[name], want) for files in both), name


def rows_of_the_page() -> dict[str, list[str]]:
    """By model type, the cells of its row."""
    lines = [line for line in table.PAGE.read_text().splitlines() if re.match(r"\| .* \| `", line)]
    rows = [line.split("|")[1:-1] for line in lines]
    return {row[1].strip(" `"): [cell.strip() for cell in row[2:]] for row in rows}


def test_the_page_has_every_family() -> None:
    rows = rows_of_the_page()
    assert list(rows) == [family.key for family in FAMILIES]
    assert len(rows) >= 70 and not any("unknown" in cell for row in rows.values() for cell in row)


def test_the_page_says_what_is_proven() -> None:
    """What a test tries here has a number or a "yes" there, not the letter of a refusal."""
    rows, columns = rows_of_the_page(), [*table.TITLES]
    for kind, mine in TRIED.items():
        for column in mine:
            cell = rows[kind][columns.index(column)]
            assert cell == "yes" or float(cell.removesuffix(" b")) < 5e-3, (kind, column, cell)


@pytest.mark.parametrize("kind", ["falcon", "bloom", "deepseek_v4", "phimoe"])
def test_layers_that_mix_what_is_packed_are_refused(kind: str) -> None:
    """Phi-MoE's routers draw experts at random in training."""
    config = CONFIG_MAPPING[kind]()
    with pytest.raises(ConfigError, match=r"differ by .* its layers mix what is packed"):
        check_packing(config)


def test_a_trial_leaves_the_random_numbers_of_the_process_alone() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    trial = try_packing(config_of(BY_KIND["qwen3"]))
    assert torch.equal(torch.rand(3), want) and 0 < trial.logprobs < 1e-5


def test_a_model_and_its_like_in_another_folder_are_tried_once() -> None:
    config, other = config_of(BY_KIND["qwen3"]), config_of(BY_KIND["qwen3"])
    config._name_or_path, other._name_or_path = "policy", "critic"
    assert check_packing(config) is check_packing(other)


@pytest.mark.parametrize("kind", ["xlstm", "zamba2", "codegen"])
def test_what_cannot_be_tried_is_refused_if_it_may_carry_a_state(kind: str) -> None:
    with pytest.raises(CannotShrink, match="tiny copy"):
        try_packing(CONFIG_MAPPING[kind]())
    with pytest.raises(ConfigError, match=r"may mix packed .* could not be tried"):
        check_packing(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize("kind", ["mixtral", "seed_oss", "opt"])
def test_no_pass_has_noise(kind: str) -> None:
    model = tiny_copy(config_of(BY_KIND[kind])).train()
    tokens = torch.arange(20)[None]
    passes = [model(input_ids=tokens, use_cache=False).logits for _ in range(2)]
    assert torch.equal(*passes)


def test_logits_that_a_model_scales_are_a_temperature() -> None:
    factors = {kind: logit_factor(config_of(BY_KIND[kind])) for kind in ("cohere", "granite")}
    factors["falcon_h1"] = logit_factor(CONFIG_MAPPING["falcon_h1"](lm_head_multiplier=0.5))
    factors["hyperclovax"] = logit_factor(CONFIG_MAPPING["hyperclovax"](logits_scaling=4.0))
    assert factors == {"cohere": 0.0625, "granite": 0.125, "falcon_h1": 0.5, "hyperclovax": 4.0}


def test_adapters_are_put_where_they_count() -> None:
    lora = LoraConfig(rank=2, alpha=4)
    shared = tiny_copy(config_of(BY_KIND["qwen3_next"]))
    assert not any("shared_expert.gate_proj" in name for name in target_layers(shared, lora))
    with pytest.raises(ConfigError, match="would load the adapter without these layers"):
        target_layers(shared, replace(lora, target_modules=("gate_proj",)))
    mamba = tiny_copy(config_of(BY_KIND["nemotron_h"]))
    assert not any("out_proj" in name for name in target_layers(mamba, lora))
    with pytest.raises(ConfigError, match="would ignore an adapter"):
        target_layers(mamba, replace(lora, target_modules=("out_proj",)))


def test_a_layer_that_is_computed_anew_finds_its_sequences() -> None:
    """Activation checkpointing computes a layer once more in the backward pass, when the next row
    has been looked at already.
    """
    config = config_of(BY_KIND["qwen3_5_text"])
    sequences, wanted = random_sequences(torch.device("cpu"))
    found = []
    for checkpointed in (False, True):
        model: Any = tiny_copy(config)
        run_per_sequence(model)
        model.set_attn_implementation(attention.NAME)
        use_checkpointing(model, checkpointed)
        model.train()
        first = logprobs_packed(model, sequences)
        logprobs_packed(model, sequences[:2])
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        found.append([first, *gradients_of(first, wanted, named).values()])
    for plain, again in zip(*found, strict=True):
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "nemotron_h"])
def test_peft_loads_an_adapter_with_all_of_its_layers(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    lora, model = LoraConfig(rank=2, alpha=4), save_tiny(BY_KIND[kind], tmp_path / "model")
    mine, base = (AutoModelForCausalLM.from_pretrained(model).float().eval() for _ in range(2))
    layers, tensors = target_layers(mine, lora), dict[str, torch.Tensor]()
    mine.requires_grad_(False)
    adapt_layers(mine, layers, peft_config(lora, layers, str(model)))
    for name in layers:
        for part in ("lora_A", "lora_B"):
            weight = mine.get_submodule(f"{name}.{part}.default").weight
            weight.data.normal_(std=0.1)
            tensors[f"{name}.{part}.weight"] = weight.detach().clone()
    write_adapter(tmp_path / "adapter", tensors, lora, layers, str(model))
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.arange(3, 40)[None]
    want, got = (m(input_ids=tokens, use_cache=False).logits for m in (mine, theirs))
    torch.testing.assert_close(got, want)


def test_lightning_attention_computes_in_the_dtype_of_the_pass() -> None:
    """FSDP casts parameters and no buffers."""
    model: Any = tiny_copy(config_of(BY_KIND["minimax"]))
    run_per_sequence(model)
    model.set_attn_implementation(attention.NAME)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    sequences, _ = random_sequences(torch.device("cpu"))
    assert logprobs_packed(model, sequences).isfinite().all()
    slopes = [b for n, b in model.named_buffers() if n.endswith("slope_rate")]
    assert slopes and all(slope.dtype == torch.float32 for slope in slopes)


@pytest.mark.parametrize("kind", ["gpt_oss", "gemma4_text", "qwen3_5_text", "gemma3n_text"])
def test_layers_that_kernels_do_not_replace_stay_as_they_are(kind: str) -> None:
    """On GPUs RMSNorm, SwiGLU and rotary embeddings are replaced where they compute the same."""
    sequences, _ = random_sequences(torch.device("cpu"))
    model = tiny_copy(config_of(BY_KIND[kind]))
    before = logprobs_one_by_one(model, sequences)
    use_triton(model)
    after = logprobs_one_by_one(model, sequences)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_places_of_what_is_fused_in_several_outputs() -> None:
    """Queries and keys of 4 rows, values and gates of 8: two tensors are four outputs."""
    module = SimpleNamespace(output_sizes=[4, 4, 8, 8])
    parts = ["in_proj_qkv", "in_proj_z"]
    assert outputs_of(module, parts, "in_proj_qkv", 16) == (0, 3)
    assert outputs_of(module, parts, "in_proj_z", 8) == (3, 4)
    whole = torch.arange(24.0)[:, None]
    ranks = [torch.cat([part[r * len(part) // 2 :][: len(part) // 2] for part in
                        whole.split([4, 4, 8, 8])]) for r in range(2)]  # fmt: skip
    for rank, held in enumerate(ranks):
        mine, expected = several_outputs(held, whole[:16], module.output_sizes, (0, 3), rank, 2)
        assert torch.equal(mine, expected) and len(mine) == 8
    # Mamba 2: a gate and inputs of 4, two matrices of one group, which every rank has, 2 heads
    mixer = SimpleNamespace(intermediate_size=4, num_heads=2, ssm_state_size=3)
    outputs = outputs_of_mixer(mixer, None, "in_proj", 16, 2)
    assert outputs == [(4, 2), (4, 2), (3, 1), (3, 1), (2, 2)]
    rows = torch.arange(16.0)
    assert rank_outputs(rows, outputs, 1, 2).tolist() == [2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 15]
    assert outputs_of_mixer(mixer, None, "conv1d", 10, 2) == [(4, 2), (3, 1), (3, 1)]


def test_a_tiny_config_has_a_layer_of_each_kind() -> None:
    for family in FAMILIES:
        config: Any = config_of(family).get_text_config()
        kinds = {*(getattr(config, "layer_types", None) or ())}
        tiny = tiny_config(config)
        assert kinds == {*(getattr(tiny, "layer_types", None) or ())}, family
        assert tiny.num_hidden_layers <= 30 and tiny.model_type == config.model_type


def test_layers_that_are_given_each_sequence_alone() -> None:
    assert per_sequence_layers(config_of(BY_KIND["qwen3_5_text"])) == ["Qwen3_5GatedDeltaNet"]
    assert per_sequence_layers(config_of(BY_KIND["glm_moe_dsa"])) == ["GlmMoeDsaAttention"]
    assert per_sequence_layers(config_of(BY_KIND["gpt_oss"])) == []


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("minimax", {}, "vLLM has no lightning attention"),
        ("qwen3_5_text", {"dtype": "float32"}, "set rollout.dtype='bfloat16'"),
        ("qwen3_5_text", {"dtype": "bfloat16", "tensor_parallel": 3}, "does not divide the 16 key"),
        ("glm_moe_dsa", {}, "sparse attention on GPUs alone"),
    ],
)
def test_what_vllm_does_not_run_is_refused(kind: str, settings: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_model_type(config_of(BY_KIND[kind]), RolloutConfig(**settings))


def test_a_model_whose_language_model_transformers_cannot_load_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no class of its language model alone"):
        check_packing(CONFIG_MAPPING["aya_vision"]())
