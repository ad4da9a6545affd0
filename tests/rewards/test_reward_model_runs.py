"""A sequence classifier scores the answers of whole runs, as transformers would score them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from programs import CONFIG, metrics_of, train, write_task
from tiny_models import CHARS, save_tokenizer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

pytestmark = pytest.mark.ranks

JUDGED = CONFIG.replace(
    "reward=reward,",
    """reward="model",
    reward_model=RewardModelConfig("judge", dtype="float32", micro_batch_tokens=64),
    log_samples=64,""",
)
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ end or '!' }}"


def save_judge(folder: Path, kind: str) -> None:
    """Random weights, far enough from 0 that scores differ; a chat template of its own."""
    sizes = {
        "vocab_size": len(CHARS), "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 128, "num_labels": 1, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(3)
    if kind == "qwen3":
        model = Qwen3ForSequenceClassification(Qwen3Config(head_dim=32, **sizes))
    else:
        model = LlamaForSequenceClassification(LlamaConfig(**sizes))
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    Path(folder, "chat_template.jinja").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("judged")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "cfg.py").write_text(JUDGED)
    save_judge(path / "judge", "qwen3")
    save_judge(path / "llama", "llama")
    return path


@torch.no_grad()
def right_score(judge: Path, prompt: str, response: str, end: str) -> float:
    """By transformers' own forward pass, of the sequence alone."""
    model = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32)
    chat = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    tokenizer = AutoTokenizer.from_pretrained(judge)
    ids = tokenizer.apply_chat_template(chat, end=end, return_tensors="pt", return_dict=False)
    return float(model(input_ids=ids).logits)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("ranks", "judge", "args"),
    [
        (1, "judge", ("--reward_model.chat_template_kwargs", '{"end": "?"}')),
        (2, "judge", ("--reward_model.offload_params",)),
        (2, "llama", ("--reward_model.model", "llama", "--reward_model.fsdp", "1")),
        (3, "judge", ("--placement", '{"actor":"0","rollout":"0","reward":"1-2"}')),
        (2, "judge", ("--rollout.engine", "vllm", "--rollout.tensor_parallel", "2")),
    ],
    ids=["one rank", "sharded", "replicated llama", "on ranks of its own", "tensor parallel"],
)
def test_scores_are_those_of_transformers(folder, ranks, judge, args):
    name = f"run {ranks} {judge} {len(args)}"
    done = train(folder, ranks, "--config", "cfg.py", "--run_dir", name, *args)
    assert done.code == 0, done.output[-4000:]
    samples = [json.loads(line) for line in (folder / name / "samples/step_1.jsonl").open()]
    assert len(samples) == 32
    for sample in samples[::4]:
        end = "?" if "--reward_model.chat_template_kwargs" in args else ""
        right = right_score(folder / judge, sample["prompt"], sample["response"], end)
        assert sample["reward"] == pytest.approx(right, rel=1e-4, abs=1e-4)
    assert len({round(sample["reward"], 3) for sample in samples}) > 8
    rows = metrics_of(folder / name)
    assert rows[0]["eval/reward"] != 0


def test_an_evaluation_by_itself_asks_it_too(folder):
    """With the greedy answers that a run has before its first step."""
    done = train(folder, 1, "--config", "cfg.py", "--run_dir", "one", "--steps", "1")
    assert done.code == 0, done.output[-4000:]
    done = train(folder, 2, "--config", "cfg.py", "--out", "alone", program="spmdrl.evaluate")
    assert done.code == 0, done.output[-4000:]
    [row] = metrics_of(folder / "alone")
    [right, *_] = metrics_of(folder / "one")
    assert row["eval/reward"] == pytest.approx(right["eval/reward"], rel=1e-4)


def test_a_function_adds_to_what_the_model_says_and_long_samples_are_invalid(folder):
    added = JUDGED.replace('reward="model"', "reward=mine").replace("def reward", '''
def mine(model_score, response):
    return {"score": model_score + len(response), "judged": model_score, "length": len(response)}

def reward''')  # fmt: skip
    Path(folder, "added.py").write_text(added)
    done = train(folder, 2, "--config", "added.py", "--run_dir", "added")
    assert done.code == 0, done.output[-4000:]
    for sample in map(json.loads, (folder / "added/samples/step_1.jsonl").open()):
        assert sample["reward"] == pytest.approx(sample["judged"] + sample["length"])
    cut = json.loads((folder / "judge/config.json").read_text()) | {"max_position_embeddings": 24}
    save_judge(folder / "short", "qwen3")
    Path(folder, "short/config.json").write_text(json.dumps(cut))
    done = train(
        folder, 2, "--config", "cfg.py", "--run_dir", "short run", "--reward_model.model", "short"
    )
    assert done.code == 1
    assert "the reward model cannot read it: 30 tokens, more than its 24 positions" in done.output


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--reward_model.model", "model"), "expected ...ForSequenceClassification"),
        (("--reward_model", "None"), "there is no reward_model: set it"),
        (("--reward_model.model", ""), "reward_model.model is not set"),
        (("--reward", "gsm8k"), "reward_model has no effect"),
        (("--reward_model.fsdp", "2"), "reward_model.fsdp on the ranks of reward"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(folder, args, why):
    done = train(folder, 1, "--config", "cfg.py", "--run_dir", "no", "--dry-run", *args)
    assert done.code == 2
    assert why in done.output, done.output
