"""A whole run in which every turn of the policy has a reward of its own."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, train, write_task

pytestmark = pytest.mark.ranks

# A turn ends with a digit or a small letter. A sample has two turns, one whose index is 3 only one.
# Of a sample whose index is 2 the function forgets a turn. `first`: tokens of the first turn.
TALK = CONFIG.replace('engine="hf"', 'engine="hf", stop_token_ids=tuple(range(4, 44))').replace(
    "max_tokens=8", "max_tokens=24"
).replace(
    "rewards=RewardConfig(workers=1)", "rewards=RewardConfig(workers=1, per_turn=True)"
).replace("config = PpoConfig(", """
def environment(messages, num_turns, sample_index):
    return None if num_turns == 2 or sample_index == 3 else "(1)"

def reward(messages, num_turns, response_ids, sample_index):
    said = [m["content"] for m in messages if m["role"] == "assistant"]
    assert num_turns == len(said) <= 2
    ends = [i + 1 for i, token in enumerate(response_ids) if token in (2, *range(4, 44))]
    turns = [0.25 + i + len(text) / 64 for i, text in enumerate(said)]
    if sample_index == 2:
        turns = [*turns, 9.0]
    return {"score": -0.5, "turns": turns, "first": (ends or [len(response_ids)])[0]}

config = PpoConfig(
    environment=environment,
    algo=AlgoConfig(advantage="reinforce_plus_plus"),
""")  # fmt: skip


def test_samples_and_metrics_of_a_run(tmp_path: Path, qwen3: Path) -> None:
    """Who samples is another rank than who scores and trains."""
    Path(tmp_path, "model").symlink_to(qwen3)
    write_task(tmp_path)
    Path(tmp_path, "cfg.py").write_text(TALK)
    done = train(
        tmp_path, 2, "--config", "cfg.py", "--log_samples", "32", "--steps", "1",
        "--placement", '{"actor":"0","rollout":"1","reward":"0"}', timeout_s=120,
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    rows = metrics_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1]
    row, samples = rows[1], samples_of(tmp_path, "step_1")
    assert len(samples) == 32
    valid = [s for s in samples if s["invalid"] is None]
    assert [s["sample"] for s in samples if s not in valid] == [2] * 8
    assert {len(s["turn_rewards"]) for s in valid} == {1, 2}
    for s in samples:
        check_sample(s)
    of_turns = math.fsum(sum(s["turn_rewards"]) for s in valid) / len(valid)
    assert row["reward/invalid"] == 8
    assert row["reward/outcome"] == pytest.approx(-0.5)
    assert row["reward/turns"] == pytest.approx(of_turns)
    assert row["reward/mean"] == pytest.approx(of_turns - 0.5)
    # what is to come of the reward, over all tokens: a turn's comes to those up to its end
    assert row["rollout/loss_tokens"] == sum(map(num_chosen, valid))
    total = sum(to_come(s) for s in valid)
    assert row["advantage/mean"] * row["rollout/loss_tokens"] == pytest.approx(total, rel=1e-4)
    at_the_end = sum(s["reward"] * num_chosen(s) for s in valid)
    assert total < at_the_end - 1
    held_out = samples_of(tmp_path, "eval_0")
    assert len(held_out) == 10
    for s in held_out:
        check_sample(s)
    held_out_reward = math.fsum(s["reward"] for s in held_out) / len(held_out)
    assert rows[0]["eval/reward"] == pytest.approx(held_out_reward)


def check_sample(s: dict) -> None:
    texts = [m["content"] for m in s["messages"][::2]]
    if s["sample"] == 2:
        k = len(texts)
        assert (s["reward"], "turn_rewards" in s) == (None, False)
        assert f"a list of {k + 1} under 'turns'; with rewards.per_turn expected" in s["invalid"]
        assert f"list of {k}, one finite number" in s["invalid"]
        return
    assert len(texts) == 1 if s["sample"] == 3 else len(texts) <= 2
    assert s["turn_rewards"] == [0.25 + i + len(text) / 64 for i, text in enumerate(texts)]
    assert s["reward"] == pytest.approx(sum(s["turn_rewards"]) - 0.5)


def num_chosen(s: dict) -> int:
    return s["response_tokens"] - len("(1)") * (len(s["turn_rewards"]) - 1)


def to_come(s: dict) -> float:
    """Summed over the sample's tokens."""
    *before, last = s["turn_rewards"]
    return s["first"] * sum(before) + num_chosen(s) * (last - 0.5)


def samples_of(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / f"run/samples/{name}.jsonl").open()]
