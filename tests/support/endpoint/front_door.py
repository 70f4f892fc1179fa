"""The real HTTP app on a real socket, over a coordinator and an engine without a fleet behind them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import msgspec
import uvicorn
from fastapi import FastAPI

from agentloop.api.coordinator import (
    EncodedPage,
    ReplicaStatus,
    ReplicaUpdate,
    RolloutStatus,
    ServiceStatus,
    UpdateReport,
)
from agentloop.codec import encode
from agentloop.engine import ALL_MEMORY, MemoryTag, WeightUpdate
from agentloop.errors import AgentLoopError, Conflict, NotFound, Overloaded
from agentloop.types import (
    KVPolicy,
    Lease,
    Load,
    PauseMode,
    RolloutGroup,
    Trajectory,
)
from tests.support.records.samples import make_trajectory


class FakeCoordinator:
    """Finishes every accepted sample at once, unless `is_holding`; queue room is counted in groups."""

    def __init__(self, num_queue_groups: int = 1_000_000) -> None:
        self.groups: dict[str, dict[str, RolloutGroup]] = {}
        self.finished: dict[str, list[Trajectory]] = {}
        self.leases: dict[str, Lease] = {}
        self.held: dict[str, Lease] = {}  # session or call -> the last lease it got
        self.num_leased = 0
        self.moved: list[tuple[str, Lease, bool]] = []
        self.updates: list[tuple[WeightUpdate, KVPolicy | None]] = []
        self.submitted: list[tuple[str, int]] = []
        self.paused: PauseMode | None = None
        self.asleep: frozenset[MemoryTag] = frozenset()
        self.sleep_levels: list[int] = []
        self.weight_dtypes: list[str | None] = [None]  # one for each replica
        self.replica_error: str | None = None
        self.on_update: Callable[[WeightUpdate], Awaitable[None]] | None = None  # plays the engines
        self.is_ready = True
        self.is_holding = False
        self.is_cancelled = False
        self.num_queue_groups = num_queue_groups
        self.num_held = 0
        self.next_errors: list[Exception] = []
        self.update_error: AgentLoopError | None = None
        self._changed = asyncio.Event()

    async def submit(self, rollout_id: str, groups: tuple[RolloutGroup, ...]) -> RolloutStatus:
        self._raise_next()
        self.submitted.append((rollout_id, len(groups)))
        if len(groups) > self.num_queue_groups:
            raise Overloaded("the queue is full")
        given = {group.group_id: group for group in groups}
        if rollout_id not in self.groups:
            self.groups[rollout_id] = given
            self.finished[rollout_id] = []
            if not self.is_holding:
                self.finished[rollout_id] += [record for group in groups for record in self._records(group)]
        elif self.groups[rollout_id] != given:
            raise Conflict(f"rollout {rollout_id} exists with other work", param="rollout_id")
        self._wake()
        return self._status(rollout_id)

    def finish_held(self, rollout_id: str) -> None:
        """End everything that was held back."""
        for group in self.groups[rollout_id].values():
            self.finished[rollout_id] += self._records(group)
        self._wake()

    async def record(self, trajectory: Trajectory) -> None:
        self._raise_next()
        rollout_id = trajectory.rollout_id
        place = (trajectory.group_id, trajectory.sample_index)
        if self.groups.get(rollout_id):
            raise Conflict(f"rollout {rollout_id} was submitted", param="rollout_id")
        self.groups.setdefault(rollout_id, {})
        records = self.finished.setdefault(rollout_id, [])
        if place not in [(one.group_id, one.sample_index) for one in records]:
            records.append(trajectory)
            self._wake()

    async def read(self, rollout_id: str, after: int, limit: int, wait_s: float) -> EncodedPage:
        self._raise_next()
        status = self._status(rollout_id)
        if after >= len(self.finished[rollout_id]) and not status.is_done and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        found = tuple(self.finished[rollout_id][after : after + limit])
        records = tuple(msgspec.Raw(encode(trajectory)) for trajectory in found)
        return EncodedPage(records, after + len(found), self._status(rollout_id))

    async def cancel(self, rollout_id: str) -> RolloutStatus:
        self._status(rollout_id)
        self.is_cancelled = True
        return self._status(rollout_id)

    async def lease(self, session_id: str, num_tokens: int) -> Lease:
        self._raise_next()
        held = self.held.get(session_id)
        return held if held is not None and held.lease_id in self.leases else self._grant(session_id)

    def _grant(self, session_id: str) -> Lease:
        self.num_leased += 1
        lease = Lease(f"lease-{self.num_leased}", f"replica-{self.num_leased}", f"url-{self.num_leased}")
        self.leases[lease.lease_id] = self.held[session_id] = lease
        return lease

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool) -> Lease:
        self._raise_next()
        if lease.lease_id not in self.leases:
            raise NotFound(f"{assignment_id} has no such lease", param="assignment_id")
        self.moved.append((assignment_id, lease, is_failed))
        del self.leases[lease.lease_id]
        return self._grant(assignment_id)

    async def release(self, lease: Lease) -> None:
        del self.leases[lease.lease_id]

    async def update_weights(self, update: WeightUpdate, kv_policy: KVPolicy | None) -> UpdateReport:
        self._raise_next()
        if self.update_error is not None:
            raise self.update_error
        self.updates.append((update, kv_policy))
        if self.on_update is not None:
            await self.on_update(update)
        replica = ReplicaUpdate("replica-1", 10.0, 20.0)
        return UpdateReport(update.version, 0, kv_policy or KVPolicy.RECOMPUTE, (replica,), 40.0)

    async def pause(self, mode: PauseMode) -> None:
        self.paused = mode

    async def resume(self) -> None:
        self.paused = None

    async def sleep(self, level: int) -> None:
        self._raise_next()
        self.sleep_levels.append(level)
        self.asleep = ALL_MEMORY

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        self._raise_next()
        self.asleep -= tags

    async def status(self) -> ServiceStatus:
        self._raise_next()
        replicas = tuple(
            ReplicaStatus(
                f"replica-{index}",
                "ready" if self.replica_error is None else "quarantined",
                "simulated",
                0,
                Load(),
                len(self.leases),
                0.5,
                weight_dtype=dtype,
                error=self.replica_error,
            )
            for index, dtype in enumerate(self.weight_dtypes, 1)
        )
        rollouts = tuple(self._status(rollout_id) for rollout_id in self.groups)
        is_paused = self.paused is not None
        return ServiceStatus(
            self.is_ready,
            is_paused,
            0,
            replicas,
            1,
            rollouts,
            (),
            tuple(tag for tag in MemoryTag if tag in self.asleep),
        )

    def _records(self, group: RolloutGroup) -> list[Trajectory]:
        return [make_trajectory(group.group_id, i, rollout_id=group.rollout_id) for i in range(group.num_samples)]

    def _status(self, rollout_id: str) -> RolloutStatus:
        if rollout_id not in self.groups:
            raise NotFound(f"unknown rollout {rollout_id!r}", param="rollout_id")
        num_finished = len(self.finished[rollout_id])
        num_accepted = sum(group.num_samples for group in self.groups[rollout_id].values()) or num_finished
        return RolloutStatus(rollout_id, num_accepted, num_finished, 0, num_accepted - num_finished, self.num_held)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _raise_next(self) -> None:
        if self.next_errors:
            raise self.next_errors.pop(0)


@asynccontextmanager
async def serving(app: FastAPI) -> AsyncIterator[str]:
    """Serve the app on a free port of 127.0.0.1; yields its base URL."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each answer waits 40 ms for an ACK
        config = uvicorn.Config(app, log_config=None, ws="none", lifespan="on", timeout_graceful_shutdown=2)
        server = _QuietServer(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(30):
                while not server.started:
                    await asyncio.sleep(0.005)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


class _QuietServer(uvicorn.Server):
    """Leaves the test runner's signal handlers alone."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


@asynccontextmanager
async def cutting_proxy(target_url: str, should_cut: Callable[[int], bool]) -> AsyncIterator[str]:
    """A TCP proxy that drops the n-th connection halfway through the answer if `should_cut(n)`."""
    port = int(target_url.rsplit(":", 1)[1])
    num_connections = 0

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int | None) -> None:
        while data := await reader.read(65536):
            writer.write(data if max_bytes is None else data[:max_bytes])
            await writer.drain()
            if max_bytes is not None:
                break
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        max_bytes = 200 if should_cut(num_connections) else None
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            carry(reader, up_writer, None), carry(up_reader, writer, max_bytes), return_exceptions=True
        )
        up_writer.close()
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
