"""What spmdrl reads of the internals of transformers, peft and Liger Kernel: a test that fails
names what they have moved.
"""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    WhisperConfig,
)

from spmdrl.engines.fsdp import compat as fsdp_compat
from spmdrl.hub import transformers_compat

CONFIG = Qwen3Config(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, head_dim=8,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip


@pytest.fixture
def model() -> Any:
    return Qwen3ForCausalLM(CONFIG)


def test_transformers_still_maps_configs_to_classes_in_model_mapping() -> None:
    classifiers = AutoModelForSequenceClassification
    found = transformers_compat.model_class(AutoModelForCausalLM, Qwen3Config)
    assert found is Qwen3ForCausalLM
    assert transformers_compat.model_class(classifiers, WhisperConfig) is None
    assert transformers_compat.has_model_class(classifiers, Qwen3Config)
    assert not transformers_compat.has_model_class(classifiers, WhisperConfig)


def test_transformers_still_has_configs_that_are_registered_in_extra_content() -> None:
    class Own(Qwen3Config):
        model_type = "own"

    class Other(Own):
        pass

    with transformers_compat.kept_config_classes():
        AutoConfig.register("own", Own)
        with transformers_compat.kept_config_classes():
            AutoConfig.register("own", Other, exist_ok=True)
        assert type(AutoConfig.for_model("own")) is Own
    with pytest.raises(ValueError, match="Unrecognized model identifier: own"):
        AutoConfig.for_model("own")


def test_transformers_still_says_which_models_take_another_attention() -> None:
    class Own(Qwen3ForCausalLM):
        _supports_attention_backend = False

    assert transformers_compat.takes_attention_functions(Qwen3ForCausalLM)
    assert not transformers_compat.takes_attention_functions(Own)


def test_transformers_still_keeps_the_name_of_the_attention_in_the_config(model: Any) -> None:
    model.set_attn_implementation("eager")
    assert transformers_compat.attention_name(model.config) == "eager"
    transformers_compat.set_attention_name(model.config, "sdpa")
    assert model.config._attn_implementation == "sdpa"
    weights = model(torch.tensor([[1, 2]]), output_attentions=True).attentions
    assert not any(isinstance(weight, torch.Tensor) for weight in weights or ())  # eager has some


def test_transformers_still_declares_where_the_scores_of_routers_are() -> None:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, head_dim=8,
        num_key_value_heads=1, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        mlp_only_layers=[1],
    )  # fmt: skip
    moe: Any = AutoModelForCausalLM.from_config(config)
    found = transformers_compat.declared_routers(moe)
    gates = [moe.model.layers[0].mlp.gate, moe.model.layers[2].mlp.gate]
    assert [(id(gate), 0) for gate in gates] == [(id(m), index) for m, index in found]
    assert transformers_compat.declared_routers(Qwen3ForCausalLM(CONFIG)) == []


def test_transformers_still_names_the_repeated_layers_of_a_model(model: Any) -> None:
    assert transformers_compat.undivided_layers(model) == {type(model.model.layers[0]).__name__}


def test_transformers_still_says_which_files_it_reads(qwen3: Any, tmp_path: Any) -> None:
    config = Qwen3Config.from_pretrained(qwen3)
    found = transformers_compat.checkpoint_files(str(qwen3), config)
    assert found == [str(qwen3 / "model.safetensors")]
    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers_compat.checkpoint_files(str(tmp_path), config)


def test_transformers_still_names_what_it_keeps_in_float32(model: Any) -> None:
    class Own(Qwen3ForCausalLM):
        _keep_in_fp32_modules_strict = ("norm",)

    assert not transformers_compat.keeps_float32(model)
    assert transformers_compat.keeps_float32(Own(CONFIG))


def test_transformers_still_has_the_functions_of_a_gated_delta_net() -> None:
    """The delta rule against its recurrence, arXiv 2412.06464, equation 10."""
    convolve, delta_rule = transformers_compat.gated_delta_functions()
    x, weight = torch.randn(1, 3, 5), torch.randn(3, 2)
    want = torch.nn.functional.conv1d(x, weight[:, None], padding=1, groups=3)[..., :5]
    assert torch.allclose(convolve(x, weight, None, activation=None), want, atol=1e-6)
    q, k = (torch.nn.functional.normalize(torch.randn(1, 4, 1, 6), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(1, 4, 1, 2), -torch.rand(1, 4, 1), torch.rand(1, 4, 1)
    out, _ = delta_rule(
        q, k, v, g=g, beta=beta, initial_state=None, output_final_state=False,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    state = torch.zeros(6, 2)
    for n in range(4):
        key = k[0, n, 0]
        state = state * g[0, n, 0].exp()
        state = state + torch.outer(key, beta[0, n, 0] * (v[0, n, 0] - key @ state))
        assert torch.allclose(out[0, n, 0], q[0, n, 0] @ state * 6**-0.5, atol=1e-5)


def test_peft_still_turns_an_adapter_off_by_its_disable_adapters() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    plain = model(x)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
    adapted = model(x)
    fsdp_compat.turn_adapter(model[0], off=True)
    assert torch.equal(model(x), plain) and not torch.equal(adapted, plain)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2  # A and B, which peft's own switch would freeze
    fsdp_compat.turn_adapter(model[0], off=False)
    assert torch.equal(model(x), adapted)


def test_peft_still_leaves_what_an_adapter_computes_to_its_lora_variant() -> None:
    from peft import LoraConfig, inject_adapter_in_model

    model: Any = nn.Sequential(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    plain = model(x)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"], init_lora_weights=False), model)
    fsdp_compat.set_variant(model[0], lambda layer, given, result: 3 * result + given)
    assert torch.equal(model(x), 3 * plain + x)
    fsdp_compat.turn_adapter(model[0], off=True)
    assert torch.equal(model(x), plain)


def test_liger_still_applies_its_kernels_to_one_model(model: Any) -> None:
    from transformers.models.qwen3 import modeling_qwen3

    before = dict(vars(modeling_qwen3))
    try:
        fsdp_compat.apply_liger(model, fused_linear_cross_entropy=False, cross_entropy=False)
    finally:
        vars(modeling_qwen3).update(before)
    assert "Liger" in type(model.model.norm).__name__ + repr(model.model.norm.forward)
    assert CONFIG.model_type in fsdp_compat.liger_model_types()
    assert "Liger" not in repr(Qwen3ForCausalLM(CONFIG).model.norm.forward)


def test_peft_still_takes_the_names_of_some_layers_for_those_of_experts() -> None:
    assert fsdp_compat.taken_for_experts("deepseek_v3") >= {"gate_proj", "up_proj", "down_proj"}
    assert fsdp_compat.taken_for_experts("qwen3") == set()


def test_transformers_still_gates_experts_by_their_apply_gate() -> None:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    sizes = {"num_experts": 2, "hidden_size": 4, "moe_intermediate_size": 3, "hidden_act": "silu"}
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    marks = experts.has_gate, experts.has_bias, experts.is_transposed, experts.num_experts
    assert marks == (True, False, False, 2)
    x = torch.randn(5, 6)
    want = nn.functional.silu(x[:, :3]) * x[:, 3:]
    assert torch.equal(transformers_compat.apply_expert_gate(experts, x), want)


def test_transformers_still_says_which_models_carry_a_state() -> None:
    from transformers import Qwen3ForCausalLM, Zamba2ForCausalLM

    assert transformers_compat.is_stateful(Zamba2ForCausalLM)
    assert not transformers_compat.is_stateful(Qwen3ForCausalLM)
