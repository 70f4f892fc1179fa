"""The calls of a session, the journal that stores them, and the call that a client's retry continues.

All methods decide synchronously. A call runs once, however many clients wait for it: the first and its retries. It
is cancelled when the last of them has disconnected, and no retry joins it after that.

A retry continues the latest call with its digest that can only be its client's own (`CallTable.continued_by`): it
joins a running call or gets the answer of a committed call. Otherwise it runs as a new call. A later call with its
digest fixes a failed call. The journal keeps the order of `open_call`, because of two calls with one digest the
later can fix the earlier.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol

import structlog

from agentloop.api.sessions import SESSIONS_ROLLOUT_ID
from agentloop.chat.call import CallKey, ChatCall, ChatResult
from agentloop.errors import AgentLoopError, DeadlineExceeded, ServiceUnavailable
from agentloop.generation.deadline import Deadline
from agentloop.generation.turn_reader import CallDelta, TurnPiece, arguments_text, finish_of, joined
from agentloop.score import Score
from agentloop.trajectory.node import CallRecord, ModelCallState, Node
from agentloop.types import Credit, Message, StopReason, TrajectoryTimes, VersionDemand

_log = structlog.stdlib.get_logger(__name__)


class SessionState(StrEnum):
    """A session's stage of life. The last two are tombstones, which only a store has."""

    OPEN = "open"
    FINISHED = "finished"  # its trajectory does not change any more
    DELETED = "deleted"
    GONE = "gone"  # expired


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session besides its calls. Times are seconds since 1970."""

    session_id: str
    created_at: float
    ttl_s: float
    owner: str = ""  # the user that made it; empty where the service asks for no keys
    state: SessionState = SessionState.OPEN
    rollout_id: str = SESSIONS_ROLLOUT_ID
    group_id: str = ""  # empty: a group with the session's name
    task_id: str = ""
    sample_index: int = 0
    score: Score = field(default_factory=Score)
    reward_error: str = ""  # the failure of a reward function
    stop_reason: StopReason | None = None
    error: str = ""
    is_one_off: bool = False
    refuses_overflow: bool = False  # a prompt that leaves no room is an error, not an empty answer
    gives_unread_calls: bool = False  # a call that cannot be read is a tool call without a name, not content
    overflow_at: int | None = None  # the turns that there were when a prompt last left no room
    finished_at: float | None = None
    times: TrajectoryTimes | None = None  # since it is finished
    task_messages: tuple[Message, ...] = ()  # the main conversation begins with them
    has_control_key: bool = False  # its maker was given one; without users it alone ends the session
    is_revoked: bool = False  # it takes no calls any more
    traceparent: str = ""  # the W3C trace context of its maker
    weight_version: VersionDemand | None = None  # the default for its calls
    adapter: str = ""  # the adapter of all its calls; empty: the base weights
    credit: Credit = Credit.LINEAGE


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """The end of a session as its agent gives it: reason, fault and score."""

    stop_reason: StopReason = StopReason.COMPLETED
    error: str = ""  # the record is incomplete then
    score: Score = field(default_factory=Score)  # replaces the score that was set before
    reward_error: str = ""  # why there is no reward
    wait_s: float = 0.0  # for calls that run


class Journal(Protocol):
    """The durable record of sessions. A method that raises has stored nothing; writes are kept in order.

    A session bounds its waits: a write that it gave up on may still arrive. Later writes about a call replace
    earlier ones, so a `close_call` with FAILED after one with COMMITTED takes the call's nodes away.
    """

    def open_call(self, session_id: str, call_record: CallRecord) -> None:
        """Keep that a call is open, before its first token is sampled. Takes microseconds: no disk is awaited."""

    async def close_call(self, session_id: str, call_record: CallRecord, nodes: Sequence[Node]) -> None:
        """Keep the end of a call: COMMITTED with its nodes, or FAILED. Durable on return."""

    async def save(self, record: SessionRecord) -> None:
        """Replace the session's record. Durable on return."""


async def write(writing: Coroutine[Any, Any, None], session_id: str, timeout_s: float) -> None:
    """Await a write to a journal. Raises ServiceUnavailable if it is late or fails, or the write's AgentLoopError.

    Only for callers that run to their end: cancelling the caller cancels the write.
    """
    scope = asyncio.timeout(timeout_s)
    try:
        async with scope:
            await writing
    except AgentLoopError:
        raise
    except Exception as error:  # an error of the disk, or of the thread that writes
        if isinstance(error, TimeoutError) and scope.expired():
            late = f"the session's journal did not answer within {timeout_s:g} s"
            raise ServiceUnavailable(late) from error
        raise write_failure(session_id, error) from error


def write_failure(session_id: str, error: Exception) -> ServiceUnavailable:
    """Log a journal's error that is not an AgentLoopError, and return it as ServiceUnavailable."""
    _log.error("journal_failed", session=session_id, error=repr(error))
    return ServiceUnavailable(f"the session's journal failed: {error}")


_RECORD_BYTES = 215  # including its entry in a dict


