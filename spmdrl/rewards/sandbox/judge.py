"""The judge: runs a test's statements in a process in which no code of the model runs.

Sent into the sandbox as part of one program, see `inside.py`. The judge asks the program's
process for values, see `channel.py`. Its verdict carries a secret that only it has. Where
a test evaluates text, which may be the program's, that happens in a process of its own again.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # as in values.py
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any
if __name__ != "__main__":  # inside, what is imported here stands above as part of one program
    from spmdrl.rewards.sandbox.channel import Channel
    from spmdrl.rewards.sandbox.names import (
        HELPERS,
        ONLY_TREE,
        TestNames,
        is_pythons_own,
        of_the_program,
    )
    from spmdrl.rewards.sandbox.proxies import Meta, ProgramFailed, Unjudged, remote_of
    from spmdrl.rewards.sandbox.values import LIBRARY, frame, write_all

# Functions of the library that look into an object; they do so where the object lives.
WHERE_IT_LIVES = {
    "asyncio": ("run", "iscoroutinefunction", "iscoroutine"),
    "dataclasses": ("asdict", "astuple", "fields", "replace", "is_dataclass"),
    "inspect": (
        "isabstract", "isasyncgen", "isawaitable", "isbuiltin", "isclass", "iscoroutine",
        "iscoroutinefunction", "isfunction", "isgenerator", "isgeneratorfunction", "ismethod",
        "signature", "getsource", "getdoc", "getmembers",
    ),
    "pickle": ("dumps",),
    "typing": ("get_type_hints",),
}  # fmt: skip
BOTH = {"random": ("seed",), "sys": ("setrecursionlimit",), "os": ("chdir",)}  # here and there
MAY_EVALUATE = ("/collections/__init__.py", "/dataclasses.py", "/unittest/mock.py")
DYNAMIC = ("code.__new__", "function.__new__", "marshal.loads", "pickle.find_class")


PROGRAM = "solution"  # the name of the program's module, which a test may import
TRUSTED = ("tests", "sandbox_", "<frozen ")  # file names of code that may run in the judge


class Tests:
    """One test and what its statements find: the program's names, Python's own builtins, and
    `eval`, `exec` and pickle's `loads` that work in another process."""

    def __init__(self, text: bytes, channel: Channel, spare: int) -> None:
        self.channel, self.spare = channel, spare
        self.refused = ""
        self.results: list[Any] = []  # of test cases that unittest has run
        self.compiled: dict[int, tuple[Any, Any]] = {}  # by id(): code and its text
        try:
            tree = compile(text, "tests", "exec", ONLY_TREE, dont_inherit=True)
            self.found = TestNames(tree)
            self.code = compile(text, "tests", "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:
            raise Unjudged(f"the test is no Python: {error}") from None
        channel.spans = self.found.spans
        main = sys.modules["__main__"] = type(sys)("__main__")  # for its classes and unittest
        self.names: dict[str, Any] = vars(main)
        self.names["__builtins__"] = self.builtins()
        self.fill_names()
        if PROGRAM.encode() in text:
            sys.modules[PROGRAM] = self.program_module()

    def builtins(self) -> dict[str, Any]:
        import builtins

        tests = self

        class Builtins(dict):
            """Builtins; a name that is nowhere else may be one that the program has made since."""

            def __missing__(self, name: str) -> Any:
                return tests.of_program(name)

        own = Builtins(vars(builtins))
        own |= {"eval": self.eval, "exec": self.exec, "compile": self.compile}
        own["__import__"] = self.import_
        return own

    def of_program(self, name: str) -> Any:
        """The value that a name has in the program now. Raises KeyError where it has none."""
        found = () if is_pythons_own(name) else self.channel.ask("names", (name,))
        for _, module, value in found:
            return self.module(value) if module else value
        raise KeyError(name)

    def fill_names(self) -> None:
        free = [name for name in self.found.free() if not is_pythons_own(name)]
        given = self.channel.ask("names", tuple(free))
        modules = {name: value for name, is_module, value in given if is_module}
        values = {name: value for name, is_module, value in given if not is_module}
        for name, module in modules.items():
            self.names[name] = self.module(module)
        theirs = {name for name, value in values.items() if remote_of(value) is not None}
        self.names |= {name: values[name] for name in values.keys() - theirs}
        self.channel.used = bool(values.keys() - theirs)  # a plain value needs no further question
        for name in of_the_program(self.found, theirs):
            self.names[name] = values[name]
        for name in theirs - self.names.keys():
            if name in sys.stdlib_module_names:
                self.names[name] = self.module(name)
            elif name in HELPERS:
                self.names[name] = getattr(__import__("math"), name)
        self.channel.named = {
            value for name, value in self.names.items()
            if type(value) is Meta and name[:1].isupper()
        }  # fmt: skip

    def module(self, name: str) -> Any:
        """The true module, where it is one of the library; functions that look into an object do
        so where it lives."""
        if name.partition(".")[0] not in LIBRARY:
            raise Unjudged(f"the test uses the module {name}, which is not in the sandbox")
        __import__(name)
        self.adapt(name.partition(".")[0])
        return sys.modules[name]

    def import_(self, name: str, *rest: Any) -> Any:
        found = __import__(name, *rest)
        self.adapt(name.partition(".")[0])
        return found

    def program_module(self) -> Any:
        tests = self

        class Module(type(sys)):  # type: ignore[misc]
            """The program, for a test that imports it. Its names are asked for when needed."""

            def __getattr__(self, name: str) -> Any:
                try:
                    value = tests.of_program(name)
                except KeyError:
                    raise AttributeError(f"the program has no name {name!r}") from None
                if remote_of(value) is None:
                    tests.channel.used = True
                elif type(value) is Meta and name[:1].isupper():
                    tests.channel.named.add(value)
                return value

            def __setattr__(self, name: str, value: Any) -> None:
                raise Unjudged(f"the test replaces the name {name} of the program's module")

        return Module(PROGRAM)

    def adapt(self, name: str) -> None:
        module = sys.modules.get(name)
        for each in WHERE_IT_LIVES.get(name, ()):
            function = getattr(module, each, None)
            if function is not None and not hasattr(function, "spmdrl"):
                setattr(module, each, self.where_it_lives(name, each, function))
        for each in BOTH.get(name, ()):
            function = getattr(module, each)
            if not hasattr(function, "spmdrl"):
                setattr(module, each, self.in_both(name, each, function))
        if name == "unittest" and not hasattr(module.TextTestRunner.run, "spmdrl"):  # type: ignore[union-attr]
            module.TextTestRunner.run = self.kept_result(module.TextTestRunner.run)  # type: ignore[union-attr]
        if name == "pickle" and module is not None:
            module.loads = lambda data, **_: self.elsewhere("pickle", data, {})  # type: ignore[attr-defined]
            module.load = lambda file, **_: module.loads(file.read())  # type: ignore[attr-defined]

    def where_it_lives(self, module: str, name: str, function: Callable[..., Any]) -> Any:
        def adapted(*arguments: Any, **keywords: Any) -> Any:
            if arguments and remote_of(arguments[0]) is not None:
                return self.channel.of_library(module, name, arguments, keywords)
            return function(*arguments, **keywords)

        adapted.spmdrl = True  # type: ignore[attr-defined]
        return adapted

    def kept_result(self, function: Callable[..., Any]) -> Any:
        """The runner's method, whose result counts though the test does not look at it."""

        def adapted(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            self.results.append(result)
            return result

        adapted.spmdrl = True  # type: ignore[attr-defined]
        return adapted

    def in_both(self, module: str, name: str, function: Callable[..., Any]) -> Any:
        def adapted(*arguments: Any, **keywords: Any) -> Any:
            self.channel.of_library(module, name, arguments, keywords)
            return function(*arguments, **keywords)

        adapted.spmdrl = True  # type: ignore[attr-defined]
        return adapted

    def compile(self, source: Any, *rest: Any, **keywords: Any) -> Any:
        code = compile(source, *rest, **keywords)
        self.compiled[id(code)] = code, source
        return code

    def eval(self, text: Any, names: Any = None, local: Any = None) -> Any:
        return self.evaluate("eval", text, names, local)

    def exec(self, text: Any, names: Any = None, local: Any = None) -> None:
        names = sys._getframe(1).f_globals if names is None else names
        for name, value in self.evaluate("exec", text, names, local) or ():
            has = dict.__contains__(self.names["__builtins__"], name) or self.names.get(name)
            if names is not self.names or has in (False, None):  # the test keeps what it has
                (names if local is None else local)[name] = value

    def evaluate(self, mode: str, text: Any, names: Any, local: Any) -> Any:
        """The test's own text is evaluated here. Other text may be the program's."""
        text = self.compiled.get(id(text), (None, text))[1]
        caller: Any = sys._getframe(2)
        if names is None:
            names, local = caller.f_globals, caller.f_locals
        if isinstance(text, str | bytes) and text in self.found.texts:
            names.setdefault("__builtins__", self.names["__builtins__"])
            code = compile(text, "tests", mode)
            return eval(code, names, local) if mode == "eval" else exec(code, names, local)
        if not isinstance(text, str | bytes):
            raise TypeError(f"{mode}() arg 1 must be a string, bytes or code object")
        try:
            wanted = TestNames(compile(text, "<string>", mode, ONLY_TREE, dont_inherit=True)).free()
        except ValueError as error:
            raise SyntaxError(str(error)) from None
        if names is caller.f_globals:  # what the test knows is not for such a text
            given = self.in_texts(wanted)
        else:
            given = {name: value for name, value in {**names, **(local or {})}.items()
                     if not name.startswith("__")}  # fmt: skip
        return self.elsewhere(mode, text, given)

    def in_texts(self, wanted: list[str]) -> dict[str, Any]:
        """Returns those of the program's names that the test has in a text of its own."""
        texts = [text for text in self.found.texts if isinstance(text, str)]
        wanted = [name for name in wanted if not is_pythons_own(name)]
        wanted = [name for name in wanted if any(name in text for text in texts)]
        given = self.channel.ask("names", tuple(wanted))
        return {name: value for name, is_module, value in given if not is_module}

    def elsewhere(self, mode: str, text: Any, given: dict[str, Any]) -> Any:
        """Runs a text in a new process that never knew the test."""
        if self.spare < 0:
            raise Unjudged(f"{mode} in a test that does not have the word")
        import _socket

        asking = _socket.socket(fileno=os.dup(self.spare))
        asking.sendall(b"?")
        _, ancillary, _, _ = asking.recvmsg(1, _socket.CMSG_SPACE(4))
        fd = int.from_bytes(ancillary[0][2][:4], sys.byteorder)
        asking.close()
        other = Channel(fd, fd)
        other.spans, other.named = self.channel.spans, set()
        return other.ask("run", mode, text, tuple(given.items()))

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit hook. Nothing runs here that was text or bytes, but the library's own."""
        if event != "exec" and event not in DYNAMIC:
            return
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith("<frozen importlib"):
            return
        if event in ("code.__new__", "function.__new__") and caller.startswith(self.folders):
            return
        if event == "exec":
            if arguments[0].co_filename.startswith((*TRUSTED, *self.folders)):
                return
            if caller.startswith(self.folders) and caller.endswith(MAY_EVALUATE):
                return
            if "/numpy/" in caller and caller.startswith(self.folders):
                return
        self.refused = f"the test makes the judge run {event}, which could be the program's text"
        raise Unjudged(self.refused)

    def run(self) -> None:
        """Raises what the test's statements raise."""
        self.folders = tuple({os.path.dirname(os.__file__), *filter(None, sys.path)})
        sys.addaudithook(self.watch)
        try:
            exec(self.code, self.names)
        except (SystemExit, ImportError) as error:
            if not (isinstance(error, SystemExit) and self.is_end_of_unittest(error)):
                if is_of_program(error) or getattr(error, "name", None) == PROGRAM:
                    raise
                raise Unjudged(f"the test ends with {error!r:.300}") from None
        finally:
            if self.refused:
                raise Unjudged(self.refused)
        if self.channel.failed:  # though the test has caught it
            raise ProgramFailed(self.channel.failed)
        if not all(result.wasSuccessful() for result in self.results):
            raise AssertionError("a test case that unittest has run did not pass")
        asserted = [self.names.get(name) for name in self.found.asserted]
        if not self.channel.used and not any(remote_of(value) for value in asserted):
            raise Unjudged("the test ends without having used the program: does it call what it "
                           "defines, check(f), test_f() or unittest.main()?")  # fmt: skip

    def is_end_of_unittest(self, error: SystemExit) -> bool:
        """Whether unittest.main() ends like this after it has run tests."""
        file = files_of(error)[-1]
        if not (file.startswith(self.folders) and file.endswith("/unittest/main.py")):
            return False
        return error.code in (None, 0, 1)  # 0 and 1 are equal to False and True


def files_of(error: BaseException) -> list[str]:
    """File names of the code through which the error came, the place that raised it last."""
    trace, files = error.__traceback__, []
    while trace:
        files.append(trace.tb_frame.f_code.co_filename)
        trace = trace.tb_next
    return files


def is_of_program(error: BaseException) -> bool:
    """Whether an answer of the program has brought this error."""
    return "sandbox_channel" in files_of(error)


def judge(test: bytes, secret: bytes, ask: int, reply: int, spare: int, verdict: int) -> int:
    """Runs a test; writes "pass" with the secret where no statement raises, or why it cannot be
    judged. Returns the exit code."""
    sys.set_int_max_str_digits(0)
    word = b"fail"
    try:
        Tests(test, Channel(reply, ask), spare).run()
        word = b"pass"
    except Unjudged as error:
        word = b"none" + str(error).encode("utf-8", "replace")[:1000]
    finally:
        write_all(verdict, frame(secret + word))
    return 0
