"""Proxies, by which a test uses objects that live in the program's process.

Sent into the sandbox as part of one program, see `inside.py`. The class of a proxy is made
after the class over there, with its name and its bases, so `isinstance`, `type` and `except` mean
what they mean in Python. Operators and attributes ask the program's process. A program's `==`, `<`
or `-` is not believed about a plain value as such, since it could say yes to anything; see
`compare` and `arithmetic`.
"""

from __future__ import annotations

import operator

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

if __name__ != "__main__":  # inside, what is imported here stands above as part of one program
    from spmdrl.rewards.sandbox.program import (
        ARITHMETIC,
        COMPARISONS,
        IMMUTABLE,
        NUMBERS,
        OPERATORS,
    )
    from spmdrl.rewards.sandbox.values import SCALARS, containers, value_name

BLIND = 64  # wrong values among which a program's operator is asked about the right one
LOCAL = {  # attributes that a proxy has itself
    "__class__", "__traceback__", "__cause__", "__context__", "__suppress_context__",
    "__notes__", "with_traceback", "__copy__", "__deepcopy__", "_spmdrl_tainted",
}  # fmt: skip
# By these, numpy would let an object decide what a function of numpy returns, or where in the
# judge's memory its data is. `__array__`, which returns data, is not among them.
HOOKS = ("__array_", "__dlpack")


class Unjudged(BaseException):
    """The judge cannot say whether the test passes. Only a test brings this about, no program."""


class ProgramFailed(BaseException):
    """The program's process has ended or answers what is no answer. No test can catch this."""


