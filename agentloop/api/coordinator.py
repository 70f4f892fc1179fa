"""The coordinator's ports, one per kind of caller, and the types of their arguments and results.

Every call is idempotent or has a key, so a caller can repeat a call whose response was lost. The ports are
implemented in `agentloop_servers.coordinator`; its `server.py` maps ports to classes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
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
    MemoryTag,
    PublishedSource,
    PullVersion,
    StagingDevice,
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
"""Maximum bytes of one call with tasks or records."""

MAX_RECORD_BYTES = MAX_CALL_BYTES - 2**16
"""Maximum bytes of a record. The call also contains its header and the worker's id."""

MAX_HAND_IN = 64
"""Maximum number of records per call."""


PREFIX_LENGTHS = (512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)
"""The lengths, in tokens, of the prompt prefixes that have keys."""

Prefix: TypeAlias = tuple[str, int]
"""The key of a prompt prefix, and its length in tokens. Prompts with this key share these tokens."""

AFFINITY_TOKENS = 4096
"""The least length of the prefix that calls with one affinity count as sharing, when their replica is chosen."""


def prefixes_of(token_ids: Sequence[int], affinity: str = "") -> tuple[Prefix, ...]:
    """Return the keys of a prompt's prefixes, the longest first. Prompts with equal prefixes have equal keys.

    Prompts with the same `affinity` count as sharing all their tokens, so that they run on one replica.
    """
    prefixes: list[Prefix] = []
    begin = checksum = 0
    for end in PREFIX_LENGTHS:
        if end > len(token_ids):
            break
        checksum = crc32(array("i", token_ids[begin:end]), checksum)
        prefixes.append((f"ids-{checksum:x}", end))
        begin = end
    if affinity and token_ids:
        prefixes.append((f"key-{affinity}", max(len(token_ids), AFFINITY_TOKENS)))
    return tuple(reversed(prefixes))


@dataclass(frozen=True, slots=True)
class ReplicaRegistration:
    """The registration of a replica. `url` is its private data-plane port."""

    replica_id: str
    url: str
    info: EngineInfo
    weight_version: int | None  # None: dummy weights, no traffic until the first commit
    is_paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    entry: str = ""  # the name of its engine pool in the service's config
    node_id: str = ""  # Ray's id of its node
    weight_digest: str = ""  # digest of the weights of that version; empty: unknown


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """The current state of a replica's engine."""

    load: Load
    is_usable: bool
    is_paused: bool = False
    asleep: frozenset[MemoryTag] = frozenset()
    num_answered: int = 0  # generations that callers received since the replica's start
    is_noise: bool = False  # broken weights: the sampled logprobs stay at -ln(vocabulary)
    num_refused: int = 0  # refused calls and connections to its private port


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The current state of a worker. A restarted coordinator reads the running trajectories from `running`."""

    worker_id: str
    num_free: int
    running: tuple[str, ...]  # assignment ids
    num_sampled: tuple[int, ...] = ()  # sampled tokens of each running assignment; empty: unknown
    host: str = ""  # the worker's address
    flights: tuple[Flight, ...] = ()  # activity of each running assignment, once a second; empty: unchanged


@dataclass(frozen=True, slots=True)
class Orders:
    """The coordinator's response to a worker: assignments to start and assignments to cancel."""

    start: tuple[Assignment, ...] = ()
    cancel: tuple[str, ...] = ()  # assignment ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """The error of one of several records of a call, in its wire form."""

    error: dict[str, Any]
    http_status: int

    @classmethod
    def of(cls, error: AgentLoopError) -> Refusal:
        """Encode an error."""
        return cls(error.to_wire(), error.http_status)

    def raised(self) -> AgentLoopError:
        """Return the decoded error, for the caller to raise."""
        return from_wire(self.error, self.http_status)


@dataclass(frozen=True, slots=True)
class JournalPart:
    """Frames of a run's turn journal (`rollout/turn_journal.py`), appended after `number` earlier parts."""

    assignment_id: str
    run: str
    number: int
    frames: bytes


class TurnBegun(msgspec.Struct, frozen=True, tag=True):
    """Reports that a lease holder starts a turn, its first or the next one after tool calls."""

    lease_id: str


