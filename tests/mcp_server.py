"""An MCP server of tests: with a state, with errors, and with a tool that ends it."""

import os
import sys
import time
from typing import Annotated

from mcp.server.mcpserver import Context, Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

server = MCPServer("shop")
counts: dict[str, int] = {}
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010800000000"
    "3a7e9b550000000a49444154789c63600000000200014873a4710000000049454e44ae426082"
)


@server.tool()
def add(a: Annotated[int, Field(description="one", ge=0)], b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def count(ctx: Context) -> str:
    """Counts the calls of a session."""
    request = ctx.request_context.request
    session = request.headers.get("mcp-session-id", "") if request is not None else ""
    counts[session] = counts.get(session, 0) + 1
    return f"{counts[session]} of {os.getpid()} for {os.environ.get('SHOP')}"


@server.tool(name="greet-by.header")
def greet(ctx: Context) -> str:
    """Says a header of the request."""
    request = ctx.request_context.request
    return str(request.headers.get("x-name")) if request is not None else "no request"


@server.tool()
def fail(what: str) -> str:
    """Fails."""
    raise ToolError(f"there is\nno {what}")


@server.tool()
def draw() -> list:
    """Draws."""
    return ["a dot:", Image(data=PNG, format="png")]


@server.tool()
async def hang() -> str:
    """Holds up the whole server."""
    time.sleep(100)
    return ""


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
