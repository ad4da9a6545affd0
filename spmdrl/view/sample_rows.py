"""Reads a line of samples/ as a row in which each field has the type that the page expects."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

SEARCHED = ("prompt", "response", "ground_truth", "pred", "invalid", "data_source", "messages")
NUMBERS = ("reward", "advantage", "response_tokens")
TEXTS = ("prompt", "response", "finish_reason", "data_source")
OF_TOKENS = ("logprobs", "advantages", "trainer_logprobs", "update_logprobs")  # or None
UNREADABLE = (ValueError, KeyError, TypeError, OverflowError, RecursionError)  # of a damaged line
FINAL_SIGMA, SIGMA = "\u03c2", "\u03c3"

Row = dict[str, Any]


def row_of(line: bytes) -> Row | None:
    """Returns the row that a line holds; None for a line that is damaged or no object."""
    try:
        row = clean(json.loads(line))
    except UNREADABLE:
        return None
    return as_expected(row) if isinstance(row, dict) else None


def as_expected(row: Row) -> Row:
    """Leaves out fields of another type: a reward function may have reported such a name."""
    return {name: value for name, value in row.items() if value is None or is_expected(name, value)}


def is_expected(name: str, value: Any) -> bool:
    if name in NUMBERS:
        return is_number(value)
    if name in TEXTS:
        return isinstance(value, str)
    if name in OF_TOKENS or name == "turn_rewards":
        return is_list(value, lambda part: part is None or is_number(part))
    if name in ("tokens", "images"):
        return is_list(value, lambda part: isinstance(part, str))
    if name in ("chat", "messages"):
        return is_list(value, lambda part: isinstance(part, dict))
    return True


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_list(value: Any, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(holds, value))


def clean(value: Any) -> Any:
    """The value with None for every number that JSON has not: NaN and the infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(name): clean(part) for name, part in value.items()}
    return [clean(part) for part in value] if isinstance(value, list) else value


def holds_text(row: Row, text: str) -> bool:
    """Whether a lowered text is in what the sample says. As `holds` in static/source.js."""
    return any(text in lowered(said) for name in SEARCHED for said in texts_in(row.get(name)))


def lowered(text: str) -> str:
    """The text in lower case, in which a sigma is the same within a word and at its end."""
    return text.lower().replace(FINAL_SIGMA, SIGMA)


def texts_in(value: Any) -> Iterator[str]:
    """Yields the texts and numbers in a value, without the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_in(part)
    elif value is not None:
        yield json.dumps(value)
