"""Experts on ranks of their own (expert_parallel of engine fsdp): numbers are those of one rank
that has all experts.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_calls
from tiny_models import save_qwen3, save_qwen3_moe
from training_batches import CONFIG, engine_on, whole_batch

from spmdrl.config import AlgoConfig, ConfigError, LoraConfig, TrainConfig
from spmdrl.engines.fsdp import experts

# Adam divides by the size of a gradient: where one is almost zero its rounding would show
WELL_CONDITIONED = replace(CONFIG, optim=replace(CONFIG.optim, eps=1e-6))
MUON = {"optim": replace(WELL_CONDITIONED.optim, name="muon")}
LORA = {"lora": LoraConfig(rank=4)}
STACKS = ("experts.gate_up_proj", "experts.down_proj")
OF_EXPERTS = {"lora": LoraConfig(rank=8, target_parameters=STACKS)}
EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}

# biases and transposed weights; a router with a bias, shared experts, dense layers; a shared expert
# with a gate
FAMILIES = ("gpt_oss", "deepseek_v3", "qwen2_moe")
# (ranks, model, kind, options): what is learnt is that of one rank with the same of LEARNT
LEARNT = ("optim", "lora", "dtype")
CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "eight", "value", EP2),
    (2, "eight", "policy", EP2 | MUON | {"micro_batch_tokens": 41}),
    (2, "eight", "policy", EP2 | LORA),
    (2, "gpt_oss", "policy", EP2 | OF_EXPERTS),
    (2, "eight", "policy", EP2 | {"ulysses": 2, "activation_checkpointing": "selective"}),
    (2, "eight", "policy", EP2 | {"activation_checkpointing": True, "offload_policy": True}),
    (2, "eight", "policy", EP2 | {"offload_params": True, "offload_optimizer": True}),
    (2, "few", "policy", EP2),
    (2, "eight in one file", "policy", EP2),
    *((2, family, "policy", EP2) for family in FAMILIES),
    (4, "eight", "policy", EP2 | {"fsdp": 2}),  # two replicas
    (4, "eight", "policy", EP2 | MUON | {"reshard_after_forward": False}),
    (4, "eight", "policy", EP4 | {"ulysses": 2}),
    (4, "two in one file", "policy", EP2),  # ranks share an expert's rows
    (4, "two", "policy", EP2 | MUON),  # and have whole ones, or none
    (4, "few", "policy", EP4),
    (4, "two", "policy", EP2 | OF_EXPERTS),
]  # fmt: skip
BFLOAT16 = ("eight", "policy", {"dtype": "bfloat16"})
WRITERS = {1: {}, 4: EP2}  # by ranks, the options of engines that write a checkpoint
READERS: list[tuple[int, dict[str, Any]]] = [(4, EP4), (2, EP2), (2, {})]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """eight: of its experts; two; few: eight, of which no token goes to four; in one file: no
    safetensors, so that rank 0 hands out shards.
    """
    folder = tmp_path_factory.mktemp("models")
    save_qwen3_moe(folder / "eight")
    save_qwen3_moe(folder / "two", num_experts=2)
    save_qwen3_moe(folder / "few", seed=1)
    keep_few(folder / "few")
    for family in FAMILIES:
        save_family(family, folder / family)
    for source in ("eight", "two"):
        name = f"{source} in one file"
        shutil.copytree(folder / source, folder / name)
        state = saved(folder / name)
        torch.save(state, folder / name / "pytorch_model.bin")
        Path(folder, name, "model.safetensors").unlink()
    return folder


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def save_family(kind: str, folder: Path) -> None:
    """A tiny model of the kind, none of whose biases is zero."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    from spmdrl.hub.hf_folder import meta_model
    from spmdrl.hub.tiny_config import tiny_config

    torch.manual_seed(0)
    large = CONFIG_MAPPING[kind]()
    config = tiny_config(large, meta_model(large), vocab=64)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for tensor in model.state_dict().values():
        if tensor.ndim < 2:
            tensor += 0.1 * torch.randn_like(tensor)
    model.save_pretrained(folder)


def keep_few(folder: Path) -> None:
    """A token's scores are a number times (4, 3, 2, 1, -1, -2, -3, -4): the first two experts are
    chosen, or the last two.
    """
    from safetensors.torch import save_file

    state = saved(folder)
    for name in [name for name in state if name.endswith("mlp.gate.weight")]:
        slope = torch.tensor([4.0, 3.0, 2.0, 1.0, -1.0, -2.0, -3.0, -4.0])
        state[name] = slope[:, None] * state[name][:1]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def loss_of(kind: str) -> Any:
    from spmdrl.algo.objectives import policy_objective, value_objective

    algo = AlgoConfig(entropy_coef=0.01)
    return policy_objective(algo) if kind == "policy" else value_objective(algo)


