"""Reward models under torchrun: the same numbers on any ranks and in any micro-batches, which are
those of transformers' own forward pass, and those that a run is then given."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from programs import CONFIG as RL
from programs import metrics_of, train, write_task
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from spmdrl.config import RewardModelConfig
from spmdrl.engines.hf_export import export
from spmdrl.rewards.reward_model import RewardModel
from spmdrl.types import Prompt, Sample

pytestmark = pytest.mark.ranks

CONFIG = """
from spmdrl.config import *

config = RewardTrainingConfig(
    model="model",
    data=PreferenceDataConfig(train="rows.jsonl", eval="held_out.jsonl", batch_size=6,
                              max_tokens=40),
    out="out", run_dir="run", steps=5, eval_every=2, center_coef=0.02,
    actor=TrainConfig(dtype="float32", micro_batch_tokens=70, ema=0.5, optim=OptimConfig(lr=1e-3)),
    checkpoint=CheckpointConfig(every_steps=2),
    trackers=(),
)
"""


MEGATRON = ("--actor.engine", "megatron")


def pair(n: int) -> dict[str, Any]:
    """Conversations of different lengths, the shorter of which may be either."""
    asked = [{"role": "user", "content": f"{n}+{n % 5}="}]
    answers = {"chosen": f"{n + n % 5}" * (n % 4 + 1), "rejected": f"{n + 1}!" * (n % 3 + 1)}
    row = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return {"prompt": asked, **row, "margin": 0.25 * (n % 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("preferences")
    Path(path, "model").symlink_to(qwen3)
    for name, numbers in (("rows", range(17)), ("held_out", range(17, 30))):
        rows = [json.dumps(pair(n)) + "\n" for n in numbers]
        Path(path, f"{name}.jsonl").write_text("".join(rows))
    Path(path, "cfg.py").write_text(CONFIG)
    return path


def learn(folder: Path, ranks: int, name: str, *args: str) -> list[dict]:
    """The run's metrics; its model is in out_<name>."""
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, "--out", f"out_{name}",
                 *args, program="spmdrl.reward_model")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


@pytest.fixture(scope="module")
def alone(folder):
    """On one rank."""
    return learn(folder, 1, "alone")


def test_a_run_ends_with_its_accuracy_in_words_and_as_a_picture(folder, alone):
    before, after = (f"{alone[step]['eval/accuracy']:.4g}" for step in (0, 5))
    told = Path(folder, "alone/summary.txt").read_text()
    assert f"accuracy on held-out data  {before} (step 0) -> {after} (step 5)" in told
    assert "python -m spmdrl.reward_model --config cfg.py" in told  # one rank, no launcher
    assert imread(folder / "alone/accuracy.png").shape[:2] == (540, 960)


@pytest.fixture(scope="module")
def sharded(folder):
    """On two."""
    return learn(folder, 2, "sharded")


def same_as(alone: list[dict], rows: list[dict], folder: Path, out: str) -> None:
    """Metrics, weights and their average are those of one rank."""
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5]
    for row, want in zip(rows, alone, strict=True):
        assert row == pytest.approx(want, rel=1e-5, abs=1e-6)
    for part in ("", "ema"):
        found, right = (weights_of(folder / name / part) for name in (out, "out_alone"))
        assert found.keys() == right.keys()
        for name, weight in right.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-5)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    "args",
    [
        (2, "--actor.fsdp", "1", "--actor.micro_batch_tokens", "8"),  # a pair each
        (2, "--actor.ulysses", "2", "--actor.micro_batch_tokens", "1000"),
        pytest.param(
            (2, *MEGATRON, "--actor.tensor_parallel", "2", "--actor.sequence_parallel", "True"),
            marks=pytest.mark.megatron,
        ),
        pytest.param((4, *MEGATRON, "--actor.pipeline_parallel", "2"), marks=pytest.mark.megatron),
    ],
    ids=["replicated", "tokens shared", "megatron tensor", "megatron pipeline"],
)
def test_ranks_and_micro_batches_change_nothing(folder, alone, args):
    ranks, *options = args
    same_as(alone, learn(folder, ranks, "other", *options), folder, "out_other")


def test_two_ranks_have_the_numbers_of_one(folder, alone, sharded):
    same_as(alone, sharded, folder, "out_sharded")


