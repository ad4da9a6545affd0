"""The options of a policy loss or an estimator are the keyword-only parameters of its function.

    def sapo(logprobs, old_logprobs, mb, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05): ...

A run sets them by name: algo.loss_args={"tau_pos": 2.0}, or algo.advantage_args for an estimator.
So no option can be set that nothing reads. The annotation of a parameter is its type and its range;
`spmdrl/training/checks/options.py` checks both before a run starts.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated, Any

from spmdrl.cli.arguments import converted


@dataclass(frozen=True)
class Range:
    """The numbers that an option may have."""

    text: str  # what an error says that the number must be
    holds: Callable[[float], bool]


Positive = Annotated[float, Range("above 0", lambda x: x > 0)]
AboveOne = Annotated[float, Range("above 1", lambda x: x > 1)]
BelowOne = Annotated[float, Range("above 0 and below 1", lambda x: 0 < x < 1)]
NotNegative = Annotated[float, Range("at least 0", lambda x: x >= 0)]
BelowHalf = Annotated[float, Range("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)]
UnitInterval = Annotated[float, Range("in 0..1", lambda x: 0 <= x <= 1)]
Fraction = Annotated[float, Range("in (0, 1]", lambda x: 0 < x <= 1)]


@dataclass(frozen=True)
class Option:
    """A keyword-only parameter of a loss or an estimator."""

    default: Any  # inspect.Parameter.empty where the run has to set it
    type: Any  # Any where the function does not say
    range: Range | None


def options_of(function: Callable[..., Any]) -> dict[str, Option]:
    """Returns the options of a function by name, in the order in which it has them.

    Raises NameError where the annotation of an option names what is not defined at run time.
    """
    return {
        name: Option(parameter.default, *type_and_range(function, parameter))
        for name, parameter in parameters_of(function).items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def takes_any_option(function: Callable[..., Any]) -> bool:
    """Says whether the function has a parameter `**options`, which takes options of any name."""
    kinds = [parameter.kind for parameter in parameters_of(function).values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def given_options(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that `args` sets, each as the type that the function declares: 4 as 4.0
    where it is a float. Raises ConfigError for a value of another type.
    """
    options = options_of(function)
    return {
        name: converted(value, options[name].type, name) if name in options else value
        for name, value in args.items()
    }


def option_values(function: Callable[..., Any], args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the value of every option: what `args` sets, else the default."""
    defaults = {name: option.default for name, option in options_of(function).items()}
    return defaults | given_options(function, args)


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of a function; none of a builtin that does not tell them."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return {}


def type_and_range(
    function: Callable[..., Any], parameter: inspect.Parameter
) -> tuple[Any, Range | None]:
    """Returns the type and the range that the annotation of a parameter gives."""
    if parameter.annotation is inspect.Parameter.empty:
        return Any, None
    holder = SimpleNamespace(__annotations__={"option": parameter.annotation})
    space = globals_of(function)
    hint = typing.get_type_hints(holder, space, include_extras=True)["option"]
    return typing.get_type_hints(holder, space)["option"], range_of(hint)


def globals_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the names that the annotations of a function may use: those of its module."""
    while isinstance(function, partial):
        function = function.func
    if not inspect.isroutine(function) and not isinstance(function, type):
        function = type(function).__call__
    return getattr(inspect.unwrap(function), "__globals__", {})


def range_of(hint: Any) -> Range | None:
    """Returns the range in an annotation such as Positive or Positive | None."""
    for part in (hint, *typing.get_args(hint)):
        for extra in getattr(part, "__metadata__", ()):
            if isinstance(extra, Range):
                return extra
    return None
