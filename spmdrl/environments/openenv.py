"""Episodes of OpenEnv environments, which are servers, over their WebSocket protocol.

Each sample has a session of its own on the server: {"type": "reset"} and {"type": "step"} are
answered by {"type": "observation", "data": {"observation": ..., "reward": ..., "done": ...}}. The
package openenv is needed by servers alone. Protocol: github.com/meta-pytorch/OpenEnv,
src/openenv/core/env_server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.environments.episodes import Row, episode_row, spoken_action

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect
except ImportError as problem:
    raise ConfigError(
        f"spmdrl.environments.openenv needs the package websockets, 15 or newer: {problem}"
    ) from problem

OPEN_S = 30.0  # for a server to answer; multi_turn.timeout_s bounds all that a turn takes
MOST_MIB = 64  # of an observation

Parse = Callable[[str], Mapping[str, Any] | None]
Describe = Callable[[dict[str, Any]], Any]


class OpenEnvError(RuntimeError):
    """The server is gone, or says that something is wrong."""


def parse_message(text: str) -> dict[str, Any] | None:
    r"""Returns the action {"message": ...} of a turn: its last <action>...</action> or \boxed{...},
    else its text; None where there is none. Other environments have actions with other fields.
    """
    said = spoken_action(text)
    return {"message": said} if said else None


def describe_observation(observation: dict[str, Any]) -> str:
    """Returns an observation's only text where it has one, otherwise the whole as JSON."""
    shown = {key: value for key, value in observation.items() if key != "metadata"}
    texts = [value for value in shown.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(shown, ensure_ascii=False)


class OpenEnvSession:
    """A connection to a server, which makes an environment for it. Raises OpenEnvError."""

    def __init__(self, url: str) -> None:
        address = url.rstrip("/").replace("http", "ws", 1) + "/ws"
        self.stack = ExitStack()
        given: dict[str, Any] = {"open_timeout": OPEN_S, "max_size": MOST_MIB << 20}
        try:
            self.socket: ClientConnection = self.stack.enter_context(connect(address, **given))
        except (OSError, WebSocketException) as error:
            raise OpenEnvError(f"the OpenEnv server {url} cannot be reached: {error}") from error

    def ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {"observation": ..., "reward": ..., "done": ...}."""
        try:
            self.socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(self.socket.recv())
        except WebSocketException as error:
            raise OpenEnvError(f"the OpenEnv server was lost during a {kind}: {error}") from error
        if answer["type"] != "observation":
            raise OpenEnvError(f"the OpenEnv server answers a {kind}: {answer.get('data')}")
        return answer["data"]

    def close(self) -> None:
        self.stack.close()


class OpenEnvEpisode:
    """An episode, which a sample plays. For `PpoConfig.environment`, or with arguments of its own
    as `functools.partial(OpenEnvEpisode, parse=...)`.
    """

    def __init__(
        self,
        extra_info: dict[str, Any],
        parse: Parse = parse_message,
        describe: Describe = describe_observation,
        reward_of_bad_action: float = 0.0,
        no_action: str = "No action was found in your answer. Write <action>...</action>.",
    ) -> None:
        """extra_info: of a row of `openenv_rows`. parse(text): the fields of the action in a turn,
        or None. describe(observation): text, an image or messages for the policy.
        reward_of_bad_action, no_action: of a turn without an action, which the server does not see.
        """
        self.parse, self.describe = parse, describe
        self.reward_of_bad_action, self.no_action = reward_of_bad_action, no_action
        self.session = OpenEnvSession(extra_info["url"])
        self.session.ask("reset", json.loads(extra_info["reset"]))

    def step(self, action: str) -> dict[str, Any]:
        """action: what the policy said in a turn."""
        found = self.parse(action)
        if found is None:
            return {"observation": self.no_action, "reward": self.reward_of_bad_action}
        answer = self.session.ask("step", found)
        return {
            "observation": self.describe(answer["observation"]),
            "reward": float(answer["reward"] or 0.0),
            "done": bool(answer["done"]),
        }

    def close(self) -> None:
        self.session.close()


def openenv_rows(
    url: str,
    seeds: Iterable[int],
    instructions: str,
    reset: Mapping[str, Any] | None = None,
    describe: Describe = describe_observation,
    data_source: str = "openenv",
) -> list[Row]:
    """Returns a row for each seed: the instructions and the first observation as the user's
    message, and what OpenEnvEpisode needs in extra_info.

    reset: what resets are given beside the seed. Raises OpenEnvError where the server does not
    answer.
    """
    rows = []
    session = OpenEnvSession(url)
    for seed in seeds:
        given = {**(reset or {}), "seed": seed}
        first = session.ask("reset", given)["observation"]
        info = {"url": url, "reset": json.dumps(given)}
        rows.append(episode_row(data_source, info, instructions, describe(first)))
    session.close()
    return rows
