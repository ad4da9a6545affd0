"""Preference optimisation under torchrun: the same numbers on any ranks and in any micro-batches,
which are those of transformers' own forward pass; the reference is computed once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from programs import metrics_of, train
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ranks

CONFIG = """
from spmdrl.config import *

config = PreferenceTrainingConfig(
    model="model",
    data=AnswerDataConfig(train="rows.jsonl", eval="held_out.jsonl", batch_size=6, max_tokens=40),
    out="out", run_dir="run", steps=4, eval_every=2,
    preference=PreferenceConfig(loss_args={"beta": 0.5, "label_smoothing": 0.05}),
    # with the usual eps Adam makes whole steps of gradients that are all rounding
    actor=TrainConfig(
        dtype="float32", micro_batch_tokens=70, ema=0.5, optim=OptimConfig(lr=3e-3, eps=1e-6)
    ),
    checkpoint=CheckpointConfig(every_steps=2),
    trackers=(),
)
"""
KTO = ("--preference.loss", "kto", "--data.batch_size", "18", "--preference.loss_args",
       "{'beta': 0.5, 'undesirable_weight': 0.2}")  # fmt: skip
MEGATRON = ("--actor.engine", "megatron")


def pair(n: int) -> dict[str, Any]:
    """The better answer is the shorter one."""
    asked = [{"role": "user", "content": f"{n}+{n % 5}="}]
    answers = {"chosen": f"{n + n % 5}", "rejected": f"{n + 1}!" * (n % 3 + 1)}
    return {"prompt": asked} | {
        name: [{"role": "assistant", "content": text}] for name, text in answers.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("answers")
    Path(path, "model").symlink_to(qwen3)
    for name, numbers in (("rows", range(17)), ("held_out", range(17, 26))):
        rows = [json.dumps(pair(n)) + "\n" for n in numbers]
        Path(path, f"{name}.jsonl").write_text("".join(rows))
    Path(path, "cfg.py").write_text(CONFIG)
    return path


def learn(folder: Path, ranks: int, name: str, *args: str) -> tuple[list[dict], str]:
    """The run's metrics and what it printed; its model is in out_<name>."""
    config = () if "--config" in args else ("--config", "cfg.py")
    done = train(folder, ranks, *config, "--run_dir", name, "--out", f"out_{name}",
                 *args, program="spmdrl.preference")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name), done.output


@pytest.fixture(scope="module")
def alone(folder):
    """On one rank."""
    return learn(folder, 1, "alone")[0]


@pytest.fixture(scope="module")
def sharded(folder):
    """On two."""
    return learn(folder, 2, "sharded")


def same(rows: list[dict], want: list[dict], rel: float = 1e-5) -> None:
    assert [row["step"] for row in rows] == [row["step"] for row in want]
    for row, right in zip(rows, want, strict=True):
        # an accuracy of the untrained policy is one of rounding errors
        names = {"eval/rewards/accuracies", "preference/rewards/accuracies"}
        left_out = names if right["step"] < 2 else set()
        assert {n: v for n, v in row.items() if n not in left_out} == pytest.approx(
            {n: v for n, v in right.items() if n not in left_out}, rel=rel, abs=3e-6
        )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "args",
    [
        # a pair each
        (2, "--actor.ulysses", "2", "--actor.micro_batch_tokens", "8",
         "--actor.shared_prefix", "False"),
        pytest.param((2, *MEGATRON, "--actor.tensor_parallel", "2"), marks=pytest.mark.megatron),
        pytest.param((2, *MEGATRON, "--actor.pipeline_parallel", "2"), marks=pytest.mark.megatron),
    ],
    ids=["tokens shared", "megatron tensor", "megatron pipeline"],
)  # fmt: skip
def test_ranks_and_micro_batches_change_nothing(folder, alone, args):
    ranks, *options = args
    rows, _ = learn(folder, ranks, "other", *options)
    same(rows, alone)
    same_weights(folder, "out_other")


def same_weights(folder: Path, out: str) -> None:
    for part in ("", "ema"):
        found, right = (weights_of(folder / name / part) for name in (out, "out_alone"))
        for name, weight in right.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=3e-5)


def test_two_ranks_have_the_numbers_of_one(folder, alone, sharded):
    same(sharded[0], alone)
    same_weights(folder, "out_sharded")


def test_the_policy_learns_what_is_preferred(alone):
    assert alone[0]["eval/loss"] == pytest.approx(0.693147, abs=1e-5)  # log 2: it is the reference
    assert alone[-1]["eval/loss"] < 0.66
    assert alone[-1]["eval/rewards/accuracies"] > 0.7
    assert alone[-1]["eval/rewards/margins"] > 0.05
    assert alone[-1]["preference/loss"] < alone[1]["preference/loss"]


@torch.no_grad()
def logprob(model: Any, tokenizer: Any, row: dict, side: str) -> float:
    """Sum over an answer's tokens and EOS, by transformers."""
    text = tokenizer.apply_chat_template(row["prompt"], tokenize=False, add_generation_prompt=True)
    asked = tokenizer(text, add_special_tokens=False)["input_ids"]
    said = tokenizer(row[side][0]["content"], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*asked, *said, tokenizer.eos_token_id]])
    logits = model(ids).logits[0, len(asked) - 1 : -1].double().log_softmax(-1)
    return float(logits.gather(1, ids[0, len(asked) :, None]).sum())


