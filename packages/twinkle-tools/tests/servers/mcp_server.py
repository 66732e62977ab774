"""A real MCP server of the official package, over stdio, or over HTTP at the port it is given."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.fastmcp import FastMCP, Image

server = FastMCP("lab", port=int(sys.argv[1]) if len(sys.argv) > 1 else 8000, log_level="ERROR")
_calls = 0

# The smallest PNG there is.
_PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c4890000000d49444154789c6360"
    "f8ffff3f0005fe02fea735819e0000000049454e44ae426082"
)


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """Count the calls of this process."""
    global _calls
    _calls += 1
    return str(_calls)


@server.tool()
def fail(why: str) -> str:
    """Fail."""
    raise RuntimeError(why)


@server.tool(structured_output=False)
def picture() -> list[object]:
    """Show a picture."""
    return ["a dot", Image(data=_PNG, format="png")]


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


@server.tool()
def die() -> str:
    """End the server's process."""
    os._exit(3)


@server.tool()
def pid() -> str:
    """Say the process id."""
    return str(os.getpid())


if __name__ == "__main__":
    server.run("streamable-http" if len(sys.argv) > 1 else "stdio")
