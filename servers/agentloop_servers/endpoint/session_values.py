"""The values of the registry of sessions: its bounds, what a caller says of a new one, its counts, its errors."""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.api import SESSIONS_ROLLOUT_ID
from agentloop.errors import Gone, SessionNotFound
from agentloop.sessions import Session


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of a process's sessions. All finite."""

    max_sessions: int = 20_000  # open ones; the next gets 429
    max_resident_bytes: int = 512 << 20
    idle_s: float = 60.0  # without use, until a session leaves memory
    ttl_s: float = 3600.0  # without use, until a session expires; also how long a finished one can be read
    one_off_ttl_s: float = 600.0
    max_ttl_s: float = 7 * 86_400.0
    watch_interval_s: float = 1.0
    record_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a caller says of a session to come. Its record becomes sample `sample_index` of `group_id`."""

    session_id: str | None = None  # None: one is made up
    ttl_s: float | None = None
    rollout_id: str = SESSIONS_ROLLOUT_ID
    group_id: str = ""  # empty: a group of its own
    task_id: str = ""
    sample_index: int = 0


@dataclass(frozen=True, slots=True)
class SessionStats:
    """The registry at one moment. `num_spilled`, `num_restored`, `num_expired`, `num_corrupt_rows`: so far."""

    num_open: int
    num_resident: int
    resident_bytes: int
    num_spilled: int
    num_restored: int
    num_expired: int
    num_corrupt_rows: int


def owned(session: Session, owner: str | None) -> Session:
    """The session, if it is this owner's; None is whoever made it. Raises SessionNotFound."""
    if owner not in (None, session.facts.owner):
        raise not_found(session.facts.session_id)
    return session


def not_found(session_id: str) -> SessionNotFound:
    """The error for an id that nobody has, or another owner."""
    return SessionNotFound(f"there is no session {session_id!r}", param="session_id")


def gone(session_id: str) -> Gone:
    """The error for a session whose time is over."""
    return Gone(f"session {session_id!r} has expired", param="session_id")