class LiveCall:
    """A running call: the number of its clients, its pieces so far, and its outcome."""

    def __init__(
        self, call_id: str, chat_call: ChatCall, key: CallKey, *, created_at: int, is_streamed: bool
    ) -> None:
        """Create the call inside a running loop. Its deadline starts now."""
        loop = asyncio.get_running_loop()
        self.call_id = call_id
        self.chat_call = chat_call
        self.digest = key.digest
        self.created_at = created_at
        self.is_streamed = is_streamed
        self.deadline = Deadline(loop.time() + chat_call.timeout_s)
        self.is_begun = False  # in the journal
        self.is_past_giving_up = False  # it is sampled, and is committed even if all clients leave
        self.num_new_tokens = 0  # new tokens of the prompt, stored when the call is committed
        self.generate_s = 0.0
        self.result: ChatResult | None = None
        self.failure: BaseException | None = None  # why it will fail, as soon as that is known
        self.pieces: list[TurnPiece] = []  # bounded by the reply
        self.task: asyncio.Task[None] | None = None
        self._held: list[TurnPiece] = []  # a choice's last piece says that it is good: it waits for the journal
        self._num_waiting = 0
        self._outcome: asyncio.Future[ChatResult] = loop.create_future()
        self._readers: set[asyncio.Event] = set()
        self._scope: asyncio.Timeout | None = None

    def turn_id(self, choice_index: int) -> str:
        """Return the id of a choice's turn."""
        return f"{self.call_id}.{choice_index}"

    def join(self) -> None:
        """Add a waiting client."""
        self._num_waiting += 1

    @property
    def has_clients(self) -> bool:
        return self._num_waiting > 0

    def leave(self) -> None:
        """Remove a waiting client. The call is given up when the last client leaves."""
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self.give_up(AgentLoopError("its client left before the answer"))

    def give_up(self, error: AgentLoopError) -> None:
        """End the call with `error` unless it is already sampled. Idempotent."""
        if self.failure is not None or self.is_past_giving_up or self._outcome.done():
            return
        self.failure = error
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(asyncio.get_running_loop().time())

    @asynccontextmanager
    async def interruptible(self) -> AsyncIterator[None]:
        """Run a block that ends with DeadlineExceeded at the deadline, or with the error of `give_up`."""
        if self.failure is not None:
            raise self.failure
        scope = asyncio.timeout_at(self.deadline.at)
        try:
            async with scope:
                self._scope = scope
                try:
                    yield
                finally:
                    self._scope = None
        except TimeoutError as error:
            if not scope.expired():
                raise
            late = DeadlineExceeded(f"no answer within {self.chat_call.timeout_s:g} s")
            raise (self.failure if self.failure is not None else late) from error
        if self.failure is not None:
            raise self.failure  # `give_up` was called as the block ended

    def add_piece(self, piece: TurnPiece) -> None:
        """Add a piece for the streaming clients. A choice's last piece is held until `succeed`."""
        if piece.finish is not None:
            self._held.append(piece)
            return
        self.pieces.append(piece)
        self._wake()

    def succeed(self, result: ChatResult) -> None:
        self.pieces += sorted(self._held, key=lambda piece: piece.choice_index)
        self._outcome.set_result(result)
        self._wake()

    def fail(self, error: BaseException) -> None:
        self._outcome.set_exception(error)
        self._outcome.exception()  # marks it as retrieved: all waiting clients may have left
        self._wake()

    async def answer(self) -> ChatResult:
        """Return the result when the call ends. Cancelling the caller does not affect the call."""
        return await asyncio.shield(self._outcome)

    async def read(self) -> AsyncGenerator[TurnPiece | ChatResult, None]:
        """Yield all pieces from the first, then the result.

        An answer without streaming has one piece per choice.
        """
        news = asyncio.Event()
        self._readers.add(news)
        position = 0
        try:
            while True:
                while position < len(self.pieces):
                    waiting, position = self.pieces[position:], len(self.pieces)
                    for piece in joined(waiting):  # several only where this reader, or the process, is behind
                        yield piece
                if self._outcome.done():
                    break
                news.clear()
                await news.wait()
        finally:
            self._readers.discard(news)
        result = self._outcome.result()
        if not self.is_streamed:
            for piece in whole_pieces(result.choices):
                yield piece
        yield result

    def _wake(self) -> None:
        for news in self._readers:
            news.set()


