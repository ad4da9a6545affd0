"""From the command line and a config file to a config value. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from spmdrl.config import ConfigError

C = TypeVar("C")


def load_config(path: str, kind: type[C], overrides: Mapping[str, Any]) -> C:
    """Executes the file, takes its `config`, and replaces fields: {"actor.optim.lr": 1e-6}.

    The file's folder is importable while it runs, so that configs can share a base.
    Raises ConfigError with the file, the key and the nearest valid names.
    """
    if not path or isinstance(path, bool):
        raise ConfigError(
            f"--config FILE is required: a Python file with config = {kind.__name__}(...)"
        )
    file = Path(str(path))
    if not is_file(file):
        raise ConfigError(f"--config: no such file: {path!r}")
    spec = importlib.util.spec_from_file_location("spmdrl_config", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config: {path!r} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent.resolve()))
    try:
        # not by the loader, which takes what it compiled of a file of the same second and size
        code = compile(file.read_bytes(), spec.origin or "", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}: {type(error).__name__}: {error}{_line_of(error, spec.origin)}"
        ) from error
    finally:
        sys.path.remove(str(file.parent.resolve()))
    config = getattr(module, "config", None)
    if not isinstance(config, kind):
        raise ConfigError(
            f"{path} must define `config = {kind.__name__}(...)`; found "
            f"{'nothing of that name' if config is None else type(config).__name__}"
        )
    config = checked(config, str(path))
    for key, value in overrides.items():
        config = override(config, key, value)
    return config


def arguments(
    kind: type[C], config: str, dry_run: Any, ranks: Any, overrides: Mapping[str, Any]
) -> tuple[C, bool, int]:
    """The config, --dry-run and --ranks of a program that trains. Raises ConfigError."""
    dry_run, ranks = converted(dry_run, bool, "--dry-run"), converted(ranks, int, "--ranks")
    if ranks and not dry_run:
        raise ConfigError(f"--ranks {ranks} is for --dry-run; torchrun says how many run")
    return load_config(config, kind, overrides), dry_run, ranks


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long, a folder that may not be looked into
        return False


def _line_of(error: BaseException, file: str | None) -> str:
    """ ", line N" of the config file where the error came from there."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def override(config: C, key: str, value: Any) -> C:
    """A copy with the field at a dotted key replaced, its type checked."""
    return _replaced(config, key.split("."), value, f"--{key}")


def _replaced(node: Any, names: list[str], value: Any, flag: str) -> Any:
    if isinstance(node, Mapping):  # its own field checks the entry; a key may have dots in it
        return {**node, ".".join(names): value}
    known = [f.name for f in dataclasses.fields(node)]
    if names[0] not in known:
        close = difflib.get_close_matches(names[0], known, n=3) or known
        where = type(node).__name__
        raise ConfigError(f"{flag}: {where} has no field {names[0]!r}; nearest: {', '.join(close)}")
    current = getattr(node, names[0])
    wanted = typing.get_type_hints(type(node))[names[0]]
    if len(names) == 1:
        return dataclasses.replace(node, **{names[0]: converted(value, wanted, flag)})
    if current is None:
        current = _default_of(wanted, flag)
    if not dataclasses.is_dataclass(current) and not isinstance(current, Mapping):
        raise ConfigError(f"{flag}: {names[0]} is a value, it has no field {names[1]!r}")
    inner = _replaced(current, names[1:], value, flag)
    return dataclasses.replace(node, **{names[0]: converted(inner, wanted, flag)})


def _default_of(wanted: Any, flag: str) -> Any:
    """An optional group that is off is switched on by setting a field of it."""
    for option in typing.get_args(wanted):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option()
    raise ConfigError(f"{flag}: the field above it is not set")


def checked(node: Any, where: str) -> Any:
    """The config with every value converted to its field's type; ConfigError where one cannot."""
    hints = typing.get_type_hints(type(node))
    values = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        place = f"{where}: {type(node).__name__}.{field.name}"
        value = converted(value, hints[field.name], place)
        if dataclasses.is_dataclass(value) and not callable(value):
            value = checked(value, where)
        values[field.name] = value
    return dataclasses.replace(node, **values)


def converted(value: Any, wanted: Any, flag: str) -> Any:
    """`value` as the field's type: 1 for a float, "a" for a tuple of one; else ConfigError."""
    fits, result = _fit_any(value, wanted)
    if fits:
        return result
    names = [n for o in _options(wanted) for n in typing.get_args(o) if isinstance(n, str)]
    close = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
    hint = f"; did you mean {close[0]!r}?" if close else ""
    got = f"{type(value).__name__} {value!r}{hint}"
    raise ConfigError(f"{flag}: expected {describe(wanted)}, got {got}")


def _options(wanted: Any) -> tuple[Any, ...]:
    if typing.get_origin(wanted) in (typing.Union, types.UnionType):
        return typing.get_args(wanted)
    return (wanted,)


