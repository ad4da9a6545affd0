"""LoRA before anything is built: what is refused, counted and shown; and against peft itself."""

import json
from dataclasses import replace

import pytest
import torch
from plan_configs import ppo_config, rollout_config
from tiny_models import save_qwen3

from spmdrl.cli.arguments import override
from spmdrl.config import (
    AlgoConfig,
    ConfigError,
    LoraConfig,
    OptimConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
    WeightsConfig,
)
from spmdrl.training.checks.describe import describe
from spmdrl.training.checks.memory import memory_of
from spmdrl.training.checks.rl import check
from spmdrl.training.checks.supervised import check_sft

LORA = TrainConfig(lora=LoraConfig(rank=8))
APART = {"actor": LORA, "weights": WeightsConfig(lora="adapter")}
REF = AlgoConfig(kl_coef=0.1)


def with_lora(**changes):
    return TrainConfig(lora=LoraConfig(**changes))


CASES = [
    ({"actor": replace(LORA, engine="megatron", optim=OptimConfig("muon"))}, ["two factors"]),
    ({"actor": with_lora(rank=0)}, ["actor.lora.rank=0"]),
    ({"actor": with_lora(alpha=-1)}, ["actor.lora.alpha=-1"]),
    ({"actor": with_lora(target_modules=("q_prj",))}, ["'q_prj'", "q_proj"]),
    ({"actor": with_lora(target_modules=("lm_head",))}, ["'lm_head'", "the head"]),
    ({"actor": with_lora(target_modules=("embed_tokens",))}, ["'embed_tokens'", "Embeddings"]),
    ({"actor": with_lora(adapter="/nowhere")}, ["/nowhere", "adapter_config.json"]),
    ({"algo": REF, "ref": LORA}, ["ref.lora has no effect"]),
    ({"algo": REF, "actor": LORA, "ref": TrainConfig(dtype="float32")}, ["ref.dtype='float32'"]),
    ({"weights": WeightsConfig(lora="adapter")}, ["no effect without actor.lora"]),
    (APART | {"rollout": rollout_config(engine="hf")}, ["rollout.engine='vllm'", "'merge'"]),
    (APART | {"rollout": rollout_config(quantization="fp8")}, ["fp8"]),
    (APART | {"actor": with_lora(rank=513)}, ["up to 512, not 513"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), CASES)
def test_what_cannot_be_is_refused(qwen3, changes, said):
    with pytest.raises(ConfigError) as error:
        check(ppo_config(qwen3, **changes), 1)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_what_can_be_is_not(qwen3):
    megatron = replace(LORA, engine="megatron")
    for changes in ({"actor": LORA}, APART, {"actor": megatron}, APART | {"actor": megatron},
                    {"actor": LORA, "algo": REF},
                    {"actor": with_lora(target_modules=("mlp.up_proj",)), "algo": REF,
                     "ref": TrainConfig(dtype="bfloat16")}):  # fmt: skip
        check(ppo_config(qwen3, **changes), 1)
    apart = {"placement": {"actor": "0", "ref": "1"}, "ref": TrainConfig(kernels="torch")}
    check(ppo_config(qwen3, actor=LORA, algo=REF, **apart), 2)
    with pytest.raises(ConfigError, match="do not depend on the placement"):
        check(ppo_config(qwen3, actor=replace(LORA, dtype="float32"), algo=REF, **apart), 2)


def test_experts_are_not_sent_as_adapters(tmp_path):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32,
             "num_attention_heads": 2, "num_experts": 4, "moe_intermediate_size": 32,
             "vocab_size": 98, "num_key_value_heads": 2, "eos_token_id": 1}  # fmt: skip
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(tmp_path)
    check(ppo_config(tmp_path, actor=LORA), 1)
    with pytest.raises(ConfigError, match="this one has experts"):
        check(ppo_config(tmp_path, **APART), 1)


def test_sft_refuses_the_same(qwen3):
    config = SftConfig(
        str(qwen3), SftDataConfig("t", max_tokens=64), "out", actor=with_lora(rank=-2)
    )
    with pytest.raises(ConfigError, match="rank=-2"):
        check_sft(config, 1)


def test_a_field_on_the_command_line_switches_it_on(qwen3):
    config = override(ppo_config(qwen3), "actor.lora.rank", 4)
    assert config.actor.lora == LoraConfig(rank=4)
    config = override(config, "actor.lora.target_modules", ["q_proj", "o_proj"])
    assert config.actor.lora.target_modules == ("q_proj", "o_proj")
    assert override(config, "actor.lora.target_modules", "v_proj").actor.lora.target_modules == (
        "v_proj",
    )


