"""Larger micro-batches that a dry run names where a GPU has room, and what a step takes."""

import json

import numpy as np
import pytest
import torch
from plan_configs import ppo_config
from safetensors.torch import save_file
from test_memory_plan import SHAPES

from spmdrl.config import (
    DataConfig,
    LoraConfig,
    OptimConfig,
    RolloutConfig,
    SftConfig,
    SftDataConfig,
    TrainConfig,
)
from spmdrl.training.checks.describe import describe, describe_supervised
from spmdrl.training.checks.memory import memory_of


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(SHAPES["Qwen3-0.6B"]))
    save_file({"unread": torch.zeros(1)}, folder / "model.safetensors")
    return str(folder)


def room(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("  room ")]


def test_the_dry_run_names_larger_micro_batches_where_there_is_room(model):
    def named(world=1, gib: float | None = 80.0, **actor):
        config = ppo_config(
            model, data=DataConfig(train="t.jsonl"), rollout=RolloutConfig(),
            actor=TrainConfig(**actor),
        )  # fmt: skip
        return room(describe(config, world, 100, gpu_gib=gib))

    (line,) = named()
    assert line.startswith("  room     actor.micro_batch_tokens=65536: peak 4")
    (whole,) = named(activation_checkpointing=False)
    assert "tokens=32768" in whole  # twice as many do not fit
    assert not named(gib=54.0, activation_checkpointing=False)  # it would be too near
    assert not named(gib=None)  # a CPU
    assert not named(micro_batch_tokens=65536)
    assert not named(2, engine="megatron", pipeline_parallel=2)


def test_so_does_that_of_fine_tuning(model):
    config = SftConfig(model, SftDataConfig(train="t.jsonl", batch_size=256), "out", run_dir="r")
    lens = np.full(1000, 900)
    (line,) = room(describe_supervised(config, 1, 1000, "policy", 1, lens, 80.0))
    assert "actor.micro_batch_tokens=65536" in line
    small = SftConfig(model, SftDataConfig(train="t.jsonl", batch_size=16), "out", run_dir="r")
    assert not room(describe_supervised(small, 1, 1000, "policy", 1, lens, 80.0))  # one takes all


def test_only_adamw_of_fsdp_on_a_gpu_steps_without_memory_of_its_own(model):
    def step(on_gpu, **role):
        return memory_of("actor", TrainConfig(**role), model, 8, on_gpu=on_gpu).step

    assert step(True) == step(True, lora=LoraConfig()) == 0
    assert step(False) > 0 and step(False, lora=LoraConfig()) > 0
    assert step(True, optim=OptimConfig(name="muon")) > 0
    assert step(True, engine="megatron") > 0
