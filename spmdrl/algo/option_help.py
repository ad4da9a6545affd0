"""The options of every policy loss, estimator and preference loss, for --help.

They are read from the source of the functions: --help comes at once, and to import the functions
takes the seconds that torch takes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import get_args

from spmdrl.algo import options
from spmdrl.algo.options import Range
from spmdrl.config import PAIR_LOSSES

TABLES = {
    "--algo.loss_args.": ("losses.py", "POLICY_LOSSES", "policy loss"),
    "--algo.advantage_args.": ("advantages.py", "ESTIMATORS", "estimator"),
}
PREFERENCE = {
    "--preference.loss_args.": ("preference_losses.py", "PREFERENCE_LOSSES", "preference loss"),
}


def option_lines() -> list[str]:
    """Returns a line for each loss and estimator that has options: name, type, default, range."""
    return [
        *lines_of(TABLES), "",
        f"--algo.loss_args.  Of the losses of pairs ({', '.join(PAIR_LOSSES)}): as "
        "`python -m spmdrl.preference --help` has them for --preference.loss_args.",
    ]  # fmt: skip


def preference_lines() -> list[str]:
    """Returns a line for each preference loss."""
    return lines_of(PREFERENCE)


def lines_of(tables: Mapping[str, tuple[str, str, str]]) -> list[str]:
    """tables: by the beginning of a flag, a file here, the name of its dict, and what is in it."""
    lines = []
    for flag, (file, table, kind) in tables.items():
        tree = ast.parse(Path(__file__).with_name(file).read_text())
        lines += ["", f"{flag}  The options of each {kind}."]
        lines += [
            f"  {name}: {', '.join(found)}" for name, found in options_in(tree, table) if found
        ]
    return lines


def options_in(tree: ast.Module, table: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each entry of the dict of that name with the options of the entry's function."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    values = values_in(tree)
    entries = values[table]
    assert isinstance(entries, ast.Dict)
    for key, record in zip(entries.keys, entries.values, strict=True):
        assert isinstance(key, ast.Constant) and isinstance(record, ast.Call)
        arguments = functions[ast.unparse(record.args[0])].args
        options = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        yield str(key.value), [option_text(option, default, values) for option, default in options]


def values_in(tree: ast.Module) -> dict[str, ast.expr]:
    """Returns what the module assigns to names at its top."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    return {
        ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target): node.value
        for node in assigned
        if node.value is not None
    }


def kind_text(annotation: ast.expr) -> str:
    """Returns the source of an annotation, of Literal["a", "b"] the text "one of 'a', 'b'"."""
    text = ast.unparse(annotation)
    literal = re.fullmatch(r"Literal\[(.*)\]", text)
    return text if literal is None else f"one of {literal[1]}"


def option_text(option: ast.arg, default: ast.expr | None, values: dict[str, ast.expr]) -> str:
    """Returns "tau_pos: float = 1.0 (above 0)"."""
    assert option.annotation is not None
    text, limits = kind_text(option.annotation), ""
    for node in ast.walk(option.annotation):
        kinds = get_args(getattr(options, node.id, None)) if isinstance(node, ast.Name) else ()
        if isinstance(node, ast.Name) and kinds and isinstance(kinds[1], Range):
            text, limits = text.replace(node.id, kinds[0].__name__), f" ({kinds[1].text})"
    if default is None:
        return f"{option.arg}: {text}{limits}, to be set"
    default = values.get(ast.unparse(default), default)
    if isinstance(default, ast.Call):  # MappingProxyType({})
        default = default.args[0]
    return f"{option.arg}: {text} = {ast.unparse(default)}{limits}"