class TurnEnded(msgspec.Struct, frozen=True, tag=True):
    """Reports that a turn of a lease holder has ended. A failed turn has no tokens."""

    lease_id: str
    num_context_tokens: int  # prompt and sampled tokens
    num_sampled_tokens: int
    num_cached_tokens: int | None  # prompt tokens found in the KV cache; None: the engine did not report it
    num_known_tokens: int = 0  # length of the earlier context that the prompt extends; 0: none


@dataclass(frozen=True, slots=True)
class HeldLease:
    """A lease that a process holds, with facts about its holder."""

    lease: Lease
    holder_id: str  # an assignment id or a `session_holder` id
    group_id: str  # the same for all samples of a group; empty: no group
    num_context_tokens: int  # the context length after the last turn
    prefixes: tuple[Prefix, ...] = ()  # prefixes of a session's prompt, the longest first


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """The changes of a process's leases since its last report. The report is also the process's heartbeat.

    A process sends one report at a time and repeats it until it receives the response; `sequence` increases by one
    per new report. A known sequence number is a repeat or a late copy; a gap means that a report is missing. The
    receiver applies `leases` first, then `taken`, `turns` and `released`.
    """

    process_id: str  # unique for each start of a process
    sequence: int
    turns: tuple[TurnBegun | TurnEnded, ...] = ()  # in chronological order
    taken: tuple[str, ...] = ()  # ids of leases received
    released: tuple[str, ...] = ()  # ids of leases released
    leases: tuple[HeldLease, ...] | None = None  # all leases of the process; None: only the changes


@dataclass(frozen=True, slots=True)
class LeaseOrders:
    """The coordinator's response to a LeaseReport. Each order is repeated until the process has executed it."""

    moves: tuple[tuple[str, Lease | None], ...] = ()
    """Lease ids with the leases that replace them from the next turn on. None: before that turn the process calls
    `move` with `is_failed=False`, which waits for capacity."""

    send_all: bool = False  # the next report must include `leases`


@dataclass(frozen=True, slots=True)
class RolloutTerms:
    """The owner and the scheduling parameters of a rollout.

    Samples of a higher priority are always assigned first. Within a priority, runs share capacity by weight. All
    submits of an owner with the same `run_id` and equal terms are one run: they keep their order and share
    `max_running`. Submits without a `run_id` are one run too, but `max_running` and the staleness limit apply to
    each submit separately.
    """

    owner: str = ""  # the user who submitted it; empty without API keys
    priority: int = 0
    share: float = 1.0
    max_running: int | None = None  # concurrent trajectories; None: no limit
    run_id: str = ""
    adapter: str = ""  # the adapter that samples, whose versions count for staleness; empty: the base weights
    traceparent: str = field(default="", compare=False)  # W3C trace context of a submit with one trajectory
    trace_link: str = field(default="", compare=False)  # the same for a submit with several
    # Set by the coordinator only:
    groups_digest: str = ""  # digest of the submitted groups
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """The number of a rollout's trajectories by state. `num_finished` counts terminal records of every kind."""

    rollout_id: str
    num_accepted: int
    num_finished: int
    num_running: int
    num_queued: int
    num_held: int = 0  # queued samples that wait for a weight version, an adapter, or their run's staleness limit
    owner: str = ""  # as in `RolloutTerms`
    priority: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_finished >= self.num_accepted


@dataclass(frozen=True, slots=True)
class Page:
    """Finished trajectories in commit order. Pass `cursor` to read the next page."""

    trajectories: tuple[Trajectory, ...]
    cursor: int
    status: RolloutStatus


@dataclass(frozen=True, slots=True)
class EncodedPage:
    """A Page whose records are still encoded.

    It has the same encoding as Page, so that no process has to decode it.
    """

    trajectories: tuple[msgspec.Raw, ...]
    cursor: int
    status: RolloutStatus

    def decoded(self) -> Page:
        """Decode the page. Raises InvalidRequest if a record cannot be decoded."""
        return decode(encode(self), Page)


