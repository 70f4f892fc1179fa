"""A session's way to the engines: one lease for its life, and another one when the replica fails.

Ownership: the leases of this process's sessions, and the tasks that give them back. Only this module retries an
engine call of a session. A failed call is made again elsewhere with the same ids; a stream that has given out
pieces goes on from their ids, so no token is sampled into an answer twice. A paused engine is asked again until the
call's deadline, and never counts as failed.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import structlog
from tenacity import AsyncRetrying, RetryCallState

from agentloop.api import LeasePort
from agentloop.checks import check_generation
from agentloop.clock import Clock
from agentloop.engine import Delta
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    NotFound,
    ServiceUnavailable,
    SessionFinished,
)
from agentloop.generation import Connect, retrying
from agentloop.types import GenerateRequest, Generation, Lease
from agentloop_servers.endpoint.continuation import Continuation

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    """Bounds of a session's leases and calls."""

    max_attempts: int = 4  # of one call, pauses not counted
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
        vocab_size: int,
        clock: Clock,
        config: LeaseConfig = LeaseConfig(),
    ) -> None:
        self.coordinator = coordinator
        self.connect = connect
        self.vocab_size = vocab_size
        self.clock = clock
        self.config = config
        self._engines: WeakValueDictionary[str, LeasedSession] = WeakValueDictionary()
        self._holders: set[LeasedSession] = set()  # who has a lease is not forgotten with its session
        self._tasks: set[asyncio.Task[Any]] = set()
        self._places = asyncio.Semaphore(config.max_releases)

    def engine(self, session_id: str) -> LeasedSession:
        """A session's engine, the same one while anybody has it; it takes a lease at its first call."""
        engine = self._engines.get(session_id)
        if engine is None:
            engine = self._engines[session_id] = LeasedSession(self, session_id)
        return engine

    @property
    def num_held(self) -> int:
        """Sessions that have a lease now."""
        return len(self._holders)

    def holds(self, holder: LeasedSession) -> None:
        """This session has a lease now."""
        self._holders.add(holder)

    def give_back(self, holder: LeasedSession, lease: Lease) -> None:
        """Release a session's lease in a task of this object's own."""
        self._holders.discard(holder)
        self._own(self._release(lease))

    async def to_its_end(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change of a lease in a task that outlives a cancelled caller: no lease is granted and forgotten."""
        return await asyncio.shield(self._own(change))

    async def ask(self, question: Awaitable[Lease]) -> Lease:
        """What the coordinator answers, within a deadline. Raises ServiceUnavailable."""
        try:
            async with asyncio.timeout(self.config.coordinator_timeout_s):
                return await question
        except TimeoutError as error:
            raise ServiceUnavailable("the coordinator did not answer in time") from error

    async def close(self) -> None:
        """Give back every lease, and wait for all changes under way; each has a deadline."""
        for engine in list(self._engines.values()):
            engine.close()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.debug("lease_not_changed", error=repr(task.exception()))

    async def _release(self, lease: Lease) -> None:
        try:
            async with self._places, asyncio.timeout(self.config.coordinator_timeout_s):
                await self.coordinator.release(lease)
        except (AgentLoopError, TimeoutError) as error:
            # The coordinator itself drops leases that nobody renews.
            _log.warning("lease_not_released", lease=lease.lease_id, error=repr(error))


class LeasedSession:
    """One session's `SessionEngine`. Calls may run side by side: they share the lease."""

    def __init__(self, leases: SessionLeases, session_id: str) -> None:
        self._leases = leases
        self._session_id = session_id
        self._lease: Lease | None = None
        self._asked_at = 0.0
        self._changing = asyncio.Lock()
        self._is_closed = False

    @property
    def lease(self) -> Lease | None:
        """What it holds now."""
        return self._lease

    def release(self) -> None:
        """Give the place back; the next call takes one again."""
        lease, self._lease = self._lease, None
        if lease is not None:
            self._leases.give_back(self, lease)

    def close(self) -> None:
        """Give the place back for good: attempts from now on raise SessionFinished. Idempotent."""
        self._is_closed = True
        self.release()

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generate within `request.timeout_s`; on a retryable failure again with the same ids, elsewhere if it is
        the replica's. Raises the last error when the attempts are used up, or DeadlineExceeded."""
        reply = Continuation(request, self._leases.vocab_size)
        deadline_at = _deadline_at(request)
        try:
            async with asyncio.timeout_at(deadline_at):
                try:
                    return await self._generate_once(reply)
                except AgentLoopError as error:
                    failed = _Failed(error)
                generation: Generation = await self._attempts(reply, deadline_at)(self._again, failed, reply)
                return generation
        except TimeoutError as error:
            raise _late(request) from error

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[Delta | Generation, None]:
        """As `generate`, in pieces. A failure after the first is continued from the ids given out; where that would
        not be the same reply (`Continuation.can_go_on`), the error is raised."""
        reply = Continuation(request, self._leases.vocab_size)
        deadline_at = _deadline_at(request)
        try:
            try:
                async with aclosing(self._stream_once(reply, deadline_at)) as pieces:
                    async for piece in pieces:
                        yield piece
                return
            except AgentLoopError as error:
                failed = _Failed(error)
            async for attempt in self._attempts(reply, deadline_at):
                with attempt:
                    failed.raise_once()
                    async with aclosing(self._stream_once(reply, deadline_at)) as pieces:
                        async for piece in pieces:
                            yield piece
        except TimeoutError as error:
            raise _late(request) from error

    # --- inside ---

    def _attempts(self, reply: Continuation, deadline_at: float) -> AsyncRetrying:
        num_failures = 0

        def is_worth_retrying(error: BaseException) -> bool:
            return isinstance(error, AgentLoopError) and error.retryable and reply.can_go_on

        def are_used_up(state: RetryCallState) -> bool:
            nonlocal num_failures
            error = state.outcome.exception() if state.outcome is not None else None
            num_failures += not isinstance(error, EnginePaused)
            return num_failures >= self._leases.config.max_attempts

        async def sleep(seconds: float) -> None:
            async with asyncio.timeout_at(deadline_at):
                await asyncio.sleep(seconds)

        return retrying(is_worth_retrying, are_used_up, sleep=sleep)

    async def _again(self, failed: _Failed, reply: Continuation) -> Generation:
        failed.raise_once()
        return await self._generate_once(reply)

    async def _generate_once(self, reply: Continuation) -> Generation:
        request = reply.next_request()
        lease = await self._leased(request)
        try:
            generation = await self._leases.connect(lease.url).generate(request)
            check_generation(request, generation, self._leases.vocab_size)
        except AgentLoopError as error:
            await self._failed(lease, error)
            raise
        if request is reply.request:
            return generation
        return dataclasses.replace(generation, request_id=reply.request.request_id)

    async def _stream_once(
        self, reply: Continuation, deadline_at: float
    ) -> AsyncGenerator[Delta | Generation, None]:
        ended = reply.ended()
        if ended is not None:  # only its last word was lost
            yield ended
            return
        request = reply.next_request()
        async with asyncio.timeout_at(deadline_at):
            lease = await self._leased(request)
        try:
            stream = self._leases.connect(lease.url).stream(request)
            async with aclosing(stream) as pieces:  # type: ignore[type-var] # engines write generators
                while True:
                    async with asyncio.timeout_at(deadline_at):
                        piece = await anext(pieces, None)
                    if piece is None:
                        raise EngineLost(f"{lease.replica_id} ended a stream without its generation")
                    if isinstance(piece, Generation):
                        yield reply.finish(piece)
                        return
                    reply.add(piece, lease.replica_id)
                    yield piece
        except AgentLoopError as error:
            async with asyncio.timeout_at(deadline_at):
                await self._failed(lease, error)
            raise

    async def _leased(self, request: GenerateRequest) -> Lease:
        """The session's lease, renewed in time. Raises SessionFinished after `close`."""
        lease = self._fresh_lease()
        return lease if lease is not None else await self._leases.to_its_end(self._take(request))

    async def _take(self, request: GenerateRequest) -> Lease:
        async with self._changing:
            lease = self._fresh_lease()
            if lease is not None:
                return lease  # another call of the session was faster
            config = self._leases.config
            num_tokens = len(request.token_ids) + min(request.sampling.max_tokens, config.predicted_reply_tokens)
            try:
                lease = await self._leases.ask(self._leases.coordinator.lease(self._session_id, num_tokens))
            except AgentLoopError as error:
                if self._lease is None:
                    raise
                # The replica may well serve while the coordinator restarts; if it does not, the call says so.
                _log.warning("lease_not_renewed", session=self._session_id, code=error.code)
                self._asked_at = self._leases.clock.now() - 0.9 * config.renew_after_s
                return self._lease
            self._hold(lease)
            if self._is_closed:
                raise self._ended()
            return lease

    def _fresh_lease(self) -> Lease | None:
        if self._is_closed:
            raise self._ended()
        is_fresh = self._leases.clock.now() - self._asked_at < self._leases.config.renew_after_s
        return self._lease if is_fresh else None

    async def _failed(self, failed: Lease, error: AgentLoopError) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead."""
        if error.retryable and not isinstance(error, EnginePaused):
            _log.warning("call_failed", session=self._session_id, replica=failed.replica_id, error=str(error))
            await self._leases.to_its_end(self._move(failed))

    async def _move(self, failed: Lease) -> None:
        async with self._changing:
            if self._lease != failed:
                return  # another call of the session has told already
            try:
                moving = self._leases.coordinator.move(self._session_id, failed, True)
                self._hold(await self._leases.ask(moving))
            except NotFound:
                self._lease = None  # it has expired, or the coordinator is a new one: ask for a place anew
            except AgentLoopError as none_now:
                _log.warning("no_other_replica", session=self._session_id, error=str(none_now))

    def _hold(self, lease: Lease) -> None:
        self._lease, self._asked_at = lease, self._leases.clock.now()
        self._leases.holds(self)
        if self._is_closed:  # while the coordinator was asked
            self.release()

    def _ended(self) -> SessionFinished:
        return SessionFinished(f"session {self._session_id} has ended")


class _Failed:
    """A failure that is known already, for the attempts to begin with: they cost more than a call that succeeds."""

    def __init__(self, error: AgentLoopError) -> None:
        self._error: AgentLoopError | None = error

    def raise_once(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _deadline_at(request: GenerateRequest) -> float:
    return asyncio.get_running_loop().time() + request.timeout_s


def _late(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer within {request.timeout_s:g} s")
