"""The way to an engine under a lease: one loop over the rounds of a turn, whatever ended the one before.

Ownership: every call of `TokenEngine.generate`, `stream` and `image_tokens` under a lease, every retry of one, and
every continuation. A turn that nothing streams is asked for whole: answers token by token cost a front end half its
rate. The policy:

- while the service has no place for it, or its engine is paused, a call waits: as long as its own deadline, which
  does not count that time where it can move (`Deadline`). Polls are long and pauses random, so nobody is stormed;
- after a failure the coordinator is told, and the next round, after a random pause that grows, runs under the lease
  that it gives. Replicas that could not be reached, or whose weights are not usable, are no failures of the
  request. Others are, and the DeadlineExceeded of one replica while the call has time left is one: after
  `max_attempts` of them in a row, without a token between, the last error comes as it is. A prompt that kills its
  replicas must not be carried from one to the next for ever;
- while the service has no weights that the call accepts it waits as long as the call's demand says; then it ends
  with WeightVersionNotServed, which has the tokens so far, or for one that `keeps_late` with these as an abort;
- an abort ends a round like a failure does, and the next begins at once, unless `continues_after_abort` says no;
- what an engine reported, or streamed, before its round ended is kept: the next one goes on from those ids, with a
  new span, another seed (`continued`) and the call's KV policy. Where that would not be the same reply
  (`looks_back`), what nobody has seen is sampled anew, and what was given out raises the error. `num_resampled`
  counts the failed rounds of which nothing was left;
- a replica that had no token for a call by its deadline is told of, and the next call runs elsewhere;
- a pause for which engines hold no requests any more (EnginePaused for a minute) ends a call of a fixed deadline;
- a turn that takes too long is no error where the caller `keeps_late` ones: its engine ends it, and what was
  sampled is the reply. To sample it again would favour short turns. Only a request that has no token by then is
  made again.

What leaves this module was checked (`check_generation`), each reply or piece once.
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
from agentloop.values.capabilities import Feature, Needs, bits_of, needs_of
from agentloop.values.checks import MAX_SEED, MAX_VOCAB_SIZE, check_generation, check_piece
from agentloop.values.sampled_tokens import SampledTokens

T = TypeVar("T")

Connect = Callable[[str], TokenEngine]
"""The engine behind a replica's private URL."""

AbortRule: TypeAlias = Callable[[SampledTokens], bool]
"""Tells if a turn with these tokens is continued after an engine's abort."""

MAX_ABORTS = 32  # in a row of a turn that engines' aborts keep cutting before it has a token more

ABORT_GRACE_S = 5.0
"""How long an engine has to tell the tokens of a turn that its caller aborts. Its reports come more often."""

TURN_GRACE_S = 20.0
"""How long after a deadline a call that `keeps_late` may end: a late turn is ended, or its replica known to be
lost."""

_SILENCE_S = 10.0  # a round that had no token for so long at its deadline had time for one
_REFUSED_S = 60.0
_LATE_S = 0.5  # of a deadline, which the replica's clock may meet first
_IMAGES = Needs(bits_of(frozenset({Feature.IMAGES})))
_MAX_OLDER = 12  # rounds in a row, by some 20 s, under weights that are older than the turn's
_FIRST_PAUSE_S = 0.1  # before the second round, at most; then doubled
_MAX_PAUSE_S = 5.0
_VERSION_POLL_S = 0.5
_SUSPECT_PAUSE_S = 5.0  # before the third round in a row of a request that fails; then doubled
_MAX_SUSPECT_PAUSE_S = 20.0

_MAX_SILENT_GENERATIONS = 1000  # of other replicas, after which a replica's last version counts no more

_log = structlog.stdlib.get_logger(__name__)


