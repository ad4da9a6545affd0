"""A server of an OpenEnv environment: with the package openenv where this Python has it, else its
protocol as the package's server speaks it. python tests/openenv_server.py PORT
"""

import importlib.util
import json
import sys
from typing import Any


class Game:
    """Says again what it is told."""

    def reset(self, seed: int | None) -> dict[str, Any]:
        self.count = 0
        return {"text": f"seed {seed}"}

    def step(self, message: str) -> tuple[dict[str, Any], float, bool]:
        if message == "crash":
            raise ValueError("it crashed")
        self.count += 1
        return {"text": f"{self.count}: {message}"}, len(message) / 10, message == "bye"


def serve_real(port: int) -> None:
    import uvicorn
    from openenv.core.env_server import Environment, create_fastapi_app
    from openenv.core.env_server.types import Action, Observation, State

    class Message(Action):
        message: str

    class Text(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, **_: Any) -> Text:
            self.game = Game()
            return Text(**self.game.reset(seed))

        def step(self, action: Message, **_: Any) -> Text:
            text, reward, done = self.game.step(action.message)
            return Text(**text, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State()

    app = create_fastapi_app(Echo, Message, Text, max_concurrent_envs=8)
    uvicorn.run(app, port=port, log_level="warning")


def serve_protocol(port: int) -> None:
    from websockets.sync.server import ServerConnection, serve

    def session(socket: ServerConnection) -> None:
        game = Game()
        for text in socket:
            message = json.loads(text)
            socket.send(json.dumps(answer_of(game, message["type"], message["data"])))

    with serve(session, "127.0.0.1", port) as server:
        server.serve_forever()


def answer_of(game: Game, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    if kind == "reset":
        first = game.reset(data.get("seed"))
        return observed(first, None, False)
    if set(data) != {"message"}:
        return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
    try:
        return observed(*game.step(data["message"]))
    except ValueError as error:
        return {"type": "error", "data": {"message": str(error), "code": "EXECUTION_ERROR"}}


def observed(observation: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


if __name__ == "__main__":
    is_real = importlib.util.find_spec("openenv") is not None
    (serve_real if is_real else serve_protocol)(int(sys.argv[1]))
