"""Calls of the services that make sandboxes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp

from agentloop.errors import ToolLost, error_line
from agentloop_tools.sandbox.commands import CommandSandboxes

_REQUEST_S = 60.0


class SandboxService:
    """A service by its URL, and its name in errors."""

    def __init__(self, name: str, url: str, connector: Callable[[], aiohttp.BaseConnector | None]) -> None:
        self._name = name
        self._url = url
        self._connector = connector
        self._http: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def call(
        self, method: str, path: str, *, timeout_s: float | None = _REQUEST_S, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call it by a path, or another URL. Raises ToolLost if it does not answer, or refuses."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session().request(method, path, timeout=timeout, **options) as answer:
                if answer.status >= 400:
                    text = (await answer.text(errors="replace")).strip()
                    raise ToolLost(
                        f"{self._name} answers {answer.status}: {text[:300]}", details={"status": answer.status}
                    )
                yield answer
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ToolLost(f"{self._name} does not answer: {error_line(error)}") from error

    @contextlib.asynccontextmanager
    async def socket(self, path: str, **options: Any) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
        """Open a WebSocket. Raises ToolLost if it cannot be opened."""
        try:
            async with self._session().ws_connect(path, max_msg_size=0, **options) as opened:
                yield opened
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ToolLost(f"{self._name} does not answer: {error_line(error)}") from error

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None:  # it belongs to the event loop
            self._http = aiohttp.ClientSession(connector=self._connector(), base_url=self._url)
        return self._http

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Call it for JSON; None is no content."""
        async with self.call(method, path, **options) as answer:
            return await answer.json() if answer.content_type == "application/json" else None

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class ServiceSandboxes(CommandSandboxes):
    """Sandboxes that a service makes."""

    def __init__(self, service: SandboxService) -> None:
        super().__init__()
        self.service = service

    async def close(self) -> None:
        await super().close()
        await self.service.close()
