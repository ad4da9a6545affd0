"""Episodes on an OpenEnv server.

OPENENV_PYTHON names a Python that has the package openenv, whose version 0.10.0 cannot be installed
beside vLLM (its fastmcp wants mcp 1): then the server is that of the package. Without it, it is one
that speaks the package's protocol.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialogues import PROMPT, messages_of_sample, played
from local_servers import served
from text_games import parse_say

from spmdrl.environments.episodes import turn_rewards
from spmdrl.environments.openenv import (
    OpenEnvEpisode,
    OpenEnvError,
    describe_observation,
    openenv_rows,
)

pytestmark = pytest.mark.programs

SERVER = Path(__file__).parents[1] / "openenv_server.py"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    python = os.environ.get("OPENENV_PYTHON", sys.executable)
    with served([python, SERVER], env={"PATH": os.environ["PATH"]}) as port:
        yield f"http://127.0.0.1:{port}/"


def test_a_sample_plays_an_episode(talk: Any, tokenizer: Any, url: str) -> None:
    rows = openenv_rows(url, [5, 6], "Talk.")
    assert [row["prompt"][0]["content"] for row in rows] == ["Talk.\n\nseed 5", "Talk.\n\nseed 6"]
    prompts = [
        replace(PROMPT, id=i, extra_info=row["extra_info"], chat=row["prompt"])
        for i, row in enumerate(rows)
    ]
    round = talk(*prompts, environment=OpenEnvEpisode)
    begun = played(round, tokenizer, "hi", "<action></action>")
    other = played(round, tokenizer, "<action>bye</action>", position=1)  # a session of its own
    sample = played(round, tokenizer, "what", "bye", begun=begun)
    chat = messages_of_sample(sample, prompts[0], tokenizer)
    assert [m["content"] for m in chat[2::2]] == [
        "1: hi", "No action was found in your answer. Write <action>...</action>.", "2: what"
    ]  # fmt: skip
    assert chat[-1]["observation"] == "3: bye"
    assert turn_rewards(chat, 4) == {"turns": [0.2, 0.0, 0.4, 0.3]}
    chat = messages_of_sample(other, prompts[1], tokenizer)
    assert (chat[-1]["reward"], chat[-1]["observation"]) == (0.3, "1: bye")
    elsewhere = talk(*prompts, environment=OpenEnvEpisode)
    went_on = played(elsewhere, tokenizer, "bye", begun=begun)
    chat = messages_of_sample(went_on, prompts[0], tokenizer)
    assert chat[-1]["observation"] == "2: bye"


def test_what_goes_wrong_makes_the_sample_invalid(talk: Any, tokenizer: Any, url: str) -> None:
    [row] = openenv_rows(url, [5], "Talk.")
    prompt = replace(PROMPT, extra_info=row["extra_info"])
    crashed = played(talk(prompt, environment=OpenEnvEpisode), tokenizer, "crash")
    assert crashed.finish_reason == "error" and "it crashed" in crashed.replies[-1]
    wrong = functools.partial(OpenEnvEpisode, parse=parse_say)
    refused = played(talk(prompt, environment=wrong), tokenizer, "hi")
    assert "Invalid message" in refused.replies[-1]
    with pytest.raises(OpenEnvError, match="cannot be reached"):
        openenv_rows("http://127.0.0.1:9", [1], "Talk.")
    assert describe_observation({"a": "x", "b": 1, "metadata": {"c": "y"}}) == "x"
    assert describe_observation({"a": "x", "b": "z"}) == '{"a": "x", "b": "z"}'
