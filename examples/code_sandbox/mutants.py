"""Wrong programs that are made of right ones, and what plain Python says of them.

A mutant may still pass its tests: another task's solution may do the same, and tests may not reach
the place that was changed. So the reward's judge is compared with plain Python: program and test
run as one program, in the sandbox too but without the judge, which believes what they print. That
is enough for mutants, none of which tries to deceive.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from spmdrl.rewards.sandbox.sandbox import Limits, run_code

OTHERS: dict[type, type[Any]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Add: ast.Sub, ast.Sub: ast.Add,
}  # fmt: skip
PASSED = "passed: "  # and a number which no program knows
DRIVER = """
import sys
sys.set_int_max_str_digits(0)
program = sys.modules["solution"] = type(sys)("solution")
try:
    exec(compile({program!r}, "main.py", "exec"), vars(program))
except SystemExit:
    pass
for test in {tests!r}:
    main = sys.modules["__main__"] = type(sys)("__main__")  # for unittest.main()
    vars(main).update(vars(program), __name__="__main__")
    try:
        exec(compile(test, "test.py", "exec"), vars(main))
    except SystemExit as error:
        assert error.code in (None, 0, False), error  # the end of unittest.main()
print({passed!r})
"""


class Case(NamedTuple):
    name: str
    program: str
    truth: Any  # the reward's ground_truth
    function: str = ""  # the one that the tests ask for; "": none is known
    stub: str = ""  # a program without content, such as HumanEval's prompt alone; "": none is tried


def mutants(case: Case, other: Case, seed: int) -> Iterator[Case]:
    """Yields wrong programs for the tests of `case`; `other` is another case of the same set."""
    if case.stub:
        yield mutant(case, "stub", case.stub)
    if case.function:
        yield mutant(case, "returns None", returning_none(case.program, case.function))
    answer = f"\n{case.function} = {other.function}" if case.function and other.function else ""
    yield mutant(case, f"solution of {other.name}", other.program + answer)
    if "fn_name" in case.truth:  # of such tests plain Python says nothing
        return
    changed = off_by_one(case.program, random.Random(f"{seed} {case.name}"))
    if changed is not None:
        yield mutant(case, "off by one", changed)


def mutant(case: Case, what: str, program: str) -> Case:
    return case._replace(name=f"{case.name}, {what}", program=program)


def returning_none(program: str, function: str) -> str:
    tree = ast.parse(program)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            node.body = [ast.Return(ast.Constant(None))]
    return ast.unparse(ast.fix_missing_locations(tree))


def off_by_one(program: str, chosen: random.Random) -> str | None:
    """The program with one number greater by 1, or one of < <= > >= == != + - exchanged; None
    where it has none of these."""
    tree = ast.parse(program)
    places: list[tuple[Any, int]] = []  # a node, and which of its comparisons
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value) is int:
            places.append((node, 0))
        elif isinstance(node, ast.Compare):
            places += [(node, i) for i, op in enumerate(node.ops) if type(op) in OTHERS]
        elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in OTHERS:
            places.append((node, 0))
    if not places:
        return None
    node, i = chosen.choice(places)
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        node.value += 1
    elif isinstance(node, ast.Compare):
        node.ops[i] = OTHERS[type(node.ops[i])]()
    else:
        node.op = OTHERS[type(node.op)]()
    return ast.unparse(tree)


def passes_in_plain_python(case: Case, limits: Limits) -> bool:
    """Whether the tests pass where nothing protects them. False for values of a function, which the
    mutants of such a case do not return."""
    if isinstance(case.truth, list):
        passed = f"{PASSED}{random.random()}"
        text = DRIVER.format(program=case.program, tests=case.truth, passed=passed)
        result = run_code(text, "", limits)
        return result.status == "ok" and result.stdout.endswith(passed + "\n")
    if "fn_name" in case.truth:
        return False
    for given, right in zip(case.truth["inputs"], case.truth["outputs"], strict=True):
        result = run_code(case.program, given, limits)
        printed = [line.split() for line in result.stdout.strip().splitlines()]
        if result.exit_code != 0 or printed != [each.split() for each in right.splitlines()]:
            return False
    return True