def test_memory_is_of_what_is_trained(qwen3):
    full = memory_of("actor", TrainConfig(), str(qwen3), 2)
    m = memory_of("actor", LORA, str(qwen3), 2)
    adapters = 8 * 2 * (5 * 192 + 2 * 128)  # rank x layers x rows and columns
    gib = 2**30
    assert m.trainable == adapters and m.parameters == full.parameters + adapters
    assert m.weights == pytest.approx((full.parameters * 2 + adapters * 4) / 2 / gib)
    assert m.gradients == pytest.approx(adapters * 4 / 2 / gib)
    assert m.adam == pytest.approx(adapters * 8 / 2 / gib)
    layout = replace(LORA, engine="megatron", tensor_parallel=2, dtype="bfloat16", ema=0.9)
    cut = memory_of("actor", layout, str(qwen3), 4)
    here = adapters * 3 / 4 * 4 / gib  # of each pair one factor is cut over two tensor ranks
    assert cut.trainable == adapters and cut.gradients == pytest.approx(here)
    assert cut.adam == pytest.approx(2 * here / 2) and cut.average == pytest.approx(here / 2)
    assert cut.weights == pytest.approx(full.parameters / 2 * 2 / gib + here, rel=0.01)
    head = memory_of("critic", LORA, str(qwen3), 2)
    assert head.trainable == adapters + 65
    text = describe(ppo_config(qwen3, actor=LORA, algo=REF), 2, 100)
    assert "of them trained (lora)" in text and "the actor's weights with its adapter off" in text
    text = describe(ppo_config(qwen3, actor=replace(layout, ema=None), algo=REF), 2, 100)
    assert "the actor's weights with its adapter off" in text  # whose ref.engine is the default
    assert "ref      ranks 0-1: the actor, its adapter off" in text


@pytest.fixture(scope="module")
def adapter(qwen3, tmp_path_factory):
    """An adapter that peft made, of random A and B."""
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("peft")
    torch.manual_seed(3)
    settings = PeftConfig(r=3, lora_alpha=4, target_modules=["v_proj", "gate_proj"],
                          lora_dropout=0.1, init_lora_weights=False)  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(qwen3), settings).eval()
    model.save_pretrained(folder)
    ids = torch.randint(4, 60, (2, 11))
    return folder, ids, model(ids).logits.detach()


def given(made, **changes):
    targets = ("v_proj", "gate_proj")
    settings = {"rank": 3, "alpha": 4, "target_modules": targets, "adapter": str(made[0])}
    return with_lora(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"rank": 4}, "rank 3, not 4: set actor.lora.rank=3"),
        ({"alpha": 3}, "alpha 4, not 3"),
        ({"use_rslora": True}, "use_rslora"),
        ({"target_modules": ("v_proj",)}, "gate_proj, v_proj"),
        ({"target_modules": "all-linear"}, "20 are not there"),
    ],
)
def test_an_adapter_to_start_from_is_what_the_config_says(qwen3, adapter, changes, said):
    config = ppo_config(qwen3, actor=given(adapter, **changes))
    if said is None:
        check(config, 1)
        return
    with pytest.raises(ConfigError, match=said):
        check(config, 1)


def test_more_than_plain_lora_is_refused(qwen3, adapter, tmp_path):
    for file in adapter[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    for changes in ({"lora_bias": True}, {"bias": "all"}, {"rank_pattern": {"v_proj": 2}}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings | changes))
        with pytest.raises(ConfigError, match="more than plain LoRA"):
            check(ppo_config(qwen3, actor=given(adapter, adapter=str(tmp_path))), 1)


def test_peft_reads_what_we_write_and_we_what_peft_writes(qwen3, adapter, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from spmdrl.engines.fsdp import layers
    from spmdrl.engines.fsdp.lora import ADAPTER, IN_LAYER, adapters_off, add_adapters
    from spmdrl.engines.fsdp.lora_files import write_adapter
    from spmdrl.engines.fsdp.model import build_model

    _, ids, want = adapter
    config = replace(given(adapter), dtype="float32")
    plain = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.float32)
    hf = build_model(str(qwen3), full=True)
    layers.use_kernels(hf, TrainConfig(dtype="float32"), torch.device("cpu"))
    hf.set_attn_implementation("sdpa")
    ours = add_adapters(hf, str(qwen3), config, {}, full=True, fast_cpu=True)
    torch.testing.assert_close(hf(ids).logits, want, rtol=0, atol=1e-5)
    with adapters_off(hf):
        torch.testing.assert_close(hf(ids).logits, plain(ids).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(hf(ids).logits, want, rtol=0, atol=1e-5)  # on again
    tensors = {
        layer + part: hf.get_submodule(layer).get_parameter(inner).detach() * 0.7
        for layer in ours.layers
        for part, inner in zip(ADAPTER, IN_LAYER, strict=True)
    }
    write_adapter(tmp_path, tensors, ours.config, ours.layers, str(qwen3))
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".lora_")
        inner = IN_LAYER[part == "B.weight"]
        hf.get_submodule(layer).get_parameter(inner).data.copy_(tensor)
    theirs = PeftModel.from_pretrained(plain, tmp_path).eval()
    torch.testing.assert_close(theirs(ids).logits, hf(ids).logits, rtol=0, atol=1e-5)


