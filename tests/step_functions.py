"""Lists the functions of spmdrl that one training step calls on one rank, and counts their lines.

    python tests/step_functions.py --config examples/add2/config.py [--source FILE] [--field value]

Runs the program on one rank for three steps and records the second. Every file has a line: how many
of its lines stand in functions that ran, and how many lines the file has; below it are the
functions, in the order in which they were first called. Calls of other threads are not recorded.
--source FILE writes the source of these functions to one document, in that order: what runs in a
step, from its first line to its last.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fire

from spmdrl import ppo
from spmdrl.training import rl

ROOT = Path(__file__).resolve().parents[1]
RECORDED_STEP = 2


class Recorder:
    """The code of functions below ROOT/spmdrl that were called while it was on, in that order."""

    def __init__(self) -> None:
        self.called: dict[CodeType, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT / "spmdrl")):
            self.called.setdefault(frame.f_code)

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns train_step, recorded in the RECORDED_STEP."""
        calls = 0

        def recorded(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            sys.setprofile(self if calls == RECORDED_STEP else None)
            try:
                return step(*args, **options)
            finally:
                sys.setprofile(None)

        return recorded

    def source(self) -> list[str]:
        """Returns the lines of a document with every function that ran, whole, in the order of the
        first call; one that is defined within another stands in that one.
        """
        shown: set[tuple[str, int]] = set()
        lines: list[str] = []
        for code in self.called:
            file, body = code.co_filename, lines_of(code)
            if (file, body.start) in shown:
                continue
            shown |= {(file, number) for number in body}
            text = Path(file).read_text().splitlines()
            lines += [f"# ---- {Path(file).relative_to(ROOT)}:{body.start}  {code.co_qualname}"]
            lines += text[body.start - 1 : body.stop - 1]
        return lines

    def report(self) -> None:
        functions: dict[str, list[CodeType]] = defaultdict(list)
        for code in self.called:
            functions[code.co_filename].append(code)
        ran = whole = 0
        for file, codes in functions.items():
            lines = {line for code in codes for line in lines_of(code)}
            total = len(Path(file).read_text().splitlines())
            ran, whole = ran + len(lines), whole + total
            print(f"{len(lines):5d} of {total:5d}  {Path(file).relative_to(ROOT)}")
            print(f"{'':16}{', '.join(code.co_qualname for code in codes)}")
        print(f"{ran:5d} of {whole:5d}  lines in {len(functions)} files")


def lines_of(code: CodeType) -> range:
    """Returns the numbers of the lines of the function, method or class that the code stands in,
    from its first decorator to its last line.
    """
    return min(
        (lines for lines in definitions(code.co_filename) if code.co_firstlineno in lines),
        key=len,
        default=range(code.co_firstlineno, code.co_firstlineno + 1),
    )


@cache
def definitions(file: str) -> list[range]:
    """Returns the lines of every function of a file."""
    found = []
    for node in ast.walk(ast.parse(Path(file).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.append(range(first, node.end_lineno + 1))
    return found


def main(config: str, source: str = "", **overrides: Any) -> None:
    recorder = Recorder()
    rl.train_step = recorder.around(rl.train_step)
    ppo.main(config=config, steps=RECORDED_STEP + 1, eval_every=0, **overrides)
    recorder.report()
    if source:
        lines = recorder.source()
        Path(source).write_text("\n".join([*lines, ""]))
        print(f"{len(lines):5d} lines of source in {source}")


if __name__ == "__main__":
    fire.Fire(main)