def updates_on(topology: Any, model: str, kind: str, options: dict[str, Any]) -> Any:
    """Log-probabilities or values by sequence, two updates' metrics, then the weights."""
    engine = engine_on(topology, kind, model, replace(WELL_CONDITIONED, **options), topology)
    places = engine.topology
    mine: list[int] = []
    if places.rank in places.data_ranks:  # the last of several has none, the one before a single
        owners = len(places.data_ranks)
        mine = {1: [range(9)], 2: [range(8), [8]], 4: [range(4), range(4, 8), [8], []]}[owners][
            places.data_ranks.index(places.rank)
        ]
    batch = whole_batch().select(list(mine))
    looked = engine.logprobs(batch, 0.8).logprobs if kind == "policy" else engine.values(batch)
    found = dict(zip(mine, looked.split(batch.seq_lens.tolist()), strict=True))
    metrics = []
    for _ in range(2):
        engine.offload()
        engine.onload()
        metrics.append(engine.update(batch, loss_of(kind), temperature=0.8))
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    held = {n: p.to_local().numel() for n, p in engine.module.named_parameters()}
    return found, metrics, weights if topology.rank == 0 else {}, held


def alone_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in LEARNT}


def written_on(topology: Any, model: str, options: dict[str, Any], folder: str) -> Any:
    """Writes a checkpoint after an update, and goes on."""
    engine = engine_on(topology, "policy", model, replace(CONFIG, ema=0.5, **options), topology)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    engine.update(batch, loss_of("policy"), temperature=0.8)
    if topology.rank == 0:
        Path(folder).mkdir()
    torch.distributed.barrier()
    engine.save(Path(folder))
    return next_update(engine, batch)


def read_on(topology: Any, model: str, options: dict[str, Any], folders: list[str]) -> list[Any]:
    """Goes on from each checkpoint."""
    engine = engine_on(topology, "policy", model, replace(CONFIG, ema=0.5, **options), topology)
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    found = []
    for folder in folders:
        engine.load(Path(folder))
        found.append(next_update(engine, batch))
    return found


def next_update(engine: Any, batch: Any) -> Any:
    """An update's metrics, then the weights and their average."""
    metrics = engine.update(batch, loss_of("policy"), temperature=0.8)
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    average = {n: t.clone() for n, t in engine.named_average(torch.float32, 1 << 20)}
    return (metrics, weights, average) if engine.topology.rank == 0 else None


@pytest.fixture(scope="module")
def results(models: Path) -> dict[Any, Any]:
    """The results of each rank by the number of a case, or by (model, kind, options) as text."""
    found: dict[Any, Any] = {}
    alone = {repr((m, k, alone_of(o))): (m, k, alone_of(o)) for _, m, k, o in CASES}
    alone[repr(BFLOAT16)] = BFLOAT16
    half = {"spread in half": (*BFLOAT16[:2], BFLOAT16[2] | EP2)}
    for world in (1, 4, 2):  # two read what one and four have written
        cases: dict[Any, Any] = dict(alone) if world == 1 else {}
        cases |= {i: case[1:] for i, case in enumerate(CASES) if case[0] == world}
        cases |= half if world == 2 else {}
        calls: list[Any] = [
            (updates_on, (str(models / model), kind, options))
            for model, kind, options in cases.values()
        ]
        names: list[Any] = list(cases)
        written = {w: str(models / f"written by {w}") for w in WRITERS}
        if world in WRITERS:
            names.append(f"written by {world}")
            calls.append((written_on, (str(models / "eight"), WRITERS[world], written[world])))
        for number, (ranks, options) in enumerate(READERS):
            if ranks == world:
                names.append(f"read by {number}")
                folders = list(written.values())
                calls.append((read_on, (str(models / "eight"), options, folders)))
        found |= dict(zip(names, run_calls(world, calls), strict=True))
    return found


@pytest.mark.ranks
@pytest.mark.strict_nccl
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: str(CASES[i]))
def test_updates_are_those_of_one_rank(results: dict[Any, Any], number: int) -> None:
    _, model, kind, options = CASES[number]
    [(want, metrics, weights, _)] = results[repr((model, kind, alone_of(options)))]
    seen: dict[int, torch.Tensor] = {}
    for found, theirs, moved, _ in results[number]:
        seen |= found
        for got, one in zip(theirs, metrics, strict=True):
            assert got == pytest.approx(one, rel=1e-5, abs=1e-5)
        for name, tensor in moved.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=name)
    assert seen.keys() == want.keys() == set(range(9))
    for sequence, one in want.items():
        torch.testing.assert_close(seen[sequence], one, rtol=0, atol=1e-5)


