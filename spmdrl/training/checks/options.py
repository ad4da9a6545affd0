"""Checks the names of the policy loss and the estimator, and the options that a config gives them.

The options of a loss or an estimator are the keyword-only parameters of its function, see
spmdrl/algo/options.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, Literal

from spmdrl.algo.advantages import ESTIMATORS, Estimator, estimator_of
from spmdrl.algo.losses import POLICY_LOSSES, PolicyLoss, loss_of
from spmdrl.algo.options import Option, options_of, parameters_of, takes_any_option
from spmdrl.algo.own_functions import name_of
from spmdrl.cli.arguments import converted
from spmdrl.config import PAIR_LOSSES, AlgoConfig, ConfigError, require


def check_all_options(algo: AlgoConfig) -> None:
    """Raises ConfigError for an unknown name, and for options that the function does not have or
    whose values are out of range.
    """
    check_name("algo.advantage", algo.advantage, ESTIMATORS)
    check_name("algo.policy_loss", algo.policy_loss, [*POLICY_LOSSES, *PAIR_LOSSES])
    check_kind("algo.advantage", algo.advantage, PolicyLoss)
    check_kind("algo.policy_loss", algo.policy_loss, Estimator)
    estimator, loss = estimator_of(algo), loss_of(algo)
    check_options("algo.advantage_args", algo.advantage_args, estimator.function, algo.advantage)
    check_options("algo.loss_args", algo.loss_args, loss.function, algo.policy_loss)
    check_inputs("algo.advantage", estimator.function, (estimator.sees,))
    inputs = ("logprobs", "old_logprobs", "mb") if loss.pairs is None else ("answers",)
    check_inputs("algo.policy_loss", loss.function, inputs)


# what a group of options is of
CHOSEN_BY = {
    "algo.advantage_args": "advantage", "algo.loss_args": "policy_loss",
    "preference.loss_args": "loss",
}  # fmt: skip


def check_name(field: str, value: Any, known: Iterable[str]) -> None:
    if isinstance(value, str):
        converted(value, Literal[tuple(known)], field)  # raises, with the names and the nearest


def check_kind(field: str, value: Any, other: type) -> None:
    is_wrong = isinstance(value, other | type)
    require(not is_wrong, f"{field}={shown(value)}: a name or a function is needed, not {value!r}")


def check_options(
    field: str, args: Mapping[str, Any], function: Callable[..., Any], chosen: Any
) -> None:
    """field: one of CHOSEN_BY; chosen: the name or function of the config."""
    try:
        options = options_of(function)
    except NameError as error:
        raise ConfigError(
            f"{field}: the annotations of {shown(chosen)} are not defined at run time: {error}"
        ) from error
    what = f"{CHOSEN_BY[field]}={shown(chosen)}"
    for name, value in args.items():
        if name in options:
            check_option(f"{field}[{name!r}]", value, options[name])
            continue
        has = f"it has {', '.join(options)}" if options else "it has none"
        require(takes_any_option(function), f"{field}: {what} has no option {name!r}; {has}")
    missing = [n for n, o in options.items() if o.default is inspect.Parameter.empty]
    missing = [name for name in missing if name not in args]
    require(not missing, f"{field}: {what} needs the option {', '.join(missing)}")


def check_option(place: str, value: Any, option: Option) -> None:
    converted(value, option.type, place)  # raises for a wrong type
    if not isinstance(value, int | float):
        return
    require(isfinite(value), f"{place}={value} is not a finite number")
    if option.range is not None:
        require(option.range.holds(value), f"{place}={value} must be {option.range.text}")


def check_inputs(field: str, function: Callable[..., Any], inputs: tuple[str, ...]) -> None:
    """Raises ConfigError for a function of the user's that takes other inputs than these."""
    parameters = list(parameters_of(function).values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    takes_all = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    require(
        not parameters
        or len(required) <= len(inputs) <= (len(inputs) if takes_all else len(positional)),
        f"{field}: {shown(function)} must be f({', '.join(inputs)}, *, options), and its inputs "
        f"are {', '.join(p.name for p in positional) or 'none'}; what it reads of the config "
        "belongs to its options, which are keyword-only",
    )


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def shown(value: Any) -> str:
    """Returns a name as it stands in the config, or the name of a function."""
    return name_of(getattr(value, "function", value)) if callable(value) else repr(value)
