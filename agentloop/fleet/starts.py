"""Starts of replicas: each asks before it takes memory, and is held back while the fleet sleeps.

    asked ─► held (the fleet sleeps) ─► let ─► registered, left or silent: forgotten

Ownership: one object, in the coordinator's event loop, without awaits; time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.api.coordinator import StartingReplica

SILENT_AFTER_S = 30.0  # a replica that loads repeats its question every second


@dataclass(slots=True)
class _Start:
    asked_at: float
    seen_at: float
    is_let: bool = False


class Starts:
    """The replicas that have asked to start and have not joined yet."""

    def __init__(self) -> None:
        self._starts: dict[str, _Start] = {}

    def ask(self, replica_id: str, now: float, *, is_asleep: bool) -> bool:
        """Tell if the replica may take memory now. A yes holds until it joins."""
        start = self._starts.setdefault(replica_id, _Start(now, now))
        start.seen_at, start.is_let = now, start.is_let or not is_asleep
        return start.is_let

    def ended(self, replica_id: str) -> bool:
        """Forget a start: the replica has joined, or left. False: it was unknown."""
        return self._starts.pop(replica_id, None) is not None

    def expire(self, now: float) -> None:
        """Forget replicas that have not asked for `SILENT_AFTER_S`."""
        self._starts = {name: one for name, one in self._starts.items() if now - one.seen_at < SILENT_AFTER_S}

    @property
    def under_way(self) -> tuple[str, ...]:
        """The replicas that may take memory and have not joined."""
        return tuple(replica_id for replica_id, start in self._starts.items() if start.is_let)

    def statuses(self, now: float) -> tuple[StartingReplica, ...]:
        """Return one row for each start."""
        return tuple(
            StartingReplica(replica_id, now - one.asked_at, "" if one.is_let else "the fleet sleeps")
            for replica_id, one in self._starts.items()
        )
