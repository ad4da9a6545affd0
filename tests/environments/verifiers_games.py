"""Environments with the classic API of verifiers, for the package itself and for its stand-in."""

import asyncio
import os
import sys
from pathlib import Path

import verifiers as vf
from datasets import Dataset


def said(completion):
    return [m.get("content") or "" for m in completion if m.get("role") == "assistant"]


def letters(completion) -> float:
    """The number of times that the policy said the letter o."""
    return float("".join(said(completion)).count("o"))


def turns(completion) -> float:
    return float(len(said(completion)))


def right(completion, answer) -> float:
    return float(said(completion)[-1] == answer)


def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: a number
        b: another
    """
    return a + b


class Talk(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"({len(state['trajectory'])})"}]


class Faults(vf.SingleTurnEnv):
    """Fails, ends its process, or waits for ever before the first turn."""

    async def setup_state(self, state):
        if state["answer"] == "raise":
            raise ValueError("the world is full")
        if state["answer"] == "exit":
            print("no such world", file=sys.stderr, flush=True)
            os._exit(3)
        if state["answer"] == "wait":
            try:
                Path(os.environ["NOTES"], "began").touch()
                await asyncio.sleep(600)
            finally:
                Path(os.environ["NOTES"], "cleaned up").touch()
        return state


def load_environment(game: str) -> vf.Environment:
    print("what environments print is no reply")
    rubric = vf.Rubric(funcs=[letters, turns], weights=[1.0, 0.0])
    if game == "adds":
        rows = Dataset.from_list([{"question": "2+3", "answer": "it is 5"}] * 2)
        rubric = vf.Rubric(funcs=[right])
        return vf.ToolEnv(dataset=rows, tools=[add], max_turns=3, rubric=rubric)
    if game == "faults":
        answers = ["raise", "exit", "wait", "ask"]
        rows = Dataset.from_list([{"question": "hi", "answer": a} for a in answers])
        return Faults(dataset=rows, rubric=rubric)
    rows = Dataset.from_list([{"question": "hi", "answer": ""}] * 2)
    if game == "talk":
        return Talk(dataset=rows, max_turns=3, rubric=rubric)
    if game != "letter":
        raise ValueError(f"there is no game {game}")
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric)
