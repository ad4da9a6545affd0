"""Describes what the functions of a config do, as text that is the same in every process.

By it ranks find out that their configs differ, and a resumed run that a reward is another. With a
function come its helpers, and the constants that its file spells out. Imports no torch.
"""

from __future__ import annotations

import ast
import dataclasses
import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

PLAIN = (bool, int, float, type(None))
Seen = set[Any]  # what was come across already: ids, and (id of a module, name)


def code_of(node: Any) -> list[str]:
    """The code of all functions and classes in a config's value, whatever they are wrapped in."""
    return list(_of_node(node, set()))


def _of_node(node: Any, seen: Seen) -> Iterator[str]:
    if isinstance(node, property):
        node = node.fget
    elif isinstance(node, staticmethod | classmethod):
        node = node.__func__
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, types.FunctionType):
        yield from _of_function(node, seen)
    elif isinstance(node, types.MethodType):
        yield from _of_node(node.__func__, seen)
        yield from _of_node(node.__self__, seen)
    elif isinstance(node, type):  # a tool with a state
        for cls in node.__mro__[:-1]:
            if cls is node or is_users(cls.__module__):
                yield from _of_class(cls, seen)
    elif isinstance(node, functools.partial):
        yield from _of_node(node.func, seen)
    elif hasattr(node, "__wrapped__"):  # functools.cache
        yield from _of_node(node.__wrapped__, seen)
    elif isinstance(node, Mapping):
        for value in node.values():
            yield from _of_node(value, seen)
    elif isinstance(node, tuple):
        for value in node:
            yield from _of_node(value, seen)
    elif is_users(type(node).__module__):
        yield from _of_node(type(node), seen)
        for value in getattr(node, "__dict__", {}).values():
            yield from _of_value(value, seen)
    elif dataclasses.is_dataclass(node):
        for field in dataclasses.fields(node):
            yield from _of_node(getattr(node, field.name), seen)


def _of_class(cls: type, seen: Seen) -> Iterator[str]:
    """Its methods, properties and constants."""
    for name, value in vars(cls).items():
        if isinstance(value, property | staticmethod | classmethod | types.FunctionType):
            yield from _of_node(value, seen)
        elif not name.startswith("__") and isinstance(value, str | int | float | tuple):
            yield f"{name} = {as_text(value)}"


def _of_function(function: types.FunctionType, seen: Seen) -> Iterator[str]:
    yield text_of(function.__code__)
    given = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    given += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    for value in given:
        yield from _of_value(value, seen)
    global_names, others = names_in(function.__code__)
    yield from _of_names(global_names, others, function.__globals__, seen)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a function that is not defined yet
        return False


def _of_value(value: Any, seen: Seen) -> Iterator[str]:
    """Describes a default, a closure or an object. Paths and addresses may differ between jobs."""
    if isinstance(value, PLAIN) or (isinstance(value, str) and not set("/:") & set(value)):
        yield repr(value)
    elif isinstance(value, list | tuple | dict):
        if id(value) not in seen:
            seen.add(id(value))
            # not pairs made for this loop: `seen` goes by identity, which a next pair may inherit
            for each in chain.from_iterable(value.items()) if isinstance(value, dict) else value:
                yield from _of_value(each, seen)
    else:
        yield from _of_helper(value, seen)


def _of_helper(value: Any, seen: Seen) -> Iterator[str]:
    """Describes a helper; one that is installed, or built in, is a matter of versions and no part
    of the run.
    """
    module = getattr(value, "__module__", None) or type(value).__module__
    wrapped = getattr(value, "__wrapped__", None)
    if isinstance(module, str) and (is_users(module) or isinstance(wrapped, types.FunctionType)):
        yield from _of_node(value, seen)


def _of_names(
    names: list[str], attributes: list[str], scope: Mapping[str, Any], seen: Seen
) -> Iterator[str]:
    """Helpers and constants of these names in the module that `scope` is of. attributes: names that
    may be looked up in what is a module itself."""
    source = spelled_out(str(scope.get("__file__") or ""))
    for name in names:
        value = scope.get(name)
        if (id(scope), name) in seen or name not in scope:
            continue
        seen.add((id(scope), name))
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                inner = [attribute for attribute in attributes if attribute in vars(value)]
                yield from _of_names(inner, attributes, vars(value), seen)
        elif name in source.constants and not isinstance(value, types.FunctionType | type):
            text, others = source.constants[name]
            yield f"{name} = {text}"
            yield from _of_names(others, attributes, scope, seen)
        else:
            origins = [] if callable(value) else source.imported_as(name)
            for module, its_name in origins:
                if is_users(module):
                    yield from _of_names([its_name], [], vars(sys.modules[module]), seen)
            yield from _of_helper(value, seen)