@dataclass(frozen=True, slots=True)
class ReplicaUpdate:
    """The outcome of a weight update on one replica. `error` is set if the update failed there."""

    replica_id: str
    stage_ms: float
    stall_ms: float  # from the pause call until sampling resumed
    error: str | None = None
    staging_device: StagingDevice | None = (
        None  # staging device of the weights before the commit; NOWHERE: a blocking update
    )
    transport: str | None = None
    num_bytes: int = 0  # received by each of its workers
    transfer_ms: float = 0.0  # from the first byte to the last
    swap_ms: float = 0.0
    verify_ms: float = 0.0
    num_verified: int = 0  # tensors or layers that were compared with the sent ones
    canary_ms: float = 0.0  # canary check, after the stall: sampled tokens are held back until it passes
    paused_at_ms: float = 0.0  # start of the stall, since the start of the update


@dataclass(frozen=True, slots=True)
class AdapterPush:
    """A new version of an adapter. `version` None: the next one of its name."""

    name: str  # as in `NamedAdapter`
    directory: str
    version: int | None = None
    is_forced: bool = False  # accept a version that is not greater than the current one


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that the fleet serves by name."""

    name: str  # prefixed with its owner; without prefix it is for all users
    version: int
    directory: str  # joining replicas load it from here
    pushed_at: float  # Unix time in seconds
    digest: str = ""  # digest of its files as read by the replicas; empty: unknown


def seen_adapters(served: Iterable[NamedAdapter], user_names: Sequence[str] | None) -> tuple[NamedAdapter, ...]:
    """Return the adapters that are visible to a user, without the owner in their names.

    With `user_names` None, return all adapters with their complete names.
    """
    if user_names is None:
        return tuple(served)
    return tuple(replace(each, name=shown_id(each.name)) for each in served if is_seen(each.name, user_names))


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The outcome of a weight update. If it failed on all replicas, WeightUpdateFailed is raised instead.

    With an `adapter`, the update loaded this adapter and the versions are the adapter's.
    """

    version: int
    previous_version: int | None
    kv_policy: KVPolicy
    replicas: tuple[ReplicaUpdate, ...]  # without times if the coordinator stopped during the update
    total_ms: float
    began_at: float = 0.0  # Unix time in seconds; 0: unknown
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
    """Return the update reports that are visible to a user, without the owner in adapter names.

    With `user_names` None, return all reports unchanged.
    """
    if user_names is None:
        return tuple(reports)
    return tuple(
        replace(each, adapter=shown_id(each.adapter)) for each in reports if is_seen(each.adapter, user_names)
    )


@dataclass(frozen=True, slots=True)
class UpdateProgress:
    """The running weight update."""

    version: int
    state: str  # "staging", "switching"
    num_receivers: int  # workers that can still succeed, of the replicas in `waits_for`
    failures: tuple[str, ...] = ()  # one line per failed replica
    waits_for: tuple[str, ...] = ()  # replicas that have not finished
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of one replica."""

    replica_id: str
    state: str
    engine: str
    weight_version: int | None
    load: Load
    num_leases: int
    heartbeat_age_s: float
    num_workers: int = 1
    weight_dtype: str | None = None
    error: str | None = None  # the reason that it receives no traffic
    is_paused: bool = False  # as of its last report
    asleep: tuple[MemoryTag, ...] = ()  # as of its last report
    kv_predicted_tokens: int = 0  # KV tokens of all leases, including the predicted growth in the next turn
    kv_limit_tokens: int = 0  # new trajectories start while the prediction is below this limit
    kv_hit_rate: float | None = None  # share of earlier contexts that recent turns found in the KV cache
    is_thrashing: bool = False  # turns after the first recompute most of their contexts
    entry: str = ""  # its engine pool in the config
    features: tuple[Feature, ...] = ()  # features that requests may use
    max_context_tokens: int = 0
    lora_rank: int | None = None  # the maximum rank of an adapter; None: adapters are not supported
    max_loras: int | None = None  # the maximum number of named adapters; None: adapters are not supported
    is_noise: bool = False  # broken weights: the sampled logprobs stay at -ln(vocabulary)
    host: str = ""  # the address of its private port: with several hosts, its node's address
    quantization: str = ""  # the quantization of its weights; empty: none


@dataclass(frozen=True, slots=True)
class StartingReplica:
    """A replica that has not joined yet. `reason` is the reason for its delay; empty: it is loading."""

    replica_id: str
    waiting_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class LostReplica:
    """A replica that has left the fleet, with the reason."""

    replica_id: str
    reason: str
    age_s: float


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """The samples and calls that have not started, and the KV capacity for them."""

    num_queued: int  # samples
    num_waiting: int  # sessions and direct calls without a lease
    kv_predicted_tokens: int  # sum over the replicas that receive traffic
    kv_limit_tokens: int
    reason: str = ""  # the reason that nothing starts; empty: work starts, or nothing waits
    longest_wait_s: float = 0.0  # the longest current wait
    median_wait_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store of weight versions that the service follows: its latest version and the state of the last poll."""

    latest: int | None = None  # None: not read yet
    state: str = "idle"  # or "updating", "asleep" (the fleet is asleep), "failed"
    error: str = ""


