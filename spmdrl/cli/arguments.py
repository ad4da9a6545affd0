"""Makes a config value from the command line and a config file. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spmdrl import config as configs
from spmdrl.cli.function_code import as_text, code_of
from spmdrl.cli.hub_names import with_names
from spmdrl.cli.paths import check_paths
from spmdrl.config import MOVED, REPLACED, AlgoConfig, ConfigError, DerivedCount, RunConfig

OPTIONS = ("--algo.loss_args.", "--algo.advantage_args.")

C = TypeVar("C")
R = TypeVar("R", bound=RunConfig)

hints_of: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)


def load_config(
    path: str, kind: type[C], overrides: Mapping[str, Any], flag: str = "--config"
) -> C:  # fmt: skip
    """Executes the file, takes its `config`, and replaces fields: {"actor.optim.lr": 1e-6}.

    A whole group is replaced before single keys of it, in whatever order they are given.
    The file's folder is importable while it runs, so that configs can share a base.
    flag: by which the file was given, for errors.
    Raises ConfigError with the file, the key and the nearest valid names.
    """
    if not path or isinstance(path, bool):
        raise ConfigError(
            f"{flag} FILE is required: a Python file with config = {kind.__name__}(...)"
        )
    file = Path(str(path))
    if not is_file(file):
        raise ConfigError(f"{flag}: no such file: {path!r}")
    spec = importlib.util.spec_from_file_location("spmdrl_config", file)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{flag}: {path!r} is not a Python file (*.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    folder = str(file.parent.resolve())  # once: the file may change to another folder
    forget_siblings(folder)
    before = set(sys.modules)
    sys.path.insert(0, folder)
    launched = {name: os.environ.get(name) for name in LAUNCHER}
    try:
        # not by the loader, which takes what it compiled of a file of the same second and size
        code = compile(file.read_bytes(), spec.origin or "", "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{path}: {type(error).__name__}: {error}{_line_of(error, spec.origin)}"
            f"{_nearest_to(error)}"
        ) from error
    finally:
        with suppress(ValueError):  # the file may have taken it away
            sys.path.remove(folder)
        SIBLINGS.update(name for name in set(sys.modules) - before if _stands_in(name, folder))
        changed = restore_environment(launched)
    if changed:
        raise ConfigError(
            f"{path} changes {', '.join(changed)} of the environment, by which torchrun tells a "
            "rank which one it is: each would be a run of its own. Leave them as they are; set or "
            "remove single other variables"
        )
    config = getattr(module, "config", None)
    if not isinstance(config, kind):
        raise ConfigError(
            f"{path} must define `config = {kind.__name__}(...)`; found "
            f"{'nothing of that name' if config is None else type(config).__name__}"
        )
    config = checked(config, str(path))
    for key in sorted(overrides, key=lambda key: key.count(".")):
        config = override(config, key, overrides[key])
    return config


SIBLINGS: set[str] = set()  # modules that config files have imported from their own folders


def forget_siblings(folder: str) -> None:
    """Makes a config import the modules of its own folder, where an earlier config of the process
    has imported others of the same names from its folder.
    """
    for name in [each for each in SIBLINGS if not _stands_in(each, folder)]:
        top = Path(folder, name.partition(".")[0])
        if top.is_dir() or is_file(top.with_suffix(".py")):
            SIBLINGS.discard(name)
            sys.modules.pop(name, None)


def _stands_in(name: str, folder: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None)
    return file is not None and str(file).startswith(folder + os.sep)


# what torchrun, Slurm or a user's own launcher tells a rank of its place
LAUNCHER = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE",
    "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_ERROR_FILE",
)  # fmt: skip


def restore_environment(launched: Mapping[str, str | None]) -> list[str]:
    """The variables that differ from what they were, which they are again."""
    changed = [name for name, value in launched.items() if os.environ.get(name) != value]
    for name in changed:
        value = launched[name]
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return changed


MOST_GPU_GIB = 2**20


class Dry(NamedTuple):
    """--dry-run and what goes with it."""

    run: bool
    ranks: int  # to plan for; 0: those that run
    show_config: bool  # every field of it, in place of what differs from the defaults
    gpu_gib: float  # of the GPUs to plan for; 0: those that are here


def dry_flags(dry_run: Any, ranks: Any, show_config: Any, gpu_gib: Any = 0.0) -> Dry:
    """Raises ConfigError for flags of a wrong type, and without --dry-run."""
    dry = Dry(
        converted(dry_run, bool, "--dry-run"), converted(ranks, int, "--ranks"),
        converted(show_config, bool, "--show_config"), converted(gpu_gib, float, "--gpu_gib"),
    )  # fmt: skip
    if not 0 <= dry.gpu_gib <= MOST_GPU_GIB:
        raise ConfigError(
            f"--gpu_gib {gpu_gib}: the GiB of one GPU, such as 80; 0: of the GPUs here"
        )
    if dry.gpu_gib and not dry.run:
        raise ConfigError(f"--gpu_gib {gpu_gib} is for --dry-run; a run asks its GPUs")
    if dry.ranks and not dry.run:
        raise ConfigError(f"--ranks {ranks} is for --dry-run; torchrun says how many run")
    if dry.show_config and not dry.run:
        raise ConfigError(
            "--show_config is for --dry-run; a run writes all of its config to config.py in run_dir"
        )
    return dry


def read_arguments(
    kind: type[R], config: str, dry_run: Any, ranks: Any, show_config: Any, gpu_gib: Any,
    overrides: Mapping[str, Any],
) -> tuple[R, Dry]:  # fmt: skip
    """The config and the flags of a program that trains; paths are checked. Raises ConfigError."""
    dry = dry_flags(dry_run, ranks, show_config, gpu_gib)
    value = load_config(config, kind, overrides)
    check_paths(value)
    return value, dry


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


def _nearest_to(error: BaseException) -> str:
    """ "; nearest: ..." where a class of configs was given a field that it has not got."""
    words = r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
    found = re.fullmatch(words, str(error))
    kind = getattr(configs, found[1], None) if found else None
    if not found or not dataclasses.is_dataclass(kind):
        return ""
    return f"; nearest: {', '.join(nearest_keys(kind, found[2]))}"


def override(config: C, key: str, value: Any) -> C:
    """A copy with the field at a dotted key replaced, its type checked."""
    return _replaced(config, key.split("."), value, f"--{key}")


def keys_of(kind: type) -> list[str]:
    """The dotted keys of all fields of a config class, those of optional groups too."""
    found = []
    for name, wanted in hints_of(kind).items():
        found.append(name)
        for option in _options(wanted):
            if dataclasses.is_dataclass(option) and isinstance(option, type):
                found += [f"{name}.{inner}" for inner in keys_of(option)]
    return found


def nearest_keys(kind: Any, name: str) -> list[str]:
    """Keys of a config class that may have been meant: those that end in this name, close ones, or
    all of its own."""
    if name in MOVED and not issubclass(kind, AlgoConfig):
        return [f"algo.{MOVED[name]}"]
    keys = keys_of(kind)
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if same:
        return sorted(same, key=lambda key: key.count("."))[:5]
    own = [key for key in keys if "." not in key]
    close = difflib.get_close_matches(name, own, n=3)
    leaves = {key.rpartition(".")[2] for key in keys}
    near = difflib.get_close_matches(name, sorted(leaves), n=1, cutoff=0.75)
    inner = [key for key in keys if "." in key and key.rpartition(".")[2] in near]
    return [*close, *(key for key in inner if key not in close)][:5] or own


def _replaced(node: Any, names: list[str], value: Any, flag: str) -> Any:
    if isinstance(node, Mapping):  # its own field checks the entry; a key may have dots in it
        if len(names) > 1 and flag.startswith(OPTIONS):  # an option that is a mapping: reward_keys
            inner = node.get(names[0])
            inner = inner if isinstance(inner, Mapping) else {}
            return {**node, names[0]: _replaced(inner, names[1:], value, "--")}
        key, left = entry_of(node, names)
        if left:
            return {**node, key: _replaced(node[key], left, value, flag)}
        return {**node, ".".join(names): value}
    known = [f.name for f in dataclasses.fields(node)]
    if isinstance(node, AlgoConfig) and names[0] in MOVED:
        moved = ".".join([MOVED[names[0]], *names[1:]])
        raise ConfigError(f"{flag}: it is now --{above_of(flag, names)}{moved}")
    if isinstance(node, RunConfig) and names[0] in REPLACED:
        raise ConfigError(
            f"{flag}: it is now {REPLACED[names[0]]}: "
            """--trackers '("tensorboard", "wandb")' --project sums"""
        )
    if names[0] not in known:
        near = nearest_keys(type(node), names[0])
        close = ", ".join(f"{above_of(flag, names)}{key}" for key in near)
        where = type(node).__name__
        raise ConfigError(f"{flag}: {where} has no field {names[0]!r}; nearest: {close}")
    current = getattr(node, names[0])
    wanted = hints_of(type(node))[names[0]]
    if len(names) == 1:
        return dataclasses.replace(node, **{names[0]: converted(value, wanted, flag)})
    if current is None:
        current = _default_of(wanted, flag)
    if not dataclasses.is_dataclass(current) and not isinstance(current, Mapping):
        raise ConfigError(f"{flag}: {names[0]} is a value, it has no field {names[1]!r}")
    inner = _replaced(current, names[1:], value, flag)
    return dataclasses.replace(node, **{names[0]: converted(inner, wanted, flag)})


def entry_of(groups: Mapping[str, Any], names: list[str]) -> tuple[str, list[str]]:
    """Returns the key of a mapping of groups that the names begin with, and the names behind it;
    none where no group is named. A key may have dots in it.
    """
    for key, group in groups.items():
        inner = key.split(".")
        if dataclasses.is_dataclass(group) and names[: len(inner)] == inner:
            return key, names[len(inner) :]
    return "", []


def above_of(flag: str, names: list[str]) -> str:
    """Returns the part of a flag before these names: "algo." of --algo.gamma and ["gamma"]."""
    return flag[2:].removesuffix(".".join(names))


def _default_of(wanted: Any, flag: str) -> Any:
    """An optional group that is off is switched on by setting a field of it."""
    for option in typing.get_args(wanted):
        if dataclasses.is_dataclass(option) and isinstance(option, type):
            return option()
    raise ConfigError(f"{flag}: the field above it is not set")


def checked(node: Any, where: str) -> Any:
    """The config with every value converted to its field's type; ConfigError where one cannot."""
    hints = hints_of(type(node))
    values = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        place = f"{where}: {type(node).__name__}.{field.name}"
        value = converted(value, hints[field.name], place)
        if dataclasses.is_dataclass(value) and not callable(value):
            value = checked(value, where)
        elif isinstance(value, Mapping):
            is_group = {key: dataclasses.is_dataclass(item) for key, item in value.items()}
            value = {
                key: checked(item, where) if is_group[key] and not callable(item) else item
                for key, item in value.items()
            }
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
    if origin is not None and issubclass(origin, Mapping):
        return _fit_mapping(value, *typing.get_args(wanted))
    if origin is not None:  # of a function of the user's: list[int], Sequence[float], set[str]
        kind = typing.get_args(wanted)[0]
        fits = isinstance(value, origin) and not isinstance(value, str)
        return fits and all(_fit_any(item, kind)[0] for item in value), value
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
    """The config as Python text, every field written out: config.py of the run folder. What is
    DerivedCount is left out: it is found anew.

    A file or folder that was downloaded from a hub has its name there, with its commit.
    """
    pad = "    " * (indent + 1)
    lines = [f"{type(config).__name__}("]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, DerivedCount):
            continue
        text = (
            as_source(value, indent + 1) if dataclasses.is_dataclass(value) else field_text(value)
        )
        lines.append(f"{pad}{field.name}={text},")
    return "\n".join(lines) + "\n" + "    " * indent + ")"


