"""Distillation on given answers under torchrun: the same numbers on any ranks and by both engines,
which are those of a loop over the whole vocabulary in float64.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import metrics_of, train
from safetensors.torch import load_file, save_file
from tiny_models import CHARS, png, save_qwen3, save_qwen_vl
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ranks

VOCAB = 40  # at most 64, so that a teacher can name all tokens
WEIGHT, COEF = 0.5, 2.0  # of the cross-entropy and of the divergence
CONFIG = f"""
from spmdrl.config import *

config = SftConfig(
    model="student",
    data=SftDataConfig(train="rows.jsonl", eval="held_out.jsonl", batch_size=6, max_tokens=32),
    out="out", run_dir="run", steps=4, eval_every=2,
    distillation=DistillationConfig("jsd", topk={VOCAB}, beta=0.3, coef={COEF}),
    ref=TrainConfig(model="teacher", dtype="float32", micro_batch_tokens=48),
    cross_entropy_coef={WEIGHT},
    actor=TrainConfig(dtype="float32", micro_batch_tokens=64, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=2),
    trackers=(),
)
"""
ALONE = ("--cross_entropy_coef", "0", "--distillation.coef", "1")
MEGATRON = ("engine", "megatron"), ("tensor_parallel", "2")


def options(role: str, *fields: tuple[str, str]) -> tuple[str, ...]:
    return tuple(word for name, value in fields for word in (f"--{role}.{name}", value))


def row(n: int) -> dict[str, str]:
    return {"prompt": f"{n}+{n % 7}=", "response": f"{n + n % 7}" * (1 + n % 3)}


def write_rows(path: Path, numbers: Iterable[int]) -> None:
    path.write_text("".join(json.dumps(row(n)) + "\n" for n in numbers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A student, and a teacher of another size."""
    path = tmp_path_factory.mktemp("taught")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiny_models.CHARS", CHARS[:VOCAB])
        save_qwen3(path / "student", vocab_size=VOCAB, num_hidden_layers=1)
        save_qwen3(path / "teacher", seed=1, vocab_size=VOCAB, initializer_range=0.15)
    write_rows(path / "rows.jsonl", range(14))
    write_rows(path / "held_out.jsonl", range(20, 28))
    Path(path, "cfg.py").write_text(CONFIG)
    return path


def sft(folder: Path, ranks: int, name: str, *args: str) -> list[dict]:
    """The run's metrics; its model is in out_<name>."""
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, "--out", f"out_{name}",
                 *args, program="spmdrl.sft")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def alone(folder):
    """On one rank."""
    return sft(folder, 1, "alone")


@pytest.fixture(scope="module")
def sharded(folder):
    """On two."""
    return sft(folder, 2, "sharded", "--ref.offload_params", "True", "--ref.fsdp", "1")


# ---- by transformers, in float64


