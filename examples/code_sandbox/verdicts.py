"""Counts wrong verdicts of the reward `code`, of both kinds.

Right programs must get 1.0: the reference solutions of MBPP and HumanEval, where their files are
given, and those of hard.txt. Forgeries, programs that are made to pass without doing what the test
asks, must get 0.0: those of forgeries.txt. Prints a line for each of the four, and each wrong
verdict. The exit code is 1 where there is one.

    python examples/code_sandbox/verdicts.py --mbpp mbpp.jsonl --humaneval HumanEval.jsonl.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from spmdrl.rewards.code import code
from spmdrl.rewards.sandbox.sandbox import SandboxError

HERE = Path(__file__).parent


class Case(NamedTuple):
    name: str
    program: str
    tests: list[str]


def read_cases(path: Path) -> list[Case]:
    """Of hard.txt or forgeries.txt: "### name", the program, "---", the test."""
    _, *parts = ("\n" + path.read_text()).split("\n### ")
    cases = []
    for part in parts:
        head, test = part.split("\n---\n")
        name, _, program = head.partition("\n")
        cases.append(Case(name, program, [test]))
    return cases


def read_rows(path: Path) -> Iterator[dict[str, str | list[str]]]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from map(json.loads, file)


def mbpp(path: Path) -> list[Case]:
    return [
        Case(f"MBPP {row['task_id']}", str(row["code"]),
             [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]])
        for row in read_rows(path)
    ]  # fmt: skip


def humaneval(path: Path) -> list[Case]:
    return [
        Case(str(row["task_id"]), f"{row['prompt']}{row['canonical_solution']}",
             [f"{row['test']}\ncheck({row['entry_point']})"])
        for row in read_rows(path)
    ]  # fmt: skip


def verdict(case: Case) -> float | str:
    """The score, or why there is none."""
    try:
        return code(f"```python\n{case.program}\n```", case.tests)["score"]
    except SandboxError as error:
        return f"none: {error}"


def count_right(title: str, cases: list[Case], score: float, workers: int) -> bool:
    """Prints how many of `cases` got `score`, and which did not. Returns whether all did."""
    began = time.monotonic()
    with ThreadPoolExecutor(workers) as pool:
        wrong = [
            f"    {case.name}: {got}"
            for case, got in zip(cases, pool.map(verdict, cases), strict=True)
            if got != score
        ]
    right, seconds = len(cases) - len(wrong), time.monotonic() - began
    print(f"{title}: {right} of {len(cases)} got {score} ({seconds:.0f} s)", *wrong, sep="\n")
    return not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mbpp", type=Path, help="mbpp.jsonl, 974 tasks")
    parser.add_argument("--humaneval", type=Path, help="HumanEval.jsonl or .jsonl.gz, 164 tasks")
    parser.add_argument("--workers", type=int, default=1, help="sandboxes at once")
    options = parser.parse_args()
    fine = []
    if options.mbpp:
        fine.append(count_right("MBPP", mbpp(options.mbpp), 1.0, options.workers))
    if options.humaneval:
        cases = humaneval(options.humaneval)
        fine.append(count_right("HumanEval", cases, 1.0, options.workers))
    for name, score in (("hard", 1.0), ("forgeries", 0.0)):
        cases = read_cases(HERE / f"{name}.txt")
        fine.append(count_right(f"{name}.txt", cases, score, options.workers))
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
