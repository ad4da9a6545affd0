"""Triton layers, ours and Liger's, inside real models against transformers' own modules."""

import sys

import pytest
import torch
from tiny_models import CHARS
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from triton_tests import DEVICE, READY, no_worse, run_interpreted

from spmdrl.config import ConfigError
from spmdrl.engines.fsdp import attention, layers
from spmdrl.engines.fsdp.model import backbone_hidden
from spmdrl.engines.fsdp.packed_rows import Packing

SIZES = {
    "vocab_size": len(CHARS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 2,
    "bos_token_id": 1,
}  # fmt: skip
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=32, **WINDOW)),
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, head_dim=32, **WINDOW)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=32, **EXPERTS)),
    "mixed": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=32, **EXPERTS, mlp_only_layers=[1])
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**SIZES)),
    "glm": lambda: GlmForCausalLM(GlmConfig(**SIZES, head_dim=32)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**SIZES)),
}
# replaced norms, MLPs, and attentions whose rotary embedding is; GLM rotates in pairs and half of
# the head, Cohere in pairs with a LayerNorm, Gemma's MLP is a GELU's, Phi3's has one projection
REPLACED = {
    "qwen3": (9, 2, 2), "qwen2": (5, 2, 2), "llama": (5, 2, 2), "gemma2": (9, 0, 2),
    "gemma3_text": (13, 0, 2), "qwen3_moe": (9, 0, 2), "mixed": (9, 1, 2), "phi3": (5, 0, 2),
    "glm": (5, 0, 0), "cohere": (0, 2, 0),
}  # fmt: skip


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]().train()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # a norm's weight is 1, or 0, at the start
                p.add_(torch.randn_like(p) * 0.2)
    model.set_attn_implementation(attention.NAME)
    return model.to(DEVICE)


def passed(model, seed=1):
    """Hidden states of three packed sequences, and all gradients of a weighted sum of them."""
    draw = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, 12, (3,), generator=draw)
    ids = torch.randint(3, len(CHARS), (int(lens.sum()),), generator=draw).to(DEVICE)
    positions = torch.cat([torch.arange(n) for n in lens.tolist()]).to(DEVICE)
    packing = Packing.build(lens, torch.device(DEVICE))
    model.zero_grad()
    out = backbone_hidden(model, ids, positions, packing)
    (out * torch.randn(out.shape, generator=draw).to(DEVICE)).sum().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_equal(got, want):
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=1e-5)
    assert got[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert (got[1][name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7, name


def patched(model):
    return [m for m in model.modules() if "forward" in vars(m)]


if not READY:

    @pytest.mark.compiles
    def test_interpreted():
        run_interpreted(__file__)

else:
    from spmdrl_kernels import norm
    from spmdrl_kernels.norm_triton import rms_norm

    @pytest.fixture
    def on_triton(monkeypatch):
        """Counts what goes to a kernel."""
        seen = []
        for module in (norm, layers):
            monkeypatch.setattr(
                module, "on_triton", lambda *t, of=module.__name__: not seen.append(of)
            )
        return seen

    @pytest.mark.parametrize("name", MODELS)
    def test_triton_layers_are_the_models_own(name, on_triton):
        model = model_of(name)
        want = passed(model)
        shared = dict(vars(sys.modules[type(model).__module__]))
        layers.use_triton(model)
        kinds = [type(m).__name__ for m in model.modules()]
        found = (kinds.count("FastRmsNorm"), kinds.count("SwiGluMlp"), len(patched(model)))
        assert found == REPLACED[name]
        assert_equal(passed(model), want)
        assert len(on_triton) == sum(found)
        assert dict(vars(sys.modules[type(model).__module__])) == shared

    def test_partial_rotary_embeddings_stay_with_the_model(on_triton):
        """Of a function that rotates halves, but is given a cosine of half of the head."""
        calls = []
        q, k = torch.zeros(1, 2, 3, 8, device=DEVICE), torch.zeros(1, 1, 3, 8, device=DEVICE)
        cos = torch.zeros(1, 3, 4, device=DEVICE)
        layers.fast_rotary(lambda *args, **kwargs: calls.append(args), q, k, cos, cos)
        layers.fast_rotary(lambda *args, **kwargs: calls.append(kwargs), q, k,
                           cos.repeat(1, 1, 2), cos.repeat(1, 1, 2), unsqueeze_dim=2)  # fmt: skip
        assert calls[0][2].shape == cos.shape and calls[1] == {"unsqueeze_dim": 2}
        assert on_triton == []

    def test_what_computes_something_else_is_seen():
        mlp = model_of("gemma2").model.layers[0].mlp
        assert layers.is_gated_mlp(mlp) and not layers.computes_swiglu(mlp)
        norms = [model_of(name).cpu().model.norm for name in ("llama", "gemma2")]
        assert [layers.norm_offset(norm) for norm in norms] == [0.0, 1.0]

        class MeanNorm(type(norms[0])):
            def forward(self, x):
                return super().forward(x - x.mean(-1, keepdim=True))

        norms[0].__class__ = MeanNorm
        assert layers.norm_offset(norms[0]) is None

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_our_norm_is_no_further_from_the_truth_than_transformers(dtype):
        """transformers rounds before it multiplies by the weight, and again after."""
        own = model_of("llama").model.norm.to(dtype)
        draw = torch.Generator().manual_seed(3)
        x, up = (torch.randn(77, 64, generator=draw).to(dtype).to(DEVICE) for _ in range(2))

        def run(function, wide):
            leaves = [t.detach().to(wide).requires_grad_() for t in (x, own.weight)]
            out = function(*leaves)
            return [out.detach(), *torch.autograd.grad(out, leaves, up.to(wide))]

        def plain(x, w):
            return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + own.variance_epsilon))

        def theirs(x, w):
            return torch.func.functional_call(own, {"weight": w}, (x,))

        got = run(lambda x, w: rms_norm(x, w, own.variance_epsilon), dtype)
        for a, truth, b in zip(got, run(plain, torch.float64), run(theirs, dtype), strict=True):
            no_worse(a, truth, b)

    @pytest.mark.parametrize("name", ["qwen3", "llama", "gemma2", "gemma3_text", "phi3"])
    def test_ligers_layers_are_the_models_own_and_nobody_elses(name):
        model, other = model_of(name), model_of(name)
        want = passed(model)
        shared = dict(vars(sys.modules[type(model).__module__]))
        layers.use_liger(model)
        assert dict(vars(sys.modules[type(model).__module__])) == shared
        assert not patched(other)
        norms = [m for m in model.modules() if m._get_name() == "LigerRMSNorm"]
        assert len(norms) == REPLACED[name][0]
        assert model.forward.__func__ is type(model).forward  # the LM head stays ours
        rotary = [m for m in patched(model) if type(m).__name__.endswith("Attention")]
        assert len(rotary) == 2
        mlps = [layer.mlp for layer in model.model.layers]
        assert all("forward" in vars(mlp) for mlp in mlps)
        if DEVICE == "cpu":  # Triton's interpreter cannot run Liger's norm and MLP, only its RoPE
            for module in norms + mlps:
                del module.forward
        assert_equal(passed(model), want)

    def test_liger_names_what_it_knows():
        with pytest.raises(ConfigError, match=r"'glm'; it has .*llama, .*Use 'spmdrl'"):
            layers.use_liger(model_of("glm"))
