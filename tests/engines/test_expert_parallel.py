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

MUON = {"optim": replace(CONFIG.optim, name="muon")}
LORA = {"lora": LoraConfig(rank=4)}
EP2, EP4 = {"expert_parallel": 2}, {"expert_parallel": 4}

# (ranks, model, kind, options): what is learnt is that of one rank with the same of LEARNT
LEARNT = ("optim", "lora", "dtype")
CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (2, "eight", "policy", EP2),
    (2, "eight", "value", EP2),
    (2, "eight", "policy", EP2 | MUON | {"micro_batch_tokens": 41}),
    (2, "eight", "policy", EP2 | LORA),
    (2, "eight", "policy", EP2 | {"ulysses": 2}),
    (2, "eight", "policy", EP2 | {"activation_checkpointing": True, "ema": 0.5}),
    (2, "eight", "policy", EP2 | {"activation_checkpointing": "selective"}),
    (2, "eight", "policy", EP2 | {"offload_policy": True}),
    (2, "eight", "policy", EP2 | {"offload_params": True, "offload_optimizer": True}),
    (2, "few", "policy", EP2),
    (2, "in one file", "policy", EP2),
    (4, "eight", "policy", EP2),
    (4, "eight", "policy", EP2 | {"fsdp": 2}),  # two replicas
    (4, "eight", "policy", EP2 | MUON | {"reshard_after_forward": False}),
    (4, "eight", "policy", EP4 | {"ulysses": 2}),
    (4, "two", "policy", EP2),  # ranks share an expert's rows
    (4, "two", "policy", EP2 | MUON),  # and have whole ones, or none
    (4, "two in one file", "policy", EP2),
    (4, "few", "policy", EP4),
]  # fmt: skip


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
    for name, source in (("in one file", "eight"), ("two in one file", "two")):
        shutil.copytree(folder / source, folder / name)
        state = saved(folder / name)
        torch.save(state, folder / name / "pytorch_model.bin")
        Path(folder, name, "model.safetensors").unlink()
    return folder


def saved(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


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
    """Log-probabilities or values by sequence, three updates' metrics, then the weights."""
    engine = engine_on(topology, kind, model, replace(CONFIG, **options))
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
    for _ in range(3):
        engine.offload()
        engine.onload()
        metrics.append(engine.update(batch, loss_of(kind), temperature=0.8))
    weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
    if engine.average:
        average = engine.named_average(torch.float32, 1 << 20)
        metrics.append({n: float(t.double().sum()) for n, t in average})
    held = {n: p.to_local().numel() for n, p in engine.module.named_parameters()}
    return found, metrics, weights if topology.rank == 0 else {}, held


def alone_of(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name in LEARNT}


@pytest.fixture(scope="module")
def results(models: Path) -> dict[Any, Any]:
    """The results of each rank, by the number of a case; by (model, kind, options) of one rank."""
    alone: dict[Any, Any] = {}
    for _, model, kind, options in CASES:
        alone[repr((model, kind, alone_of(options)))] = (model, kind, alone_of(options))
    calls = [(updates_on, (str(models / m), kind, own)) for m, kind, own in alone.values()]
    found: dict[Any, Any] = dict(zip(alone, run_calls(1, calls), strict=True))
    for world in (2, 4):
        numbers = [i for i, case in enumerate(CASES) if case[0] == world]
        calls = [(updates_on, (str(models / CASES[i][1]), *CASES[i][2:])) for i in numbers]
        found |= dict(zip(numbers, run_calls(world, calls), strict=True))
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
        for got, one in zip(theirs, metrics, strict=False):
            assert got == pytest.approx(one, rel=1e-5, abs=1e-5)
        for name, tensor in moved.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-5, msg=name)
    assert seen.keys() == want.keys() == set(range(9))
    for sequence, one in want.items():
        torch.testing.assert_close(seen[sequence], one, rtol=0, atol=1e-5)


def test_a_rank_has_its_experts_and_no_others(results: dict[Any, Any]) -> None:
    for number, (world, model, _, options) in enumerate(CASES):
        for rank in results[number]:
            held = {n: count for n, count in rank[3].items() if n.endswith("experts.down_proj")}
            sharers = options.get("fsdp", world)
            experts = 2 if model.startswith("two") else 8
            whole_ones = options.get("optim") is not None and experts < sharers
            assert held and all(
                count in ((experts * 64 * 32 // sharers,) if not whole_ones else (0, 64 * 32))
                for count in held.values()
            ), (CASES[number], held)


# ---- checkpoints

# (ranks, options) that write after an update, then those that go on
WRITERS = [(1, {}), (2, EP2), (4, EP2), (4, EP4)]
READERS = [(1, {}), (2, {}), (2, EP2), (4, EP2), (4, EP2 | {"fsdp": 2}), (4, EP4)]


def written_on(topology: Any, model: str, options: dict[str, Any], folder: str) -> None:
    """Writes a checkpoint after an update."""
    engine = engine_on(topology, "policy", model, replace(CONFIG, ema=0.5, **options))
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    engine.update(batch, loss_of("policy"), temperature=0.8)
    if topology.rank == 0:
        Path(folder).mkdir(parents=True)
    torch.distributed.barrier()
    engine.save(Path(folder))


def read_on(topology: Any, model: str, options: dict[str, Any], folders: list[str]) -> list[Any]:
    """Of each checkpoint an update from it, the weights and their average."""
    engine = engine_on(topology, "policy", model, replace(CONFIG, ema=0.5, **options))
    batch = whole_batch().select(list(range(topology.rank, 9, topology.world)))
    found = []
    for folder in folders:
        engine.load(Path(folder))
        metrics = engine.update(batch, loss_of("policy"), temperature=0.8)
        weights = {n: t.clone() for n, t in engine.named_weights(torch.float32, 1 << 20)}
        average = {n: t.clone() for n, t in engine.named_average(torch.float32, 1 << 20)}
        found.append((metrics, weights, average) if topology.rank == 0 else metrics)
    return found


@pytest.mark.ranks
def test_a_checkpoint_goes_on_in_every_other_layout(models: Path, tmp_path: Path) -> None:
    folders = [str(tmp_path / f"writer_{i}") for i in range(len(WRITERS))]
    model, read = str(models / "eight"), []
    for world in (1, 2, 4):
        own = [(o, f) for (w, o), f in zip(WRITERS, folders, strict=True) if w == world]
        run_calls(world, [(written_on, (model, o, f)) for o, f in own])
    for world in (1, 2, 4):
        calls = [(read_on, (model, o, folders)) for w, o in READERS if w == world]
        read += [results[0] for results in run_calls(world, calls)]
    want = read[0][0]  # one rank reads what one rank wrote
    for results in read:
        for metrics, weights, average in results:
            assert metrics == pytest.approx(want[0], rel=1e-5, abs=1e-5)
            for name, tensor in want[1].items():
                torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5, msg=name)
                torch.testing.assert_close(average[name], want[2][name], rtol=0, atol=1e-5)


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
