"""Optimizers and the moving average from the command line: refusals, plans, runs, exports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import fire
import pytest
import torch
from programs import CONFIG, train, write_task
from tiny_models import save_qwen3

from spmdrl.config import ConfigError, OptimConfig, TrainConfig


@pytest.mark.parametrize(
    ("role", "changes", "words"),
    [
        ("actor", {"ema": 1.0}, "actor.ema=1.0 must be in [0, 1)"),
        ("critic", {"ema": float("nan")}, "critic.ema=nan"),
        ("ref", {"ema": 0.9}, "ref.ema=0.9 has no effect"),
        ("critic", {"ema": 0.9}, "critic.ema=0.9 has no effect"),
        ("ref", {"optim": OptimConfig(name="muon")}, "ref.optim.name='muon'"),
        ("prm", {"optim": OptimConfig(name="lion")}, "use one of adamw, adamw8bit, muon"),
        ("actor", {"optim": OptimConfig(muon_momentum=0.9)}, "it is of 'muon'"),
        ("actor", {"optim": OptimConfig(name="muon", muon_momentum=1.0)}, "out of range"),
        ("critic", {"engine": "megatron", "optim": OptimConfig(name="adamw8bit")}, "'megatron'"),
    ],
)
def test_what_would_have_no_effect_is_refused(role, changes, words):
    from spmdrl.training.checks.common import check_training_role

    with pytest.raises(ConfigError) as error:
        check_training_role(role, TrainConfig(**changes), (0, 1), 10)
    assert words in str(error.value)


def test_eight_bits_without_torchao(monkeypatch):
    from spmdrl.engines.fsdp import optimizers

    config = TrainConfig(optim=OptimConfig(name="adamw8bit"))
    optimizers.check_optimizer("actor", config)
    monkeypatch.setattr(optimizers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install torchao"):
        optimizers.check_optimizer("actor", config)


RUN = [
    "--config", "cfg.py", "--steps", "2", "--checkpoint.every_steps", "1", "--checkpoint.keep", "5",
    "--actor.optim.name", "muon", "--actor.optim.muon_momentum", "0.8", "--actor.ema", "0.7",
    "--actor.offload_optimizer", "--algo.advantage", "gae", "--critic.dtype", "float32",
    "--critic.optim.name", "adamw8bit",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save_qwen3(folder / "model", hidden_size=96, intermediate_size=160, num_hidden_layers=1)
    write_task(folder)
    Path(folder, "cfg.py").write_text(CONFIG)
    done = train(folder, 2, *RUN)
    assert done.code == 0, done.output[-4000:]
    return folder


def load_weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder, "model.safetensors"))


@pytest.mark.ranks
def test_the_average_of_a_run_is_exported(run_folder, monkeypatch):
    from spmdrl.engines.hf_export import load_full
    from spmdrl.export import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # main sets it
    steps = [run_folder / f"run/checkpoints/step_0000000{n}" for n in (1, 2)]
    for out, options in (("averaged", ["--ema"]), ("plain", [])):
        where = ["--checkpoint", str(steps[1]), "--out", str(run_folder / out)]
        fire.Fire(main, command=[*where, *options])
    first, before = load_full(steps[0], "actor"), load_weights(run_folder / "model")
    plain, averaged = (load_weights(run_folder / name) for name in ("plain", "averaged"))
    assert averaged.keys() == plain.keys() == before.keys()
    for name, value in averaged.items():
        want = 0.49 * before[name] + 0.21 * first[name] + 0.3 * plain[name]
        torch.testing.assert_close(value, want, rtol=0, atol=3e-7)
        assert not torch.equal(value, plain[name])


@pytest.mark.ranks
def test_a_run_does_not_resume_with_another_optimizer(run_folder):
    resume = ["--resume", "auto", "--critic.optim.name", "adamw", "--steps", "3"]
    done = train(run_folder, 2, *RUN, *resume)
    assert done.code == 2, done.output
    assert "failed in phase" not in done.output  # that rank 0 leaves first is no failure
    assert "critic was written with optim.name='adamw8bit', and this run has 'adamw'" in done.output


@pytest.mark.ranks
def test_an_average_that_is_not_there(run_folder):
    from spmdrl.checkpoint import format as checkpoint
    from spmdrl.engines.hf_export import load_full
    from spmdrl.export import check_flags

    folder = run_folder / "run/checkpoints/step_00000002"
    with pytest.raises(ConfigError, match="has no moving average"):
        load_full(folder, "critic", ema=True)
    assert checkpoint.damage(folder) is None
    with pytest.raises(ConfigError, match="takes no value"):
        check_flags({"ema": "0.9"})


@pytest.mark.ranks
def test_the_dry_run_shows_what_is_kept(run_folder):
    from spmdrl.cli.arguments import load_config
    from spmdrl.config import PpoConfig
    from spmdrl.training.checks.memory import memory_of
    from spmdrl.training.checks.memory_plan import memory_plan

    changes = {"actor.optim.name": "muon", "actor.ema": 0.5, "actor.offload_optimizer": True}
    config = load_config(str(run_folder / "cfg.py"), PpoConfig, changes)
    config = replace(config, model=str(run_folder / "model"))
    line = next(line for line in memory_plan(config, 2).lines if line.startswith("  actor"))
    assert "Muon 0.00 and average 0.00" in line
    assert "Muon on the host while idle" in line
    plain, muon, eight = (
        memory_of("actor", TrainConfig(optim=OptimConfig(name=name), ema=ema), config.model, 2)
        for name, ema in (("adamw", 0.0), ("muon", 0.9), ("adamw8bit", 0.0))
    )
    assert plain.adam == 2 * plain.weights
    assert muon.average == muon.weights
    assert 0.5 < muon.adam / plain.adam < 0.6
    assert 0.25 < eight.adam / plain.adam < 0.3
    assert muon.busy - plain.busy == pytest.approx(muon.adam + muon.average - plain.adam)


SFT = """
from spmdrl.config import *
config = SftConfig(
    model="model", data=SftDataConfig(train="sft.jsonl", batch_size=4, max_tokens=64),
    out="tuned", steps=1,
    actor=TrainConfig(dtype="float32", optim=OptimConfig(name="adamw8bit", lr=1e-3), ema=0.75),
    trackers=(),
)
"""


@pytest.mark.ranks
def test_fine_tuning_writes_the_average_beside_the_weights(run_folder):
    rows = [{"prompt": f"{a}+1=", "response": str(a + 1)} for a in range(8)]
    Path(run_folder, "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(run_folder, "sft.py").write_text(SFT)
    done = train(run_folder, 1, "--config", "sft.py", program="spmdrl.sft")
    assert done.code == 0, done.output[-4000:]
    before, after, average = (
        load_weights(run_folder / name) for name in ("model", "tuned", "tuned/ema")
    )
    for name, value in average.items():
        want = 0.75 * before[name] + 0.25 * after[name]
        torch.testing.assert_close(value, want, rtol=0, atol=3e-7)
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])
