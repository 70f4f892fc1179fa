"""Starts of replicas: each asks before it takes memory, and is held back while the fleet sleeps, or if its slot was
started too often.

    asked ─► held (the fleet sleeps; too many starts of its slot) ─► let ─► registered, left or silent: forgotten

A slot is a replica's place among all; the process that takes a dead one's place has the same slot and another id. A
slot is let start `max_starts` times within `window_s`: what dies again and again does not load the host for ever.

Ownership: one object, in the coordinator's event loop, without awaits; time is passed in. What is kept is bounded
by the replicas that ask, and by `max_starts` for each slot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from agentloop.api.coordinator import StartingReplica

ASK_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class StartConfig:
    """Bounds of starts."""

    max_starts: int = 5
    window_s: float = 600.0
    silent_after_s: float = 30.0  # a replica that loads repeats its question every second


@dataclass(slots=True)
class _Start:
    slot: int
    asked_at: float
    seen_at: float
    is_let: bool = False
    reason: str = ""


class Starts:
    """The replicas that have asked to start, and have not joined yet."""

    def __init__(self, config: StartConfig | None = None) -> None:
        self._config = config or StartConfig()
        self._starts: dict[str, _Start] = {}
        self._let_at: dict[int, deque[float]] = {}  # by slot

    def ask(self, replica_id: str, slot: int, now: float, *, is_asleep: bool) -> float:
        """Return the seconds after which the replica asks again; 0: it may take memory, now and until it joins."""
        start = self._starts.setdefault(replica_id, _Start(slot, now, now))
        start.seen_at = now
        if start.is_let:
            return 0.0
        let_at = self._let_at.setdefault(slot, deque(maxlen=self._config.max_starts))
        while let_at and now - let_at[0] >= self._config.window_s:
            let_at.popleft()
        if is_asleep:
            start.reason = "the fleet sleeps"
        elif len(let_at) == self._config.max_starts:
            left_s = let_at[0] + self._config.window_s - now
            start.reason = (
                f"slot {slot} was started {len(let_at)} times within {self._config.window_s:g} s;"
                f" again in {left_s:.0f} s"
            )
        else:
            let_at.append(now)
            start.is_let, start.reason = True, ""
            return 0.0
        return ASK_AGAIN_S

    def ended(self, replica_id: str) -> None:
        """Forget a start: the replica has joined, or left."""
        self._starts.pop(replica_id, None)

    def expire(self, now: float) -> None:
        """Forget who is silent."""
        for replica_id, start in list(self._starts.items()):
            if now - start.seen_at >= self._config.silent_after_s:
                del self._starts[replica_id]

    @property
    def under_way(self) -> tuple[str, ...]:
        """The replicas that take memory and have not joined."""
        return tuple(replica_id for replica_id, start in self._starts.items() if start.is_let)

    def statuses(self, now: float) -> tuple[StartingReplica, ...]:
        """Return all as a table."""
        return tuple(
            StartingReplica(replica_id, one.slot, now - one.asked_at, one.reason)
            for replica_id, one in self._starts.items()
        )
