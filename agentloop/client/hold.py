"""Replicas that a client holds at one weight version: requested, renewed in the background, and released."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import structlog
from pydantic import BaseModel

from agentloop.api.coordinator import ReplicaHold
from agentloop.api.requests import HOLD_LEASE_S, HoldBody, RenewHoldBody, check_body
from agentloop.errors import AgentLoopError, NotFound

_log = structlog.stdlib.get_logger(__name__)

Post = Callable[[str, BaseModel], Awaitable[ReplicaHold]]


class HeldReplicas:
    """A hold in force, as of its last renewal. `end_reason` is set once the service has ended it."""

    def __init__(self, hold: ReplicaHold) -> None:
        self.hold = hold
        self.end_reason = ""

    @property
    def version(self) -> int:
        """The weight version of the replicas."""
        return self.hold.version


@asynccontextmanager
async def held_replicas(post: Post, replicas: int, timeout_s: float) -> AsyncIterator[HeldReplicas]:
    """Hold replicas until the end of the block. `post` sends a body to a path. See `RolloutClient.hold`."""
    hold_id = uuid.uuid4().hex
    body = check_body({"hold_id": hold_id, "replicas": replicas, "timeout_s": timeout_s}, HoldBody)
    renewal, release = (
        check_body({"hold_id": hold_id, "lease_s": lease_s}, RenewHoldBody) for lease_s in (HOLD_LEASE_S, 0)
    )
    held = HeldReplicas(await post("/admin/hold", body))

    async def renew() -> None:
        while not held.end_reason:
            await asyncio.sleep(HOLD_LEASE_S / 4)
            try:
                held.hold = await post("/admin/hold/renew", renewal)
            except NotFound as error:
                held.end_reason = error.message
            except AgentLoopError as error:  # the next renewal may succeed before the lease ends
                _log.warning("hold_not_renewed", error=str(error))

    renewing = asyncio.create_task(renew(), name="hold")
    try:
        yield held
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
        with suppress(AgentLoopError):  # it has ended, or the lease ends soon
            held.hold = await post("/admin/hold/renew", release)
