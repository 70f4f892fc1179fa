"""Replica: one engine, its data-plane port, and its place in the fleet.

It registers with the coordinator and heartbeats its load; a coordinator that does not know it (a restart) hears its
introduction again. It decides nothing: pauses, updates and leases are the coordinator's.
"""

from __future__ import annotations

import asyncio

import structlog

from agentloop.api import ReplicaPort, ReplicaRegistration
from agentloop.engine import Engine
from agentloop.errors import AgentLoopError, EngineLost
from agentloop_servers.replica.server import DataPlaneServer

HEARTBEAT_S = 1.0


class Replica:
    """Owns an engine from start to close."""

    def __init__(self, replica_id: str, engine: Engine, coordinator: ReplicaPort, secret: str, host: str) -> None:
        self.replica_id = replica_id
        self._engine = engine
        self._coordinator = coordinator
        self._server = DataPlaneServer(engine, replica_id, secret, host)
        self._heartbeats: asyncio.Task[None] | None = None
        self._log = structlog.get_logger("replica").bind(replica=replica_id)

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Load the engine, open the port, join the fleet."""
        await self._engine.start()
        await self._server.start()
        self._heartbeats = asyncio.create_task(self._heartbeat_for_ever(), name=f"heartbeat-{self.replica_id}")
        self._log.info("replica_started", url=self.url, version=self._engine.weight_version)

    async def check_health(self) -> None:
        """Raises EngineLost if the engine or the heartbeat is dead; Serve then restarts this replica."""
        await self._engine.check_health()
        if self._heartbeats is not None and self._heartbeats.done():
            raise EngineLost(f"replica {self.replica_id} stopped its heartbeat")

    async def close(self) -> None:
        """Leave the fleet and free everything. Idempotent."""
        if self._heartbeats is not None:
            heartbeats, self._heartbeats = self._heartbeats, None
            heartbeats.cancel()
            await asyncio.gather(heartbeats, return_exceptions=True)
            try:
                await asyncio.wait_for(self._coordinator.deregister(self.replica_id), timeout=2.0)
            except (AgentLoopError, TimeoutError) as error:
                self._log.debug("deregister_failed", error=str(error))  # its missing heartbeats say it too
        await self._server.close()
        await self._engine.close()

    async def _heartbeat_for_ever(self) -> None:
        is_known = False
        while True:
            try:
                if is_known:
                    load, is_usable = self._engine.load(), self._engine.is_usable
                    is_known = await self._coordinator.heartbeat(self.replica_id, load, is_usable)
                if not is_known:
                    await self._coordinator.register(
                        ReplicaRegistration(
                            self.replica_id, self.url, self._engine.info, self._engine.weight_version
                        )
                    )
                    is_known = True
            except AgentLoopError as error:
                self._log.warning("heartbeat_failed", code=error.code, error=str(error))
            await asyncio.sleep(HEARTBEAT_S)