class JobState(StrEnum):
    PENDING = "pending"  # waits for the end of another update, a sleep or a wake
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class UpdateJob:
    """A weight update to a folder of the service's store, which its client polls. Times are Unix seconds.

    A client sets the first four fields, and the coordinator the others.
    """

    job_id: str
    folder: str
    base: str = ""  # the folder that the version's delta was made for; empty: a full version
    kv_policy: KVPolicy | None = None  # None: the service's
    state: JobState = JobState.PENDING
    names: tuple[tuple[int, str], ...] = ()  # as in `PublishedSource`; the version comes first, once it is known
    created_at: float = 0.0
    updated_at: float = 0.0
    error: str = ""  # code and message of a failure

    @property
    def is_open(self) -> bool:
        return self.state in (JobState.PENDING, JobState.RUNNING)

    @property
    def version(self) -> int | None:
        """The version that the weights get; None before the update starts."""
        return self.names[0][0] if self.names and self.names[0][1] == self.folder else None


@dataclass(frozen=True, slots=True)
class UpdateJobs:
    """The latest jobs, oldest first, and their store; None if the service has no store, or follows it."""

    source: PublishedSource | None
    jobs: tuple[UpdateJob, ...]


@dataclass(frozen=True, slots=True)
class ReplicaHold:
    """Replicas that keep a weight version for an evaluation: weight updates skip them until it ends."""

    hold_id: str
    version: int
    replicas: tuple[str, ...]
    lost: tuple[str, ...] = ()  # held replicas that were lost, or got other weights
    left_s: float = 0.0  # time until its timeout


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """The current state of the service."""

    is_ready: bool  # at least one replica receives traffic
    is_paused: bool
    weight_version: int | None
    replicas: tuple[ReplicaStatus, ...]
    num_workers: int
    rollouts: tuple[RolloutStatus, ...]
    updates: tuple[UpdateReport, ...]  # the latest, oldest first; bounded
    asleep: tuple[MemoryTag, ...] = ()  # the memory that the fleet has released
    paused_s: float | None = None  # duration of the operator's pause; None: not paused
    pause_reason: str = ""
    asleep_s: float | None = None
    sleep_reason: str = ""
    starting: tuple[StartingReplica, ...] = ()
    lost: tuple[LostReplica, ...] = ()  # the latest, oldest first; bounded
    # Problems of the service, its replicas and hosts, one sentence each (`findings`).
    degraded: tuple[str, ...] = ()
    update: UpdateProgress | None = None  # the running update
    groups: tuple[str, ...] = ()  # trainers' broadcast groups
    transfer: str = ""  # the group with an open transfer
    queue: QueueStatus = QueueStatus(0, 0, 0, 0)
    users: tuple[UserUsage, ...] = ()
    public_urls: tuple[str, ...] = ()  # the URL of each host with an ingress process; empty with a single host
    is_encrypted: bool = False  # private connections, including weight transfers over sockets
    num_refused: int = (
        0  # refused calls and connections to private ports: wrong key, expired, replayed, misdirected
    )
    is_stopping: bool = False  # no work is accepted or started
    is_disk_full: bool = False
    store_away: str = ""  # the error of the unavailable run store; empty: it is available
    drained: tuple[str, ...] = ()  # hosts that receive no work
    # Rollouts, and the seconds that their oldest unread record has waited.
    unread: tuple[tuple[str, float], ...] = ()
    store: StoreStatus | None = None  # None: the service follows no store of versions
    adapters: tuple[NamedAdapter, ...] = ()  # named adapters, ordered by the time of their push
    num_awaiting_turn: int = 0  # weight updates that wait for this model's turn on shared accelerators
    holds: tuple[ReplicaHold, ...] = ()  # replicas that keep an older version for evaluations