@torch.no_grad()
def scores_of(model: Path, texts: list[str]) -> torch.Tensor:
    """(len(texts),) by transformers, in a padded batch."""
    hf, found = AutoModelForSequenceClassification.from_pretrained(
        model, dtype=torch.float32, output_loading_info=True
    )
    assert not found["missing_keys"] and not found["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(model)
    inputs = tokenizer(texts, padding=True, return_tensors="pt", add_special_tokens=False)
    return hf(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0]


def test_the_result_scores_in_transformers_as_it_was_evaluated(folder, alone):
    assert alone[0]["eval/accuracy"] == alone[0]["eval/margin"] == 0  # a score of zeros
    rows = [pair(n) for n in range(17, 30)]
    sides = [
        scores_of(
            folder / "out_alone", [row["prompt"][0]["content"] + row[side][0]["content"]
                                   for row in rows],
        ).double()
        for side in ("chosen", "rejected")
    ]  # fmt: skip
    chosen, rejected = sides
    margins = torch.tensor([row["margin"] for row in rows], dtype=torch.float64)
    losses = -(1 / (1 + (-(chosen - rejected - margins)).exp())).log()
    right = {
        "loss": losses + 0.02 * (chosen + rejected) ** 2, "accuracy": (chosen > rejected).double(),
        "margin": chosen - rejected, "chosen_reward": chosen, "rejected_reward": rejected,
    }  # fmt: skip
    for name, values in right.items():
        found = alone[-1][f"eval/{name}"]
        assert found == pytest.approx(float(values.mean()), rel=1e-4, abs=1e-5), name
    assert float(chosen.std()) > 1e-3
    losses_of_steps = [row["reward_model/loss"] for row in alone[1:]]
    assert losses_of_steps[-1] < losses_of_steps[0]


def test_a_checkpoint_exports_to_the_result_and_training_goes_on_from_it(folder, alone):
    export(folder / "alone/checkpoints/step_00000005", folder / "exported", "float32")
    found, right = weights_of(folder / "exported"), weights_of(folder / "out_alone")
    assert found.keys() == right.keys()
    assert all(torch.equal(found[name], right[name]) for name in right)
    rows = learn(folder, 2, "on", "--model", "exported", "--steps", "1")
    for name in ("loss", "accuracy", "margin"):
        last = alone[-1][f"eval/{name}"]
        assert rows[0][f"eval/{name}"] == pytest.approx(last, rel=1e-5, abs=1e-6)


def test_resumed_is_bit_for_bit_the_run_left_alone(folder, sharded):
    learn(folder, 2, "parted", "--steps", "2")
    rows = learn(folder, 2, "parted", "--resume", "auto")
    assert rows[3:] == sharded[3:] and rows[:2] == sharded[:2]
    parted, left_alone = (folder / f"out_{n}/model.safetensors" for n in ("parted", "sharded"))
    assert parted.read_bytes() == left_alone.read_bytes()


@pytest.mark.megatron
def test_engine_megatron_resumes_and_exports_its_average_too(folder, alone):
    layout = (*MEGATRON, "--actor.tensor_parallel", "2", "--actor.optim.name", "muon")
    whole = learn(folder, 2, "megatron", *layout)
    learn(folder, 2, "parted_megatron", *layout, "--steps", "2")
    rows = learn(folder, 2, "parted_megatron", *layout, "--resume", "auto")
    assert rows[3:] == whole[3:]
    for ema in ("", "ema"):
        left_alone = weights_of(folder / "out_megatron" / ema)
        parted = weights_of(folder / "out_parted_megatron" / ema)
        exported = folder / f"exported_megatron_{ema}"
        export(folder / "megatron/checkpoints/step_00000005", exported, "float32", bool(ema))
        for other in (parted, weights_of(exported)):
            assert other.keys() == left_alone.keys()
            assert all(torch.equal(other[name], left_alone[name]) for name in left_alone)
    rows = learn(folder, 2, "on_megatron", *MEGATRON, "--actor.pipeline_parallel", "2",
                 "--model", "exported_megatron_", "--steps", "1")  # fmt: skip
    assert rows[0]["eval/loss"] == pytest.approx(whole[-1]["eval/loss"], rel=1e-5)


def test_options_of_the_engine_hold_here_too(folder):
    """Muon, the average of the weights; activations computed again change no number."""
    options = ("--actor.optim.name", "muon", "--actor.ema", "0.5")
    right = learn(folder, 1, "muon", *options)
    saving = ("--actor.activation_checkpointing", "selective")
    rows = learn(folder, 2, "saving", *options, *saving)
    for row, want in zip(rows, right, strict=True):
        assert row == pytest.approx(want, rel=1e-4, abs=1e-5)
    scores, average = (
        scores_of(folder / out, ["3+4=7", "3+4=8"]) for out in ("out_saving", "out_saving/ema")
    )
    assert not torch.equal(scores, average)
    half = learn(folder, 2, "half", "--actor.dtype", "bfloat16", "--actor.fp8", "rowwise",
                 "--actor.optim.name", "adamw8bit")  # fmt: skip
    assert half[1]["reward_model/loss"] == pytest.approx(right[1]["reward_model/loss"], rel=1e-2)


def test_a_run_is_given_the_same_scores(folder, alone):
    write_task(folder)
    reward = 'reward="model", reward_model=RewardModelConfig("out_alone", dtype="float32"),'
    Path(folder, "rl.py").write_text(RL.replace("reward=reward,", f"{reward} log_samples=64,"))
    done = train(folder, 2, "--config", "rl.py", "--run_dir", "rl", "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    samples = [json.loads(line) for line in (folder / "rl/samples/step_1.jsonl").open()]
    texts = [sample["prompt"] + sample["response"] for sample in samples]
    rewards = torch.tensor([sample["reward"] for sample in samples])
    torch.testing.assert_close(rewards, scores_of(folder / "out_alone", texts), rtol=0, atol=1e-5)
    assert len(samples) == 32 and float(rewards.std()) > 1e-4


def test_what_cannot_work_is_refused(folder):
    Path(folder, "bad.jsonl").write_text(json.dumps(pair(1)) + '\n{"chosen": "1"}\n')
    for args, words in (
        (("--data.train", "bad.jsonl"), "bad.jsonl, line 2: field 'rejected': missing"),
        (("--data.batch_size", "18"), "batch_size=18 is above the 17 rows"),
        (("--actor.lora.rank", "4"), "leave actor.lora out"),
    ):
        done = train(folder, 1, "--config", "cfg.py", "--dry-run", *args,
                     program="spmdrl.reward_model")  # fmt: skip
        assert done.code == 2 and words in done.output, done.output


def test_dry_run_shows_a_pair(folder):
    done = train(folder, 1, "--config", "cfg.py", "--dry-run", "--ranks", "4",
                 program="spmdrl.reward_model")  # fmt: skip
    assert done.code == 0, done.output
    for words in ("6 rows a step, at most 480 tokens, about 1.5 on each of 4",
                  "train data: 17 rows of", "eval data: 13 rows of", "margin 0.5:",
                  "    chosen   '17+2=1919'\n    rejected '17+2=18!18!18!'"):  # fmt: skip
        assert words in done.output, (words, done.output)


def test_eos_behind_strings_is_noted_for_whoever_scores(folder):
    texts = {"chosen": "5", "rejected": "6!<eos>"}  # the second has its own
    rows = [{"prompt": f"{n}+{n % 5}=", **texts} for n in range(6)]
    Path(folder, "strings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    strings = ("--data.train", "strings.jsonl", "--data.eval", "strings.jsonl", "--steps", "1",
               "--data.margin_key", "None", "--data.batch_size", "6")  # fmt: skip
    rows = learn(folder, 1, "eos", *strings, "--data.append_eos", "True",
                 "--checkpoint.every_steps", "1")  # fmt: skip
    out = folder / "out_eos"
    for side, ending in (("chosen", "5<eos>"), ("rejected", "6!<eos>")):
        right = scores_of(out, [f"{n}+{n % 5}={ending}" for n in range(6)])
        found = rows[-1][f"eval/{side}_reward"]
        assert found == pytest.approx(float(right.mean()), rel=1e-4, abs=1e-6)
    export(folder / "eos/checkpoints/step_00000001", folder / "eos_exported")
    tokenizer = AutoTokenizer.from_pretrained(out)
    sample = Sample(Prompt(0, [], "a", "5", "2+2="), 0, 0, [], [], [], [], "stop", response="5")
    for model, want in ((out, "2+2=5<eos>"), (folder / "eos_exported", "2+2=5<eos>"),
                        (folder / "out_alone", "2+2=5")):  # fmt: skip
        scorer = RewardModel(RewardModelConfig(str(model)), None, tokenizer)
        assert tokenizer.decode(scorer.encode(sample).token_ids) == want
    learn(folder, 1, "eos_on", *strings, "--model", "out_eos")
    assert json.loads((folder / "out_eos_on/config.json").read_text())["append_eos"] is True
    learn(folder, 1, "eos_off", *strings, "--model", "out_eos", "--data.append_eos", "False")
    assert "append_eos" not in json.loads((folder / "out_eos_off/config.json").read_text())
