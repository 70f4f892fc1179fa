"""Calls of engines under a lease: a turn runs in one or more rounds, each of which is one engine request.

A round ends with the turn, by an engine's abort, or by a failure. Tokens that the engine has reported are kept: the
next round continues from them, on the same or another replica, as a new version span. `_TurnRounds` holds a turn's
state, and `LeasedEngine._rounds` runs it; the reason for each kind of retry is at its branch. A turn that is not
streamed is requested as a whole, because answers per token halve the rate of a front end.

Invariants: all calls of `TokenEngine.generate`, `stream` and `image_tokens` under a lease are made here; every
reply and piece that leaves this module was checked once (`check_generation`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypedDict, TypeVar, Unpack
from weakref import WeakValueDictionary

import structlog
import xxhash
from structlog.contextvars import bind_contextvars

from agentloop.api.coordinator import LeasePort
from agentloop.concurrency.clock import Stopwatch
from agentloop.engine.interface import Delta, Progress, TokenEngine
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    EngineUnreachable,
    EngineUnusable,
    InvariantBroken,
    MalformedEngineResponse,
    ModelNotFound,
    NoHealthyReplica,
    ServiceUnavailable,
    WeightVersionNotServed,
)
from agentloop.generation.deadline import Deadline, loop_time
from agentloop.generation.leases import LeaseConfig, LeaseHolder, LeaseReporter
from agentloop.images import Image, ImageTokens
from agentloop.observability.metrics import MetricsTally
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease, LossCause, Move, TurnTimes
from agentloop.values import codec
from agentloop.values.aux_rows import AuxKind
from agentloop.values.capabilities import Feature, Needs, bits_of, needs_of
from agentloop.values.checks import MAX_SEED, MAX_VOCAB_SIZE, check_generation, check_piece
from agentloop.values.sampled_tokens import SampledTokens

T = TypeVar("T")

Connect = Callable[[str], TokenEngine]
"""Returns the engine at a replica's private URL."""

AbortRule: TypeAlias = Callable[[SampledTokens], bool]
"""Returns True if a turn with these tokens continues after an engine's abort."""

MAX_ABORTS = 32  # in a row, without a token between

ABORT_GRACE_S = 5.0
"""Seconds that an engine has to report the tokens of a turn that its caller aborts; it reports more often."""

TURN_GRACE_S = 20.0
"""Seconds after its deadline within which a call with `keeps_late` ends: its engine returns the tokens, or is
lost."""

_SILENCE_S = 10.0  # a round of this length without a token means a silent replica
_REFUSED_S = 60.0
_LATE_S = 0.5  # the replica's clock may reach a deadline this much earlier
_IMAGES = Needs(bits_of(frozenset({Feature.IMAGES})))
_MAX_OLDER = 12  # rounds in a row, about 20 s, with weights older than the turn's
_FIRST_PAUSE_S = 0.1  # before the second round, at most; then doubled
_MAX_PAUSE_S = 5.0
_VERSION_POLL_S = 0.5
_SUSPECT_PAUSE_S = 5.0  # before the third round in a row of a request that fails; then doubled
_MAX_SUSPECT_PAUSE_S = 20.0

_MAX_SILENT_GENERATIONS = 1000  # a replica's version is dropped after so many of other replicas

_log = structlog.stdlib.get_logger(__name__)


class NewestVersion:
    """The newest weight version in the generations of a worker, for one adapter or the base weights.

    It is the newest of the versions that the replicas reported last. If a replica reports an older version than
    before, the fleet was rolled back, so the value may decrease.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        self._said: dict[str, tuple[int, int]] = {}  # replica id -> (version, number of that generation)
        self._num_seen = 0

    def see(self, generation: Generation, *, is_adapters: bool = False) -> None:
        """Record a generation's version: its last span's, or for base weights its load's if that is newer."""
        heard = [span.version for span in generation.weight_versions[-1:]]
        if generation.load.weight_version is not None and not is_adapters:
            heard.append(generation.load.weight_version)
        if not heard:
            return
        self._num_seen += 1
        said = max(heard)
        self._said[generation.replica_id] = said, self._num_seen
        if self.value is not None and said < self.value:
            since = self._num_seen - _MAX_SILENT_GENERATIONS
            said = max(version for version, number in self._said.values() if number > since)
        self.value = said