class Meta(type):
    """The class of a proxy's class, which stands for a class of the program."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], remote: Any = None
    ) -> Meta:
        if remote is None and name != "Remote":
            raise Unjudged(f"the test derives the class {name} from one of the program")
        made = super().__new__(cls, name, bases, members)
        type.__setattr__(made, "_spmdrl_class", remote)
        return made

    def __init__(cls, name: str, bases: Any, members: Any, remote: Any = None) -> None:
        super().__init__(name, bases, members)

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        channel, place = class_remote(cls)
        return channel.call(place, arguments, keywords)

    def __getattribute__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            try:
                return super().__getattribute__(name)
            except AttributeError:
                refuse_hook(name)
        channel, place = class_remote(cls)
        return channel.ask("get", place, name)

    def __setattr__(cls, name: str, value: Any) -> None:
        channel, place = class_remote(cls)
        channel.ask("set", place, name, value)

    def __delattr__(cls, name: str) -> None:
        channel, place = class_remote(cls)
        channel.ask("del", place, name)

    def __instancecheck__(cls, value: Any) -> bool:
        if cls in type(value).__mro__:
            return True
        remote = remote_of(value)
        if remote is None:
            return False
        return bool(remote[0].ask("instance", remote[1], cls))

    def __subclasscheck__(cls, value: Any) -> bool:
        if isinstance(value, type) and cls in value.__mro__:
            return True
        remote = remote_of(value)
        if remote is None:
            return False
        return bool(remote[0].ask("subclass", remote[1], cls))

    def __bool__(cls) -> bool:
        return True

    def __iter__(cls) -> Any:
        return of_library(cls, "builtins", "iter")

    def __len__(cls) -> int:
        return int(of_library(cls, "builtins", "len"))

    def __contains__(cls, value: Any) -> bool:
        return bool(of_library(cls, "operator", "contains", value))

    def __getitem__(cls, key: Any) -> Any:
        return of_library(cls, "operator", "getitem", key)

    def __repr__(cls) -> str:
        return str(of_library(cls, "builtins", "repr"))


def refuse_hook(name: str) -> None:
    """Raises AttributeError for a name by which a library would ask the program for a verdict."""
    if name.startswith(HOOKS) and name != "__array__":
        raise AttributeError(f"{name} of an object of the program is not used here")


def of_library(cls: Any, module: str, name: str, *rest: Any) -> Any:
    channel, _ = class_remote(cls)
    return channel.of_library(module, name, (cls, *rest), {})


def class_remote(cls: type) -> tuple[Any, int]:
    found: tuple[Any, int] = type.__getattribute__(cls, "_spmdrl_class")
    return found


def remote_of(value: Any) -> tuple[Any, int] | None:
    """The channel and the place of a proxy, or None for what is none."""
    kind = type(value)
    if kind is Meta:
        return class_remote(value)
    if type(kind) is Meta:
        found: tuple[Any, int] = object.__getattribute__(value, "_spmdrl")
        return found
    return None


def has_operator(kind: type, name: str) -> bool:
    return any(name in vars(each) for each in kind.__mro__ if each is not object)


class Remote(metaclass=Meta):
    """A proxy. What it has beside this depends on the operators of the program's class."""

    def __getattribute__(self, name: str) -> Any:
        if name in LOCAL or (name in OPERATORS and has_operator(type(self), name)):
            return object.__getattribute__(self, name)
        refuse_hook(name)
        channel, place = object.__getattribute__(self, "_spmdrl")
        return channel.ask("get", place, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LOCAL:
            object.__setattr__(self, name, value)
            return
        channel, place = object.__getattribute__(self, "_spmdrl")
        channel.ask("set", place, name, value)

    def __delattr__(self, name: str) -> None:
        channel, place = object.__getattribute__(self, "_spmdrl")
        channel.ask("del", place, name)

    def __copy__(self) -> Any:
        channel, _ = object.__getattribute__(self, "_spmdrl")
        return channel.of_library("copy", "copy", (self,), {})

    def __deepcopy__(self, memo: Any) -> Any:
        channel, _ = object.__getattribute__(self, "_spmdrl")
        return channel.of_library("copy", "deepcopy", (self,), {})


# ---- operators of proxies


def is_data(value: Any) -> bool:
    """Returns True for a plain value, or a class or function of the library."""
    kind = type(value)
    return (
        kind in SCALARS
        or kind in (tuple, frozenset, bytes)
        or kind in containers()
        or value_name(kind) is not None
        or kind.__module__ == "numpy"
    )


def forward(name: str) -> Callable[..., Any]:
    def method(self: Any, *rest: Any) -> Any:
        channel, place = object.__getattribute__(self, "_spmdrl")
        return channel.operate(place, name, rest)

    return method


def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
    channel, place = object.__getattribute__(self, "_spmdrl")
    return channel.call(place, arguments, keywords)


def wait(self: Any) -> Iterator[Any]:
    """Lets the program's process run the coroutine to its end. A generator, as `await` wants."""
    channel, place = object.__getattribute__(self, "_spmdrl")
    return channel.ask("await", place)
    yield


def is_trusted(value: Any, other: Any = 0) -> bool:
    """Whether the test names the class of this object, and it is no result of arithmetic with a
    plain value. Otherwise an object in place of a number could pass for any number: `x - 9` could
    be one that is equal to 0. Such a result may be equal to an `other` that is neither 0 nor 1."""
    channel, _ = object.__getattribute__(value, "_spmdrl")
    tainted = "_spmdrl_tainted" in object.__getattribute__(value, "__dict__")
    if tainted and (isinstance(other, bool | None) or other in (0, 1)):
        return False
    return any(kind in channel.named for kind in type(value).__mro__)


def is_own(value: Any, name: str) -> bool:
    """Whether the program has written this operator."""
    return name in type.__getattribute__(type(value), "_spmdrl_own")


def view_of(value: Any) -> tuple[bool, Any]:
    """Whether the object's class is based on one of plain data, and that data."""
    base: Any
    for base in IMMUTABLE:
        if isinstance(value, base):
            return True, base(value)
    channel, place = object.__getattribute__(value, "_spmdrl")
    has, data = channel.ask("view", place)
    return bool(has), data


def compare(name: str) -> Callable[[Any, Any], Any]:
    """A comparison. With another object of the program, the program's word counts, unless its `==`
    says yes to foreign objects too. With a plain value, the data that the object is based on
    counts or, for an object of a class that the test names, the program's word, if that is another
    one for wrong values: it does not know which of many is the one that is asked for."""

    def method(self: Any, other: Any) -> Any:
        channel, place = object.__getattribute__(self, "_spmdrl")
        if name == "__ne__":
            equal = compare("__eq__")(self, other)
            return equal if equal is NotImplemented else not equal
        if remote_of(other) is not None:
            if name != "__eq__":
                return channel.operate(place, name, (other,))
            return channel.blind_equal(place, other, [None, 0, "", ()], True)
        if not is_data(other):
            return NotImplemented
        if is_own(self, name) and is_trusted(self, other if name == "__eq__" else 0):
            if name == "__eq__":
                return channel.blind_equal(place, other, wrong_values(other, BLIND), False)
            return channel.blind_order(place, name, other)
        has, data = view_of(self)
        return getattr(operator, name)(data, other) if has else NotImplemented

    return method


def arithmetic(name: str) -> Callable[[Any, Any], Any]:
    """Returns the method of an operator. With a plain value, only objects of a class that the test
    names calculate; and a plain result counts if wrong values give others.
    """

    def method(self: Any, other: Any, *rest: Any) -> Any:
        channel, place = object.__getattribute__(self, "_spmdrl")
        if not is_data(other):
            return channel.operate(place, name, (other, *rest))
        in_place = name.startswith("__i")
        if not is_own(self, name) and not in_place:
            has, data = view_of(self)
            known = getattr(type(data), name, None) if has else None
            return known(data, other) if known else NotImplemented
        if not is_trusted(self) and is_own(self, name):
            return NotImplemented
        result = channel.operate(place, name, (other, *rest))
        if remote_of(result) is not None:
            if not in_place:
                object.__setattr__(result, "_spmdrl_tainted", True)
        elif result is not NotImplemented and channel.is_constant(place, name, other, result):
            return NotImplemented
        return result

    return method


def number(name: str) -> Callable[..., Any]:
    def method(self: Any, *rest: Any) -> Any:
        if "_spmdrl_tainted" in object.__getattribute__(self, "__dict__"):
            raise TypeError(f"{name} of a result of arithmetic with a plain value")
        return forward(name)(self, *rest)

    return method


def contains(self: Any, value: Any) -> bool:
    channel, place = object.__getattribute__(self, "_spmdrl")
    if is_data(value) and is_own(self, "__contains__") and not is_trusted(self):
        return any(each == value for each in self)
    return bool(channel.operate(place, "__contains__", (value,)))


def operator_for(name: str) -> Callable[..., Any]:
    special: dict[str, Callable[..., Any]] = {
        "__call__": call, "__await__": wait, "__contains__": contains
    }  # fmt: skip
    if name in special:
        return special[name]
    if name in COMPARISONS:
        return compare(name)
    if name in ARITHMETIC:
        return arithmetic(name)
    return number(name) if name in NUMBERS else forward(name)


def wrong_values(value: Any, count: int) -> list[Any]:
    """Values like `value`, none equal to it. Each is made from one before, so that the right one
    is not the middle of them."""
    import random

    dice = random.Random()
    found = [value]
    for _ in range(8 * count):
        new = alter(dice.choice(found), dice)
        if len(found) <= count and not any(new == each for each in found):
            found.append(new)
    return found[1:]


def alter(value: Any, dice: Any) -> Any:
    if isinstance(value, bool) or value is None:
        return dice.choice([True, False, None, dice.randrange(99)])
    if isinstance(value, int | float | complex):
        return value + dice.choice([-1, 1]) * dice.choice([1, 2, 3, 5, 10, 100])
    if isinstance(value, str):
        place = dice.randrange(len(value) + 1)
        letter = dice.choice(value + "abcdefghijklmnopqrstuvwxyz0123456789")
        return value[:place] + letter + value[place + dice.randrange(2) :]
    if isinstance(value, list | tuple):
        items = list(value)
        if items and dice.random() < 0.8:
            place = dice.randrange(len(items))
            items[place] = alter(items[place], dice)
        else:
            items.append(dice.randrange(10))
        return type(value)(items)
    if isinstance(value, dict) and value:
        key = dice.choice(list(value))
        return {**value, key: alter(value[key], dice)}
    if isinstance(value, set | frozenset):
        return value ^ {dice.randrange(100)}
    try:
        return value + dice.choice([-1, 1]) * dice.randrange(1, 100)
    except TypeError:
        return dice.choice([None, 0, "", (), dice.random()])
