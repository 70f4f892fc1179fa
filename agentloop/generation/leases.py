"""Leases that calls run under: an assignment's, which comes with it, and a session's, which is asked for.

Ownership: the leases of this process's sessions and direct calls, and the tasks that change them. A session takes
its lease at its first call, renews it, and gives it back at its end; a direct call is a session of one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import structlog
from structlog.contextvars import bind_contextvars

from agentloop.aio import OwnedTasks
from agentloop.api import LeasePort, WorkerPort
from agentloop.checks import MAX_VOCAB_SIZE
from agentloop.clock import Clock, RealClock
from agentloop.errors import AgentLoopError, NoHealthyReplica, NotFound, ServiceUnavailable, SessionFinished
from agentloop.generation.leased_engine import Connect, LeasedEngine
from agentloop.types import Assignment, GenerateRequest, Lease

_log = structlog.stdlib.get_logger(__name__)


class AssignedLease:
    """The lease that came with an assignment. The coordinator takes it back with the trajectory's record."""

    def __init__(self, coordinator: WorkerPort, assignment: Assignment) -> None:
        self._coordinator = coordinator
        self._assignment_id = assignment.assignment_id
        self._has_failed = False  # the lease held: another one is to be had before the next attempt
        self._is_told = False  # the coordinator knows that
        self._hold(assignment.lease)

    def held(self) -> Lease | None:
        """Return the lease, unless it has failed."""
        return None if self._has_failed else self._lease

    async def lease(self, request: GenerateRequest) -> Lease:
        """Return the lease held; in place of one that failed another, for which the coordinator makes wait."""
        if self._has_failed:
            try:
                moved = await self._coordinator.move(self._assignment_id, self._lease, not self._is_told)
            except NoHealthyReplica:
                self._is_told = True  # once: what is reported again would count again
                raise
            self._hold(moved)
        return self._lease

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead, if it has one."""
        if failed != self._lease:
            return  # another call of the trajectory has told already
        self._has_failed = True
        try:
            self._hold(await self._coordinator.move(self._assignment_id, failed, True))
        except NoHealthyReplica:
            self._is_told = True
        except AgentLoopError as error:
            _log.warning("not_moved", code=error.code, error=str(error))  # the next attempt asks again

    def give_up(self, failed: Lease) -> None:
        """Have the next call ask for another place, which tells of the failure."""
        self._has_failed = self._has_failed or failed == self._lease

    def _hold(self, lease: Lease) -> None:
        self._lease = lease
        self._has_failed = self._is_told = False
        bind_contextvars(replica=lease.replica_id)  # in the logs of the trajectory's task


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Bounds of a session's leases and calls."""

    max_attempts: int = 4  # of one call that fails in a row
    renew_after_s: float = 600.0  # well below the coordinator's `direct_lease_ttl_s`
    predicted_reply_tokens: int = 2048  # what a reply is charged with at most: few use all that they may
    coordinator_timeout_s: float = 30.0
    max_releases: int = 32  # at once


class SessionLeases:
    """The leases of all sessions of a process. Close it at the end: it waits for those being given back."""

    def __init__(
        self,
        coordinator: LeasePort,
        connect: Connect,
        *,
        vocab_size: int = MAX_VOCAB_SIZE,
        clock: Clock | None = None,
        config: LeaseConfig = LeaseConfig(),
    ) -> None:
        self.coordinator = coordinator
        self.clock = RealClock() if clock is None else clock
        self.config = config
        self.tasks = OwnedTasks("session-lease")  # they outlive their callers: no lease is granted and forgotten
        self._connect = connect
        self._vocab_size = vocab_size
        self._leases: WeakValueDictionary[str, SessionLease] = WeakValueDictionary()
        self._holders: set[SessionLease] = set()  # who has a lease is not forgotten with its session
        self._places = asyncio.Semaphore(config.max_releases)

    def engine(self, session_id: str) -> LeasedEngine:
        """Return a session's engine. All that anybody has share one lease, which the first call takes."""
        lease = self._leases.get(session_id)
        if lease is None:
            lease = self._leases[session_id] = SessionLease(self, session_id)
        return LeasedEngine(
            self._connect, lease, vocab_size=self._vocab_size, max_attempts=self.config.max_attempts
        )

    def release(self, session_id: str) -> None:
        """Give a session's place back; its next call takes one again."""
        lease = self._leases.get(session_id)
        if lease is not None:
            lease.release()

    def end(self, session_id: str) -> None:
        """Give a session's place back for good: attempts from now on raise SessionFinished. Idempotent."""
        lease = self._leases.get(session_id)
        if lease is not None:
            lease.close()

    @property
    def num_held(self) -> int:
        """Sessions that have a lease now."""
        return len(self._holders)

    def holds(self, holder: SessionLease) -> None:
        """Note that this session has a lease now."""
        self._holders.add(holder)

    def give_back(self, holder: SessionLease, lease: Lease) -> None:
        """Release a session's lease in a task of this object's own."""
        self._holders.discard(holder)
        self.tasks.start(self._release(lease))

    async def ask(self, question: Awaitable[Lease]) -> Lease:
        """Return what the coordinator answers, within a deadline. Raises ServiceUnavailable."""
        try:
            async with asyncio.timeout(self.config.coordinator_timeout_s):
                return await question
        except TimeoutError as error:
            raise ServiceUnavailable("the coordinator did not answer in time") from error

    async def close(self) -> None:
        """Give back every lease, and wait for all changes under way; each has a deadline."""
        for lease in list(self._leases.values()):
            lease.close()
        await self.tasks.close()

    async def _release(self, lease: Lease) -> None:
        try:
            async with self._places, asyncio.timeout(self.config.coordinator_timeout_s):
                await self.coordinator.release(lease)
        except (AgentLoopError, TimeoutError) as error:
            # The coordinator itself drops leases that nobody renews.
            _log.warning("lease_not_released", lease=lease.lease_id, error=repr(error))


