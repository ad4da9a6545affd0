"""Tools of real MCP servers, over stdio and over HTTP, as the policy calls them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dialogues import LIMIT, PROMPT, call, config_of, contents, played
from local_servers import served

from spmdrl.config import ConfigError, MultiTurnConfig
from spmdrl.environments import mcp_connection
from spmdrl.environments.mcp import mcp_tools
from spmdrl.environments.mcp_connection import Connection, McpServer
from spmdrl.rollout.multi_turn.conversation import Dialogue, TurnHandler
from spmdrl.rollout.multi_turn.tools import Toolbox

pytestmark = pytest.mark.programs

SERVER = Path(__file__).parents[1] / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER)]
OURS = {"SHOP": "ours"}
LIMITS = MultiTurnConfig(timeout_s=60, workers=1)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(COMMAND, stderr=subprocess.DEVNULL) as port:
        yield f"http://127.0.0.1:{port}/mcp"


@pytest.fixture(scope="module")
def round(tokenizer: Any, url: str) -> Iterator[TurnHandler]:
    """Samples of three prompts, with the tools of a shared server, of one for each sample, and of
    one behind a URL in both ways."""
    headers = {"x-name": "spmdrl"}
    tools = (
        *mcp_tools(COMMAND, env=OURS),
        *mcp_tools(COMMAND, env=OURS, per_sample=True, prefix="my_"),
        *mcp_tools(url=url, headers=headers, prefix="web_"),
        *mcp_tools(url=url, headers=headers, per_sample=True, prefix="web_my_"),
    )
    dialogue = Dialogue(config_of(tools=tools, multi_turn=LIMITS), tokenizer, 1)
    yield dialogue.about([(replace(PROMPT, id=i), 0) for i in range(3)], LIMIT)
    dialogue.close()


def first_words(replies: list[str]) -> list[str]:
    return [reply.partition(" ")[0] for reply in replies]


def test_the_schemas_are_the_servers(round: TurnHandler) -> None:
    assert "tool add, tool count" in round.by.lines()[0]
    schemas = {s["function"]["name"]: s["function"] for s in round.by.toolbox.schemas}
    assert schemas["web_add"]["description"] == "Adds two numbers."
    for name in ("add", "my_add", "web_add", "web_my_add"):
        assert schemas[name]["parameters"]["properties"]["a"] == {
            "description": "one", "minimum": 0, "title": "A", "type": "integer"
        }  # fmt: skip


def test_an_engine_shares_a_server(round: TurnHandler, tokenizer: Any) -> None:
    """One that was lost is there again for the next call."""
    turn = call("add", a=1) + call("add", a=1, b=3) + call("fail", what="tea") + call("add", a=-1)
    sums, counted, drawn = contents(
        played(round, tokenizer, turn, call("count"), call("draw") + call("add", b=3))
    )
    assert sums[:2] == ["3", "4"]
    assert sums[2] == "Error: ToolFailed: Error executing tool fail: there is no tea"
    assert sums[3].startswith("Error: ") and "greater than or equal to 0" in sums[3]
    assert counted[0].startswith("1 of ") and counted[0].endswith(" for ours")
    assert "an image, and the model sees none" in drawn[0] and "Field required" in drawn[1]
    lost, again = contents(played(round, tokenizer, call("die"), call("count"), position=1))
    assert "the MCP server was lost during the call" in lost[0]
    assert again[0].startswith("1 of ") and again != counted  # another process


def test_a_sample_has_a_server_of_its_own(round: TurnHandler, tokenizer: Any) -> None:
    """With what it had counted, also where the server was lost."""
    turns = call("my_count") + call("my_count"), call("my_count")
    [[one, two], [three]] = contents(sample := played(round, tokenizer, *turns, position=1))
    assert first_words([one, two, three]) == ["1", "2", "3"]
    assert one[1:] == two[1:] == three[1:]
    lost, went_on = contents(
        played(round, tokenizer, call("my_die"), call("my_count"), begun=sample, position=1)
    )[2:]
    assert "was lost" in lost[0] and went_on[0].startswith("4 of ") and went_on[0][1:] != one[1:]


def test_a_server_is_reached_over_http(round: TurnHandler, tokenizer: Any) -> None:
    turn = call("web_add", a=2) + call("web_greet-by.header") + call("web_my_greet-by.header")
    assert contents(played(round, tokenizer, turn)) == [["4", "spmdrl", "spmdrl"]]
    for position in (1, 2):
        turns = call("web_my_count"), call("web_my_count")
        counted = contents(played(round, tokenizer, *turns, position=position))
        assert [first_words(replies) for replies in counted] == [["1"], ["2"]]


def test_a_server_that_hangs_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_connection, "ALIVE_S", 0.3)

    async def calls() -> str:
        connection = Connection(McpServer(tuple(COMMAND)))
        assert await connection.call("add", {"a": 1}) == "3"
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(connection.call("hang", {}), 0.3)
        assert connection.look is not None
        await connection.look
        said = await connection.call("add", {"a": 2})
        await connection.drop(connection.opened)
        return said

    assert asyncio.run(calls()) == "4"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({}, "takes the command of a server"),
        ({"command": "python server.py"}, "as a list such as"),
        ({"command": ["/no/such"], "url": "http://x"}, "takes the command of a server"),
        ({"command": ["/no/such"]}, "does not say which tools it has: FileNotFoundError"),
        ({"command": [sys.executable, "-c", "exit('no key')"]}, "its stderr ends: no key"),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed"),
        ({"command": COMMAND, "env": OURS, "only": ["ad"]}, "no tool 'ad'; it has add"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused(arguments: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        mcp_tools(**arguments)


def test_a_schema_that_a_tool_carries_is_checked() -> None:
    def look(**arguments: Any) -> str:
        return ""

    look.schema = {"name": "look", "parameters": "none"}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"expected ..name"):
        Toolbox([look])
    look.schema = {"name": "look", "parameters": {"type": "object"}}  # type: ignore[attr-defined]
    assert Toolbox([look]).call("look", '{"any": 1}', {}).arguments == {"any": 1}
