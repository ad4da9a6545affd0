"""Values between processes of the sandbox: the model's process is asked, a judge asks.

Sent into the sandbox together with `sandbox_inside.py`, as one program. Nothing but JSON travels.
What the model's process answers is data to whoever asks; it cannot bring code along.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in sandbox_inside
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    Keep = Callable[[Any], dict[str, int]]

OUT_OF_MEMORY, OUT_OF_PROCESSES, OUT_OF_DISK = 240, 241, 242  # exit codes of an uncaught error
ASK, REPLY = 3, 4  # file descriptors of the model's process when it is asked for values


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


def serve(names: dict[str, Any]) -> None:
    """Answers until nobody is left to ask. A value that is no plain data stays here; what goes
    out is its place in a list."""
    import json

    sys.set_int_max_str_digits(0)
    kept = [None]

    def keep(value: Any) -> dict[str, int]:
        kept.append(value)
        return {"h": len(kept) - 1}

    while True:
        try:
            question = json.loads(read_frame(ASK))
        except EOFError:
            return
        try:
            reply = ["ok", answer(names, kept, keep, *question)]
            text = json.dumps(reply, sort_keys=True)
        except BaseException as error:
            if code_of(error) != 1:  # a limit
                raise
            text = json.dumps(["error", type(error).__name__, repr(error)[:1000]])
        write_all(REPLY, frame(text.encode()))


def answer(names: dict[str, Any], kept: list[Any], keep: Keep, verb: str, *rest: Any) -> Any:
    if verb == "value":  # of a function, in the form that is compared outside
        function, arguments = rest
        return plain(find(names, function)(*arguments))
    if verb == "names":
        return [name for name in names if isinstance(name, str) and not name.startswith("__")]
    if verb == "name":
        return encode(names[rest[0]], keep)
    if verb == "get":
        return encode(getattr(kept[rest[0]], rest[1]), keep)
    target, arguments, keywords = rest  # verb "call"
    arguments = [decode(a, kept.__getitem__) for a in arguments]
    keywords = {key: decode(a, kept.__getitem__) for key, a in keywords.items()}
    value = encode(kept[target](*arguments, **keywords), keep)
    return [value, [encode(each, keep) for each in arguments]]  # which it may have changed


def find(names: dict[str, Any], function: str) -> Any:
    """As a name of the program, or as a method of its class Solution."""
    if function in names:
        return names[function]
    return getattr(names["Solution"](), function)


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
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    raise TypeError(f"a {type(value).__name__} has no form in JSON")


TAGS = (("t", tuple), ("s", set), ("f", frozenset))


def encode(value: Any, keep: Keep) -> Any:
    """As JSON, with tags for what JSON lacks; what no tag fits, `keep` holds back."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, int | float | str) and type(value).__eq__ in (
        int.__eq__, float.__eq__, str.__eq__
    ):  # fmt: skip
        return next(kind(value) for kind in (int, float, str) if isinstance(value, kind))
    if isinstance(value, list):
        return [encode(each, keep) for each in value]
    for tag, kind in TAGS:
        if isinstance(value, kind):
            return {tag: [encode(each, keep) for each in value]}
    if isinstance(value, dict):
        return {"d": [[encode(k, keep), encode(v, keep)] for k, v in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"b": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    return keep(value)


def decode(value: Any, handle: Callable[[int], Any]) -> Any:
    if isinstance(value, list):
        return [decode(each, handle) for each in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == "h":
        return handle(content)
    if tag == "b":
        return content.encode("latin-1")
    if tag == "c":
        return complex(*content)
    if tag == "d":
        return {decode(k, handle): decode(v, handle) for k, v in content}
    return dict(TAGS)[tag](decode(each, handle) for each in content)


def their_names(ask: Callable[..., Any]) -> dict[str, Any]:
    """What the test's statements find. A builtin or a module of the library is the true one: a
    program's own `abs` or `math` could say that any answer is near enough."""
    import builtins

    names = {"__name__": "__main__", "__builtins__": builtins}
    for name in ask("names"):
        if name in sys.stdlib_module_names:
            names[name] = __import__(name)
        elif not name.startswith("__") and not hasattr(builtins, name):
            names[name] = ask("name", name)
    return names


def remote(ask_fd: int, reply_fd: int) -> Callable[..., Any]:
    """A function that asks, and with it a class for what stays in the model's process."""
    import builtins
    import json

    def ask(verb: str, *rest: Any) -> Any:
        write_all(ask_fd, frame(json.dumps([verb, *rest]).encode()))
        kind, *content = json.loads(read_frame(reply_fd))
        if kind == "ok":
            return decode(content[0], Remote) if verb != "names" else content[0]
        known = getattr(builtins, str(content[0]), None)
        if isinstance(known, type) and issubclass(known, Exception):
            raise known(content[1])
        raise RuntimeError(": ".join(map(str, content)))

    def send(value: Any) -> Any:
        return encode(value, lambda other: {"h": object.__getattribute__(other, "place")})

    class Remote:
        def __init__(self, place: int) -> None:
            object.__setattr__(self, "place", int(place))

        def __getattr__(self, name: str) -> Any:
            return ask("get", self.place, name)

        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            keywords = {key: send(value) for key, value in keywords.items()}
            sent = [send(value) for value in arguments]
            value, after = ask("call", self.place, sent, keywords)
            for argument, new in zip(arguments, after, strict=True):
                if isinstance(argument, list) and argument != new:  # sorted in place, say
                    argument[:] = new
                elif isinstance(argument, dict | set) and argument != new:
                    argument.clear()
                    argument.update(new)
            return value

        def __len__(self) -> int:
            try:
                return ask("get", self.place, "__len__")()
            except AttributeError:
                raise TypeError("it has no len()") from None  # list() asks, and expects this

        def __bool__(self) -> bool:
            return True

        def __getitem__(self, key: Any) -> Any:
            return ask("get", self.place, "__getitem__")(key)

        def __iter__(self) -> Iterator[Any]:
            following = ask("get", ask("get", self.place, "__iter__")().place, "__next__")
            while True:
                try:
                    yield following()
                except StopIteration:
                    return

        def __next__(self) -> Any:
            return ask("get", self.place, "__next__")()

        def __str__(self) -> str:
            return str(ask("get", self.place, "__str__")())

    return ask