NewestVersions: TypeAlias = defaultdict[str, NewestVersion]
"""By adapter; "" is the base weights."""


@dataclass(slots=True)
class TurnClock:
    """The times of a running turn, in microseconds since its trajectory began."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    begun_us: int = -1
    first_token_us: int | None = None
    queue_us: int = 0
    unavailable_us: int = 0
    queues_since_us: int | None = None  # set while the turn waits for a replica

    def __post_init__(self) -> None:
        self.begun_us = self.stopwatch()

    def note_first_token(self, decode_s: float = 0.0) -> None:
        """Record the first token, which was sampled `decode_s` ago."""
        self.first_token_us = max(self.stopwatch() - round(decode_s * 1e6), self.begun_us)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Within this context the turn waits for a replica."""
        self.queues_since_us = since = self.stopwatch()
        try:
            yield
        finally:
            self.queues_since_us = None
            self.queue_us += self.stopwatch() - since

    def times(self) -> TurnTimes:
        """Return the times of the turn, which ends now."""
        return TurnTimes(self.begun_us, self.first_token_us, self.stopwatch(), self.queue_us, self.unavailable_us)


class AbortSwitch:
    """Ends a turn early and keeps the tokens sampled so far.

    A turn with a switch also ends at an abort by its engine.
    """

    def __init__(self) -> None:
        self.is_thrown = False
        self.ends_at: float | None = None  # the turn is ended here at this time, if it is still running
        self._scope: asyncio.Timeout | None = None  # the timeout of the turn's running work
        self._round: tuple[TokenEngine, str] | None = None  # the engine's running request

    async def throw(self) -> None:
        """End the turn. Its engine has `ABORT_GRACE_S` to report the sampled tokens. Idempotent."""
        if self.is_thrown:
            return
        self.is_thrown = True
        asked = self._round
        self.ends_at = loop_time() + (0.0 if asked is None else ABORT_GRACE_S)
        if self._scope is not None:
            self._scope.reschedule(self.ends_at)
        if asked is not None:
            engine, request_id = asked
            with suppress(AgentLoopError, TimeoutError):
                async with asyncio.timeout_at(self.ends_at):
                    await engine.abort(request_id)

    @contextmanager
    def guarding(self, scope: asyncio.Timeout) -> Iterator[None]:
        """Within this context the switch ends `scope`."""
        self._scope = scope
        try:
            yield
        finally:
            self._scope = None

    @contextmanager
    def asking(self, engine: TokenEngine, request_id: str) -> Iterator[None]:
        """Within this context the switch aborts an engine's request."""
        self._round = engine, request_id
        try:
            yield
        finally:
            self._round = None


class _TurnAborted(Exception):
    """The switch ended the turn."""


class TurnOptions(TypedDict, total=False):
    """Options of a turn in addition to its request. The turn's times are added to `clock`.

    The caller enforces a `deadline`, for a request with `keeps_late` `TURN_GRACE_S` later. Without a deadline the
    call ends after the request's `timeout_s`. The reply ends with FinishReason.ABORT if `continues_after_abort`
    returns False after an engine's abort, or if `switch` is thrown.
    """

    deadline: Deadline | None
    continues_after_abort: AbortRule | None
    clock: TurnClock | None
    switch: AbortSwitch | None


