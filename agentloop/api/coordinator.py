"""The coordinator's ports, one for each kind of caller, and the values that its calls carry.

Every call is idempotent or keyed, so a caller may repeat one whose answer was lost. `agentloop_servers.coordinator`
implements them: its `server.py` has the table of ports and classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias
from zlib import crc32

import msgspec

from agentloop.api.annotations import AnnotatedRecord, SampleAnnotation
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.facts import FactsPage, FactsQuery
from agentloop.api.flight import Flight, FlightPage
from agentloop.api.history import HistoryPage
from agentloop.api.owners import UsersNews, UserUsage, is_seen, shown_id
from agentloop.engine.interface import (
    EngineInfo,
    GroupInit,
    HeldIn,
    MemoryTag,
    PullVersion,
    TransferPart,
    WeightUpdate,
)
from agentloop.errors import AgentLoopError, InvalidRequest, from_wire
from agentloop.images import Image
from agentloop.observability.metrics import MetricsPage, MetricsReport
from agentloop.types import Assignment, KVPolicy, Lease, Load, PauseMode, RolloutGroup, Trajectory
from agentloop.values.capabilities import NO_NEEDS, Feature, Needs
from agentloop.values.codec import decode, encode

MAX_CALL_BYTES = 256 * 2**20
"""Bytes of one call: of a submission, or of records."""

MAX_RECORD_BYTES = MAX_CALL_BYTES - 2**16
"""Bytes of a record, which its call carries beside its header and the name of its worker."""

MAX_HAND_IN = 64
"""Records handed in by one call."""


PREFIX_LENGTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
"""The lengths, in tokens, at which the beginning of a prompt has a key."""

Prefix: TypeAlias = tuple[str, int]
"""A key, and the number of tokens with which all prompts of this key begin."""


def prefixes_of(token_ids: Sequence[int]) -> tuple[Prefix, ...]:
    """Return keys that prompts with equal beginnings share, the longest first."""
    found: list[Prefix] = []
    begin = checksum = 0
    for end in PREFIX_LENGTHS:
        if end > len(token_ids):
            break
        checksum = crc32(array("i", token_ids[begin:end]), checksum)
        found.append((f"ids-{checksum:x}", end))
        begin = end
    return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """The introduction of a replica. `url` is its private data-plane port."""

    replica_id: str
    url: str
    info: EngineInfo
    weight_version: int | None  # None: dummy weights, no traffic until its first commit
    is_paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    entry: str = ""  # the name of its kind of replicas in the service's config
    node_id: str = ""  # Ray's, of its host
    weight_digest: str = ""  # of the weights of that version; empty: not known


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The state of a replica's engine at one moment."""

    load: Load
    is_usable: bool
    is_paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    num_answered: int = 0  # generations that its callers got, since its start
    is_noise: bool = False  # sampled logprobs stay at -ln(vocabulary)
    num_refused: int = 0  # calls to its port, and connections


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The state of a worker at one moment. `running` tells a restarted coordinator what is in flight."""

    worker_id: str
    num_free: int
    running: tuple[str, ...]  # assignment ids
    num_sampled: tuple[int, ...] = ()  # the tokens that it has of each; empty: it does not say
    host: str = ""  # its address
    flights: tuple[Flight, ...] = ()  # of each that is running, once a second; empty: as before


@dataclass(frozen=True, slots=True)
class Orders:
    """The coordinator's orders to a worker: assignments to start, and those to cancel."""

    start: tuple[Assignment, ...] = ()
    cancel: tuple[str, ...] = ()  # assignment ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error, as its answer's body and status, that one of the records of a call met."""

    error: dict[str, Any]
    http_status: int

    @classmethod
    def of(cls, error: AgentLoopError) -> Refusal:
        """Return an error as a call's answer carries it."""
        return cls(error.to_wire(), error.http_status)

    def raised(self) -> AgentLoopError:
        """Return the error."""
        return from_wire(self.error, self.http_status)