def _fit(value: Any, wanted: Any) -> tuple[bool, Any]:
    origin = typing.get_origin(wanted)
    if wanted is Any:
        return True, value
    if wanted is type(None):
        return value is None, value
    if origin is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(wanted), value
    if wanted is float:
        return _fit_float(value)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    if wanted is str:  # fire reads --run_dir 7 as a number
        return isinstance(value, str | int | float) and not isinstance(value, bool), str(value)
    if origin is tuple:
        kinds = typing.get_args(wanted)
        items = value if isinstance(value, tuple | list) else (value,)
        fitted = [_fit_any(v, kinds[0]) for v in items]
        right_length = Ellipsis in kinds or len(items) == len(kinds)
        return right_length and all(ok for ok, _ in fitted), tuple(v for _, v in fitted)
    if origin is typing.get_origin(Callable[..., Any]):
        return callable(value), value
    if origin is not None and isinstance(origin, type):
        return _fit_mapping(value, *typing.get_args(wanted))
    return isinstance(value, wanted), value


def _fit_any(value: Any, wanted: Any) -> tuple[bool, Any]:
    """The first option of a union that fits."""
    fitted = [_fit(value, option) for option in _options(wanted)]
    return next((found for found in fitted if found[0]), (False, value))


def _fit_float(value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False, value
    fits = isinstance(value, float) or abs(value) < 2**1000
    return fits, float(value) if fits else value


def _fit_mapping(value: Any, key: Any, item: Any) -> tuple[bool, Any]:
    # fire reads the JSON words true and false as strings, and both are truthy
    if not isinstance(value, Mapping) or any(
        isinstance(v, str) and v in ("true", "false") for v in value.values()
    ):
        return False, value
    fitted = {k: _fit_any(v, item) for k, v in value.items()}
    fits = all(isinstance(k, key) for k in value) and all(ok for ok, _ in fitted.values())
    return fits, {k: v for k, (_, v) in fitted.items()}


def describe(wanted: Any) -> str:
    if typing.get_origin(wanted) is typing.Literal:
        return "one of " + ", ".join(repr(v) for v in typing.get_args(wanted))
    if typing.get_origin(wanted) is typing.get_origin(Callable[..., Any]):
        return "a function"
    if _options(wanted) != (wanted,):
        return " or ".join(describe(option) for option in _options(wanted))
    if wanted is type(None):
        return "None"
    return (
        getattr(wanted, "__name__", str(wanted))
        if typing.get_origin(wanted) is None
        else (str(wanted).replace("typing.", "").replace("collections.abc.", ""))
    )


def as_source(config: Any, indent: int = 0) -> str:
    """The config as Python text, every field written out: config.py of the run folder."""
    pad = "    " * (indent + 1)
    lines = [f"{type(config).__name__}("]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        text = as_source(value, indent + 1) if dataclasses.is_dataclass(value) else literal(value)
        lines.append(f"{pad}{field.name}={text},")
    return "\n".join(lines) + "\n" + "    " * indent + ")"


def literal(value: Any) -> str:
    if isinstance(value, functools.partial):
        keywords = "".join(f", {k}={literal(v)}" for k, v in value.keywords.items())
        positional = "".join(f", {literal(v)}" for v in value.args)
        return f"partial({literal(value.func)}{positional}{keywords})"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k!r}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + "".join(f"{literal(v)}, " for v in value).removesuffix(" ") + ")"
    if isinstance(value, list):
        return "[" + ", ".join(map(literal, value)) + "]"
    if isinstance(value, set | frozenset) and value:  # their order is another in each process
        return "{" + ", ".join(sorted(map(literal, value))) + "}"
    return repr(value)


def fingerprint(config: Any) -> str:
    """Equal on ranks whose configs are equal, functions by their code."""
    text = as_source(config)
    code = "".join(sorted(_code_of(config)))
    return hashlib.sha256((text + code).encode()).hexdigest()


def _text_of(code: types.CodeType) -> str:
    """The same in every process: no addresses, and sets in order."""
    consts = [
        _text_of(c) if isinstance(c, types.CodeType)
        else repr(sorted(map(repr, c))) if isinstance(c, frozenset) else repr(c)
        for c in code.co_consts
    ]  # fmt: skip
    return " ".join([code.co_code.hex(), *code.co_names, *consts])


def _code_of_class(cls: type) -> list[str]:
    """Its methods, properties and constants."""
    found = []
    for name, value in vars(cls).items():
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, types.FunctionType):
            found += _code_of(value)
        elif not name.startswith("__") and isinstance(value, str | int | float | tuple):
            found.append(f"{name} = {literal(value)}")
    return found


def _code_of(node: Any) -> list[str]:
    if isinstance(node, types.FunctionType):
        return [_text_of(node.__code__)]
    if isinstance(node, type):  # a tool with a state
        return [c for cls in node.__mro__[:-1] for c in _code_of_class(cls)]
    if isinstance(node, functools.partial):
        return _code_of(node.func)
    if isinstance(node, Mapping):
        return [c for v in node.values() for c in _code_of(v)]
    if isinstance(node, tuple):
        return [c for v in node for c in _code_of(v)]
    if dataclasses.is_dataclass(node):
        return [c for f in dataclasses.fields(node) for c in _code_of(getattr(node, f.name))]
    return []
