"""Tools of MCP servers, by the official SDK (package mcp, 2.x). See docs/environments.md.

A server is a command that talks over its stdin and stdout, or a URL (streamable HTTP). Its tools
become tools of the policy with the server's own JSON schemas. They are called from worker
processes: there a shared connection serves all samples of an engine, or each sample has its own.
Protocol: modelcontextprotocol.io/specification.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

from spmdrl.config import ConfigError
from spmdrl.environments.mcp_connection import (
    McpServer,
    SampleConnection,
    shared_connection,
    told,
)
from spmdrl.rewards.workers.stateful_tools import CLOSE

LIST_LIMIT_S = 60.0  # for a server to start and to say which tools it has
MOST_LISTED = 100  # pages of tools
CONNECTION = "the connection"  # of a sample's object; no tool has such a name
MOST_LOG = 1000  # characters quoted of what a server wrote to stderr


def mcp_tools(
    command: Sequence[str] = (),
    *,
    url: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    headers: Mapping[str, str] | None = None,
    per_sample: bool = False,
    only: Sequence[str] = (),
    prefix: str = "",
    log: str = os.devnull,
) -> tuple[Callable[..., Any], ...]:
    """Returns the tools of an MCP server, for `PpoConfig.tools`. Asks the server for them once.

    command: starts a server that talks over stdin and stdout. url: of one that is there.
    per_sample: every sample has a connection (a process of its own with `command`), as servers with
    a state need it; otherwise an engine has one. only: names of the tools that are wanted; empty:
    all. prefix: stands before their names, where two servers have tools of the same name. log: a
    file for what servers write to stderr.

    Raises ConfigError where the server does not start, does not answer or lacks a tool.
    """
    if bool(command) == bool(url) or isinstance(command, str):
        raise ConfigError(
            'mcp_tools takes the command of a server, as a list such as ["python", "server.py"], '
            f"or its url; got command={command!r}, url={url!r}"
        )
    server = McpServer(
        tuple(command), tuple((env or {}).items()), cwd, url, tuple((headers or {}).items()), log,
        per_sample,
    )  # fmt: skip
    found = listed(replace(server, log=os.devnull, has_sessions=False))
    if missing := [name for name in only if name not in found]:
        raise ConfigError(
            f"the MCP server {server.name} has no tool {missing[0]!r}; it has {', '.join(found)}"
        )
    schemas = {
        f"{prefix}{name}": (name, {**schema, "name": f"{prefix}{name}"})
        for name, schema in found.items()
        if not only or name in only
    }
    if per_sample:
        return (sample_tools(server, schemas),)
    return tuple(SharedTool(server, name, schema) for name, schema in schemas.values())


# ---- which tools there are


@cache
def listed(server: McpServer) -> dict[str, dict[str, Any]]:
    """Returns the schemas of a server's tools by their names, from a session that ends at once.

    Raises ConfigError.
    """
    if server.url:
        return in_thread(tools_of(server), server, "")
    with tempfile.NamedTemporaryFile("r", errors="replace") as said:
        return in_thread(tools_of(replace(server, log=said.name)), server, said.name)


def in_thread(call: Coroutine[Any, Any, Any], server: McpServer, log: str) -> Any:
    """Runs a coroutine on an event loop of its own; the caller's thread may have one."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(asyncio.run(limited(call)))
        except BaseException as error:  # noqa: BLE001  of the SDK, raised below
            outcome.set_exception(error)

    threading.Thread(target=run, name="mcp").start()
    try:
        return outcome.result()
    except Exception as error:
        said = Path(log).read_text(errors="replace").strip()[-MOST_LOG:] if log else ""
        raise ConfigError(
            f"the MCP server {server.name} does not say which tools it has: {told(error)}"
            + (f"; its stderr ends: {said}" if said else "")
        ) from error


async def limited(call: Coroutine[Any, Any, Any]) -> Any:
    """Raises TimeoutError."""
    try:
        return await asyncio.wait_for(call, LIST_LIMIT_S)
    except TimeoutError as error:
        raise TimeoutError(f"no answer after {LIST_LIMIT_S:g} s") from error


async def tools_of(server: McpServer) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    async with server.connected() as client:
        cursor = None
        for _ in range(MOST_LISTED):
            page = await client.list_tools(cursor=cursor)
            for tool in page.tools:
                about = tool.description or tool.title or ""
                found[tool.name] = {
                    "name": tool.name, "description": about, "parameters": tool.input_schema
                }  # fmt: skip
            cursor = page.next_cursor
            if cursor is None:
                break
    return found


# ---- what they are in a config


class SharedTool:
    """A tool whose calls share a connection: that of their engine to the server."""

    def __init__(self, server: McpServer, name: str, schema: dict[str, Any]) -> None:
        self.server, self.name, self.schema = server, name, schema
        self.__qualname__ = schema["name"]  # as logs and plans call a function

    async def __call__(self, /, **arguments: Any) -> Any:
        return await shared_connection(self.server).call(self.name, arguments)


def sample_tools(server: McpServer, schemas: Mapping[str, tuple[str, dict[str, Any]]]) -> type:
    """Returns a class with a method for each tool, of which every sample has an object.

    schemas: by the method's name, the server's name for the tool and its schema. Raises
    ConfigError.
    """
    for method in schemas:
        if method.startswith("_") or method == CLOSE:
            raise ConfigError(
                f"the MCP server {server.name} has a tool {method!r}: with per_sample=True a name "
                f'begins with no underscore and is not "{CLOSE}"; give a prefix'
            )

    def start(self: Any) -> None:
        vars(self)[CONNECTION] = SampleConnection(server)

    def end(self: Any) -> None:
        vars(self)[CONNECTION].close()

    methods = {name: method_of(name, *about) for name, about in schemas.items()}
    cls = type("McpSession", (), {"__init__": start, CLOSE: end, **methods})
    cls.__module__ = __name__
    return cls


def method_of(method: str, name: str, schema: dict[str, Any]) -> FunctionType:
    def call(self: Any, /, **arguments: Any) -> Any:
        return vars(self)[CONNECTION].call(name, arguments)

    call.__name__ = method
    call.schema = schema  # type: ignore[attr-defined]
    assert isinstance(call, FunctionType)
    return call
