"""What a session is and what it works with: its facts, its bounds, and the journal that outlives its process.

A journal's order is that of `begin`: of two calls with the same digest the later one can make the earlier one good.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from agentloop.api import SESSIONS_ROLLOUT_ID
from agentloop.clock import Clock, RealClock
from agentloop.generation import TurnReader
from agentloop.parsers import Parser
from agentloop.rendering import Renderer
from agentloop.trajectory import CallRecord, Node
from agentloop.types import KVPolicy, StopReason


class SessionState(StrEnum):
    """Where a session is in its life. Only a store knows the last two, which are tombstones."""

    OPEN = "open"
    FINISHED = "finished"  # its trajectory is what it will ever be
    DELETED = "deleted"
    GONE = "gone"  # expired


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What is known of a session besides its calls. Times are seconds since 1970."""

    session_id: str
    created_at: float
    ttl_s: float
    owner: str = ""  # a digest of the key that made it; empty where the service asks for no keys
    state: SessionState = SessionState.OPEN
    rollout_id: str = SESSIONS_ROLLOUT_ID
    group_id: str = ""  # empty: a group of its own, named as the session
    task_id: str = ""
    sample_index: int = 0
    reward: float | None = None
    reward_error: str = ""  # why there is none, where a reward function failed
    stop_reason: StopReason | None = None
    error: str = ""
    is_one_off: bool = False
    finished_at: float | None = None


class Journal(Protocol):
    """Where sessions are written down. A method that raises has stored nothing; writes are kept in order.

    A session bounds its waits: a write that it gave up on may still arrive. Later writes about a call replace
    earlier ones, so an `end` with FAILED after one with COMMITTED takes the call's nodes away.
    """

    def begin(self, session_id: str, call: CallRecord) -> None:
        """Keep that a call is open, before its first token is sampled. Of microseconds: it waits for no disk."""

    async def end(self, session_id: str, call: CallRecord, nodes: Sequence[Node]) -> None:
        """Keep what became of a call: COMMITTED with its nodes, or FAILED. Durable on return."""

    async def save(self, facts: SessionFacts) -> None:
        """Keep these facts instead of those before. Durable on return."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Bounds of one session's calls. All finite."""

    max_open_calls: int = 512  # the next one gets 429
    max_nodes: int = 10_000
    max_tokens: int = 4_000_000  # stored ones, observed and sampled
    journal_timeout_s: float = 30.0  # of one write


@dataclass(frozen=True, slots=True)
class SessionParts:
    """What the sessions of a process share. `reader` and `parser` are of `renderer`'s model."""

    renderer: Renderer
    reader: TurnReader
    parser: Parser
    kv_policy: KVPolicy
    max_context_tokens: int
    vocab_size: int
    can_constrain: bool = False
    limits: CallLimits = CallLimits()
    clock: Clock = field(default_factory=RealClock)
    unix_time: Callable[[], float] = time.time