class SessionLease:
    """One session's lease: taken at its first call, renewed in time, given back by `release` and `close`."""

    def __init__(self, leases: SessionLeases, session_id: str) -> None:
        self._leases = leases
        self._session_id = session_id
        self._lease: Lease | None = None
        self._asked_at = 0.0
        self._has_failed = False  # the lease held: it is no use any more
        self._changing = asyncio.Lock()
        self._is_closed = False

    def held(self) -> Lease | None:
        """Return the lease, unless it has failed or is to be renewed. Raises SessionFinished after `close`."""
        if self._is_closed:
            raise self._ended()
        is_fresh = self._leases.clock.now() - self._asked_at < self._leases.config.renew_after_s
        return self._lease if is_fresh and not self._has_failed else None

    async def lease(self, request: GenerateRequest) -> Lease:
        """Return the session's lease, renewed in time. Raises SessionFinished after `close`."""
        lease = self.held()
        return lease if lease is not None else await self._leases.tasks.run(self._take(request))

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead, if it has one."""
        await self._leases.tasks.run(self._move(failed))

    def give_up(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure in a task of the leases' own; the next call waits for it."""
        if self._fails(failed):
            self._leases.tasks.start(self._tell(failed))

    def release(self) -> None:
        """Give the place back; the next call takes one again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._leases.give_back(self, lease)

    def close(self) -> None:
        """Give the place back for good: attempts from now on raise SessionFinished. Idempotent."""
        self._is_closed = True
        self.release()

    async def _take(self, request: GenerateRequest) -> Lease:
        async with self._changing:
            lease = self.held()
            if lease is not None:
                return lease  # another call of the session was faster
            config = self._leases.config
            num_tokens = len(request.token_ids) + min(request.sampling.max_tokens, config.predicted_reply_tokens)
            try:
                lease = await self._leases.ask(self._leases.coordinator.lease(self._session_id, num_tokens))
            except AgentLoopError as error:
                if self._lease is None or self._has_failed:
                    raise
                # The replica may well serve while the coordinator restarts; if it does not, the call says so.
                _log.warning("lease_not_renewed", session=self._session_id, code=error.code)
                self._asked_at = self._leases.clock.now() - 0.9 * config.renew_after_s
                return self._lease
            self._hold(lease)
            if self._is_closed:
                raise self._ended()
            return lease

    def _fails(self, lease: Lease) -> bool:
        """Note that a lease is no use any more. False: another call of the session has told already."""
        if self._lease != lease or self._has_failed:
            return False
        self._has_failed = True
        return True

    async def _move(self, failed: Lease) -> None:
        async with self._changing:
            if self._fails(failed):
                await self._replace(failed)

    async def _tell(self, failed: Lease) -> None:
        async with self._changing:
            if self._lease == failed:
                await self._replace(failed)

    async def _replace(self, failed: Lease) -> None:
        try:
            moving = self._leases.coordinator.move(self._session_id, failed, True)
            self._hold(await self._leases.ask(moving))
        except NotFound:
            self._lease = None  # it has expired, or the coordinator is a new one: ask for a place anew
        except AgentLoopError as error:  # the next attempt asks for a place
            _log.warning("not_moved", session=self._session_id, code=error.code)

    def _hold(self, lease: Lease) -> None:
        self._lease, self._asked_at, self._has_failed = lease, self._leases.clock.now(), False
        self._leases.holds(self)
        if self._is_closed:  # while the coordinator was asked
            self.release()

    def _ended(self) -> SessionFinished:
        return SessionFinished(f"session {self._session_id} has ended")