@dataclass(frozen=True, slots=True)
class HostDrain:
    """The remaining work of a drained host. The host may be removed once both numbers are 0."""

    host: str
    num_running: int  # trajectories of its workers
    num_leases: int  # leases on its replicas

    @property
    def may_go(self) -> bool:
        return self.num_running == self.num_leases == 0


@dataclass(frozen=True, slots=True)
class EndpointTable:
    """The processes of the chat endpoint by number, and the map from sessions to processes."""

    urls: dict[int, str]  # private URLs
    # The process of each partition of client-chosen session ids; empty: not partitioned.
    holders: tuple[int, ...] = ()
    lost: frozenset[int] = frozenset()  # processes lost with their hosts, including their sessions
    inherited: frozenset[int] = frozenset()  # partitions whose earlier process was lost with its sessions
    # Failover processes, for lost ones with sessions in a database.
    failover_owners: dict[int, int] = field(default_factory=dict)


def sessions_lease(number: int) -> str:
    """Return the name of the lease that allows an endpoint process to write sessions to the run's store."""
    return f"sessions-{number}"


def as_its_users(record: Trajectory) -> Trajectory:
    """Return a record without the owner in its ids, for the owner."""
    return replace(record, rollout_id=shown_id(record.rollout_id), adapter=shown_id(record.adapter))


def assignment_id_of(rollout_id: str, group_id: str, sample_index: int) -> str:
    """Return the id of one sample. It is unambiguous because rollout ids contain no slash."""
    return f"{rollout_id}/{group_id}/{sample_index}"


def place_of(assignment_id: str) -> tuple[str, str, int]:
    """Return the rollout, group and sample index of an assignment id. Raises InvalidRequest for an invalid id."""
    rollout_id, _, rest = assignment_id.partition("/")
    group_id, _, sample_index = rest.rpartition("/")
    if not sample_index.isdecimal():
        raise InvalidRequest(
            f"invalid assignment id {assignment_id!r}: expected ROLLOUT/GROUP/SAMPLE_INDEX", param="assignment_id"
        )
    return rollout_id, group_id, int(sample_index)


def group_key(assignment_id: str) -> str:
    """Return the key of an assignment's group, which is unique over all rollouts."""
    return assignment_id.rpartition("/")[0]


def session_holder(session_id: str) -> str:
    """Return the lease holder id of a session or a direct call."""
    return f"/{session_id}"  # no assignment id begins with a slash


def is_session_holder(holder_id: str) -> bool:
    """Return True if the lease holder is a session or a direct call, not an assignment."""
    return holder_id.startswith("/")


class MetricsPort(Protocol):
    """The coordinator's interface for processes that count metrics."""

    async def report_metrics(self, report: MetricsReport) -> None:
        """Store a report of counters, durably on return. Idempotent."""


class ReplicaPort(Protocol):
    """The coordinator's interface for engine replicas."""

    async def starting(self, replica_id: str, software: str) -> bool:
        """Request permission to allocate memory. Returns False if the replica has to ask again.

        A replica with permission repeats the call until it registers. Raises InvalidRequest if its `software` (see
        `agentloop_servers.cluster.host`) differs from the service's.
        """

    async def register(self, registration: ReplicaRegistration) -> None:
        """Join the fleet. The replica receives traffic once it has the fleet's weight version."""

    async def heartbeat(self, replica_id: str, report: ReplicaReport) -> bool:
        """Report the engine's state. Returns False if the replica is unknown and must register again."""

    async def deregister(self, replica_id: str, reason: str = "") -> None:
        """Leave the fleet. The replica's leases move, and the status shows `reason`. Unknown ids are ignored."""


