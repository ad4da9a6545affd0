r"""Built-in rewards: 1.0 for a right answer, 0.0 for a wrong or missing one.

A reward is a plain function that names what it wants to know (`runner.ARGUMENTS`). A reference
answer that cannot be understood raises, so the sample becomes invalid instead of scoring 0.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal, InvalidOperation
from types import FrameType
from typing import Any, Literal, TypedDict

from spmdrl.rewards import sandbox
from spmdrl.rewards.code import code

# Digits with comma groups and decimals; possessive, so that a match cannot end inside a number.
DIGITS = r"(?:\d[\d,]*+(?:\.\d*+)?|\.\d++)"
# The sign may stand on either side of the dollar. "#### 7/8" is not the answer 7.
MARKED = re.compile(rf"####\s*(-?\s?\$?\s?-?{DIGITS})(?!\s*[-+*/^]\s*\d|[eE]\d)")
ANY_NUMBER = re.compile(rf"(?:(?<![\w.)])-\$?|\$-?)?{DIGITS}")  # the minus in "7-2" is no sign
MATH_TAIL_CHARS = 1000  # of a response without a box; 100,000 digits in a row take minutes
MATH_LIMIT_S = 10  # sympy can think for ever about an answer like 9^{9^{9^9}}


Method = Literal["strict", "flexible"]


class Verdict(TypedDict):
    """What the built-in rewards return, for maj@k too; the functions of their names the score."""

    score: float
    pred: str  # the answer that was found; "": none


def gsm8k(response: str, ground_truth: Any, method: Method = "strict") -> float:
    """Compares numbers by value: "1,080", "$1080" and "1080.00" are the same answer.

    strict: the number after the last "####", which also teaches the format (verl's default).
    flexible: the last number of the response, wherever it stands.
    Raises ValueError where `ground_truth` is not a number.
    """
    return graded_gsm8k(response, ground_truth, method)["score"]


def graded_gsm8k(response: str, ground_truth: Any, method: Method = "strict") -> Verdict:
    right = to_decimal(str(ground_truth).rpartition("####")[2])
    if right is None:
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    found = (MARKED if method == "strict" else ANY_NUMBER).findall(response)
    answer = to_decimal(found[-1]) if found else None
    pred = "" if answer is None else f"{answer.normalize():f}"  # 5 and 5.00 are one vote
    return {"score": float(answer == right), "pred": pred}


def to_decimal(text: str) -> Decimal | None:
    """-$1,080. -> Decimal(-1080); None for what is not a number."""
    digits = re.sub(r"[\s,$]", "", text).removesuffix(".")
    try:
        value = Decimal(digits)
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def math(response: str, ground_truth: Any) -> float:
    r"""Mathematical equality by math-verify: 1/2 is \frac{1}{2} is 0.5.

    Looks into the last \boxed{}; without one, at the last LaTeX and plain numbers. `ground_truth`
    may be bare LaTeX ("\\frac{1}{2}") or have its own \boxed{} or dollar signs.
    Raises ValueError where `ground_truth` has no answer in it, TimeoutError after MATH_LIMIT_S.
    Call it in a main thread, as reward workers do: the limit is a signal.
    """
    return graded_math(response, ground_truth)["score"]


def graded_math(response: str, ground_truth: Any) -> Verdict:
    # Slow (sympy) and needed here only; workers import it before any clock starts: IMPORTED_FIRST.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its own limits are off
    right_text = str(ground_truth)
    if "\\boxed" not in right_text and "$" not in right_text:
        right_text = f"\\boxed{{{right_text}}}"
    where = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    # math-verify's own limits would turn a time-out into "wrong", that is, into a reward of 0.
    with time_limit(MATH_LIMIT_S):
        right = parse(right_text, where, parsing_timeout=None)
        if not right:
            raise ValueError(f"ground_truth {ground_truth!r} has no answer that can be parsed")
        # math-verify would read several boxes as one answer of several parts.
        box = response.rfind("\\boxed")
        text = response[box:] if box >= 0 else response[-MATH_TAIL_CHARS:]
        answer = parse(text, where, parsing_timeout=None)
        pred = next((part for part in answer if isinstance(part, str)), "")
        return {"score": float(verify(right, answer, timeout_seconds=None)), "pred": pred}


class _TimeIsUp(BaseException):
    """Not an Exception: math-verify catches those."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raises TimeoutError when the block takes longer. Main thread only."""

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    except _TimeIsUp:
        raise TimeoutError(f"the answer could not be compared within {limit_s} s") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def model(model_score: float) -> float:
    """What the reward model says (PpoConfig.reward_model)."""
    return model_score


BUILT_INS: dict[str, Callable[..., Any]] = {
    "model": model,
    "gsm8k": graded_gsm8k,
    "math": graded_math,
    "code": code,
}
IMPORTED_FIRST: dict[Callable[..., Any], str] = dict.fromkeys((math, graded_math), "math_verify")
CHECKED_FIRST: dict[Callable[..., Any], Callable[[], None]] = {code: sandbox.check}
