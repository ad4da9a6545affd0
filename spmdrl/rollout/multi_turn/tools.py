"""Functions that the policy may call: how the prompt describes them, and what the policy asked.

How a model writes a call is its own affair; vLLM's parsers know some fifty ways.
"""

from __future__ import annotations

import difflib
import inspect
import json
import logging
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

from spmdrl.config import ConfigError, SandboxConfig
from spmdrl.rewards.code import python, python_in
from spmdrl.rewards.sandbox.remote import check_remote
from spmdrl.rewards.sandbox.sandbox import check as check_sandbox
from spmdrl.rewards.workers.caller import arguments_of
from spmdrl.rewards.workers.pool import name_of
from spmdrl.rewards.workers.stateful_tools import Objects, methods_of
from spmdrl.rollout.multi_turn.environment import OBJECT_TAKES
from spmdrl.rollout.vllm import compat as vllm_compat

FILLED_IN = "extra_info"  # a parameter that the model does not see: the prompt's own


class Call(NamedTuple):
    """A call that the policy asked for; arguments None: `problem` says why it cannot be done."""

    name: str
    arguments: dict[str, Any] | None
    problem: str = ""
    objects: Objects | None = None  # that it is a method of


class Toolbox:
    """The tools of a run, by name. Raises ConfigError for a function that cannot be described."""

    def __init__(
        self, tools: Sequence[Callable[..., Any] | str], sandbox: SandboxConfig | None = None
    ) -> None:  # fmt: skip
        """sandbox: where the tool "python" runs its programs; None: on this machine."""
        self.functions: dict[str, Callable[..., Any]] = {}  # and methods, bound to their class
        self.schemas: list[dict[str, Any]] = []  # as chat templates take them
        self.objects: dict[str, Objects] = {}  # by method
        for tool in tools:
            if inspect.isclass(tool):
                getattr(tool, "__tool_check__", bool)()  # whether it can work on this host
                objects = Objects(tool, arguments_of(tool, OBJECT_TAKES, "tool"))
                for method in methods_of_tool(tool):
                    self.add(method)
                    self.objects[method.__name__] = objects
                continue
            function = python if isinstance(tool, str) else tool
            if function is python:
                check_sandbox() if sandbox is None else check_remote(sandbox)
                function = python_in(sandbox)
            self.add(function)

    def add(self, function: Callable[..., Any]) -> None:
        schema = schema_of(function)
        name = schema["function"]["name"]
        if name in self.functions:
            raise ConfigError(f"two tools are called {name!r}: a call could be of either")
        self.functions[name] = function
        self.schemas.append(schema)

    @property
    def called(self) -> list[Callable[..., Any]]:
        """Returns what calls are made of: the plain functions, then each class's objects."""
        plain = [f for name, f in self.functions.items() if name not in self.objects]
        return [*plain, *dict.fromkeys(self.objects.values())]

    def call(self, name: str, arguments: str, extra_info: dict[str, Any]) -> Call:
        """arguments: JSON, as the policy wrote them."""
        if name not in self.functions:
            return Call(
                name, None, f"there is no tool {name!r}, there is {', '.join(self.functions)}"
            )
        try:
            given = json.loads(arguments or "{}")
            json.dumps([[[[given]]]])  # as deep as they will lie in messages
        except (ValueError, RecursionError) as error:
            return Call(name, None, f"the arguments are no JSON: {error}")
        if not isinstance(given, dict):
            return Call(name, None, f"the arguments must be a JSON object, got {arguments[:80]}")
        signature = inspect.signature(self.functions[name])
        if FILLED_IN in signature.parameters:
            given[FILLED_IN] = extra_info
        try:
            signature.bind(**given)
        except TypeError as error:
            return Call(name, None, str(error))
        return Call(name, given, objects=self.objects.get(name))


