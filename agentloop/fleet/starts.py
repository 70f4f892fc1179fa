"""Admission of replica starts: a replica asks before it allocates memory, and waits while the fleet sleeps.

    asked ─► waiting (the fleet sleeps) ─► admitted ─► registered, left or silent: removed

The coordinator's event loop owns the one `Starts` object. Its methods do not await; callers pass the time.
"""

from __future__ import annotations

from dataclasses import dataclass

from agentloop.api.coordinator import StartingReplica

SILENT_AFTER_S = 30.0  # a loading replica asks every second


@dataclass(slots=True)
class _Start:
    asked_at: float
    seen_at: float
    is_let: bool = False


class Starts:
    """The replicas that have asked to start and have not registered yet."""

    def __init__(self) -> None:
        self._starts: dict[str, _Start] = {}

    def ask(self, replica_id: str, now: float, *, is_asleep: bool) -> bool:
        """Return True if the replica may allocate memory now.

        Once True, the answer stays True until it registers.
        """
        start = self._starts.setdefault(replica_id, _Start(now, now))
        start.seen_at, start.is_let = now, start.is_let or not is_asleep
        return start.is_let

    def ended(self, replica_id: str) -> bool:
        """Remove a start because the replica has registered or left. Returns False if it was unknown."""
        return self._starts.pop(replica_id, None) is not None

    def expire(self, now: float) -> None:
        """Remove the replicas that have not asked for `SILENT_AFTER_S`."""
        self._starts = {name: one for name, one in self._starts.items() if now - one.seen_at < SILENT_AFTER_S}

    @property
    def under_way(self) -> tuple[str, ...]:
        """The replicas that may allocate memory and have not registered."""
        return tuple(replica_id for replica_id, start in self._starts.items() if start.is_let)

    def statuses(self, now: float) -> tuple[StartingReplica, ...]:
        """Return one row per start for the status page."""
        return tuple(
            StartingReplica(replica_id, now - one.asked_at, "" if one.is_let else "the fleet sleeps")
            for replica_id, one in self._starts.items()
        )
