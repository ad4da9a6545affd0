"""examples/embed_fsdp2: the plain program trains, and a few lines make some of its steps RL."""

import difflib
import re

import pytest
from programs import ROOT, make_arithmetic, train

EXAMPLE = ROOT / "examples" / "embed_fsdp2"


def test_few_lines_make_it_rl():
    before, after = ((EXAMPLE / name).read_text() for name in ("train.py", "train_rl.py"))
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="")
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 40, len(changed)


@pytest.mark.ranks
@pytest.mark.vllm
@pytest.mark.timeout(420)
def test_the_program_trains_and_then_learns_from_rewards_and_examples_in_turn(tmp_path):
    """With vLLM, on two ranks, and it goes on from its checkpoint where it was."""
    make_arithmetic(tmp_path)

    def run(script, *args):
        done = train(tmp_path, 2, *args, "--log-interval", "1", program=str(EXAMPLE / script))
        assert done.code == 0, done.output[-6000:]
        return done.output

    said = run("train.py", "--train-iters", "30")
    losses = [float(x) for x in re.findall(r"\| loss ([\d.]+)", said)]
    assert losses[-1] < losses[0] - 0.5
    rl = [
        "--rl-config", str(ROOT / "examples/embed_megatron/rl_config.py"), "--lr", "5e-4",
        "--lr-warmup-iters", "1", "--save", "runs/embed_fsdp2/rl", "--save-interval", "4",
        "--train-iters", "8", "--rl-schedule", '{"sft": 1, "rl": 1}',
    ]  # fmt: skip
    said = run("train_rl.py", "--load", "runs/embed_fsdp2/pretrained/iter_30", "--finetune", *rl)
    whole = iterations(said)
    assert ["rl" if "reward/mean" in line else "sft" for line in whole] == ["sft", "rl"] * 4
    assert "eval/reward" in said
    rest = iterations(run("train_rl.py", "--load", "runs/embed_fsdp2/rl/iter_4", *rl))
    assert rest == whole[4:]


def iterations(said):
    """The lines of iterations, without their seconds."""
    lines = [line for line in said.splitlines() if line.startswith("iteration ")]
    return [line.rpartition(" | ")[0] for line in lines]