def test_what_was_evaluated_is_what_transformers_computes(folder, alone):
    """The loss, rewards and log-probabilities of the result, with the model as the reference."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "out_alone")
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
        for name in ("out_alone", "model")
    )
    table = torch.tensor([
        [logprob(model, tokenizer, pair(n), side) for model in (policy, reference)
         for side in ("chosen", "rejected")]
        for n in range(17, 26)
    ], dtype=torch.float64)  # fmt: skip
    chosen, rejected, ref_chosen, ref_rejected = table.unbind(1)
    h = 0.5 * (chosen - ref_chosen - rejected + ref_rejected)
    right = {
        "loss": -0.95 * torch.sigmoid(h).log() - 0.05 * torch.sigmoid(-h).log(),
        "rewards/chosen": 0.5 * (chosen - ref_chosen), "rewards/margins": h,
        "rewards/accuracies": (h > 0).double(), "logps/chosen": chosen, "logps/rejected": rejected,
    }  # fmt: skip
    for name, values in right.items():
        found = alone[-1][f"eval/{name}"]
        assert found == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-5), name


def test_resumed_is_bit_for_bit_the_run_left_alone_and_computes_no_reference_again(folder, sharded):
    whole, said = sharded
    assert "17 train rows: 0 read, 17 computed" in said
    learn(folder, 2, "parted", "--steps", "2")
    rows, said = learn(folder, 2, "parted", "--resume", "auto")
    assert "17 train rows: 17 read, 0 computed" in said
    assert "9 eval rows: 9 read, 0 computed" in said
    assert rows[3:] == whole[3:] and rows[:2] == whole[:2]
    parted, left_alone = (folder / f"out_{n}/model.safetensors" for n in ("parted", "sharded"))
    assert parted.read_bytes() == left_alone.read_bytes()
    _, said = learn(folder, 1, "parted", "--steps", "1", "--preference.ld_alpha", "0.5")
    assert "0 read, 17 computed" in said  # other numbers, beside which the former stay
    assert len(list((folder / "parted/reference").glob("train-*"))) == 2


def kl_of_held_out(folder: Path, out: str) -> float:
    """The mean of log pi - log ref of prompts with answers to other prompts, by transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder / out)
    models = [AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32).eval()
              for name in (out, "model")]  # fmt: skip
    order = np.random.default_rng(0).permutation(9)
    ratios = []
    for n, other in zip(order, np.roll(order, -1), strict=True):
        row = pair(17 + int(n))
        mixed = row | {side: pair(17 + int(other))[side] for side in ("chosen", "rejected")}
        for side in ("chosen", "rejected"):
            policy, reference = (logprob(model, tokenizer, mixed, side) for model in models)
            ratios.append(policy - reference)
    return max(sum(ratios) / len(ratios), 0.0)


def test_kto_on_any_ranks_from_pairs_and_from_labelled_answers(folder):
    small = ("--actor.micro_batch_tokens", "12", "--steps", "3")
    want, said = learn(folder, 1, "kto", *KTO, "--steps", "3")
    assert "34 train rows: 0 read, 34 computed" in said
    rows, _ = learn(folder, 2, "kto_two", *KTO, *small)
    same(rows, want)
    assert want[-1]["eval/kl"] == pytest.approx(kl_of_held_out(folder, "out_kto"), rel=1e-4)
    assert want[-1]["eval/kl"] > 1e-3
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in map(pair, range(17)) for side in ("chosen", "rejected")
    ]  # fmt: skip
    Path(folder, "labelled.jsonl").write_text("".join(json.dumps(r) + "\n" for r in labelled))
    rows, _ = learn(folder, 1, "kto_labelled", *KTO, "--steps", "1", "--data.train",
                    "labelled.jsonl")  # fmt: skip
    first, right = rows[1], want[1]  # at the start the KL is 0 with any answers
    for name in ("loss", "grad_norm", "logps/chosen", "desirable"):
        assert first[f"preference/{name}"] == pytest.approx(right[f"preference/{name}"], rel=1e-4)


def test_the_reference_of_adapters_is_the_model_without_them(folder):
    text = CONFIG.replace("ema=0.5", "lora=LoraConfig(rank=4)")
    Path(folder, "lora.py").write_text(text)
    lora = ("--config", "lora.py", "--preference.loss", "ipo", "--preference.loss_args", "{}")
    first, _ = learn(folder, 1, "lora", *lora, "--steps", "2")
    assert first[0]["eval/rewards/margins"] == pytest.approx(0, abs=1e-6)
    adapter = ("--actor.lora.adapter", "out_lora/adapter")
    again, said = learn(folder, 2, "lora_on", *lora, *adapter, "--steps", "1")
    assert "9 eval rows: 0 read" in said
    for name in ("rewards/margins", "rewards/chosen", "loss"):
        last = first[-1][f"eval/{name}"]
        assert again[0][f"eval/{name}"] == pytest.approx(last, rel=1e-4, abs=1e-6), name
    assert abs(again[0]["eval/rewards/margins"]) > 1e-5


def test_losses_without_a_reference_compute_none(folder):
    for loss in ("orpo", "simpo", "cpo"):
        rows, said = learn(folder, 1, loss, "--preference.loss", loss, "--preference.loss_args",
                           "{}", "--steps", "1", "--eval_every", "0")  # fmt: skip
        assert "log-probabilities" not in said and not Path(folder, loss, "reference").exists()
        assert rows[-1]["eval/loss"] < rows[0]["eval/loss"]