class CallTable:
    """The running calls of a session, and the records of all calls in the order of their starts."""

    def __init__(self, records: Iterable[CallRecord] = ()) -> None:
        """`records` are an earlier process's, in the journal's order. Its open calls count as failed."""
        self.live: dict[str, LiveCall] = {}
        self._records: dict[str, CallRecord] = {}
        self._retry_counts: dict[str, int] = {}  # the latest retry that a call answers; 0 for other calls
        self._lost: set[str] = set()  # calls whose clients left before the answer
        self._num_unrecorded: Counter[bytes] = Counter()  # calls that failed before the journal had them, by digest
        self._num_restarts: Counter[bytes] = Counter()  # attempts without an answer whose client has retried
        for record in records:
            if record.state is ModelCallState.OPEN:
                record = replace(record, state=ModelCallState.FAILED, error="the process that ran it ended")
            self._records[record.call_id] = record

    @property
    def num_calls(self) -> int:
        """The number of calls, including calls that are not in the journal yet."""
        return len(self._records) + sum(not live.is_begun for live in self.live.values())

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory use in bytes."""
        return _RECORD_BYTES * (len(self._records) + len(self.live))

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """Calls in the journal, in the order of their starts."""
        return tuple(self._records.values())

    def continued_by(self, key: CallKey) -> LiveCall | CallRecord | None:
        """Return the call that a retry continues; None if it is a new sample. Scans all calls: retries are few.

        Agents that sample a prompt several times send equal bodies. So without a unique digest a call is continued
        only if no other client can be waiting for its answer.
        """
        equal = self._equal_calls(key)
        if key.is_unique:
            return equal[-1] if equal and _can_answer(equal[-1]) else None
        answerable = [call for call in equal if _can_answer(call)]
        is_only = len(answerable) == 1 and not self.num_unanswered(key)
        for call in reversed(answerable):
            # A client counts its retries up: an equal or higher count of the call belongs to another client.
            is_later = self._retry_counts.get(call.call_id, 0) < key.retry_count
            if is_later and (is_only or call.call_id in self._lost):
                return call
        return None

    def num_unanswered(self, key: CallKey) -> int:
        """Return the number of equal attempts without an answer whose clients have not retried yet.

        They failed or were rejected. A retry that starts a new call belongs to one of these clients
        (`note_restart`); to which one makes no difference, because the attempts are equal.
        """
        num_failed = sum(not _can_answer(call) for call in self._equal_calls(key))
        num_attempts = key.num_refused + self._num_unrecorded[key.digest] + num_failed
        return max(0, num_attempts - self._num_restarts[key.digest])

    def note_restart(self, key: CallKey) -> None:
        """Record that a client whose attempt has no answer started a new call."""
        self._num_restarts[key.digest] += 1

    def note_unrecorded(self, live: LiveCall) -> None:
        """Record a call that failed before the journal had it."""
        self._num_unrecorded[live.digest] += 1

    def _equal_calls(self, key: CallKey) -> list[LiveCall | CallRecord]:
        recorded = [record for record in self._records.values() if record.digest == key.digest]
        starting = [live for live in self.live.values() if live.digest == key.digest and not live.is_begun]
        return [*(self.live.get(record.call_id, record) for record in recorded), *starting]

    def note_client(self, call_id: str, key: CallKey) -> None:
        """Record the client that a call answers from now on."""
        self._lost.discard(call_id)
        if key.retry_count > 0:
            self._retry_counts[call_id] = key.retry_count

    def leave(self, live: LiveCall, *, is_answered: bool) -> None:
        """Record that a client left, with its answer or before it."""
        live.leave()
        if not (is_answered or live.has_clients):
            self._lost.add(live.call_id)

    def unhealed_failures(self) -> list[CallRecord]:
        """Return the failed calls that no later call with the same digest fixed."""
        found = []
        healed: set[bytes] = set()
        for record in reversed(self._records.values()):
            if record.state is ModelCallState.COMMITTED and not record.error:
                healed.add(record.digest)
            elif record.state is ModelCallState.FAILED and record.digest not in healed:
                found.append(record)
        return found[::-1]

    @property
    def num_healed(self) -> int:
        """The number of failed calls that a later call with the same digest fixed."""
        num_failed = sum(record.state is ModelCallState.FAILED for record in self._records.values())
        return num_failed - len(self.unhealed_failures())

    def note(self, record: CallRecord) -> None:
        """Replace the record of a call in the journal."""
        self._records[record.call_id] = record


def _can_answer(call: LiveCall | CallRecord) -> bool:
    """Return True if the call runs or has an answer."""
    if isinstance(call, LiveCall):
        return call.failure is None
    return call.state is ModelCallState.COMMITTED and not call.error


def record_of(live: LiveCall, state: ModelCallState, *, error: str = "") -> CallRecord:
    """Return the journal record of a call."""
    return CallRecord(live.call_id, live.digest, live.created_at, state, error, live.generate_s)


def whole_pieces(choices: Iterable[Node]) -> list[TurnPiece]:
    """Return an answer as the pieces of a stream, one per choice."""
    return [_whole_piece(node) for node in choices]


def _whole_piece(node: Node) -> TurnPiece:
    reply, message = node.reply, node.reply.message
    calls = []
    for index, call in enumerate(message.tool_calls):
        calls += [CallDelta(index, call.id, call.name), CallDelta(index, arguments=arguments_text(call))]
    return TurnPiece(
        node.choice_index,
        message.content,
        message.reasoning,
        tuple(calls),
        tuple(reply.token_ids.tolist()),
        tuple(reply.logprobs.tolist()),
        reply.top_logprobs,
        reply.weight_versions,
        finish_of(reply),
    )