@cache
def model_of(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def logits(model: Any, tokenizer: Any, n: int) -> tuple[Tensor, Tensor]:
    """(m, VOCAB) of the places of row n's response and EOS, and their (m,) tokens."""
    asked, said = (tokenizer(row(n)[key])["input_ids"] for key in ("prompt", "response"))
    ids = torch.tensor([[*asked, *said, tokenizer.eos_token_id]])
    return model(ids).logits[0, len(asked) - 1 : -1].log_softmax(-1), ids[0, len(asked) :]


def divergence(p: Tensor, q: Tensor, beta: float = 0.3) -> Tensor:
    """Of two distributions, event by event; GKD, arXiv 2306.13649, eq. 1. beta 0: KL(P, Q)."""
    total = torch.zeros((), dtype=torch.float64)
    for log_p, log_q in zip(p, q, strict=True):
        if beta == 0:
            total = total + log_p.exp() * (log_p - log_q)
            continue
        middle = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
        total = total + beta * log_p.exp() * (log_p - middle)
        total = total + (1 - beta) * log_q.exp() * (log_q - middle)
    return total


def means(folder: Path, student: str, numbers: range | list[int], beta: float = 0.3) -> Tensor:
    """(2,) means over the tokens of these rows: cross-entropy and divergence, with gradient."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "student")
    sums, count = torch.zeros(2, dtype=torch.float64), 0
    for n in numbers:
        own, tokens = logits(model_of(folder / student), tokenizer, n)
        with torch.no_grad():
            theirs, _ = logits(model_of(folder / "teacher"), tokenizer, n)
        for place, token in enumerate(tokens.tolist()):
            sums = sums + torch.stack(
                [-own[place, token], divergence(theirs[place], own[place], beta)]
            )
            count += 1
    return sums / count


def test_loss_and_gradient_are_those_of_the_whole_vocabulary(folder):
    """Of a step that learns all rows."""
    [_, found] = sft(folder, 1, "whole", "--data.batch_size", "14", "--steps", "1")
    cross_entropy, distance = means(folder, "student", range(14))
    loss = WEIGHT * cross_entropy + COEF * distance
    weights = list(model_of(folder / "student").parameters())
    gradient = torch.autograd.grad(loss, weights)
    norm = torch.stack([part.norm() for part in gradient]).norm()
    assert distance.item() > 0.05
    assert found["sft/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found["sft/cross_entropy"] == pytest.approx(cross_entropy.item(), rel=1e-5)
    assert found["sft/distillation_loss"] == pytest.approx(distance.item(), rel=1e-5)
    assert found["sft/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name in ("sft/teacher_mass", "sft/student_mass"):
        assert found[name] == pytest.approx(1, abs=1e-5)
    for name, at in (("student", 0), ("out_whole", 1)):
        cross_entropy, distance = means(folder, name, range(20, 28))
        evaluated = metrics_of(folder / "whole")[at]
        assert evaluated["eval/loss"] == pytest.approx(cross_entropy.item(), rel=1e-5)
        assert evaluated["eval/distillation_loss"] == pytest.approx(distance.item(), rel=1e-5)


# ---- ranks, engines


def same(rows: list[dict], want: list[dict]) -> None:
    assert [found["step"] for found in rows] == [right["step"] for right in want]
    for found, right in zip(rows, want, strict=True):
        assert found == pytest.approx(right, rel=3e-5, abs=1e-6)


def test_two_ranks_have_the_numbers_of_one(alone, sharded):
    """Each has a whole teacher, which leaves the device while it is idle."""
    same(sharded, alone)


@pytest.mark.parametrize(
    "args",
    [
        # rows go to both ranks of the teacher, and from there to one of the actor
        options("actor", ("ulysses", "2"), ("micro_batch_tokens", "16")),
        pytest.param(
            (*options("actor", *MEGATRON), *options("ref", *MEGATRON)), marks=pytest.mark.megatron
        ),
        # and from one of the teacher to both of the actor
        pytest.param(options("ref", *MEGATRON), marks=pytest.mark.megatron),
    ],
    ids=["tokens shared", "megatron", "teacher of megatron"],
)
def test_engines_and_degrees_change_nothing(folder, alone, args):
    same(sft(folder, 2, "other", *args), alone)


def test_resumed_is_bit_for_bit_the_run_left_alone(folder, sharded):
    args = ("--ref.offload_params", "True", "--ref.fsdp", "1")
    sft(folder, 2, "parted", *args, "--steps", "2")
    rows = sft(folder, 2, "parted", *args, "--resume", "auto")
    assert rows[3:] == sharded[3:] and rows[:2] == sharded[:2]
    parted, whole = (folder / f"out_{n}/model.safetensors" for n in ("parted", "sharded"))
    assert parted.read_bytes() == whole.read_bytes()
    other = folder / "other_teacher"
    shutil.copytree(folder / "teacher", other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    done = train(folder, 1, "--config", "cfg.py", "--run_dir", "parted", "--out", "out_parted",
                 "--resume", "auto", "--ref.model", str(other), program="spmdrl.sft")  # fmt: skip
    assert done.code == 2 and "ref" in done.output, done.output[-2000:]
    assert "checkpoint.accept_changes model" in done.output, done.output[-2000:]


def test_a_teacher_alone_draws_the_student_to_it(folder):
    """It learns from six of the teacher's tokens; measured over all of them."""
    write_rows(folder / "many.jsonl", [*range(20), *range(28, 120)])
    rows = sft(
        folder, 1, "taught", *ALONE, "--data.train", "many.jsonl", "--data.batch_size", "28",
        "--steps", "40", "--eval_every", "0", "--actor.optim.lr", "3e-3",
        "--distillation.loss", "forward_kl", "--distillation.beta", "0.5",
        "--distillation.topk", "6",
    )  # fmt: skip
    before, after = (
        means(folder, name, range(20, 28), beta=0.0)[1].item() for name in ("student", "out_taught")
    )
    assert after < 0.75 * before, (before, after)
    assert rows[-1]["eval/distillation_loss"] < after  # merged events say less
    assert rows[-1]["eval/distillation_loss"] < 0.6 * rows[0]["eval/distillation_loss"]
    for found in rows[1:]:
        assert found["sft/loss"] == pytest.approx(found["sft/distillation_loss"], rel=1e-5)
        assert found["sft/student_mass"] < 1 and 0.2 < found["sft/teacher_mass"] < 1
    assert Path(folder, "taught/divergence.png").is_file()


def test_the_teacher_sees_the_images_of_a_row(tmp_path):
    """A copy of the student is at distance 0 from it, so it has seen the same; then the student's
    adapter leads it away.
    """
    save_qwen_vl(tmp_path / "student")
    shutil.copytree(tmp_path / "student", tmp_path / "teacher")
    for n in range(6):
        Path(tmp_path, f"{n}.png").write_bytes(png(n, 16, 8))
    rows = [
        {"messages": [{"role": "user", "content": f"<image>{n}?"},
                      {"role": "assistant", "content": f"{n % 3}!"}], "images": [f"{n}.png"]}
        for n in range(6)
    ]  # fmt: skip
    for name, own in (("rows", rows), ("held_out", rows[:2:-1])):  # another image in each place
        Path(tmp_path, f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in own))
    text = CONFIG.replace(f"topk={VOCAB}", "topk=64").replace("beta=0.3, ", "")
    Path(tmp_path, "cfg.py").write_text(text)
    found = sft(tmp_path, 2, "run", "--steps", "2", "--actor.lora.rank", "4", "--actor.optim.lr",
                "1e-2")  # fmt: skip
    assert abs(found[0]["eval/distillation_loss"]) < 1e-6
    assert found[0]["eval/student_mass"] == pytest.approx(found[0]["eval/teacher_mass"], rel=1e-5)
    assert found[2]["eval/distillation_loss"] > 1e-4


def test_a_dry_run_shows_the_teacher(folder):
    done = train(folder, 1, "--config", "cfg.py", "--dry-run", "--ranks", "4",
                 "--ref.engine", "megatron", "--ref.tensor_parallel", "2",
                 program="spmdrl.sft")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    for words in (
        "  distillation from teacher: 2 x jsd over its 40 likeliest tokens, beside 0.5 x cross-ent",
        "  actor    ranks 0-3: dp 1 x fsdp 4\n",
        "  ref      ranks 0-3: megatron, pp 1 x dp 2 x cp 1 x tp 2\n",
        "    ref_logprobs ", "  ref      0.1M parameters; weights 0.00, gradients 0.00",
    ):  # fmt: skip
        assert done.output.count(words) == 1, (words, done.output)
