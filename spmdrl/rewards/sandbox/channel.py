"""The judge's end of a conversation: questions about the program's objects, and their proxies.

Sent into the sandbox as part of one program, see `inside.py`. What the program answers is
data to the judge. The program may use functions and objects of the test while it is asked.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from typing import Any
if __name__ != "__main__":  # inside, what is imported here stands above as part of one program
    from spmdrl.rewards.sandbox.program import IMMUTABLE, OPERATORS, is_library
    from spmdrl.rewards.sandbox.proxies import (
        Meta,
        ProgramFailed,
        Remote,
        Unjudged,
        forward,
        operator_for,
        remote_of,
        wrong_values,
    )
    from spmdrl.rewards.sandbox.values import MOST_SHARED, Link

SAFE_FUNCTIONS = {
    "abs", "all", "any", "bin", "callable", "chr", "divmod", "format", "hash", "hex", "id",
    "isinstance", "issubclass", "iter", "len", "max", "min", "next", "oct", "ord", "pow", "repr",
    "round", "sorted", "sum",
}  # fmt: skip
SAFE_MODULES = {
    "math", "cmath", "fractions", "decimal", "datetime", "numbers", "heapq", "bisect", "statistics",
    "collections", "collections.abc", "itertools", "uuid", "types", "json.decoder", "array",
    "asyncio.exceptions",
}  # fmt: skip
USES = {"get", "set", "del", "call", "op", "blind", "await", "view", "instance", "subclass"}
MOCKED = (("input", input), ("print", print), ("open", open))  # which a test may replace


class Channel(Link):
    """The judge's end of a conversation with a process that has the program's objects."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        import _thread

        super().__init__(read_fd, write_fd, 0)
        self.classes: dict[int, Any] = {}  # proxies' classes, by place
        self.functions: dict[str, Any] = {}  # those of functions, by name
        self.proxies: dict[int, Any] = {}  # by place
        self.named: set[Any] = set()  # the classes that the test calls by name
        self.ours: list[tuple[Any, str, list[str]]] = []  # what the program may use of the test's
        self.our_numbers: dict[int, int] = {}  # by id()
        self.failed = ""
        self.used = False  # whether an object of the program was asked for anything
        self.depth = 0  # of questions in a question
        self.lock = _thread.RLock()
        self.spans: list[tuple[int, int]] = []  # lines of the test that expect StopIteration

    # -- questions

    def ask(self, verb: str, *rest: Any) -> Any:
        self.used = self.used or verb in USES
        with self.lock:
            self.depth += 1
            try:
                word, content = self.exchange(verb, rest)
            finally:
                self.depth -= 1
                if not self.depth and self.size > MOST_SHARED:
                    self.exchange("trim", ())
                    self.trim()
        if word == "ok":
            return content
        if not isinstance(content, BaseException):
            self.failed = "an answer without an error"
            raise ProgramFailed(self.failed)
        ends = verb == "op" and rest[1] == "__next__"  # an iterator, as it should
        if isinstance(content, StopIteration) and not ends and not self.expects_stop():
            raise RuntimeError("the program raised StopIteration") from content
        raise content

    def exchange(self, verb: str, rest: tuple[Any, ...]) -> tuple[str, Any]:
        while True:
            try:
                if verb:
                    self.write(verb, *rest)
                    verb = ""
                word, content = self.read()
                if word != "back":
                    return word, content[0]
                wanted, number, *values = content
            except Exception as error:  # noqa: BLE001  whatever the program wrote, it is no answer
                self.failed = f"no answer: {error!r:.300}"
                raise ProgramFailed(self.failed) from None
            self.serve_back(wanted, number, values)

    def expects_stop(self) -> bool:
        """Whether the test catches StopIteration where it is now. Elsewhere, `all(map(f, x))`
        would take one for the end of what it goes through."""
        at: Any = sys._getframe()
        while at is not None:
            lines = self.spans if at.f_code.co_filename == "tests" else []
            if any(start <= at.f_lineno <= end for start, end in lines):
                return True
            at = at.f_back
        return False

    def call(self, place: int, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Calls a function of the program. What the program prints goes where the test wants it,
        where that has replaced sys.stdout; and so with what it reads, and with `input` and `print`
        themselves.
        """
        import builtins

        captured = sys.stdout is not sys.__stdout__
        given = None if sys.stdin is sys.__stdin__ else sys.stdin.read()
        pairs = tuple(keywords.items())
        mocks = tuple((name, getattr(builtins, name)) for name, true in MOCKED
                      if getattr(builtins, name) is not true)  # fmt: skip
        try:
            value, text = self.ask("call", place, arguments, pairs, captured, given, mocks)
        except Exception:
            if captured:
                sys.stdout.write(self.ask("printed"))
            raise
        if captured:
            sys.stdout.write(text)
        return value

    def operate(self, place: int, name: str, arguments: tuple[Any, ...]) -> Any:
        return self.ask("op", place, name, arguments)

    def of_library(
        self, module: str, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        self.used = self.used or any(remote_of(each) for each in arguments)
        return self.ask("library", module, name, arguments, tuple(keywords.items()))

    # -- questions that do not tell which of many values is the right one

    def blind(
        self, place: int, name: str, right: Any, wrong: list[Any], foreign: bool, copies: bool
    ) -> tuple[Any, list[Any]]:
        """The result for the right value, and those for wrong ones; None where it raised."""
        import random

        index = random.SystemRandom().randrange(len(wrong) + 1)
        candidates = (*wrong[:index], right, *wrong[index:])
        results = self.ask("blind", place, name, candidates, foreign, copies)
        values = [value if word == "ok" else None for word, value in results]
        return values.pop(index), values

    def blind_equal(self, place: int, right: Any, wrong: list[Any], foreign: bool) -> Any:
        result, others = self.blind(place, "__eq__", right, wrong, foreign, False)
        if result is NotImplemented:
            return result
        return bool(result) and not any(each is not NotImplemented and each for each in others)

    def blind_order(self, place: int, name: str, right: Any) -> Any:
        wrong = wrong_values(right, 16)
        if isinstance(right, int | float):
            wrong += [right + sign * 10.0**k for sign in (-1, 1) for k in range(-9, 12, 3)]
        result, others = self.blind(place, name, right, wrong, False, False)
        return result if any(each != result for each in others) else NotImplemented

    def is_constant(self, place: int, name: str, right: Any, result: Any) -> bool:
        """Whether a calculation with wrong values gives that result as well."""
        _, others = self.blind(place, name, right, wrong_values(right, 8), False, True)
        return all(type(each) is type(result) and each == result for each in others)

    # -- forms

    def hold(self, value: Any) -> Any:
        remote = remote_of(value)
        if remote is not None and remote[0] is self:
            return ["mine", remote[1]]
        if value is NotImplemented:
            return ["no"]
        if type(value).__name__ == "traceback":
            return None
        if isinstance(value, type(sys)):
            return ["m", value.__name__, None]
        if isinstance(value, type) or callable(value):
            if is_library(value):
                return ["m", value.__module__, value.__qualname__]
            if remote is not None or isinstance(value, type) or hasattr(type(value), "__get__"):
                found = [getattr(value, name, None) for name in ("__name__", "__doc__")]
                texts = [text if isinstance(text, str) else "" for text in found]
                return self.hold_ours(value, "function", texts)
        if isinstance(value, BaseException):
            number = self.hold_ours(value, "error", [])[1]
            kind = type(value)
            known = is_library(kind)
            arguments = [self.encode(each) for each in value.args] if known else [str(value)]
            return ["judge's error", number, self.hold(kind) if known else None, arguments]
        return self.hold_object(value)

    def hold_object(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__ in ("__main__", "_io", "io", "unittest.mock"):
            names = [
                name for name in OPERATORS
                if any(name in vars(each) for each in kind.__mro__ if each is not object)
                and getattr(kind, name) is not None
            ]  # fmt: skip
            return self.hold_ours(value, kind.__name__, names)
        if callable(value):
            return self.hold_ours(value, "function", [kind.__name__, ""])
        if hasattr(kind, "__next__"):
            return self.hold_ours(value, "iterator", ["__iter__", "__next__"])
        raise Unjudged(f"the test hands a {kind.__module__}.{kind.__qualname__} to the program")

    def hold_ours(self, value: Any, kind: str, operators: list[str]) -> list[Any]:
        number = self.our_numbers.get(id(value))
        if number is None:
            number = self.our_numbers[id(value)] = len(self.ours)
            self.ours.append((value, kind, operators))
        return ["judge's", number, kind, operators]

    def serve_back(self, verb: Any, number: Any, rest: list[Any]) -> None:
        try:
            value = self.use_ours(verb, number, rest)
        except Exception as error:  # noqa: BLE001  the program may catch it
            self.write("raise", error)
            return
        self.write("ok", value)

    def use_ours(self, verb: Any, number: Any, rest: list[Any]) -> Any:
        """Functions of the test can be called and its objects used, but not looked into: from a
        function's attributes a program would reach what the test knows."""
        if not isinstance(number, int) or not 0 <= number < len(self.ours):
            raise ProgramFailed(f"{number!r:.99} is no object of the test")
        value, kind, operators = self.ours[number]
        if verb == "call" and (kind == "function" or "__call__" in operators):
            return value(*rest[0], **rest[1])
        if verb == "op" and kind != "function" and rest[0] in operators:
            return getattr(type(value), rest[0])(value, *rest[1:])
        public = isinstance(rest[0], str) and not rest[0].startswith("_")
        if verb == "get" and public and kind not in ("function", "iterator", "error"):
            return getattr(value, rest[0])
        if verb == "set" and public and type(value).__module__ == "__main__":
            setattr(value, *rest)
            return None
        raise AttributeError(f"{kind!r} object has no attribute {rest[0]!r:.99}")

    def resolve(self, tag: str, *rest: Any) -> Any:
        if tag == "no":
            return NotImplemented
        if tag == "yours":
            return self.ours[rest[0]][0]
        if tag == "m":
            return self.from_library(*rest)
        if tag == "class":
            return self.proxy_class(rest[0])
        if tag == "function":
            return self.proxy(rest[0], self.function_class(rest[1]))
        if tag == "object":
            return self.proxy(rest[0], self.proxy_class(rest[1]))
        if tag == "based":
            data = self.decode(rest[2])
            return self.proxy(rest[0], self.proxy_class(rest[1]), data)
        if tag == "error":
            return self.error(*rest)
        return super().resolve(tag, *rest)

    def from_library(self, module: str, name: str) -> Any:
        """The true class or function, where it can do no harm in the judge; else a proxy."""
        safe = module in SAFE_MODULES or (module == "builtins" and name in SAFE_FUNCTIONS)
        if safe or module == "builtins":
            __import__(module)
        found = getattr(sys.modules.get(module), name, None)
        if isinstance(found, type) and (module == "builtins" or issubclass(found, BaseException)):
            return found
        if safe and found is not None:
            return found
        kind, place = self.ask("place", module, name)
        if kind == "class":
            return self.proxy_class(place)
        return self.proxy(place, self.function_class("function"))

    # -- proxies

    def proxy(self, place: int, kind: Any, *data: Any) -> Any:
        """One object for each place, so that `is` means what it means over there."""
        if place not in self.proxies:
            base = next((b for b in IMMUTABLE if b in kind.__mro__), object)
            made: Any = base.__new__(kind, *data[: base is not object])
            object.__setattr__(made, "_spmdrl", (self, int(place)))
            self.proxies[place] = made
        return self.proxies[place]

    def function_class(self, name: str) -> Any:
        if name not in self.functions:
            import types

            known = {"function": types.FunctionType, "method": types.MethodType}
            members = {
                "__class__": property(lambda _: known.get(name, types.BuiltinFunctionType)),
                "__call__": operator_for("__call__"), "__repr__": forward("__repr__"),
            }  # fmt: skip
            made = Meta(name, (Remote,), members, (self, -1))
            type.__setattr__(made, "_spmdrl_own", ())
            self.functions[name] = made
        return self.functions[name]

    def proxy_class(self, place: int) -> Any:
        if place not in self.classes:
            self.classes[place] = self.make_class(place, self.ask("describe", place))
        return self.classes[place]

    def make_class(self, place: int, told: dict[str, Any]) -> Any:
        bases = tuple(
            base for base in told["bases"]
            if type(base) is Meta or base in IMMUTABLE or issubclass(base, BaseException)
        )  # fmt: skip
        if not any(type(base) is Meta for base in bases):
            bases = (Remote, *bases)
        ready = any(base in each.__mro__ for each in bases for base in (*IMMUTABLE, BaseException))
        names = [n for n in told["operators"] if n in OPERATORS and (not ready or n in told["own"])]
        if any(issubclass(base, BaseException) for base in bases):
            names += ["__str__", "__repr__"]
        members: dict[str, Any] = {name: operator_for(name) for name in names}
        if not told["hashable"]:
            members["__hash__"] = None
        elif "__eq__" in members and "__hash__" not in members:
            members["__hash__"] = bases[-1].__hash__
        mutable = [base for base in told["bases"] if base in (list, dict, set, bytearray)]
        if mutable:  # for isinstance
            shown = type(told["name"], tuple(mutable), {})
            members["__class__"] = property(lambda _: shown)
        if told["module"] == "builtins":
            members |= shown_as(told["name"])
        members["__module__"], members["__qualname__"] = told["module"], told["qualname"]
        try:
            made = Meta(told["name"], bases, members, (self, place))
        except TypeError:  # bases of which the order or the form cannot be the same here
            made = Meta(told["name"], (Remote,), members, (self, place))
        type.__setattr__(made, "_spmdrl_own", tuple(told["own"]))
        return made

    def error(
        self, place: int, form: Any, arguments: list[Any], cause: Any, attributes: Any
    ) -> BaseException:
        if place in self.proxies:
            return self.proxies[place]
        kind: Any = self.decode(form)
        values = [self.decode(each) for each in arguments]
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise ValueError("an error of no class of errors")
        made: Any
        if type(kind) is Meta:
            made = type.__getattribute__(kind, "__new__")(kind, *values)
            object.__setattr__(made, "_spmdrl", (self, int(place)))
        else:
            try:
                made = kind(*values)
            except TypeError:
                made = kind.__new__(kind, *values)
            made.args = tuple(values)
            vars(made).update(self.decode(attributes) or {})
        self.proxies[place] = made
        if cause is not None:
            made.__cause__ = self.decode(cause)
        return made


def shown_as(name: str) -> dict[str, Any]:
    """The member that makes a proxy an instance of the interpreter's class of that name."""
    import types

    if name == "coroutine":  # asyncio would run it itself, rather than await it
        return {}
    found = [kind for kind in vars(types).values() if isinstance(kind, type)]
    known = next((kind for kind in found if kind.__name__ == name), None)
    return {} if known is None else {"__class__": property(lambda _: known)}
