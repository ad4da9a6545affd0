"""What a machine cannot do is refused at start; what checkpointing keeps; flash-attn."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Gemma2Config, Qwen3Config, Qwen3ForCausalLM

from spmdrl.cli.arguments import load_config
from spmdrl.config import ConfigError, PpoConfig, TrainConfig
from spmdrl.engines.fsdp import attention, layers
from spmdrl.engines.fsdp.activations import use_checkpointing
from spmdrl.engines.fsdp.model import backbone_hidden
from spmdrl.engines.fsdp.packed_rows import Packing

CPU, GPU = torch.device("cpu"), torch.device("cuda")
REFUSED = [
    ({"kernels": "liger"}, CPU, "on CPUs use 'spmdrl'"),
    ({"attention": "flash_attn"}, CPU, "on cpu in bfloat16"),
    ({"attention": "flash_attn", "dtype": "float32"}, GPU, "on cuda in float32"),
    ({"attention": "flash_attn"}, GPU, "pip install flash-attn"),
    ({"activation_offload": True}, CPU, "on the CPU already"),
]


@pytest.mark.parametrize(("given", "device", "words"), REFUSED)
def test_what_cannot_be_done_here_is_refused(monkeypatch, given, device, words):
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=words):
        layers.check_here(TrainConfig(**given), device)


def test_a_missing_compiler_is_named(monkeypatch):
    layers.check_here(TrainConfig(), CPU)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match="no 'no-such-compiler' on the path: install g"):
        layers.check_here(TrainConfig(compile=True), CPU)
    layers.check_here(TrainConfig(activation_offload=True), GPU)


def test_an_engine_refuses_before_it_loads_anything():
    from spmdrl.engines.fsdp.engine import FsdpEngine

    class Ranks:
        device = CPU

    with pytest.raises(ConfigError, match="liger"):
        FsdpEngine.build("policy", "/no/such/model", TrainConfig(kernels="liger"), Ranks())


def test_options_on_the_command_line(tmp_path):
    (tmp_path / "cfg.py").write_text(
        "from spmdrl.config import *\n"
        "config = PpoConfig(model='m', data=DataConfig(train='t'), reward=len)\n"
    )

    def load(value):
        given = {"actor.activation_checkpointing": value}
        return load_config(str(tmp_path / "cfg.py"), PpoConfig, given).actor

    for value in (True, False, "selective"):
        assert load(value).activation_checkpointing == value
    with pytest.raises(ConfigError, match="activation_checkpointing: expected bool or one of"):
        load("some")


# ---- a function for one model


def shift(x):
    return x + 1


class Shifted(torch.nn.Module):
    def forward(self, x, *, times=2):
        return shift(x) * times


def test_a_global_function_is_replaced_in_one_model_alone():
    """Also where both models are compiled, which is kept by code, and looks names up by module."""
    one, other, x = Shifted(), Shifted(), torch.zeros(3)
    layers.rebind(one, "shift", lambda own: lambda x: own(x) + 100)
    layers.rebind(other, "shift", lambda own: None)
    for call in (one, torch.compile(one.forward, backend="eager", fullgraph=True)):
        assert call(x).tolist() == [202.0] * 3
    for call in (other, torch.compile(other.forward, backend="eager", fullgraph=True)):
        assert call(x, times=3).tolist() == [3.0] * 3


# ---- attention


class Model:
    """What `use_attention` needs of a model."""

    def __init__(self, config):
        self.config, self.name = config, attention.NAME

    def set_attn_implementation(self, name):
        self.name = name

    def named_parameters(self):
        return iter(())


def test_flash_attn_where_it_is_wanted_or_needed(monkeypatch):
    """Gemma 2's scores are soft-capped, which torch's own kernel has not."""
    found = {"there": True}
    monkeypatch.setattr(layers.importlib.util, "find_spec", lambda name: found["there"] or None)

    def chosen(device, hf=Qwen3Config, **given):
        model = Model(hf())
        layers.use_attention(model, TrainConfig(**given), device)
        return model.name

    assert chosen(GPU) == chosen(CPU) == chosen(CPU, Gemma2Config) == attention.NAME
    assert chosen(GPU, Gemma2Config, dtype="float32") == attention.NAME
    name = chosen(GPU, attention="flash_attn")
    assert name == chosen(GPU, Gemma2Config) != attention.NAME and "flash" not in name
    assert AttentionInterface()[name].keywords == {"flash": layers.flash_attn_varlen}
    assert chosen(GPU, compile=True) not in (name, attention.NAME)
    with pytest.raises(ConfigError, match="no soft-capped scores on a GPU"):
        chosen(GPU, Gemma2Config, attention="torch")
    found["there"] = None
    with pytest.raises(ConfigError, match=r"'gemma2' has soft-capped.*pip install flash-attn"):
        chosen(GPU, Gemma2Config)


def plain_flash_attn(
    q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale, causal, softcap, window_size
):
    """flash_attn_varlen_func by its documentation: window sizes are inclusive, 0: no softcap."""
    assert causal and torch.equal(cu_q, cu_k) and max_q == max_k == int(cu_q.diff().max())
    outs = []
    for a, b in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        rows = torch.arange(b - a)
        back = rows[:, None] - rows[None, :]
        seen = (back >= 0) & ((back <= window_size[0]) if window_size[0] >= 0 else True)
        share = q.shape[1] // k.shape[1]
        keys, values = (t[a:b].repeat_interleave(share, 1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * softmax_scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_flash_attn_is_asked_for_what_the_padded_form_computes(monkeypatch, window, softcap):
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = plain_flash_attn
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    lens = torch.randint(1, 30, (7,))
    packing = Packing.build(lens, CPU)
    q, k, v = (torch.randn(1, heads, int(lens.sum()), 16) for heads in (6, 2, 2))
    got = layers.flash_attn_varlen(q, k, v, packing, 0.3, window, softcap)
    want = attention._padded(q, k, v, packing, 0.3, window, softcap)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    if softcap is None and window is None:  # and torch's own attention says so too
        one = int(lens[0])
        first = scaled_dot_product_attention(
            *(t[:, :, :one] for t in (q, k, v)), is_causal=True, scale=0.3, enable_gqa=True
        )
        torch.testing.assert_close(got[:, :one], first.transpose(1, 2), rtol=1e-5, atol=1e-5)


# ---- checkpointing


def bytes_of(work):
    """(most that was allocated at once, what is left at the end)."""
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        work()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most, now


def test_selective_checkpointing_keeps_less_than_none_and_more_than_full():
    shape = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=192, head_dim=32, num_hidden_layers=6,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    lens = torch.randint(20, 60, (6,))
    packing, num_tokens = Packing.build(lens, CPU), int(lens.sum())
    positions = torch.cat([torch.arange(n) for n in lens.tolist()])
    token_ids = torch.randint(3, 60, (num_tokens,))
    found = []
    for how in (False, "selective", True):
        model = Qwen3ForCausalLM(shape).train()
        model.set_attn_implementation(attention.NAME)
        layers.use_kernels(model, TrainConfig(dtype="float32"), CPU)
        use_checkpointing(model, how)
        outs = []

        def forward(model=model, outs=outs):
            outs.append(backbone_hidden(model, token_ids, positions, packing))

        def both(model=model):
            backbone_hidden(model, token_ids, positions, packing).square().sum().backward()

        both()
        found.append((bytes_of(both)[0], bytes_of(forward)[1]))
    peaks, kept = zip(*found, strict=True)
    assert peaks[0] > peaks[1] > peaks[2] and kept[0] > kept[1] > kept[2]
    assert 0.4 < kept[1] / kept[0] < 0.75
    # of full checkpointing the inputs of six layers, the embedding's and the last norm's
    assert kept[2] < 12 * num_tokens * 64 * 4


# ---- torch.compile


@pytest.mark.compiles
def test_inductor_computes_the_same():
    """One layer, in float32; test_layer_options.py shows that other sizes need no other code."""
    shape = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, head_dim=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = Qwen3ForCausalLM(shape).train()
    model.set_attn_implementation(attention.NAME)
    config = TrainConfig(dtype="float32", compile=True)
    layers.use_kernels(model, config, CPU)

    def run(lens):
        packing = Packing.build(torch.tensor(lens), CPU)
        positions = torch.cat([torch.arange(n) for n in lens])
        draw = torch.Generator().manual_seed(sum(lens))
        ids = torch.randint(3, 60, (sum(lens),), generator=draw)
        model.zero_grad()
        out = backbone_hidden(model, ids, positions, packing)
        (out * torch.randn(out.shape, generator=draw)).sum().backward()
        return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    batches = [[5, 9, 1], [3, 4]]
    want = [run(lens) for lens in batches]
    layers.use_attention(model, replace(config), CPU)
    layers.compile_layers(list(model.model.layers))
    for lens, (out, grads) in zip(batches, want, strict=True):
        got, found = run(lens)
        torch.testing.assert_close(got, out, rtol=1e-5, atol=1e-5)
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            assert (found[name] - grad).norm() < 1e-5 * grad.norm(), name
