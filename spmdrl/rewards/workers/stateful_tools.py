"""Tools with a state: a class, of which every sample has an object of its own.

An object is what its class makes of the prompt and of the calls that were made of it, in order. So
it lives wherever the sample is: a worker process keeps it, and makes it anew from the calls before
where it has it no longer, because the sample goes on in another engine in the next step or after a
resume, or because an endless call was killed with its process. Workers import this; standard
library only.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FunctionType
from typing import Any, TypeVar

from spmdrl.rewards.workers import worker

# of a class that a worker keeps; the one that rested longest goes first, which is one whose sample
# went elsewhere: others are given up when they are over
MOST_OBJECTS = 4096
CLOSE = "close"  # a method that is no tool: called once an object is not needed any more
CALLED_WITH = "arguments"  # in a tool's message: of a call that has changed an object

T = TypeVar("T")
Made = tuple[str, dict[str, Any]]  # a call: method, arguments


def methods_of(cls: type) -> dict[str, FunctionType]:
    """The tools of a class, by name: its public methods. Raises ValueError for what is none."""
    found = {}
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if name.startswith("_") or name == CLOSE:
            continue
        is_coroutine = inspect.iscoroutinefunction(method)
        if is_coroutine or isinstance(method, staticmethod | classmethod):
            raise ValueError(
                f"{name} is a {'coroutine' if is_coroutine else type(method).__name__}; a tool "
                "with a state has plain methods, others begin with an underscore"
            )
        if isinstance(method, FunctionType):
            if method.__name__ != name:
                raise ValueError(f"the method {name} calls itself {method.__name__}")
            found[name] = method
        elif callable(method) and not isinstance(method, type):
            raise ValueError(
                f"{name}, a {type(method).__name__}, is no plain method; what is no tool begins "
                "with an underscore"
            )
    return found


class Objects:
    """The objects of one class; called in a worker process, for one sample at a time."""

    def __init__(self, cls: Any, takes: Sequence[str] = ()) -> None:
        """cls: a class, or a partial of one. takes: names of the arguments that it is made with."""
        self.cls, self.takes = cls, takes
        self.kept: OrderedDict[str, tuple[list[str], Any]] = OrderedDict()  # calls so far, object

    def __call__(
        self, key: str, given: dict[str, Any], before: Sequence[Made], calls: Sequence[Made]
    ) -> list[Any]:
        """A worker.Reply to each of `calls`, made one after the other; `before`: those there were.

        key: of the sample. given: to the class. Without `calls` the object is given up.
        """
        told = json.dumps(given, default=str, sort_keys=True)  # of rows of two data sets, say
        history = [told, *(json.dumps(call) for call in before)]
        has_had, found = self.kept.pop(key, (None, None))
        if has_had is not None and (has_had != history or not calls):
            close(found)
        if not calls:
            return []
        if has_had != history:
            found = remade(self.cls, given, before)
        history += [json.dumps(call) for call in calls]
        replies = [
            worker.call(getattr(found, name), arguments, worker.Reply) for name, arguments in calls
        ]
        self.kept[key] = history, found
        if len(self.kept) > MOST_OBJECTS:
            _, (_, oldest) = self.kept.popitem(last=False)
            close(oldest)
        return replies


def remade(cls: Callable[..., T], given: dict[str, Any], before: Sequence[Made]) -> T:
    made = cls(**copy.deepcopy(given))  # the data's are not its to change
    for name, arguments in before:
        with suppress(BaseException):  # which the policy was told then
            getattr(made, name)(**copy.deepcopy(arguments))
    return made


def close(found: Any) -> None:
    if callable(end := getattr(found, CLOSE, None)):
        with suppress(BaseException):  # whoever is served next has no part in it
            end()


def calls_of(cls: type, messages: Sequence[dict[str, Any]]) -> list[Made]:
    """The calls of an object of `cls`, as the messages of a sample tell them."""
    names = methods_of(cls)
    return [
        (m["name"], m[CALLED_WITH])
        for m in messages
        if m["role"] == "tool" and CALLED_WITH in m and m["name"] in names
    ]


def rebuild(cls: Callable[..., T], messages: Sequence[dict[str, Any]], **given: Any) -> T:
    """The object of a sample as its last call left it, for a reward function, which closes it.

    messages: what a reward function gets under that name. given: arguments of the class.
    """
    assert isinstance(cls, type)
    return remade(cls, given, calls_of(cls, messages))
