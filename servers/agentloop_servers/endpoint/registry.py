"""The registry of sessions, from their creation to the record in the run's store.

    created ──► open ──► finished ──► gone        sessions may be evicted from memory and restored in between
                  └───────── deleted ──┘

Owns the sessions of one process, their file, their leases, and the task that expires, evicts and records them.
Invariants: a response is sent after its changes are on disk. The coordinator records each ended session exactly
once, also if the process died or the coordinator was away before it was recorded. Ids are never reused. A one-off
session finishes when it expires; it leaves a record only if it has a turn, and never a tombstone.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import uuid
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import structlog

from agentloop.api.coordinator import FrontPort
from agentloop.api.encoded_record import EncodedRecord
from agentloop.api.owners import is_own_id, own_id, possible_ids, shown_id
from agentloop.api.requests import ID_PATTERN
from agentloop.api.sessions import SESSIONS_ROLLOUT_ID
from agentloop.concurrency.aio import KeyedLocks, OwnedTasks, run_to_end
from agentloop.concurrency.clock import SteadyTime
from agentloop.errors import (
    AgentLoopError,
    Conflict,
    Gone,
    InvalidRequest,
    Overloaded,
    ServiceUnavailable,
    SessionLost,
    SessionNotFound,
    StorageFull,
)
from agentloop.generation.leased_engine import CallLeases, Connect
from agentloop.generation.leases import LeaseConfig, LeaseReporter, ReportConfig
from agentloop.observability.metrics import count_record
from agentloop.sessions.calls import SessionEnd, SessionRecord, SessionState
from agentloop.sessions.prompts import SessionParts
from agentloop.sessions.session import Session
from agentloop.storage.home import Home
from agentloop.trajectory.node import CallRecord, Node
from agentloop.types import Credit, Message, StopReason, Trajectory, VersionDemand
from agentloop_servers.endpoint.session_store import SessionStore, StoredSession
from agentloop_servers.endpoint.shards import ShardRouter
from agentloop_servers.http.auth import SessionKeys

_PAGE = 64  # sessions that the watch reads at a time
_MAX_CLAIMS = 1024  # remembered claims of rollouts; the coordinator is asked again for others
_SESSION_ID = re.compile(ID_PATTERN)
_ENTRY_BYTES = 4096  # measured size of a session without turns: its objects and its table entries

# What the process grows by for a byte of live objects, the rest being holes that the allocators keep. Measured with
# `tests/benchmarks/endpoint.py`'s load, 300 sessions x 50 turns, less what the caches of the process grew by: 1.1
# with 8 calls at a time, 1.26 with 64. What calls need while they are open is not in it: it goes by their number.
_HEAP_FACTOR = 1.25

_log = structlog.stdlib.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of a process's sessions. All finite."""

    max_sessions: int = 20_000  # open sessions of one user; the next gets 429
    max_resident_bytes: int = 512 << 20
    idle_s: float = 60.0  # without use, until a session is evicted from memory
    ttl_s: float = 3600.0  # without use, until a session expires; also how long a finished one can be read
    one_off_ttl_s: float = 600.0
    max_ttl_s: float = 7 * 86_400.0
    restart_grace_s: float = 300.0  # minimum remaining life of a session after its process starts
    watch_interval_s: float = 1.0
    record_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class NewSession:
    """The properties of a session to be created. Its record becomes sample `sample_index` of `group_id`."""

    session_id: str | None = None  # None: the service generates one
    ttl_s: float | None = None
    rollout_id: str = SESSIONS_ROLLOUT_ID
    group_id: str = ""  # empty: the session is its own group
    task_id: str = ""
    sample_index: int = 0
    refuses_overflow: bool = False
    gives_unread_calls: bool = False
    task_messages: tuple[Message, ...] = ()
    traceparent: str = ""  # the W3C trace context of its caller
    weight_version: VersionDemand | None = None  # for calls without a version demand
    adapter: str = ""  # named as in `NamedAdapter`; empty: the base weights
    credit: Credit = Credit.LINEAGE