class NewestVersion:
    """The newest weight version that a worker has heard of, in the generations of all its trajectories under one
    adapter, or under the base weights.

    It is the newest of the last versions of all replicas heard of lately. A replica that reports an older one than
    before was taken back, as the fleet then is.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        self._said: dict[str, tuple[int, int]] = {}  # replica id -> (version, number of that generation)
        self._num_seen = 0

    def see(self, generation: Generation, *, is_adapters: bool = False) -> None:
        """Learn a generation's version: that of its last span, or of its load, which is the base weights'."""
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
"""Those of each adapter, and with "" of the base weights."""


@dataclass(slots=True)
class TurnClock:
    """The times of a turn under way, by the stopwatch of its trajectory. The turn's rounds write them."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    begun_us: int = -1
    first_token_us: int | None = None
    queue_us: int = 0
    standstill_us: int = 0
    queues_since_us: int | None = None  # it waits for a place

    def __post_init__(self) -> None:
        self.begun_us = self.stopwatch()

    def note_first_token(self, decode_s: float = 0.0) -> None:
        """Note that the first token came `decode_s` ago."""
        self.first_token_us = max(self.stopwatch() - round(decode_s * 1e6), self.begun_us)

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Within this context the turn waits for a place."""
        self.queues_since_us = since = self.stopwatch()
        try:
            yield
        finally:
            self.queues_since_us = None
            self.queue_us += self.stopwatch() - since

    def times(self) -> TurnTimes:
        """Return the times of the turn, which ends now."""
        return TurnTimes(self.begun_us, self.first_token_us, self.stopwatch(), self.queue_us, self.standstill_us)


class AbortSwitch:
    """The order of a caller to end a turn early, with the tokens that it has.

    A turn with a switch also ends at an engine's own abort.
    """

    def __init__(self) -> None:
        self.is_thrown = False
        self.ends_at: float | None = None  # when a turn that has not ended by then is ended here
        self._scope: asyncio.Timeout | None = None  # of the turn's work under way
        self._round: tuple[TokenEngine, str] | None = None  # the engine's request under way

    async def throw(self) -> None:
        """End the turn: its engine tells all that was sampled, or `ABORT_GRACE_S` later what it has told counts.

        Idempotent.
        """
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
    """The switch has ended the work on a turn."""


class TurnOptions(TypedDict, total=False):
    """The options of a turn, beside its request. Its times are added to `clock`.

    At a `deadline` its maker ends the call, a request that `keeps_late` `TURN_GRACE_S` later; without one the call
    ends after the request's `timeout_s`. If `continues_after_abort` says no after an engine's abort, or `switch` is
    thrown, the reply ends with FinishReason.ABORT.
    """

    deadline: Deadline | None
    continues_after_abort: AbortRule | None
    clock: TurnClock | None
    switch: AbortSwitch | None


class LeasedEngine:
    """An engine at the replica of a lease. Calls may run side by side: they share the lease."""

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
        """`max_attempts` are of one turn that fails in a row; `newest` learns from every generation; `adapter` is
        that of its trajectory."""
        self.connect = connect
        self.adapter = adapter
        self.tally = MetricsTally() if tally is None else tally
        self._holder = holder
        self._vocab_size = vocab_size
        self._max_attempts = max_attempts
        self._newest = newest
        self.engine_s = 0.0  # in engines, of the rounds that were answered
        self.num_resampled = 0  # rounds that were lost under a lease, and made again from their first token
        self.moves: list[Move] = []
        self.lost_tokens: Counter[LossCause] = Counter()
        self._replica_id = ""  # of the last round
        self.turn: TurnClock | None = None  # of the call under way, the latest of several

    @property
    def process_id(self) -> str:
        """The process that holds the lease."""
        return self._holder.process_id

    async def image_tokens(
        self, request: GenerateRequest, images: Sequence[Image], *, deadline: Deadline | None = None
    ) -> tuple[ImageTokens, ...]:
        """Ask as `TokenEngine.image_tokens` does, before `request` is made, under the lease that it will have."""
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
        """Generate, as `TokenEngine.generate` does, over as many rounds as it takes.

        `request.timeout_s` bounds each round. Tokens are added to `sampled`, which is empty. Raises the last error
        of a round, or DeadlineExceeded.
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
        """Generate, as `generate` does, in pieces; the last item is the `Generation`. Close it to end the request.

        With `is_shown` pieces cannot be taken back; without it `sampled` may become shorter before a piece.
        """
        turn = _TurnRounds(request, sampled, self._vocab_size, is_streamed=True, is_shown=is_shown, **options)
        return self._rounds(turn)

    async def _rounds(self, turn: _TurnRounds) -> AsyncGenerator[Delta | Generation, None]:
        """Run a turn to its end. If a replica had no token for it by its deadline, there is no time for a retry,
        but the next call shall not meet the same silence."""
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
                    is_begun = not isinstance(
                        error, EnginePaused | EngineUnreachable | WeightVersionNotServed | ModelNotFound
                    )
                    self.num_resampled += is_begun and not turn.sampled
            yield ended
        except _TurnAborted:
            yield (ended := turn.aborted())
        except WeightVersionNotServed as error:
            if turn.sampled and turn.request.keeps_late and (ended := turn.cut_short()) is not None:
                yield ended
                return
            self._lose(LossCause.STALE, len(turn.sampled))
            raise turn.with_tokens(error) from error
        except BaseException as error:  # the deadline is the caller's: it may end the turn by a cancellation
            if not isinstance(error, GeneratorExit):  # else its reader has what it wanted
                is_cut = isinstance(error, asyncio.CancelledError | DeadlineExceeded)
                self._lose(LossCause.CANCEL if is_cut else LossCause.KILL, len(turn.sampled))
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
        """Yield a round's pieces, if the turn is streamed, and give the turn all of it."""
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
        """Return the lease for a round, as soon as there is one. Raises the last refusal when the call has waited
        for as long as it may."""
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
        refusal: AgentLoopError = NoHealthyReplica("no replica could be had")
        num_refused = 0
        patience_s = None if math.isinf(deadline.patience_s) else max(deadline.patience_s, 0.0)
        try:
            with deadline.standing_still():
                async with asyncio.timeout(patience_s):
                    while True:
                        asked_at = loop_time()
                        try:
                            return await self._holder.ask(asked.token_ids, needs)
                        except (NoHealthyReplica, ServiceUnavailable) as error:
                            refusal = error
                        except WeightVersionNotServed as error:
                            await turn.wait_for_version(error)
                            continue
                        num_refused = 0 if loop_time() - asked_at > _MAX_PAUSE_S else num_refused + 1
                        await asyncio.sleep(_pause_s(num_refused))
        except TimeoutError as error:
            raise type(refusal)(f"{refusal.message}, for {deadline.standstill_s:.0f} s") from error

    async def _recover(self, turn: _TurnRounds, lease: Lease, error: AgentLoopError) -> None:
        """Get ready for the next round: count the failure, move away, and pause. Raises `error` if none is left."""
        # By a replica that switches before the fleet, or after it; or whose adapter's place was nearly another's.
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
        if turn.refused_s > _REFUSED_S and turn.deadline.is_fixed:
            raise error
        can_help = error.retryable or (isinstance(error, DeadlineExceeded) and turn.deadline.left_s > 0)
        if not can_help or turn.deadline.is_spent:
            raise error
        if not isinstance(error, EnginePaused):
            _log.warning("call_failed", request=turn.request.request_id, replica=lease.replica_id, error=str(error))
            with turn.deadline.standing_still(), turn.clock.queueing():
                await self._holder.failed(lease)
        if turn.num_failures >= self._max_attempts or not turn.prepare_to_continue():
            raise error
        with turn.deadline.standing_still(), turn.clock.queueing():
            await asyncio.sleep(_pause_s(turn.num_lost, turn.num_failures))


