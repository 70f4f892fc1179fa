"""Leases that calls run under: an assignment's, which comes with it, and a session's, which is asked for.

Ownership: the leases of this process's sessions and direct calls, and the tasks that change them. A session takes
its lease at its first call and gives it back at its end; a direct call is a session of one call. The process's
`LeaseReporter` renews what is held, and tells the coordinator what was given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import structlog
from structlog.contextvars import bind_contextvars

from agentloop.aio import OwnedTasks
from agentloop.api.coordinator import LeasePort, WorkerPort, group_key, prefixes_of, session_holder
from agentloop.capabilities import NO_NEEDS, Needs
from agentloop.checks import MAX_VOCAB_SIZE
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    NoHealthyReplica,
    NotFound,
    ServiceUnavailable,
    SessionFinished,
)
from agentloop.generation.lease_reporter import LeaseHolder, LeaseReporter
from agentloop.generation.leased_engine import Connect, LeasedEngine
from agentloop.types import Assignment, GenerateRequest, Lease

_log = structlog.stdlib.get_logger(__name__)


class AssignedLease:
    """The lease that came with an assignment. The coordinator takes it back with the trajectory's record."""

    def __init__(self, coordinator: WorkerPort, assignment: Assignment, reporter: LeaseReporter) -> None:
        self._coordinator = coordinator
        self._assignment_id = assignment.assignment_id
        self._is_told = False  # the coordinator knows that the lease held has failed
        self._logged = ""  # the replica that the logs of the trajectory's task name
        self._is_closed = False
        name = assignment.assignment_id
        self.holder = LeaseHolder(reporter, name, group_key(name))
        self._hold(assignment.lease)

    def held(self, needs: Needs = NO_NEEDS) -> Lease | None:
        """Return the lease, unless it failed, its replica cannot serve what is needed, or the coordinator is to be
        asked. Raises Conflict after `close`."""
        if self._is_closed:
            raise Conflict(f"trajectory {self._assignment_id} is over")
        lease = self.holder.usable
        if lease is not None and not lease.can.suits(needs):
            return None
        if lease is not None and lease.replica_id != self._logged:
            self._logged = lease.replica_id
            bind_contextvars(replica=lease.replica_id)
        return lease

    async def lease(self, request: GenerateRequest, needs: Needs = NO_NEEDS) -> Lease:
        """Return the lease; in place of one that failed, or is to be left, or whose replica cannot serve what is
        needed, another, for which the coordinator makes wait."""
        suits = self.last.can.suits(needs)
        if self.holder.has_failed:
            try:
                await self.ask(is_failed=not self._is_told, needs=needs)
            except NoHealthyReplica:
                self._is_told = True  # once: what is reported again would count again
                raise
        elif self.holder.must_ask or not suits:
            try:
                await self.ask(is_failed=False, needs=needs)
            except NoHealthyReplica:
                raise  # it waits for room, and asks again
            except AgentLoopError as error:
                if not suits:
                    raise
                _log.warning("not_asked", code=error.code, error=str(error))
                self.holder.keep()  # the replica may well serve while the coordinator restarts
        return self.last

    async def ask(self, *, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Return another lease in place of the one held. Raises what the coordinator raises."""
        self._hold(await self._coordinator.move(self._assignment_id, self.last, is_failed, needs))
        return self.last

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead, if it has one."""
        if not self.holder.fail(failed):
            return  # another call of the trajectory has told already
        try:
            await self.ask(is_failed=True)
        except NoHealthyReplica:
            self._is_told = True
        except AgentLoopError as error:
            _log.warning("not_moved", code=error.code, error=str(error))  # the next attempt asks again

    def give_up(self, failed: Lease) -> None:
        """Have the next call ask for another place, which tells of the failure."""
        self.holder.fail(failed)

    def close(self) -> None:
        """Report it no more: the trajectory has ended. Idempotent."""
        self._is_closed = True
        self.holder.drop()

    @property
    def last(self) -> Lease:
        """The lease held, or the one that failed."""
        assert self.holder.lease is not None, "the trajectory has ended"
        return self.holder.lease

    def _hold(self, lease: Lease) -> None:
        self.holder.hold(lease)
        self._is_told = False
        if self._is_closed:  # while the coordinator was asked
            self.holder.drop()
        self.held()


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Bounds of a session's leases and calls."""

    max_attempts: int = 4  # of one call that fails in a row
    coordinator_timeout_s: float = 30.0


class SessionLeases:
    """The leases of all sessions of a process. Close it before its reporter: it waits for changes under way."""

    def __init__(
        self,
        coordinator: LeasePort,
        connect: Connect,
        reporter: LeaseReporter,
        *,
        vocab_size: int = MAX_VOCAB_SIZE,
        config: LeaseConfig = LeaseConfig(),
    ) -> None:
        self.coordinator = coordinator
        self.reporter = reporter
        self.config = config
        self.tasks = OwnedTasks("session-lease")  # they outlive their callers: no lease is granted and forgotten
        self._connect = connect
        self._vocab_size = vocab_size
        self._leases: WeakValueDictionary[str, SessionLease] = WeakValueDictionary()
        self._holders: set[SessionLease] = set()  # who has a lease is not forgotten with its session

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

    def note(self, session: SessionLease) -> None:
        """Note whether this session has a lease now."""
        if session.holder.lease is None:
            self._holders.discard(session)
        else:
            self._holders.add(session)

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


class SessionLease:
    """One session's lease: taken at its first call, given back by `release` and `close`."""

    def __init__(self, leases: SessionLeases, session_id: str) -> None:
        self._leases = leases
        self._session_id = session_id
        self.holder = LeaseHolder(leases.reporter, session_holder(session_id))
        self._changing = asyncio.Lock()
        self._is_closed = False

    def held(self, needs: Needs = NO_NEEDS) -> Lease | None:
        """Return the lease, unless it has failed, its replica cannot serve what is needed, or it must be asked for.
        Raises SessionFinished after `close`."""
        if self._is_closed:
            raise self._ended()
        lease = self.holder.usable
        return lease if lease is not None and lease.can.suits(needs) else None

    async def lease(self, request: GenerateRequest, needs: Needs = NO_NEEDS) -> Lease:
        """Return the session's lease, asked for if there is none. Raises SessionFinished after `close`."""
        lease = self.held(needs)
        return lease if lease is not None else await self._leases.tasks.run(self._take(request, needs))

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead, if it has one."""
        await self._leases.tasks.run(self._move(failed))

    def give_up(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure in a task of the leases' own; the next call waits for it."""
        if self.holder.fail(failed):
            self._leases.tasks.start(self._tell(failed))

    def release(self) -> None:
        """Give the place back; the next call takes one again."""
        self.holder.release()
        self._leases.note(self)

    def close(self) -> None:
        """Give the place back for good: attempts from now on raise SessionFinished. Idempotent."""
        self._is_closed = True
        self.release()

    async def _take(self, request: GenerateRequest, needs: Needs) -> Lease:
        async with self._changing:
            lease = self.held(needs)
            if lease is not None:
                return lease  # another call of the session was faster
            if self.holder.lease is None and self.holder.take_back():
                lease = self.held(needs)
            if lease is None and self.holder.lease is not None and not self.holder.has_failed:
                lease = await self._asked(needs)
            if lease is None:
                lease = await self._leases.ask(self._granted(request, needs))
            self._hold(lease)
            if self._is_closed:
                raise self._ended()
            return lease

    async def _granted(self, request: GenerateRequest, needs: Needs) -> Lease:
        """Return the place that the coordinator gives. Asked before it knows what was given back, it would give
        that again, and then take it back."""
        leases = self._leases
        await self.holder.told()
        num_tokens, prefixes = len(request.token_ids), prefixes_of(request.token_ids)
        process_id = leases.reporter.process_id
        return await leases.coordinator.lease(self._session_id, num_tokens, process_id, needs, prefixes)

    async def _asked(self, needs: Needs) -> Lease | None:
        """Return the place to go on at, as the coordinator ordered to ask, or another replica is needed; None if it
        does not know the lease.

        Raises NoHealthyReplica while there is no room, and what the coordinator raises where another is needed.
        """
        held = self.holder.lease
        if held is None:
            return None
        try:
            return await self._leases.ask(self._leases.coordinator.move(self._session_id, held, False, needs))
        except NotFound:
            self.holder.drop()
            return None
        except NoHealthyReplica:
            raise
        except AgentLoopError as error:
            if not held.can.suits(needs):
                raise
            # The replica may well serve while the coordinator restarts; if it does not, the call says so.
            _log.warning("not_asked", session=self._session_id, code=error.code)
            return held

    async def _move(self, failed: Lease) -> None:
        async with self._changing:
            if self.holder.fail(failed):
                await self._replace(failed)

    async def _tell(self, failed: Lease) -> None:
        async with self._changing:
            if self.holder.lease == failed:
                await self._replace(failed)

    async def _replace(self, failed: Lease) -> None:
        try:
            moving = self._leases.coordinator.move(self._session_id, failed, True)
            self._hold(await self._leases.ask(moving))
        except NotFound:
            self.holder.drop()  # it has expired, or the coordinator is a new one: ask for a place anew
            self._leases.note(self)
        except AgentLoopError as error:  # the next attempt asks for a place
            _log.warning("not_moved", session=self._session_id, code=error.code)

    def _hold(self, lease: Lease) -> None:
        self.holder.hold(lease)
        self._leases.note(self)
        if self._is_closed:  # while the coordinator was asked
            self.release()

    def _ended(self) -> SessionFinished:
        return SessionFinished(f"session {self._session_id} has ended")
