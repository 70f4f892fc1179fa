"""An MCP server of protocol 2025-06-18 over HTTP. A test supplies its answers to `tools/call` in order."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PROTOCOL = "2025-06-18"


@dataclass(frozen=True)
class Reply:
    """An HTTP response to a call; `body` is called with the id of the call."""

    status: int = 200
    body: Callable[[Any], str] = lambda call_id: json.dumps(
        {"jsonrpc": "2.0", "id": call_id, "result": {"content": [{"type": "text", "text": "rain"}]}}
    )
    kind: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class FakeMcp:
    """The server: its pending replies, and its received requests."""

    replies: list[Reply] = field(default_factory=list)
    is_read_only: bool = False
    num_initialized: int = 0
    num_calls: int = 0
    url: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        if request.method != "POST":
            return web.Response(status=405)
        message = await request.json()
        method, message_id = message.get("method"), message.get("id")
        if message_id is None:
            return web.Response(status=202)
        if method == "initialize":
            self.num_initialized += 1
            info = {"name": "fake", "version": "1"}
            result = {"protocolVersion": PROTOCOL, "capabilities": {"tools": {}}, "serverInfo": info}
            return self._answer(message_id, result, {"mcp-session-id": f"s{self.num_initialized}"})
        if method == "tools/list":
            hints = {"readOnlyHint": self.is_read_only}
            tool = {"name": "weather", "inputSchema": {"type": "object"}, "annotations": hints}
            return self._answer(message_id, {"tools": [tool]})
        if method != "tools/call":
            error = {"code": -32601, "message": "Method not found"}
            return web.json_response({"jsonrpc": "2.0", "id": message_id, "error": error})
        self.num_calls += 1
        reply = self.replies.pop(0) if self.replies else Reply()
        headers = {"content-type": reply.kind, **reply.headers}
        return web.Response(status=reply.status, body=reply.body(message_id).encode(), headers=headers)

    @staticmethod
    def _answer(message_id: Any, result: Any, headers: Mapping[str, str] | None = None) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": message_id, "result": result}, headers=headers)


@asynccontextmanager
async def fake_mcp(**fields: Any) -> AsyncIterator[FakeMcp]:
    fake, app = FakeMcp(**fields), web.Application()
    app.router.add_route("*", "/mcp", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
        yield fake
    finally:
        await runner.cleanup()
