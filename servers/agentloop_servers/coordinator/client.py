"""The coordinator behind a Serve handle, as its ports: deadlines and our own errors on every call.

A Serve handle waits for ever when there is no replica, and wraps errors: here a call that gets no answer raises
ServiceUnavailable, and the coordinator's errors arrive as themselves.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from agentloop.api import (
    Orders,
    Page,
    ReplicaRegistration,
    RolloutStatus,
    ServiceStatus,
    UpdateReport,
    WorkerReport,
)
from agentloop.engine import MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.types import KVPolicy, Lease, Load, PauseMode, RolloutGroup, Trajectory

CALL_TIMEOUT_S = 30.0
UPDATE_TIMEOUT_S = 1800.0  # longer than the deadlines of an update's steps together


class CoordinatorClient:
    """The ports over a Serve handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def register(self, registration: ReplicaRegistration) -> None:
        await self._call("register", registration)

    async def heartbeat(self, replica_id: str, load: Load, is_usable: bool) -> bool:
        return bool(await self._call("heartbeat", replica_id, load, is_usable))

    async def deregister(self, replica_id: str) -> None:
        await self._call("deregister", replica_id)

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        answer: Orders = await self._call("take", report, wait_s, timeout_s=CALL_TIMEOUT_S + wait_s)
        return answer

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool) -> Lease:
        answer: Lease = await self._call("move", assignment_id, lease, is_failed)
        return answer

    async def finish(self, worker_id: str, trajectory: Trajectory) -> None:
        await self._call("finish", worker_id, trajectory)

    async def submit(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> RolloutStatus:
        answer: RolloutStatus = await self._call("submit", rollout_id, groups)
        return answer

    async def record(self, trajectory: Trajectory) -> None:
        await self._call("record", trajectory)

    async def read(self, rollout_id: str, after: int, limit: int, wait_s: float) -> Page:
        answer: Page = await self._call("read", rollout_id, after, limit, wait_s, timeout_s=CALL_TIMEOUT_S + wait_s)
        return answer

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        answer: RolloutStatus = await self._call("cancel", rollout_id)
        return answer

    async def lease(self, session_id: str, num_tokens: int) -> Lease:
        answer: Lease = await self._call("lease", session_id, num_tokens)
        return answer

    async def release(self, lease: Lease) -> None:
        await self._call("release", lease)

    async def join_endpoint(self, rank: int, url: str) -> dict[int, str]:
        answer: dict[int, str] = await self._call("join_endpoint", rank, url)
        return answer

    async def update_weights(self, update: WeightUpdate, kv_policy: KVPolicy | None) -> UpdateReport:
        answer: UpdateReport = await self._call("update_weights", update, kv_policy, timeout_s=UPDATE_TIMEOUT_S)
        return answer

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode, timeout_s=UPDATE_TIMEOUT_S)

    async def resume(self) -> None:
        await self._call("resume", timeout_s=UPDATE_TIMEOUT_S)

    async def sleep(self, level: int) -> None:
        await self._call("sleep", level, timeout_s=UPDATE_TIMEOUT_S)

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        await self._call("wake", tags, timeout_s=UPDATE_TIMEOUT_S)

    async def status(self) -> ServiceStatus:
        answer: ServiceStatus = await self._call("status")
        return answer

    async def _call(self, method: str, *arguments: object, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await getattr(self._handle, method).remote(*arguments)
        except RayTaskError as error:
            if isinstance(error.cause, AgentLoopError):
                raise error.cause from None
            raise ServiceUnavailable(f"the coordinator failed in {method}: {error.cause!r}") from error
        except TimeoutError as error:
            raise ServiceUnavailable(f"the coordinator did not answer {method} within {timeout_s:g} s") from error
        except (RayError, RayServeException) as error:
            raise ServiceUnavailable(f"the coordinator is not there ({type(error).__name__})") from error
