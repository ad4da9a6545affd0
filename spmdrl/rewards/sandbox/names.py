"""Finds what the names in a test mean, read from the test's text.

Sent into the sandbox as part of one program, see `inside.py`. Trees are gone through by hand, since
importing `ast` costs as much as running a test.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

ONLY_TREE = 0x400  # ast.PyCF_ONLY_AST
HELPERS = {"isclose"}  # in tests, they tell how near is near enough
MOST = 1 << 30
ARGUMENTS = {  # least and most, of builtins that do not tell by themselves
    "bool": (0, 1), "bytes": (0, 3), "dict": (0, 1), "dir": (0, 1), "filter": (2, 2),
    "getattr": (2, 3), "int": (0, 2), "iter": (1, 2), "map": (2, MOST), "max": (1, MOST),
    "min": (1, MOST), "next": (1, 2), "object": (0, 0), "range": (1, 3), "slice": (1, 3),
    "str": (0, 3), "super": (0, 2), "type": (1, 3), "vars": (0, 1), "zip": (0, MOST),
}  # fmt: skip
# These are tried with the test's own arguments, where the text has them.
TRIED = {
    "abs", "all", "any", "ascii", "bin", "chr", "divmod", "format", "hash", "hex", "len", "max",
    "min", "oct", "ord", "pow", "repr", "round", "sorted", "sum",
}  # fmt: skip


def below(node: Any) -> Iterator[Any]:
    for name in node._fields:
        value = getattr(node, name, None)
        for each in value if isinstance(value, list) else [value]:
            if hasattr(each, "_fields"):
                yield each


def walk(node: Any, depth: int = 0) -> Iterator[tuple[Any, int]]:
    """All nodes with their depth in calls, in the order of the text."""
    yield node, depth
    deeper = depth + (kind(node) == "Call")
    for each in below(node):
        yield from walk(each, deeper)


def kind(node: Any) -> str:
    return type(node).__name__


class TestNames:
    """The names of one test's tree."""

    def __init__(self, tree: Any) -> None:
        self.used: dict[str, None] = {}  # in the order of the text
        self.bound: set[str] = set()
        self.called: dict[str, list[tuple[int, Any]]] = {}  # depth and call, by a name
        self.looked_into: dict[str, set[str]] = {}  # attributes, by the name of their object
        self.bare: set[str] = set()  # names that are used for more than their attributes
        self.texts: set[str] = set()
        self.spans: list[tuple[int, int]] = []
        self.asserted: set[str] = set()  # names in the assert statements outside of any block
        for each in tree.body if isinstance(tree.body, list) else []:  # eval has one expression
            self.asserted |= names(each) if kind(each) == "Assert" else set()
        attributes: set[int] = set()
        called: set[int] = set()
        for node, depth in walk(tree):
            what = kind(node)
            if what == "Name":
                (self.used.setdefault if kind(node.ctx) == "Load" else self.bind)(node.id)
                if kind(node.ctx) == "Load" and id(node) not in attributes | called:
                    self.bare.add(node.id)
            elif what in ("FunctionDef", "AsyncFunctionDef", "ClassDef"):
                self.bind(node.name)
            elif what == "arg":
                self.bind(node.arg)
            elif what == "alias":
                self.bind((node.asname or node.name).partition(".")[0])
            elif what == "ExceptHandler" and node.name:
                self.bind(node.name)
            elif what == "Attribute" and kind(node.value) == "Name":
                attributes.add(id(node.value))
                self.looked_into.setdefault(node.value.id, set()).add(node.attr)
            elif what == "Call" and kind(node.func) == "Name":
                called.add(id(node.func))
                self.called.setdefault(node.func.id, []).append((depth, node))
            elif what == "Constant" and isinstance(node.value, str | bytes):
                self.texts.add(node.value)  # type: ignore[arg-type]
            elif (
                what == "Try" and any("StopIteration" in names(h.type) for h in node.handlers)
            ) or (what == "With" and any("StopIteration" in names(each) for each in node.items)):
                self.spans.append((node.body[0].lineno, node.body[-1].end_lineno))

    def bind(self, name: str) -> None:
        self.bound.add(name)

    def free(self) -> list[str]:
        return [name for name in self.used if name not in self.bound]


def is_pythons_own(name: str) -> bool:
    """Returns True for a name like `__name__`, which each module has for itself."""
    return len(name) > 4 and name.startswith("__") and name.endswith("__")


def names(node: Any) -> set[str]:
    return set() if node is None else {each.id for each, _ in walk(node) if kind(each) == "Name"}


def of_the_program(found: TestNames, theirs: set[str]) -> set[str]:
    """Returns which of the names that the program has mean the program's, `theirs` among the free
    ones.

    A name that is neither a builtin nor a module of the library does. Such a one next to `abs` is
    what the test is about, and `abs` is Python's, since the program's own could say that any answer
    is near enough; unless Python's cannot be called as the test does. Without such a one, the test
    is about the innermost call of a name that the program has. A module's name means the program's
    where the module lacks what the test uses.
    """
    import builtins

    common = {name for name in theirs if hasattr(builtins, name) or name in HELPERS}
    modules = {name for name in theirs - common if name in sys.stdlib_module_names}
    modules = {name for name in modules if is_like_module(found, name)}
    sure = theirs - common - modules
    for name in common - HELPERS:
        if not can_be_called(name, found.called.get(name, [])):
            sure.add(name)
    if sure or not common:
        return sure
    called = [(-depth, place, name) for place, name in enumerate(found.used) if name in common
              for depth, _ in found.called.get(name, [(-1, None)])]  # fmt: skip
    return {min(called)[2]}


def is_like_module(found: TestNames, name: str) -> bool:
    attributes = found.looked_into.get(name)
    if not attributes or name in found.bare or name in found.called:
        return False
    module = __import__(name)
    return all(hasattr(module, each) for each in attributes)


def can_be_called(name: str, calls: list[tuple[int, Any]]) -> bool:
    """Whether the builtin takes the arguments of all calls, as far as the text tells."""
    for _, node in calls:
        given = node.args
        if any(kind(each) == "Starred" for each in given) or node.keywords:
            continue
        if not takes(name, len(given)):
            return False
        values = [constant(each) for each in given]
        if name in TRIED and values and None not in values and not takes_these(name, values):
            return False
    return True


def constant(node: Any) -> Any:
    """A small number or a short text; None for what is none."""
    if kind(node) == "Constant" and isinstance(node.value, int | float | str):
        size = len(node.value) if isinstance(node.value, str) else abs(node.value)
        return node.value if size < 10_000 else None
    return None


def takes(name: str, count: int) -> bool:
    import builtins
    import inspect

    if name in ARGUMENTS:
        least, most = ARGUMENTS[name]
        return least <= count <= most
    try:
        inspect.signature(getattr(builtins, name)).bind(*[None] * count)
    except ValueError:  # it does not tell
        return True
    except TypeError:
        return False
    return True


def takes_these(name: str, values: list[Any]) -> bool:
    import builtins

    try:
        getattr(builtins, name)(*values)
    except TypeError:
        return False
    except Exception:  # noqa: BLE001  it takes them, which is what was asked
        return True
    return True
