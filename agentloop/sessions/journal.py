"""A session's writes to its journal: bounded in time, never cut in the middle, and failing as our own errors."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog

from agentloop.aio import run_to_end
from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.sessions.facts import Journal, SessionFacts
from agentloop.trajectory import CallRecord, Node

_log = structlog.stdlib.get_logger(__name__)


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
            await run_to_end(self._bounded(self._journal.save(facts)))
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
