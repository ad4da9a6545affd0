"""Finds which data set a script of TRL gives to GRPOTrainer, without running it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

from spmdrl.cli.hub_names import MODEL, HubName
from spmdrl.migration.config_source import setting, shown

FILE_KINDS = ("json", "parquet", "csv", "text")  # load_dataset's names for files
Env = dict[str, ast.expr]  # a function's parameter -> what a call gives it


class Datasets:
    """Follows an expression back to the calls of load_dataset that it comes from.

    literal: returns the value of an expression, and anything but a str where it is no literal.
    notes: what the names do not say.
    """

    def __init__(self, tree: ast.Module, literal: Callable[[ast.expr], Any]) -> None:
        self.literal = literal
        self.notes: dict[str, str] = {}
        self.followed: list[str] = []  # functions whose values are looked for
        self.functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
        self.assigned: dict[str, list[tuple[int, bool, ast.expr]]] = {}
        for place, statement, decided in statements(tree.body):
            if isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        found = (place, decided, statement.value)
                        self.assigned.setdefault(target.id, []).append(found)

    def of(self, node: ast.expr, split: str = "", env: Env | None = None) -> list[str]:
        """Returns the names of the data sets that the expression may be, without repetition.

        split: the one that is taken of it; "": none is named.
        """
        env = env or {}
        if isinstance(node, ast.Name):
            found = [n for value in self.values_of(node) for n in self.of(value, split, env)]
        elif isinstance(node, ast.IfExp):
            found = self.of(node.body, split, env) + self.of(node.orelse, split, env)
        elif isinstance(node, ast.Subscript):
            key = self.text(node.slice, env)
            found = [] if key is None else self.of(node.value, key or split, env)
        elif isinstance(node, ast.Call):
            found = self.of_call(node, split, env)
        else:
            found = []
        return list(dict.fromkeys(found))

    def of_call(self, node: ast.Call, split: str, env: Env) -> list[str]:
        name = ast.unparse(node.func).rpartition(".")[2]
        if name == "load_dataset":
            return [loaded] if (loaded := self.loaded(node, split, env)) else []
        if isinstance(node.func, ast.Attribute):  # dataset.map(...)
            if name == "train_test_split" and split == "test":
                self.notes["train_test_split"] = "rows are held out by the script: write data.eval"
                return []
            return self.of(node.func.value, "" if name == "train_test_split" else split, env)
        function = self.functions.get(name)
        if function is None or name in self.followed:  # one that calls itself
            return []
        inner = given_to(function, node)
        inner = {k: env.get(v.id, v) if isinstance(v, ast.Name) else v for k, v in inner.items()}
        returns = [n.value for n in ast.walk(function) if isinstance(n, ast.Return) and n.value]
        self.followed.append(name)
        found = [n for value in returns for n in self.of(value, split, inner)]
        self.followed.pop()
        return found

    def values_of(self, node: ast.Name) -> Iterator[ast.expr]:
        """Gives what the variable may be there: its last value, and, where that stands below an
        `if`, those before it.
        """
        before = [v for v in self.assigned.get(node.id, []) if v[0] < node.lineno]
        for _, decided, value in reversed(before):
            yield value
            if decided:
                return

    def text(self, node: ast.expr | None, env: Env) -> str | None:
        """Returns the text of a literal or a parameter; "" without one, None where it is open."""
        if isinstance(node, ast.Name):
            node = env.get(node.id, node)
        value = "" if node is None else self.literal(node)
        return value if type(value) is str else "" if value is None else None

    def loaded(self, node: ast.Call, split: str, env: Env) -> str | None:
        """Returns our name for what a call of load_dataset gives; None where it is computed."""
        given = dict(zip(("path", "name"), node.args, strict=False))
        given |= {k.arg: k.value for k in node.keywords if k.arg}
        words = {k: self.text(given.get(k), env) for k in ("path", "name", "split", "revision")}
        if not words["path"] or None in words.values():
            return None
        path, config, asked, revision = (words[k] or "" for k in words)
        if path in FILE_KINDS:
            files = self.literal(given["data_files"]) if "data_files" in given else None
            files = files.get(split or asked or "train") if isinstance(files, dict) else files
            return files if type(files) is str else None
        return self.named(path, revision, config, asked or split)

    def named(self, path: str, revision: str, config: str, split: str) -> str:
        name = re.sub(r"[^\w.-].*", "", split, flags=re.DOTALL)
        if name != split:
            self.notes[setting("split", split)] = (
                f"a part cannot be named: all of {name or 'it'} is taken"
            )
        if not MODEL.fullmatch(path):
            self.notes[f"load_dataset({shown(repr(path))})"] = (
                "no owner/name of the Hub: write it, or a file"
            )
            return path
        return str(HubName("dataset", path, revision, config=config, split=name))


def statements(body: list[ast.stmt], decided: bool = True) -> Iterator[tuple[int, ast.stmt, bool]]:
    """Gives (last line, statement, whether it stands below no `if`) in the order of the lines."""
    for statement in body:
        yield statement.end_lineno or statement.lineno, statement, decided
        below = decided and not isinstance(statement, ast.If | ast.Try | ast.For | ast.While)
        for block in ("body", "handlers", "orelse", "finalbody"):
            for inner in getattr(statement, block, []):
                yield from statements([inner], below)


def given_to(function: ast.FunctionDef, call: ast.Call) -> Env:
    """Returns the values of a function's parameters in a call, with their defaults."""
    names = [argument.arg for argument in function.args.args]
    defaults = function.args.defaults
    found: Env = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True))
    found |= dict(zip(names, call.args, strict=False))
    return found | {k.arg: k.value for k in call.keywords if k.arg}
