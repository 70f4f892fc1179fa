"""Recovery time of a service after a kill, as observed from outside by a soak run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from agentloop.api.coordinator import ServiceStatus
from tests.benchmarks.soak_processes import Kill

FRESH_S = 3.0  # a replica with a heartbeat within this time serves
ENDS_REPLICA = ("replica", "engine core")
"""Kinds whose death ends a replica. It counts as ready until its silence is detected; its replacement has
another id."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The service at one moment, as seen from outside."""

    at_s: float
    status: ServiceStatus | None  # None: no answer
    num_delivered: int
    processes: Mapping[str, frozenset[psutil.Process]]  # living processes, by kind

    @property
    def ready(self) -> frozenset[str]:
        """Return the ids of the serving replicas."""
        replicas = self.status.replicas if self.status is not None else ()
        return frozenset(
            one.replica_id for one in replicas if one.state == "ready" and one.heartbeat_age_s < FRESH_S
        )


def recovered_s(kill: Kill, sights: Sequence[Sight]) -> float | None:
    """Return the seconds from a kill to the first sight of the repaired service; None if there is no such sight.

    Effects of other kills do not matter. The service must answer, with as many processes of the kind as before; the
    victim counts only if it was continued. A replica that died must be replaced by one that was not ready before
    (the first one, if several are missing); after a stop, as many replicas must be ready as before. A coordinator
    must list a replica again, and a worker must have delivered a record since.
    """
    before = next((one for one in reversed(sights) if one.at_s < kill.at_s), None)
    num_before = max(1, len(before.processes[kill.kind])) if before is not None else 1
    known = before.ready if before is not None else frozenset[str]()
    delivered: int | None = None
    for sight in sights:
        if sight.at_s <= kill.over_at_s or sight.status is None:
            continue
        processes = sight.processes[kill.kind]
        if len(processes) < num_before:
            continue
        if kill.kind in ENDS_REPLICA:
            has_died = kill.process not in processes
            is_served = bool(sight.ready - known) if has_died else len(sight.ready) >= len(known)
        else:
            is_served = kill.kind == "ingress" or bool(sight.ready)
        if not is_served:
            continue
        if kill.kind == "worker":
            delivered = sight.num_delivered if delivered is None else delivered
            if sight.num_delivered == delivered:
                continue
        return sight.at_s - kill.at_s
    return None
