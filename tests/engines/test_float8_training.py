"""Training with FP8 products: each of them against float64, the engine's numbers over micro-batches
and ranks, what is saved, resumed and pushed, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_configs import ppo_config
from ranks import run_calls
from tiny_models import save_qwen3, save_qwen3_moe, save_qwen_vl
from torch import Tensor, nn
from training_batches import CONFIG, engine_on, on_data_ranks, whole_batch

from spmdrl.config import AlgoConfig, ConfigError, LoraConfig, OptimConfig, TrainConfig
from spmdrl.engines.fsdp import float8
from spmdrl.hub.hf_folder import meta_model
from spmdrl.training.checks import fp8 as checks
from spmdrl.training.checks.rl import check

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)  # bits of a fraction, least exponent, largest


# ---- a layer against float64


def rounded(x: Tensor, kind: tuple[int, int, float], dim: int | None) -> Tensor:
    """x as it is after it was rounded to FP8, by the definition of the format.

    dim: along which the values of one scale lie; None: all have one.
    """
    bits, least, largest = kind
    amax = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = 2 ** torch.floor(torch.log2(largest / amax.clamp(min=1e-12)))
    scaled = (x * scale).clamp(-largest, largest)
    exponent = torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-40))).clamp(min=least)
    step = 2 ** (exponent - bits)
    return torch.round(scaled / step) * step / scale  # torch rounds half to even


def golden(recipe: str, x: Tensor, w: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and the gradients of x and w, in float64. x: (tokens, in), w: (out, in)."""
    if recipe == "tensorwise":
        a, b, c = rounded(x, E4M3, None), rounded(w, E4M3, None), rounded(grad, E5M2, None)
        return [a @ b.T, c @ b, c.T @ a]
    output = rounded(x, E4M3, 1) @ rounded(w, E4M3, 1).T
    rows = rounded(grad, E4M3, 1)
    if recipe == "rowwise":
        return [output, rows @ rounded(w, E4M3, 0), rounded(grad, E4M3, 0).T @ rounded(x, E4M3, 0)]
    return [output, rows @ rounded(w, E4M3, None), grad.T @ x]


