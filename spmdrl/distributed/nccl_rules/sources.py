"""Reads from the source of a caller where a collective stands, which backends a group has, and
whether a tensor is made on the CPU.
"""

from __future__ import annotations

import ast
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from spmdrl.distributed.nccl_rules.events import BOTH, Stack

FACTORIES = {"zeros", "ones", "empty", "full", "tensor", "arange", "from_numpy", "frombuffer"}
TORCH = str(Path(c10d.__file__).parent)
OURS = str(Path(__file__).parent)
STARTERS = (str(Path(os.__file__).parent / "multiprocessing"), "<")
Function = ast.FunctionDef | ast.AsyncFunctionDef
DEPTH = 10  # frames of a stack that are kept


def caller() -> FrameType:
    """The innermost frame that is neither torch.distributed's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OURS)):
        frame = frame.f_back
    assert frame is not None
    return frame


def carries_objects() -> bool:
    """Whether the operation is part of an object collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, OURS)):
        if frame.f_code.co_name.endswith(("_object", "_object_list")):
            return True
        frame = frame.f_back
    return False


def stack(frame: FrameType | None) -> Stack:
    frames: list[tuple[str, int, str]] = []
    while frame is not None and len(frames) < DEPTH:
        file = frame.f_code.co_filename
        if not file.startswith(STARTERS):
            frames.append((file, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(frames)


def backends_of(frame: FrameType | None, inherited: str) -> str:
    """Returns the backends of a group on GPUs, by the arguments of the call and of its function."""
    call = call_at(frame)
    given = backend_in(call)
    if isinstance(given, ast.Constant):
        return str(given.value or inherited)
    outer = call_at(frame.f_back) if frame is not None else None  # a function that hands it on
    if given is None and (given := backend_in(outer)) is None:
        return inherited
    values = [*outer.args, *(k.value for k in outer.keywords)] if outer is not None else []
    literal = any(isinstance(value, ast.Constant) and value.value == "gloo" for value in values)
    return "gloo" if literal else BOTH


def backend_in(call: ast.Call | None) -> ast.expr | None:
    keywords = call.keywords if call is not None else []
    return next((keyword.value for keyword in keywords if keyword.arg == "backend"), None)


def call_at(frame: FrameType | None) -> ast.Call | None:
    """The call that a frame is in."""
    if frame is None:
        return None
    return call_in(frame.f_code.co_filename, frame.f_code, frame.f_lasti)


@lru_cache(None)
def call_in(file: str, code: CodeType, instruction: int) -> ast.Call | None:
    """Returns the call that an instruction is of. instruction: its offset in bytes."""
    place = next(islice(code.co_positions(), instruction // 2, None), (None,) * 4)
    line, last_line, column, last_column = place
    return calls_of(file).get((line, last_line, column, last_column))


@lru_cache(None)
def tree_of(file: str) -> ast.Module:
    try:
        return ast.parse(Path(file).read_text())
    except (OSError, SyntaxError):  # made at run time
        return ast.Module([], [])


@lru_cache(None)
def calls_of(file: str) -> dict[tuple[Any, ...], ast.Call]:
    """Returns the calls in a file by first line, last line, first column, last column."""
    calls = (node for node in ast.walk(tree_of(file)) if isinstance(node, ast.Call))
    return {(c.lineno, c.end_lineno, c.col_offset, c.end_col_offset): c for c in calls}


def made_on_cpu(frame: FrameType, tensor: torch.Tensor) -> bool:
    """Whether the function makes the tensor without a device, by what it assigned last, above the
    line of the call, to one of its names.
    """
    code = frame.f_code
    for name, assigned in assignments(code.co_filename, code.co_firstlineno).items():
        above = [on_cpu for line, on_cpu in assigned if line <= frame.f_lineno]
        if above and above[-1] and frame.f_locals.get(name) is tensor:
            return True
    return False


@lru_cache(None)
def assignments(file: str, line: int) -> dict[str, list[tuple[int, bool]]]:
    """Returns by name the lines where the function at this line assigns to it, and whether a tensor
    that it makes on the CPU.
    """
    found: dict[str, list[tuple[int, bool]]] = defaultdict(list)
    for node in ast.walk(tree_of(file)):
        if isinstance(node, Function) and starts_at(node) == line:
            for part in ast.walk(node):
                for name, value in assigned(part):
                    found[name].append((value.lineno, makes_on_cpu(value)))
    return {name: sorted(lines) for name, lines in found.items()}


def assigned(node: Any) -> Iterator[tuple[str, ast.expr]]:
    """Yields each name that a statement assigns to, with its value; of `a, b = x, y` both."""
    pairs: list[tuple[ast.expr, ast.expr]]
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.Assign):
        pairs = [pair for target in node.targets for pair in paired(target, node.value)]
    else:
        return
    yield from ((target.id, value) for target, value in pairs if isinstance(target, ast.Name))


def paired(target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=False))
    return [(target, value)]


def starts_at(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([function.lineno, *(d.lineno for d in function.decorator_list)])


def makes_on_cpu(value: ast.expr) -> bool:
    return any(is_cpu_tensor(part) for part in ast.walk(value) if isinstance(part, ast.Call))


def is_cpu_tensor(call: ast.Call) -> bool:
    """torch.zeros(...) and the like without a device, or x.cpu()."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if isinstance(function.value, ast.Name) and function.value.id == "torch":
        given = [keyword.arg for keyword in call.keywords]
        return function.attr in FACTORIES and "device" not in given
    return function.attr == "cpu" and not call.args
