"""A judge in whole runs: its verdicts are what transformers' own greedy generation writes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task
from tiny_models import save_qwen3
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.ranks

# any text is a verdict here, since the judge has random weights
RULES = """
def asked(question, answer):
    return f"judge {question}{answer}!"

def compared(question, answer_a, answer_b):
    return [{"role": "system", "content": "which"},
            {"role": "user", "content": f"{question}{answer_a}:{answer_b}?"}]

def number(text):
    return float(sum(map(ord, text)) % 11)

def share(text):
    return sum(map(ord, text)) % 5 / 4

def told(judge_score, judge_verdicts, response):
    return {"score": judge_score + len(response), "said": len(judge_verdicts)}
"""
JUDGED = CONFIG.replace("def reward", f"{RULES}\ndef reward").replace(
    "reward=reward,",
    """reward="judge",
    judge=JudgeConfig("judge", template=asked, verdict=number, dtype="float32", max_tokens=12,
                      max_prompt_tokens=100, kv_cache_mib=16),
    log_samples=64,""",
)
PAIRED = JUDGED.replace(
    "template=asked, verdict=number", 'template=compared, verdict=share, compare="pairs"'
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("judged")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "each.py").write_text(JUDGED)
    Path(path, "pairs.py").write_text(PAIRED)
    Path(path, "told.py").write_text(JUDGED.replace('reward="judge"', "reward=told"))
    save_qwen3(path / "judge", seed=5, tie_word_embeddings=False, initializer_range=0.15)
    return path


class Reference:
    """The judge by transformers' generate, one question at a time."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.rules: dict[str, Any] = {}
        exec(RULES, self.rules)

    def says(self, asked: str | list[dict[str, str]]) -> str:
        chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        ids = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        found = self.model.generate(ids, max_new_tokens=12, do_sample=False)
        return self.tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True)

    def share(self, question: str, first: str, second: str) -> float:
        return self.rules["share"](self.says(self.rules["compared"](question, first, second)))


def samples_of(run: Path, name: str = "step_1") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"samples/{name}.jsonl").open()]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (1, ()),
        (2, ("--judge.engine", "vllm", "--rollout.engine", "vllm")),
    ],
    ids=["hf on one rank", "two vLLM engines on each of two ranks"],
)
def test_verdicts_are_those_of_transformers(folder, ranks, args):
    done = train(folder, ranks, "--config", "each.py", "--run_dir", f"each {ranks}", *args)
    assert done.code == 0, done.output[-4000:]
    run, reference = folder / f"each {ranks}", Reference(folder / "judge")
    rows = samples_of(run)
    assert len(rows) == 32
    for row in rows[::5]:
        text = reference.says(reference.rules["asked"](row["prompt"], row["response"]))
        assert row["judge_verdicts"] == [text]
        assert row["reward"] == row["judge_score"] == reference.rules["number"](text)
    assert len({row["reward"] for row in rows}) > 3
    first = next(row for row in metrics_of(run) if row["step"] == 1)
    mean = statistics.mean(row["judge_score"] for row in rows)
    assert first["reward/judge_score"] == pytest.approx(mean)
    assert first["reward/judge_unparsable"] == 0
    assert 0 < first["reward/judge_tokens"] <= 12


@pytest.mark.parametrize(
    ("ranks", "args"),
    [
        (2, ("--checkpoint.every_steps", "1")),
        (3, ("--placement", '{"actor":"0","rollout":"0-1","reward":"1-2"}',
             "--judge.opponents", "1")),
    ],
    ids=["beside the policy", "partly on other ranks"],
)  # fmt: skip
def test_win_rates_are_over_the_answers_of_a_group_on_all_ranks(folder, ranks, args):
    done = train(folder, ranks, "--config", "pairs.py", "--run_dir", f"pairs {ranks}", *args)
    assert done.code == 0, done.output[-4000:]
    run, reference = folder / f"pairs {ranks}", Reference(folder / "judge")
    group = [row for row in samples_of(run) if row["group"] == 3]
    said = [row["response"] for row in group]
    away = (1,) if "--judge.opponents" in args else (1, 2, 3)
    for i, row in enumerate(group):
        others = [(i + step) % 4 for step in away], [(i - step) % 4 for step in away]
        shares = [reference.share(row["prompt"], said[i], said[j]) for j in others[0]]
        shares += [1 - reference.share(row["prompt"], said[j], said[i]) for j in others[1]]
        assert row["reward"] == pytest.approx(statistics.mean(shares))
        assert len(row["judge_verdicts"]) == 2 * len(away)
    mean = next(row for row in metrics_of(run) if row["step"] == 1)["reward/mean"]
    assert mean == pytest.approx(0.5)  # of all pairs, whoever wins
    for row in samples_of(run, "eval_0")[::3]:  # held-out answers: with the ground truth
        asked = row["prompt"], row["response"], row["ground_truth"]
        forth, back = reference.share(*asked), reference.share(asked[0], asked[2], asked[1])
        assert row["reward"] == pytest.approx((forth + 1 - back) / 2)


def test_a_resumed_run_gets_the_verdicts_of_one_that_went_on(folder):
    done = train(folder, 2, "--config", "pairs.py", "--run_dir", "resumed", "--resume",
                 "pairs 2/checkpoints/step_00000001")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    went_on, resumed = (samples_of(folder / n, "step_2") for n in ("pairs 2", "resumed"))
    keys = ("response", "reward", "judge_verdicts")
    assert [[r[k] for k in keys] for r in resumed] == [[r[k] for k in keys] for r in went_on]


def test_a_function_adds_to_it_and_an_evaluation_asks_it_too(folder):
    done = train(folder, 2, "--config", "told.py", "--out", "alone", program="spmdrl.evaluate")
    assert done.code == 0, done.output[-4000:]
    for row in samples_of(folder / "alone", "1"):
        assert row["reward"] == row["judge_score"] + len(row["response"])
        assert row["said"] == 1
    [row] = metrics_of(folder / "alone")
    assert 0 <= row["eval/reward/judge_score"] <= 10


def test_what_cannot_be_read_is_counted_and_a_dry_run_refuses(folder):
    done = train(folder, 1, "--config", "each.py", "--run_dir", "unread", "--judge.verdict",
                 "z(z)z", "--judge.unparsable", "-3.0", "--steps", "1")  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    first = next(row for row in metrics_of(folder / "unread") if row["step"] == 1)
    assert first["reward/judge_unparsable"] == 1
    assert first["reward/mean"] == first["reward/judge_score"] == -3
    done = train(folder, 1, "--config", "each.py", "--run_dir", "no", "--dry-run",
                 "--judge.max_prompt_tokens", "600")  # fmt: skip
    assert done.code == 2
    assert "max_position_embeddings is 512" in done.output