class WorkerPort(Protocol):
    """The coordinator's interface for workers."""

    async def take(self, report: WorkerReport, wait_s: float) -> Orders:
        """Report the worker's state, and wait up to `wait_s` for assignments or cancellations.

        The call is also the heartbeat: if it is disconnected and not repeated, the worker is considered lost.
        """

    async def leave(self, worker_id: str) -> None:
        """Deregister a worker. Its samples are queued again without counting an attempt. Idempotent."""

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Replace a trajectory's lease by one on a replica that supports its `needs`.

        `is_failed` reports that the lease's replica did not respond. Raises NoHealthyReplica, and
        UnsupportedParameter if no engine of the service supports the needs.
        """

    async def finish(self, worker_id: str, records: tuple[EncodedRecord, ...]) -> tuple[bool | Refusal, ...]:
        """Submit up to MAX_HAND_IN terminal records. Returns one result per record. Idempotent.

        A result is True once the sample has a durable record (this or an earlier one), False if the sample will be
        run again, and a Refusal if this record is refused, which does not affect the others.
        """

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        """Report the leases and turns of the worker's process, and renew the leases.

        Its process id is the worker id.
        """

    async def unfinished(self, assignment_ids: tuple[str, ...]) -> tuple[str, ...]:
        """Return the assignments whose samples have no record."""

    async def keep_turns(
        self, parts: tuple[JournalPart, ...], forgotten: tuple[tuple[str, str], ...]
    ) -> tuple[str, ...]:
        """Remove the journals in `forgotten` from the store, then append `parts`, durably.

        `forgotten` has pairs of assignment and run; the run "" means all runs. Returns the runs whose journals have
        ended because their samples have records.
        """

    async def kept_turns(self, assignment_id: str) -> tuple[tuple[str, bytes], ...]:
        """Return the stored journals of a sample as pairs of run and bytes."""


class RolloutPort(Protocol):
    """The coordinator's interface for the rollouts of clients and the records of sessions."""

    async def submit(
        self,
        rollout_id: str,
        groups: tuple[RolloutGroup, ...],
        terms: RolloutTerms = RolloutTerms(),
        user_names: tuple[str, ...] | None = None,
    ) -> RolloutStatus:
        """Accept work, durably on return. The status has the rollout's complete id.

        Raises Overloaded if not all samples fit into the queue, and ModelNotFound if the user has no such adapter.

        In all methods, `user_names` are all names of the caller's user, and `rollout_id` is that user's id for the
        rollout (`possible_ids`). With `user_names` None, it is the complete id of any user's rollout.
        """

    async def claim(self, rollout_id: str, user_names: tuple[str, ...]) -> str:
        """Reserve a rollout for a user's sessions. Returns its complete id. Raises Conflict and Gone."""

    async def record(self, record: EncodedRecord) -> None:
        """Store the record of a finished session under its `rollout_id`, durably on return. Idempotent.

        Raises Conflict if the sample has a different record, or if the rollout was submitted.
        """

    async def read(
        self, rollout_id: str, after: int, limit: int, wait_s: float, user_names: tuple[str, ...] | None = None
    ) -> EncodedPage:
        """Return up to `limit` records after the cursor `after`.

        Waits up to `wait_s` for the first. Raises NotFound.
        """

    async def acknowledge(self, rollout_id: str, cursor: int, user_names: tuple[str, ...] | None = None) -> None:
        """Allow the deletion of the records up to `cursor`. Raises NotFound and Gone."""

    async def annotate(
        self, rollout_id: str, given: tuple[SampleAnnotation, ...], user_names: tuple[str, ...] | None = None
    ) -> RolloutStatus:
        """Add annotations to records of a rollout, all or none, durably on return. A repeated call adds them again.

        Raises NotFound, Gone, InvalidRequest for values that do not fit their record, and Conflict for too many
        annotations.
        """

    async def cancel(self, rollout_id: str, user_names: tuple[str, ...] | None = None) -> RolloutStatus:
        """Cancel queued and running samples, durably. Each gets a CANCELLED record. Raises NotFound."""


