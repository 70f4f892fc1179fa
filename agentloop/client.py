"""The client SDK: everything a trainer asks of the service, over HTTP.

One owner of retries: every call here repeats what can succeed later (connection lost, 429, 503) until its retry
budget is spent, honouring Retry-After. That is safe because every call is keyed or idempotent; a repeated
`generate` samples anew. Errors are those of `errors.py`, as the service raised them.

    async with RolloutClient(url) as client:
        rollout = await client.submit(tasks, num_samples=8)
        async for trajectory in rollout:
            train(trajectory)
        await client.update_weights("checkpoints/1", version=1)
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import orjson
import structlog
from pydantic import BaseModel
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_before_delay, wait_exponential_jitter

from agentloop import codec
from agentloop.control import Page, RolloutStatus, ServiceStatus, UpdateReport
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    InvalidRequest,
    NotFound,
    Overloaded,
    ServiceUnavailable,
    from_wire,
)
from agentloop.types import Generation, KVPolicy, PauseMode, RolloutTask, Trajectory
from agentloop.wire import MAX_TASKS, GenerateBody, PauseBody, SubmitBody, WeightsBody, check_body

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)
_backoff = wait_exponential_jitter(multiplier=0.1, max=5.0, jitter=0.1)

_MSGPACK = "application/msgpack"
_MAX_RETRY_AFTER_S = 60.0
_FIRST_WAIT_S = 0.1
_READ_WAIT_S = 20.0  # how long the service holds a read that finds nothing
_FORGET_TIMEOUT_S = 5.0
_MAX_CONNECTIONS = 2048  # concurrent calls beyond it wait here for one of the others


class _Retryable(Exception):
    """A failure that may pass, and when the service said to come back."""

    def __init__(self, error: AgentLoopError, retry_after_s: float | None) -> None:
        super().__init__(error.message)
        self.error = error
        self.retry_after_s = retry_after_s


class RolloutClient:
    """A connection to one service, for any number of concurrent calls. Use as an async context manager.

    `timeout_s` bounds each HTTP exchange beyond the time that the call itself asks for; `retry_timeout_s` is the
    budget of repeats for each call.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        admin_key: str | None = None,
        timeout_s: float = 60.0,
        retry_timeout_s: float = 120.0,
    ) -> None:
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._admin_key = admin_key
        self._timeout_s = timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RolloutClient:
        connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
        self._session = aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        """Return once a replica takes traffic. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._exchange("GET", "/health")
                    except (_Retryable, NotFound):  # before its app is up, a Serve proxy says 404
                        await asyncio.sleep(_FIRST_WAIT_S)
                    else:
                        return
        except TimeoutError as error:
            raise DeadlineExceeded(f"the service at {self._url} is not ready after {timeout_s:g} s") from error

    async def generate(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float = 1.0,
        seed: int | None = None,
        stop_token_ids: Sequence[int] = (),
        timeout_s: float = 600.0,
    ) -> Generation:
        """Sample a continuation of exactly these ids. Raises ContextLengthExceeded, Overloaded and others."""
        sampling = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stop_token_ids": list(stop_token_ids),
        }
        body = {"token_ids": list(token_ids), "sampling": sampling, "timeout_s": timeout_s}
        checked = check_body(body, GenerateBody)
        return await self._post("/generate", checked, Generation, extra_s=timeout_s)

    async def submit(
        self, tasks: Sequence[RolloutTask], *, num_samples: int = 1, timeout_s: float = 3600.0
    ) -> Rollout:
        """Hand in tasks, each sampled `num_samples` times; returns once the service holds all of them durably.

        Where the service's queue is full this waits, in ever smaller pieces, up to `timeout_s` (DeadlineExceeded).
        What was accepted of a submit that fails is cancelled. Raises InvalidRequest for a task that cannot be.
        """
        bodies = [_with_lists(codec.to_builtins(task)) for task in tasks]
        rollout_id = f"r-{uuid.uuid4().hex[:16]}"
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit_all(rollout_id, bodies, num_samples)
        except TimeoutError as error:
            await self._forget(rollout_id)
            raise DeadlineExceeded(f"the service did not take all tasks within {timeout_s:g} s") from error
        except BaseException:
            await self._forget(rollout_id)
            raise
        return Rollout(self, rollout_id, len(bodies) * num_samples)

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """A rollout's counts. Raises NotFound."""
        return await self._get(f"/rollouts/{rollout_id}", RolloutStatus)

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """End what is queued or running; each sample still gets its record. Raises NotFound."""
        return await self._post(f"/rollouts/{rollout_id}/cancel", None, RolloutStatus)

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Finished trajectories after a cursor; waits up to `wait_s` for the first. Raises NotFound."""
        path = f"/rollouts/{rollout_id}/trajectories?after={after}&limit={limit}&wait_s={wait_s:g}"
        return codec.decode(await self._call("GET", path, accept=_MSGPACK, extra_s=wait_s), Page)

    async def update_weights(
        self, directory: str | Path, *, version: int, kv_policy: KVPolicy | None = None, timeout_s: float = 900.0
    ) -> UpdateReport:
        """Bring every replica to the weights in `directory`, which the service must see at the same path.

        Needs the admin key where keys are set. Raises Conflict, CheckpointUnreadable, WeightUpdateFailed.
        """
        checked = _weights_body(directory, version, kv_policy)
        return await self._post("/admin/weights", checked, UpdateReport, is_admin=True, extra_s=timeout_s)

    async def pause(self, mode: PauseMode = PauseMode.KEEP, *, timeout_s: float = 900.0) -> None:
        """Pause generation on every replica until `resume`. Idempotent; needs the admin key."""
        body = check_body({"mode": mode.value}, PauseBody)
        await self._call("POST", "/admin/pause", body=body, is_admin=True, extra_s=timeout_s)

    async def resume(self, *, timeout_s: float = 900.0) -> None:
        """Undo a pause. Idempotent; needs the admin key."""
        await self._call("POST", "/admin/resume", is_admin=True, extra_s=timeout_s)

    async def status(self) -> ServiceStatus:
        """The service at this moment."""
        return await self._get("/status", ServiceStatus)

    async def _submit_all(self, rollout_id: str, tasks: list[dict[str, Any]], num_samples: int) -> None:
        num_sent, size = 0, MAX_TASKS
        while num_sent < max(len(tasks), 1):  # without tasks: once, for the service's refusal
            chunk = tasks[num_sent : num_sent + size]
            body = {
                "tasks": chunk,
                "num_samples": num_samples,
                "rollout_id": rollout_id,
                "first_index": num_sent,
            }
            checked = check_body(body, SubmitBody)
            try:
                await self._call("POST", "/rollouts", body=checked, repeat_overloaded=False)
            except _Retryable as full:
                if size == 1:  # no room at all
                    await asyncio.sleep(full.retry_after_s if full.retry_after_s is not None else _FIRST_WAIT_S)
                size = max(1, len(chunk) // 2)
            else:
                num_sent, size = num_sent + len(chunk), min(2 * size, MAX_TASKS)

    async def _forget(self, rollout_id: str) -> None:
        """Cancel what was accepted of a submit that failed. Best effort: that failure is what the caller gets."""
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                await self._exchange("POST", f"/rollouts/{rollout_id}/cancel")
        except (AgentLoopError, _Retryable, TimeoutError) as error:
            _log.info("failed_submit_not_cancelled", rollout=rollout_id, reason=str(error))

    async def _get(self, path: str, kind: type[T]) -> T:
        return codec.from_builtins(_loads(await self._call("GET", path)), kind)

    async def _post(
        self, path: str, body: BaseModel | None, kind: type[T], *, is_admin: bool = False, extra_s: float = 0.0
    ) -> T:
        answer = await self._call("POST", path, body=body, is_admin=is_admin, extra_s=extra_s)
        return codec.from_builtins(_loads(answer), kind)

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        accept: str = "application/json",
        is_admin: bool = False,
        extra_s: float = 0.0,
        repeat_overloaded: bool = True,
    ) -> bytes:
        """One call with its repeats. Overloaded escapes as _Retryable if it is not to be repeated here."""

        def may_repeat(failure: BaseException) -> bool:
            is_full = isinstance(failure, _Retryable) and isinstance(failure.error, Overloaded)
            return isinstance(failure, _Retryable) and (repeat_overloaded or not is_full)

        retrying = AsyncRetrying(
            retry=retry_if_exception(may_repeat),
            stop=stop_before_delay(self._retry_timeout_s),
            wait=_wait_s,
            reraise=True,
        )
        try:
            return await retrying(
                self._exchange, method, path, body=body, accept=accept, is_admin=is_admin, extra_s=extra_s
            )
        except _Retryable as failure:
            if may_repeat(failure):
                raise failure.error from failure
            raise

    async def _exchange(
        self,
        method: str,
        path: str,
        *,
        body: BaseModel | None = None,
        accept: str = "application/json",
        is_admin: bool = False,
        extra_s: float = 0.0,
    ) -> bytes:
        """One request and its answer. Raises _Retryable or what the service raised."""
        if self._session is None:
            raise InvalidRequest("use the client as a context manager: `async with RolloutClient(url) as client`")
        headers = {"accept": accept}
        key = self._admin_key if is_admin and self._admin_key is not None else self._api_key
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        data = None
        if body is not None:
            headers["content-type"] = "application/json"
            data = body.model_dump_json().encode()
        try:
            async with self._session.request(
                method,
                self._url + path,
                data=data,
                headers=headers,
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=self._timeout_s + extra_s, sock_connect=10),
            ) as answer:
                content = await answer.read()
        except aiohttp.InvalidURL as error:
            raise InvalidRequest(f"not a URL: {self._url}") from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            lost = ServiceUnavailable(f"no answer from {self._url}: {type(error).__name__} {error}".rstrip())
            raise _Retryable(lost, None) from error
        if answer.status == 200:
            return content
        failure = _failure(answer.status, content)
        if failure.retryable:
            raise _Retryable(failure, _retry_after_s(answer.headers.get("retry-after")))
        raise failure


class Rollout:
    """A submitted rollout. Iterate to get every finished trajectory exactly once, across lost connections.

    The iteration ends when all `num_trajectories` have ended; it may be left and taken up again.
    """

    def __init__(self, client: RolloutClient, rollout_id: str, num_trajectories: int) -> None:
        self.rollout_id = rollout_id
        self.num_trajectories = num_trajectories
        self._client = client
        self._cursor = 0
        self._num_read = 0
        self._ready: deque[Trajectory] = deque()  # at most one page

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        is_more = True
        while is_more or self._ready:
            if not self._ready:
                is_more = await self._read_page()
            while self._ready:
                yield self._ready.popleft()

    async def status(self) -> RolloutStatus:
        """The counts at this moment."""
        return await self._client.rollout_status(self.rollout_id)

    async def cancel(self) -> RolloutStatus:
        """End what is queued or running; iteration then delivers those records too."""
        return await self._client.cancel(self.rollout_id)

    async def _read_page(self) -> bool:
        """Fetch the next page; False if it was the last."""
        if self._num_read >= self.num_trajectories:
            return False
        page = await self._client.read(self.rollout_id, after=self._cursor, wait_s=_READ_WAIT_S)
        self._cursor = page.cursor
        self._num_read += len(page.trajectories)
        self._ready.extend(page.trajectories)
        # A record that the store cannot read any more is never delivered: an empty page then is the end.
        is_over = page.status.is_done and not page.trajectories
        return not is_over and self._num_read < self.num_trajectories


def _with_lists(value: Any) -> Any:
    """The value as a JSON parser would give it: the strict bodies take no tuples."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _weights_body(directory: str | Path, version: int, kv_policy: KVPolicy | None) -> WeightsBody:
    policy = kv_policy.value if kv_policy is not None else None
    body = {"version": version, "directory": os.path.abspath(directory), "kv_policy": policy}
    return check_body(body, WeightsBody)


def _wait_s(state: RetryCallState) -> float:
    failure = state.outcome.exception() if state.outcome is not None else None
    if isinstance(failure, _Retryable) and failure.retry_after_s is not None:
        return failure.retry_after_s
    return _backoff(state)


def _failure(status: int, content: bytes) -> AgentLoopError:
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError:
        body = None
    has_envelope = isinstance(body, dict) and isinstance(body.get("error"), dict)
    if status >= 500 and not has_envelope:
        # Not from our front door but from the proxy before it, while that has nobody to pass the call to.
        return ServiceUnavailable(f"HTTP {status}: {content[:200].decode(errors='replace')}")
    return from_wire(body, status)


def _retry_after_s(header: str | None) -> float | None:
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return min(max(seconds, 0.0), _MAX_RETRY_AFTER_S)


def _loads(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AgentLoopError("the answer is not JSON: is this an agentloop service?") from error