@dataclass(frozen=True, slots=True)
class JournalPart:
    """Frames of a turn journal (`rollout/turn_journal.py`) that follow `number` earlier parts of its run's."""

    assignment_id: str
    run: str
    number: int
    frames: bytes


class TurnBegun(msgspec.Struct, frozen=True, tag=True):
    """The news that a holder begins a turn: its first, or one after its tools."""

    lease_id: str


class TurnEnded(msgspec.Struct, frozen=True, tag=True):
    """The news that a holder's turn has ended. A turn that failed has no tokens."""

    lease_id: str
    num_context_tokens: int  # of the prompt and the sampled ones
    num_sampled_tokens: int
    num_cached_tokens: int | None  # of the prompt, as the engine said; None: it did not come to that
    num_known_tokens: int = 0  # length of the earlier context that the prompt extends; 0: it extends none


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a process holds, and facts of its holder."""

    lease: Lease
    holder_id: str  # an assignment's id, or `session_holder`
    group_id: str  # siblings have one in common; empty: it has none
    num_context_tokens: int  # of the last turn
    prefixes: tuple[Prefix, ...] = ()  # a session's prompt has these, the longest first


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """The news of a process's leases since its last report, and its sign of life.

    A process sends one report at a time, and repeats it until it is answered; `sequence` grows by one with each new
    report. A report that was seen already is a repeat or a late copy, and a gap means that news are missing. Of one
    report, `leases` count first, then `taken`, `turns` and `released`.
    """

    process_id: str  # of one life of a process: it is never used again
    sequence: int
    turns: tuple[TurnBegun | TurnEnded, ...] = ()  # in their order
    taken: tuple[str, ...] = ()  # ids of leases that it got
    released: tuple[str, ...] = ()  # ids of leases that it needs no more
    leases: tuple[HeldLease, ...] | None = None  # all that it holds; None: as the reports so far say


@dataclass(frozen=True, slots=True)
class LeaseOrders:
    """Orders to a process that holds leases. They are repeated until it has obeyed."""

    moves: tuple[tuple[str, Lease | None], ...] = ()
    """Leases by id, and what takes their place from the next turn on. None: ask before it, by a `move` without a
    failure, and wait if there is no room."""

    send_all: bool = False  # the next report brings `leases`


@dataclass(frozen=True, slots=True)
class RolloutTerms:
    """The owner of a rollout, and its turn among others.

    Everything of a higher priority goes out before anything lower. Within one, runs share by weight: all that an
    owner submits under one `run_id` on equal terms keeps its order and counts together, also for `max_running`. All
    that an owner submits without a `run_id` is one run too, but each such submit has a `max_running` or a staleness
    limit for itself.
    """

    owner: str = ""  # the user that submitted it; empty where no key is asked for
    priority: int = 0
    share: float = 1.0
    max_running: int | None = None  # live trajectories at a time; None: as many as there are places
    run_id: str = ""
    adapter: str = ""  # that samples it, and by whose versions it lives; empty: the base weights
    traceparent: str = field(default="", compare=False)  # the W3C trace context of the submit of one trajectory
    trace_link: str = field(default="", compare=False)  # that of one of several
    groups_digest: str = ""  # of the work that it was accepted with; the coordinator's own, as is what follows
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The counts of one rollout, in trajectories. `num_finished` counts terminal records of every kind."""

    rollout_id: str
    num_accepted: int
    num_finished: int
    num_running: int
    num_queued: int
    num_held: int = 0  # queued samples that wait for a version, an adapter, or their run's staleness limit
    owner: str = ""  # as in its terms
    priority: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_finished >= self.num_accepted