class LeasedEngine:
    """The engine at the replica of a lease. Concurrent calls share the lease."""

    def __init__(
        self,
        connect: Connect,
        holder: LeaseHolder,
        *,
        vocab_size: int,
        max_attempts: int,
        newest: NewestVersion | None = None,
        tally: MetricsTally | None = None,
        adapter: str = "",
    ) -> None:
        """`max_attempts` bounds a turn's consecutive failures; `newest` records every generation's version."""
        self.connect = connect
        self.adapter = adapter
        self.tally = MetricsTally() if tally is None else tally
        self._holder = holder
        self._vocab_size = vocab_size
        self._max_attempts = max_attempts
        self._newest = newest
        self.engine_s = 0.0  # seconds in engines, of the rounds that succeeded
        self.num_resampled = 0  # failed rounds that left no tokens
        self.moves: list[Move] = []
        self.lost_tokens: Counter[LossCause] = Counter()
        self._replica_id = ""  # the last round's
        self.turn: TurnClock | None = None  # the latest running call's

    @property
    def process_id(self) -> str:
        """The process that holds the lease."""
        return self._holder.process_id

    async def image_tokens(
        self, request: GenerateRequest, images: Sequence[Image], *, deadline: Deadline | None = None
    ) -> tuple[ImageTokens, ...]:
        """Call `TokenEngine.image_tokens` under the lease that `request` will have."""
        turn = _TurnRounds(request, SampledTokens(), self._vocab_size, deadline=deadline)

        async def asked() -> tuple[ImageTokens, ...]:
            while True:
                lease = await self._lease(turn, turn.next_request(), _IMAGES)
                try:
                    return await self.connect(lease.url).image_tokens(images)
                except AgentLoopError as error:
                    await self._recover(turn, lease, error)

        return await turn.in_time(asked())

    async def generate(
        self, request: GenerateRequest, sampled: SampledTokens | None = None, **options: Unpack[TurnOptions]
    ) -> Generation:
        """Run a request, as `TokenEngine.generate` does, in as many rounds as needed.

        `request.timeout_s` bounds each round. Tokens are added to `sampled`, which is empty. Raises the last
        round's error, or DeadlineExceeded.
        """
        turn = _TurnRounds(request, sampled, self._vocab_size, **options)
        async with aclosing(self._rounds(turn)) as items:
            async for item in items:
                if isinstance(item, Generation):
                    return item
        raise InvariantBroken("a turn ended without its generation")

    def stream(
        self,
        request: GenerateRequest,
        sampled: SampledTokens | None = None,
        *,
        is_shown: bool = True,
        **options: Unpack[TurnOptions],
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Run a request as `generate` does and yield its pieces, then the `Generation`. Close it to end the
        request.

        With `is_shown` the caller has passed the pieces on, so they are final; otherwise `sampled` may be cut
        before the next piece.
        """
        turn = _TurnRounds(request, sampled, self._vocab_size, is_streamed=True, is_shown=is_shown, **options)
        return self._rounds(turn)

    async def _rounds(self, turn: _TurnRounds) -> AsyncGenerator[Delta | Generation, None]:
        """Run a turn's rounds; yields pieces, then the whole generation."""
        holder, ended = self._holder, None
        holder.enter()
        self.turn = turn.clock
        try:
            while (ended := turn.ended()) is None:
                asked = turn.next_request()
                lease = await turn.in_time(self._lease(turn, asked, _needs_of(asked)))
                holder.begin()
                try:
                    async with aclosing(self._round(turn, asked, lease)) as pieces:
                        while (piece := await turn.in_time(anext(pieces, None))) is not None:
                            yield piece
                except AgentLoopError as error:
                    await turn.in_time(self._recover(turn, lease, error))
                    # These errors refuse a round before it samples, so nothing was lost.
                    is_begun = not isinstance(
                        error, EnginePaused | EngineUnreachable | WeightVersionNotServed | ModelNotFound
                    )
                    self.num_resampled += is_begun and not turn.sampled
            yield ended
        except _TurnAborted:
            yield (ended := turn.aborted())
        except WeightVersionNotServed as error:
            # No replica has weights that the call accepts. A call with `keeps_late` gets its tokens as an abort.
            if turn.sampled and turn.request.keeps_late and (ended := turn.cut_short()) is not None:
                yield ended
                return
            self._lose(LossCause.STALE, len(turn.sampled))
            raise turn.with_tokens(error) from error
        except BaseException as error:
            # The caller enforces the deadline by cancellation. GeneratorExit means that the reader has stopped, for
            # example at a stop string, and loses nothing.
            if not isinstance(error, GeneratorExit):
                is_cut = isinstance(error, asyncio.CancelledError | DeadlineExceeded)
                self._lose(LossCause.CANCEL if is_cut else LossCause.KILL, len(turn.sampled))
            # No time is left for a retry, but the next call must not use a silent replica.
            if turn.silent_lease is not None:
                holder.give_up(turn.silent_lease)
            raise
        finally:
            self.turn = None
            holder.leave(turn.last_lease, turn.request, ended or turn.cut_short())
            self._lose(LossCause.RESAMPLE, turn.num_cut)

    def _lose(self, cause: LossCause, num_tokens: int) -> None:
        if num_tokens:
            self.lost_tokens[cause] += num_tokens

    async def _round(self, turn: _TurnRounds, asked: GenerateRequest, lease: Lease) -> AsyncGenerator[Delta, None]:
        """Run one engine request; yields its pieces if the turn is streamed."""
        last, switch = None, turn.switch
        with nullcontext() if switch is None else switch.asking(self.connect(lease.url), asked.request_id):
            if not turn.is_streamed:
                last = await self.connect(lease.url).generate(asked, turn.hear)
            else:
                stream = self.connect(lease.url).stream(asked, turn.hear)
                async with aclosing(stream) as items:  # type: ignore[type-var] # engines write generators
                    async for item in items:
                        if isinstance(item, Generation):
                            last = item
                            continue
                        turn.add(item)
                        yield item
        if last is None:
            raise EngineLost(f"{lease.replica_id} ended a stream without its generation")
        check_generation(asked, last, self._vocab_size)
        self.engine_s += last.engine_s
        if self._newest is not None:
            self._newest.see(last, is_adapters=bool(asked.adapter))
        turn.end_round(last)

    async def _lease(self, turn: _TurnRounds, asked: GenerateRequest, needs: Needs) -> Lease:
        """Return the lease for a round; waits for one. Raises the last refusal when the wait times out."""
        lease = self._holder.held(needs)
        if lease is None:
            with turn.clock.queueing():
                lease = await self._waited(turn, asked, needs)
        bind_contextvars(replica=lease.replica_id)
        if lease.replica_id != self._replica_id:
            if self._replica_id:
                self.moves.append(Move(turn.clock.stopwatch(), lease.replica_id))
            self._replica_id = lease.replica_id
        turn.begin_round(lease)
        return lease

    async def _waited(self, turn: _TurnRounds, asked: GenerateRequest, needs: Needs) -> Lease:
        deadline = turn.deadline
        refusal: AgentLoopError = NoHealthyReplica("no replica is available")
        num_refused = 0
        patience_s = None if math.isinf(deadline.patience_s) else max(deadline.patience_s, 0.0)
        try:
            with deadline.standing_still():
                async with asyncio.timeout(patience_s):
                    while True:
                        asked_at = loop_time()
                        try:
                            return await self._holder.ask(asked.token_ids, needs, asked.affinity)
                        except (NoHealthyReplica, ServiceUnavailable) as error:
                            refusal = error
                        except WeightVersionNotServed as error:
                            await turn.wait_for_version(error)
                            continue
                        # The coordinator holds a poll for a while; only polls that it refuses at once are paced.
                        num_refused = 0 if loop_time() - asked_at > _MAX_PAUSE_S else num_refused + 1
                        await asyncio.sleep(_pause_s(num_refused))
        except TimeoutError as error:
            raise type(refusal)(f"{refusal.message}, for {deadline.unavailable_s:.0f} s") from error

    async def _recover(self, turn: _TurnRounds, lease: Lease, error: AgentLoopError) -> None:
        """Prepare the next round: count the failure, get another lease, and pause.

        Raises `error` if none may follow.
        """
        # The replica commits a version earlier or later than the fleet, or has just unloaded the adapter.
        if isinstance(error, WeightVersionNotServed | ModelNotFound):
            self._holder.have_ask(lease)
            turn.num_misplaced += 1
            if turn.num_misplaced > self._max_attempts:
                await turn.wait_for_version(error)
            elif isinstance(error, ModelNotFound):
                await asyncio.sleep(_pause_s(turn.num_misplaced))
            return
        if isinstance(error, MalformedEngineResponse):
            self.tally.count("logprob_problems_total")
        turn.fail_round(error)
        # Engines hold requests during a short pause. After a minute of refusals a fixed deadline would only run
        # out.
        if turn.refused_s > _REFUSED_S and turn.deadline.is_fixed:
            raise error
        # A replica's DeadlineExceeded is a failure of that replica while the call has time left.
        can_help = error.retryable or (isinstance(error, DeadlineExceeded) and turn.deadline.left_s > 0)
        if not can_help or turn.deadline.is_spent:
            raise error
        if not isinstance(error, EnginePaused):
            _log.warning("call_failed", request=turn.request.request_id, replica=lease.replica_id, error=str(error))
            with turn.deadline.standing_still(), turn.clock.queueing():
                await self._holder.failed(lease)
        # A prompt that kills replicas must not be retried on one after another without end.
        if turn.num_failures >= self._max_attempts or not turn.prepare_to_continue():
            raise error
        with turn.deadline.standing_still(), turn.clock.queueing():
            await asyncio.sleep(_pause_s(turn.num_lost, turn.num_failures))


class CallLeases:
    """The leases of a process's calls: one per session, and one per call outside of a session.

    Close it before its reporter, because it waits for running changes of leases.
    """

    def __init__(
        self,
        coordinator: LeasePort,
        connect: Connect,
        reporter: LeaseReporter,
        *,
        vocab_size: int = MAX_VOCAB_SIZE,
        config: LeaseConfig = LeaseConfig(),  # noqa: B008 - frozen
        tally: MetricsTally | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._connect = connect
        self._reporter = reporter
        self._vocab_size = vocab_size
        self._config = config
        self._tally = tally
        # Weak: a running engine keeps its holder alive, and so does the reporter while there is a lease.
        self._holders: WeakValueDictionary[str, LeaseHolder] = WeakValueDictionary()

    def engine(self, session_id: str) -> LeasedEngine:
        """Return an engine of a session, or of one call. All engines of an id share its lease."""
        holder = self._holders.get(session_id)
        if holder is None:
            timeout_s = self._config.coordinator_timeout_s
            holder = LeaseHolder(self._reporter, self._coordinator, session_id, timeout_s=timeout_s)
            self._holders[session_id] = holder
        return LeasedEngine(
            self._connect,
            holder,
            vocab_size=self._vocab_size,
            max_attempts=self._config.max_attempts,
            tally=self._tally,
        )

    def release(self, session_id: str) -> None:
        """Release a session's lease; its next call requests another."""
        if (holder := self._holders.get(session_id)) is not None:
            holder.release()

    def end(self, session_id: str) -> None:
        """Release a finished session's lease: later calls raise SessionFinished. Idempotent."""
        if (holder := self._holders.get(session_id)) is not None:
            holder.close()

    async def close(self) -> None:
        """Release every lease, and wait for running changes; each has a deadline."""
        for holder in list(self._holders.values()):
            holder.close()
        await self._reporter.changes.close()


def _needs_of(request: GenerateRequest) -> Needs:
    has_images, num_prompt_tokens = bool(request.images), len(request.token_ids)
    return needs_of(request.sampling, num_prompt_tokens, has_images=has_images, adapter=request.adapter)


def _pause_s(num_before: int, num_failures: int = 0) -> float:
    """Return a random pause before the next round: full jitter up to a bound that doubles.

    Requests that fail repeatedly wait longer, so that they run one by one: one of them may kill its replica.
    """
    longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_before, 10), _MAX_PAUSE_S)
    if num_failures > 1:
        longest_s = min(_SUSPECT_PAUSE_S * 2.0 ** min(num_failures - 2, 10), _MAX_SUSPECT_PAUSE_S)
    return random.uniform(0.0, longest_s)