@pytest.mark.ranks
def test_a_rank_has_its_experts_and_no_others(results: dict[Any, Any]) -> None:
    one = 64 * 32  # weights of an expert's down_proj
    for case, wanted in (
        ((2, "eight", "value", EP2), {4 * one}),
        ((4, "eight", "policy", EP2 | {"fsdp": 2}), {4 * one}),
        ((4, "two in one file", "policy", EP2), {one // 2}),
        ((4, "two", "policy", EP2 | MUON), {0, one}),
        ((4, "few", "policy", EP4), {2 * one}),
    ):
        held = {
            count
            for rank in results[CASES.index(case)]
            for name, count in rank[3].items()
            if name.endswith("experts.down_proj")
        }
        assert held == wanted, case


@pytest.mark.ranks
def test_half_precision_is_near_one_rank(results: dict[Any, Any]) -> None:
    [(want, metrics, _, _)] = results[repr(BFLOAT16)]
    for found, theirs, _, _ in results["spread in half"]:
        assert theirs[0] == pytest.approx(metrics[0], rel=0.02, abs=1e-3)
        for sequence, got in found.items():
            assert (got - want[sequence]).abs().max() < 0.05


@pytest.mark.ranks
def test_a_checkpoint_goes_on_in_every_other_layout(results: dict[Any, Any]) -> None:
    want = results["written by 1"][0]
    others = [results["written by 4"][0]]
    others += [one for n in range(len(READERS)) for one in results[f"read by {n}"][0]]
    assert len(others) == 7
    for metrics, weights, average in others:
        assert metrics == pytest.approx(want[0], rel=1e-5, abs=1e-5)
        for name, tensor in want[1].items():
            torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=name)
            torch.testing.assert_close(average[name], want[2][name], rtol=0, atol=1e-5)


@pytest.mark.ranks
def test_a_checkpoint_is_exported(results: dict[Any, Any], models: Path) -> None:
    from spmdrl.engines.hf_export import reader_of, stored_names

    one, four = (
        {name: reader_of(folder)(name) for name in stored_names(folder)}
        for folder in (models / f"written by {world}" for world in WRITERS)
    )
    assert one.keys() == four.keys() and "hf.model.layers.1.mlp.experts.down_proj" in one
    for name, tensor in one.items():
        torch.testing.assert_close(four[name], tensor, rtol=0, atol=1e-5, msg=name)


# ---- what is refused


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("dense", {}, "model type 'qwen3' has no routed experts"),
        ("eight", {"expert_parallel": 3}, "does not divide the 8 experts"),
        ("eight", {"expert_parallel": 16}, "does not divide the 8 experts"),
    ],
)
def test_what_cannot_be_spread_is_refused(
    models: Path, tmp_path: Path, model: str, options: dict[str, Any], words: str
) -> None:
    from spmdrl.training.checks.common import check_sharing

    folder = save_qwen3(tmp_path / model) if model == "dense" else models / model
    with pytest.raises(ConfigError, match=words) as error:
        check_sharing("actor", TrainConfig(**EP2 | options), str(folder))
    assert str(error.value).startswith("actor.expert_parallel=")


def test_a_strict_run_is_refused(models: Path) -> None:
    from spmdrl.training.checks.common import check_sharing

    with pytest.raises(ConfigError, match=r"actor.expert_parallel=2 with strict=True"):
        check_sharing("actor", TrainConfig(**EP2), str(models / "eight"), strict=True)


def test_how_ranks_are_arranged() -> None:
    from spmdrl.distributed.topology import resolve_degrees, train_degrees

    for settings, degrees in (
        (EP2, {"dp": 1, "fsdp": 4, "ep": 2}),
        (EP2 | {"fsdp": 4}, {"dp": 2, "fsdp": 2, "ep": 2}),
        (EP4 | {"ulysses": 2}, {"dp": 1, "fsdp": 2, "ep": 2, "sp": 2}),
    ):
        assert resolve_degrees(train_degrees(TrainConfig(**settings)), 8) == degrees
    for settings, words in (
        (EP2 | {"fsdp": 3}, "expert_parallel=2 with fsdp=3"),
        (EP2 | {"ulysses": 4}, "multiple of ulysses"),
        ({"expert_parallel": 0}, "expert_parallel=0"),
        ({"expert_parallel": -2}, "expert_parallel=-2"),
    ):
        with pytest.raises(ConfigError, match=words):
            train_degrees(TrainConfig(**settings))


class Poisoned(torch.autograd.Function):
    """Weights whose gradients are NaN where an expert has no tokens, as a kernel may leave them."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.ends = ends
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grads[0].clone()
        grad[ctx.ends.diff(prepend=ctx.ends.new_zeros(1)) == 0] = float("nan")
        return grad, None


@pytest.mark.parametrize("counts", [(2, 0, 3, 0), (0, 0, 0, 0)])
def test_experts_without_tokens_have_gradients_of_zero(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    """Whatever a kernel leaves in them, and where a rank is given no token at all."""
    product, called = experts.grouped_mm, 0

    def poisoned(rows: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        nonlocal called
        called += 1
        return product(rows, Poisoned.apply(weight, offs), offs=offs)

    monkeypatch.setattr(experts, "grouped_mm", poisoned)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    rows = torch.randn(sum(counts), 8, requires_grad=True)
    weight = torch.randn(4, 16, 8, requires_grad=True)
    experts.grouped_product(rows, weight.mT, ends).square().sum().backward()
    assert weight.grad is not None and called == any(counts)
    for number, (count, part) in enumerate(zip(counts, rows.split(counts), strict=True)):
        own = weight.detach()[number].requires_grad_()
        (part.detach() @ own.T).square().sum().backward()
        assert own.grad is not None and torch.any(own.grad).item() == (count > 0)
        torch.testing.assert_close(weight.grad[number], own.grad)
    assert rows.grad is not None and torch.isfinite(rows.grad).all()