@dataclass(frozen=True, slots=True)
class Page:
    """Finished trajectories in commit order, after a cursor; `cursor` continues from here."""

    trajectories: tuple[Trajectory, ...]
    cursor: int
    status: RolloutStatus


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A Page with its records as they are stored. It is encoded as a Page is, so nothing decodes it on its way."""

    trajectories: tuple[msgspec.Raw, ...]
    cursor: int
    status: RolloutStatus

    def decoded(self) -> Page:
        """Return the page with its records. Raises InvalidRequest if one cannot be read."""
        return decode(encode(self), Page)


@dataclass(frozen=True, slots=True)
class ReplicaUpdate:
    """The outcome of one update for one replica. `error` is set if it did not come through."""

    replica_id: str
    stage_ms: float
    stall_ms: float  # from the pause call until sampling went on
    error: str | None = None
    held_in: HeldIn | None = None  # where the weights waited for the commit; NOWHERE: one phase
    transport: str | None = None
    num_bytes: int = 0  # that arrived at each of its workers
    transfer_ms: float = 0.0  # first byte to last
    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0  # tensors or layers that were compared with what was sent
    look_ms: float = 0.0  # after the stall: tokens were sampled, and held back until the weights were looked at
    paused_at_ms: float = 0.0  # since the update began: the stall's begin


@dataclass(frozen=True, slots=True)
class AdapterPush:
    """A version of an adapter to come. `version` None: the next one of its name."""

    name: str  # as `NamedAdapter` has it
    directory: str
    version: int | None = None
    is_forced: bool = False  # the version need not grow


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that the fleet serves by name."""

    name: str  # behind its owner's; that of all users stands alone
    version: int
    directory: str  # that replicas read which join
    pushed_at: float  # seconds since 1970
    digest: str = ""  # of its files, as the replicas have read them; empty: not known


def seen_adapters(served: Iterable[NamedAdapter], user_names: Sequence[str] | None) -> tuple[NamedAdapter, ...]:
    """Return the adapters that a user sees, by its own names for them; None: all, by their whole names."""
    if user_names is None:
        return tuple(served)
    return tuple(replace(one, name=shown_id(one.name)) for one in served if is_seen(one.name, user_names))


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of a weight update; raised as WeightUpdateFailed instead if no replica took it.

    With an `adapter` the versions are those of its name, which was loaded beside what is served.
    """

    version: int
    previous_version: int | None
    kv_policy: KVPolicy
    replicas: tuple[ReplicaUpdate, ...]  # without times, if its coordinator died before its end
    total_ms: float
    began_at: float = 0.0  # seconds since 1970; 0: not known
    adapter: str = ""

    @property
    def stall_ms(self) -> float:
        """The longest stall of any replica."""
        return max((replica.stall_ms for replica in self.replicas), default=0.0)

    @property
    def transfer_ms(self) -> float:
        """The longest transfer to any replica."""
        return max((replica.transfer_ms for replica in self.replicas), default=0.0)


def seen_reports(reports: Iterable[UpdateReport], user_names: Sequence[str] | None) -> tuple[UpdateReport, ...]:
    """Return the reports of updates that a user sees, of adapters by its own names for them; None: all."""
    if user_names is None:
        return tuple(reports)
    return tuple(replace(one, adapter=shown_id(one.adapter)) for one in reports if is_seen(one.adapter, user_names))


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """The weight update under way."""

    version: int
    state: str  # "staging", "switching"
    num_receivers: int  # workers that may still come through, of replicas that it waits for
    failures: tuple[str, ...] = ()  # a line for each replica that has failed
    waits_for: tuple[str, ...] = ()  # the replicas of these workers
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One line of the fleet table."""

    replica_id: str
    state: str
    engine: str
    weight_version: int | None
    load: Load
    num_leases: int
    heartbeat_age_s: float
    num_workers: int = 1
    weight_dtype: str | None = None
    error: str | None = None  # why it takes no traffic
    is_paused: bool = False  # by its last report, as the following
    asleep: tuple[MemoryTag, ...] = ()
    kv_predicted_tokens: int = 0  # that those with leases hold, and will grow by in their next turns
    kv_limit_tokens: int = 0  # up to which trajectories begin
    kv_hit_rate: float | None = None  # of the context of turns that returned: the share found cached, lately
    is_thrashing: bool = False  # turns that return compute most of their contexts again
    entry: str = ""  # its kind of replicas in the config
    features: tuple[Feature, ...] = ()  # what requests may ask of it
    max_context_tokens: int = 0
    lora_rank: int | None = None  # the largest of an adapter; None: it serves none
    max_loras: int | None = None  # adapters that it serves by name; None: none
    is_noise: bool = False  # sampled logprobs stay at -ln(vocabulary)
    host: str = ""  # the address of its private port: its node's, on several hosts
    quantization: str = ""  # of its weights; empty: none


