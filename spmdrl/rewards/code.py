r"""The reward for programs: 1.0 where the response's code passes every test, else 0.0.

The code runs in the sandbox (docs/sandbox.md). Right answers stay outside of it and are compared
here, so that a program has nothing to gain by printing a marker, leaving early or changing what
`==` means.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
from collections.abc import Callable
from typing import Any

from spmdrl.config import SandboxConfig
from spmdrl.rewards.sandbox.remote import run_tests_in
from spmdrl.rewards.sandbox.sandbox import (
    USUAL,
    Kind,
    Limits,
    Result,
    SandboxError,
    ask_value,
    run_code,
)
from spmdrl.rewards.sandbox.values import plain

LANGUAGES = ("", "python", "python3", "py")
# No quantifier gives back what it took, so the time is linear in the text.
FENCE = re.compile(r"^[ \t]*+```[ \t]*+(\w*+)[^\n`]*+$", re.MULTILINE)
FUTURE = re.compile(r"^from __future__ import [^\n]*+\n", re.MULTILINE)
TOTAL_S = 25.0  # for all tests of a response; below rewards.timeout_s, whose end is no verdict
LIMITS_HIT = {"time", "cpu", "memory", "output", "processes", "disk"}

Test = tuple[bytes, Any]  # what goes into the sandbox, and what should come out


def code(
    response: str,
    ground_truth: Any,
    limits: Limits = USUAL,
    total_s: float = TOTAL_S,
    sandbox: SandboxConfig | None = None,
) -> dict[str, float]:
    r"""Runs the last ``` block of `response` that is Python or, where there is none, the last one
    that names no language.

    `ground_truth`, as such or as JSON text, is one of
    {"inputs": [...], "outputs": [...]}: a program's stdin and stdout, compared line by line,
    without the space at either end; {"fn_name": ..., "inputs": [arguments, ...], "outputs": ...}:
    values of a function, or of that method of a class Solution, compared as JSON with numbers to
    ten digits; assert statements, as one text or one test each in a list (or in "assert_case").
    A mapping may have a text "before" as well: Python that the program begins with.

    Returns score, passed, total, no_code, and limit_hit: 1 where a limit ended a test. `limits`
    are for a test, `total_s` for all of them; a test that it leaves no time for has not passed.
    `sandbox`: where programs run; None: on this machine.
    Raises ValueError for a ground truth that is none of these, SandboxError where ours failed.
    """
    truth = parsed(ground_truth)
    kind, tests = read_tests(truth)
    program = with_head(head_of(truth), last_block(response))
    results: list[Result] = []
    if program is not None:
        given = [each for each, _ in tests]
        results = run_tests_in(sandbox, program, kind, given, limits, total_s)
    passed = sum(
        is_right(kind, result, right) for result, (_, right) in zip(results, tests, strict=False)
    )
    unjudged = [result.returned for result in results if result.status == "unjudged"]
    if unjudged and passed + len(unjudged) == len(tests):
        raise SandboxError(f"no verdict, since the judge cannot run a test: {unjudged[0]}")
    return {
        "score": float(passed == len(tests)),
        "passed": float(passed),
        "total": float(len(tests)),
        "no_code": float(program is None),
        "limit_hit": float(any(result.status in LIMITS_HIT for result in results)),
    }


def python(code: str) -> str:
    """Runs a Python program and returns what it prints. Every program starts anew.

    Args:
        code: the program; print what you want to know
    """
    return printed(run_code(code))


def python_in(sandbox: SandboxConfig | None) -> Callable[[str], str]:
    """Returns the tool `python` that runs its programs there; None: on this machine."""
    if sandbox is None:
        return python

    @functools.wraps(python)
    def remote(code: str) -> str:
        return printed(run_tests_in(sandbox, code, "run", [b""], USUAL, math.inf)[0])

    return remote


def printed(result: Result) -> str:
    """Returns what a program has printed, and how it ended where that is not as it should."""
    if result.status == "ok" and result.exit_code == 0:
        return result.stdout
    return f"{result.stdout}\n{result.stderr}\n[{result.status}]".strip()


def last_block(response: str) -> str | None:
    """Returns the text of the last ``` block that is Python, else of the last that names no
    language, or None. A block that the end of the response cuts off counts, as it does in verl.
    Takes time linear in the text."""
    last: dict[bool, tuple[int, int]] = {}  # by whether they name Python
    opening = None
    for fence in FENCE.finditer(response):
        if opening is None:
            opening = fence
            continue
        if (language := opening[1].lower()) in LANGUAGES:
            last[language != ""] = opening.end() + 1, fence.start()
        opening = None
    if opening is not None and (language := opening[1].lower()) in LANGUAGES:
        last[language != ""] = opening.end() + 1, len(response)
    found = last.get(True) or last.get(False)
    return response[slice(*found)] if found else None


def head_of(truth: Any) -> str:
    """Returns what the program begins with, "" where the ground truth says nothing of it."""
    return (truth.get("before") or "") if isinstance(truth, dict) else ""


def with_head(head: str, program: str | None) -> str | None:
    """Returns the program with the head before it, but behind imports from __future__, which Python
    wants first.
    """
    if program is None or not head:
        return program
    futures = list(FUTURE.finditer(program))
    begin = futures[-1].end() if futures else 0
    return f"{program[:begin]}{head}\n{program[begin:]}"


def parsed(ground_truth: Any) -> Any:
    """Returns a ground truth with what it has as JSON read. Raises ValueError for a text that
    begins as JSON and is none.
    """
    is_json = isinstance(ground_truth, str) and ground_truth.lstrip()[:1] in ("{", "[")
    return json.loads(ground_truth) if is_json else ground_truth


def read_tests(ground_truth: Any) -> tuple[Kind, list[Test]]:
    """Raises ValueError where there is no test in it."""
    truth = parsed(ground_truth)
    if isinstance(truth, dict) and not isinstance(truth.get("before") or "", str):
        raise ValueError("ground_truth's 'before': expected the text of Python code, or null")
    if isinstance(truth, dict) and "assert_case" in truth:
        truth = truth["assert_case"]
    if isinstance(truth, dict):
        return read_pairs(truth)
    asserts = [truth] if isinstance(truth, str) else truth
    if not isinstance(asserts, list | tuple) or not asserts or not all(map(is_assert, asserts)):
        raise ValueError(
            f"ground_truth {str(ground_truth)[:200]!r} has no tests: expected inputs and outputs, "
            "or assert statements; see docs/sandbox.md"
        )
    for text in asserts:
        if only_defines(text):
            raise ValueError(
                f"ground_truth {text[:200]!r} defines tests and calls none of them, so that every "
                "program would pass: add the call at its end, such as check(f), test_f() or "
                "unittest.main(); see docs/sandbox.md"
            )
    return "assert", [(text.encode(), None) for text in asserts]


def only_defines(text: str) -> bool:
    """Whether no statement of a test does more than to define a name. A text that is no Python is
    for the judge to refuse."""
    try:
        return all(map(is_definition, ast.parse(text, "ground_truth").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def is_definition(statement: ast.stmt) -> bool:
    """Returns True for a def, a class of such statements, an import, a docstring, or an assignment
    without a call, such as the METADATA of HumanEval's tests.
    """
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        return not statement.decorator_list
    if isinstance(statement, ast.ClassDef):
        return not statement.decorator_list and all(map(is_definition, statement.body))
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        return not any(isinstance(node, ast.Call) for node in ast.walk(statement))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass)


def is_assert(text: Any) -> bool:
    return isinstance(text, str) and "assert" in text


def read_pairs(truth: dict[str, Any]) -> tuple[Kind, list[Test]]:
    function = truth.get("fn_name")
    inputs: Any = truth.get("inputs")
    outputs: Any = truth.get("outputs")
    both = isinstance(inputs, list | tuple) and isinstance(outputs, list | tuple)
    if not both or not 0 < len(inputs) == len(outputs):
        raise ValueError(
            f"ground_truth has the keys {list(truth)}: expected 'inputs' and 'outputs', lists of "
            "the same length, at least 1"
        )
    if not function:
        return "run", [
            (as_text(given).encode("utf-8", "surrogatepass"), as_text(right))
            for given, right in zip(inputs, outputs, strict=True)
        ]
    return "call", [
        (ask_value(function, arguments(given)), accepted(right))
        for given, right in zip(inputs, outputs, strict=True)
    ]


def as_text(value: Any) -> str:
    """Returns stdin or stdout as one text; APPS has some as lists of lines."""
    return value if isinstance(value, str) else "\n".join(map(str, value))


def arguments(given: Any) -> list[Any]:
    """A list of them, or text with one JSON value per line, as LiveCodeBench has it."""
    return (
        [json.loads(line) for line in given.split("\n")] if isinstance(given, str) else list(given)
    )


def accepted(right: Any) -> set[str]:
    """The replies that are right: this value or, where it is text, what it says as JSON; and of a
    list of one, that one (APPS)."""
    values = [right]
    if isinstance(right, str) and is_json(right):
        values.append(json.loads(right))
    values += [value[0] for value in values if isinstance(value, list) and len(value) == 1]
    return {json.dumps(["ok", plain(value)], sort_keys=True) for value in values}


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def is_right(kind: Kind, result: Result, right: Any) -> bool:
    """A reply is compared as text: what a program wrote is never parsed out here."""
    if result.status != "ok":
        return False
    if kind == "run":
        return lines(result.stdout) == lines(right)
    return kind == "assert" or result.returned in right


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]
