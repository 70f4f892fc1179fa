"""Holds: replicas that keep their weight version for an evaluation while the fleet is updated.

A hold is a lease of its evaluator, with two deadlines: it ends if it is not renewed for `lease_s`, and at the
latest after `timeout_s`. Its replicas are skipped by weight updates and stay in traffic, for calls that accept
their version. At its end `LateReplicas` brings them to the fleet's weights. A replica that dies or whose weights
change leaves its hold. Holds are not stored: after a coordinator restart all replicas follow the fleet again.

The coordinator's event loop owns the one object. Nothing here awaits, and callers pass the time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from agentloop.api.coordinator import ReplicaHold
from agentloop.errors import Conflict, InvariantBroken, NotFound
from agentloop.fleet.registry import Fleet, ReplicaRecord

_NUM_ENDED = 64  # ended holds whose reason is kept
_UNKNOWN = "it is unknown; a restart of the coordinator ends all holds"


@dataclass(slots=True)
class _Hold:
    version: int
    replica_ids: frozenset[str]  # the replicas at its start; some may be lost since
    num_present: int
    ends_at: float
    renewed_until: float


class Holds:
    """The holds of a fleet. Call `expire` about once per second."""

    def __init__(self, fleet: Fleet, log: FilteringBoundLogger) -> None:
        self._fleet = fleet
        self._log = log
        self._holds: dict[str, _Hold] = {}
        self._ended: deque[tuple[str, str]] = deque(maxlen=_NUM_ENDED)  # hold id, reason

    def begin(
        self,
        hold_id: str,
        num_replicas: int,
        timeout_s: float,
        lease_s: float,
        now: float,
        load: Callable[[str], float],
    ) -> ReplicaHold:
        """Hold the least loaded replicas at the fleet's version. A repeated call returns the hold.

        Not while an update runs. In each engine pool a replica stays free: it follows updates, and later sends its
        weights to the held ones. Raises Conflict if too few replicas are free.
        """
        if hold_id in self._holds:
            return self._shown(hold_id, now)
        ready = self._fleet.placeable()
        free = sorted((one for one in ready if not one.held_by), key=lambda one: load(one.replica_id))
        by_pool = defaultdict[str, list[ReplicaRecord]](list)
        for one in free:
            by_pool[one.registration.entry].append(one)
        able = [one for one in free if one is not by_pool[one.registration.entry][-1]]
        if num_replicas > len(able):
            held = f", of which {len(ready) - len(free)} are held" if len(free) < len(ready) else ""
            raise Conflict(
                f"cannot hold {num_replicas} replica(s): {len(ready)} are ready{held}, and one per engine pool must"
                f" follow weight updates, so at most {len(able)} can be held",
                param="replicas",
            )
        if (version := self._fleet.weight_version) is None:
            raise InvariantBroken("replicas take traffic without a weight version")
        chosen = able[:num_replicas]
        for one in chosen:
            self._fleet.hold(one, hold_id)
        names = frozenset(one.replica_id for one in chosen)
        ends_at = now + timeout_s
        self._holds[hold_id] = _Hold(version, names, len(names), ends_at, min(ends_at, now + lease_s))
        self._log.info("hold_begun", hold=hold_id, version=version, replicas=sorted(names))
        return self._shown(hold_id, now)

    def renew(self, hold_id: str, lease_s: float, now: float) -> ReplicaHold:
        """Extend a hold, or end it with `lease_s` 0. Raises NotFound, with the reason, if it has ended."""
        hold = self._holds.get(hold_id)
        if hold is None:
            reason = next((reason for name, reason in self._ended if name == hold_id), _UNKNOWN)
            raise NotFound(f"the hold {hold_id} is not in force: {reason}; request another one", param="hold_id")
        shown = self._shown(hold_id, now)
        if lease_s > 0:
            hold.renewed_until = min(hold.ends_at, now + lease_s)
        else:
            self._end(hold_id, "it was released")
        return shown

    def expire(self, now: float) -> None:
        """End the holds that are over, and log replicas that have left theirs."""
        for hold_id, hold in tuple(self._holds.items()):
            num_present = len(self._fleet.held(hold_id))
            if num_present < hold.num_present:
                hold.num_present = num_present
                self._log.warning("hold_shrank", hold=hold_id, num_left=num_present)
            if num_present == 0:
                self._end(hold_id, "its last replica was lost or got other weights")
            elif now >= hold.ends_at:
                self._end(hold_id, "its timeout was reached")
            elif now >= hold.renewed_until:
                self._end(hold_id, "its evaluator did not renew it")

    def shown(self, now: float) -> tuple[ReplicaHold, ...]:
        """Return the holds in force."""
        return tuple(self._shown(hold_id, now) for hold_id in self._holds)

    def _shown(self, hold_id: str, now: float) -> ReplicaHold:
        hold = self._holds[hold_id]
        present = tuple(one.replica_id for one in self._fleet.held(hold_id))
        lost = tuple(sorted(hold.replica_ids - {*present}))
        return ReplicaHold(hold_id, hold.version, present, lost, max(0.0, hold.ends_at - now))

    def _end(self, hold_id: str, reason: str) -> None:
        del self._holds[hold_id]
        self._ended.append((hold_id, reason))
        self._fleet.end_hold(hold_id)
        self._log.info("hold_ended", hold=hold_id, reason=reason)
