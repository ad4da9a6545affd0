"""The program's side of the conversation with the judge: what the judge may ask of a program.

Sent into the sandbox as part of one program, see `inside.py`. An object that is no plain
data stays in this process; the judge has a proxy of it and names it by its place in a list.
Everything here runs in the process of the model's code, which may change all of it. So nothing
that this side says is believed for more than what a program's answer is.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any
if __name__ != "__main__":  # inside, what is imported here stands above as part of one program
    from spmdrl.rewards.sandbox.values import (
        LIBRARY,
        VALUES,
        Link,
        code_of,
        frame,
        plain,
        read_frame,
        value_name,
        write_all,
    )

ASK, REPLY = 3, 4  # file descriptors of the program's process when it is asked for values
COMPARISONS = ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__")
ARITHMETIC = tuple(
    f"__{way}{name}__"
    for name in (
        "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift",
        "rshift", "and", "xor", "or",
    )
    for way in ("", "r", "i")
    if (way, name) != ("i", "divmod")
)  # fmt: skip
NUMBERS = (
    "__neg__", "__pos__", "__abs__", "__invert__", "__int__", "__float__", "__complex__",
    "__index__", "__round__", "__trunc__", "__floor__", "__ceil__",
)  # fmt: skip
OTHERS = (
    "__len__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__contains__",
    "__reversed__", "__call__", "__enter__", "__exit__", "__str__", "__repr__", "__format__",
    "__bytes__", "__hash__", "__bool__", "__aiter__", "__anext__", "__aenter__", "__aexit__",
    "__await__", "__fspath__", "__dir__", "__length_hint__",
)  # fmt: skip
OPERATORS = (*COMPARISONS, *ARITHMETIC, *NUMBERS, *OTHERS)
IMMUTABLE = (int, float, complex, str, bytes, tuple, frozenset)


def is_library(value: Any) -> bool:
    """Whether a class or function is the one that its module in the library has by its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return False
    if module.partition(".")[0] not in LIBRARY:
        return False
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is value


def base_value(base: type, value: Any) -> Any:
    """The number, text or tuple that an object of a class based on `base` is."""
    if base is tuple:
        return tuple(tuple.__iter__(value))
    if base is frozenset:
        return frozenset(frozenset.__iter__(value))
    new = base.__getnewargs__(value)  # type: ignore[attr-defined]
    return base(*new)


