"""Calls functions of users, plain or async, off the training thread and limited in time."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import Any

from spmdrl.config import AgentConfig, ConfigError, MultiTurnConfig, RewardConfig
from spmdrl.rewards.workers.async_loop import LoopThread
from spmdrl.rewards.workers.pool import Function, Kind, Limits, WorkerPool, name_of
from spmdrl.rewards.workers.worker import RewardResult


class Caller:
    """Plain functions run in worker processes, coroutines on the event loop of another one.

    All can be killed. Starts the processes at once and in the background. Raises ConfigError for
    limits under which nothing would end, or begin, for a function that returns no value, and for
    one that cannot be sent to a process. Use from one thread; `close` when done. The future of a
    call ends in time: its process answers, or is killed. Its result raises ConfigError where a
    process cannot load the functions.
    """

    def __init__(
        self, functions: Sequence[Function], config: Limits, ranks: int, kind: Kind = RewardResult
    ) -> None:
        """ranks: how many have one, and share the limits for coroutines. kind: see WorkerPool."""
        check(config)
        for function in functions:
            check_returns(function)
        coroutines = [function for function in functions if is_async(function)]
        plain = [function for function in functions if not is_async(function)]
        if coroutines:
            check_shared(config, ranks)
        self.coroutines = {id(function) for function in coroutines}
        self.loop = LoopThread(coroutines, config, ranks, kind) if coroutines else None
        self.pool = WorkerPool(plain, config, kind) if plain else None

    def submit(
        self, function: Function, arguments: dict[str, Any], home: str = "", times: int = 1
    ) -> Future[Any]:
        """home, times: of a plain function, see WorkerPool."""
        if id(function) not in self.coroutines:
            assert self.pool is not None
            return self.pool.submit(function, arguments, home, times)
        assert self.loop is not None
        return self.loop.submit(function, arguments)

    def give_up(self, home: str) -> None:
        """See WorkerPool."""
        if self.pool is not None:
            self.pool.give_up(home)

    def close(self) -> None:
        """Ends the processes."""
        if self.pool is not None:
            self.pool.close()
        if self.loop is not None:
            self.loop.close()


def is_async(function: Function) -> bool:
    """A coroutine function, or an object with an async __call__."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(type(function), "__call__", None)  # noqa: B004
    )


def check_returns(function: Function) -> None:
    """Raises ConfigError for a function with `yield`, whose call returns no value."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"the function {name_of(function)} has `yield`, so a call returns a generator and no "
            "value: use `return`"
        )


def check(config: Limits) -> None:
    """Raises ConfigError for limits under which nothing would end, or begin."""
    name = name_in_config(config)
    if config.workers < 1 or config.timeout_s <= 0:
        raise ConfigError(
            f"{name}.workers={config.workers} and {name}.timeout_s={config.timeout_s:g}: "
            "expected at least one worker and a time limit above 0"
        )
    if config.max_per_minute < 0 or config.max_concurrent < 0:
        raise ConfigError(
            f"{name}.max_concurrent={config.max_concurrent} and {name}.max_per_minute="
            f"{config.max_per_minute:g}: expected 0 (no limit) or more"
        )


def check_shared(config: Limits, ranks: int) -> None:
    """Raises ConfigError where some of the ranks could call nothing."""
    if 0 < config.max_concurrent < ranks:
        role = "reward" if isinstance(config, RewardConfig) else "rollout"
        raise ConfigError(
            f"{name_in_config(config)}.max_concurrent={config.max_concurrent} is shared by {ranks} "
            f"ranks: place `{role}` on at most {config.max_concurrent}"
        )


def name_in_config(config: Limits) -> str:
    names = {RewardConfig: "rewards", MultiTurnConfig: "multi_turn", AgentConfig: "agents"}
    return names[type(config)]


def arguments_of(function: Function, known: Collection[str], what: str) -> tuple[str, ...]:
    """The names in `known` that `function` takes by keyword; all with **kwargs.

    what: it is, "reward" say. Raises ConfigError for a required parameter that is none of them.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"the {what} function {name_of(function)} has no readable signature"
        ) from error
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        names = tuple(known)
    else:
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        names = tuple(p.name for p in parameters if p.kind in by_keyword and p.name in known)
    for p in parameters:
        required = p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        if required and (p.name not in known or p.kind == p.POSITIONAL_ONLY):
            raise ConfigError(
                f"the {what} function {name_of(function)} requires '{p.name}', which is not known "
                f"by keyword. It can take any of {', '.join(known)}; give other parameters a "
                "default."
            )
    return names
