"""Names that all files of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

RewardFn = Callable[..., Any]


Environment = Callable[..., Any]  # a function, or a class of which each sample has an object


Change = Literal["data", "tokenizer", "chat_template", "model", "reward", "tools"]


class ConfigError(ValueError):
    """The user's input is wrong: says where, what was given and what to do. Exit code 2."""


class NotGiven(int):
    """A default value, told apart from the same number where somebody has written it."""


class DerivedCount(NotGiven):
    """A number that follows from other fields and the data; config.py of a run leaves it out."""


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
