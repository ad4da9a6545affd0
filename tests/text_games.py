"""Environments of tests, in a module that worker processes import at once."""

from typing import Any


class Guess:
    """A text game with Gymnasium's reset and step, and without its spaces, as GEM's are."""

    def __init__(self, most: int) -> None:
        self.most = most

    def reset(self, seed: int) -> tuple[str, dict]:
        self.secret = seed % self.most
        return f"Guess a number below {self.most}.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        if action == str(self.secret):
            return "Right!", 1.0, True, False, {}
        return f"It is not {action}.", -0.25, False, action == "enough", {}

    def close(self) -> None: ...


def make_guess(env_id: str, **kwargs: Any) -> Guess:
    assert env_id == "guess"
    return Guess(**kwargs)


def shout(text: str, env: Any) -> str | None:
    return text.removeprefix("I say ") if text.startswith("I say ") else None


def double(messages: list) -> str | None:
    return f"{2 * len(messages)}"


class Untold:
    def __init__(self, extra_info: dict) -> None: ...

    def step(self, action: str) -> Any:
        """Returns what a step may be, and what it may not."""
        given: dict[str, Any] = {
            "text": "a text", "over": None, "nan": {"observation": "x", "reward": float("nan")},
            "turn": [{"role": "system", "content": "listen"}], "seen": {"observation": "x"},
            "no": {"observation": "x", "done": "no"},
            "ends": {"observation": "x", "done": 1.0},
        }  # fmt: skip
        return given.get(action, {"observation": "x", "price": 3})


class NoStep:
    def reply(self, action: str) -> str: ...


class WrongStep:
    def step(self, text: str) -> str: ...


class AsyncStep:
    async def step(self, action: str) -> str: ...


def parse_say(text: str) -> dict[str, str] | None:
    return {"say": text}