class LeasePort(Protocol):
    """The coordinator's interface for the leases of direct calls and sessions."""

    async def lease(
        self,
        session_id: str,
        num_tokens: int,
        process_id: str,
        needs: Needs = NO_NEEDS,
        prefixes: tuple[Prefix, ...] = (),
    ) -> Lease:
        """Return the lease of a session or direct call; grants one if it has none.

        A lease expires unless the process reports it as taken. Raises NoHealthyReplica, and UnsupportedParameter if
        no engine of the service supports the needs.
        """

    async def move(self, assignment_id: str, lease: Lease, is_failed: bool, needs: Needs = NO_NEEDS) -> Lease:
        """Replace a lease, like `WorkerPort.move`. The id may be a session's. Raises NotFound too."""

    async def report_leases(self, report: LeaseReport) -> LeaseOrders:
        """Report the leases and turns of a process, and renew its leases."""


class TrainerPort(Protocol):
    """The coordinator's interface for weight transfers through a trainer's broadcast group, one at a time."""

    async def init_group(self, group: GroupInit, is_replacement: bool = False) -> None:
        """Make all engine workers join a group. With `is_replacement`, replace an existing group of this name.

        Ranks follow the order of the replica ids. Raises Conflict (the name exists), InvalidRequest (a different
        world size), NoHealthyReplica and WeightUpdateFailed.
        """

    async def begin_transfer(self, group: str, is_repeatable: bool = False) -> None:
        """Open a transfer. With `is_repeatable`, an open transfer of this group continues.

        Raises NotFound, and Conflict if another transfer is open, or if the group is incomplete or has lost a
        replica.
        """

    async def receive_part(self, part: TransferPart) -> None:
        """Receive tensors on all replicas while they decode. A failure on all replicas destroys the group.

        Raises Conflict without an open transfer, CheckpointUnreadable and WeightUpdateFailed.
        """

    async def end_transfer(self, group: str, version: int | None = None) -> UpdateReport:
        """Close the transfer and update the fleet to the received weights, like `update_weights`.

        The default `version` is the one in the parts, or else the next one. Raises Conflict without an open
        transfer. If the update is refused before it starts, the transfer stays open.
        """

    async def destroy_group(self, name: str) -> None:
        """Leave a group and drop its open transfer. Idempotent."""

    async def pull_version(self, order: PullVersion) -> None:
        """Build a weight version on each host, once per host. Raises StorageFull and CheckpointUnreadable."""


class FleetPort(Protocol):
    """The coordinator's interface for operators and trainers to control the fleet."""

    async def update_weights(
        self, update: WeightUpdate, kv_policy: KVPolicy | None = None, force: bool = False
    ) -> UpdateReport:
        """Update all replicas to a new weight version. With `force`, it may be an older or a refused version.

        A repeated call (the same version and source) joins the running update or returns its report. Raises
        Conflict, CheckpointUnreadable, WeightUpdateFailed and WeightsRefused.
        """

    async def push_adapter(self, push: AdapterPush) -> UpdateReport:
        """Load a version of a named adapter on all replicas, without a pause. Idempotent.

        If the replicas are full, a new name evicts the adapter that was pushed longest ago and is not in use.
        Raises InvalidRequest, Conflict, AdaptersFull and CheckpointUnreadable.
        """

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter.

        Raises ModelNotFound if it is not loaded, and AdapterInUse while calls or rollouts use it.
        """

    async def pause(self, mode: PauseMode, reason: str = "") -> None:
        """Pause generation on all replicas until `resume`, also across restarts. Idempotent."""

    async def resume(self) -> None:
        """End a pause. Idempotent."""

    async def sleep(self, level: int, reason: str = "") -> None:
        """Freeze all replicas and release their memory until `wake`, also across restarts. Idempotent.

        Raises InvalidRequest and EngineLost.
        """

    async def wake(self, tags: frozenset[MemoryTag]) -> None:
        """Allocate released memory again. Generation resumes once all memory is back. Idempotent.

        Raises Conflict and EngineLost.
        """


class RecordsPort(Protocol):
    """The coordinator's interface for stored records.

    `user_names` restricts the results to one user; None: all users. Results have complete ids.
    """

    async def list_records(self, query: FactsQuery, user_names: tuple[str, ...] | None = None) -> FactsPage:
        """Return a page of facts of stored records. With `user_names`, `query.group` is the user's own id.

        Raises InvalidRequest.
        """

    async def record_at(self, seq: int, user_names: tuple[str, ...] | None = None) -> AnnotatedRecord:
        """Return the record with `RecordFacts.seq`. Raises NotFound, also for a record of another user."""

    async def update_reports(self) -> tuple[UpdateReport, ...]:
        """Return the reports of the latest weight updates, oldest first."""

    async def metrics(self) -> MetricsPage:
        """Return the metrics of all processes and those derived from the service's state."""


