"""Finds who answers a turn without a tool call: one environment, or one per data_source.

An environment is a function, or a class of which each sample has an object. What it returns is a
reply to the policy; it may say beside it what the turn was worth, and that the sample is over.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmdrl.config import ConfigError, Environment
from spmdrl.rewards.workers.caller import arguments_of
from spmdrl.rewards.workers.pool import innermost, name_of
from spmdrl.rewards.workers.stateful_tools import Made, Objects
from spmdrl.types import Message, Prompt

STEP = "step"  # the method of a class that answers a turn
OBSERVATION, REWARD, DONE = "observation", "reward", "done"  # keys of what a scored step returns
STEP_KEYS = {OBSERVATION, REWARD, DONE}
RECORD = "environment"  # the role of what is noted of a turn and not said to the policy
UNREAD = "unread_calls"  # key of a turn whose tools' replies do not fit into the sample
MOST_NOTED = 2000  # characters of an observation that nobody answers

# What an environment can ask for by naming a parameter.
ARGUMENTS: dict[str, Callable[[Turn], Any]] = {
    "messages": lambda turn: turn.chat,
    "ground_truth": lambda turn: turn.prompt.ground_truth,
    "data_source": lambda turn: turn.prompt.data_source,
    "extra_info": lambda turn: turn.prompt.extra_info,
    "sample_index": lambda turn: turn.sample_index,
    "num_turns": lambda turn: turn.number,
}
OBJECT_TAKES = ("ground_truth", "data_source", "extra_info", "sample_index")


class Turn(NamedTuple):
    """The policy has spoken: what an environment is told."""

    prompt: Prompt
    sample_index: int  # which of the prompt's
    chat: list[Message]  # from the prompt on, this turn included
    number: int  # 1: the first


@dataclass(frozen=True)
class Answerer:
    """An environment, and which of ARGUMENTS it takes."""

    called: Callable[..., Any]  # the function, or the Objects of a class
    takes: tuple[str, ...]

    def given(self, turn: Turn) -> dict[str, Any]:
        return {name: ARGUMENTS[name](turn) for name in self.takes}


def resolve_environments(
    environment: Environment | Mapping[str, Environment | None] | None,
) -> dict[str | None, Answerer | None]:
    """Returns the environments by data_source; None stands for every data_source, and for none.

    Raises ConfigError.
    """
    if not isinstance(environment, Mapping):
        return {None: resolve_environment(environment)}
    if not any(environment.values()):
        raise ConfigError(
            "`environment` maps no data_source to an environment; expected {data_source: function, "
            "class or None}"
        )
    return {source: resolve_environment(each) for source, each in environment.items()}


def resolve_environment(environment: Environment | None) -> Answerer | None:
    if environment is None:
        return None
    if not callable(environment):
        raise ConfigError(f"an environment is a function or a class, got {environment!r}")
    if not inspect.isclass(innermost(environment)):
        return Answerer(environment, arguments_of(environment, ARGUMENTS, "environment"))
    check_step(innermost(environment))
    takes = arguments_of(environment, OBJECT_TAKES, "environment")
    return Answerer(Objects(environment, takes), takes)


def check_step(cls: Any) -> None:
    """Raises ConfigError for a class that cannot answer turns."""
    method = inspect.getattr_static(cls, STEP, None)
    if not inspect.isfunction(method) or inspect.iscoroutinefunction(method):
        raise ConfigError(
            f"the environment {cls.__qualname__} has no plain method `{STEP}(self, action: str)`, "
            "which answers a turn of the policy's"
        )
    try:
        inspect.signature(method).bind(None, action="")
    except TypeError as error:
        raise ConfigError(
            f"{cls.__qualname__}.{STEP} is called with `action`, the text of a turn: {error}"
        ) from error


def environment_of(
    environments: Mapping[str | None, Answerer | None], data_source: str
) -> Answerer | None:
    """Returns the one of a data_source. Raises ConfigError where the mapping does not name it."""
    name = data_source if data_source in environments else None
    if name not in environments:
        raise ConfigError(
            f"`environment` has no data_source {data_source!r}; it has "
            f"{', '.join(map(repr, environments))}. None stands for no environment"
        )
    return environments[name]


def check_environments(
    environment: Environment | Mapping[str, Environment | None] | None, data_sources: Iterable[str]
) -> None:
    """Raises ConfigError where the environment of a data_source is not named."""
    environments = resolve_environments(environment)
    for source in data_sources:
        environment_of(environments, source)


def environment_names(environments: Mapping[str | None, Answerer | None]) -> list[str]:
    """Returns what a dry run calls them."""
    return [
        f"environment {name_of(found.called)}" + (f" of {source}" if source is not None else "")
        for source, found in environments.items()
        if found is not None
    ]


# ---- what a step is worth


def split_step(value: Any) -> tuple[Any, Message | None, str]:
    """(what is said to the policy, the record of the turn, what is wrong), of what an environment
    returned. There is a record where it returned {"observation": ..., "reward": ..., "done": ...}.
    """
    if not isinstance(value, dict) or OBSERVATION not in value or not value.keys() <= STEP_KEYS:
        return value, None, ""
    reward, observation = value.get(REWARD, 0.0), value[OBSERVATION]
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        return None, None, f"{str(reward)[:80]} as a step's reward; expected a finite number"
    done = value.get(DONE)
    if not isinstance(done, int | float | None):  # text "no" would end the dialogue
        return None, None, f"{str(done)[:80]!r} as a step's done; expected True or False"
    is_over = bool(done) or observation is None
    record = record_of(float(reward), observation if is_over else None)
    return None if is_over else observation, record, ""


def record_of(reward: float, observation: Any = None) -> Message:
    """Returns what is noted of a turn. observation: the last one, which is not said to the
    policy."""
    seen = {OBSERVATION: observation[:MOST_NOTED]} if isinstance(observation, str) else {}
    return {"role": RECORD, "content": "", REWARD: reward, **seen}


def record_of_unread(messages: Sequence[Message]) -> list[Message]:
    """Returns what is noted of tools' replies that do not fit into the sample: a record without
    their content; [] where no tool has replied.
    """
    unread = [
        {key: message[key] for key in ("role", "name", "is_error") if key in message}
        for message in messages
        if message["role"] == "tool"
    ]
    return [{"role": RECORD, "content": "", UNREAD: unread}] if unread else []


def is_record(message: Message) -> bool:
    return message["role"] == RECORD and (REWARD in message or UNREAD in message)


def noted(reply: Sequence[Message]) -> Message:
    """Returns what a turn's own message has of the records in the reply to it."""
    records = [message for message in reply if is_record(message)]
    return {key: r[key] for r in records for key in (REWARD, OBSERVATION, UNREAD) if key in r}


def steps_of(messages: Sequence[Message]) -> list[Made]:
    """Returns the calls of an environment's object by which it answered earlier turns."""
    return [
        (STEP, {"action": message["content"]})
        for message in messages
        if message["role"] == "assistant" and REWARD in message
    ]