@dataclass(frozen=True, slots=True)
class StartingReplica:
    """A replica that has not joined yet. `reason` says what holds it back; empty: it loads."""

    replica_id: str
    waiting_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A replica that left the fleet, and the reason."""

    replica_id: str
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The samples and calls that have not begun, and the room for them."""

    num_queued: int  # samples
    num_waiting: int  # sessions and direct calls that have no lease yet
    kv_predicted_tokens: int  # over the replicas that take traffic
    kv_limit_tokens: int
    reason: str = ""  # why nothing begins; empty: it does, or nothing waits
    longest_wait_s: float = 0.0  # since the first request of the call that has waited longest
    median_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store of versions that the service follows: its pointer, and what became of the last look at it."""

    latest: int | None = None  # None: not read yet
    state: str = "idle"  # "updating", "asleep" (the fleet is), "failed"
    error: str = ""


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The service at one moment."""

    is_ready: bool  # at least one replica takes traffic
    is_paused: bool
    weight_version: int | None
    replicas: tuple[ReplicaStatus, ...]
    num_workers: int
    rollouts: tuple[RolloutStatus, ...]
    updates: tuple[UpdateReport, ...]  # the latest, oldest first; bounded
    asleep: tuple[MemoryTag, ...] = ()  # the memory that the fleet has given back
    paused_s: float | None = None  # how long the operator's pause holds; None: there is none
    pause_reason: str = ""
    asleep_s: float | None = None
    sleep_reason: str = ""
    starting: tuple[StartingReplica, ...] = ()
    lost: tuple[LostReplica, ...] = ()  # the latest, oldest first; bounded
    degraded: tuple[str, ...] = ()  # why the service does not all that it could: a sentence each, by `findings`
    update: UpdateProgress | None = None  # the one under way
    groups: tuple[str, ...] = ()  # trainers' broadcast groups
    transfer: str = ""  # the group whose transfer is open
    queue: QueueStatus = QueueStatus(0, 0, 0, 0)
    users: tuple[UserUsage, ...] = ()
    public_urls: tuple[str, ...] = ()  # of each host with an ingress process; of several hosts alone
    is_encrypted: bool = False  # private connections; so are weights by sockets
    num_refused: int = 0  # calls and connections to private ports: no key or another one, late, copies, misdirected
    is_stopping: bool = False  # nothing is accepted or begun
    is_disk_full: bool = False
    store_away: str = ""  # why the run's store does not answer; empty: it does
    drained: tuple[str, ...] = ()  # hosts that get no work
    unread: tuple[tuple[str, float], ...] = ()  # rollouts, and seconds since a record of theirs waits for a reader
    store: StoreStatus | None = None  # None: the service follows none
    adapters: tuple[NamedAdapter, ...] = ()  # by name, the one pushed longest ago first
    num_awaiting_turn: int = 0  # weight updates that wait until this model has the turn


@dataclass(frozen=True, slots=True)
class HostDrain:
    """The rest of the work of a host that gets no more. It may go once there is neither."""

    host: str
    num_running: int  # trajectories of its workers
    num_leases: int  # on its replicas

    @property
    def may_go(self) -> bool:
        return self.num_running == self.num_leases == 0


@dataclass(frozen=True, slots=True)
class EndpointTable:
    """The chat endpoint's processes, by number."""

    urls: dict[int, str]  # private ones
    holders: tuple[int, ...] = ()  # of slots, into which clients' own session ids fall; empty: the processes know
    lost: frozenset[int] = frozenset()  # with their hosts, and the sessions there
    inherited: frozenset[int] = frozenset()  # slots whose earlier holder was lost, with the sessions there
    heirs: dict[int, int] = field(default_factory=dict)  # of lost processes whose sessions are in a database


