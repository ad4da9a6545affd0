"""Writes a config of ours as the source of a Python file."""

from __future__ import annotations

import ast
import dataclasses
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spmdrl.config import PpoConfig


@dataclass(frozen=True)
class Code:
    """Python code, which is written as it stands, and what must be above the config for it."""

    text: str
    above: str = ""


@dataclass
class Translation:
    """Says what a config of another trainer became.

    fields: dotted name of ours -> value or Code. sources: dotted name -> the setting it came from.
    notes: settings without a counterpart, with what to do about them. granted: settings that need
    nothing here, with the reason.
    """

    trainer: str
    fields: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    granted: dict[str, str] = field(default_factory=dict)

    def set(self, name: str, value: Any, source: str = "") -> None:
        self.fields[name] = value
        if source:
            self.sources[name] = source


def shown(value: Any, longest: int = 80) -> str:
    """Returns a value as one line for a comment; the end of a long one is left out."""
    text = str(value)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def setting(name: str, value: Any) -> str:
    return f"{name}={shown(value)}"


def comment(text: str) -> str:
    """Returns a comment's text, in which nothing ends the line."""
    return shown(text, longest=300)


def source_of(translation: Translation, origin: str) -> str:
    """Returns a Python file that defines `config`, with comments for what has no counterpart.

    origin: the name of what was translated. A value that is our default is left out, unless the
    other trainer's setting is named for it.
    """
    origin = re.sub(r"[^\w .+-]", "_", origin)
    above = [v.above for v in translation.fields.values() if isinstance(v, Code) and v.above]
    body = call(PpoConfig, "", translation)
    used = sorted({name for name in CONFIGS if f"{name}(" in body})
    lines = [
        f'"""Translated from {origin} of {translation.trainer}; see the comments below."""',
        "",
    ]
    lines += ["from spmdrl.config import (", *(f"    {name}," for name in used), ")", "", *above]
    for title, settings in (
        ("Without a counterpart; look at each:", translation.notes),
        ("Nothing to set here:", translation.granted),
    ):
        if settings:
            lines += [f"# {title}", *(f"#   {comment(f'{k}: {v}')}" for k, v in settings.items())]
    source = "\n".join([*lines, f"config = {body}", ""])
    ast.parse(source)
    return source


def config_classes(kind: type) -> dict[str, type]:
    """Returns the dotted name of every group of fields of a config, and its class."""
    found = {}
    for name, hint in typing.get_type_hints(kind).items():
        for inner in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                found[name] = inner
                found |= {f"{name}.{k}": v for k, v in config_classes(inner).items()}
    return found


GROUPS = config_classes(PpoConfig)
NUMBERS = {
    f"{where}.{name}".lstrip(".")
    for where, kind in {"": PpoConfig, **GROUPS}.items()
    for name, hint in typing.get_type_hints(kind).items()
    if {int, float} & {hint, *typing.get_args(hint)} and str not in typing.get_args(hint)
}  # the fields that take numbers alone
CONFIGS = {kind.__name__ for kind in (PpoConfig, *GROUPS.values())}


def call(kind: type, where: str, translation: Translation, depth: int = 0) -> str:
    """Returns the code that makes the config, or a group of its fields, with a line for each."""
    indent = "    " * (depth + 1)
    lines = []
    for spec in dataclasses.fields(kind):
        name = f"{where}{spec.name}"
        source = translation.sources.get(name)
        if name in translation.fields and (source or translation.fields[name] != spec.default):
            beside = f"  # {translation.trainer}: {comment(source)}" if source else ""
            code = as_code(translation.fields[name], indent)
            first, *rest = code.split("\n")
            lines += [f"{indent}{spec.name}={first}{beside if rest else ',' + beside}", *rest]
            lines[-1] += "," if rest else ""
        elif name in GROUPS and any(f.startswith(f"{name}.") for f in translation.fields):
            inner = call(GROUPS[name], f"{name}.", translation, depth + 1)
            lines.append(f"{indent}{spec.name}={inner},")
    return "\n".join([f"{kind.__name__}(", *lines, "    " * depth + ")"])


def as_code(value: Any, indent: str) -> str:
    """Returns a value as Python writes it; a mapping of many entries has a line for each."""
    if isinstance(value, Code):
        return value.text
    if isinstance(value, Mapping):
        entries = [f"{key!r}: {as_code(each, indent)}" for key, each in value.items()]
        if len(entries) > 4:
            return "\n".join(["{", *(f"{indent}    {entry}," for entry in entries), indent + "}"])
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple) and not all(is_literal(item) for item in value):
        return repr(type(value)(item if is_literal(item) else str(item) for item in value))
    return repr(value if is_literal(value) else str(value))


def is_literal(value: Any) -> bool:
    """Says whether Python reads the value as it writes it; a date or an infinity of YAML it does
    not.
    """
    try:
        ast.literal_eval(repr(value))
    except (ValueError, SyntaxError):
        return False
    return True
