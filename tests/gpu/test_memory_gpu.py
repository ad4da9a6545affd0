"""The memory plan of a dry run against what PyTorch gave out on a GPU, for Qwen3-0.6B's shape."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from programs import ROOT, write_task
from tiny_models import save_qwen3

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(600),
]

SHAPE = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936,
}  # fmt: skip
SFT = """
from spmdrl.config import *

config = SftConfig(
    model="model", data=SftDataConfig(train="rows.jsonl", batch_size=160, max_tokens=512),
    out="out", run_dir="run", steps=2, checkpoint=CheckpointConfig(every_steps=0),
    actor=TrainConfig(optim=OptimConfig(lr=1e-5)), trackers=(),
)
"""
RL = """
from spmdrl.config import *

def reward(response, ground_truth):
    return 0.01 * len(response)

config = PpoConfig(
    model="model", reward=reward, rewards=RewardConfig(workers=1), steps=2, eval_every=0,
    data=DataConfig(train="train.jsonl", prompts_per_step=16, max_prompt_tokens=16),
    rollout=RolloutConfig(n=8, max_tokens=400, ignore_eos=True),
    actor=TrainConfig(optim=OptimConfig(lr=1e-6)),
    run_dir="run", checkpoint=CheckpointConfig(every_steps=0), trackers=(),
)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model"), **SHAPE)


def run(folder: Path, program: str, *args: str) -> str:
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}"
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         "-m", program, "--config", "cfg.py", *args], cwd=folder, env=env, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def planned(text: str, phase: str) -> dict[str, float]:
    """GiB by part of a phase, from the dry run's table."""
    names = re.findall(r"^ +((?:[a-z]+ +)+all)$", text, re.M)[0].split()
    numbers = re.findall(rf"^ +{phase} +([\d. ]+)$", text, re.M)[0].split()
    return dict(zip(names, map(float, numbers), strict=True))


def measured(folder: Path) -> float:
    last = Path(folder, "run/metrics.jsonl").read_text().splitlines()[-1]
    return json.loads(last)["memory/gpu_peak_gib"]


@pytest.mark.parametrize("checkpointing", ["False", "selective", "True"])
def test_an_update_takes_what_the_plan_says(
    model: Path, tmp_path: Path, checkpointing: str
) -> None:
    Path(tmp_path, "model").symlink_to(model)
    draw = random.Random(0)
    rows = [{"prompt": "1" * draw.randint(100, 200), "response": "2" * draw.randint(100, 200)}
            for _ in range(320)]  # fmt: skip
    Path(tmp_path, "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path(tmp_path, "cfg.py").write_text(SFT)
    option = ("--actor.activation_checkpointing", checkpointing)
    plan = planned(run(tmp_path, "spmdrl.sft", "--dry-run", *option), "update")
    run(tmp_path, "spmdrl.sft", *option)
    assert plan["all"] == pytest.approx(measured(tmp_path), rel=0.15)


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_a_step_takes_what_the_plan_says(model: Path, tmp_path: Path) -> None:
    """PyTorch counts vLLM's memory as given out also while it sleeps (docs/gpu.md)."""
    Path(tmp_path, "model").symlink_to(model)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(RL)
    text = run(tmp_path, "spmdrl.ppo", "--dry-run")
    update, rollout = planned(text, "update_actor"), planned(text, "rollout")
    run(tmp_path, "spmdrl.ppo")
    awake = update["all"] - update["engine"] + rollout["engine"]
    assert awake == pytest.approx(measured(tmp_path), rel=0.15)