def sessions_lease(number: int) -> str:
    """Return the name of the lease of an endpoint process, with which it may write sessions to the run's store."""
    return f"sessions-{number}"


def as_its_users(record: Trajectory) -> Trajectory:
    """Return a record with the names that its user gave."""
    return replace(record, rollout_id=shown_id(record.rollout_id), adapter=shown_id(record.adapter))


def assignment_id_of(rollout_id: str, group_id: str, sample_index: int) -> str:
    """Return the id of one sample. One-to-one, because a rollout id holds no slash."""
    return f"{rollout_id}/{group_id}/{sample_index}"


def place_of(assignment_id: str) -> tuple[str, str, int]:
    """Return the rollout, group and sample of an assignment. Raises InvalidRequest for what is the id of none."""
    rollout_id, _, rest = assignment_id.partition("/")
    group_id, _, sample_index = rest.rpartition("/")
    if not sample_index.isdecimal():
        raise InvalidRequest(f"{assignment_id!r} is no assignment", param="assignment_id")
    return rollout_id, group_id, int(sample_index)


def group_key(assignment_id: str) -> str:
    """Return the key of an assignment's group, which no other rollout has."""
    return assignment_id.rpartition("/")[0]


def session_holder(session_id: str) -> str:
    """Return the holder id of a session's or a direct call's lease. No assignment id begins with a slash."""
    return f"/{session_id}"


def is_session_holder(holder_id: str) -> bool:
    """Tell if a lease's holder is a session or a direct call, not an assignment."""
    return holder_id.startswith("/")


class MetricsPort(Protocol):
    """The coordinator as each process sees it that counts."""

    async def report_metrics(self, report: MetricsReport) -> None:
        """Report what was counted, durably on return. A repeat changes nothing."""


class ReplicaPort(Protocol):
    """The coordinator as an engine replica sees it."""

    async def starting(self, replica_id: str, software: str) -> bool:
        """Ask for leave to take memory; False: ask again. A permitted replica repeats the call until it registers.

        Raises InvalidRequest if its `software`, as `agentloop_servers.cluster.host` names it, is not the service's.
        """

    async def register(self, registration: ReplicaRegistration) -> None:
        """Join the fleet. Takes traffic once it holds the fleet's weight version."""

    async def heartbeat(self, replica_id: str, report: ReplicaReport) -> bool:
        """Report the engine's state. False: this coordinator does not know the replica, which registers again."""

    async def deregister(self, replica_id: str, reason: str = "") -> None:
        """Leave the fleet; its leases move, and the status shows the reason. Unknown ids: no-op."""


class WorkerPort(Protocol):
    """The coordinator as a worker sees it."""

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        """Report, and get work and cancellations; waits up to `wait_s` for either. Also the worker's heartbeat.

        A call that is cut off while it waits, without a next one, is the sign of a worker's death.
        """

    async def leave(self, worker_id: str) -> None:
        """End a worker: its samples are queued again at once, at no cost of an attempt. Idempotent."""

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Get another lease for a trajectory, on a replica that can serve what it `needs` from here on.

        `is_failed`: its replica did not answer. Raises NoHealthyReplica, and UnsupportedParameter where no engine
        of the service can serve it.
        """

    async def finish(self, worker_id: str, records: tuple[EncodedRecord, ...]) -> tuple[bool | Refusal, ...]:
        """Hand in up to MAX_HAND_IN terminal records. A repeat changes nothing. Returns an answer to each.

        True once the sample has a durable record, this one or an earlier one; False if it is rolled out again. One
        that is refused harms no other.
        """

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        """Report the leases and turns of the worker's process, whose id is the worker's; this renews the leases."""

    async def unfinished(self, assignment_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return those of these assignments whose samples lack a record."""

    async def keep_turns(
        self, parts: tuple[JournalPart, ...], forgotten: tuple[tuple[str, str], ...]
    ) -> tuple[str, ...]:
        """Remove journals from the store, by assignment and run (all of an assignment's with the run ""), and then
        append to others, durably. Returns the runs whose journals are over, because their samples have ended.
        """

    async def kept_turns(self, assignment_id: str) -> tuple[tuple[str, bytes], ...]:
        """Return what the store has of the journals of a sample, by run."""


