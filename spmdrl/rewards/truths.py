"""Whether a row's reference answer is one that its built-in reward can read.

Asked when the data is loaded: else every sample of the row would be left without a reward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from spmdrl.rewards.builtin import (
    BUILT_INS,
    check_math_truth,
    graded_gsm8k,
    graded_math,
    gsm8k,
    math,
    to_decimal,
)
from spmdrl.rewards.code import code, read_tests
from spmdrl.rewards.instructions import ifeval, read_instructions
from spmdrl.rewards.runner import Rewards
from spmdrl.rewards.sandbox.remote import check_tests
from spmdrl.rewards.workers.pool import innermost


def read_number(ground_truth: Any) -> None:
    """Raises ValueError where gsm8k finds no number."""
    if to_decimal(str(ground_truth).rpartition("####")[2]) is None:
        raise ValueError(f"{ground_truth!r} is not a number")


# what raises where a ground truth is of no use; math's parser itself is too slow for every row
READERS: tuple[tuple[Callable[..., Any], Callable[[Any], Any]], ...] = (
    (gsm8k, read_number), (graded_gsm8k, read_number), (code, read_tests),
    (ifeval, read_instructions), (math, check_math_truth), (graded_math, check_math_truth),
)  # fmt: skip


def check_kind(function: Any, ground_truth: Any) -> None:
    """Raises ValueError where a reward's remote sandbox cannot be trusted with a row's tests."""
    sandbox = function.keywords.get("sandbox") if isinstance(function, functools.partial) else None
    if sandbox is not None:
        check_tests(sandbox, read_tests(ground_truth)[0])


NOT_READ = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


def truth_checker(reward: Rewards) -> Callable[[str, Any], str | None]:
    """(data_source, ground truth) -> what is wrong with it, or None."""

    def check(data_source: str, ground_truth: Any) -> str | None:
        found = reward.get(data_source) if isinstance(reward, Mapping) else reward
        function = BUILT_INS.get(found) if isinstance(found, str) else found
        inner = innermost(function) if callable(function) else None
        for built_in, read in READERS:
            if inner is built_in:
                try:
                    read(ground_truth)
                    check_kind(function, ground_truth)
                except NOT_READ as error:
                    return f"the reward {built_in.__name__.removeprefix('graded_')!r}: {error}"
        return None

    return check
