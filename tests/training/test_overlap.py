"""A slow judge costs the rollout no time where sampling runs ahead; samples are what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from programs import CONFIG, metrics_of, set_up, train

pytestmark = [pytest.mark.ranks, pytest.mark.clock]

JUDGE_S, STEP_S = 1.0, 0.05  # 20 tokens: an answer takes as long as the judge
SLOW = f"""
import asyncio, os, time
import spmdrl.rollout.hf.engine

async def judge(response, ground_truth):
    await asyncio.sleep({JUDGE_S})
    return 0.01 * len(response)

decode = spmdrl.rollout.hf.engine.HfEngine.step
def step(engine):
    time.sleep({STEP_S})
    return decode(engine)
spmdrl.rollout.hf.engine.HfEngine.step = step
"""
STEPS = 4


@pytest.fixture
def folder(tmp_path, qwen3):
    config = CONFIG.replace("\nconfig =", SLOW + "\nconfig =")
    config = config.replace("reward=reward,", "reward=judge,")
    set_up(tmp_path, qwen3)
    Path(tmp_path, "cfg.py").write_text(config)
    return tmp_path


def test_a_step_is_scored_while_the_next_is_asked(folder):
    """Weights that stay as they are: then what is sampled does not depend on the time."""
    runs = {}
    for name, ahead in (("in turn", "0"), ("ahead", "1")):
        done = train(
            folder, 3, "--config", "cfg.py", "--run_dir", name, "--async_steps", ahead,
            "--placement", '{"actor":"0","rollout":"1-2"}', "--actor.optim.lr", "0.0",
            "--actor.optim.weight_decay", "0.0", "--rollout.max_tokens", "20", "--data.eval",
            "None", "--steps", str(STEPS), "--log_samples", "64",
            "--algo.correction.level", "token",
        )  # fmt: skip
        assert done.code == 0, done.output[-5000:]
        runs[name] = [json.loads(x) for x in Path(folder, name, "metrics.jsonl").open()]
    same = [
        {k: v for k, v in row.items() if k.startswith(("reward/", "response/", "advantage/"))}
        for name in runs
        for row in metrics_of(Path(folder, name))
    ]
    assert same[:STEPS] == same[STEPS:] and len(same) == 2 * STEPS
    for step in range(1, STEPS + 1):
        one, other = (Path(folder, name, f"samples/step_{step}.jsonl") for name in runs)
        rows = [[json.loads(line) for line in file.open()] for file in (one, other)]
        assert len(rows[0]) == len(rows[1]) == 32
        for here, there in zip(*rows, strict=True):
            # which requests an engine has at once moves the last digits
            want = pytest.approx(there.pop("logprobs"), abs=2e-4)
            assert here.pop("logprobs") == want and here == there
    seconds = {
        name: sum(row["time/step_s"] for row in steps[2:]) / (STEPS - 2)
        for name, steps in runs.items()
    }
    # in turn: asking and judging are both waited for; ahead, the longer of the two
    assert seconds["in turn"] > 1.7
    assert seconds["ahead"] < 0.75 * seconds["in turn"], seconds
    assert all(row["staleness/max"] <= 1 for row in runs["ahead"])
