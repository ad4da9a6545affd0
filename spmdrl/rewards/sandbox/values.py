"""Values between the processes of a sandbox: framing, and the form in which values travel.

The text of this file is sent into the sandbox together with `inside.py`, as one program.
Only JSON travels, so a message cannot bring code along. Numbers, text and None are themselves;
any other value is a JSON list whose first element is a tag. Lists, dictionaries, sets and the like
are numbered when they first travel. Both sides keep them, and each message begins with what has
changed in them, so a list that one side changes in place changes on the other side as well.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing typing would cost as much as the rest of the start
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

OUT_OF_MEMORY, OUT_OF_PROCESSES, OUT_OF_DISK = 240, 241, 242  # exit codes of an uncaught error
SCALARS = {type(None), bool, int, float, str}
MOST_SHARED = 4_000  # elements of all containers that are kept equal on both sides
LIBRARY = sys.stdlib_module_names | {"numpy"}


def read_exactly(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def read_frame(fd: int) -> bytes:
    return read_exactly(fd, int.from_bytes(read_exactly(fd, 4), "big"))


def frame(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


def write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def code_of(error: BaseException) -> int:
    """The exit code of a program that this error ends."""
    import errno

    number = getattr(error, "errno", None)
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and number == errno.ENOMEM):
        return OUT_OF_MEMORY
    if isinstance(error, BlockingIOError) and number == errno.EAGAIN:
        return OUT_OF_PROCESSES
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return OUT_OF_PROCESSES
    if isinstance(error, OSError) and number in (errno.ENOSPC, errno.EFBIG):
        return OUT_OF_DISK
    return 1


def plain(value: Any) -> Any:
    """Equal JSON text means equal as JSON: a tuple is a list, True is 1, 2.0 is 2; ten digits."""
    if isinstance(value, float):
        value = float(f"{value:.10g}")
        return int(value) if value.is_integer() and abs(value) < 1e15 else value
    if isinstance(value, int):
        return int(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple) or type(value).__qualname__ == "deque":
        return [plain(each) for each in value]
    if type(value).__module__ == "numpy":  # an array or a number of numpy
        return plain(value.tolist())
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


# ---- immutable values of the standard library: the arguments that make an equal one


def of_datetime(v: Any) -> tuple[Any, ...]:
    return v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond, v.tzinfo


VALUES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "fractions.Fraction": lambda v: (v.numerator, v.denominator),
    "decimal.Decimal": lambda v: (str(v),),
    "datetime.date": lambda v: (v.year, v.month, v.day),
    "datetime.datetime": of_datetime,
    "datetime.time": lambda v: (v.hour, v.minute, v.second, v.microsecond, v.tzinfo),
    "datetime.timedelta": lambda v: (v.days, v.seconds, v.microseconds),
    "datetime.timezone": lambda v: (v.utcoffset(None),),
    "zoneinfo.ZoneInfo": lambda v: (v.key,),
    "builtins.range": lambda v: (v.start, v.stop, v.step),
    "builtins.slice": lambda v: (v.start, v.stop, v.step),
    "builtins.complex": lambda v: (v.real, v.imag),
    "builtins.dict_keys": lambda v: (list(v),),
    "builtins.dict_values": lambda v: (list(v),),
    "builtins.dict_items": lambda v: (list(v),),
    "builtins.mappingproxy": lambda v: (dict(v),),
    "builtins.ellipsis": lambda v: (),
    "types.SimpleNamespace": lambda v: (dict(vars(v)),),
    "uuid.UUID": lambda v: (str(v),),
    "pathlib.PosixPath": lambda v: (str(v),),
    "pathlib.PurePosixPath": lambda v: (str(v),),
    "ipaddress.IPv4Address": lambda v: (int(v),),
    "ipaddress.IPv6Address": lambda v: (int(v),),
    "array.array": lambda v: (v.typecode, list(v)),
    "re.Pattern": lambda v: (v.pattern, v.flags),
    "collections.ChainMap": lambda v: tuple(v.maps),
    "collections.UserList": lambda v: (v.data,),
    "collections.UserDict": lambda v: (v.data,),
    "collections.UserString": lambda v: (v.data,),
}


def is_of_numpy(kind: type) -> bool:
    """Says whether it is an array or a number of numpy's own; a class based on one is not."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and (
        kind is numpy.ndarray or (kind.__module__ == "numpy" and issubclass(kind, numpy.generic))
    )


