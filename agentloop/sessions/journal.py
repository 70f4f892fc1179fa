"""A session's writes to its journal: bounded in time, never cut in the middle, and failing as our own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import structlog

from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.sessions.facts import Journal, SessionFacts
from agentloop.trajectory import CallRecord, Node

T = TypeVar("T")

_log = structlog.stdlib.get_logger(__name__)


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end even if the caller is cancelled meanwhile; it is cancelled then. `work` is bounded.

    A cancelled caller does not hear whether `work` failed: it has to look at what `work` has done.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue  # the first one is raised below
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("failed_after_cancellation", error=repr(error))
        raise


class JournalWriter:
    """The journal as one session uses it. A write is done to its end, or given up, even if its caller is cancelled.

    Raises ServiceUnavailable, also for whatever a journal raises that is not ours.
    """

    def __init__(self, journal: Journal, session_id: str, *, timeout_s: float) -> None:
        self._journal = journal
        self._session_id = session_id
        self._timeout_s = timeout_s

    def begin(self, call: CallRecord) -> None:
        """See `Journal.begin`: if it raises, it has stored nothing."""
        try:
            self._journal.begin(self._session_id, call)
        except AgentLoopError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    async def end(self, call: CallRecord, nodes: Sequence[Node]) -> None:
        """See `Journal.end`. For callers that themselves run to their end: a call has tasks enough."""
        try:
            await self._bounded(self._journal.end(self._session_id, call, nodes))
        except TimeoutError as error:
            raise self._late() from error

    async def save(self, facts: SessionFacts) -> None:
        """See `Journal.save`."""
        try:
            await to_its_end(self._bounded(self._journal.save(facts)))
        except TimeoutError as error:
            raise self._late() from error

    async def _bounded(self, write: Coroutine[Any, Any, None]) -> None:
        """Raises TimeoutError only for our own deadline."""
        scope = asyncio.timeout(self._timeout_s)
        try:
            async with scope:
                await write
        except AgentLoopError:
            raise
        except Exception as error:  # whatever the disk, or the thread that writes to it, has to say
            if isinstance(error, TimeoutError) and scope.expired():
                raise
            raise self._failed(error) from error

    def _late(self) -> ServiceUnavailable:
        return ServiceUnavailable(f"the session's journal did not answer within {self._timeout_s:g} s")

    def _failed(self, error: Exception) -> ServiceUnavailable:
        _log.error("journal_failed", session=self._session_id, error=repr(error))
        return ServiceUnavailable(f"the session's journal failed: {error}")
