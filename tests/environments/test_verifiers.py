"""Environments of verifiers, which are played by another Python than the trainer's.

VERIFIERS_PYTHON names one that has verifiers 0.1.14 to 0.3, VERIFIERS_V1_PYTHON one that has 0.4
and uv: then these are the environments' Pythons. Without them it is this one, with stand-ins of the
package, which does not resolve beside vLLM. docs/verifiers.md
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from agent_models import save_calling_model
from programs import CONFIG, metrics_of, samples_of, train

from spmdrl.config import ConfigError
from spmdrl.environments.episodes import write_rows
from spmdrl.environments.verifiers import (
    ServerProcess,
    VerifiersAgent,
    VerifiersError,
    verifiers_agent,
    verifiers_rows,
)

pytestmark = pytest.mark.programs

TESTS = Path(__file__).parents[1]
GAMES = TESTS / "environments"
NOBODY = "http://127.0.0.1:9/v1"


def python_of(variable: str, stand_in: str) -> dict[str, Any]:
    real = os.environ.get(variable)
    path = str(GAMES) if real else os.pathsep.join([str(GAMES), str(TESTS / stand_in)])
    return {"python": real or sys.executable, "env": {"PYTHONPATH": path}}


CLASSIC = python_of("VERIFIERS_PYTHON", "verifiers_stand_in")
V1 = python_of("VERIFIERS_V1_PYTHON", "verifiers_v1_stand_in")
SOURCES: dict[str, dict[str, Any]] = {
    game: CLASSIC | {"environment": "verifiers-games", "args": {"game": game}}
    for game in ("adds", "talk", "letter")
} | {"v1": V1 | {"environment": "verifiers-v1-games", "args": {"taskset": {"count": 2}}}}
RUN = CONFIG.replace("reward=reward,", 'reward="agent",').replace(
    "max_prompt_tokens=16", "max_prompt_tokens=100"
).replace("config = PpoConfig(", f"""
from spmdrl.environments.verifiers import verifiers_agent

config = PpoConfig(
    agent={{name: verifiers_agent(**given) for name, given in {SOURCES!r}.items()}},
    agents=AgentConfig(timeout_s=180),
""")  # fmt: skip


def said(messages: list[dict[str, Any]]) -> list[str]:
    return [m["content"] or "" for m in messages if m["role"] == "assistant"]


@pytest.mark.ranks
def test_the_rewards_of_a_run_are_those_of_the_rubrics(tmp_path):
    """A tool, several turns, one turn and a taskset in one run: its samples say what each rubric
    scores."""
    save_calling_model(tmp_path / "model")
    rows = [
        row for name, given in SOURCES.items() for row in verifiers_rows(**given, data_source=name)
    ]
    assert write_rows(tmp_path / "train.jsonl", rows) == 8
    Path(tmp_path, "cfg.py").write_text(RUN)
    done = train(
        tmp_path, 1, "--config", "cfg.py", "--steps", "1", "--data.eval", "None",
        "--rollout.n", "2", "--rollout.max_tokens", "60", "--log_samples", "16",
    )  # fmt: skip
    assert done.code == 0, done.output[-4000:]
    assert metrics_of(tmp_path / "run")[0]["reward/invalid"] == 0
    samples = samples_of(tmp_path / "run", 1)
    assert len(samples) == 16
    for sample in samples:
        turns, output = said(sample["messages"]), sample["agent_output"]
        count = float("".join(turns).count("o"))
        if sample["data_source"] == "adds":
            assert [m["role"] for m in sample["messages"]] == [
                "user",
                "assistant",
                "tool",
                "assistant",
            ]
            assert sample["reward"] == float(turns[-1] == "it is 5") == output["right"]
        elif sample["data_source"] == "v1":
            assert sample["reward"] == 2 * count == output["letters"]
            assert output["length"] == len(turns[0])
        else:
            expected = {"talk": 3, "letter": 1}[sample["data_source"]]
            assert len(turns) == expected == output["turns"]
            assert sample["reward"] == count == output["letters"]
    learnt = {s["data_source"]: s["reward"] for s in samples}  # what the model knows by heart
    assert learnt["adds"] == 1.0 and learnt["letter"] == 4.0 and learnt["v1"] == 8.0


def test_faults_of_an_environment_are_told_and_it_starts_anew(tmp_path):
    notes = {"NOTES": str(tmp_path)} | CLASSIC["env"]
    given = CLASSIC | {"environment": "verifiers-games", "args": {"game": "faults"}, "env": notes}
    rows = verifiers_rows(**given)
    agent = verifiers_agent(**given, processes=2, log=str(tmp_path / "log"))

    def play(i: int) -> Any:
        return agent(rows[i]["extra_info"], NOBODY, "key", "policy")

    async def all_of_them() -> None:
        results = await asyncio.gather(play(0), play(3), return_exceptions=True)
        assert all(isinstance(result, VerifiersError) for result in results)
        assert "ValueError: the world is full" in str(results[0])
        assert "ModelError" in str(results[1])  # there is no endpoint
        for _ in range(2):  # the process of the second one has ended with the first
            with pytest.raises(VerifiersError, match=r"status 3; its stderr ends: [^$]*such world"):
                await play(1)
        waiting = asyncio.create_task(play(2))
        while not Path(tmp_path, "began").exists():
            await asyncio.sleep(0.02)
        waiting.cancel()
        while not Path(tmp_path, "cleaned up").exists():
            await asyncio.sleep(0.02)
        with pytest.raises(VerifiersError, match="extra_info lacks 'verifiers'"):
            await agent({}, NOBODY, "key", "policy")

    asyncio.run(asyncio.wait_for(all_of_them(), 240))
    log = Path(tmp_path, "log").read_text()
    assert "no such world" in log and "what environments print is no reply" in log


def test_what_is_wrong_is_told_before_the_run(tmp_path):
    named = CLASSIC | {"environment": "verifiers-games"}
    assert isinstance(verifiers_agent(**named, args={"game": "talk"}), VerifiersAgent)
    with pytest.raises(ConfigError, match="there is no interpreter"):
        verifiers_agent(str(tmp_path / "python"), "verifiers-games")
    with pytest.raises(ConfigError, match="has no module 'no_such_env'"):
        verifiers_agent(**CLASSIC, environment="owner/no-such-env@1.0")
    with pytest.raises(ConfigError, match="has no package verifiers"):
        verifiers_agent(sys.executable, "json")
    with pytest.raises(ConfigError, match="args must be JSON"):
        verifiers_agent(**named, args={"game": object()})
    with pytest.raises(ConfigError, match="there is no game chess"):
        verifiers_rows(**named, args={"game": "chess"})
    with pytest.raises(ConfigError, match='expected "train" or "eval"'):
        verifiers_rows(**named, split="test")
    assert len(verifiers_rows(**named, args={"game": "talk"}, limit=1)) == 1


def test_an_environment_that_does_not_load_fails_its_trajectories():
    agent = verifiers_agent(**CLASSIC, environment="verifiers-games", args={"game": "chess"})
    request: dict[str, Any] = {"row": {}, "base_url": NOBODY, "api_key": "", "model": "policy"}

    async def ask() -> None:
        connection = ServerProcess(agent.served)
        asked = [connection.ask(request) for _ in range(2)]
        for result in await asyncio.gather(*asked, return_exceptions=True):
            assert isinstance(result, VerifiersError) and "no game chess" in str(result)
        assert connection.start is None and connection.num_asked == 0

    asyncio.run(ask())
    assert json.loads(agent.served.args) == {"game": "chess"}
