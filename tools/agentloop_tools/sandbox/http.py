"""Sandboxes that a service makes, and calls of that service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from agentloop.errors import ToolLost, error_line
from agentloop_tools.sandbox.commands import CommandSandboxes

_REQUEST_S = 60.0


class ServiceSandboxes(CommandSandboxes):
    """Sandboxes of the service at a URL. Its calls raise ToolLost if it does not answer, or refuses."""

    def __init__(self, name: str, url: str) -> None:
        """`name` is the service's in errors."""
        super().__init__()
        self._name = name
        self._url = url
        self._http: aiohttp.ClientSession | None = None

    def connector(self) -> aiohttp.BaseConnector | None:
        """Return the way to the service; None: TCP, checked by the usual authorities."""
        return None

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Give the client for calls, whose failures become ToolLost."""
        if self._http is None:  # it belongs to the event loop
            self._http = aiohttp.ClientSession(connector=self.connector(), base_url=self._url)
        try:
            yield self._http
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ToolLost(f"{self._name} does not answer: {error_line(error)}") from error

    @contextlib.asynccontextmanager
    async def call(
        self, method: str, path: str, *, timeout_s: float | None = _REQUEST_S, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Call a path, or another URL."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.http() as http, http.request(method, path, timeout=timeout, **options) as answer:
            if answer.status >= 400:
                text = (await answer.text(errors="replace")).strip()[:300]
                details = {"status": answer.status}
                raise ToolLost(f"{self._name} answers {answer.status}: {text}", details=details)
            yield answer

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Call a path for JSON; None is no content."""
        async with self.call(method, path, **options) as answer:
            return await answer.json() if answer.content_type == "application/json" else None

    async def delete(self, path: str, **options: Any) -> None:
        """Delete a sandbox. One that is gone, or whose service is, is no error: its life is bounded."""
        with contextlib.suppress(ToolLost):
            await self.ask("DELETE", path, **options)

    async def close(self) -> None:
        await super().close()
        if self._http is not None:
            await self._http.close()
