"""HTTP requests of the client with retries. Only this module owns connections, keys and the retry policy.

Failures that may pass (lost connections, 429, 503) are retried within the retry timeout, with respect to
Retry-After. Errors are raised as the classes of `errors.py`.
"""

from __future__ import annotations

import io

import aiohttp
import orjson
from pydantic import BaseModel
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_before_delay,
    wait_exponential,
    wait_random,
)

from agentloop.errors import (
    AgentLoopError,
    InvalidRequest,
    Overloaded,
    ServiceUnavailable,
    WeightVersionNotServed,
    from_wire,
    retry_after_s,
)

_MAX_RETRY_AFTER_S = 60.0
_MAX_CONNECTIONS = 2048  # further concurrent calls wait for a connection

_backoff = wait_exponential(multiplier=0.1, max=5.0) + wait_random(0, 0.1)


class Retryable(Exception):
    """A failure that may pass, with the `retry-after` header of the response."""

    def __init__(self, error: AgentLoopError, retry_after_s: float | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after_s = None if retry_after_s is None else min(retry_after_s, _MAX_RETRY_AFTER_S)


class Transport:
    """A connection pool to one service. `open` must be awaited on the event loop that makes the calls."""

    def __init__(
        self, url: str, api_key: str | None, admin_key: str | None, timeout_s: float, retry_timeout_s: float
    ) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._api_key = api_key
        self._admin_key = admin_key
        self._retry_timeout_s = retry_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        accept: str = "application/json",
        is_admin: bool = False,
        extra_s: float = 0.0,
        repeat_overloaded: bool = True,
        key: str = "",
    ) -> bytes:
        """Make one call with retries, with the client's key or with `key`.

        With `repeat_overloaded` false, Overloaded is not retried here but raised as Retryable.
        """

        def may_repeat(failure: BaseException) -> bool:
            is_full = isinstance(failure, Retryable) and isinstance(failure.error, Overloaded)
            return isinstance(failure, Retryable) and (repeat_overloaded or not is_full)

        retrying = AsyncRetrying(
            retry=retry_if_exception(may_repeat),
            stop=stop_before_delay(self._retry_timeout_s),
            wait=_wait_s,
            reraise=True,
        )
        try:
            return await retrying(
                self.exchange, method, path, body=body, accept=accept, is_admin=is_admin, extra_s=extra_s, key=key
            )
        except Retryable as failure:
            if may_repeat(failure):
                raise failure.error from failure
            raise

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        accept: str = "application/json",
        is_admin: bool = False,
        extra_s: float = 0.0,
        key: str = "",
    ) -> bytes:
        """Send one request and return the response's content. Raises Retryable or the service's error."""
        if self._session is None:
            raise InvalidRequest("use the client as a context manager: `async with RolloutClient(url) as client`")
        headers = {"accept": accept}
        usual = self._admin_key if is_admin and self._admin_key is not None else self._api_key
        if key or usual is not None:
            headers["authorization"] = f"Bearer {key or usual}"
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = io.BytesIO(body.model_dump_json().encode())
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self.timeout_s + extra_s, sock_connect=10),
            ) as answer:
                content = await answer.read()
        except aiohttp.InvalidURL as error:
            raise InvalidRequest(
                f"invalid URL {self.url!r}: expected a URL such as http://127.0.0.1:8000"
            ) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            lost = ServiceUnavailable(f"no response from {self.url}: {type(error).__name__} {error}".rstrip())
            raise Retryable(lost, None) from error
        if answer.status == 200:
            return content
        failure = _failure(answer.status, content)
        # WeightVersionNotServed: the service has already waited for as long as the call allows.
        if failure.retryable and not isinstance(failure, WeightVersionNotServed):
            raise Retryable(failure, retry_after_s(answer.headers.get("retry-after")))
        raise failure


def _wait_s(state: RetryCallState) -> float:
    failure = state.outcome.exception() if state.outcome is not None else None
    if isinstance(failure, Retryable) and failure.retry_after_s is not None:
        return failure.retry_after_s
    return _backoff(state)


def _failure(status: int, content: bytes) -> AgentLoopError:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    has_envelope = isinstance(body, dict) and isinstance(body.get("error"), dict)
    if status >= 500 and not has_envelope:
        # The ingress always sends an error envelope, so this response is from a proxy without a running backend.
        return ServiceUnavailable(f"HTTP {status}: {content[:200].decode(errors='replace')}")
    return from_wire(body, status)