def methods_of_tool(cls: type) -> list[Callable[..., Any]]:
    """The public methods of a class that is a tool. Raises ConfigError."""
    try:
        found = methods_of(cls)
    except ValueError as error:
        raise ConfigError(f"the tool {cls.__qualname__}: {error}") from error
    if not found:
        raise ConfigError(f"the tool {cls.__qualname__} has no public method that could be called")
    for name, method in found.items():
        if FILLED_IN in inspect.signature(method).parameters:
            raise ConfigError(
                f"the tool {cls.__qualname__}: {name} takes {FILLED_IN!r}; let __init__ take it"
            )
    return [MethodType(method, cls) for method in found.values()]


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema: what the function has under the name `schema`, else of its type hints and
    its docstring. Raises ConfigError."""
    if (given := getattr(function, "schema", None)) is not None:
        return given_schema(function, given)
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    if not inspect.isfunction(getattr(function, "__func__", function)):
        raise ConfigError(f'a tool is a plain function, a class or "python", got {function!r}')
    for p in inspect.signature(function).parameters.values():
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) or p.name == "self":
            raise ConfigError(
                f"the tool {function.__qualname__} has the parameter {str(p)!r}, which a call by "
                "names cannot give"
            )
    try:
        schema = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ConfigError(
            f"the tool {function.__qualname__} cannot be described to the model: {error}. It needs "
            "type hints, and a docstring that says what it does, with an `Args:` section"
        ) from error
    parameters = schema["function"]["parameters"]
    parameters["properties"].pop(FILLED_IN, None)
    parameters["required"] = [name for name in parameters.get("required", []) if name != FILLED_IN]
    return schema


def given_schema(function: Callable[..., Any], given: Any) -> dict[str, Any]:
    """Returns the schema that a function carries as chat templates take it: a name, a description
    and the JSON schema of its parameters. Raises ConfigError."""
    named = isinstance(given, dict) and isinstance(given.get("name"), str) and given["name"]
    if not named or not isinstance(given.get("parameters"), dict):
        raise ConfigError(
            f"the tool {name_of(function)} has as its schema {str(given)[:200]}; expected "
            '{"name": ..., "description": ..., "parameters": a JSON schema}'
        )
    return {"type": "function", "function": given}


class Complaints(logging.Handler):
    """Collects what a parser logs instead of raising it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = ""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self.last = f"{type(error).__name__}: {error}" if error else record.getMessage()


# a tool, for requests of which no call is read
PROBE: dict[str, Any] = {
    "type": "function", "function": {"name": "probe", "parameters": {"type": "object"}}
}  # fmt: skip


def import_parsers() -> None:
    """Imports what a CallParser needs of vLLM. Raises ImportError."""
    vllm_compat.tool_parsers()
    vllm_compat.tool_request([PROBE])


class CallParser:
    """Finds the calls in what a model says, by one of vLLM's parsers.

    Raises ConfigError for a name that vLLM does not know, and for a parser of other tokenizers.
    """

    def __init__(
        self, name: str, tokenizer: Any, schemas: list[dict[str, Any]],
        option: str = "multi_turn.parser",
    ) -> None:  # fmt: skip
        """schemas: of the tools, as OpenAI's chat API has them. option: that names the parser."""
        try:
            parsers = vllm_compat.tool_parsers()
            self.request = vllm_compat.tool_request(schemas)
        except ImportError as error:
            raise ConfigError(
                f"tools need vllm, whose parsers read their calls: {error}"
            ) from error
        self.complaints = Complaints()
        logger = logging.getLogger("vllm.tool_parsers")
        logger.handlers, logger.propagate = [self.complaints], False
        logger.setLevel(logging.ERROR)  # vLLM's own may be deaf to these
        try:
            self.parser = parsers.get_tool_parser(name)(tokenizer)
            self.parser.extract_tool_calls("a word", self.request)
        except KeyError as error:
            names = sorted(parsers.list_registered())
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(
                f"{option}={name!r} is none of vLLM's: {', '.join(names)}{hint}"
            ) from error
        except (RuntimeError, NotImplementedError) as error:
            raise ConfigError(
                f"{option}={name!r} does not fit the model's tokenizer: {error}"
            ) from error

    @property
    def begins(self) -> str:
        """The text that a call begins with, where the parser says so."""
        found = getattr(self.parser, "tool_call_start_token", "")
        return found if isinstance(found, str) else ""

    def __call__(self, text: str) -> tuple[list[tuple[str, str]], str]:
        """((name, arguments as JSON) of each call, why what looks like a call cannot be read)."""
        self.complaints.last = ""
        try:
            found = self.parser.extract_tool_calls(text, self.request)
        except Exception as error:  # noqa: BLE001  some fifty parsers, of what a policy may write
            return [], f"{type(error).__name__}: {error}"
        calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
        if not calls and not self.complaints.last and self.begins and self.begins in text:
            return [], f"there is no whole call behind {self.begins!r}"
        return calls, "" if calls else self.complaints.last


def as_text(value: Any) -> str:
    """Returns what a tool is given or returned as text: JSON, unless it is a text."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
