r"""Built-in rewards: 1.0 for a right answer, 0.0 for a wrong or missing one.

A reward is a plain function that names what it wants to know (`runner.ARGUMENTS`). A reference
answer that cannot be understood raises, so the sample becomes invalid instead of scoring 0.
"""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal, InvalidOperation
from types import FrameType
from typing import Any, Literal, TypedDict

from spmdrl.rewards.code import code
from spmdrl.rewards.instructions import check_installed, ifeval
from spmdrl.rewards.math_cost import MOST_CHARS, too_costly
from spmdrl.rewards.sandbox import sandbox

# Digits with comma groups and decimals; possessive, so that a match cannot end inside a number.
DIGITS = r"(?:\d[\d,]*+(?:\.\d*+)?|\.\d++)"
# The sign may stand on either side of the dollar. "#### 7/8" is not the answer 7.
MARKED = re.compile(rf"####\s*(-?\s?\$?\s?-?{DIGITS})(?!\s*[-+*/^]\s*\d|[eE]\d)")
ANY_NUMBER = re.compile(rf"(?:(?<![\w.)])-\$?|\$-?)?{DIGITS}")  # the minus in "7-2" is no sign
MATH_TAIL_CHARS = 1000  # of a response without a box; 100,000 digits in a row take minutes
MATH_TAIL_LINES = 16  # of those characters, where all of them would take too long
MATH_LIMIT_S = 3  # of the CPU's time, where simplifying takes longer than math_cost.py expects
ALARM_AGAIN_S = 0.1
MOST_SHOWN = 80  # characters of a reference answer in an error
EQUAL_WITHIN = 0.01  # 1/3 = 0.33 is no false equation
BOXED = re.compile(r"\\boxed\s*\{(.*)\}", re.DOTALL)
# "65536!" and "is **65536**" are no factorial and no power, unless in what is taken for LaTeX
LATEX_OR_MARKS = re.compile(
    r"(?<!\\)\$\$.*?\$\$|(?<!\\)\$[^$\n]*\$|\\\[.*?\\\]|\\\(.*?\\\)|\s\[[^][\n]+\]"
    r"|(?P<mark>(?<!\\)!+(?!=)|(?<![\w)*.])\*\*(?=[^\s*])|(?<=[^\s*])\*\*(?![\w(*]|\.\d))",
    re.DOTALL,
)
FRACTION = re.compile(r"\\[dt]frac")
NO_MEANING = re.compile(r"(?<!\d)\s+|\s+(?!\d)|\\left|\\right|\\[,;:! ]|\$")
PERCENT = re.compile(r"\s*(?:\\?%|[Pp]ercent(?:age)?\b|[Pp]ct\b)")
# 1 \text{ h} = 60 \text{ min}, 180^\circ = \pi, 1011_2 = 11, 17 \equiv 3: no false equations
WITH_UNITS = re.compile(
    r"\\(?:text|math|mbox|circ|deg|equiv|approx|p?mod)|[_°]|(?<![\\a-zA-Z])[a-zA-Z]{2}"
)


Method = Literal["strict", "flexible"]


class Verdict(TypedDict):
    """The verdict of the built-in rewards, for maj@k too; the functions of their names return the
    score.
    """

    score: float
    pred: str  # the answer that was found; "": none


