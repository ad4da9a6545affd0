"""--help: every field of a config, from the comments that stand beside it in spmdrl/config/."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import os
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from spmdrl.cli.function_code import as_text
from spmdrl.config import ConfigError


def asks_for_help(
    overrides: Mapping[str, Any], main: Callable[..., Any], kind: type | None = None,
    more_lines: Callable[[], list[str]] = list,
) -> bool:  # fmt: skip
    """Whether --help or -h is among them; then help is printed, on the first rank.

    main: of the program, whose docstring and whose module's are its usage. kind: of config.
    more_lines: what is printed below the fields of the config.
    """
    if not {"help", "h"} & overrides.keys():
        return False
    if os.environ.get("RANK", "0") == "0":
        fields = [] if kind is None else config_lines(kind)
        with suppress(BrokenPipeError):  # a pager was closed
            print(usage_of(main), *fields, *more_lines(), sep="\n", flush=True)
    return True


def refuse_unknown(others: Mapping[str, Any], main: Callable[..., Any]) -> None:
    """Raises ConfigError for flags that the program does not have."""
    known = [name for name in inspect.signature(main).parameters if name != "others"]
    for name in others:
        close = difflib.get_close_matches(name, known, n=3) or known
        near = ", ".join(f"--{each}" for each in close)
        raise ConfigError(f"--{name}: there is no such flag; nearest: {near}")


def usage_of(main: Callable[..., Any]) -> str:
    module = inspect.cleandoc(sys.modules[main.__module__].__doc__ or "")
    own = inspect.cleandoc(main.__doc__ or "")
    summary, _, arguments = own.partition("\n\nArgs:\n")
    flags = re.sub(r"^    (\w+):", r"  --\1:", arguments, flags=re.MULTILINE)
    flags = flags.replace("--overrides:", "--KEY VALUE:")
    return f"{module}\n\n{summary}\n\n{flags}"


def config_lines(kind: type) -> list[str]:
    """Every field of the config by its dotted name: type, default, and what it is."""
    parts: dict[type, list[str]] = {kind: [""]}  # config class -> where fields of it are
    lines: list[str] = []
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
    return lines


def field_lines(kind: type) -> list[str]:
    """Returns the fields, each with the comments above it and behind it."""
    comments: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            names = {field.name for field in dataclasses.fields(base)}
            own = comments_in(inspect.getsource(base), names)
            comments |= {name: own.get(name) or comments.get(name, "") for name in own}
    lines = []
    for field in dataclasses.fields(kind):
        value = "" if field.default is dataclasses.MISSING else f" = {as_text(field.default)}"
        lines.append(f"  {field.name}: {field.type}{value}")
        lines += [f"      {line}" for line in textwrap.wrap(comments[field.name].strip(), 92)]
    return lines


def comments_in(source: str, names: set[str]) -> dict[str, str]:
    """Returns the comments of the fields of these names that stand in the source of a class."""
    found: dict[str, str] = {}
    above = ""
    for row in source.splitlines():
        code, _, comment = row.strip().partition("# ")
        if (name := code.partition(":")[0]) in names:
            found[name], above = f"{above} {comment}".strip(), ""
        elif code:
            above = ""
        else:
            above += f" {comment}"
    return found
