"""A real MCP server, written with the SDK: `python -m tests.support.service.mcp_server [PORT]`; no port: stdio.

It counts its own calls, which distinguishes one process per trajectory from one for all; `die` ends it like a
crash.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mcp.server import MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent, ToolAnnotations

server = MCPServer("numbers", log_level="CRITICAL")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note, and return all."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
async def wait(seconds: float) -> str:
    """Answer late."""
    await asyncio.sleep(seconds)
    return "late"


@server.tool()
def picture() -> CallToolResult:
    """Return a text and an image."""
    image = ImageContent(type="image", data="aGVsbG8=", mime_type="image/png")
    return CallToolResult(content=[TextContent(type="text", text="a dot:"), image])


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def die_once(path: str) -> str:
    """Answer in the second process; the first one dies, and leaves a file that says so."""
    if Path(path).exists():
        return "lived"
    Path(path).touch()
    os._exit(3)


@server.tool()
def die() -> str:
    """End the process."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run(transport="streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run(transport="stdio")
