"""The client SDK: everything a trainer asks of the service, over HTTP.

Every call repeats what can succeed later (`transport.py`). That is safe because each is keyed or idempotent; a
repeated `generate` samples anew. Errors are those of `errors.py`, as the service raised them.

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import structlog
from pydantic import BaseModel

from agentloop import codec
from agentloop.control import Page, RolloutStatus, ServiceStatus, UpdateReport
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    NotFound,
)
from agentloop.transport import Retryable, Transport
from agentloop.types import Generation, KVPolicy, PauseMode, RolloutTask, Trajectory
from agentloop.wire import MAX_TASKS, GenerateBody, PauseBody, SubmitBody, WeightsBody, check_body

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)

_MSGPACK = "application/msgpack"
_FIRST_WAIT_S = 0.1
_READ_WAIT_S = 20.0  # how long the service holds a read that finds nothing
_TURN_WAIT_S = 0.5  # the same, while other parts wait for their turn
_FORGET_TIMEOUT_S = 5.0
_MAX_PIECE_BYTES = 8 << 20  # of one submit; the service takes 32 MiB


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
        self._transport = Transport(url, api_key, admin_key, timeout_s, retry_timeout_s)

    async def __aenter__(self) -> RolloutClient:
        await self._transport.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._transport.close()

    async def wait_until_ready(self, timeout_s: float = 300.0) -> None:
        """Return once a replica takes traffic. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        await self._transport.exchange("GET", "/health")
                    except (Retryable, NotFound):  # before its app is up, a Serve proxy says 404
                        await asyncio.sleep(_FIRST_WAIT_S)
                    else:
                        return
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the service at {self._transport.url} is not ready after {timeout_s:g} s"
            ) from error

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
        rollout = Rollout(self)
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit_all(rollout, bodies, num_samples)
        except TimeoutError as error:
            await self._forget(rollout)
            raise DeadlineExceeded(f"the service did not take all tasks within {timeout_s:g} s") from error
        except BaseException:
            await self._forget(rollout)
            raise
        return rollout

    async def rollout_status(self, rollout_id: str) -> RolloutStatus:
        """A rollout's counts. Raises NotFound."""
        return await self._get(f"/rollouts/{rollout_id}", RolloutStatus)

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        """End what is queued or running; each sample still gets its record. Raises NotFound."""
        return await self._post(f"/rollouts/{rollout_id}/cancel", None, RolloutStatus)

    async def read(self, rollout_id: str, *, after: int = 0, limit: int = 64, wait_s: float = 0.0) -> Page:
        """Finished trajectories after a cursor; waits up to `wait_s` for the first. Raises NotFound."""
        path = f"/rollouts/{rollout_id}/trajectories?after={after}&limit={limit}&wait_s={wait_s:g}"
        return codec.decode(await self._transport.call("GET", path, accept=_MSGPACK, extra_s=wait_s), Page)

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
        await self._transport.call("POST", "/admin/pause", body=body, is_admin=True, extra_s=timeout_s)

    async def resume(self, *, timeout_s: float = 900.0) -> None:
        """Undo a pause. Idempotent; needs the admin key."""
        await self._transport.call("POST", "/admin/resume", is_admin=True, extra_s=timeout_s)

    async def status(self) -> ServiceStatus:
        """The service at this moment."""
        return await self._get("/status", ServiceStatus)

    async def _submit_all(self, rollout: Rollout, tasks: list[dict[str, Any]], num_samples: int) -> None:
        """In as few pieces as the service takes; each is a rollout of its own there, keyed by its id."""
        num_sent, size = 0, MAX_TASKS
        while num_sent < max(len(tasks), 1):  # without tasks: once, for the refusal
            piece = _piece(tasks, num_sent, size)
            rollout_id = f"r-{uuid.uuid4().hex[:16]}"
            body = {"tasks": piece, "num_samples": num_samples, "rollout_id": rollout_id}
            checked = check_body(body, SubmitBody)
            rollout.expect(rollout_id, len(piece) * num_samples)
            try:
                await self._transport.call("POST", "/rollouts", body=checked, repeat_overloaded=False)
            except Retryable as full:
                rollout.drop(rollout_id)
                if size == 1:  # no room at all
                    await asyncio.sleep(full.retry_after_s if full.retry_after_s is not None else _FIRST_WAIT_S)
                size = max(1, len(piece) // 2)
            else:
                num_sent, size = num_sent + len(piece), min(2 * size, MAX_TASKS)

    async def _forget(self, rollout: Rollout) -> None:
        """Cancel what was accepted of a submit that failed. Best effort: that failure is what the caller gets."""
        try:
            async with asyncio.timeout(_FORGET_TIMEOUT_S):
                for rollout_id in rollout.rollout_ids:
                    await self._transport.exchange("POST", f"/rollouts/{rollout_id}/cancel")
        except (AgentLoopError, Retryable, TimeoutError) as error:
            _log.info("failed_submit_not_cancelled", rollouts=rollout.rollout_ids, reason=str(error))

    async def _get(self, path: str, kind: type[T]) -> T:
        return codec.from_builtins(_loads(await self._transport.call("GET", path)), kind)

    async def _post(
        self, path: str, body: BaseModel | None, kind: type[T], *, is_admin: bool = False, extra_s: float = 0.0
    ) -> T:
        answer = await self._transport.call("POST", path, body=body, is_admin=is_admin, extra_s=extra_s)
        return codec.from_builtins(_loads(answer), kind)


@dataclass(slots=True)
class _Part:
    """A piece of a rollout as the service knows it, and how far it has been read."""

    rollout_id: str
    num_trajectories: int
    cursor: int = 0
    num_read: int = 0
    is_over: bool = False


class Rollout:
    """A submitted rollout. Iterate to get every finished trajectory exactly once, across lost connections.

    The iteration ends when all `num_trajectories` have ended; it may be left and taken up again. Large ones are
    several rollouts to the service: `rollout_ids`.
    """

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._parts: dict[str, _Part] = {}
        self._ready: deque[Trajectory] = deque()  # at most one page

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The service's names for it."""
        return tuple(self._parts)

    @property
    def num_trajectories(self) -> int:
        """How many were accepted: tasks times samples."""
        return sum(part.num_trajectories for part in self._parts.values())

    async def __aiter__(self) -> AsyncIterator[Trajectory]:
        while self._ready or await self._read_page():
            yield self._ready.popleft()

    async def status(self) -> RolloutStatus:
        """The counts at this moment, under the first of `rollout_ids`."""
        return _sum([await self._client.rollout_status(name) for name in self._parts])

    async def cancel(self) -> RolloutStatus:
        """End what is queued or running; iteration then delivers those records too."""
        return _sum([await self._client.cancel(name) for name in self._parts])

    def expect(self, rollout_id: str, num_trajectories: int) -> None:
        """A piece is about to be sent."""
        self._parts[rollout_id] = _Part(rollout_id, num_trajectories)

    def drop(self, rollout_id: str) -> None:
        """The piece was refused."""
        del self._parts[rollout_id]

    async def _read_page(self) -> bool:
        """Wait for trajectories; False if there are no more. Parts take turns, so that none waits for another."""
        is_waiting = False
        while live := [part for part in self._parts.values() if not part.is_over]:
            wait_s = _READ_WAIT_S if len(live) == 1 else _TURN_WAIT_S if is_waiting else 0.0
            for part in live:
                await self._read_part(part, wait_s)
                if self._ready:
                    self._parts[part.rollout_id] = self._parts.pop(part.rollout_id)  # to the end of the line
                    return True
                if is_waiting:
                    wait_s = 0.0  # one wait a round
            is_waiting = True
        return False

    async def _read_part(self, part: _Part, wait_s: float) -> None:
        page = await self._client.read(part.rollout_id, after=part.cursor, wait_s=wait_s)
        part.cursor = page.cursor
        part.num_read += len(page.trajectories)
        self._ready.extend(page.trajectories)
        # A record that the store cannot read any more is never delivered: an empty page then is the end.
        is_empty_end = page.status.is_done and not page.trajectories
        part.is_over = is_empty_end or part.num_read >= part.num_trajectories


def _sum(statuses: list[RolloutStatus]) -> RolloutStatus:
    return RolloutStatus(
        rollout_id=statuses[0].rollout_id,
        num_accepted=sum(status.num_accepted for status in statuses),
        num_finished=sum(status.num_finished for status in statuses),
        num_running=sum(status.num_running for status in statuses),
        num_queued=sum(status.num_queued for status in statuses),
    )


def _piece(tasks: list[dict[str, Any]], start: int, max_tasks: int) -> list[dict[str, Any]]:
    """The next tasks that fit one request: at least one, whatever its size."""
    num_bytes, end = 0, start
    while end < min(len(tasks), start + max_tasks):
        num_bytes += len(orjson.dumps(tasks[end]))
        if num_bytes > _MAX_PIECE_BYTES and end > start:
            break
        end += 1
    return tasks[start:end]


def _with_lists(value: Any) -> Any:
    """The value as a JSON parser would give it: the strict bodies take no tuples."""
    if isinstance(value, dict):
        return {key: _with_lists(item) for key, item in value.items()}
    return [_with_lists(item) for item in value] if isinstance(value, list | tuple) else value


def _weights_body(directory: str | Path, version: int, kv_policy: KVPolicy | None) -> WeightsBody:
    policy = kv_policy.value if kv_policy is not None else None
    body = {"version": version, "directory": os.path.abspath(directory), "kv_policy": policy}
    return check_body(body, WeightsBody)


def _loads(content: bytes) -> Any:
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise AgentLoopError("the answer is not JSON: is this an agentloop service?") from error
