"""What Megatron parameters are called, layouts that do not divide, and folders that do not fit."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import tiny_megatron_models as tiny
import torch
from safetensors.torch import load_file, save_file

from spmdrl.config import ConfigError
from spmdrl.engines.megatron import cpu_shim as mcore_cpu
from spmdrl.engines.megatron.layout import (
    Degrees,
    check_architecture,
    check_layout,
    divisors,
    padded_vocab,
    softcap,
    stage_layers,
    vocab_range,
)

WRONG_LAYOUTS = [  # family, degrees, world size, what the message must say
    (
        "qwen3",
        {"tensor": 3},
        None,
        "4 heads, and 4 % 3 = 1; 112 intermediate size, and 112 % 3 = 1; it may be 1, 2, 4",
    ),
    ("qwen3", {"tensor": 5}, None, "it may be 1, 2, 4"),
    ("qwen3", {"pipeline": 3}, None, "4 layers, and 4 % 3 = 1; it may be 1, 2, 4"),
    ("qwen3", {"pipeline": 2, "virtual": 3}, None, "2 layers of each of 2 pipeline ranks"),
    ("qwen3", {"pipeline": 3}, None, "or num_layers_in_first_pipeline_stage=1, num_layers_in_last"),
    ("qwen3", {"virtual": 2}, None, "wants pipeline_parallel > 1"),
    ("qwen3", {"first_stage": 2}, None, "first_pipeline_stage=2: wants pipeline_parallel > 1"),
    ("qwen3", {"pipeline": 2, "first_stage": 4}, None, "0 of 4 layers are left for 1 other stage,"),
    ("qwen3", {"pipeline": 2, "first_stage": 2, "last_stage": 1}, None, "1 of 4 layers is left"),
    ("qwen3", {"pipeline": 4, "last_stage": 2}, None, "2 of 4 layers are left for 3 other stages"),
    (
        "qwen3",
        {"pipeline": 2, "first_stage": 3, "virtual": 2},
        None,
        "3 layers of pipeline rank 0, and 3 % 2 = 1; 1 layers of pipeline rank 1",
    ),
    ("qwen3", {"first_stage": 0}, None, "first_pipeline_stage=0: must be at least 1"),
    ("qwen3", {"expert": 2}, None, "has no experts"),
    ("qwen3", {"sequence": True}, None, "wants tensor_parallel > 1"),
    ("qwen3", {"context": 0}, None, "context_parallel=0: must be at least 1"),
    ("qwen3", {"tensor": 2, "context": 2}, 6, "2 * 1 * 2 = 4 does not divide 6 ranks"),
    ("qwen3", {"tensor": 2, "context": 2}, 6, "2 * 4 = 8 ranks"),
    ("qwen3_moe", {"expert": 3}, None, "4 experts, and 4 % 3 = 1; it may be 1, 2, 4"),
    ("qwen3_moe", {"tensor": 2}, None, "wants sequence_parallel=True"),
    ("qwen3_moe", {"expert_tensor": 5}, None, "48 is the width of an expert, and 48 % 5 = 3"),
    ("mixtral", {"expert": 4}, 2, "1 * 4 * 1 = 4 does not divide 2 ranks"),
    ("deepseek_v3", {"tensor": 4, "expert": 3, "sequence": True}, None, "8 experts"),
]
WRONG_MODELS = [  # family, what its config says, what the message must say
    ("llama", {"attention_bias": True}, "attention_bias"),
    ("llama", {"mlp_bias": True}, "mlp_bias"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ("qwen3", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
     "rope type 'dynamic'"),
    ("mixtral", {"num_experts_per_tok": 1}, "one expert per token"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
    ("deepseek_v3", {"num_experts_per_tok": 2}, "2 experts per token from 2 groups"),
    ("deepseek_v3", {"rope_parameters": tiny.YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}},
     "mscale"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "degrees", "world", "said"), WRONG_LAYOUTS)
def test_a_layout_that_does_not_divide_is_refused_with_its_numbers(family, degrees, world, said):
    with pytest.raises(ConfigError) as error:
        check_layout(tiny.make_config(family), Degrees(**degrees), world)
    assert said in str(error.value), str(error.value)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_layouts_that_divide_are_not_refused(family):
    config = tiny.make_config(family)
    experts = 2 if hasattr(config, "num_experts_per_tok") else 1
    cut = 1 if family == "gpt_oss" else experts  # test_interleaved_experts_are_not_cut
    context = 1 if family.startswith("qwen3_5") or family == "qwen3_next" else 2  # delta nets
    fine = Degrees(2, 2, 2, context, experts, cut, sequence=True)
    check_layout(config, fine, world_size=8 * context)
    check_layout(config, Degrees(), world_size=3)
    check_layout(config, Degrees(pipeline=3, first_stage=1, last_stage=1), world_size=3)


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual"), [(61, 16, 1), (94, 8, 1), (5, 3, 1), (62, 4, 2), (7, 2, 1)]
)
def test_the_stages_that_a_refusal_proposes_are_accepted(layers, pipeline, virtual):
    config = tiny.make_config("qwen3", num_hidden_layers=layers)
    degrees = Degrees(pipeline=pipeline, virtual=virtual)
    with pytest.raises(ConfigError) as error:
        check_layout(config, degrees)
    first, last = map(int, re.findall(r"pipeline_stage=(\d+)", str(error.value)))
    better = replace(degrees, first_stage=first, last_stage=last)
    check_layout(config, better)
    stages = stage_layers(layers, better)
    assert len(stages) == pipeline and sum(stages) == layers
    assert max(stages) == -(-layers // virtual // pipeline) * virtual  # no stage more than it must


@pytest.mark.parametrize(("family", "settings", "said"), WRONG_MODELS)
def test_what_has_no_mapping_is_refused(family, settings, said):
    with pytest.raises(ConfigError) as error:
        check_architecture(tiny.make_config(family, **settings))
    assert said in str(error.value), str(error.value)


def test_an_unknown_architecture_is_told_which_there_are():
    from transformers import GPT2Config

    with pytest.raises(ConfigError) as error:
        check_architecture(GPT2Config())
    assert "'gpt2'; there is one for deepseek_v2, deepseek_v3" in str(error.value)


@pytest.mark.parametrize("tensor", [1, 2, 3, 8, 60])
def test_ranks_hold_every_token_id_once(tensor):
    config = tiny.make_config("qwen2")  # 97 token ids
    assert padded_vocab(config, tensor) % tensor == 0
    held = [i for rank in range(tensor) for i in range(*vocab_range(config, tensor, rank))]
    assert held == list(range(97))


def test_scope_speaks_for_cuda_only_inside():
    before = torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type
    with mcore_cpu.scope():
        with mcore_cpu.scope():
            assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.ones(1).cuda().type() == "torch.cuda.FloatTensor"
        assert torch.ones(1).type(torch.int64).dtype == torch.int64
    assert before == (torch.cuda.current_device, torch.Tensor.cuda, torch.Tensor.type)
    assert torch.ones(1).type() == "torch.FloatTensor"


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """megatron's groups on this process alone, for as long as this file's tests run."""
    import torch.distributed as dist

    assert mcore_cpu.install() == mcore_cpu.install()
    from megatron.core import parallel_state

    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with mcore_cpu.scope():
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
        yield
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def build(family, dtype=torch.float32, **overrides):
    from spmdrl.engines.megatron.model import build_chunks, transformer_config

    hf_config = tiny.make_config(family, **overrides)
    config = transformer_config(hf_config, Degrees(), dtype)
    return hf_config, build_chunks(hf_config, config, "policy")


def loaded(chunks, hf_config):
    """By Hugging Face name the tensors that the pieces of one rank make up."""
    from spmdrl.engines.megatron.hf_mapping import pieces

    out = {}
    for _, parameter, parts in pieces(chunks[0], hf_config):
        for piece in parts:
            view = piece.view(parameter)
            assert view.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
            whole = out.setdefault(piece.name, torch.full(piece.shape, torch.nan, dtype=view.dtype))
            where = tuple(slice(a, b) for a, b in piece.box)
            assert whole[where].isnan().all(), f"{piece.name} {piece.box} is in two places"
            whole[where] = view
    return out


@pytest.mark.megatron
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_sharded_checkpoint_in_half_precision(one_rank, tmp_path, family):
    from spmdrl.engines.megatron.hf_mapping import load_pretrained

    model = tiny.save_model(family, tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="100KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    hf_config, chunks = build(family, torch.bfloat16)
    load_pretrained(chunks, tmp_path / "many", hf_config)
    true, found = load_file(tmp_path / "one" / "model.safetensors"), loaded(chunks, hf_config)
    assert true.keys() == found.keys()
    for name, tensor in found.items():
        wide = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if wide else torch.bfloat16)
        assert torch.equal(tensor, true[name].to(tensor.dtype)), name


@pytest.mark.megatron
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "minimax_m2"])
def test_a_checkpoint_with_stacked_experts(one_rank, tmp_path, family):
    from spmdrl.engines.megatron.hf_mapping import load_pretrained

    model = tiny.save_model(family, tmp_path / "one")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    names = load_file(tmp_path / "stacked" / "model.safetensors")
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    hf_config, chunks = build(family)
    load_pretrained(chunks, tmp_path / "stacked", hf_config)
    true = load_file(tmp_path / "one" / "model.safetensors")
    for name, tensor in loaded(chunks, hf_config).items():
        assert torch.equal(tensor, true[name]), name


@pytest.mark.megatron
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_in_half_precision_it_is_no_further_from_the_truth_than_transformers(
    one_rank, tmp_path, family
):
    from spmdrl.engines.megatron.attention import packed_params
    from spmdrl.engines.megatron.hf_mapping import load_pretrained

    model = tiny.save_model(family, tmp_path)
    tiny.save_reference(model, tmp_path)
    true = torch.load(tmp_path / "reference.pt")["policy"]["outputs"][0]
    lens, ids = tiny.BATCHES[0], tiny.token_ids(0)
    with torch.no_grad():
        half = model.to(torch.bfloat16)
        theirs = torch.cat([half(seq[None], use_cache=False).logits[0] for seq in ids.split(lens)])
    hf_config, chunks = build(family, torch.bfloat16)
    load_pretrained(chunks, tmp_path, hf_config)
    params = packed_params(torch.tensor(lens), torch.device("cpu"))
    out = chunks[0](ids[None], None, None, packed_seq_params=params)
    out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    if (cap := softcap(hf_config, "final_logit_softcapping")) is not None:
        out = cap * torch.tanh(out / cap)  # which the engine's own head does
    print(family, *((x.float() - true).abs().mean(1).median() for x in (out[0], theirs)))
    # of a token; the median, for rounding sends a few tokens to other experts
    ours, theirs = ((x.float() - true).abs().mean(1).median() for x in (out[0], theirs))
    assert 0 < ours < 1.15 * theirs < 0.05, (ours, theirs)


@pytest.mark.megatron
def test_folders_that_do_not_fit_are_named(one_rank, tmp_path):
    from spmdrl.engines.megatron.hf_mapping import load_pretrained

    tiny.save_model("qwen2", tmp_path)
    hf_config, chunks = build("qwen2")
    weights = load_file(tmp_path / "model.safetensors")

    def said(changed, drop=()):
        kept = {name: t for name, t in (weights | changed).items() if name not in drop}
        save_file(kept, tmp_path / "model.safetensors")
        with pytest.raises(ConfigError) as error:
            load_pretrained(chunks, tmp_path, hf_config)
        return str(error.value)

    up = "model.layers.1.mlp.up_proj.weight"
    assert f"has no tensor {up}" in said({}, {up})
    assert "tie_word_embeddings" in said({}, {"lm_head.weight"})
    assert "(111, 64), but config.json means (112, 64)" in said({up: weights[up][:111]})
    assert "F8_E4M3" in said({up: weights[up].to(torch.float8_e4m3fn)})
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()  # it would be read before an index
    with pytest.raises(ConfigError, match=r"lacks model-00001-of-00001\.safetensors"):
        load_pretrained(chunks, tmp_path, hf_config)
    with pytest.raises(ConfigError, match="neither"):
        load_pretrained(chunks, tmp_path / "nothing", hf_config)


@pytest.mark.timeout(20)
def test_divisors_are_named_however_large_the_number():
    assert divisors(12) == "1, 2, 3, 4, 6, 12"
    assert divisors(5040) == "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, ..."
    assert divisors(2**61 - 1) == "1, ..."  # a prime
    assert divisors(10**400).startswith("1, 2, 4, 5, 8, 10, ")