def make_value(name: str, arguments: list[Any]) -> Any:
    """The inverse of VALUES[name]. Raises KeyError for a name that is not there."""
    VALUES[name]
    if name == "builtins.ellipsis":
        return ...
    if name == "builtins.dict_keys":
        return dict.fromkeys(arguments[0]).keys()
    if name == "builtins.dict_values":
        return dict(enumerate(arguments[0])).values()
    if name == "builtins.dict_items":
        return dict(arguments[0]).items()
    if name == "re.Pattern":
        import re

        return re.compile(*arguments)
    if name in ("builtins.mappingproxy", "types.SimpleNamespace"):
        import types

        if name == "builtins.mappingproxy":
            return types.MappingProxyType(arguments[0])
        return types.SimpleNamespace(**arguments[0])
    module, _, kind = name.rpartition(".")
    return getattr(__import__(module), kind)(*arguments)


def value_name(kind: type) -> str | None:
    """The key of VALUES for a class, or None."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return name if name in VALUES else None


# ---- containers that can change


def content(value: Any) -> Any:
    """Returns what tells whether a container has changed: its elements in order, or its bytes."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, bytearray):
        return bytes(value)
    return value.tobytes() if hasattr(value, "tobytes") else list(value)


def same(old: Any, new: Any) -> bool:
    """Compares by identity of the elements: `==` could run anybody's code."""
    if isinstance(old, bytes):
        return bool(old == new)
    return len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True))


def fill(value: Any, elements: Any) -> None:
    """Gives a container new elements, in place."""
    if isinstance(value, dict):
        value.clear()
        for key, each in elements:
            value[key] = each
    elif isinstance(value, list | bytearray):
        value[:] = elements
    elif hasattr(value, "tobytes"):
        value[...] = elements
    else:
        value.clear()
        for each in elements:
            value.append(each) if hasattr(value, "append") else value.add(each)


def containers() -> dict[type, str]:
    """Tags of the classes that are sent element by element; those that nobody imported lack."""
    tags: dict[type, str] = {list: "l", dict: "d", set: "s", bytearray: "ba"}
    collections = sys.modules.get("collections")
    if collections is not None:
        tags |= {collections.deque: "dq", collections.OrderedDict: "od"}
        tags |= {collections.Counter: "cn", collections.defaultdict: "dd"}
    return tags


def make_container(tag: str, extra: Any) -> Any:
    """An empty one. extra: maxlen of a deque, default_factory of a defaultdict."""
    simple: dict[str, Callable[[], Any]] = {"l": list, "d": dict, "s": set, "ba": bytearray}
    if tag in simple:
        return simple[tag]()
    import collections

    if tag == "dq":
        return collections.deque(maxlen=extra)
    if tag == "dd":
        return collections.defaultdict(extra)
    return {"od": collections.OrderedDict, "cn": collections.Counter}[tag]()


