"""examples/embed_megatron: the plain program trains, and a few lines make it learn from rewards."""

import difflib
import os
import re
import subprocess
import sys

import pytest
from programs import ROOT, make_arithmetic, train

EXAMPLE = ROOT / "examples" / "embed_megatron"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embed")
    make_arithmetic(path)
    return path


def run(folder, script, *args):
    """Output of two ranks that share every layer."""
    done = train(
        folder, 2, "--tensor-model-parallel-size", "2", *args, program=str(EXAMPLE / script)
    )
    assert done.code == 0, done.output[-6000:]
    return done.output


@pytest.mark.megatron
@pytest.mark.parametrize("script", ["train.py", "train_rl.py"])
def test_it_starts_by_itself(script):
    """Where nothing is imported yet, unlike in the ranks of the other test."""
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, str(EXAMPLE / script), "--help"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "--tensor-model-parallel-size" in done.stdout


def test_few_lines_make_it_rl():
    before, after = ((EXAMPLE / name).read_text() for name in ("train.py", "train_rl.py"))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 40, len(changed)


@pytest.mark.megatron
@pytest.mark.ranks
@pytest.mark.strict_nccl
@pytest.mark.timeout(420)
def test_the_program_trains_and_then_learns_from_rewards_and_examples_in_turn(folder):
    said = run(folder, "train.py", "--train-iters", "200", "--log-interval", "50",
               "--micro-batch-size", "64")  # fmt: skip
    losses = [float(x) for x in re.findall(r"\| loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.1
    said = run(
        folder, "train_rl.py", "--load", "runs/embed/pretrained", "--finetune", "--save",
        "runs/embed/rl", "--lr", "5e-4", "--lr-warmup-iters", "1", "--train-iters", "20",
        "--rl-schedule", '{"rl": 9, "sft": 1}', "--log-interval", "1",
        "--rl-config", str(EXAMPLE / "rl_config.py"),
    )  # fmt: skip
    rewards = [float(x) for x in re.findall(r"reward/mean ([\d.]+)", said)]
    assert len(rewards) == 18 and len(re.findall(r"\| loss [\d.]+", said)) == 2
    assert sum(rewards[-6:]) > 1.3 * sum(rewards[:6]), rewards
    assert "eval/reward" in said
    # its own checkpoint format, in which it goes on
    assert (folder / "runs/embed/rl/iter_0000020/metadata.json").is_file()