class SessionCache:
    """The sessions in memory by id, least recently used first. Synchronous.

    At most one `Session` object exists for an id: a dropped session that a caller still uses is returned again
    instead of being created twice. A session with open calls is not dropped.
    """

    def __init__(self, now: Callable[[], float], max_bytes: int, idle_s: float) -> None:
        self._now = now
        self._max_bytes = max_bytes
        self._idle_s = idle_s
        self._held: OrderedDict[str, Session] = OrderedDict()
        self._alive: WeakValueDictionary[str, Session] = WeakValueDictionary()
        self._used_at: dict[str, float] = {}
        self._sizes: dict[str, int] = {}
        self._changed: set[str] = set()
        self._num_bytes = 0
        self.num_evicted = 0  # so far

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sessions(self) -> list[Session]:
        """Sessions in memory, including dropped ones that a caller still uses."""
        return list(self._alive.values())

    @property
    def num_bytes(self) -> int:
        """Estimated growth of the process's memory by these sessions, in bytes."""
        for session_id in self._changed:
            session = self._held.get(session_id)
            if session is not None:
                size = int((session.num_bytes + _ENTRY_BYTES) * _HEAP_FACTOR)
                self._num_bytes += size - self._sizes.get(session_id, 0)
                self._sizes[session_id] = size
        self._changed.clear()
        return self._num_bytes

    @property
    def is_full(self) -> bool:
        """True once the quota is reached."""
        return self.num_bytes >= self._max_bytes

    def get(self, session_id: str) -> Session | None:
        """Return the session if it is in memory. Counts as a use."""
        session = self._alive.get(session_id)
        if session is not None:
            self.add(session)
        return session

    def add(self, session: Session) -> None:
        """Add a session. Counts as a use."""
        session_id = session.session_id
        if self._held.get(session_id) is not session:
            self._held[session_id] = self._alive[session_id] = session
        self._held.move_to_end(session_id)
        self._used_at[session_id] = self._now()
        self._changed.add(session_id)

    def drop(self, session_id: str) -> None:
        """Drop a session. Unknown ids are ignored."""
        if self._held.pop(session_id, None) is not None:
            del self._used_at[session_id]
            self._num_bytes -= self._sizes.pop(session_id, 0)

    def forget(self, session_id: str) -> None:
        """Drop a session that has ended, so that later calls do not find it even while a caller still uses it."""
        self.drop(session_id)
        self._alive.pop(session_id, None)

    def evict(self) -> list[str]:
        """Drop idle sessions, then the least recently used ones until the quota is met. Returns the ids."""
        idle_since = self._now() - self._idle_s
        evicted: list[str] = []
        for session_id in list(self._held):
            if self._used_at[session_id] > idle_since and not self.is_full:
                break
            if self._held[session_id].num_open_calls == 0:
                self.drop(session_id)
                evicted.append(session_id)
        self.num_evicted += len(evicted)
        return evicted