class RolloutPort(Protocol):
    """The rollouts of clients, and the records of sessions."""

    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        """Accept work, durably. Raises Overloaded if the queue has no room for all of it, and ModelNotFound for an
        adapter in its terms that the user has not.

        Here as below `user_names` are all names of the caller's user, who calls the rollout `rollout_id`
        (`possible_ids`); None: any user's, by its whole id. The answer has the whole id.
        """

    async def claim(self, rollout_id: str, user_names: tuple[str, ...]) -> str:
        """Reserve a rollout for a user's sessions. Returns its whole id. Raises Conflict, Gone."""

    async def record(self, record: EncodedRecord) -> None:
        """Store a finished session's record under its `rollout_id`; durable on return. A repeat changes nothing.

        Raises Conflict if its place has another record, or its rollout was submitted.
        """

    async def read(
        self, rollout_id: str, after: int, limit: int, wait_s: float, user_names: tuple[str, ...] | None = None
    ) -> EncodedPage:
        """Return finished trajectories after cursor `after`; waits for at least one. Raises NotFound."""

    async def acknowledge(self, rollout_id: str, cursor: int, user_names: tuple[str, ...] | None = None) -> None:
        """Let the records up to `cursor`, which the caller has, be deleted. Raises NotFound, Gone."""

    async def annotate(
        self, rollout_id: str, given: tuple[SampleAnnotation, ...], user_names: tuple[str, ...] | None = None
    ) -> RolloutStatus:
        """Add annotations to records of a rollout, all or none, durably. A repeat adds them once more.

        Raises NotFound, Gone, InvalidRequest for values that do not fit their record, and Conflict for too many.
        """

    async def cancel(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        """End what is queued or running, durably; each gets a CANCELLED record. Raises NotFound."""


class LeasePort(Protocol):
    """Places on replicas for direct calls and sessions."""

    async def lease(
        self,
        session_id: str,
        num_tokens: int,
        process_id: str,
        needs: Needs = NO_NEEDS,
        prefixes: tuple[Prefix, ...] = (),
    ) -> Lease:
        """Grant a place to a direct call or a session, or find the one it has.

        It ends unless the process reports that it was taken. Raises NoHealthyReplica, and UnsupportedParameter
        where no engine of the service can serve the needs.
        """

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Grant another place, as `WorkerPort.move` does; here the id may be a session's. Raises NotFound too."""

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        """Report the leases, turns and ends of a process, which renews its leases."""


class TrainerPort(Protocol):
    """The fleet in a trainer's own broadcast group, for one transfer of weights at a time."""

    async def init_group(self, group: GroupInit, is_replacement: bool = False) -> None:
        """Have all workers join a group, with `is_replacement` in place of one of its name.

        Ranks follow the order of the replicas' ids. Raises Conflict (the name exists), InvalidRequest
        (another world size), NoHealthyReplica or WeightUpdateFailed.
        """

    async def begin_transfer(self, group: str, is_repeatable: bool = False) -> None:
        """Begin a transfer; with `is_repeatable` also if this group's is open, which goes on.

        Raises NotFound, and Conflict if another transfer is open, or the group is not joined or has lost a replica.
        """

    async def receive_part(self, part: TransferPart) -> None:
        """Receive tensors on all replicas while they decode. After a failure on all of them the group is gone.

        Raises Conflict without an open transfer, CheckpointUnreadable, WeightUpdateFailed.
        """

    async def end_transfer(self, group: str, version: int | None = None) -> UpdateReport:
        """Bring the fleet to the weights that came, as `update_weights` does.

        Without a `version` it is that of the parts, else the next one. Raises Conflict without an open transfer.
        One whose update was refused before it began stays open.
        """

    async def destroy_group(self, name: str) -> None:
        """Leave a group, and drop its open transfer. Idempotent."""

    async def pull_version(self, order: PullVersion) -> None:
        """Make a version on each host, once. Raises StorageFull, or the CheckpointUnreadable that tells why."""


class FleetPort(Protocol):
    """The fleet as operators and trainers command it."""

    async def update_weights(
        self, update: WeightUpdate, kv_policy: KVPolicy | None = None, force: bool = False
    ) -> UpdateReport:
        """Bring every replica to a new version; with `force` also to an older or a refused one.

        A repeat (the same version from the same source) joins the update under way, or gets its report. Raises
        Conflict, CheckpointUnreadable, WeightUpdateFailed, WeightsRefused.
        """

    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        """Serve a version of an adapter on every replica, beside all else; nothing pauses.

        A repeat changes nothing. A new name takes, where all have adapters, the place of the one that was pushed
        longest ago and is in no use. Raises InvalidRequest, Conflict, AdaptersFull, CheckpointUnreadable.
        """

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more. Raises ModelNotFound, and AdapterInUse while calls or rollouts are under it."""

    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        """Pause generation on every replica until `resume`, over restarts too. Idempotent."""

    async def resume(self) -> None:
        """Undo `pause`. Idempotent."""

    async def sleep(self, level: int, reason: str = "") -> None:
        """Freeze every replica and give its memory back, until `wake`, over restarts too. Idempotent.

        Raises InvalidRequest, EngineLost.
        """

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Take memory back; generation continues once all of it is. Idempotent. Raises Conflict, EngineLost."""


class RecordsPort(Protocol):
    """The stored records: those of the user with these names, or of all users. Ids are whole."""

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        """Return a page of the facts of stored records. A user names groups by its own ids.

        Raises InvalidRequest.
        """

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        """Return the record that a listing has as `seq`. Raises NotFound, also for another user's."""

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """Return the reports of the latest weight updates, oldest first."""

    async def metrics(self) -> MetricsPage:
        """Return the metrics of all processes, and what the state of the service says."""


class SeeingPort(RecordsPort, Protocol):
    """The service as an operator looks at it."""

    async def status(self) -> ServiceStatus:
        """Return the state of the service at this moment."""

    async def adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the adapters that are served by name."""

    async def flight(self, limit: int, name: str = "") -> FlightPage:
        """Return what the live trajectories and sessions do, with rows for `limit` of them, and for `name`."""

    async def history(self, names: tuple[str, ...], since: float) -> HistoryPage:
        """Return the rows after `since` (seconds since 1970) of the series named so, or of all without names."""


class FrontPort(RolloutPort, LeasePort, FleetPort, TrainerPort, SeeingPort, Protocol):
    """The coordinator as an ingress process sees it."""

    async def drain(self) -> tuple[int, int]:
        """Accept and begin nothing more. Returns the numbers of running and queued trajectories. Idempotent."""

    async def report_users(
        self, process_id: str, usage: tuple[UserUsage, ...], reads_again: bool = False
    ) -> UsersNews:
        """Report the users' use of one ingress process. Returns the use of all processes. With `reads_again` the
        users' file is read anew. Raises InvalidRequest."""

    async def drain_host(self, host: str, is_undone: bool = False) -> HostDrain:
        """Give a host no more work, over restarts too, or end that. Returns what it still has. Idempotent.

        Raises NotFound for an unknown host, and Conflict for the coordinator's and for the last one with a replica.
        """

    async def look_at_store(self) -> StoreStatus:
        """Look at the pointer of the store of versions now. Returns what was known. Raises Conflict without one."""

    async def endpoint_numbers(self, disk: str, num: int) -> tuple[int, ...]:
        """Return the numbers of the `num` endpoint processes of a host, which its disk stands for."""

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        """Announce an endpoint process, its private URL and the public one of its host."""

    async def keep_images(self, images: tuple[Image, ...]) -> None:
        """Keep images of calls with the run, before a record names them."""