class CallLeases:
    """The leases of a process's calls: one for each session, and one for each call outside of a session. Close it
    before its reporter: it waits for changes under way."""

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
        # Engines hold them, and the reporter those that have a lease.
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
        """Give a session's place back; its next call takes one again."""
        if (holder := self._holders.get(session_id)) is not None:
            holder.release()

    def end(self, session_id: str) -> None:
        """Give a session's place back for good: later calls raise SessionFinished. Idempotent."""
        if (holder := self._holders.get(session_id)) is not None:
            holder.close()

    async def close(self) -> None:
        """Give back every lease, and wait for all changes under way; each has a deadline."""
        for holder in list(self._holders.values()):
            holder.close()
        await self._reporter.changes.close()


def _needs_of(request: GenerateRequest) -> Needs:
    has_images, num_prompt_tokens = bool(request.images), len(request.token_ids)
    return needs_of(request.sampling, num_prompt_tokens, has_images=has_images, adapter=request.adapter)


def _pause_s(num_before: int, num_failures: int = 0) -> float:
    """Return a random pause before the next round: full jitter under a bound that doubles.

    Requests that fail again and again come back one by one: of those that die together, one may be the cause.
    """
    longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_before, 10), _MAX_PAUSE_S)
    if num_failures > 1:
        longest_s = min(_SUSPECT_PAUSE_S * 2.0 ** min(num_failures - 2, 10), _MAX_SUSPECT_PAUSE_S)
    return random.uniform(0.0, longest_s)


