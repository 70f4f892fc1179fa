"""The fleet's registry: the replicas, the state of each, and which of them take traffic.

    JOINING ─► UPDATING ◄─► READY ◄─► SUSPECT        any ─► GONE
               ▲   ▲ └────► QUARANTINED ◄── READY, SUSPECT
               ▼   └─────────────┘
             ASLEEP

Ownership: one object, in the coordinator's event loop, without awaits; time is passed in. Invariants:
- only a READY replica that holds exactly the fleet's weight version takes traffic;
- READY is reached through UPDATING (its weights were looked at), or back from a SUSPECT whose weights still fit;
- a QUARANTINED replica leaves that state only through UPDATING and a finished commit of the fleet's version;
- an ASLEEP replica has given memory back: it keeps its leases, takes no traffic, and what it says of its weights
  counts for nothing until it has been woken;
- until the first update begins to switch, the newest version that a replica brought along is the fleet's; not while
  an interrupted update is unresolved.

SUSPECT has two reasons, and each its own way back:
- silence: `suspect_after_s` without a report. The next report ends it, and `dead_after_s` of silence make it GONE.
- failures: `max_failures` calls without an answer, told by their callers, within `failure_window_s` of the
  coordinator's clock. Reports do not end it (a front end may live beside an engine that hangs): only a probe
  does, a generation that the coordinator asks for every few seconds (`probe_answered`). The replica then takes
  traffic on probation: the next failure makes it SUSPECT again. Generations that callers got (`num_answered`) end
  the probation and clear the failures of a READY replica; nothing else does.
An engine that hangs is ended by its own replica, whose process Serve starts again.

A `ReplicaRecord` is a snapshot. A caller that acts on one over several awaits hands it back; if the replica's
process was replaced in between (another `incarnation`), the verb does nothing and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
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


class ReplicaState(StrEnum):
    """The states of a replica."""

    JOINING = "joining"  # known, but not yet at the fleet's weights
    READY = "ready"  # takes traffic
    UPDATING = "updating"  # a weight update or a catch-up has it; takes no new traffic
    SUSPECT = "suspect"  # silent, or calls fail: keeps its leases, gets no new ones
    ASLEEP = "asleep"  # has given memory back: keeps its leases, gets no new ones
    QUARANTINED = "quarantined"  # its weights are of unknown state, or older than the fleet's
    GONE = "gone"  # left or dead; forgotten


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
    """Bounds on silence and failures."""

    suspect_after_s: float = 5.0
    dead_after_s: float = 30.0  # an engine that compiles or loads may hold up its own heartbeats
    max_failures: int = 3  # failed calls within the window that make a replica SUSPECT
    failure_window_s: float = 600.0  # longer than a few turns: a hung replica fails each after its whole deadline
    max_contradictions: int = 2  # reports in a row that contradict us; one may have crossed an update on its way
    entries: frozenset[str] = frozenset()  # the kinds of replicas that the service has; empty: those that join


@dataclass(frozen=True, slots=True)
class ReplicaRecord:
    """A replica at one moment. `weight_version` None: dummy weights, or of unknown state."""

    registration: ReplicaRegistration
    incarnation: int
    state: ReplicaState
    weight_version: int | None
    seen_at: float
    report: ReplicaReport  # its last one
    error: str | None = None  # the last thing that went wrong, which keeps it out of traffic
    failed_at: tuple[tuple[float, str], ...] = ()  # times and processes of the latest calls without an answer
    needs_probe: bool = False  # it takes no traffic before it has answered a probe
    num_contradictions: int = 0
    is_held: bool = False  # it takes no traffic before the resume under way has ended
    lacks: frozenset[str] = frozenset()  # adapters by name that are served, and that it could not read

    @property
    def replica_id(self) -> str:
        return self.registration.replica_id

    @property
    def url(self) -> str:
        return self.registration.url

    @property
    def host(self) -> str:
        """The address of its host."""
        return urlsplit(self.url).hostname or ""

    @property
    def capacity_tokens(self) -> int:
        """The KV tokens that it can hold; 1 if the engine tells none, so that equal engines compare equally."""
        return max(1, self.registration.info.kv_capacity_tokens)


class Fleet:
    """The registry of all replicas, with their state machine."""

    def __init__(self, config: FleetConfig | None = None) -> None:
        self._config = config or FleetConfig()
        self._replicas: dict[str, ReplicaRecord] = {}
        self._num_incarnations = 0
        self._weight_version: int | None = None
        self.weight_digest = ""  # of the weights of that version; empty: not known
        self._is_version_pinned = False  # by an update: registrations do not set it
        self._engines: dict[str, EngineInfo] = {}  # of each entry, the engine that joined last
        self._longest_tokens = 0  # of their contexts
        self._drained: frozenset[str] = frozenset()
        self.adapters: Mapping[str, int] = {}  # the versions of those that are served by name
        self.num_placement_changes = 0  # grows with every change that `placeable` may show

    @property
    def weight_version(self) -> int | None:
        """The version that traffic is served under; None while no replica has weights, or it is not known."""
        return self._weight_version

    @property
    def replicas(self) -> tuple[ReplicaRecord, ...]:
        """All replicas, in order of arrival."""
        return tuple(self._replicas.values())

    def get(self, replica_id: str) -> ReplicaRecord | None:
        return self._replicas.get(replica_id)

    def placeable(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas that take new traffic now."""
        return tuple(replica for replica in self._replicas.values() if self._takes_traffic(replica))

    def drain(self, hosts: frozenset[str]) -> None:
        """Have the replicas of these hosts take no new traffic, and of no others."""
        self._drained = hosts
        self.num_placement_changes += 1

    def drained(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas whose holders are to go elsewhere."""
        return tuple(one for one in self._replicas.values() if one.host in self._drained) if self._drained else ()

    def behind(self) -> tuple[ReplicaRecord, ...]:
        """Return the replicas that have to be brought to the fleet's weights before they take traffic."""
        states = (ReplicaState.JOINING, ReplicaState.QUARANTINED)
        return tuple(replica for replica in self._replicas.values() if replica.state in states)

    def is_current(self, replica: ReplicaRecord) -> bool:
        """Tell if the replica is known to hold the fleet's weights."""
        return replica.weight_version is not None and replica.weight_version == self._weight_version

    # --- what engines can do ---

    def bounded(self, needs: Needs) -> Needs:
        """Cut the needed context to the longest of the fleet's engines."""
        longest = self._longest_tokens
        return needs if needs.context_tokens <= longest else Needs(needs.features, longest)

    def able(self, needs: Needs) -> frozenset[str]:
        """Return the kinds of replicas that meet these needs, of those that have joined once."""
        bounded = self.bounded(needs)
        return frozenset(name for name, info in self._engines.items() if info.can.suits(bounded))

    def may_serve(self, needs: Needs) -> bool:
        """Tell if an engine of the service meets these needs, in traffic or not. True while a kind of replicas has
        not joined yet: its abilities are unknown."""
        if not self._engines or not self._config.entries <= self._engines.keys():
            return True
        return bool(self.able(needs))

    def check_needs(self, needs: Needs) -> None:
        """Raise UnsupportedParameter unless `may_serve`; it names the field, and the engines that could."""
        if self.may_serve(needs):
            return
        could = {one: self._having(one) for one in features_of(needs.features)}
        refused = next((one for one, names in could.items() if not names), next(iter(could)))
        lines = [f"{param_of(one)} ({one}): {', '.join(names) or 'none'}" for one, names in could.items()]
        reason = "no engine of this service can do this" if len(could) == 1 else "no engine can do all of this"
        raise UnsupportedParameter(
            f"{reason}; engines that could are, for {'; for '.join(lines)}{hint_of(refused)}",
            param=param_of(refused),
        )

    def version_of(self, adapter: str) -> int | None:
        """Return the version that calls under an adapter, or with "" under the base weights, begin with."""
        return self.adapters.get(adapter) if adapter else self._weight_version

    def check_weights(self, needs: Needs) -> None:
        """Raise ModelNotFound for an adapter that is not served, WeightVersionNotServed for another version."""
        if needs.adapter and needs.adapter not in self.adapters:
            raise ModelNotFound(f"the adapter {shown_id(needs.adapter)!r} is not served any more", param="model")
        if needs.version is not None:
            needs.version.check(self.version_of(needs.adapter))

    def _having(self, feature: Feature) -> list[str]:
        return [name or info.name for name, info in self._engines.items() if feature in info.features]

    # --- what replicas say ---

    def register(self, registration: ReplicaRegistration, now: float) -> ReplicaRecord:
        """Record a replica's registration. A repeated one changes no state. Another url, or another version than is
        known of a READY replica, means a new process, which joins anew."""
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
        """Return the version that a replica reports; None if it holds other bytes under the fleet's version."""
        is_of_registration = version == registration.weight_version == self._weight_version
        digests = registration.weight_digest, self.weight_digest
        return None if is_of_registration and are_comparable(*digests) and digests[0] != digests[1] else version

    def heartbeat(self, replica_id: str, report: ReplicaReport, now: float, is_paused: bool | None = None) -> bool:
        """Record a replica's report. False: the replica is unknown and has to register.

        `is_paused`: the pause that serving replicas were ordered to; None while an order is on its way.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return False
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
        """Count a call without an answer. `max_failures` within the window make a replica SUSPECT.

        If the replica `is_shared`, they must come from two processes or more: one process's link may be at fault.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        config = self._config
        recent = [(at, process) for at, process in replica.failed_at if now - at < config.failure_window_s]
        # Of one process no more than make the replica suspect, so that another's are not pushed out.
        own = [one for one in recent if one[1] == process_id][-config.max_failures + 1 :]
        others = [one for one in recent if one[1] != process_id]
        failed_at = (*others, *own, (now, process_id))
        replica = self._put(replace(replica, failed_at=failed_at))
        is_of_one = is_shared and not others
        if replica.state is ReplicaState.READY and len(failed_at) >= config.max_failures and not is_of_one:
            error = f"{config.max_failures} calls without an answer within {config.failure_window_s:g} s"
            self._move(replace(replica, needs_probe=True, error=error), ReplicaState.SUSPECT)

    def to_probe(self) -> tuple[ReplicaRecord, ...]:
        """Return the SUSPECT replicas that take traffic again only after an answered probe."""
        return tuple(
            replica
            for replica in self._replicas.values()
            if replica.needs_probe and replica.state is ReplicaState.SUSPECT
        )

    def probe_answered(self, replica: ReplicaRecord) -> None:
        """Record that a suspect answered its probe: it takes traffic if weights and orders fit.

        One more failure within the window makes it suspect again.
        """
        current = self._same(replica)
        if current is None or not current.needs_probe:
            return
        failed_at = current.failed_at[len(current.failed_at) - self._config.max_failures + 1 :]
        current = self._put(replace(current, needs_probe=False, failed_at=failed_at, error=None))
        if current.state is ReplicaState.SUSPECT:
            self._compare(current)

    def expire(self, now: float) -> tuple[str, ...]:
        """Make silent READY replicas SUSPECT, and later all silent ones GONE. Returns the ids of these.

        An UPDATING replica is exempt: it is busy, and every step on it has a deadline.
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
        """Remove a replica. False: it was unknown."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return False
        self._move(replica, ReplicaState.GONE)
        del self._replicas[replica_id]
        self.num_placement_changes += 1
        return True

    # --- decisions of updates and of the fleet's orders ---

    def begin_update(self, replica: ReplicaRecord) -> ReplicaRecord | None:
        """Take a replica out of traffic for an update; None if it is gone or was replaced."""
        current = self._same(replica)
        if current is None or current.state is ReplicaState.UPDATING:
            return current
        return self._move(current, ReplicaState.UPDATING)

    def forget_version(self, replica: ReplicaRecord) -> None:
        """Record the begin of a commit: until it has finished, the replica's weights are unknown."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, weight_version=None))

    def committed(self, replica: ReplicaRecord, version: int) -> None:
        """Record a commit that has finished on a replica."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, weight_version=version))

    def refuse(self, replica: ReplicaRecord, error: str) -> None:
        """Quarantine a replica that refuses its new weights: their version counts as unknown."""
        self.forget_version(replica)
        self.quarantine(replica, error)

    def admit(self, replica: ReplicaRecord) -> bool:
        """Move a replica from UPDATING to READY, or to JOINING if the fleet serves another version by now.

        True if its weights are the fleet's; False also if it is gone or was replaced.
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
        """Move a replica from UPDATING to ASLEEP: it has given memory back."""
        current = self._same(replica)
        if current is not None and current.state is ReplicaState.UPDATING:
            self._move(replace(current, error=None, num_contradictions=0), ReplicaState.ASLEEP)

    def rejoin(self, replica: ReplicaRecord, error: str) -> None:
        """Make a replica JOINING again: it failed to follow an order, but the version of its weights is known."""
        current = self._same(replica)
        if current is None:
            return
        current = self._put(replace(current, error=error))
        if current.state not in (ReplicaState.JOINING, ReplicaState.QUARANTINED):
            self._move(current, ReplicaState.JOINING)

    def note(self, replica: ReplicaRecord, error: str) -> None:
        """Set the reason why a replica takes no traffic; its state stays."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, error=error))

    def note_adapter(self, replica: ReplicaRecord, name: str, *, is_held: bool) -> None:
        """Record whether a replica holds an adapter that is served: it gets no calls under those it lacks."""
        current = self._same(replica)
        if current is not None and (name in current.lacks) == is_held:
            self._put(replace(current, lacks=current.lacks ^ {name}))

    def hold(self, replica: ReplicaRecord, is_held: bool) -> None:
        """Keep a replica out of traffic, or end that, without a change of its state."""
        current = self._same(replica)
        if current is not None:
            self._put(replace(current, is_held=is_held))

    def put_back(self, replica: ReplicaRecord) -> None:
        """Give an UPDATING replica the state of `replica` back: its weights were not touched."""
        current = self._same(replica)
        if current is not None and current.state is ReplicaState.UPDATING:
            self._move(current, replica.state)

    def quarantine(self, replica: ReplicaRecord, error: str) -> None:
        """Bar a replica from traffic and resumes until a commit of the fleet's version has finished on it."""
        current = self._same(replica)
        if current is None:
            return
        current = self._put(replace(current, error=error))
        if current.state is not ReplicaState.QUARANTINED:
            self._move(current, ReplicaState.QUARANTINED)

    def set_weight_version(self, version: int, digest: str = "") -> None:
        """Serve `version` after an update, or after a restart. READY replicas of another version join again."""
        self._is_version_pinned = True
        self._serve(version, digest)

    def pin_version(self) -> None:
        """Serve the present version, or none, until an update brings another. Registrations no longer set it: a
        failed update may still end on a replica, which then brings its version."""
        self._is_version_pinned = True

    def withhold_version(self) -> None:
        """Serve no version until `set_weight_version` or `stay_at`: it is not known which one is held."""
        self._is_version_pinned = True
        self._weight_version = None
        self.num_placement_changes += 1

    def stay_at(self, version: int | None, digest: str = "") -> None:
        """Serve `version` again, that of the last update; None: the newest version of the replicas' own."""
        if version is not None:
            self.set_weight_version(version, digest)
            return
        self._is_version_pinned = False
        for replica in self.replicas:
            self._offer_version(replica)

    # --- inside ---

    def _takes_traffic(self, replica: ReplicaRecord) -> bool:
        is_free = not replica.is_held and not (self._drained and replica.host in self._drained)
        return replica.state is ReplicaState.READY and self.is_current(replica) and is_free

    def _offer_version(self, replica: ReplicaRecord) -> None:
        """Serve the version of a replica if it is newer, until an update pins one."""
        version, registration = replica.weight_version, replica.registration
        if version is None:
            return
        digest = registration.weight_digest if registration.weight_version == version else ""
        if not self._is_version_pinned and (self._weight_version is None or version > self._weight_version):
            self._serve(version, digest)
        elif version == self._weight_version and not self.weight_digest:
            self.weight_digest = digest  # the first replica that reports one decides

    def _serve(self, version: int, digest: str) -> None:
        self._weight_version, self.weight_digest = version, digest
        self.num_placement_changes += 1
        for replica in self.replicas:
            if replica.state is ReplicaState.READY and replica.weight_version != version:
                self._move(replica, ReplicaState.JOINING)

    def _compare(self, replica: ReplicaRecord, is_paused: bool | None = None) -> None:
        """Compare the report of a READY or SUSPECT replica with what we know of it, and with what was ordered."""
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
            self.rejoin(replica, f"its engine {'is' if report.is_paused else 'is not'} paused, against its orders")
        elif is_usable:
            held = self.held_version(replica.registration, reported)
            joining = self._move(self._put(replace(replica, weight_version=held)), ReplicaState.JOINING)
            self._offer_version(joining)
        else:
            self.quarantine(replica, "its engine says that it is not usable")

    def _same(self, replica: ReplicaRecord) -> ReplicaRecord | None:
        current = self._replicas.get(replica.replica_id)
        return current if current is not None and current.incarnation == replica.incarnation else None

    def _move(self, replica: ReplicaRecord, state: ReplicaState) -> ReplicaRecord:
        if state not in MOVES[replica.state]:
            raise InvariantBroken(f"replica {replica.replica_id} cannot go from {replica.state} to {state}")
        return self._put(replace(replica, state=state))

    def _put(self, replica: ReplicaRecord) -> ReplicaRecord:
        known = self._replicas.get(replica.replica_id)
        if known is None or (
            (known.state, known.weight_version, known.registration, known.is_held, known.lacks)
            != (replica.state, replica.weight_version, replica.registration, replica.is_held, replica.lacks)
        ):
            self.num_placement_changes += 1
        self._replicas[replica.replica_id] = replica
        return replica
