"""Whole runs in which an environment or tools answer, with the real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, train, write_task

# A turn ends with a digit or a small letter, which a random model soon says. The environment lets
# a sample go on until it has had three turns, but one whose index is 3 only once.
TALK = CONFIG.replace('engine="hf"', 'engine="vllm", stop_token_ids=tuple(range(4, 44))').replace(
    "max_tokens=8", "max_tokens=24"
).replace("config = PpoConfig(", '''
def environment(messages, num_turns, sample_index):
    said = messages[-1]["content"]
    assert messages[-1]["role"] == "assistant" and len(messages) == 2 * num_turns
    return None if num_turns == 3 or sample_index == 3 else f"({len(said)})"

def reward(messages, response, finish_reason):
    assert messages[-1] == {"role": "assistant", "content": response}
    return float(len(messages)) + 0.01 * len(response)

config = PpoConfig(
    environment=environment,
''')  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory, qwen3):
    path = tmp_path_factory.mktemp("talk")
    Path(path, "model").symlink_to(qwen3)
    write_task(path)
    Path(path, "talk.py").write_text(TALK)
    return path


def run(folder: Path, name: str, ranks: int, *args: str) -> list[dict]:
    done = train(
        folder, ranks, "--config", "talk.py", "--run_dir", name, "--log_samples", "32", *args
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    return metrics_of(folder / name)


def samples_of(folder: Path, name: str, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / name / f"samples/step_{step}.jsonl").open()]


@pytest.fixture(scope="module")
def alone(folder):
    return run(folder, "alone", 1)


def test_tokens_of_several_turns_are_those_that_were_said(folder, alone):
    """The trainer's logprobs of all of them are the engine's, so nothing shifted or was encoded
    again; masks are as the messages."""
    for row in alone[1:]:
        assert row["actor/logprob_diff_max"] < 1e-4
        assert row["actor/ratio_max"] == 1.0
        assert row["turns/mean"] > 1.5
        assert row["reward/invalid"] == 0
    samples = samples_of(folder, "alone", 1)
    assert len(samples) == 32
    lengths = set()
    for sample in samples:
        said = sample.get("messages", [{"role": "assistant"}])
        assert [m["role"] for m in said] == (["assistant", "user"] * 3)[: len(said)]
        assert said[-1]["role"] == "assistant"
        assert sample["sample"] != 3 or len(said) == 1
        for before, reply in zip(said[::2], said[1::2], strict=False):
            assert reply["content"] == f"({len(before['content'])})"
        lengths.add(len(said))
    assert lengths == {1, 5}
    replied = sum(len(m["content"]) for s in samples for m in s.get("messages", [])[1::2])
    assert alone[1]["turns/reply_tokens"] == replied / 32
    loss_tokens = sum(s["response_tokens"] for s in samples) - replied
    assert alone[1]["rollout/loss_tokens"] == loss_tokens


SAME = ("reward/mean", "turns/mean", "turns/reply_tokens", "response/tokens", "rollout/loss_tokens",
        "actor/loss", "actor/grad_norm", "eval/accuracy", "eval/turns/mean")  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        ("--rollout.tensor_parallel", "2"),
        ("--placement", '{"actor":"0","rollout":"1","reward":"0"}'),
    ],
    ids=["tensor parallel", "scored elsewhere"],
)
def test_two_ranks_have_the_same_numbers(folder, alone, args):
    rows = run(folder, args[0][2:], 2, *args)
    for row, right in zip(rows, alone, strict=True):
        for name in SAME:
            if name in right:
                assert row[name] == pytest.approx(right[name], rel=1e-4), name


def test_the_engine_without_vllm_talks_too(folder):
    rows = run(folder, "hf", 2, "--rollout.engine", "hf")
    for row in rows[1:]:
        assert row["actor/logprob_diff_max"] < 1e-4
        assert row["turns/mean"] > 1.5