class _TurnRounds:
    """One turn over its rounds: what it has, and what is still to be asked. A round is one engine request. It ends
    with the turn, by an engine's abort, or by a failure; the next one goes on from the ids so far. `sampled` is
    shared with the turn's reader (`TurnText` in `turn_sampler.py`): tokens are added here, and cut here or, at a
    stop string, there. Invariant: its tokens are the beginning of the reply."""

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
        self.num_cut = 0  # tokens that were dropped, to be sampled again
        self.sampled = SampledTokens() if sampled is None else sampled
        self.deadline = Deadline(loop_time() + request.timeout_s) if deadline is None else deadline
        self.is_streamed = is_streamed
        self.num_failures = 0  # of the request, in a row
        self.num_lost = 0  # rounds that failed in any way, in a row
        self.num_misplaced = 0  # rounds that a replica refused for its weights
        self._num_older = 0  # rounds in a row whose weights were older than those of the tokens
        self.last_lease: Lease | None = None  # of the last round
        self._ends_at = self.deadline.at if deadline is None else None  # None: the caller sees to it
        self._vocab_size = vocab_size
        self._is_shown = is_shown
        self._continues_after_abort = continues_after_abort
        self.switch = switch
        self._num_asked = 0
        self._num_idle = 0  # aborts in a row after which nothing more was kept
        self._asked = request
        self._num_before = 0  # tokens before the round
        self._last: Generation | None = None  # of the last round, unless it failed
        self._num_cached: int | None = None  # of the prompt, as the first answer said
        self._refused_at: float | None = None  # the first of refusals in a row by a paused engine
        self._lease: Lease | None = None  # of the round, until it has failed otherwise than by its silence
        self._began_at = 0.0
        self._standstill_s = 0.0  # of the round, as it was told
        self._patient_until: float | None = None  # since the call was first refused for the fleet's weights
        self._heard_at = 0.0

    def ended(self) -> Generation | None:
        """Return the whole reply if the rounds so far make one: of the last, its generation alone may be lost."""
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
        """Return what is still to be asked: the prompt with the ids so far, under an id of its own. Raises
        EnginePaused where an abort cut a reply that was shown and cannot go on, or did so too often, and
        WeightVersionNotServed where new weights cut one that cannot go on."""
        last, demand = self._last, self.request.sampling.weight_version
        looks_back = self.request.sampling.looks_back and not self.request.adapter
        if last is not None and demand is not None and looks_back and self.sampled:
            demand.check(last.load.weight_version)
        if self._last is not None and not self._survives_abort():
            raise EnginePaused("an engine's abort cut the reply, which cannot go on: it must be sampled again")
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
        """Get ready to continue the tokens so far, or cut them to sample from the start. False if neither can be:
        the tokens were shown, and the sampling looks back at them, which a new request takes for its prompt; or
        their weights are gone, since the replica that had the fleet's next version was lost before all others got
        it."""
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
        """Note that the request is sent."""
        self._num_before = len(self.sampled)
        self._standstill_s, self._heard_at = 0.0, loop_time()
        self._lease, self._began_at, self.last_lease = lease, self._heard_at, lease

    def hear(self, progress: Progress) -> None:
        """Add what an engine reports. Raises as `add`, and DeadlineExceeded for too long a standstill."""
        if progress.tokens.token_ids:
            self.add(progress.tokens)
        self._stand_still(progress.standstill_s)
        self._heard_at = loop_time()
        if self.deadline.is_spent:
            raise DeadlineExceeded(f"the service stood still for {self.deadline.standstill_s:.0f} s")

    def add(self, piece: Delta) -> None:
        """Append a piece of the round. Raises MalformedEngineResponse, or EngineUnusable for weights older than the
        reply's; nothing is appended then."""
        check_piece(self._asked, piece, self._vocab_size)
        self._append(piece)

    def end_round(self, last: Generation) -> None:
        """Add the rest of a round's generation, of which pieces may have come before. Raises as `add`,
        MalformedEngineResponse for one that is not what its pieces were, and DeadlineExceeded for one without a
        token if there is time for another round."""
        if not last.token_ids and last.finish_reason is FinishReason.DEADLINE and self.deadline.left_s > 0:
            raise DeadlineExceeded(f"request {self._asked.request_id} had no token in its time")
        self._stand_still(last.standstill_s)
        num_had = len(self.sampled) - self._num_before
        had = self.sampled.token_ids[self._num_before :]
        if list(last.token_ids[:num_had]) != had or (self.is_streamed and len(last.token_ids) > num_had):
            if not self._is_shown:
                self._cut(self._num_before)
            raise MalformedEngineResponse(f"request {self._asked.request_id}: its pieces were other ids")
        if num_had < len(last.token_ids):
            whole = SampledTokens()
            whole.add(last)
            self._append(whole.since(num_had) if num_had else last)
        self._last = last
        if not self._num_before and last.decode_s is not None:
            self.clock.note_first_token(last.decode_s)
        if self._num_cached is None:
            self._num_cached = min(last.cached_tokens, len(self.request.token_ids))

    def fail_round(self, error: AgentLoopError) -> None:
        """Count a failed round; what a lost replica did since it was last heard of counts as standing still."""
        if isinstance(error, EngineLost | EngineUnusable | EnginePaused):
            self._count_standstill(loop_time() - self._heard_at)
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
        """Return what there is of a reply that its caller ended, or that failed; None if that is nothing."""
        return self.aborted() if self.sampled or self._last is not None else None

    def aborted(self) -> Generation:
        """Return what there is, which may be nothing, as a reply that was aborted."""
        return self._reply(FinishReason.ABORT)

    async def wait_for_version(self, error: AgentLoopError) -> None:
        """Wait a moment for other weights. Raises `error` once the call has waited as long as it demands."""
        demand, now = self.request.sampling.weight_version, loop_time()
        if self._patient_until is None:
            self._patient_until = now + (0.0 if demand is None else demand.wait_s)
        if now >= self._patient_until:
            raise error
        await asyncio.sleep(min(random.uniform(0.5, 1.0) * _VERSION_POLL_S, self._patient_until - now))

    def with_tokens(self, error: WeightVersionNotServed) -> WeightVersionNotServed:
        """Return the error with the tokens that the call has, which may be none."""
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
        """Await a part of the call. Raises DeadlineExceeded at a deadline enforced here, and _TurnAborted."""
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
        """Seconds for which a paused engine has refused every round."""
        return 0.0 if self._refused_at is None else loop_time() - self._refused_at

    @property
    def silent_lease(self) -> Lease | None:
        """The lease of a round that met the call's deadline without a token, although its engine was not frozen and
        it had time; None if there is none."""
        has_token = len(self.sampled) > self._num_before
        had_time = loop_time() - self._began_at >= min(_SILENCE_S, self.request.timeout_s / 2)
        is_late = self.deadline.left_s <= _LATE_S
        return self._lease if is_late and had_time and not has_token and self._standstill_s == 0.0 else None

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

    def _stand_still(self, standstill_s: float) -> None:
        self._count_standstill(max(standstill_s - self._standstill_s, 0.0))
        self._standstill_s = standstill_s

    def _count_standstill(self, seconds: float) -> None:
        self.deadline.stood_still(seconds)
        self.clock.standstill_us += round(seconds * 1e6)

    def _reply(self, finish_reason: FinishReason) -> Generation:
        """Return all that was sampled, as the answer to the turn's request."""
        last, lease, request_id = self._last, self.last_lease, self.request.request_id
        if last is not None and self._num_asked == 1:
            return last if last.finish_reason is finish_reason else replace(last, finish_reason=finish_reason)
        made = self.sampled.generation(request_id, finish_reason, cached_tokens=self._num_cached or 0)
        of = lease if last is None else last
        if of is not None:
            made = replace(made, replica_id=of.replica_id, engine=of.engine, quantization=of.quantization)
        return made if last is None else replace(made, load=last.load)


def continued(request: GenerateRequest, sampled: Delta) -> GenerateRequest:
    """Return the request that goes on where `sampled` ends: its ids join the prompt, and leave the budget.

    Its seed is one of the request's seed and the place (xxh3 of the place under that seed, 63 bits), so what
    follows repeats with the request and does not draw again the numbers that its first tokens were drawn with.
    """
    sampling, num_sampled = request.sampling, len(sampled.token_ids)
    if not num_sampled:
        return request
    seed, kv_version = sampling.seed, request.kv_version
    if seed is not None:
        seed = xxhash.xxh3_64_intdigest(num_sampled.to_bytes(8, "little"), seed=seed) & MAX_SEED
    if kv_version is None and request.keeps_kv:
        kv_version = sampled.weight_versions[0].version
    return replace(
        request,
        token_ids=(*request.token_ids, *sampled.token_ids),
        kv_version=kv_version,
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - num_sampled,
            min_tokens=max(0, sampling.min_tokens - num_sampled),
            seed=seed,
        ),
    )