class MathVerdict(Verdict):
    not_compared: float  # 1: it would have taken too long, and scores 0


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
    may be bare LaTeX ("\\frac{1}{2}") or have its own dollar signs; of a worked solution counts the
    last \boxed{}, or without one what stands behind the last "####". What would take too
    long to compare (math_cost.py, MATH_LIMIT_S) is right only if it is the ground truth letter by
    letter.
    Raises ValueError where `ground_truth` has no answer in it, TimeoutError where it takes longer
    than MATH_LIMIT_S to parse. Call it in a main thread, as reward workers do: the limit is a
    signal.
    """
    return graded_math(response, ground_truth)["score"]


def graded_math(response: str, ground_truth: Any) -> MathVerdict:
    right_text = truth_text(ground_truth)
    text = answer_text(response)
    if not (is_costly(text) or is_costly(right_text)):
        with time_limit(MATH_LIMIT_S):
            right = parsed(right_text)
        if not right:
            raise ValueError(f"ground_truth {ground_truth!r} has no answer that can be parsed")
        with suppress(TimeoutError):
            return compared(text, right)
    same = bare(text) == bare(right_text)
    return {"score": float(same), "pred": bare(text), "not_compared": 1.0}


def truth_text(ground_truth: Any) -> str:
    """Returns the reference answer, of a worked solution its result, as it is compared."""
    text = str(ground_truth)
    if "\\boxed" in text:
        return answer_text(text)
    text = text.rpartition("####")[2].strip()
    return text if "$" in text else f"\\boxed{{{text}}}"


def check_math_truth(ground_truth: Any) -> None:
    """Raises ValueError for one that takes too long to be compared."""
    if is_costly(truth_text(ground_truth)):
        raise ValueError(
            f"{shortened(str(ground_truth))!r} would take too long to be compared, so that only "
            "the same letters would be right. Give the result alone, within \\boxed{}, or behind "
            "'####'; data.on_bad_row='skip' leaves such rows out"
        )


def shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def compared(text: str, right: list[Any]) -> MathVerdict:
    """Raises TimeoutError where it takes longer than MATH_LIMIT_S."""
    from math_verify import verify

    with time_limit(MATH_LIMIT_S):
        answer = parsed(text)
        pred = next((part for part in answer if isinstance(part, str)), "")
        is_right = verify(right, answer, timeout_seconds=None)
        said = bare(text) if BOXED.match(text) else pred
        if is_right and WITH_UNITS.search(said) is None:
            is_right = not is_false_equation(answer)
        return {"score": float(is_right), "pred": pred, "not_compared": 0.0}


def parsed(text: str) -> list[Any]:
    # Slow (sympy) and needed here only; workers import it before any clock starts: IMPORTED_FIRST.
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # that its own limits are off
    where = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    return list(parse(text, where, parsing_timeout=None))


def is_false_equation(answer: list[Any]) -> bool:
    """Returns True for an answer that says that numbers are equal which differ by more than
    rounding: 1=3, x=1=3.

    math-verify takes the right side of such an equation for the answer.
    """
    from sympy import Basic, Eq

    equations = [e for found in answer if isinstance(found, Basic) for e in found.atoms(Eq)]
    for equation in equations:
        left, right = equation.args
        if left.is_number and right.is_number:
            with suppress(TypeError, ValueError, ArithmeticError):  # it has no value
                a, b = complex(left.evalf()), complex(right.evalf())
                if abs(a - b) > EQUAL_WITHIN * max(abs(a), abs(b)):
                    return True
    return False


def answer_text(response: str) -> str:
    r"""The last \boxed{} with a percent sign behind it; without one the end of the response, or as
    many of its last lines as do not take too long.

    math-verify would read several boxes as one answer of several parts.
    """
    begin = response.rfind("\\boxed")
    if begin < 0:
        return cheap_end(without_marks(response[-MATH_TAIL_CHARS:]))
    depth = 0
    for i, char in enumerate(response[begin : begin + MATH_TAIL_CHARS], start=begin):
        depth += (char == "{") - (char == "}")
        if char == "}" and depth <= 0:
            percent = PERCENT.match(response, i + 1)
            return response[begin : percent.end() if percent else i + 1]
    return response[begin : begin + MATH_TAIL_CHARS + 1]  # too long, unless it is all there is


def without_marks(text: str) -> str:
    """Without the exclamation marks and the bold type of its prose."""
    return LATEX_OR_MARKS.sub(lambda found: "" if found["mark"] else found[0], text)


def cheap_end(text: str) -> str:
    """All of it, or the most of its last lines that do not take too long; at least the last."""
    if not is_costly(text):
        return text
    lines = text.rstrip().split("\n")[-MATH_TAIL_LINES:]
    ends = ["\n".join(lines[i:]) for i in range(len(lines))]
    return next((end for end in ends if not is_costly(end)), ends[-1])


def is_costly(text: str) -> bool:
    """Returns True if a text is too costly to parse: of a box what is in it, of prose the numbers
    and brackets in it.
    """
    boxed = BOXED.match(text)
    return too_costly(boxed[1], MOST_CHARS) if boxed else too_costly(text, MATH_TAIL_CHARS)


def bare(text: str) -> str:
    """Returns what is in the box, without what does not change its meaning."""
    boxed = BOXED.match(text)
    return NO_MEANING.sub("", FRACTION.sub(r"\\frac", boxed[1] if boxed else text))


class _TimeIsUp(BaseException):
    """Not an Exception: math-verify catches those."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Raises TimeoutError when the block takes more of the CPU's time. Main thread only.

    The alarm goes on until the block has ended: Python swallows what is raised while it runs an
    object's __del__.
    """

    def on_alarm(_signal: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGPROF, on_alarm)
    signal.setitimer(signal.ITIMER_PROF, limit_s, ALARM_AGAIN_S)
    try:
        yield
    except _TimeIsUp:
        raise TimeoutError(f"the answer could not be compared within {limit_s} s") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def model(model_score: float) -> float:
    """Returns what the reward model says (PpoConfig.reward_model)."""
    return model_score


def agent(agent_output: Any) -> Any:
    """Returns what the agent returned (PpoConfig.agent): a number, or a dict with one."""
    return agent_output


def judge(judge_score: float) -> float:
    """Returns what the judge says (PpoConfig.judge)."""
    return judge_score


BUILT_INS: dict[str, Callable[..., Any]] = {
    "model": model,
    "agent": agent,
    "judge": judge,
    "gsm8k": graded_gsm8k,
    "math": graded_math,
    "code": code,
    "ifeval": ifeval,
}
IMPORTED_FIRST: dict[Callable[..., Any], str] = {
    math: "math_verify", graded_math: "math_verify", ifeval: "spmdrl.rewards.ifeval_checks",
}  # fmt: skip
CHECKED_FIRST: dict[Callable[..., Any], Callable[[], None]] = {
    code: sandbox.check, ifeval: check_installed,
}  # fmt: skip
