"""The process that runs plain functions of users, one call at a time, until its pipe is closed.

Started by path (`python worker.py FD PARENT_PID`) and not by multiprocessing, whose children import
the trainer's main module, and torch with it. Uses the standard library and cloudpickle only.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import math
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

PR_SET_PDEATHSIG = 1
MAX_REASON_CHARS = 4000
MAX_PRED_CHARS = 1000
READY = "ready"
LARGEST = 1e30  # of a reward: what is larger overflows float32 on its way into a loss


class Outcome(NamedTuple):
    """What became of one call: a reward, or the reason why there is none."""

    reward: float | None  # those of turns included
    info: dict[str, float]
    invalid: str | None
    pred: str | None = None  # what the function read as the answer
    turns: list[float] | None = None  # None: it said nothing of turns

    @classmethod
    def failed(cls, reason: str) -> Outcome:
        return cls(None, {}, reason)

    @classmethod
    def of(cls, result: Any) -> Outcome:
        return to_outcome(result)


class Reply(NamedTuple):
    """What a tool or an environment returned, as plain data; or why it did not."""

    value: Any
    error: str | None = None

    @classmethod
    def failed(cls, reason: str) -> Reply:
        return cls(None, reason)

    @classmethod
    def of(cls, result: Any) -> Reply:
        if inspect.iscoroutine(result):
            result.close()
            return cls(None, "returned a coroutine; declare it with `async def`")
        try:
            return cls(plain(result))
        except (ValueError, TypeError, RecursionError) as error:
            return cls(None, f"returned what is no plain data: {error}")


def as_plain(value: Any) -> Any:
    """Numbers and lists of numpy and torch, text of anything else."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def plain(value: Any) -> Any:
    """As JSON has it, other objects as text. Halves of characters, which UTF-8 and tokenizers do
    not know, become "?"."""
    text = json.dumps(value, default=as_plain, ensure_ascii=False)
    return json.loads(text.encode(errors="replace").decode())


KINDS: dict[str, type[Outcome] | type[Reply]] = {"Outcome": Outcome, "Reply": Reply}


def call(
    function: Callable[..., Any], arguments: dict[str, Any],
    kind: type[Outcome] | type[Reply] = Outcome,
) -> Outcome | Reply:  # fmt: skip
    try:
        return kind.of(function(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's code may raise anything
        return kind.failed(reason_of(error))


def reason_of(error: BaseException) -> str:
    """The traceback from the reward function on, without the frame that called it."""
    frames = error.__traceback__.tb_next if error.__traceback__ else None
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    return text if len(text) <= MAX_REASON_CHARS else f"... {text[-MAX_REASON_CHARS:]}"


def to_outcome(result: Any) -> Outcome:
    """A number, or a mapping with "score", or with a list of "turns", whose sum is added to the
    score. Of its other entries the numbers are kept for the log.

    Text beside the score is legal and not kept, but for verl's "pred", the answer as the function
    read it; a number there that is not finite makes the sample invalid, since it would spoil every
    mean it enters.
    """
    info: dict[str, float] = {}
    pred: str | None = None
    turns: list[float] | None = None
    score = result
    if isinstance(result, dict):
        given = result.get("turns")
        has_turns = isinstance(given, list | tuple)
        if "score" not in result and not has_turns:
            keys = ", ".join(map(str, result)) or "nothing"
            return not_valid(f"returned a dict without the key 'score' (it has {keys})")
        score, pred = result.get("score", 0.0), to_text(result.get("pred"))
        if has_turns:
            turns = to_numbers(given)
            if turns is None:
                return not_turns(f"returned {shorten(repr(given))} as its turns")
        for key, value in result.items():
            number = to_number(value)
            if key != "score" and number is not None:
                info[str(key)] = number
    reward = to_number(score)
    if reward is None:
        if inspect.iscoroutine(score):
            score.close()
            return not_valid("returned a coroutine; declare it with `async def`")
        kind = "" if score is None else f"{type(score).__name__} "
        return not_valid(f"returned {kind}{shorten(repr(score))}")
    for key, number in [("score", reward), *info.items()]:
        if not abs(number) < LARGEST:  # nan too
            return not_valid(f"returned {number} as its {key}")
    if turns is None:
        return Outcome(reward, info, None, pred)
    for i, number in enumerate(turns, start=1):
        if not abs(number) < LARGEST:
            return not_turns(f"returned {number} for turn {i} of {len(turns)}")
    total = math.fsum([reward, *turns])
    if not abs(total) < LARGEST:
        return not_turns(f"returned {len(turns)} turns that make its reward {total}")
    return Outcome(total, info, None, pred, turns)


def to_text(value: Any) -> str | None:
    """Text or a number as text that fits into UTF-8; None for anything else."""
    number = to_number(value)
    text = value if isinstance(value, str) else None if number is None else str(number)
    return text and str(text)[:MAX_PRED_CHARS].encode(errors="replace").decode()


def not_valid(what: str) -> Outcome:
    return Outcome.failed(
        f"the reward function {what}; expected a finite number, or a dict with a finite number "
        "under 'score'; with rewards.per_turn a dict with a list of them under 'turns'"
    )


def not_turns(what: str) -> Outcome:
    return Outcome.failed(
        f"the reward function {what}; expected a list of finite numbers, one for each turn of the "
        "policy's, with rewards.per_turn=True, and no such entry without"
    )


def to_number(value: Any) -> float | None:
    """Python numbers, and scalars of numpy and torch; None for anything else."""
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return to_number(value.item())
    return None


def to_numbers(values: Any) -> list[float] | None:
    """None where any is not what to_number knows."""
    numbers: list[float] = []
    for each in values:
        number = to_number(each)
        if number is None:
            return None
        numbers.append(number)
    return numbers


def shorten(text: str, most: int = 80) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def die_with(parent: int) -> None:
    """Has the kernel end this process with the trainer, however the trainer ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the line above
        sys.exit(1)


def load(setup: dict[str, Any]) -> list[Callable[..., Any]]:
    sys.path[:] = setup["sys_path"]
    for module in setup["imports"]:
        importlib.import_module(module)
    return pickle.loads(setup["functions"])


def main(fd: int, parent: int) -> None:
    die_with(parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # meant for the trainer, which
        signal.signal(number, lambda *_: None)  # may want to end its step; children take defaults
    os.set_inheritable(fd, False)  # a child of the reward function must not keep the pipe open
    with contextlib.suppress(EOFError, ConnectionError):  # the trainer has gone: nobody to tell
        serve(Connection(fd))


def serve(pipe: Connection) -> None:
    """Loads the functions, then answers calls. What user code raises is an answer too."""
    setup = pipe.recv()
    kind = KINDS[setup["kind"]]
    try:
        functions = load(setup)
    except (Exception, SystemExit) as error:  # noqa: BLE001  a user's module may raise anything
        pipe.send(reason_of(error))
        return
    pipe.send(READY)
    while True:
        index, arguments = pipe.recv()
        pipe.send(tuple(call(functions[index], arguments, kind)))  # not the trainer's class


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
