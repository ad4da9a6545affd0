"""Connections to MCP servers in worker processes: opened by a call, and anew after a loss."""

from __future__ import annotations

import asyncio
import base64
import functools
import os
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from spmdrl.config import ConfigError

try:
    import httpx2
    from mcp import Client, MCPError, StdioServerParameters, stdio_client
    from mcp.client.streamable_http import streamable_http_client
except ImportError as problem:
    raise ConfigError(
        f"spmdrl.environments.mcp needs the package mcp, 2.3 or newer: {problem}"
    ) from problem

CLOSE_LIMIT_S = 10.0
ALIVE_S = 10.0  # for a server to answer at all, after a call that was given up
# JSON-RPC's codes for a request that is wrong; any other error may mean that the server is gone
WRONG_REQUEST = range(-32603, -32599)


class ToolFailed(Exception):
    """The server's answer to a call is an error. The policy reads the message."""

    __module__ = "builtins"  # tracebacks, whose last line the policy reads, then leave ours out


class ServerLost(ToolFailed):
    """The connection to the server ended. The next call opens another."""

    __module__ = "builtins"


@dataclass(frozen=True)
class McpServer:
    """Says how a server is reached: by a command, or by a URL."""

    command: tuple[str, ...] = ()  # the program and its arguments
    env: tuple[tuple[str, str], ...] = ()  # beside PATH, HOME and the like, which a server inherits
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    log: str = os.devnull  # a file; what servers write to stderr is appended
    has_sessions: bool = False  # over HTTP: the older protocol, which has them

    @property
    def name(self) -> str:
        return self.url or " ".join(self.command)

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[Client]:
        """Raises whatever the SDK does where there is no such server."""
        async with AsyncExitStack() as stack:
            if self.url:
                limits = httpx2.Timeout(30.0, read=300.0)
                http = httpx2.AsyncClient(headers=dict(self.headers), timeout=limits)
                await stack.enter_async_context(http)
                transport = streamable_http_client(self.url, http_client=http)
            else:
                program, *arguments = self.command
                started = StdioServerParameters(
                    command=program, args=arguments, env=dict(self.env), cwd=self.cwd
                )
                transport = stdio_client(started, stack.enter_context(open(self.log, "a")))
            mode = "legacy" if self.url and self.has_sessions else "auto"
            yield await stack.enter_async_context(Client(transport, mode=mode))


class Connection:
    """A connection to a server on the event loop that uses it; opened by the first call, and by
    the first after a loss. A task of its own opens and closes it, as the SDK wants."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.opened: asyncio.Future[Client] | None = None
        self.task: asyncio.Task[None] | None = None
        self.look: asyncio.Task[None] | None = None

    async def call(self, name: str, arguments: dict[str, Any]) -> Any:
        """Raises ToolFailed."""
        if self.opened is None:
            self.opened = asyncio.get_running_loop().create_future()
            self.task = asyncio.create_task(self.hold(self.opened))
        opened = self.opened
        try:
            # a call that ends in time leaves the connection to the others
            client = await asyncio.shield(opened)
            result = await client.call_tool(name, arguments)
        except asyncio.CancelledError:  # it is late: the server may hang, and the others with it
            self.look = asyncio.create_task(self.drop_if_silent(opened))
            raise
        except MCPError as error:
            if error.code in WRONG_REQUEST:
                raise ToolFailed(told(error)) from error
            await self.drop(opened)
            raise ServerLost(f"the MCP server was lost during the call: {told(error)}") from error
        except Exception as error:
            await self.drop(opened)
            raise ServerLost(f"the MCP server cannot be reached: {told(error)}") from error
        return said_by(result)

    async def hold(self, opened: asyncio.Future[Client]) -> None:
        try:
            async with self.server.connected() as client:
                opened.set_result(client)
                await asyncio.get_running_loop().create_future()  # until it is cancelled
        except Exception as error:  # noqa: BLE001  raised by whoever waits for the connection
            if not opened.done():
                opened.set_exception(error)
        finally:
            opened.cancel()  # nobody is to wait for what was closed before it was there

    async def drop_if_silent(self, opened: asyncio.Future[Client]) -> None:
        """Closes a connection to a server that does not even list its tools."""
        try:
            client = await asyncio.wait_for(asyncio.shield(opened), ALIVE_S)
            await asyncio.wait_for(client.list_tools(cache_mode="bypass"), ALIVE_S)
        except Exception:  # noqa: BLE001  of the SDK: what is wrong with it, the next call will tell
            await self.drop(opened)

    async def drop(self, opened: asyncio.Future[Client] | None) -> None:
        """Closes the connection, unless another call has opened a new one since."""
        if self.opened is not opened or self.task is None:
            return
        task, self.opened, self.task = self.task, None, None
        task.cancel()
        await asyncio.wait({task}, timeout=CLOSE_LIMIT_S)


def said_by(result: Any) -> Any:
    """Returns what a tool said: its text, or its texts and images in their order. Raises
    ToolFailed for an error."""
    parts = [part_of(block) for block in result.content]
    if result.is_error:
        # one line, since the policy is told the last one of an error
        raise ToolFailed(" ".join(" ".join(map(str, parts)).split()) or "the tool failed")
    if not parts and result.structured_content is not None:
        return result.structured_content
    texts = [part for part in parts if isinstance(part, str)]
    return "\n".join(texts) if len(texts) == len(parts) else parts


def part_of(block: Any) -> str | bytes:
    """Returns a block's text, or its image as an encoded file; of others, what they are."""
    if block.type == "text":
        return block.text
    if block.type == "image":
        return base64.b64decode(block.data)
    if block.type == "resource" and hasattr(block.resource, "text"):
        return block.resource.text
    return block.model_dump_json(by_alias=True, exclude={"data"}, exclude_none=True)


@functools.cache
def shared_connection(server: McpServer) -> Connection:
    return Connection(server)


@functools.cache
def background_loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop of this process's connections that belong to a sample each."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="mcp", daemon=True).start()
    return loop


def wait_for(call: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(call, background_loop()).result()


class SampleConnection:
    """A sample's own connection. A server that was lost is started again, and has the calls that it
    had answered once more."""

    def __init__(self, server: McpServer) -> None:
        self.connection = Connection(server)
        self.made: list[tuple[str, dict[str, Any]]] = []

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            result = wait_for(self.connection.call(name, arguments))
        except ServerLost:
            for made in self.made:
                with suppress(ToolFailed):  # which the policy was told then
                    wait_for(self.connection.call(*made))
            raise
        except ToolFailed:
            self.made.append((name, arguments))
            raise
        self.made.append((name, arguments))
        return result

    def close(self) -> None:
        with suppress(TimeoutError):
            closing = self.connection.drop(self.connection.opened)
            asyncio.run_coroutine_threadsafe(closing, background_loop()).result(CLOSE_LIMIT_S)


def told(error: BaseException) -> str:
    """Returns an error in one line; of a group, which the SDK may raise, its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(f"{type(error).__name__}: {error}".split())
