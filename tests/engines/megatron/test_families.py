"""Families of engine megatron: updates as FSDP2's, checkpoints, exports, pushes, and what is
declared.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_megatron_models as tiny
import torch
from ranks import groups_that_end, run_ranks
from safetensors.torch import load_file
from tiny_models import CHARS, save_tokenizer
from training_batches import CONFIG, on_data_ranks, whole_batch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from spmdrl.config import ConfigError
from spmdrl.engines.megatron.families import FAMILIES
from spmdrl.engines.megatron.family_parts import (
    ANY,
    ATTENTION,
    COMMON_FIELDS,
    MLP,
    NORMS,
    SILU,
    Family,
)
from spmdrl.engines.megatron.layout import Degrees, check_architecture, check_layout
from spmdrl.training.checks.model_shape import shape_of
from spmdrl.training.checks.pass_memory import kept_per_token

ERNIE = Family(
    names=NORMS | ATTENTION | MLP,
    fields=SILU | {"head_dim": ANY, "use_bias": (False,)},
    settings=lambda hf: {"rotary_interleaved": True},
)
TOKENS = {
    "vocab_size": len(CHARS), "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
TP = {"tensor_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2}
LAYOUTS = {
    "mistral": PP, "seed_oss": TP, "glm4": TP, "gemma2": PP, "gemma3_text": TP,
    "qwen2_moe": {"expert_parallel": 2}, "glm4_moe": PP, "gpt_oss": TP | {"expert_parallel": 2},
    "qwen3_5_text": TP, "qwen3_5_moe_text": PP, "qwen3_next": {"expert_parallel": 2},
    "minimax_m2": TP, "exaone4": PP, "phi3": TP, "glm4_moe_lite": {"expert_parallel": 2},
}  # fmt: skip
# a shift of keys by what is not rotated leaves each softmax as it is: the gradient of that bias is
# rounding, of which Adam makes steps of the whole learning rate
ROUNDING = {("glm4", "k_proj.bias"), ("glm4_moe", "k_proj.bias")}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for family in LAYOUTS:
        tiny.save_model(family, folder / family, **TOKENS)
        save_tokenizer(folder / family)
    return folder


# ---- what is declared


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_field_of_a_config_is_mapped_or_must_have_its_default(kind):
    """A field that a new transformers declares must be looked at before it is put somewhere."""
    inherited = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    declared = {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])} - inherited
    assert declared - COMMON_FIELDS == FAMILIES[kind].fields.keys() & declared
    # head_dim is read of any config that has it
    assert FAMILIES[kind].fields.keys() - declared <= {"head_dim"}


REFUSED = [  # family, what its config says, what the message must say
    # what transformers does not read
    ("llama", {"sliding_window": 4, "layer_types": ["chunked_attention"]}, ""),
    ("mistral", {"hidden_act": "gelu"}, "hidden_act='gelu' (only 'silu')"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ("gemma2", {"hidden_activation": "gelu"}, "only 'gelu_pytorch_tanh'"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
    ("gemma3_text", {"rope_parameters": {
        "full_attention": tiny.YARN,
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}, "sine and cosine times 1.14"),
    ("glm4", {"rope_parameters": tiny.YARN | {"partial_rotary_factor": 0.5}}, "sine and cosine"),
    ("qwen3", {"rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
    }}, "part of the head"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False (only True)"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=True"),
    ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("glm4_moe", {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3}, "from 2 groups"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "group_limited_greedy"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
    ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "settings", "said"), REFUSED)
def test_what_a_family_does_not_map_is_refused_by_its_name(family, settings, said):
    config = tiny.make_config(family)
    for (
        name,
        value,
    ) in settings.items():  # as a hostile config.json would, past transformers' checks
        setattr(config, name, value)
    if not said:
        check_architecture(config)
        return
    with pytest.raises(ConfigError) as error:
        check_architecture(config)
    assert said in str(error.value), str(error.value)


def test_interleaved_experts_are_not_cut():
    with pytest.raises(ConfigError, match="rows of gate and up in turn"):
        check_layout(tiny.make_config("gpt_oss"), Degrees(expert_tensor=2))
    check_layout(tiny.make_config("gpt_oss"), Degrees(expert=4, tensor=2, sequence=True))


def test_the_memory_plan_counts_the_experts(models):
    for family in LAYOUTS:
        files = load_file(models / family / "model.safetensors")
        held = sum(tensor.numel() for name, tensor in files.items() if ".experts." in name)
        shape = shape_of(str(models / family))
        assert shape.experts == held, family
        buffers = [name for name in files if name.endswith("e_score_correction_bias")]
        whole = sum(tensor.numel() for name, tensor in files.items() if name not in buffers)
        assert shape.count == whole, family


def test_the_memory_plan_counts_what_a_layer_keeps():
    """Elements of a token, as of other families or of fewer parts."""
    few, more = (tiny.make_config("exaone_moe", num_shared_experts=n) for n in (1, 3))
    less, full = kept_per_token(few, True), kept_per_token(more, True)
    gate_up_and_product = 3 * few.moe_intermediate_size
    sparse = [kind == "sparse" for kind in few.mlp_layer_types]
    assert [b - a for a, b in zip(less, full, strict=True)] == [
        2 * gate_up_and_product * has for has in sparse
    ]
    exaone = tiny.make_config("exaone4")  # as many norms as Qwen3, behind in place of before
    assert kept_per_token(exaone, True) == kept_per_token(tiny.make_config("qwen3"), True)
    plain = tiny.make_config("mistral", head_dim=16)
    heads = plain.num_attention_heads + plain.num_key_value_heads
    normed = kept_per_token(tiny.make_config("olmo2"), True)  # queries and keys before their norms
    assert normed == [kept + 16 * heads for kept in kept_per_token(plain, True)]


# ---- updates, checkpoints, pushes


def trained_on(topology: Any, folder: Path, families: list[str], layouts: Any) -> list[Any]:
    """Of each family log-probabilities, the metrics of three updates, and all weights after them:
    pushed to engine hf and compared there, and written as a checkpoint.
    """
    found = []
    for family in families:
        with groups_that_end():
            found.append(trained_family(topology, folder, family, layouts.get(family, {})))
    return found


def trained_family(topology: Any, folder: Path, family: str, layout: Any) -> Any:
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig, RolloutConfig, WeightsConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine
    from spmdrl.rollout.build import build_engine as build_rollout
    from spmdrl.training.weight_sync import WeightSync

    model = str(Path(folder) / family)
    config = dataclasses.replace(CONFIG, **layout)
    ranks = Topology.build(topology.device, **train_degrees(config))
    actor = build_engine("policy", model, config, ranks)
    own = ranks.data_ranks
    mine = list(range(9))[own.index(ranks.rank) :: len(own)] if ranks.rank in own else []
    batch = whole_batch().select(mine)
    loss = policy_objective(AlgoConfig(entropy_coef=0.01))
    logprobs = actor.logprobs(on_data_ranks(ranks, whole_batch()), 1.0).logprobs
    metrics = [actor.update(batch, loss, temperature=0.8) for _ in range(3)]
    checked = 0
    if config.engine == "megatron":
        places = Topology.build(topology.device, dp=-1, tp=1)
        rollout = build_rollout(model, RolloutConfig(engine="hf", dtype="float32"), 64, places)
        check = WeightsConfig(check=True)
        weights = WeightSync(actor, ranks, rollout, places, "float32", check)
        weights.push()
        checked = weights.check()
        rollout.shutdown()
        actor.save(Path(folder) / f"saved_{family}")
    named = {n: t.clone() for n, t in actor.named_weights(torch.float32, 1 << 20)}
    return logprobs, metrics, named, checked


@torch.no_grad()
def logprobs_of(folder: Path) -> Any:
    """transformers' own of the test batch, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    batch = whole_batch()
    rows = []
    for ids in batch.token_ids.split(batch.seq_lens.tolist()):
        logits = model(ids[None], use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        rows += [torch.zeros(1), chosen]
    return torch.cat(rows)


@pytest.mark.ranks
@pytest.mark.megatron
def test_updates_are_fsdps_and_pushes_checkpoints_and_exports_are_the_trainers(models):
    from spmdrl.engines.megatron.checkpoint import weight_sources

    families = [*LAYOUTS]
    megatron = {f: {"engine": "megatron"} | layout for f, layout in LAYOUTS.items()}
    fsdp = run_ranks(1, trained_on, models, families, {}, timeout_s=240)[0]
    every = run_ranks(2, trained_on, models, families, megatron, timeout_s=240)
    mask = whole_batch().loss_mask.bool()
    for number, family in enumerate(families):
        plain = logprobs_of(models / family)[mask]
        _, want, wanted, _ = fsdp[number]
        asked = [rank[number] for rank in every if len(rank[number][0])]
        assert asked, family
        for logprobs, metrics, _, _ in asked:
            away = (logprobs[mask] - plain).abs().max().item()
            assert away < 1e-5, (family, away)
            for got, other in zip(metrics, want, strict=True):
                assert got["loss"] == pytest.approx(other["loss"], rel=1e-4, abs=1e-6), family
                assert got["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4), family
        weights = {n: t for rank in every for n, t in rank[number][2].items()}
        before = load_file(models / family / "model.safetensors")
        assert weights.keys() == wanted.keys() == before.keys(), family
        for name, tensor in wanted.items():
            kind = ".".join(name.split(".")[-2:])
            near = 6e-3 if (family, kind) in ROUNDING else 2e-4
            away = (weights[name] - tensor).abs().max().item()
            assert away < near, (family, name, away)
        assert max((weights[n] - before[n]).abs().max() for n in before) > 1e-3, family
        assert every[0][number][3] > 0
        sources = weight_sources(models / f"saved_{family}", models / family)
        saved = {name: tensor for source in sources for name, tensor in source.read()}
        assert saved.keys() == weights.keys(), family
        for name, tensor in saved.items():
            assert torch.equal(tensor.float(), weights[name]), (family, name)


# ---- models of another program

STOCK = ["mistral", "seed_oss", "qwen2_moe", "glm4_moe"]  # megatron-core's own layers compute them


def host_chunk(hf: Any, config: Any, stock: bool) -> Any:
    """This pipeline rank's layers as a program builds them: of stock parts, or by our builder."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from spmdrl.engines.megatron.layout import rope_factor
    from spmdrl.engines.megatron.model import build_chunks

    if not stock:
        return build_chunks(hf, config, "policy")[0]
    return GPTModel(
        config, get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"),
        vocab_size=hf.vocab_size, max_sequence_length=256, position_embedding_type="rope",
        pre_process=ps.is_pipeline_first_stage(), post_process=ps.is_pipeline_last_stage(),
        rotary_base=int(hf.rope_parameters["rope_theta"]), rotary_percent=rope_factor(hf),
    )  # fmt: skip


def hosts_on(topology: Any, folder: Path) -> str:
    """Each family is read into a host's model in two pipeline stages, and written from it. Returns
    what is said of a model of stock layers that they do not compute.
    """
    from spmdrl.engines.megatron import cpu_shim as mcore_cpu

    mcore_cpu.install()
    from megatron.core import parallel_state as ps
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from spmdrl.embed import load_hf_weights, save_hf_weights
    from spmdrl.engines.megatron.model import transformer_config
    from spmdrl.hub.hf_folder import load_hf_config

    with mcore_cpu.scope():
        ps.initialize_model_parallel(pipeline_model_parallel_size=2)
        model_parallel_cuda_manual_seed(1)
        for family in LAYOUTS:
            model, out = str(Path(folder) / family), Path(folder) / f"host_{family}"
            hf = load_hf_config(model)
            config = transformer_config(hf, Degrees(pipeline=2), torch.float32)
            chunk = host_chunk(hf, config, family in STOCK)
            load_hf_weights(chunk, model)
            save_hf_weights(chunk, out, like=model)
        hf = load_hf_config(str(Path(folder) / "glm4"))
        config = transformer_config(hf, Degrees(pipeline=2), torch.float32)
        with pytest.raises(ConfigError) as error:
            load_hf_weights(host_chunk(hf, config, True), str(Path(folder) / "glm4"))
        ps.destroy_model_parallel()
    return str(error.value)


@pytest.mark.ranks
@pytest.mark.megatron
def test_models_of_another_program_are_read_and_written(models):
    said = run_ranks(2, hosts_on, models, timeout_s=120)
    assert all("spmdrl.engines.megatron.model.build_chunks" in words for words in said)
    for family in LAYOUTS:
        before = load_file(models / family / "model.safetensors")
        files = sorted((models / f"host_{family}").glob("*.safetensors"))
        after = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert after.keys() == before.keys(), family
        assert all(torch.equal(after[name], before[name]) for name in before), family


# ---- the example of docs/extending.md


def example_on(topology: Any, folder: Path) -> Any:
    """An update of a model whose family is declared here alone; its weights and logprobs after."""
    from spmdrl.algo.objectives import policy_objective
    from spmdrl.config import AlgoConfig
    from spmdrl.distributed.topology import Topology, train_degrees
    from spmdrl.engines.build import build_engine

    FAMILIES["ernie4_5"] = ERNIE
    config = dataclasses.replace(CONFIG, engine="megatron", tensor_parallel=2)
    ranks = Topology.build(topology.device, **train_degrees(config))
    actor = build_engine("policy", str(folder), config, ranks)
    batch = on_data_ranks(ranks, whole_batch())
    before = actor.logprobs(batch, 1.0).logprobs
    actor.update(batch, policy_objective(AlgoConfig()), temperature=1.0)
    after = actor.logprobs(batch, 1.0).logprobs
    weights = {n: t.clone() for n, t in actor.named_weights(torch.float32, 1 << 20)}
    return before, after, weights


@pytest.mark.ranks
@pytest.mark.megatron
def test_the_example_of_the_docs_trains_and_exports_as_transformers(tmp_path, monkeypatch):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    page = Path(__file__).parents[3] / "docs" / "extending.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert block in Path(__file__).read_text()
    monkeypatch.setitem(tiny.FAMILIES, "ernie4_5", {"head_dim": 32})
    tiny.save_model("ernie4_5", tmp_path)
    with pytest.raises(ConfigError, match=r"docs/extending\.md"):
        check_architecture(tiny.make_config("ernie4_5"))
    before, after, weights = run_ranks(2, example_on, tmp_path, timeout_s=90)[0]
    mask = whole_batch().loss_mask.bool()
    assert (before - logprobs_of(tmp_path))[mask].abs().max() < 1e-5
    exported = tmp_path / "exported"
    AutoModelForCausalLM.from_pretrained(tmp_path).config.save_pretrained(exported)
    save_file(weights, exported / "model.safetensors", {"format": "pt"})
    assert (after - logprobs_of(exported))[mask].abs().max() < 1e-5
    assert (after - before)[mask].abs().max() > 1e-3