def field_text(value: Any) -> str:
    return as_text(with_names(value))


def changed_fields(config: Any, usual: Any = None, where: str = "") -> list[str]:
    """A line "actor.optim.lr=0.001" for each field that differs from its default.

    usual: the value whose fields are the defaults; None: those of the config's class.
    """
    lines = []
    for field in dataclasses.fields(config):
        value, key = getattr(config, field.name), f"{where}{field.name}"
        default = default_of(field) if usual is None else getattr(usual, field.name)
        if dataclasses.is_dataclass(value) and not callable(value):
            is_alike = type(default) is type(value)
            inner = changed_fields(value, default if is_alike else None, f"{key}.")
            lines += inner or ([] if is_alike else [f"{key}={type(value).__name__}()"])
        elif default is dataclasses.MISSING or as_text(value) != as_text(default):
            lines.append(f"{key}={field_text(value)}")
    return lines


def default_of(field: dataclasses.Field[Any]) -> Any:
    """MISSING where it has none."""
    factory = field.default_factory
    return field.default if factory is dataclasses.MISSING else factory()


def shown_config(config: Any, whole: bool) -> str:
    """Returns the text that --dry-run prints of a config. whole: every field, as Python text."""
    if whole:
        return as_source(config)
    title = f"{type(config).__name__}: what differs from the defaults (--show_config: all of it)"
    return "\n".join([title, *(f"  {line}" for line in changed_fields(config))])


def fingerprint(config: Any) -> str:
    """Equal on ranks whose configs are equal, functions by their code."""
    text = as_source(config)
    code = "".join(sorted(code_of(config)))
    return hashlib.sha256((text + code).encode()).hexdigest()
