"""Sandboxes of an HTTP service, and the calls to it.

A failure of the service raises ToolLost, so that the policy never reads it. Calls that were refused before they ran
(429, or 503 with `Retry-After`) are retried.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson

from agentloop.errors import ToolLost, error_line, retry_after_s
from agentloop_tools.sandbox.commands import CommandSandbox, CommandSandboxes
from agentloop_tools.sandbox.port import SandboxLimits, SandboxSource

_REQUEST_S = 60.0
_FORM_ERRORS = (KeyError, TypeError, ValueError)  # raised by code that reads an unexpected response
_CALL_ATTEMPTS = 3  # attempts per request


class ServiceSandboxes(CommandSandboxes):
    """Creates sandboxes with a service at a URL.

    Calls raise ToolLost if it does not respond or reports an error.
    """

    def __init__(self, name: str, url: str) -> None:
        """`name` is the service's name in error messages."""
        super().__init__()
        self._name = name
        self._url = url
        self._http: aiohttp.ClientSession | None = None

    def connector(self) -> aiohttp.BaseConnector | None:
        """Return the connector to the service; None: TCP, with the system's certificate authorities."""
        return None

    @contextlib.asynccontextmanager
    async def http(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Yield the HTTP client. Errors in the context are raised as ToolLost."""
        if self._http is None:  # created here, because it belongs to the running event loop
            self._http = aiohttp.ClientSession(connector=self.connector(), base_url=self._url)
        try:
            yield self._http
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ToolLost(f"{self._name} does not respond: {error_line(error)}") from error
        except _FORM_ERRORS as error:
            raise self._misformed(error) from error

    async def filled(self, source: SandboxSource, limits: SandboxLimits, content: bytes | None) -> CommandSandbox:
        try:
            return await super().filled(source, limits, content)
        except _FORM_ERRORS as error:
            raise self._misformed(error) from error

    def _misformed(self, error: Exception) -> ToolLost:
        return ToolLost(f"{self._name} sent a response that violates its protocol: {error_line(error)}")

    @contextlib.asynccontextmanager
    async def call(
        self, method: str, path: str, *, timeout_s: float | None = _REQUEST_S, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to a path of the service, or to another URL. Yields the response."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with self.http() as http, http.request(method, path, timeout=timeout, **options) as answer:
            if answer.status >= 400:
                text = (await answer.text(errors="replace")).strip()[:300]
                details = {"status": answer.status, "retry_after_s": _retry_after_s(answer)}
                raise ToolLost(f"{self._name} returned status {answer.status}: {text}", details=details)
            yield answer

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        """Send a request and return the JSON response; None for an empty or binary response.

        Raises ToolLost, also for text that is not JSON.
        """
        for attempt in range(1, _CALL_ATTEMPTS + 1):
            try:
                async with self.call(method, path, **options) as answer:
                    content = await answer.read()
                    if not content.strip() or not answer.content_type.startswith(("text/", "application/json")):
                        return None
                    try:
                        return orjson.loads(content)
                    except orjson.JSONDecodeError as error:
                        text = content[:300].decode(errors="replace").strip()
                        raise ToolLost(f"{self._name} sent a response that is not JSON: {text}") from error
            except ToolLost as error:
                wait_s = (error.details or {}).get("retry_after_s")
                if attempt == _CALL_ATTEMPTS or wait_s is None or wait_s > _REQUEST_S:
                    raise
                await asyncio.sleep(wait_s)
        raise AssertionError("the last attempt returns or raises")

    async def delete(self, path: str, **options: Any) -> None:
        """Delete a sandbox. Errors are ignored, because its lifetime is limited anyway."""
        with contextlib.suppress(ToolLost):
            await self.ask("DELETE", path, **options)

    async def close(self) -> None:
        await super().close()
        if self._http is not None:
            await self._http.close()


def _retry_after_s(answer: aiohttp.ClientResponse) -> float | None:
    """Return the seconds until a refused request may be retried; None if the request may have run."""
    after = answer.headers.get("Retry-After")
    if answer.status != 429 and (answer.status != 503 or after is None):
        return None
    seconds = retry_after_s(after)
    return 1.0 if seconds is None else seconds