class StandIn:
    """An object of the judge's tests, as far as a program may use it."""

    def __init__(self, program: Program, number: int) -> None:
        object.__setattr__(self, "_ask", lambda *rest: program.ask_back(number, *rest))

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__") or name == "_ask":
            return object.__getattribute__(self, name)
        return self._ask("get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("set", name, value)


def forwarder(name: str) -> Callable[..., Any]:
    if name == "__call__":
        return lambda self, *rest, **keywords: self._ask("call", rest, keywords)
    return lambda self, *rest: self._ask("op", name, *rest)


class Program(Link):
    def __init__(self, names: dict[str, Any], read_fd: int, write_fd: int) -> None:
        super().__init__(read_fd, write_fd, 1)
        self.names = names
        self.kept: list[Any] = []
        self.places: dict[int, int] = {}  # place in `kept`, by id()
        self.stand_ins: dict[int, Any] = {}  # by the judge's number
        self.judges: dict[int, int] = {}  # the judge's number of a stand-in, by id()
        self.classes: dict[tuple[str, ...], type] = {}
        self.printed = ""

    # -- forms

    def keep(self, value: Any) -> int:
        place = self.places.get(id(value))
        if place is None:
            place = self.places[id(value)] = len(self.kept)
            self.kept.append(value)
        return place

    def hold(self, value: Any) -> Any:
        if id(value) in self.judges:
            return ["yours", self.judges[id(value)]]
        if value is NotImplemented:
            return ["no"]
        if isinstance(value, type):
            if is_library(value):
                return ["m", value.__module__, value.__qualname__]
            if value.__module__ == "builtins":
                return self.builtin_class(value)
            return ["class", self.keep(value)]
        kind = type(value)
        if isinstance(value, BaseException):
            return self.hold_error(value)
        if kind.__module__ == "builtins" and kind.__name__ in (
            "function", "builtin_function_or_method", "method",
        ):  # fmt: skip
            of_module = getattr(value, "__self__", None) in (
                None,
                sys.modules.get(value.__module__),
            )
            if of_module and is_library(value):
                return ["m", value.__module__, value.__qualname__]
            return ["function", self.keep(value), kind.__name__]
        for base in IMMUTABLE:
            if isinstance(value, base):
                data = self.encode(base_value(base, value))
                return ["based", self.keep(value), self.keep(kind), data]
        return ["object", self.keep(value), self.keep(kind)]

    def builtin_class(self, value: type) -> Any:
        """A class of the interpreter that only the module `types` has a name for."""
        import types

        for name, each in vars(types).items():
            if each is value:
                return ["m", "types", name]
        return ["class", self.keep(value)]

    def hold_error(self, value: BaseException) -> Any:
        kind = type(value)
        cause = value.__cause__
        return [
            "error", self.keep(value), self.encode(kind), self.encode_all(value.args),
            None if cause is None or cause is value else self.encode(cause),
            self.encode({k: v for k, v in vars(value).items() if not k.startswith("_")})
            if is_library(kind) else None,
        ]  # fmt: skip

    def resolve(self, tag: str, *rest: Any) -> Any:
        if tag == "mine":
            return self.kept[rest[0]]
        if tag == "no":
            return NotImplemented
        if tag == "m":
            return self.find_library(*rest)
        if tag == "judge's":
            return self.stand_in(*rest)
        if tag == "judge's error":
            return self.judges_error(*rest)
        return super().resolve(tag, *rest)

    def find_library(self, module: str, name: str | None) -> Any:
        __import__(module)
        found: Any = sys.modules[module]
        for part in name.split(".") if name else ():
            found = getattr(found, part)
        return found

    def stand_in(self, number: int, kind: str, operators: list[str]) -> Any:
        if number in self.stand_ins:
            return self.stand_ins[number]
        made: Any
        if kind == "function":

            def made(*arguments: Any, **keywords: Any) -> Any:
                return self.ask_back(number, "call", arguments, keywords)

            made.__name__ = made.__qualname__ = operators[0]
            made.__doc__ = operators[1]
        else:
            key = (kind, *operators)
            if key not in self.classes:
                methods = {name: forwarder(name) for name in operators}
                self.classes[key] = type(kind, (StandIn,), methods)
            made = self.classes[key](self, number)
        self.stand_ins[number] = made
        self.judges[id(made)] = number
        return made

    def judges_error(self, number: int, kind: Any, arguments: list[Any]) -> BaseException:
        """An error that the judge's own code raised; where it gets back, it is the same again."""
        known = self.decode(kind) if kind else RuntimeError
        error = known.__new__(known, *map(self.decode, arguments))
        self.stand_ins[number] = error
        self.judges[id(error)] = number
        return error

    # -- conversation

    def ask_back(self, number: int, verb: str, *rest: Any) -> Any:
        """Asks the judge, while it waits for an answer, to use an object of its own."""
        self.write("back", verb, number, *rest)
        while True:
            word, content = self.read()
            if word == "ok":
                return content[0]
            if word == "raise":
                raise content[0]
            self.reply(word, content)

    def serve(self) -> None:
        """Answers until nobody is left to ask."""
        while True:
            try:
                word, content = self.read()
            except EOFError:
                return
            self.reply(word, content)

    def reply(self, verb: str, content: list[Any]) -> None:
        try:
            value = getattr(self, f"on_{verb}")(*content)
            self.write("ok", value)
        except BaseException as error:
            if code_of(error) != 1:  # a limit
                raise
            self.write("raise", error)

    def on_names(self, wanted: tuple[str, ...]) -> Any:
        """Values of those names that the program has; a module is named."""
        found = []
        for name in wanted:
            if name in self.names:
                value = self.names[name]
                module = type(value) is type(sys) and value.__name__
                found.append((name, bool(module), module or value))
        return tuple(found)

    def on_trim(self) -> None:
        self.trim()

    def on_get(self, place: int, name: str) -> Any:
        return getattr(self.kept[place], name)

    def on_set(self, place: int, name: str, value: Any) -> None:
        setattr(self.kept[place], name, value)

    def on_del(self, place: int, name: str) -> None:
        delattr(self.kept[place], name)

    def on_call(
        self, place: int, arguments: tuple[Any, ...], keywords: tuple[Any, ...], captured: bool,
        given: str | None, mocks: tuple[Any, ...],
    ) -> Any:  # fmt: skip
        """Returns the value and what was printed. captured: the test has replaced sys.stdout;
        given: what is left of what it has put in place of sys.stdin; mocks: builtins that it has
        replaced."""
        target, named = self.kept[place], dict(keywords)
        if not captured and given is None and not mocks:
            return target(*arguments, **named), ""
        import builtins
        import io

        old, old_in, before = sys.stdout, sys.stdin, dict(vars(builtins))
        vars(builtins).update(mocks)
        into = io.StringIO()
        sys.stdout = into if captured else old
        sys.stdin = old_in if given is None else io.StringIO(given)
        try:
            value = target(*arguments, **named)
        finally:
            sys.stdout, sys.stdin = old, old_in
            vars(builtins).update((name, before[name]) for name, _ in mocks)
            self.printed = into.getvalue()
        return value, self.printed

    def on_printed(self) -> str:
        """Returns what was printed by a call that then raised."""
        return self.printed

    def on_place(self, module: str, name: str) -> Any:
        value = self.find_library(module, name)
        return "class" if isinstance(value, type) else "function", self.keep(value)

    def on_op(self, place: int, name: str, arguments: tuple[Any, ...]) -> Any:
        value = self.kept[place]
        return getattr(type(value), name)(value, *arguments)

    def on_library(
        self, module: str, name: str, arguments: tuple[Any, ...], keywords: tuple[Any, ...]
    ) -> Any:
        """Calls a function of the library with objects that live here."""
        return self.find_library(module, name)(*arguments, **dict(keywords))

    def on_blind(
        self, place: int, name: str, candidates: tuple[Any, ...], foreign: bool, copies: bool
    ) -> Any:
        """("ok", result) or ("error", None) for each candidate and, foreign, for an object()
        beside. copies: each time of a copy of the object."""
        results = []
        for other in (*candidates, object()) if foreign else candidates:
            value = self.kept[place]
            if copies:
                import copy

                value = copy.deepcopy(value)
            try:
                results.append(("ok", getattr(type(value), name)(value, other)))
            except Exception:  # noqa: BLE001  a program may raise anything
                results.append(("error", None))
        return tuple(results)

    def on_instance(self, place: int, kind: Any) -> bool:
        return isinstance(self.kept[place], kind)

    def on_subclass(self, place: int, kind: Any) -> bool:
        return issubclass(self.kept[place], kind)

    def on_await(self, place: int) -> Any:
        import asyncio

        if "loop" not in self.__dict__:
            self.loop = asyncio.new_event_loop()

        async def wait() -> Any:
            return await self.kept[place]

        return self.loop.run_until_complete(wait())

    def on_describe(self, place: int) -> Any:
        """A class: its name, bases, operators, and those of its own class."""
        kind = self.kept[place]
        bases = [each for each in kind.__bases__ if each is not object]
        operators, own = [], []
        for name in OPERATORS:
            owner = next((k for k in kind.__mro__ if name in vars(k)), object)
            if owner is not object and vars(owner)[name] is not None:
                operators.append(name)
                if not is_library(owner) or owner.__module__ == "enum":
                    own.append(name)
        return {
            "name": kind.__name__, "bases": tuple(bases), "operators": tuple(operators),
            "own": tuple(own), "hashable": kind.__hash__ is not None,
            "qualname": kind.__qualname__, "module": kind.__module__,
        }  # fmt: skip

    def on_view(self, place: int) -> Any:
        """The data of an object whose class is based on one of the interpreter or the library."""
        value = self.kept[place]
        base: Any
        for base in type(value).__mro__:
            if base in (list, set, bytearray):
                return (True, base(base.__iter__(value)))
            if base is dict:
                return (True, dict(dict.items(value)))
            name = value_name(base)
            if name is not None:
                return (True, ViewOf(name, value))
            if base.__module__ == "collections" and base.__name__ == "deque":
                return (True, base(base.__iter__(value), value.maxlen))
            if base.__module__ == "numpy" and base.__name__ == "ndarray":
                return (True, base.view(value, base))
        return (False, None)

    def encode(self, value: Any) -> Any:
        if type(value) is ViewOf:
            return ["v", value.name, self.encode_all(VALUES[value.name](value.value))]
        return super().encode(value)

    # -- of text that a test has, in a process of its own

    def on_run(self, mode: str, text: Any, names: tuple[Any, ...]) -> Any:
        """eval, exec or pickle. Returns the value, or the names that the text has left."""
        if mode == "pickle":
            import pickle

            return pickle.loads(text)
        hidden = {"__builtins__": __builtins__, "__name__": "tests"}
        given = dict(names) | hidden
        if mode == "eval":
            return eval(text, given)
        exec(text, given)
        return tuple((k, v) for k, v in given.items() if k not in hidden)


class ViewOf:
    """A value of the library's kind `name`, to be sent as if it were of that very class."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self.value = name, value


def serve_value(names: dict[str, Any]) -> None:
    """Answers questions of kind "value": a function's value, in the form that is compared
    outside."""
    import json

    sys.set_int_max_str_digits(0)
    while True:
        try:
            _, function, arguments = json.loads(read_frame(ASK))
        except EOFError:
            return
        try:
            value = find(names, function)(*arguments)
            text = json.dumps(["ok", plain(value)], sort_keys=True)
        except BaseException as error:
            if code_of(error) != 1:  # a limit
                raise
            text = json.dumps(["error", type(error).__name__, repr(error)[:1000]])
        write_all(REPLY, frame(text.encode()))


def find(names: dict[str, Any], function: str) -> Any:
    """Finds a function as a name of the program, or as a method of its class Solution."""
    if function in names:
        return names[function]
    return getattr(names["Solution"](), function)
