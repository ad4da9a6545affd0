"""Holds what environments of episodes have in common: rows, actions, and rewards of steps.

A sample is an episode. Workers import this: standard library only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TAGGED = re.compile(r"<action>(.*?)</action>|\\boxed\{([^{}]*)\}", re.DOTALL)
NUMBER = re.compile(r"-?\d+")
THOUGHT = "</think>"

Row = dict[str, Any]


def spoken_action(text: str) -> str:
    r"""Returns what stands in the last <action>...</action> or \boxed{...}, or where there is none
    all that the policy said behind its thoughts.
    """
    said = text.rpartition(THOUGHT)[2]
    found = [tagged or boxed for tagged, boxed in TAGGED.findall(said)]
    return (found[-1] if found else said).strip()


def last_number(text: str) -> int | None:
    """Returns the last whole number in an action, None where there is none."""
    found = NUMBER.findall(spoken_action(text))
    return int(found[-1]) if found else None


def episode_row(data_source: str, info: dict[str, Any], instructions: str, seen: Any) -> Row:
    """Returns a row whose prompt is the instructions and the first observation."""
    return {
        "data_source": data_source, "extra_info": info,
        "prompt": [{"role": "user", "content": f"{instructions}\n\n{seen}"}],
    }  # fmt: skip


def write_rows(path: str | Path, rows: Iterable[Row]) -> int:
    """Writes rows as JSON lines, for `DataConfig.train` or `eval`. Returns how many."""
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return len(lines)


# ---- reward functions


def turn_rewards(messages: list[dict[str, Any]], num_turns: int) -> dict[str, Any]:
    """A reward function for `rewards.per_turn`: what the environment said each turn was worth."""
    return {"turns": step_rewards(messages, num_turns)}


def episode_reward(messages: list[dict[str, Any]], num_turns: int) -> float:
    """A reward function: the sum of what the environment said the turns were worth."""
    return sum(step_rewards(messages, num_turns))


def step_rewards(messages: list[dict[str, Any]], num_turns: int) -> list[float]:
    """Returns the reward of each turn of the policy's; 0 where the environment was not asked."""
    turns = [message for message in messages if message["role"] == "assistant"]
    return [float(turn.get("reward", 0.0)) for turn in turns[len(turns) - num_turns :]]