class SeeingPort(RecordsPort, Protocol):
    """The coordinator's read-only interface for operators."""

    async def status(self) -> ServiceStatus:
        """Return the current state of the service."""

    async def adapters(self) -> tuple[NamedAdapter, ...]:
        """Return the named adapters."""

    async def flight(self, limit: int, name: str = "") -> FlightPage:
        """Return the activities of live trajectories and sessions: at most `limit` rows, and the row of `name`."""

    async def history(self, names: tuple[str, ...], since: float) -> HistoryPage:
        """Return the rows of the named metrics after the Unix time `since`; without names, of all metrics."""


class JobPort(Protocol):
    """The coordinator's interface for weight updates that run without a caller."""

    async def begin_update(self, job: UpdateJob) -> UpdateJob:
        """Start a weight update that runs without its caller, also across restarts. Idempotent by `job_id`.

        Raises Conflict without a store for jobs, while another job runs, and if `base` is not of a completed job.
        """

    async def update_jobs(self) -> UpdateJobs:
        """Return the latest update jobs."""

    async def cancel_update(self, job_id: str) -> UpdateJob:
        """End a job whose replicas have not begun to swap. Raises NotFound and Conflict. Idempotent."""


class FrontPort(RolloutPort, LeasePort, FleetPort, TrainerPort, JobPort, SeeingPort, Protocol):
    """The coordinator's interface for ingress processes."""

    async def drain(self) -> tuple[int, int]:
        """Stop accepting and starting work. Returns the numbers of running and queued trajectories. Idempotent."""

    async def report_users(
        self, process_id: str, usage: tuple[UserUsage, ...], reads_again: bool = False
    ) -> UsersNews:
        """Report the users' usage in one ingress process. Returns the usage in all processes.

        With `reads_again`, the users' file is read again first. Raises InvalidRequest.
        """

    async def drain_host(self, host: str, is_undone: bool = False) -> HostDrain:
        """Stop assigning work to a host, also across restarts, or undo that.

        Returns its remaining work. Idempotent.

        Raises NotFound for an unknown host, and Conflict for the coordinator's host and the last host with a
        replica.
        """

    async def hold(self, hold_id: str, num_replicas: int, timeout_s: float, lease_s: float) -> ReplicaHold:
        """Keep replicas at the served version, for `lease_s` without a renewal and `timeout_s` in total.

        Waits for a running update. A repeated call returns the hold. Raises Conflict if too few replicas are ready.
        """

    async def renew_hold(self, hold_id: str, lease_s: float) -> ReplicaHold:
        """Extend a hold by `lease_s`, or end it with 0. Raises NotFound, with the reason, if it has ended."""

    async def look_at_store(self) -> StoreStatus:
        """Poll the store of weight versions now.

        Returns the state before the poll. Raises Conflict without a store.
        """

    async def endpoint_numbers(self, disk: str, num: int) -> tuple[int, ...]:
        """Return the numbers of the `num` endpoint processes of the host with the disk id `disk`."""

    async def join_endpoint(self, number: int, url: str, public_url: str) -> EndpointTable:
        """Register an endpoint process with its private URL and the public URL of its host."""

    async def keep_images(self, images: tuple[Image, ...]) -> None:
        """Store images of calls with the run, before a record refers to them."""