class StoreJournal:
    """Writes the journal of the sessions in memory to their store. A write counts as a use of its session."""

    def __init__(self, store: SessionStore, cache: SessionCache, on_finished: Callable[[str], None]) -> None:
        """`on_finished` is called with the owner when an open session becomes finished."""
        self._store = store
        self._cache = cache
        self._on_finished = on_finished

    def open_call(self, session_id: str, call_record: CallRecord) -> None:
        """Store that a call is open. Raises SessionNotFound for a deleted session, and ServiceUnavailable."""
        if self._cache.get(session_id) is None:
            raise _not_found(session_id)
        self._store.open_call(session_id, call_record)

    async def close_call(self, session_id: str, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        """Store the result of a call, and update the session's size."""
        await self._store.close_call(session_id, call_record, nodes)
        self._cache.get(session_id)

    async def save(self, record: SessionRecord) -> None:
        """Replace the session's record."""
        if await self._store.save(record):
            self._on_finished(record.owner)


class Sessions:
    """All sessions of one process. `await start()`, and in the end `await close()`, on one event loop."""

    def __init__(
        self,
        where: str | Path | Home,
        *,
        parts: SessionParts,
        coordinator: FrontPort,
        connect: Connect,
        secret: str,
        limits: SessionLimits = SessionLimits(),
        leases: LeaseConfig = LeaseConfig(),  # noqa: B008 - frozen
        reports: ReportConfig = ReportConfig(),  # noqa: B008 - frozen
        shards: ShardRouter | None = None,
        executor: Executor | None = None,
        min_free_bytes: int = 0,
    ) -> None:
        """Wire the registry.

        `parts` has the clocks. `shards` routes to the endpoint's processes, if there may be others. `executor` runs
        the store; by default it has its own thread. No session is created while the disk has fewer than
        `min_free_bytes` free.
        """
        self._limits = limits
        self._shards = shards or ShardRouter(coordinator)
        self.keys = SessionKeys(secret)
        self.parts = parts  # also used for calls that no session records
        # For expiry: a jump of the system clock expires no session.
        self._time = SteadyTime(parts.unix_time, parts.clock.now)
        self.store = SessionStore(where, self._time, executor, min_free_bytes=min_free_bytes, shards=self._shards)
        self._shards.on_gained = None if isinstance(where, str | Path) else self._take_in
        self._notes = OwnedTasks("session-records")  # pending writes that mark sessions as recorded
        self.cache = SessionCache(parts.clock.now, limits.max_resident_bytes, limits.idle_s)
        # one for the process: direct calls report through it too
        self.reporter = LeaseReporter(f"ingress-{uuid.uuid4().hex}", coordinator.report_leases, reports)
        self._leases = CallLeases(
            coordinator, connect, self.reporter, vocab_size=parts.vocab_size, config=leases, tally=parts.tally
        )
        self.on_new: Callable[[str], None] | None = None  # counts a user's next session, or refuses it
        self._coordinator = coordinator
        # (owner, rollout) -> the rollout's name in the store.
        self._claims: OrderedDict[tuple[str, str], str] = OrderedDict()
        self._locks = KeyedLocks()
        self._watching: asyncio.Task[None] | None = None
        self._num_open: Counter[str] = Counter()  # by owner
        self.num_restored = 0
        self.journal = StoreJournal(self.store, self.cache, self._count_finished)

    def _count_finished(self, owner: str) -> None:
        self._num_open[owner] -= 1

    @property
    def num_open(self) -> int:
        """Open sessions of all users."""
        return self._num_open.total()

    async def start(self) -> None:
        """Open the store and start the watch, which expires, evicts and records sessions.

        Raises InvalidRequest if the file is not a session store.
        """
        await self.store.start()
        self._num_open = Counter(await self.store.num_of_owners())
        self._time.not_before(await self.store.last_use())
        await self.store.spare(self._limits.restart_grace_s)
        self._watching = asyncio.create_task(self._watch(), name="sessions-watch")

    async def close(self) -> None:
        """Stop the watch, end all open calls, release the leases and close the file. Idempotent."""
        if self._watching is not None:
            watching, self._watching = self._watching, None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        stopping = ServiceUnavailable("the service is stopping")
        await asyncio.gather(*(session.close(stopping) for session in self.cache.sessions))
        await self._leases.close()
        await self.reporter.close()
        await self._notes.close()
        await self.store.close()

    def check_health(self) -> None:
        """Raise the error that ended the watch, or ServiceUnavailable once another process has taken the sessions
        over.

        This process must then be replaced.
        """
        if self.store.is_taken_over:
            raise ServiceUnavailable("another process has taken these sessions over")
        if self._watching is not None and self._watching.done():
            self._watching.result()

    # Requests

    async def create(self, wanted: NewSession, names: Sequence[str]) -> Session:
        """Create a session of the user with these names. A repeat before the first call returns the same session.

        Raises Conflict for a used id or for a rollout that was submitted, Overloaded, InvalidRequest.
        """
        owner = names[0]
        if wanted.rollout_id != SESSIONS_ROLLOUT_ID:
            wanted = replace(wanted, rollout_id=await self._claimed(wanted.rollout_id, names))
        record = replace(self._new_record(wanted, owner, is_one_off=False), has_control_key=True)
        async with self._locks.of(record.session_id):
            created = await self._create(record)
            if created is not None:
                return created
            try:
                known = await self._found(record.session_id, owner)
            except AgentLoopError as error:
                raise Conflict(
                    f"session id {wanted.session_id!r} was used before: choose another", param="session_id"
                ) from error
            if replace(known.record, created_at=record.created_at) != record or known.calls or known.num_open_calls:
                raise Conflict(
                    f"session {wanted.session_id!r} exists with other settings or with calls: choose another id",
                    param="session_id",
                )
            return known

    def resident(self, session_id: str, user_names: Sequence[str] | None) -> Session | None:
        """Return the session if it is in memory and is the caller's (`possible_ids`)."""
        for name, owner in possible_ids(session_id, user_names):
            session = self.cache.get(name)
            if session is not None and owner in (None, session.record.owner):
                return session
        return None

    async def find(self, session_id: str, user_names: Sequence[str] | None, *, is_admin: bool = False) -> Session:
        """Return a session of the caller, open or finished; an admin gets any user's session with this id.

        Raises SessionNotFound (also for another user's and for deleted sessions), Gone if it has expired,
        SessionLost if it may have been on a lost host, and Conflict if an admin's id matches sessions of several
        users.
        """
        if (session := self.resident(session_id, user_names)) is not None:
            return session
        for name, owner in possible_ids(session_id, user_names):
            async with self._locks.of(name):
                try:
                    return await self._found(name, owner)
                except SessionNotFound:
                    continue
        if is_admin:
            names = [session_id] if is_own_id(session_id) else await self.store.shown_as(session_id)
            if len(names) > 1:
                raise Conflict(
                    f"several users have a session {session_id!r}: use one of the full ids {', '.join(names)}",
                    param="session_id",
                )
            for name in names:
                async with self._locks.of(name):
                    return await self._found(name, None)
        raise self._shards.lost(session_id) if self._shards.is_inherited(session_id) else _not_found(session_id)

    async def find_or_create(
        self, session_id: str | None, names: Sequence[str], traceparent: str = "", adapter: str = ""
    ) -> Session:
        """Return a session, created at its first use; None: a one-off session. Raises as `find`, Overloaded."""
        wanted = NewSession(session_id, traceparent=traceparent, adapter=adapter)
        if session_id is None:
            session = await self._create(self._new_record(wanted, names[0], is_one_off=True))
            if session is None:
                raise ServiceUnavailable("the generated session id is in use: retry")
            return session
        try:
            return await self.find(session_id, names)
        except (SessionNotFound, SessionLost):
            record = self._new_record(wanted, names[0], is_one_off=False)
        async with self._locks.of(record.session_id):
            session = await self._create(record)
            return session if session is not None else await self._found(record.session_id, record.owner)

    async def of_user(self, names: Sequence[str], after: str, limit: int) -> list[SessionRecord]:
        """Return up to `limit` open and finished sessions of a user in this process, with ids after `after`."""
        return await self.store.of_owners(names, after, limit)

    async def finish(
        self,
        session_id: str,
        user_names: Sequence[str] | None,
        end: SessionEnd = SessionEnd(),  # noqa: B008 - frozen
    ) -> Trajectory:
        """Finish a session. Returns its trajectory once the run's store has it. Idempotent.

        Raises the errors of `find`, and Conflict if another session's record has its position. After
        ServiceUnavailable the session is finished and is recorded later.
        """
        session = await self.find(session_id, user_names)
        has_just_ended = session.record.state is SessionState.OPEN
        trajectory = await session.finish(end)
        self._leases.end(session.session_id)
        async with self._locks.of(session.session_id):
            await self._record(session, trajectory, has_just_ended=has_just_ended)
        return trajectory

    async def delete(self, session_id: str, user_names: Sequence[str] | None) -> None:
        """Delete a session permanently, without a record; its id is never used again. Raises the errors of
        `find`."""
        own = (await self.find(session_id, user_names)).session_id
        async with self._locks.of(own):
            session = await self._found(own, None)
            state = None if session.record.is_one_off else SessionState.DELETED
            await self._delete(session, state, _not_found(own))

    # Internals

    def _new_record(self, wanted: NewSession, owner: str, *, is_one_off: bool) -> SessionRecord:
        limits = self._limits
        given = self._shards.new_id() if wanted.session_id is None else wanted.session_id
        if _SESSION_ID.fullmatch(given) is None:
            raise InvalidRequest(
                f"session id {given[:200]!r}: expected 1 to 128 letters, digits, `.`, `_` or `-`",
                param="session_id",
            )
        usual_s = limits.one_off_ttl_s if is_one_off else limits.ttl_s
        ttl_s = usual_s if wanted.ttl_s is None else wanted.ttl_s
        if not 0 < ttl_s <= limits.max_ttl_s:
            raise InvalidRequest(
                f"ttl_s is {ttl_s:g}: expected a value in (0, {limits.max_ttl_s:g}]", param="ttl_s"
            )
        return SessionRecord(
            session_id=own_id(owner, given),
            created_at=self.parts.unix_time(),
            ttl_s=ttl_s,
            owner=owner,
            rollout_id=own_id(owner, SESSIONS_ROLLOUT_ID)
            if wanted.rollout_id == SESSIONS_ROLLOUT_ID
            else wanted.rollout_id,
            group_id=wanted.group_id,
            task_id=wanted.task_id,
            sample_index=wanted.sample_index,
            is_one_off=is_one_off,
            refuses_overflow=wanted.refuses_overflow,
            gives_unread_calls=wanted.gives_unread_calls,
            task_messages=wanted.task_messages,
            traceparent=wanted.traceparent,
            weight_version=wanted.weight_version,
            adapter=wanted.adapter,
            credit=wanted.credit,
        )

    async def _claimed(self, rollout_id: str, names: Sequence[str]) -> str:
        """Claim a rollout name for a user's sessions and return its name in the store. Raises Conflict, Gone."""
        known = self._claims.get((names[0], rollout_id))
        if known is None:
            try:
                async with asyncio.timeout(self._limits.record_timeout_s):
                    known = await self._coordinator.claim(rollout_id, tuple(names))
            except TimeoutError as error:
                raise ServiceUnavailable("the coordinator did not answer in time; retry") from error
            self._claims[names[0], rollout_id] = known
            if len(self._claims) > _MAX_CLAIMS:
                self._claims.popitem(last=False)
        return known

    async def _create(self, record: SessionRecord) -> Session | None:
        """Create a session durably; None if its id was used. Raises Overloaded."""
        if self._num_open[record.owner] >= self._limits.max_sessions:
            if await self.store.load(record.session_id) is not None:
                return None
            raise Overloaded(f"the user has {self._limits.max_sessions} open sessions, the maximum: finish one")
        if self.on_new is not None:
            self.on_new(record.owner)
        self._make_room()
        return self._resident(record) if await run_to_end(self._store_new(record)) else None

    async def _store_new(self, record: SessionRecord) -> bool:  # counts stored sessions even if the caller leaves
        self._num_open[record.owner] += 1  # its place, before another task runs
        is_new = False
        try:
            is_new = await self.store.create(record)
        finally:
            self._num_open[record.owner] -= not is_new
        return is_new

    async def _found(self, session_id: str, owner: str | None) -> Session:
        """Find the session in memory or on disk; an `owner` of None matches all. The caller holds its lock."""
        session = self.cache.get(session_id)
        if session is not None:
            return _owned(session, owner)
        stored = await self.store.load(session_id)
        if stored is None or stored.state is SessionState.DELETED or owner not in (None, stored.owner):
            raise _not_found(session_id)
        if stored.state is SessionState.GONE:
            raise _gone(session_id)
        if stored.expires_at <= self._time():
            session = self._restored(stored)
            await self._expire(session_id, session)
            raise _gone(session_id, session.record.rollout_id)
        self._make_room()
        return self._restored(stored)

    def _restored(self, stored: StoredSession) -> Session:
        assert stored.record is not None  # only tombstones have no record
        self.num_restored += 1
        return self._resident(stored.record, stored.nodes, stored.calls)

    def _resident(
        self, record: SessionRecord, nodes: Sequence[Node] = (), calls: Sequence[CallRecord] = ()
    ) -> Session:
        engine = self._leases.engine(record.session_id)
        session = Session(record, parts=self.parts, engine=engine, journal=self.journal, nodes=nodes, calls=calls)
        self.cache.add(session)
        return session

    def _make_room(self) -> None:
        """Raise Overloaded if sessions with open calls use all of the memory."""
        if self.cache.is_full:
            self._evict()
            if self.cache.is_full:
                raise Overloaded("sessions with open calls use all of the endpoint's session memory: retry later")

    def _evict(self) -> None:
        for session_id in self.cache.evict():
            self._leases.release(session_id)

    async def _delete(self, session: Session, state: SessionState | None, error: AgentLoopError) -> None:
        """Delete a session's data; later calls raise `error`. The caller holds its lock."""
        session_id = session.session_id
        await session.close(error)
        self._leases.end(session_id)
        self.cache.forget(session_id)  # if the disk fails now, the next lookup restores the session from it
        await run_to_end(self._delete_stored(session_id, session.record.owner, state))

    async def _delete_stored(self, session_id: str, owner: str, state: SessionState | None) -> None:
        self._num_open[owner] -= await self.store.delete(session_id, state)

    async def _take_in(self, places: Collection[int]) -> None:
        """Take over the sessions of a lost process."""
        num_open = await self.store.take_in(places)
        self._time.not_before(await self.store.last_use(places))
        await self.store.spare(self._limits.restart_grace_s, places)
        self._num_open.update(await self.store.num_of_owners(places))
        _log.info("sessions_taken_in", num_open=num_open, num_places=len(places))

    # The watch

    async def _watch(self) -> None:
        while True:
            await self.parts.clock.sleep(self._limits.watch_interval_s)
            self._evict()
            try:
                await self._expire_all()
                await self._record_pending()
            except StorageFull as error:  # the store has logged it
                _log.debug("sessions_not_settled", code=error.code, error=str(error))
            except AgentLoopError as error:  # the disk or the coordinator may recover; pending records stay pending
                _log.error("sessions_not_settled", code=error.code, error=str(error))

    async def _expire_all(self) -> None:
        while expired := await self.store.expired(_PAGE):
            for session_id in expired:
                async with self._locks.of(session_id):
                    session = self.cache.get(session_id)
                    if session is None:
                        stored = await self.store.load(session_id)
                        if stored is None or stored.state not in (SessionState.OPEN, SessionState.FINISHED):
                            continue  # another task was faster
                        if stored.record is None:
                            await self._delete_stored(session_id, stored.owner, SessionState.GONE)
                            continue
                        session = self._restored(stored)
                    await self._expire(session_id, session)

    async def _expire(self, session_id: str, session: Session) -> None:
        """End an expired session, or extend it while calls are open. The caller holds its lock."""
        if session.num_open_calls:
            await self.store.extend(session_id)
            return
        is_open, is_one_off = session.record.state is SessionState.OPEN, session.record.is_one_off
        if not (is_open and is_one_off and session.num_turns == 0):
            # Expiry is the normal end of a one-off session: its client cannot finish it.
            reason = StopReason.COMPLETED if is_one_off else StopReason.DEADLINE
            error = "" if is_one_off else "the session expired"
            await self._record_or_give_up(session, await session.finish(SessionEnd(reason, error)))
        await self._delete(
            session, None if is_one_off else SessionState.GONE, _gone(session_id, session.record.rollout_id)
        )
        _log.info("session_expired", session=session_id, was_open=is_open)

    async def _record_pending(self) -> None:
        """Record sessions that finished while the coordinator or this process was not running."""
        after = ""
        while pending := await self.store.pending(after, _PAGE):
            after = pending[-1]
            for session_id in pending:
                async with self._locks.of(session_id):
                    try:
                        session = await self._found(session_id, None)
                    except (SessionNotFound, Gone):
                        continue
                    await self._record_or_give_up(session, await session.finish())

    async def _record_or_give_up(self, session: Session, trajectory: Trajectory) -> None:
        """Record the session, or mark that it never can be. Raises retryable errors."""
        try:
            await self._record(session, trajectory)
        except AgentLoopError as error:
            if error.retryable:
                raise
            _log.error("session_not_recorded", session=session.session_id, code=error.code, error=str(error))
            self._notes.start(self.store.mark_recorded(session.session_id))

    async def _record(self, session: Session, trajectory: Trajectory, *, has_just_ended: bool = False) -> None:
        """Send a finished session's trajectory to the run's store, unless it was recorded. The caller holds its
        lock.

        Does not wait until the session is marked as recorded: if the mark is lost, the record is sent again, which
        changes nothing. Raises the coordinator's errors, and ServiceUnavailable.
        """
        session_id = session.session_id
        if not has_just_ended and await self.store.is_recorded(session_id):
            return
        self._shards.check_may_record(session_id)
        try:
            async with asyncio.timeout(self._limits.record_timeout_s):
                await self._coordinator.record(EncodedRecord.of(trajectory))
        except TimeoutError as error:
            raise ServiceUnavailable(
                "the coordinator did not store the record in time; it is sent again later"
            ) from error
        except sqlite3.Error as error:  # from a coordinator in this process
            raise ServiceUnavailable(f"the run's store failed: {error}") from error
        count_record(self.parts.tally, trajectory, "session")
        self._notes.start(self.store.mark_recorded(session_id))


def _owned(session: Session, owner: str | None) -> Session:
    """Return the session, if it is this owner's; None may be any owner. Raises SessionNotFound."""
    if owner not in (None, session.record.owner):
        raise _not_found(session.session_id)
    return session


def _not_found(session_id: str) -> SessionNotFound:
    """Return the error for an id that no session of this owner has."""
    return SessionNotFound(f"there is no session {shown_id(session_id)!r}", param="session_id")


def _gone(session_id: str, rollout_id: str | None = None) -> Gone:
    """Return the error for a session whose time is over; a tombstone does not name its rollout."""
    place = shown_id(rollout_id) if rollout_id else "ROLLOUT"
    hint = "" if rollout_id else f"; ROLLOUT is the rollout_id it was made with, else {SESSIONS_ROLLOUT_ID!r}"
    where = f"its record is among GET /rollouts/{place}/trajectories{hint}"
    return Gone(f"session {shown_id(session_id)!r} has expired: {where}", param="session_id")
