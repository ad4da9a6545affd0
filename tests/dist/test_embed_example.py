"""examples/embed_megatron: the plain program trains, and a few lines make it learn from rewards."""

import difflib
import os
import re
import subprocess
import sys

import pytest
from programs import ROOT, free_port, make_arithmetic

EXAMPLE = ROOT / "examples" / "embed_megatron"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("embed")
    make_arithmetic(path)
    return path


def run(folder, script, *args, timeout_s=200):
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
        str(free_port()), str(EXAMPLE / script), "--tensor-model-parallel-size", "2", *args,
    ]  # fmt: skip
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ":".join(
        [str(ROOT), str(ROOT / "kernels")])}  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def test_few_lines_make_it_rl():
    before, after = ((EXAMPLE / name).read_text() for name in ("train.py", "train_rl.py"))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 40, len(changed)


@pytest.mark.timeout(420)
def test_the_program_trains_and_then_learns_from_rewards(folder):
    said = run(folder, "train.py", "--train-iters", "200", "--log-interval", "50")
    losses = [float(x) for x in re.findall(r"\| loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.1
    said = run(
        folder, "train_rl.py", "--load", "runs/embed/pretrained", "--finetune", "--save",
        "runs/embed/rl", "--lr", "5e-4", "--lr-warmup-iters", "1", "--train-iters", "18",
        "--log-interval", "1", "--rl-config", str(EXAMPLE / "rl_config.py"),
    )  # fmt: skip
    rewards = [float(x) for x in re.findall(r"reward/mean ([\d.]+)", said)]
    assert len(rewards) == 18
    assert sum(rewards[-6:]) > 1.3 * sum(rewards[:6]), rewards
    assert "eval/reward" in said
    # its own checkpoint format, in which it goes on
    assert (folder / "runs/embed/rl/iter_0000018/metadata.json").is_file()