def test_dora_is_equation_5_of_its_paper():
    """As a loop over rows in float64; the gradient of m with the norm held constant."""
    from spmdrl.engines.fsdp.dora import OFFSET, add_offsets
    from spmdrl.engines.fsdp.lora import IN_LAYER, adapt_layers, peft_config
    from spmdrl.weights.shards import LowRank

    torch.manual_seed(0)
    model, x = torch.nn.ModuleDict({"layer": torch.nn.Linear(6, 4)}), torch.randn(5, 6)
    lora = LoraConfig(rank=2, alpha=3)
    adapt_layers(model, ["layer"], peft_config(lora, ["layer"], "m"))
    add_offsets(model, ["layer"])
    layer = model["layer"]
    for name in (*IN_LAYER, OFFSET):
        layer.get_parameter(name).data.normal_(std=0.5)
    a, b = (layer.get_parameter(name).detach() for name in IN_LAYER)
    weight, bias = layer.base_layer.weight.detach(), layer.base_layer.bias.detach()
    offset = layer.get_parameter(OFFSET)
    slopes = torch.randn(5, 4)
    got = layer(x)
    (got * slopes).sum().backward()
    merged = torch.empty(4, 6)
    LowRank(weight, a, b, 1.5, offset.detach()).compute([merged])
    for i in range(4):
        base = weight[i].double()
        row = base + 1.5 * sum(b[i, k].double() * a[k].double() for k in range(2))
        m = base.square().sum().sqrt() + offset[i].double().item()
        unit = row / row.square().sum().sqrt()
        outputs = (x.double() * unit).sum(1)
        torch.testing.assert_close(got[:, i].double(), m * outputs + bias[i], rtol=0, atol=1e-6)
        torch.testing.assert_close(merged[i].double(), m * unit, rtol=0, atol=1e-6)
        wanted = (outputs * slopes[:, i].double()).sum()
        torch.testing.assert_close(offset.grad[i].double(), wanted, rtol=0, atol=1e-5)


def test_adapters_start_alike_whatever_the_order(qwen3, tmp_path):
    """A depends on the seed and the layer's name alone, and making it moves no generator."""
    from spmdrl.engines.fsdp.lora import add_adapters
    from spmdrl.engines.fsdp.model import build_model

    def made(targets, seed=0):
        hf = build_model(str(qwen3), full=True)
        torch.manual_seed(7 + len(targets))
        config = with_lora(rank=2, target_modules=targets, seed=seed)
        before = torch.get_rng_state()
        add_adapters(hf, str(qwen3), config, {}, full=True, fast_cpu=False)
        assert torch.equal(torch.get_rng_state(), before)
        layer = hf.model.layers[1].self_attn.k_proj
        return layer.lora_A.default.weight, layer.lora_B.default.weight

    a, b = made(("k_proj",))
    again, _ = made("all-linear")
    other, _ = made(("k_proj",), seed=1)
    assert torch.equal(a, again) and not torch.equal(a, other) and not b.any()
    assert 0.5 / 8 < a.abs().max() <= 1 / 8  # uniform in +-1 / sqrt(64)
    assert not torch.equal(a, made(("v_proj", "k_proj", "q_proj"), seed=2)[0])


def test_a_fingerprint_tells_weights_apart(qwen3, tmp_path):
    from transformers import AutoModelForCausalLM

    from spmdrl.engines.fsdp.lora import fingerprint

    def of(folder):
        return fingerprint(dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters()))

    save_qwen3(tmp_path, seed=0)
    first = of(qwen3)
    assert first == of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(qwen3)
    model.model.norm.weight.data[5] += 1e-7
    assert fingerprint(dict(model.named_parameters())) != first


def test_a_merged_export_has_the_biases_of_routers(tmp_path):
    """They are buffers, which transformers reads as 0 where the files have none."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    from spmdrl.engines.fsdp.lora import fingerprint
    from spmdrl.engines.fsdp.lora_files import merged_sources

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 98,
             "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4,
             "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
             "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "v_head_dim": 16,
             "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}  # fmt: skip
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    bias.copy_(torch.tensor([0.3, -0.1, 0.2, 0.05]))
    model.save_pretrained(tmp_path)
    saved = {
        "model": str(tmp_path), "layers": [], "dtype": "bfloat16", "rank": 2, "alpha": 4,
        "target_modules": "all-linear", "use_rslora": False,
        "fingerprint": fingerprint({n: p.detach() for n, p in model.named_parameters()}),
    }  # fmt: skip
    found = {name: read() for name, _, read in merged_sources({}, saved, "")}
    assert found.keys() == {*model.state_dict()}
    assert torch.equal(found["model.layers.1.mlp.gate.e_score_correction_bias"], bias)