class OneLayer(nn.Module):
    """What `use_fp8` needs of a model."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.layer = linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_is_what_float64_says(recipe, monkeypatch):
    monkeypatch.setattr(float8, "decoder_layers", lambda hf: [hf])
    draw = torch.Generator().manual_seed(3)
    x, w, grad = (torch.randn(*s, generator=draw) for s in ((37, 64), (48, 64), (37, 48)))
    x[5] *= 300  # an outlier, beside which others are subnormal numbers; and a row of zeros
    x[9], grad[11], grad[:, 7] = 0, 0, 0
    x, w, grad = (t.bfloat16() for t in (x, w, grad))
    model: Any = OneLayer(nn.Linear(64, 48, bias=False, dtype=torch.bfloat16))
    weight = model.layer.weight
    weight.data.copy_(w)
    float8.use_fp8(model, recipe)
    assert type(model.layer).__name__ == "Float8Linear" and model.layer.weight is weight
    given = x.clone().requires_grad_()
    output = model.layer(given)
    output.backward(grad)
    want = golden(recipe, *(t.double() for t in (x, w, grad)))
    for got, one in zip((output, given.grad, weight.grad), want, strict=True):
        # products are summed in float32 and rounded to bfloat16: half of 2 ** -7
        torch.testing.assert_close(got.double(), one, rtol=2**-8, atol=1e-5 * one.abs().max())
    exact = x.double() @ w.double().T
    assert 0.01 < (want[0] - exact).norm() / exact.norm() < 0.05  # FP8 is much coarser than that


def test_layers_of_other_widths_and_the_head_are_left(tmp_path):
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(save_qwen3(tmp_path, intermediate_size=72))
    names = {name.rpartition(".")[2] for name in float8.fp8_layers(hf)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}  # 72 is no multiple of 16


def test_mixers_with_a_state_are_left():
    from transformers import FalconH1Config

    hf = meta_model(FalconH1Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4,
        mamba_d_head=16, mamba_d_state=16, architectures=["FalconH1ForCausalLM"],
    ))  # fmt: skip
    names = set(float8.fp8_layers(hf))
    assert {name.split(".")[3] for name in names} == {"self_attn", "feed_forward"}
    assert any(".mamba.in_proj" in name for name, _ in hf.named_parameters())


# ---- the engine


WHOLE = replace(CONFIG, dtype="bfloat16", micro_batch_tokens=1000, optim=OptimConfig(
    lr=1e-3, weight_decay=0.0, clip_norm=1e9))  # fmt: skip
# on one rank: what changes no bit of a recipe's numbers
SAME: dict[str, dict[str, Any]] = {
    "kept": {"activation_checkpointing": "selective", "offload_params": True,
             "shared_prefix": False, "ema": 0.5},
    "computed again": {"activation_checkpointing": True, "offload_policy": True,
                       "kernels": "torch"},
}  # fmt: skip
# on two: what changes the order of sums alone
ON_TWO: dict[str, dict[str, Any]] = {
    "shards": {"micro_batch_tokens": 41},
    "ulysses": {"ulysses": 2, "activation_checkpointing": True},
    "replicas": {"fsdp": 1, "micro_batch_tokens": 41},
}


def numbers_on(topology: Any, model: str, kind: str, settings: dict[str, Any]) -> Any:
    """Log-probabilities (or values) of the sequences by their numbers, and all gradients of an
    update, gathered."""
    from spmdrl.algo.objectives import policy_objective, value_objective

    torch.set_num_threads(1)
    engine = engine_on(topology, kind, model, replace(WHOLE, **settings))
    ranks = engine.topology
    first = ranks.data_ranks.index(ranks.rank) if ranks.rank in ranks.data_ranks else 0
    mine = list(range(first, 9, len(ranks.data_ranks)))
    batch = on_data_ranks(ranks, whole_batch().select(mine))
    looked = engine.logprobs(batch, 1.0).logprobs if kind == "policy" else engine.values(batch)
    parts = dict(zip(mine, looked.split(batch.seq_lens.tolist()), strict=False))
    grads: dict[str, Tensor] = {}

    def keep() -> None:
        for name, p in engine.trained.items():
            grads[name] = p.grad.full_tensor().clone()

    engine.optimizer.step = keep
    loss = policy_objective if kind == "policy" else value_objective
    engine.update(batch, loss(AlgoConfig()), 1.0)
    converted = sum(type(m).__name__ == "Float8Linear" for m in engine.module.modules())
    return parts, grads, converted


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> dict[Any, Any]:
    """By kind, recipe and option, of one rank."""
    asked: list[tuple[str, str | None, str]] = [("policy", None, ""), ("value", None, "")]
    asked += [(kind, recipe, "") for kind in ("policy", "value") for recipe in RECIPES]
    asked += [("policy", recipe, name) for recipe in RECIPES for name in SAME]
    calls = []
    for kind, recipe, name in asked:
        settings = {"fp8": recipe} | SAME.get(name, {})
        calls.append((numbers_on, (str(qwen3), kind, settings)))
    found = run_calls(1, calls, timeout_s=120)
    return {case: results[0] for case, results in zip(asked, found, strict=True)}


def apart(one: Any, other: Any) -> tuple[float, float]:
    """The largest difference of a log-probability, and that of gradients by their norm."""
    (parts, grads, _), (others, theirs, _) = one, other
    looked = max(float((parts[i] - others[i]).abs().max()) for i in parts)
    left = sum(float((grads[n] - theirs[n]).square().sum()) for n in grads)
    return looked, (left / sum(float(g.square().sum()) for g in theirs.values())) ** 0.5


@pytest.mark.ranks
def test_the_engine_multiplies_in_fp8(alone):
    for kind in ("policy", "value"):
        plain = alone[kind, None, ""]
        assert plain[2] == 0
        for recipe in RECIPES:
            found = alone[kind, recipe, ""]
            assert found[2] == 14  # seven layers each of two
            looked, gradients = apart(found, plain)
            # a critic's head starts at 0, and so do all its values and all gradients but the head's
            assert (0.004 < looked < 0.1) == (kind == "policy")
            assert 0.005 < gradients < 0.2


@pytest.mark.ranks
@pytest.mark.parametrize("recipe", RECIPES)
def test_means_of_the_same_end_change_no_bit(alone, recipe):
    for name in SAME:
        assert apart(alone["policy", recipe, name], alone["policy", recipe, ""]) == (0.0, 0.0), name


@pytest.mark.ranks
def test_two_ranks_are_as_one_and_so_are_micro_batches(alone, qwen3):
    """FP8 itself moves log-probabilities by 0.02 and gradients by 0.08. Scales that are no powers
    of two would move them by as much between micro-batches: torchao's own tensorwise does."""
    cases = [(recipe, name) for recipe in RECIPES for name in ON_TWO]
    calls = [
        (numbers_on, (str(qwen3), "policy", {"fp8": recipe} | ON_TWO[name]))
        for recipe, name in cases
    ]
    for (recipe, name), results in zip(cases, run_calls(2, calls), strict=True):
        found = ({i: part for rank in results for i, part in rank[0].items()}, *results[0][1:])
        assert found[0].keys() == set(range(9)), name
        looked, gradients = apart(found, alone["policy", recipe, ""])
        assert looked < 2e-3 and gradients < 0.02, (recipe, name, looked, gradients)


