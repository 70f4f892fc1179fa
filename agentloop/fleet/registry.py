"""The registry of replicas: the state of each, and whether it takes traffic.

    JOINING ─► UPDATING ◄─► READY ◄─► SUSPECT        any ─► GONE
               ▲   ▲ └────► QUARANTINED ◄── READY, SUSPECT
               ▼   └─────────────┘
             ASLEEP

The coordinator's event loop owns the one `Fleet`. It never awaits, and callers pass the time. Invariants:
- only a READY replica takes traffic, with exactly the fleet's weight version or with the version of its hold;
- a hold of a replica ends as soon as the replica's version changes or it is quarantined;
- a replica becomes READY from UPDATING, after the canary check, or from SUSPECT if its weights are still current;
- a QUARANTINED replica leaves this state only through UPDATING and a commit of the fleet's version;
- an ASLEEP replica keeps its leases and takes no traffic; the version that it reports is ignored until it wakes.

A `ReplicaRecord` is a snapshot. A caller that acts on it after an await passes it back: if the replica's process
was replaced in between (another `incarnation`), the method has no effect and its result says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from urllib.parse import urlsplit

from agentloop.api.coordinator import ReplicaRegistration, ReplicaReport
from agentloop.api.owners import shown_id
from agentloop.engine.interface import EngineInfo
from agentloop.engine.weight_digest import are_comparable
from agentloop.errors import InvariantBroken, ModelNotFound, UnsupportedParameter
from agentloop.types import Load
from agentloop.values.capabilities import Feature, Needs, features_of, hint_of, param_of
from agentloop.values.sampling import VersionDemand


class ReplicaState(StrEnum):
    JOINING = "joining"  # registered, without the fleet's weights
    READY = "ready"  # takes traffic
    UPDATING = "updating"  # in a weight update or catching up; takes no new traffic
    SUSPECT = "suspect"  # silent, or its calls fail: keeps its leases, gets no new ones
    ASLEEP = "asleep"  # has released memory: keeps its leases, gets no new ones
    QUARANTINED = "quarantined"  # its weights are unknown or refused, or it failed an update
    GONE = "gone"  # left or dead; removed


MOVES: Mapping[ReplicaState, frozenset[ReplicaState]] = {
    ReplicaState.JOINING: frozenset({ReplicaState.UPDATING, ReplicaState.QUARANTINED, ReplicaState.GONE}),
    ReplicaState.READY: frozenset(ReplicaState) - {ReplicaState.READY, ReplicaState.ASLEEP},
    ReplicaState.UPDATING: frozenset(ReplicaState) - {ReplicaState.UPDATING, ReplicaState.SUSPECT},
    ReplicaState.SUSPECT: frozenset(ReplicaState) - {ReplicaState.SUSPECT, ReplicaState.ASLEEP},
    ReplicaState.ASLEEP: frozenset(
        {ReplicaState.UPDATING, ReplicaState.JOINING, ReplicaState.QUARANTINED, ReplicaState.GONE}
    ),
    ReplicaState.QUARANTINED: frozenset({ReplicaState.UPDATING, ReplicaState.GONE}),
    ReplicaState.GONE: frozenset(),
}


@dataclass(frozen=True, slots=True)
class FleetConfig:
    """Limits on silence and failures."""

    suspect_after_s: float = 5.0
    dead_after_s: float = 30.0  # an engine that compiles or loads may delay its own heartbeats
    max_failures: int = 3  # failed calls within the window, after which the replica is SUSPECT
    # Longer than a few turns, because a call on a hung replica fails only at its deadline
    failure_window_s: float = 600.0
    # Consecutive reports that contradict the record; one may have been sent before an update
    max_contradictions: int = 2
    # The names of the service's engine pools; empty: the pools that have joined
    entries: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A snapshot of a replica. `weight_version` is None for dummy weights and for unknown weights."""

    registration: ReplicaRegistration
    incarnation: int
    state: ReplicaState
    weight_version: int | None
    seen_at: float
    report: ReplicaReport  # the last report
    error: str | None = None  # the reason why it takes no traffic
    failed_at: tuple[tuple[float, str], ...] = ()  # times and caller processes of the latest failed calls
    needs_probe: bool = False  # takes no traffic until it answers a probe
    num_contradictions: int = 0
    is_resuming: bool = False  # takes no traffic until the running resume ends
    held_by: str = ""  # the hold that keeps its version, which may be older than the fleet's; empty: none
    lacks: frozenset[str] = frozenset()  # served adapters whose files it could not read

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    @property
    def url(self) -> str:
        return self.registration.url

    @property
    def host(self) -> str:
        """The host's address."""
        return urlsplit(self.url).hostname or ""

    @property
    def capacity_tokens(self) -> int:
        """The replica's KV capacity in tokens; 1 if its engine reports none, so that such replicas compare as
        equal."""
        return max(1, self.registration.info.kv_capacity_tokens)


