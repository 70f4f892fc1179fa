"""A session's record and how it ends, and the journal in which both outlive its process.

A journal keeps the order of `open_call`: of two calls with one digest the later can make the earlier good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import structlog

from agentloop.api.sessions import SESSIONS_ROLLOUT_ID
from agentloop.errors import AgentLoopError, ServiceUnavailable
from agentloop.score import Score
from agentloop.trajectory.node import CallRecord, Node
from agentloop.types import Message, StopReason, TrajectoryTimes, VersionDemand

_log = structlog.stdlib.get_logger(__name__)


class SessionState(StrEnum):
    """A session's stage of life. The last two are tombstones, which only a store has."""

    OPEN = "open"
    FINISHED = "finished"  # its trajectory is what it will ever be
    DELETED = "deleted"
    GONE = "gone"  # expired


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session besides its calls. Times are seconds since 1970."""

    session_id: str
    created_at: float
    ttl_s: float
    owner: str = ""  # the user that made it; empty where the service asks for no keys
    state: SessionState = SessionState.OPEN
    rollout_id: str = SESSIONS_ROLLOUT_ID
    group_id: str = ""  # empty: a group of its own, named as the session
    task_id: str = ""
    sample_index: int = 0
    score: Score = field(default_factory=Score)
    reward_error: str = ""  # why there is none, where a reward function failed
    stop_reason: StopReason | None = None
    error: str = ""
    is_one_off: bool = False
    refuses_overflow: bool = False  # a prompt that leaves no room is an error, not an empty answer
    gives_unread_calls: bool = False  # a call that cannot be read is a tool call without a name, not content
    overflow_at: int | None = None  # the turns that there were when a prompt last left no room
    finished_at: float | None = None
    times: TrajectoryTimes | None = None  # since it is finished
    task_messages: tuple[Message, ...] = ()  # the main conversation begins with them
    has_control_key: bool = False  # its maker was given one; without users it alone ends the session
    is_revoked: bool = False  # it takes no calls any more
    traceparent: str = ""  # the W3C trace context of its maker
    weight_version: VersionDemand | None = None  # of calls that say none
    adapter: str = ""  # that all its calls are sampled under; empty: the base weights


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session as its agent gives it: reason, fault and score."""

    stop_reason: StopReason = StopReason.COMPLETED
    error: str = ""  # the record is incomplete then
    score: Score = field(default_factory=Score)  # over the one that was set before
    reward_error: str = ""  # why there is no reward
    wait_s: float = 0.0  # for calls that run


class Journal(Protocol):
    """The durable record of sessions. A method that raises has stored nothing; writes are kept in order.

    A session bounds its waits: a write that it gave up on may still arrive. Later writes about a call replace
    earlier ones, so a `close_call` with FAILED after one with COMMITTED takes the call's nodes away.
    """

    def open_call(self, session_id: str, call_record: CallRecord) -> None:
        """Keep that a call is open, before its first token is sampled. Takes microseconds: no disk is awaited."""

    async def close_call(self, session_id: str, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        """Keep the end of a call: COMMITTED with its nodes, or FAILED. Durable on return."""

    async def save(self, record: SessionRecord) -> None:
        """Replace the session's record. Durable on return."""


async def write(writing: Coroutine[Any, Any, None], session_id: str, timeout_s: float) -> None:
    """Await a write to a journal. Raises ServiceUnavailable if it is late, or raises an error that is not ours. For
    callers that run to their end: a cancelled caller cuts the write off."""
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            await writing
    except AgentLoopError:
        raise
    except Exception as error:  # whatever the disk, or the thread that writes to it, has to say
        if isinstance(error, TimeoutError) and scope.expired():
            late = f"the session's journal did not answer within {timeout_s:g} s"
            raise ServiceUnavailable(late) from error
        raise write_failure(session_id, error) from error


def write_failure(session_id: str, error: Exception) -> ServiceUnavailable:
    """Log a journal's error that is not ours, and return it as one of ours."""
    _log.error("journal_failed", session=session_id, error=repr(error))
    return ServiceUnavailable(f"the session's journal failed: {error}")
