"""Counts wrong verdicts of the reward `code`, of both kinds, and prints them as one table.

Right programs must get 1.0: the reference solutions of MBPP and HumanEval, where their files are
given, and those of hard.txt and programs.txt. Mutants of these (an empty program, `return None`,
the solution of another task, one number or operator changed) must get what plain Python gives them,
which is 0.0 but for those that the tests do not find. Forgeries, programs that are made to pass
without doing what the test asks, must get 0.0: those of forgeries.txt. Each wrong verdict is named.
The exit code is 1 where there is one.

    python examples/code_sandbox/verdicts.py --mbpp mbpp.jsonl --humaneval HumanEval.jsonl.gz
"""

from __future__ import annotations

import argparse
import ast
import gzip
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from mutants import Case, mutants, passes_in_plain_python

from spmdrl.rewards.code import code
from spmdrl.rewards.sandbox.sandbox import USUAL, Limits, SandboxError

HERE = Path(__file__).parent
# A limit is no verdict on a right program, however busy the machine is. Some mutants never end.
OF_RIGHT, OF_MUTANTS = Limits(wall_s=30.0, cpu_s=8.0), Limits(wall_s=20.0, cpu_s=4.0)
TOTAL_S = 90.0
UNUSED = "the test ends without having used the program"
HEAD = ("set", "must get 1", "got 1", "must get 0", "got 0", "wrong", "s")
WIDTHS = (24, 12, 7, 12, 7, 7, 6)


class Judged(NamedTuple):
    name: str
    wanted: float
    got: float | str  # a text: why there is no verdict


# ---- the sets


def read_cases(path: Path) -> list[Case]:
    """Of a .txt file here: "### name", the program, "---", the test or a ground truth as JSON."""
    _, *parts = ("\n" + path.read_text()).split("\n### ")
    cases = []
    for part in parts:
        head, test = part.split("\n---\n")
        name, _, program = head.partition("\n")
        if test[0] == "{":
            cases.append(Case(name, program, json.loads(test), stub="pass"))
        else:
            cases.append(Case(name, program, [test]))
    return cases


def read_rows(path: Path, keys: set[str]) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line)
            if missing := keys - row.keys():
                raise ValueError(f"{path}, line {number}: no {sorted(missing)}, see --help")
            yield row


def mbpp(path: Path) -> list[Case]:
    rows = read_rows(path, {"task_id", "code", "test_list", "test_setup_code"})
    return [
        Case(f"MBPP {row['task_id']}", row["code"],
             [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]],
             function_of(row["code"], row["test_list"][0]), "pass")
        for row in rows
    ]  # fmt: skip


def function_of(program: str, test: str) -> str:
    """The last function of a program that its test names; "": there is none."""
    names = {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
    found = [node.name for node in ast.parse(program).body if isinstance(node, ast.FunctionDef)]
    return next((name for name in reversed(found) if name in names), "")


def humaneval(path: Path) -> list[Case]:
    keys = {"task_id", "prompt", "canonical_solution", "test", "entry_point"}
    return [
        Case(row["task_id"], f"{row['prompt']}{row['canonical_solution']}",
             [f"{row['test']}\ncheck({row['entry_point']})"], row["entry_point"], row["prompt"])
        for row in read_rows(path, keys)
    ]  # fmt: skip


def mutants_of(cases: list[Case], seed: int) -> list[Case]:
    others = [*cases[1:], cases[0]]
    return [
        m for case, other in zip(cases, others, strict=True) for m in mutants(case, other, seed)
    ]


# ---- the verdicts


def verdict(case: Case, limits: Limits = USUAL) -> float | str:
    """The score, or why there is none."""
    try:
        return code(f"```python\n{case.program}\n```", case.truth, limits, TOTAL_S)["score"]
    except SandboxError as error:
        return f"no verdict: {error}"


def judged_right(case: Case) -> Judged:
    return Judged(case.name, 1.0, verdict(case, OF_RIGHT))


def judged_forgery(case: Case) -> Judged:
    return Judged(case.name, 0.0, verdict(case))


def judged_mutant(case: Case) -> Judged:
    wanted = float(passes_in_plain_python(case, OF_MUTANTS))
    got = verdict(case, OF_MUTANTS)
    if wanted and UNUSED in str(got):  # such a test has no verdict, as docs/sandbox.md says
        got = wanted
    return Judged(case.name, wanted, got)


def judge(
    title: str, cases: list[Case], how: Callable[[Case], Judged], workers: int
) -> list[Judged]:
    """Prints the row of a set, and its wrong verdicts, which are returned."""
    began = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(how, cases))
    wrong = [each for each in found if each.got != each.wanted]
    numbers: list[object] = []
    for wanted in (1.0, 0.0):
        of_kind = [each for each in found if each.wanted == wanted]
        numbers += [len(of_kind), sum(each.got == wanted for each in of_kind)]
    print_row(title, *numbers, len(wrong), f"{time.monotonic() - began:.0f}")
    for each in wrong:
        print(f"    {each.name}: must get {each.wanted:.0f}, got {each.got}", flush=True)
    return wrong


def print_row(first: object, *rest: object) -> None:
    cells = [f"{value!s:>{width}}" for value, width in zip(rest, WIDTHS[1:], strict=True)]
    print(f"{first!s:<{WIDTHS[0]}}{''.join(cells)}", flush=True)


# ---- the command


def sets_of(options: argparse.Namespace) -> Iterator[tuple[str, list[Case]]]:
    """Yields the names and cases of the sets of right programs."""
    for name, path, reader in (
        ("MBPP", options.mbpp, mbpp),
        ("HumanEval", options.humaneval, humaneval),
    ):
        if path is not None:
            yield name, reader(path)
        else:
            print(f"{name}: left out; --{name.lower()} names its file")
    for name in ("hard.txt", "programs.txt"):
        yield name, read_cases(HERE / name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbpp", type=Path, help="mbpp.jsonl as published, 974 tasks with the "
                        "keys task_id, code, test_list, test_setup_code")  # fmt: skip
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl or .jsonl.gz as published, "
                        "164 tasks with the keys task_id, prompt, canonical_solution, test, "
                        "entry_point")  # fmt: skip
    parser.add_argument("--sample", type=int, help="judge so many cases of each set, and half as "
                        "many mutants, drawn by --seed; without it all")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the sample and the mutants")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="sandboxes at once")
    options = parser.parse_args(arguments)

    def judge_some(title: str, cases: list[Case], how: Callable[[Case], Judged]) -> list[Judged]:
        if options.sample is not None:
            most = options.sample // 2 if how is judged_mutant else options.sample
            cases = random.Random(f"{options.seed} {title}").sample(cases, min(most, len(cases)))
        return judge(title, cases, how, options.workers)

    wrong: list[Judged] = []
    given = list(sets_of(options))
    print_row(*HEAD)
    for name, cases in given:
        wrong += judge_some(name, cases, judged_right)
        wrong += judge_some(f"{name}, mutants", mutants_of(cases, options.seed), judged_mutant)
    wrong += judge_some("forgeries.txt", read_cases(HERE / "forgeries.txt"), judged_forgery)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
