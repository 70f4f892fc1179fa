"""The way of finished sessions' trajectories into the run's store, and the notes in the sessions' file that say so.

An answer waits for the record alone. The note only spares a later start the question, so notes of many sessions are
one write, soon after; a record whose note was lost is handed in again, which changes nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Collection
from typing import Protocol

import structlog

from agentloop.aio import OwnedTasks
from agentloop.api.sessions import SESSIONS_ROLLOUT_ID
from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.sessions.session import Session
from agentloop.types import Trajectory

_log = structlog.stdlib.get_logger(__name__)


class RecordPort(Protocol):
    """The part of the coordinator that takes records."""

    async def record(self, trajectory: Trajectory, owner: str | None = None) -> None:
        """Store a finished session. Returns once it is durable; a repeat changes nothing."""


class RecordNotes(Protocol):
    """The part of the sessions' file that says which finished sessions have their records."""

    async def is_recorded(self, session_id: str) -> bool:
        """Return whether a finished session's record needs no more care."""

    async def mark_recorded(self, session_ids: Collection[str]) -> None:
        """Note that the records of finished sessions are in the run's store, or never will be."""


class SessionRecords:
    """The records of one process's sessions. Close it before their file."""

    def __init__(self, coordinator: RecordPort, notes: RecordNotes, timeout_s: float) -> None:
        """`timeout_s` is of the coordinator, for one record."""
        self._coordinator = coordinator
        self._notes = notes
        self._timeout_s = timeout_s
        self._settled: set[str] = set()  # the file does not say it yet; bounded by the sessions that end meanwhile
        self._tasks = OwnedTasks("session-records")
        self._noting: asyncio.Task[None] | None = None

    async def record(self, session: Session, trajectory: Trajectory, *, has_just_ended: bool = False) -> None:
        """Give a finished session's trajectory to the run's store, unless it has it.

        Of one that `has_just_ended` the file is not asked. The caller holds the session's lock. Raises what the
        coordinator raises, and ServiceUnavailable.
        """
        session_id, owner = session.session_id, None if session.record.is_claimed else session.record.owner
        if trajectory.rollout_id == SESSIONS_ROLLOUT_ID and owner is not None:
            owner = ""  # of an earlier release, where all shared it
        if session_id in self._settled or (not has_just_ended and await self._notes.is_recorded(session_id)):
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._coordinator.record(trajectory, owner)
        except TimeoutError as error:
            raise ServiceUnavailable("the coordinator did not take the record in time") from error
        except sqlite3.Error as error:  # of a coordinator in this process
            raise ServiceUnavailable(f"the run's store failed: {error}") from error
        self.settle(session_id)

    def settle(self, session_id: str) -> None:
        """Have it noted that a session's record needs no more care."""
        self._settled.add(session_id)
        if self._noting is None or self._noting.done():
            self._noting = self._tasks.start(self._note())

    async def close(self) -> None:
        """Wait for the notes that are owed. Idempotent."""
        await self._tasks.close()

    async def _note(self) -> None:
        while self._settled:
            session_ids = tuple(self._settled)
            try:
                await self._notes.mark_recorded(session_ids)
            except AgentLoopError as error:  # they are asked for again, and found
                _log.warning("records_not_noted", num_sessions=len(session_ids), error=str(error))
            self._settled.difference_update(session_ids)