def products_on(topology: Any, model: str, how: Any) -> int:
    """How many products in FP8 an update of one micro-batch computes."""
    from torch.profiler import profile

    from spmdrl.algo.objectives import policy_objective

    config = replace(WHOLE, fp8="rowwise", activation_checkpointing=how)
    engine = engine_on(topology, "policy", model, config)
    with profile() as found:
        engine.update(whole_batch(), policy_objective(AlgoConfig()), 1.0)
    return sum(e.count for e in found.key_averages() if e.key == "aten::_scaled_mm")


def saved_on(topology: Any, model: str, recipe: str, folder: str) -> Any:
    """Whether resumed weights are equal; names in a checkpoint with FP8 and without; and whether
    what is pushed at the start is the same."""
    from spmdrl.algo.objectives import policy_objective

    torch.set_num_threads(1)
    config = replace(WHOLE, fp8=recipe, micro_batch_tokens=41, ema=0.9)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    engine, plain = (
        engine_on(topology, "policy", model, c) for c in (config, replace(config, fp8=None))
    )
    pushed, usual = (
        {n: t.clone() for n, t in e.named_weights(torch.bfloat16, 1 << 20)} for e in (engine, plain)
    )
    loss = policy_objective(AlgoConfig())
    engine.update(batch, loss, 1.0)
    engine.save(Path(folder))
    again = engine_on(topology, "policy", model, config)
    again.load(Path(folder))
    plain.load(Path(folder))  # and a run without FP8 goes on from it
    metrics = [e.update(batch, loss, 1.0) for e in (engine, again, plain)]
    ends = [
        {n: t.clone() for n, t in e.named_weights(torch.float32, 1 << 20)} for e in (engine, again)
    ]
    return {
        "resumed": metrics[0] == metrics[1]
        and all(torch.equal(ends[0][n], t) for n, t in ends[1].items()),
        "differs": metrics[0] != metrics[2],
        "names": [sorted(e.state_dict()["model"]) for e in (engine, plain)],
        "pushed": pushed.keys() == usual.keys()
        and all(torch.equal(pushed[n], t) and t.dtype == torch.bfloat16 for n, t in usual.items()),
        "count": len(pushed),
    }


@pytest.mark.ranks
def test_saved_resumed_and_pushed_as_without(qwen3, tmp_path):
    calls = []
    for recipe in RECIPES:
        (tmp_path / recipe).mkdir()
        calls.append((saved_on, (str(qwen3), recipe, str(tmp_path / recipe))))
    calls += [(products_on, (str(qwen3), how)) for how in ("selective", True)]
    *found, selective, full = run_calls(2, calls)
    for results in found:
        for rank in results:
            assert rank["resumed"] and rank["differs"] and rank["pushed"] and rank["count"] == 24
            assert rank["names"][0] == rank["names"][1]
    # three products a layer; what is computed again are the layers' outputs, unless they are kept
    assert selective == [42, 42] and full == [56, 56]


