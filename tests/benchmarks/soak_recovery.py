"""When a service that a soak run looks at from outside has recovered from a blow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from agentloop.api.coordinator import ServiceStatus
from tests.benchmarks.soak_processes import Kill

FRESH_S = 3.0  # a replica that was heard of since then serves
ENDS_REPLICA = ("replica", "engine core")
"""Kinds whose death ends a replica. Until its silence is noticed it counts as ready; what comes has another id."""


@dataclass(frozen=True, slots=True)
class Sight:
    """The service at one moment, from outside."""

    at_s: float
    status: ServiceStatus | None  # None: nobody answered
    num_delivered: int
    processes: Mapping[str, frozenset[psutil.Process]]  # the living, by kind

    @property
    def ready(self) -> frozenset[str]:
        """The ids of the replicas that serve."""
        replicas = self.status.replicas if self.status is not None else ()
        return frozenset(
            one.replica_id for one in replicas if one.state == "ready" and one.heartbeat_age_s < FRESH_S
        )


def recovered_s(kill: Kill, sights: Sequence[Sight]) -> float | None:
    """Return the seconds from a blow to the first sight of what it took being there again; None: there is none.

    What other blows took does not matter. The service answers, with as many processes of the kind as before, the
    victim among them only if it was let go on. In place of a replica that died another is ready that was not (of
    several that are missing, the first one to come); of others that go on, as many as before. A coordinator has to
    know a replica again, and a worker to have delivered a record since.
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