class _TurnRounds:
    """The state of a turn over its rounds: the tokens so far, failures, and the next request.

    `sampled` is shared with the turn's reader (`TurnText` in `turn_sampler.py`), which cuts it at a stop string;
    all other changes are made here. Invariant: its tokens are a prefix of the reply.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sampled: SampledTokens | None,
        vocab_size: int,
        *,
        deadline: Deadline | None = None,
        continues_after_abort: AbortRule | None = None,
        clock: TurnClock | None = None,
        switch: AbortSwitch | None = None,
        is_streamed: bool = False,
        is_shown: bool = False,
    ) -> None:
        self.request = request
        self.clock = TurnClock() if clock is None else clock
        self.num_cut = 0  # dropped tokens, which are sampled again
        self.sampled = SampledTokens() if sampled is None else sampled
        self.sampled.num_prompt = len(request.token_ids)
        self.deadline = Deadline(loop_time() + request.timeout_s) if deadline is None else deadline
        self.is_streamed = is_streamed
        self.num_failures = 0  # consecutive failures that the request may have caused
        self.num_lost = 0  # consecutive failed rounds
        self.num_misplaced = 0  # rounds that a replica refused because of its weights
        self._num_older = 0  # consecutive rounds with weights older than the tokens'
        self.last_lease: Lease | None = None  # the last round's
        self._ends_at = self.deadline.at if deadline is None else None  # None: the caller enforces it
        self._vocab_size = vocab_size
        self._is_shown = is_shown
        self._continues_after_abort = continues_after_abort
        self.switch = switch
        self._num_asked = 0
        self._num_idle = 0  # consecutive aborts without a new token
        self._asked = request
        self._num_before = 0  # number of tokens at the round's start
        self._last: Generation | None = None  # the last round's, unless it failed
        self._num_cached: int | None = None  # cached prompt tokens in the first round
        self._refused_at: float | None = None  # time of the first of consecutive refusals by paused engines
        self._lease: Lease | None = None  # the round's, until it fails for another reason than silence
        self._began_at = 0.0
        self._unavailable_s = 0.0  # unavailable seconds that the round has reported
        self._patient_until: float | None = None  # set at the first refusal because of the fleet's weights
        self._heard_at = 0.0

    def ended(self) -> Generation | None:
        """Return the reply if it is complete: also if the last round failed after its last token was reported."""
        last, sampling, ids = self._last, self.request.sampling, self.sampled.token_ids
        is_cut = last is None or last.finish_reason in (FinishReason.ABORT, FinishReason.REPLACED)
        if last is not None and not is_cut:
            return self._reply(last.finish_reason)
        if len(ids) > sampling.min_tokens and ids[-1] in sampling.stop_token_ids:
            return self._reply(FinishReason.STOP)
        if len(ids) >= sampling.max_tokens:
            return self._reply(FinishReason.LENGTH)
        if self.switch is not None and self.switch.is_thrown:
            return self.aborted()
        if last is None or last.finish_reason is FinishReason.REPLACED:
            return None
        rule = self._continues_after_abort
        goes_on = self.switch is None if rule is None else rule(self.sampled)
        return None if goes_on else self.aborted()

    def next_request(self) -> GenerateRequest:
        """Return the next round's request: the prompt and the ids so far, with its own request id.

        Raises EnginePaused after an abort of a shown reply that cannot be continued, or after too many aborts, and
        WeightVersionNotServed if the weights changed under a reply that cannot be continued.
        """
        last, demand = self._last, self.request.sampling.weight_version
        looks_back = self.request.sampling.looks_back and not self.request.adapter
        if last is not None and demand is not None and looks_back and self.sampled:
            demand.check(last.load.weight_version)
        if self._last is not None and not self._survives_abort():
            raise EnginePaused("an engine's abort cut the reply, which cannot be continued: sample it again")
        request, self._last = self.request, None
        timeout_s = max(min(request.timeout_s, self.deadline.left_s), 0.001)
        request_id = f"{request.request_id}~{self._num_asked}" if self._num_asked else request.request_id
        self._num_asked += 1
        rest = continued(request, self.sampled.since(0)) if self.sampled else request
        self._asked = replace(rest, request_id=request_id, timeout_s=timeout_s)
        return self._asked

    def _survives_abort(self) -> bool:
        can_go_on = self.prepare_to_continue()
        self._num_idle = self._num_idle + 1 if len(self.sampled) <= self._num_before else 0
        return can_go_on and self._num_idle < MAX_ABORTS

    def prepare_to_continue(self) -> bool:
        """Return True if a round may follow; drops tokens that it cannot continue, if they were not shown."""
        # Sampling that looks back (penalties, grammars) would take the tokens for the prompt. After _MAX_OLDER
        # rounds no replica has the tokens' weights: the one that had committed the next version was lost before the
        # others got it.
        can_continue = not self.request.sampling.looks_back and self._num_older < _MAX_OLDER
        if can_continue or not self.sampled:
            return True
        if not self._is_shown:
            self._cut(0)
        return not self._is_shown

    def _cut(self, num_tokens: int) -> None:
        self.num_cut += len(self.sampled) - num_tokens
        self.sampled.cut(num_tokens)

    def begin_round(self, lease: Lease) -> None:
        """Record the start of a round under `lease`."""
        self._num_before = len(self.sampled)
        self._unavailable_s, self._heard_at = 0.0, loop_time()
        self._lease, self._began_at, self.last_lease = lease, self._heard_at, lease

    def hear(self, progress: Progress) -> None:
        """Add an engine's progress report.

        Raises as `add`, and DeadlineExceeded if the service is unavailable too long.
        """
        if progress.tokens.token_ids:
            self.add(progress.tokens)
        self._stand_still(progress.unavailable_s)
        self._heard_at = loop_time()
        if self.deadline.is_spent:
            raise DeadlineExceeded(f"the service was unavailable for {self.deadline.unavailable_s:.0f} s")

    def add(self, piece: Delta) -> None:
        """Append a piece of the round.

        Raises MalformedEngineResponse, or EngineUnusable for weights older than the reply's, and appends nothing.
        """
        check_piece(self._asked, piece, self._vocab_size)
        self._append(piece)

    def end_round(self, last: Generation) -> None:
        """Add the rest of a round's generation, after the pieces that were received before.

        Raises as `add`, MalformedEngineResponse if the generation differs from its pieces, and DeadlineExceeded if
        it has no token and there is time for another round.
        """
        if not last.token_ids and last.finish_reason is FinishReason.DEADLINE and self.deadline.left_s > 0:
            raise DeadlineExceeded(f"request {self._asked.request_id} had no token in its time")
        self._stand_still(last.unavailable_s)
        num_had = len(self.sampled) - self._num_before
        had = self.sampled.token_ids[self._num_before :]
        if list(last.token_ids[:num_had]) != had or (self.is_streamed and len(last.token_ids) > num_had):
            if not self._is_shown:
                self._cut(self._num_before)
            raise MalformedEngineResponse(
                f"request {self._asked.request_id}: the generation differs from the streamed ids"
            )
        if num_had < len(last.token_ids) or last.aux is not None:
            whole = SampledTokens()
            whole.add(replace(last, aux=None))
            # The pieces may have had no routed experts: `SampledTokens.add` skips rows that it has.
            self._append(replace(whole.since(num_had), aux=last.aux) if num_had else last)
        self._last = last
        if not self._num_before and last.decode_s is not None:
            self.clock.note_first_token(last.decode_s)
        if self._num_cached is None:
            self._num_cached = min(last.cached_tokens, len(self.request.token_ids))

    def fail_round(self, error: AgentLoopError) -> None:
        """Count a failed round. The time since a lost replica's last report counts as unavailable."""
        if isinstance(error, EngineLost | EngineUnusable | EnginePaused):
            self._count_unavailability(loop_time() - self._heard_at)
        if not isinstance(error, DeadlineExceeded):
            self._lease = None
        if not isinstance(error, EnginePaused):
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = loop_time()
        has_progress = len(self.sampled) > self._num_before
        self.num_lost = 1 if has_progress else self.num_lost + 1
        if not isinstance(error, EnginePaused | EngineUnreachable | EngineUnusable):
            self.num_failures = 1 if has_progress else self.num_failures + 1

    def cut_short(self) -> Generation | None:
        """Return the tokens of a cancelled or failed reply as an aborted generation; None if it has none."""
        return self.aborted() if self.sampled or self._last is not None else None

    def aborted(self) -> Generation:
        """Return the tokens so far, possibly none, as an aborted generation."""
        return self._reply(FinishReason.ABORT)

    async def wait_for_version(self, error: AgentLoopError) -> None:
        """Wait before the next poll for other weights. Raises `error` after the wait that the call allows."""
        demand, now = self.request.sampling.weight_version, loop_time()
        if self._patient_until is None:
            self._patient_until = now + (0.0 if demand is None else demand.wait_s)
        if now >= self._patient_until:
            raise error
        await asyncio.sleep(min(random.uniform(0.5, 1.0) * _VERSION_POLL_S, self._patient_until - now))

    def with_tokens(self, error: WeightVersionNotServed) -> WeightVersionNotServed:
        """Return the error with the call's tokens, possibly none, in its details."""
        found, sampled = dict(error.details or {}), self.sampled
        if sampled:
            spans = codec.to_builtins(list(sampled.weight_versions))
            found |= {
                "token_ids": list(sampled.token_ids),
                "logprobs": list(sampled.logprobs),
                "weight_versions": spans,
            }
        return WeightVersionNotServed(error.message, param=error.param, details=found)

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await a part of the call.

        Raises DeadlineExceeded at a deadline that is enforced here, and _TurnAborted.
        """
        switch, ends_at = self.switch, self._ends_at
        if ends_at is None and switch is None:
            return await work
        if switch is not None and switch.ends_at is not None:
            ends_at = switch.ends_at
        scope = asyncio.timeout_at(ends_at)
        try:
            async with scope:
                with nullcontext() if switch is None else switch.guarding(scope):
                    return await work
        except TimeoutError as error:
            if not scope.expired():
                raise
            if switch is not None and switch.is_thrown:
                raise _TurnAborted from error
            raise DeadlineExceeded(f"no answer within {self.request.timeout_s:g} s", param="timeout_s") from error

    @property
    def refused_s(self) -> float:
        """Seconds since paused engines began to refuse every round."""
        return 0.0 if self._refused_at is None else loop_time() - self._refused_at

    @property
    def silent_lease(self) -> Lease | None:
        """The lease of a replica that sampled no token before the deadline although it had time; None otherwise."""
        has_token = len(self.sampled) > self._num_before
        had_time = loop_time() - self._began_at >= min(_SILENCE_S, self.request.timeout_s / 2)
        is_late = self.deadline.left_s <= _LATE_S
        return self._lease if is_late and had_time and not has_token and self._unavailable_s == 0.0 else None

    def _append(self, piece: Delta | Generation) -> None:
        newest, spans = self.sampled.newest_version, piece.weight_versions
        if (demand := self.request.sampling.weight_version) is not None:
            for span in spans:
                demand.check(span.version)
        if spans and newest is not None and spans[0].version < newest:
            self._num_older += 1
            raise EngineUnusable(
                f"request {self._asked.request_id}: weight version {spans[0].version} after {newest}"
            )
        self._num_older = 0
        if piece.token_ids and not self.sampled:
            self.clock.note_first_token()
        self.sampled.add(piece)

    def _stand_still(self, unavailable_s: float) -> None:
        self._count_unavailability(max(unavailable_s - self._unavailable_s, 0.0))
        self._unavailable_s = unavailable_s

    def _count_unavailability(self, seconds: float) -> None:
        self.deadline.stood_still(seconds)
        self.clock.unavailable_us += round(seconds * 1e6)

    def _reply(self, finish_reason: FinishReason) -> Generation:
        """Return all sampled tokens as the generation of the turn's request."""
        last, lease, request_id = self._last, self.last_lease, self.request.request_id
        if last is not None and self._num_asked == 1:
            return last if last.finish_reason is finish_reason else replace(last, finish_reason=finish_reason)
        made = self.sampled.generation(request_id, finish_reason, cached_tokens=self._num_cached or 0)
        of = lease if last is None else last
        if of is not None:
            made = replace(made, replica_id=of.replica_id, engine=of.engine, quantization=of.quantization)
        return made if last is None else replace(made, load=last.load)