# ---- what is refused


def test_what_does_not_go_with_it(qwen3, tmp_path, monkeypatch):
    from transformers import Llama4TextConfig

    moe = save_qwen3_moe(tmp_path / "moe")
    odd = save_qwen3(tmp_path / "odd", hidden_size=72, num_attention_heads=3, head_dim=24,
                     num_key_value_heads=3, intermediate_size=120)  # fmt: skip
    Llama4TextConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, intermediate_size_mlp=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        num_local_experts=16, interleave_moe_layer_step=1, architectures=["Llama4ForCausalLM"],
    ).save_pretrained(tmp_path / "llama4")  # fmt: skip
    role = TrainConfig(fp8="rowwise")
    checks.check_fp8("critic", role, str(qwen3))
    for change, model, words in (
        ({"engine": "megatron"}, qwen3, "critic.fp8='rowwise' .* layers of TransformerEngine"),
        ({"dtype": "float32"}, qwen3, "use dtype='bfloat16'"),
        ({"lora": LoraConfig()}, qwen3, "does not go with critic.lora"),
        ({"lora": LoraConfig(quantization="nf4")}, qwen3, "does not go with critic.lora"),
        ({}, moe, "a mixture's experts"),
        ({}, odd, "no decoder layer of model type 'qwen3'"),
        ({}, tmp_path / "llama4", "only .* of the decoder layers of model type 'llama4_text'"),
    ):
        with pytest.raises(ConfigError, match=words):
            checks.check_fp8("critic", replace(role, **change), str(model))
    with monkeypatch.context() as patch:
        patch.setattr(float8, "find_spec", lambda name: None)
        with pytest.raises(ConfigError, match="pip install torchao"):
            checks.check_fp8("critic", role, str(qwen3))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    for capability, is_fine in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device=None, found=capability: found
        )
        if is_fine:
            checks.check_fp8("critic", role, str(qwen3))
            slow = checks.warnings_of_fp8(ppo_config(qwen3, actor=role, critic=role))
            assert len(slow) == 1 and slow[0].startswith("actor.fp8, critic.fp8 without compile")
            fast = replace(role, compile=True)
            assert not checks.warnings_of_fp8(ppo_config(qwen3, actor=fast))
        else:
            with pytest.raises(ConfigError, match="on NVIDIA A100-SXM4-80GB: products in FP8"):
                checks.check_fp8("critic", role, str(qwen3))


def test_a_run_is_refused_by_its_check(qwen3, tmp_path):
    actor = TrainConfig(fp8="rowwise")
    algo = AlgoConfig(advantage="gae", kl_coef=0.1)
    check(ppo_config(qwen3, algo=algo, actor=actor, critic=actor, ref=actor), 2)
    for change, words in (
        ({"actor": replace(actor, lora=LoraConfig())}, "actor.fp8='rowwise' does not go with"),
        (
            {"ref": replace(actor, dtype="float32"), "algo": AlgoConfig(kl_coef=0.1)},
            "ref.fp8='rowwise' with ref.dtype='float32'",
        ),
        ({"actor": replace(actor, engine="megatron")}, "TransformerEngine"),
        ({"strict": True}, "strict=True does not go with actor.fp8='rowwise'"),
        ({"explain_mismatch": True}, "explain_mismatch=True does not go with actor.fp8='rowwise'"),
    ):
        with pytest.raises(ConfigError, match=words):
            check(ppo_config(qwen3, actor=actor, **change) if "actor" not in change
                  else ppo_config(qwen3, **change), 2)  # fmt: skip
    with pytest.raises(ConfigError, match=r"actor\.fp8: not with 'qwen2_5_vl'"):
        check(ppo_config(save_qwen_vl(tmp_path), actor=actor), 1)


def test_a_host_converts_its_own_layers(qwen3):
    from spmdrl.embed import check_use

    check_use(ppo_config(qwen3))
    with pytest.raises(ConfigError, match=r"actor\.fp8 has no effect: the model is the host's"):
        check_use(ppo_config(qwen3, actor=TrainConfig(fp8="tensorwise")))
