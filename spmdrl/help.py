"""--help: every field of a config, from the comments that stand beside it in spmdrl/config.py."""

from __future__ import annotations

import dataclasses
import inspect
import os
import textwrap
import typing
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spmdrl.cli import literal


def asks_for_help(overrides: Mapping[str, Any], usage: str | None, kind: type) -> bool:
    """Whether --help or -h is among them; then help is printed, on the first rank."""
    if not {"help", "h"} & overrides.keys():
        return False
    if os.environ.get("RANK", "0") == "0":
        with suppress(BrokenPipeError):  # a pager was closed
            print(help_text(usage or "", kind), flush=True)
    return True


def help_text(usage: str, kind: type) -> str:
    """Usage, then every field of the config by its dotted name: type, default, and what it is."""
    parts: dict[type, list[str]] = {kind: [""]}  # config class -> where fields of it are
    lines = [usage.strip()]
    left = [kind]
    while left:
        part = left.pop(0)
        for name, found in typing.get_type_hints(part).items():
            for inner in (found, *typing.get_args(found)):
                if dataclasses.is_dataclass(inner) and isinstance(inner, type):
                    if inner not in parts:
                        left.append(inner)
                    parts.setdefault(inner, []).extend(f"{at}{name}." for at in parts[part])
    for part, places in parts.items():
        summary = inspect.cleandoc(part.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
        where = ", ".join(f"--{place}" for place in places if place)
        lines += ["", f"{where or part.__name__}  {summary}", *field_lines(part)]
    return "\n".join(lines)


def field_lines(kind: type) -> list[str]:
    """With the comments above a field and behind it."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    told: dict[str, str] = {}
    above = ""
    for row in inspect.getsource(kind).splitlines():
        code, _, comment = row.strip().partition("# ")
        if (name := code.partition(":")[0]) in fields:
            told[name], above = f"{above} {comment}", ""
        elif code:
            above = ""
        else:
            above += f" {comment}"
    lines = []
    for name, text in told.items():
        default = fields[name].default
        value = "" if default is dataclasses.MISSING else f" = {literal(default)}"
        lines.append(f"  {name}: {fields[name].type}{value}")
        lines += [f"      {line}" for line in textwrap.wrap(text.strip(), 92)]
    return lines