class Link:
    """One end of a conversation between two processes that take turns.

    `first` is 0 on one side and 1 on the other, so that their containers' numbers differ.
    """

    def __init__(self, read_fd: int, write_fd: int, first: int) -> None:
        self.read_fd, self.write_fd = read_fd, write_fd
        self.next_number, self.size = first, 0
        self.shared: dict[int, list[Any]] = {}  # by number: container, content as last sent, size
        self.numbers: dict[int, int] = {}  # number of a container, by its id()

    def hold(self, value: Any) -> Any:
        """The form of what is no data; each side has its own."""
        raise TypeError(f"a {type(value).__name__} cannot travel")

    def resolve(self, tag: str, *rest: Any) -> Any:
        """The inverse of the other side's `hold`."""
        raise ValueError(f"tag {tag!r} {rest!r:.99}")

    def write(self, word: str, *message: Any) -> None:
        """Sends what has changed, a word, and the values of `message`."""
        import json

        changes = self.changes()  # before the values, in which a container may be new
        data = json.dumps([changes, word, [self.encode(each) for each in message]])
        write_all(self.write_fd, frame(data.encode()))

    def read(self) -> tuple[str, list[Any]]:
        """The inverse of `write`: the word and the values."""
        import json

        changes, word, message = json.loads(read_frame(self.read_fd))
        for number, elements in changes:
            value = self.shared[number][0]
            fill(value, self.elements(value, elements))
            self.shared[number][1] = content(value)
        return word, [self.decode(each) for each in message]

    def changes(self) -> list[Any]:
        found = []
        for number, (value, old, _) in list(self.shared.items()):
            if old is None:  # still on its way in
                continue
            new = content(value)
            if not same(old, new):
                self.shared[number][1] = new
                found.append([number, self.encode_elements(value)])
        return found

    def register(self, value: Any, number: int | None = None) -> int:
        if number is None:
            number = self.next_number
            self.next_number += 2
        self.shared[number] = [value, None, 0]
        self.numbers[id(value)] = number
        return number

    def settle(self, number: int) -> None:
        """Notes the content of a container that is complete now, which both sides do."""
        entry = self.shared[number]
        entry[1] = content(entry[0])
        entry[2] = 1 + len(entry[1])
        self.size += entry[2]

    def trim(self) -> None:
        """Forgets the oldest containers. Both sides do it after the same message."""
        while self.size > MOST_SHARED:
            number = next(iter(self.shared))
            value, _, size = self.shared.pop(number)
            self.size -= size
            del self.numbers[id(value)]

    def encode(self, value: Any) -> Any:
        kind = type(value)
        if kind in SCALARS:
            return value
        if kind is tuple:
            return ["t", self.encode_all(value)]
        tag = containers().get(kind)
        if tag is not None:
            known = self.numbers.get(id(value))
            if known is not None:
                return ["r", known]
            number = self.register(value)
            extra = getattr(value, {"dq": "maxlen", "dd": "default_factory"}.get(tag, ""), None)
            form = [tag, number, self.encode(extra), self.encode_elements(value)]
            self.settle(number)
            return form
        if kind is frozenset:
            return ["f", self.encode_all(value)]
        if kind is bytes:
            return ["b", value.decode("latin-1")]
        name = value_name(kind)
        if name is not None:
            return ["v", name, self.encode_all(VALUES[name](value))]
        if is_of_numpy(kind):
            return self.encode_numpy(value)
        return self.hold(value)

    def encode_all(self, values: Any) -> list[Any]:
        if set(map(type, values)) <= SCALARS:
            return list(values)
        return [self.encode(each) for each in values]

    def encode_elements(self, value: Any) -> Any:
        if isinstance(value, dict):
            return [[self.encode(k), self.encode(v)] for k, v in value.items()]
        if isinstance(value, bytearray):
            return value.decode("latin-1")
        if hasattr(value, "tobytes"):
            return self.encode_all(value.ravel().tolist())
        return self.encode_all(value)

    def encode_numpy(self, value: Any) -> Any:
        if type(value).__name__ != "ndarray":  # one number
            return ["n", str(value.dtype), value.tobytes().decode("latin-1")]
        known = self.numbers.get(id(value))
        if known is not None:
            return ["r", known]
        number = self.register(value)
        elements = self.encode_elements(value)
        self.settle(number)
        return ["N", number, str(value.dtype), list(value.shape), elements]

    def elements(self, value: Any, form: Any) -> Any:
        """Decoded, in the form that `fill` takes."""
        if isinstance(value, dict):
            return [(self.decode(k), self.decode(v)) for k, v in form]
        if isinstance(value, bytearray):
            return form.encode("latin-1")
        if hasattr(value, "tobytes"):
            import numpy

            flat = numpy.array([self.decode(each) for each in form], value.dtype)
            return flat.reshape(value.shape)
        return [self.decode(each) for each in form]

    def decode(self, form: Any) -> Any:
        if type(form) is not list:
            return form
        tag, *rest = form
        if tag == "t":
            return tuple(map(self.decode, rest[0]))
        if tag == "f":
            return frozenset(map(self.decode, rest[0]))
        if tag == "b":
            return rest[0].encode("latin-1")
        if tag == "r":
            return self.shared[rest[0]][0]
        if tag == "v":
            return make_value(rest[0], [self.decode(each) for each in rest[1]])
        if tag == "n":
            import numpy

            return numpy.frombuffer(rest[1].encode("latin-1"), numpy.dtype(rest[0]))[0]
        if tag == "N":
            import numpy

            return self.decode_container(numpy.empty(rest[2], rest[1]), rest[0], rest[3])
        if tag in ("l", "d", "s", "ba", "dq", "od", "cn", "dd"):
            value = make_container(tag, self.decode(rest[1]))
            return self.decode_container(value, rest[0], rest[2])
        return self.resolve(tag, *rest)

    def decode_container(self, value: Any, number: int, form: Any) -> Any:
        self.register(value, number)
        fill(value, self.elements(value, form))
        self.settle(number)
        return value