def continued(request: GenerateRequest, sampled: Delta) -> GenerateRequest:
    """Return the request that continues after `sampled`: its ids are appended to the prompt, and the budget
    shrinks.

    The seed is derived from the request's seed and the position (xxh3 of the position with that seed, 63 bits). So
    the continuation is reproducible, and does not repeat the random numbers of the first tokens. It returns the
    routed experts after those of `sampled`: its prefill has those of the last token, and of tokens whose round was
    lost before their experts were received.
    """
    sampling, num_sampled = request.sampling, len(sampled.token_ids)
    if not num_sampled:
        return request
    seed, kv_version = sampling.seed, request.kv_version
    if seed is not None:
        seed = xxhash.xxh3_64_intdigest(num_sampled.to_bytes(8, "little"), seed=seed) & MAX_SEED
    if kv_version is None and request.keeps_kv:
        kv_version = sampled.weight_versions[0].version
    routed = (sampled.aux or {}).get(AuxKind.ROUTED_EXPERTS)
    return replace(
        request,
        routes_from=request.routes_from if routed is None else routed.end,
        token_ids=(*request.token_ids, *sampled.token_ids),
        kv_version=kv_version,
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - num_sampled,
            min_tokens=max(0, sampling.min_tokens - num_sampled),
            seed=seed,
        ),
    )