def text_of(code: types.CodeType) -> str:
    """No addresses, and sets in order."""
    consts = [
        text_of(c) if isinstance(c, types.CodeType)
        else repr(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]  # fmt: skip
    return " ".join([code.co_code.hex(), *code.co_names, *consts])


def names_in(code: types.CodeType) -> tuple[list[str], list[str]]:
    """(names of globals, all other names such as attributes), with those of functions within."""
    found = {True: dict[str, None](), False: dict[str, None]()}
    left = [code]
    while left:
        code = left.pop()
        left += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for step in dis.get_instructions(code):
            if isinstance(step.argval, str) and step.argval in code.co_names:
                found[step.opname in ("LOAD_GLOBAL", "LOAD_NAME")][step.argval] = None
    return list(found[True]), list(found[False])


@dataclasses.dataclass(frozen=True)
class SourceFile:
    """The top level of a Python file, also within its `if`, `try` and `with` blocks.

    constants: name -> (the text that is assigned to it, names in that text). The text, since a
    value may be of the clock or of the host. imports: (module, name in it or "*", name here).
    """

    constants: dict[str, tuple[str, list[str]]]
    imports: list[tuple[str, str, str]]

    def imported_as(self, name: str) -> Iterator[tuple[str, str]]:
        """(module, name in it) that `name` may have come from."""
        for module, its_name, here in self.imports:
            if here == name:
                yield module, its_name
            elif its_name == "*" and name in vars(sys.modules.get(module, dis)):
                yield module, name


def spelled_out(file: str) -> SourceFile:
    """Empty where there is no such file, or it is no Python. Not to be changed."""
    try:
        stat = os.stat(file)
    except OSError:
        return SourceFile({}, [])
    return read_source(file, stat.st_mtime_ns, stat.st_size)


@cache
def read_source(file: str, _mtime_ns: int, _size: int) -> SourceFile:
    source = SourceFile({}, [])
    try:
        statements: list[Any] = [*ast.parse(Path(file).read_bytes()).body]
    except (OSError, SyntaxError, ValueError):
        return source
    for statement in statements:  # which grows meanwhile
        for block in ("body", "orelse", "finalbody", "handlers"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                statements += getattr(statement, block, [])
        if isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            source.imports.extend(
                (statement.module, alias.name, alias.asname or alias.name)
                for alias in statement.names
            )
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value:
            note_assignment(statement, statement.value, source)
    return source


def note_assignment(statement: Any, value: ast.expr, source: SourceFile) -> None:
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    names = [n.id for n in ast.walk(value) if isinstance(n, ast.Name)]
    for part in (n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)):
        text, others = source.constants.get(part.id, ("", []))
        source.constants[part.id] = (f"{text}{ast.unparse(value)}\n", [*others, *names])


@cache
def installed_in() -> tuple[str, ...]:
    """Folders of the standard library, of installed packages and of this one."""
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*sorted(folders), str(Path(__file__).parents[1]))


def is_users(module: str) -> bool:
    """Whether a module is neither installed nor built in, but a file of the user's."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return False
    path = Path(file).absolute()
    packages = {"site-packages", "dist-packages"} & set(path.parts)  # of users, of other prefixes
    return not packages and not any(path.is_relative_to(folder) for folder in installed_in())


# ---- values as Python text


def as_text(value: Any) -> str:
    """A config's value as in the file that defines it; functions and classes by their names."""
    if isinstance(value, functools.partial):
        keywords = "".join(f", {k}={as_text(v)}" for k, v in value.keywords.items())
        positional = "".join(f", {as_text(v)}" for v in value.args)
        return f"partial({as_text(value.func)}{positional}{keywords})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {as_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{as_text(v)}, " for v in value).removesuffix(" ") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(as_text, value)) + "]"
    if isinstance(value, set | frozenset) and value:  # their order is another in each process
        return "{" + ", ".join(sorted(map(as_text, value))) + "}"
    if type(value).__repr__ is object.__repr__:  # it has an address, another in each process
        return f"{type(value).__qualname__}()"
    return repr(value)