class Fleet:
    def __init__(self, config: FleetConfig | None = None) -> None:
        self._config = config or FleetConfig()
        self._replicas: dict[str, ReplicaRecord] = {}
        self._num_incarnations = 0
        self._weight_version: int | None = None
        self.weight_digest = ""  # the digest of the fleet's weights; empty: unknown
        self._is_version_pinned = False  # set by an update; registrations then do not change the version
        self._engines: dict[str, EngineInfo] = {}  # pool -> the engine that joined last
        self._longest_tokens = 0  # the longest context of these engines
        self._drained: frozenset[str] = frozenset()
        self.adapters: Mapping[str, int] = {}  # adapter name -> served version
        self.coming_version: int | None = None  # the version of a running update
        self.held_versions: frozenset[int] = frozenset()  # the versions of held replicas
        self.num_placement_changes = 0  # increases with every change that may affect `placeable`

    @property
    def weight_version(self) -> int | None:
        """The version of new calls; None while no replica has weights or the version is unknown."""
        return self._weight_version

    @property
    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """All replicas in the order of their arrival."""
        return tuple(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaRecord | None:
        return self._replicas.get(replica_id)

    def placeable(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas that take new traffic."""
        return tuple(replica for replica in self._replicas.values() if self._takes_traffic(replica))

    def drain(self, hosts: frozenset[str]) -> None:
        """Stop new traffic on the replicas of `hosts`, and on no others."""
        self._drained = hosts
        self.num_placement_changes += 1
        self._end_holds(lambda one: one.host in hosts)

    def drained(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas on drained hosts, whose leases should move."""
        return tuple(one for one in self._replicas.values() if one.host in self._drained) if self._drained else ()

    def behind(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas that need the fleet's weights before they take traffic."""
        states = (ReplicaState.JOINING, ReplicaState.QUARANTINED)
        return tuple(replica for replica in self._replicas.values() if replica.state in states)

    def is_current(self, replica: ReplicaRecord) -> bool:
        """Return True if the replica is known to have the weights that it should serve."""
        if replica.weight_version is None:
            return False
        return bool(replica.held_by) or replica.weight_version == self._weight_version

    # Holds

    def hold(self, replica: ReplicaRecord, hold_id: str) -> None:
        """Keep a replica at its version until `end_hold`: updates skip it, and it stays in traffic."""
        if (current := self._same(replica)) is not None:
            self._put(replace(current, held_by=hold_id))

    def held(self, hold_id: str = "") -> tuple[ReplicaRecord, ...]:
        """Return the replicas of a hold; without an id those of all holds."""
        if not self.held_versions:
            return ()
        return tuple(one for one in self._replicas.values() if one.held_by and hold_id in ("", one.held_by))

    def end_hold(self, hold_id: str) -> None:
        """End a hold. Replicas with an older version than the fleet's join again. Idempotent."""
        self._end_holds(lambda one: one.held_by == hold_id)

    def _end_holds(self, is_over: Callable[[ReplicaRecord], bool]) -> None:
        for replica in self.held():
            if is_over(replica):
                self._rejoin_if_old(self._put(replace(replica, held_by="")))

    def accepts(self, needs: Needs, replica: ReplicaRecord) -> bool:
        """Return True if the version of a replica in traffic fits the needs."""
        version, demand = replica.weight_version, needs.version
        if version is None or needs.adapter or not self.held_versions:
            return True
        if demand is not None:
            # Other replicas may leave the version at any time.
            is_held = demand.exact_version in self.held_versions
            return demand.accepts(version) and (bool(replica.held_by) or not is_held)
        served = self._weight_version
        if served is None or version == served:
            return True
        newest = max(served, self.coming_version or 0)
        return version < served and newest - version <= needs.max_staleness

    # Capabilities of engines

    def bounded(self, needs: Needs) -> Needs:
        """Return the needs with the context limited to the longest context of the fleet's engines."""
        longest = self._longest_tokens
        return needs if needs.context_tokens <= longest else Needs(needs.features, longest)

    def able(self, needs: Needs) -> frozenset[str]:
        """Return the names of the joined engine pools that meet the needs."""
        bounded = self.bounded(needs)
        return frozenset(name for name, info in self._engines.items() if info.can.suits(bounded))

    def may_serve(self, needs: Needs) -> bool:
        """Return True if an engine pool meets the needs, whether or not it is in traffic.

        True while a pool has not joined yet, because its capabilities are unknown.
        """
        if not self._engines or not self._config.entries <= self._engines.keys():
            return True
        return bool(self.able(needs))

    def check_needs(self, needs: Needs) -> None:
        """Raise UnsupportedParameter, with the field and the engines that support it, unless `may_serve`."""
        if self.may_serve(needs):
            return
        could = {one: self._having(one) for one in features_of(needs.features)}
        refused = next((one for one, names in could.items() if not names), next(iter(could)))
        lines = [f"{param_of(one)} ({one}): {', '.join(names) or 'none'}" for one, names in could.items()]
        if len(could) == 1 and not could[refused]:
            reason = f"no engine of this service supports {param_of(refused)} ({refused}): remove it"
        else:
            reason = f"no engine supports all that the request needs; engines with {'; with '.join(lines)}"
        raise UnsupportedParameter(f"{reason}{hint_of(refused)}", param=param_of(refused))

    def version_of(self, adapter: str) -> int | None:
        """Return the version of new calls with an adapter, or of the base weights for ""."""
        return self.adapters.get(adapter) if adapter else self._weight_version

    def check_weights(self, needs: Needs) -> None:
        """Raise ModelNotFound if the adapter is not served, WeightVersionNotServed if the version does not fit."""
        if needs.adapter and needs.adapter not in self.adapters:
            raise ModelNotFound(
                f"the adapter {shown_id(needs.adapter)!r} is no longer served: push it again", param="model"
            )
        if needs.version is not None and not self.serves(needs.version, needs.adapter):
            needs.version.check(self.version_of(needs.adapter))

    def serves(self, demand: VersionDemand, adapter: str = "") -> bool:
        """Return True unless the served versions are known and not accepted."""
        served = self.version_of(adapter)
        if served is None or demand.accepts(served):
            return True
        return not adapter and any(demand.accepts(version) for version in self.held_versions)

    def _having(self, feature: Feature) -> list[str]:
        return [name or info.name for name, info in self._engines.items() if feature in info.features]

    # Reports from replicas

    def register(self, registration: ReplicaRegistration, now: float) -> ReplicaRecord:
        """Record a replica's registration. A repeated registration of the same process does not join again.

        Another URL, or for a READY or SUSPECT replica another version than recorded, means a new process, which
        joins again.
        """
        known = self._replicas.get(registration.replica_id)
        self._engines[registration.entry] = registration.info
        self._longest_tokens = max(info.max_context_tokens for info in self._engines.values())
        if known is not None and known.url == registration.url:
            known = self._put(replace(known, registration=registration, seen_at=now))
            version = self.held_version(registration, registration.weight_version)
            is_stale = known.state in (ReplicaState.READY, ReplicaState.SUSPECT) and known.weight_version != version
            if known.state is ReplicaState.JOINING or is_stale:
                known = self._put(replace(known, weight_version=version))
                known = self._move(known, ReplicaState.JOINING) if is_stale else known
            self._offer_version(known)
            return known
        self._num_incarnations += 1
        joined = ReplicaRecord(
            registration=registration,
            incarnation=self._num_incarnations,
            state=ReplicaState.JOINING,
            weight_version=self.held_version(registration, registration.weight_version),
            seen_at=now,
            report=ReplicaReport(
                Load(weight_version=registration.weight_version),
                is_usable=registration.weight_version is not None,
                is_paused=registration.is_paused,
                asleep=registration.asleep,
            ),
        )
        self._put(joined)
        self._offer_version(joined)
        return joined

    def held_version(self, registration: ReplicaRegistration, version: int | None) -> int | None:
        """Return the reported version; None if the replica has other content under the fleet's version."""
        is_of_registration = version == registration.weight_version == self._weight_version
        digests = registration.weight_digest, self.weight_digest
        return None if is_of_registration and are_comparable(*digests) and digests[0] != digests[1] else version

    def heartbeat(self, replica_id: str, report: ReplicaReport, now: float, is_paused: bool | None = None) -> bool:
        """Record a replica's report. Returns False if the replica is unknown and must register.

        `is_paused` is the pause that serving replicas were ordered to have; None while an order is being sent.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return False
        # Calls that got an answer clear the failures, but not those of a replica that waits for a probe.
        if report.num_answered > replica.report.num_answered and not replica.needs_probe:
            replica = replace(replica, failed_at=())
        replica = self._put(replace(replica, report=report, seen_at=now))
        version = report.load.weight_version
        if replica.state is ReplicaState.JOINING and report.is_usable and version is not None:
            held = self.held_version(replica.registration, version)
            self._offer_version(self._put(replace(replica, weight_version=held)))
        elif replica.state in (ReplicaState.READY, ReplicaState.SUSPECT):
            self._compare(replica, is_paused)
        return True

    def report_failure(self, replica_id: str, now: float, process_id: str = "", *, is_shared: bool = False) -> None:
        """Count a failed call. A replica with `max_failures` within the window becomes SUSPECT.

        If the replica `is_shared`, the failures must come from at least two processes: one process's network may
        be at fault.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        config = self._config
        recent = [(at, process) for at, process in replica.failed_at if now - at < config.failure_window_s]
        # Keep at most max_failures of one process, so that it does not displace the failures of others.
        own = [one for one in recent if one[1] == process_id][-config.max_failures + 1 :]
        others = [one for one in recent if one[1] != process_id]
        failed_at = (*others, *own, (now, process_id))
        replica = self._put(replace(replica, failed_at=failed_at))
        is_of_one = is_shared and not others
        if replica.state is ReplicaState.READY and len(failed_at) >= config.max_failures and not is_of_one:
            error = f"{config.max_failures} calls without an answer within {config.failure_window_s:g} s"
            # Reports do not end this, because the front end may answer while its engine hangs. Only a probe, which
            # is a short generation, does.
            self._move(replace(replica, needs_probe=True, error=error), ReplicaState.SUSPECT)

    def to_probe(self) -> tuple[ReplicaRecord, ...]:
        """Return the SUSPECT replicas that need an answered probe before they take traffic."""
        return tuple(
            replica
            for replica in self._replicas.values()
            if replica.needs_probe and replica.state is ReplicaState.SUSPECT
        )

    def probe_answered(self, replica: ReplicaRecord) -> None:
        """Record an answered probe: the replica takes traffic if its weights and pause are as ordered.

        It is on probation: one more failure within the window makes it SUSPECT again.
        """
        current = self._same(replica)
        if current is None or not current.needs_probe:
            return
        failed_at = current.failed_at[len(current.failed_at) - self._config.max_failures + 1 :]
        current = self._put(replace(current, needs_probe=False, failed_at=failed_at, error=None))
        if current.state is ReplicaState.SUSPECT:
            self._compare(current)

    def expire(self, now: float) -> tuple[str, ...]:
        """Make silent READY replicas SUSPECT, and later all silent replicas GONE. Returns the ids of the latter.

        An UPDATING replica is exempt: it may be busy, and every step has a deadline.
        """
        dead: list[str] = []
        for replica in self.replicas:
            if replica.state is ReplicaState.UPDATING:
                continue
            silence_s = now - replica.seen_at
            if silence_s >= self._config.dead_after_s:
                self.deregister(replica.replica_id)
                dead.append(replica.replica_id)
            elif silence_s >= self._config.suspect_after_s and replica.state is ReplicaState.READY:
                self._move(replica, ReplicaState.SUSPECT)
        return tuple(dead)

    def deregister(self, replica_id: str) -> bool:
        """Remove a replica. Returns False if it was unknown."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return False
        self._move(replace(replica, held_by=""), ReplicaState.GONE)
        del self._replicas[replica_id]
        self.num_placement_changes += 1
        return True

    # Decisions of updates and orders

    def begin_update(self, replica: ReplicaRecord) -> ReplicaRecord | None:
        """Take a replica out of traffic for an update; None if it is gone or was replaced."""
        current = self._same(replica)
        if current is None or current.state is ReplicaState.UPDATING:
            return current
        return self._move(current, ReplicaState.UPDATING)

    def forget_version(self, replica: ReplicaRecord) -> None:
        """Record the start of a commit: the replica's weights are unknown until it ends."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, weight_version=None))

    def committed(self, replica: ReplicaRecord, version: int) -> None:
        """Record a successful commit."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, weight_version=version))

    def refuse(self, replica: ReplicaRecord, error: str) -> None:
        """Quarantine a replica that refused its new weights. Its version is then None."""
        self.forget_version(replica)
        self.quarantine(replica, error)

    def admit(self, replica: ReplicaRecord) -> bool:
        """Move a replica from UPDATING to READY, or to JOINING if the fleet's version has changed.

        Returns True if its weights are the fleet's; False also if the replica is gone or was replaced.
        """
        current = self._same(replica)
        if current is None or current.state is not ReplicaState.UPDATING:
            return False
        is_current = self.is_current(current)
        current = self._put(replace(current, error=None, num_contradictions=0))
        current = self._move(current, ReplicaState.READY if is_current else ReplicaState.JOINING)
        if is_current and current.needs_probe:
            self._move(current, ReplicaState.SUSPECT)
        return is_current

    def fall_asleep(self, replica: ReplicaRecord) -> None:
        """Move a replica from UPDATING to ASLEEP, after it has released memory."""
        current = self._same(replica)
        if current is not None and current.state is ReplicaState.UPDATING:
            self._move(replace(current, error=None, num_contradictions=0), ReplicaState.ASLEEP)

    def rejoin(self, replica: ReplicaRecord, error: str) -> None:
        """Move a replica to JOINING: it failed to follow an order, but its version is known."""
        current = self._same(replica)
        if current is None:
            return
        current = self._put(replace(current, error=error))
        if current.state not in (ReplicaState.JOINING, ReplicaState.QUARANTINED):
            self._move(current, ReplicaState.JOINING)

    def note(self, replica: ReplicaRecord, error: str) -> None:
        """Record the reason why a replica takes no traffic, without a change of its state."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, error=error))

    def note_adapter(self, replica: ReplicaRecord, name: str, *, is_held: bool) -> None:
        """Record whether a replica holds a served adapter.

        It gets no calls of an adapter that it does not hold.
        """
        current = self._same(replica)
        if current is not None and (name in current.lacks) == is_held:
            self._put(replace(current, lacks=current.lacks ^ {name}))

    def mark_resuming(self, replica: ReplicaRecord, is_resuming: bool) -> None:
        """Keep a replica out of traffic, or end this, without a change of its state."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, is_resuming=is_resuming))

    def put_back(self, replica: ReplicaRecord) -> None:
        """Move an UPDATING replica back to the state of `replica`, because its weights did not change."""
        current = self._same(replica)
        if current is not None and current.state is ReplicaState.UPDATING:
            self._move(current, replica.state)

    def quarantine(self, replica: ReplicaRecord, error: str) -> None:
        """Keep a replica out of traffic and frozen until a commit of the fleet's version succeeds on it."""
        current = self._same(replica)
        if current is None:
            return
        current = self._put(replace(current, error=error))
        if current.state is not ReplicaState.QUARANTINED:
            self._move(current, ReplicaState.QUARANTINED)

    def set_weight_version(self, version: int, digest: str = "") -> None:
        """Set the fleet's version, after an update or a restart.

        READY replicas with another version join again.
        """
        self._is_version_pinned = True
        self._serve(version, digest)

    def pin_version(self) -> None:
        """Keep the current version until an update changes it.

        Registrations no longer set it: a failed update may complete later on one replica, which then reports its
        version.
        """
        self._is_version_pinned = True

    def withhold_version(self) -> None:
        """Serve no version until `set_weight_version` or `stay_at`, because the replicas' version is unknown."""
        self._is_version_pinned = True
        self._weight_version = None
        self.num_placement_changes += 1

    def stay_at(self, version: int | None, digest: str = "") -> None:
        """Serve `version` of the last update again. With None the newest version of the replicas is served."""
        if version is not None:
            self.set_weight_version(version, digest)
            return
        self._is_version_pinned = False
        for replica in self.replicas:
            self._offer_version(replica)

    def _takes_traffic(self, replica: ReplicaRecord) -> bool:
        is_free = not replica.is_resuming and not (self._drained and replica.host in self._drained)
        return replica.state is ReplicaState.READY and self.is_current(replica) and is_free

    def _offer_version(self, replica: ReplicaRecord) -> None:
        """Serve the replica's version if it is newer, until an update pins the version."""
        version, registration = replica.weight_version, replica.registration
        if version is None:
            return
        digest = registration.weight_digest if registration.weight_version == version else ""
        if not self._is_version_pinned and (self._weight_version is None or version > self._weight_version):
            self._serve(version, digest)
        elif version == self._weight_version and not self.weight_digest:
            self.weight_digest = digest  # the first replica that reports a digest sets it

    def _serve(self, version: int, digest: str) -> None:
        self._weight_version, self.weight_digest = version, digest
        self.num_placement_changes += 1
        for replica in self.replicas:
            self._rejoin_if_old(replica)

    def _rejoin_if_old(self, replica: ReplicaRecord) -> None:
        if replica.state is ReplicaState.READY and not self.is_current(replica):
            self._move(replica, ReplicaState.JOINING)

    def _compare(self, replica: ReplicaRecord, is_paused: bool | None = None) -> None:
        """Compare the report of a READY or SUSPECT replica with its record and its orders."""
        report = replica.report
        reported, is_usable = report.load.weight_version, report.is_usable
        is_known, is_as_ordered = reported in (None, replica.weight_version), is_paused in (None, report.is_paused)
        if is_usable and is_known and is_as_ordered:
            replica = self._put(replace(replica, num_contradictions=0))
            if replica.state is ReplicaState.SUSPECT and not replica.needs_probe:
                is_current = self.is_current(replica)
                self._move(replica, ReplicaState.READY if is_current else ReplicaState.JOINING)
            return
        replica = self._put(replace(replica, num_contradictions=replica.num_contradictions + 1))
        if replica.num_contradictions < self._config.max_contradictions:
            return
        if is_usable and is_known:
            self.rejoin(
                replica, f"its engine {'is' if report.is_paused else 'is not'} paused, contrary to its orders"
            )
        elif is_usable:
            held = self.held_version(replica.registration, reported)
            joining = self._move(self._put(replace(replica, weight_version=held)), ReplicaState.JOINING)
            self._offer_version(joining)
        else:
            self.quarantine(replica, "its engine reports that it is not usable")

    def _same(self, replica: ReplicaRecord) -> ReplicaRecord | None:
        current = self._replicas.get(replica.replica_id)
        return current if current is not None and current.incarnation == replica.incarnation else None

    def _move(self, replica: ReplicaRecord, state: ReplicaState) -> ReplicaRecord:
        if state not in MOVES[replica.state]:
            raise InvariantBroken(f"replica {replica.replica_id} cannot change from {replica.state} to {state}")
        return self._put(replace(replica, state=state))

    def _put(self, replica: ReplicaRecord) -> ReplicaRecord:
        known = self._replicas.get(replica.replica_id)
        is_changed = known is not None and known.weight_version != replica.weight_version
        if replica.held_by and (is_changed or replica.state is ReplicaState.QUARANTINED):
            replica = replace(replica, held_by="")
        if known is None or _placing_facts(known) != _placing_facts(replica):
            self.num_placement_changes += 1
        self._replicas[replica.replica_id] = replica
        if replica.held_by or (known is not None and known.held_by):
            held = (one.weight_version for one in self._replicas.values() if one.held_by)
            self.held_versions = frozenset(version for version in held if version is not None)
        return replica


def _placing_facts(replica: ReplicaRecord) -> tuple[object, ...]:
    """Return the facts of a replica that decide whether it takes traffic, and which."""
    weights = replica.weight_version, replica.held_by, replica.lacks
    return replica.state, replica.registration, replica.is_resuming, *weights
