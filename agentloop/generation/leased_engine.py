"""The way to an engine under a lease: retries, moves after a failure, and turns that go on from their ids.

Ownership: every call of `TokenEngine.generate`, `stream` and `image_tokens` under a lease, and every retry of
one. The policy, for whoever calls:

- while the service has no place for it, or its engine is paused, a call waits: as long as its own deadline, which
  does not count that time where it can move (`Deadline`). Polls are long and pauses random, so nobody is stormed;
- after a failure the coordinator is told, and the next attempt, under an id of its own and after a random pause
  that grows, runs under the lease that it gives. Replicas that could not be reached, or whose weights are not
  usable, are no failures of the request. Others are, and the DeadlineExceeded of one replica while the call has
  time left is one: after `max_attempts` of them in a row, without a token between, the last error comes as it is.
  A prompt that kills whatever reads it must not be carried from replica to replica for ever;
- what an engine reported, or streamed, before it failed is kept: the next attempt goes on from those ids, with a
  new span, another seed (`continued`) and the call's KV policy. Where that would not be the same reply
  (`looks_back`), what nobody has seen is sampled anew, and what was given out raises the error. `num_resampled`
  counts the attempts of which nothing was left;
- a replica that had no token for a call by its deadline is told of, and the next call runs elsewhere;
- a pause for which engines hold no requests any more (EnginePaused for a minute) ends a call of a fixed deadline;
- a turn that takes too long is no error where the caller `keeps_late` ones: its engine ends it, and what was
  sampled is the reply. To sample it again would favour short turns. Only a request that has no token by then is
  made again.

What leaves this module was checked (`check_generation`), each reply or piece once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, TypeVar

import structlog
import xxhash

from agentloop.capabilities import Feature, Needs, bits_of, needs_of
from agentloop.checks import MAX_SEED, check_generation, check_piece
from agentloop.engine import Delta, Progress, TokenEngine
from agentloop.errors import (
    AgentLoopError,
    DeadlineExceeded,
    EngineLost,
    EnginePaused,
    EngineUnreachable,
    EngineUnusable,
    MalformedEngineResponse,
    NoHealthyReplica,
    ServiceUnavailable,
)
from agentloop.generation.deadline import Deadline, loop_time
from agentloop.generation.lease_reporter import LeaseHolder
from agentloop.images import Image, ImageTokens
from agentloop.sampled_tokens import SampledTokens
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease, clip_spans

T = TypeVar("T")

Connect = Callable[[str], TokenEngine]
"""The engine behind a replica's private URL."""

TURN_GRACE_S = 20.0
"""How long after a deadline a call that `keeps_late` may end: a late turn is ended, or its replica known to be
lost."""

_SILENCE_S = 10.0  # an attempt that had no token for so long at its deadline had time for one
_REFUSED_S = 60.0
_LATE_S = 0.5  # of a deadline, which the replica's clock may meet first
_IMAGES = Needs(bits_of(frozenset({Feature.IMAGES})))
_FIRST_PAUSE_S = 0.1  # before the second attempt, at most; then doubled
_MAX_PAUSE_S = 5.0
_SUSPECT_PAUSE_S = 5.0  # before the third attempt in a row of a request that fails; then doubled
_MAX_SUSPECT_PAUSE_S = 20.0

_log = structlog.stdlib.get_logger(__name__)


class LeaseSource(Protocol):
    """The lease that calls run under: an assignment's, or a session's."""

    def held(self, needs: Needs) -> Lease | None:
        """Return the lease for the next attempt, which needs that; None if it has to be asked for."""

    async def lease(self, request: GenerateRequest, needs: Needs) -> Lease:
        """Ask for the lease of the next attempt: it comes after a wait if there is none. Raises NoHealthyReplica
        or ServiceUnavailable if that was in vain (ask again then), and UnsupportedParameter if no engine can."""

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure: the next lease is the one that it gives instead."""

    def give_up(self, failed: Lease) -> None:
        """Have the failure told, and the next call run elsewhere. Does not wait for either."""

    @property
    def holder(self) -> LeaseHolder:
        """The holder of the lease, which is told of turns."""


_MAX_SILENT_GENERATIONS = 1000  # of others, after which a replica's word counts no more


class NewestVersion:
    """The newest weight version that a worker has heard of: from every generation, whoever asked for it.

    It is the newest that any replica said last, of those heard of lately: a replica that says less than before was
    taken back to older weights, as the fleet then is.
    """

    def __init__(self) -> None:
        self.value: int | None = None
        self._said: dict[str, tuple[int, int]] = {}  # replica id -> (version, number of that generation)
        self._num_seen = 0

    def see(self, generation: Generation) -> None:
        """Learn from a replica's load and from the last span, which may be newer than the load's snapshot."""
        heard = [span.version for span in generation.weight_versions[-1:]]
        if generation.load.weight_version is not None:
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


class LeasedEngine:
    """An engine wherever the lease leads. Calls may run side by side: they share the lease."""

    def __init__(
        self,
        connect: Connect,
        source: LeaseSource,
        *,
        vocab_size: int,
        max_attempts: int,
        newest: NewestVersion | None = None,
    ) -> None:
        """`max_attempts` are of one call that fails in a row; `newest` learns from every generation."""
        self.connect = connect
        self._source = source
        self._vocab_size = vocab_size
        self._max_attempts = max_attempts
        self._newest = newest
        self.engine_s = 0.0  # in engines, of the attempts that were answered
        self.num_resampled = 0  # attempts that were lost under a lease, and made again from their first token

    async def image_tokens(
        self, request: GenerateRequest, images: Sequence[Image], *, deadline: Deadline | None = None
    ) -> tuple[ImageTokens, ...]:
        """Ask as `TokenEngine.image_tokens` does, before `request` is made: under the lease that it will have."""
        call = _Call(request, SampledTokens(), deadline)

        async def asked() -> tuple[ImageTokens, ...]:
            while True:
                lease = await self._lease(call, call.next_request(), _IMAGES)
                try:
                    return await self.connect(lease.url).image_tokens(images)
                except AgentLoopError as error:
                    await self._recover(call, lease, error)

        return await call.in_time(asked())

    async def generate(self, request: GenerateRequest, *, deadline: Deadline | None = None) -> Generation:
        """Generate, as `TokenEngine.generate` does. Raises the last attempt's error, or DeadlineExceeded.

        Whoever makes a `deadline` ends the call then by itself, a request that `keeps_late` `TURN_GRACE_S` later;
        without one it is `request.timeout_s` from now, and enforced here. `request.timeout_s` bounds each attempt.
        """
        call = _Call(request, SampledTokens(), deadline)
        with self._telling(call):
            call.generation = await call.in_time(self._generate(call))
            return call.generation

    async def stream(
        self, request: GenerateRequest, sampled: SampledTokens | None = None, *, deadline: Deadline | None = None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Stream, as `TokenEngine.stream` does, over as many attempts as it takes. Close it to end the request.

        Tokens are appended to `sampled`, if given: what it has already is not this call's.
        """
        call = _Call(request, SampledTokens() if sampled is None else sampled, deadline, is_streamed=True)
        with self._telling(call):
            while (ended := call.ended()) is None:
                asked = call.next_request()
                lease = await call.in_time(self._lease(call, asked, _needs_of(asked)))
                self._source.holder.begin()
                try:
                    stream = self.connect(lease.url).stream(asked, call.hear)
                    async with aclosing(stream) as pieces:  # type: ignore[type-var] # engines write generators
                        while True:
                            piece = await call.in_time(anext(pieces, None))
                            if piece is None:
                                raise EngineLost(f"{lease.replica_id} ended a stream without its generation")
                            if isinstance(piece, Generation):
                                self._check(asked, piece)
                                call.generation = call.finish(piece)
                                yield call.generation
                                return
                            call.add(piece, self._vocab_size)
                            yield piece
                except AgentLoopError as error:
                    await call.in_time(self._recover(call, lease, error))
            call.generation = ended
            yield ended  # only the stream's last word was lost

    @contextlib.contextmanager
    def _telling(self, call: _Call) -> Iterator[None]:
        """Note that a turn begins and ends. Have it told if a replica had no token for it by its deadline: nobody
        has time for a retry then, but the next call shall not meet the same silence."""
        holder = self._source.holder
        holder.enter()
        try:
            yield
        except BaseException:  # the deadline is the caller's: it may end the call by a cancellation
            if call.silent_lease is not None:
                self._source.give_up(call.silent_lease)
            raise
        finally:
            holder.leave(call.last_lease, call.request, call.generation or call.cut_short())

    async def _generate(self, call: _Call) -> Generation:
        def hear(progress: Progress) -> None:
            call.add(progress.tokens, self._vocab_size)
            call.hear(progress)

        while (ended := call.ended()) is None:
            asked = call.next_request()
            lease = await self._lease(call, asked, _needs_of(asked))
            self._source.holder.begin()
            try:
                generation = await self.connect(lease.url).generate(asked, hear)
                self._check(asked, generation)
                return call.complete(generation, self._vocab_size)
            except AgentLoopError as error:
                await self._recover(call, lease, error)
                is_begun = not isinstance(error, EnginePaused | EngineUnreachable)
                self.num_resampled += is_begun and call.is_empty
        return ended

    async def _lease(self, call: _Call, asked: GenerateRequest, needs: Needs) -> Lease:
        """Return the lease for an attempt, as soon as there is one. Raises the last refusal when the call has
        waited for as long as it may."""
        if (held := self._source.held(needs)) is not None:
            call.begin_attempt(held)
            return held
        refusal: AgentLoopError = NoHealthyReplica("no replica could be had")
        deadline, num_refused = call.deadline, 0
        patience_s = None if math.isinf(deadline.patience_s) else max(deadline.patience_s, 0.0)
        try:
            with deadline.standing_still():
                async with asyncio.timeout(patience_s):
                    while True:
                        asked_at = loop_time()
                        try:
                            lease = await self._source.lease(asked, needs)
                            break
                        except (NoHealthyReplica, ServiceUnavailable) as error:
                            refusal = error
                        num_refused = 0 if loop_time() - asked_at > _MAX_PAUSE_S else num_refused + 1
                        await asyncio.sleep(_pause_s(num_refused))
        except TimeoutError as error:
            raise type(refusal)(f"{refusal.message}, for {deadline.standstill_s:.0f} s") from error
        call.begin_attempt(lease)
        return lease

    async def _recover(self, call: _Call, lease: Lease, error: AgentLoopError) -> None:
        """Get ready for the next attempt: count the failure, move away, and pause. Raises `error` if there is
        none."""
        call.end_attempt(error)
        if call.refused_s > _REFUSED_S and call.deadline.is_fixed:
            raise error
        can_help = error.retryable or (isinstance(error, DeadlineExceeded) and call.deadline.left_s > 0)
        if not can_help or call.deadline.is_spent:
            raise error
        if not isinstance(error, EnginePaused):
            _log.warning("call_failed", request=call.request.request_id, replica=lease.replica_id, error=str(error))
            with call.deadline.standing_still():
                await self._source.move(lease)
        if call.num_failures >= self._max_attempts or not call.goes_on():
            raise error
        with call.deadline.standing_still():
            await asyncio.sleep(_pause_s(call.num_lost, call.num_failures))

    def _check(self, asked: GenerateRequest, generation: Generation) -> None:
        check_generation(asked, generation, self._vocab_size)
        self.engine_s += generation.engine_s
        if self._newest is not None:
            self._newest.see(generation)


def _needs_of(request: GenerateRequest) -> Needs:
    return needs_of(request.sampling, len(request.token_ids), has_images=bool(request.images))


def _pause_s(num_before: int, num_failures: int = 0) -> float:
    """Return a random pause before the next attempt: full jitter under a bound that doubles.

    Requests that fail again and again come back one by one: of those that die together, one may be the cause.
    """
    longest_s = min(_FIRST_PAUSE_S * 2.0 ** min(num_before, 10), _MAX_PAUSE_S)
    if num_failures > 1:
        longest_s = min(_SUSPECT_PAUSE_S * 2.0 ** min(num_failures - 2, 10), _MAX_SUSPECT_PAUSE_S)
    return random.uniform(0.0, longest_s)


class _Call:
    """One call over its attempts: what it has, and what is still to be asked.

    Invariant: the pieces added so far, in their order, are a prefix of the joined `Generation`'s ids and logprobs.
    """

    def __init__(
        self,
        request: GenerateRequest,
        sampled: SampledTokens,
        deadline: Deadline | None,
        *,
        is_streamed: bool = False,
    ) -> None:
        self.request = request
        self.deadline = Deadline(loop_time() + request.timeout_s) if deadline is None else deadline
        self.num_failures = 0  # of the request, in a row
        self.num_lost = 0  # attempts of any kind in a row
        self._ends_at = self.deadline.at if deadline is None else None  # None: the caller sees to it
        self._is_streamed = is_streamed
        self._num_asked = 0
        self._asked = request
        self._sampled = sampled
        self._first = self._attempt_first = len(sampled)  # tokens before these are not the call's, or the attempt's
        self._replica_id = self._engine = ""
        self._refused_at: float | None = None  # the first of refusals in a row by a paused engine
        self._lease: Lease | None = None  # of the attempt, until it has failed otherwise than by its silence
        self.last_lease: Lease | None = None  # of the last attempt
        self.generation: Generation | None = None  # the whole reply
        self._began_at = 0.0
        self._standstill_s = 0.0  # of the attempt, as it was told
        self._heard_at = 0.0

    @property
    def is_empty(self) -> bool:
        """True if nothing is kept of the attempts so far."""
        return len(self._sampled) == self._first

    def goes_on(self) -> bool:
        """Get ready to go on from what there is, or from the start. False if neither gives the same reply, or one
        of the same distribution: a new request takes what the reply already has for its prompt."""
        if not self.request.sampling.looks_back or self.is_empty:
            return True
        if not self._is_streamed:
            self._sampled.cut(self._first)
        return not self._is_streamed

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await a part of the call. Raises DeadlineExceeded at a deadline that is enforced here."""
        if self._ends_at is None:
            return await work
        scope = asyncio.timeout_at(self._ends_at)
        try:
            async with scope:
                return await work
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded(f"no answer within {self.request.timeout_s:g} s", param="timeout_s") from error

    def next_request(self) -> GenerateRequest:
        """Return what is still to be asked: the prompt with the ids so far, under an id of its own."""
        self._num_asked += 1
        if self._num_asked > 1:
            request, own = self.request, self._sampled.since(self._first)
            self._asked = replace(
                continued(request, own),
                request_id=f"{request.request_id}~{self._num_asked - 1}",  # an engine may still know the others
                timeout_s=max(min(request.timeout_s, self.deadline.left_s), 0.001),
            )
        return self._asked

    def begin_attempt(self, lease: Lease) -> None:
        """Note that the request is sent."""
        self._attempt_first = len(self._sampled)
        self._replica_id, self._engine = lease.replica_id, lease.engine
        self._standstill_s, self._heard_at = 0.0, loop_time()
        self._lease, self._began_at, self.last_lease = lease, self._heard_at, lease

    @property
    def refused_s(self) -> float:
        """Seconds for which a paused engine has refused every attempt."""
        return 0.0 if self._refused_at is None else loop_time() - self._refused_at

    @property
    def silent_lease(self) -> Lease | None:
        """The lease of an attempt that met the call's deadline without a token, although its engine was not frozen
        and it had time; None if there is none."""
        has_token = len(self._sampled) > self._attempt_first
        had_time = loop_time() - self._began_at >= min(_SILENCE_S, self.request.timeout_s / 2)
        is_late = self.deadline.left_s <= _LATE_S
        return self._lease if is_late and had_time and not has_token and self._standstill_s == 0.0 else None

    def hear(self, progress: Progress) -> None:
        """Take in how long the attempt has stood still. Raises DeadlineExceeded if that is too long."""
        self._stand_still(progress.standstill_s)
        self._heard_at = loop_time()
        if self.deadline.is_spent:
            raise DeadlineExceeded(f"the service stood still for {self.deadline.standstill_s:.0f} s")

    def end_attempt(self, error: AgentLoopError) -> None:
        """Count a failed attempt; what a lost replica did since it was last heard of counts as standing still."""
        if isinstance(error, EngineLost | EngineUnusable | EnginePaused):
            self.deadline.stood_still(loop_time() - self._heard_at)
        if not isinstance(error, DeadlineExceeded):
            self._lease = None
        if not isinstance(error, EnginePaused):
            self._refused_at = None
        elif self._refused_at is None:
            self._refused_at = loop_time()
        has_progress = len(self._sampled) > self._attempt_first
        self.num_lost = 1 if has_progress else self.num_lost + 1
        if not isinstance(error, EnginePaused | EngineUnreachable | EngineUnusable):
            self.num_failures = 1 if has_progress else self.num_failures + 1

    def add(self, piece: Delta, vocab_size: int) -> None:
        """Append a piece of the present attempt. Raises MalformedEngineResponse, or EngineUnusable for weights
        older than the reply's; nothing is appended then."""
        check_piece(self._asked, piece, vocab_size)
        newest, spans = self._sampled.newest_version, piece.weight_versions
        if len(self._sampled) > self._first and spans and newest is not None and spans[0].version < newest:
            raise EngineUnusable(
                f"request {self._asked.request_id}: weight version {spans[0].version} after {newest}"
            )
        self._sampled.add(piece)

    def complete(self, last: Generation, vocab_size: int) -> Generation:
        """Return the whole reply, from the last attempt's generation, of which pieces may have come before.

        Raises as `add` and `finish` do, and DeadlineExceeded for an attempt without a token in a call that has time
        for another one.
        """
        if not last.token_ids and last.finish_reason is FinishReason.DEADLINE and self.deadline.left_s > 0:
            raise DeadlineExceeded(f"request {self._asked.request_id} had no token in its time")
        if not self.is_empty:
            self._add_rest(last, vocab_size)
            return self.finish(last)
        self._stand_still(last.standstill_s)
        return last if self._asked is self.request else replace(last, request_id=self.request.request_id)

    def _add_rest(self, last: Generation, vocab_size: int) -> None:
        start, end = len(self._sampled) - self._attempt_first, len(last.token_ids)
        rest = Delta(
            last.token_ids[start:],
            last.logprobs[start:],
            clip_spans(last.weight_versions, start, end) if start else last.weight_versions,
            last.top_logprobs[start:],
            last.raw_logprobs[start:],
            last.logprobs_mode,
        )
        self.add(rest, vocab_size)

    def finish(self, last: Generation) -> Generation:
        """Return the whole reply, from the last attempt's generation. Raises MalformedEngineResponse if that is not
        what its pieces were."""
        self._stand_still(last.standstill_s)
        if list(last.token_ids) != self._sampled.token_ids[self._attempt_first :]:
            if not self._is_streamed:
                self._sampled.cut(self._attempt_first)
            raise MalformedEngineResponse(f"request {self._asked.request_id}: its pieces were other ids")
        if self._attempt_first == self._first:
            return last if self._asked is self.request else replace(last, request_id=self.request.request_id)
        return replace(
            self._joined(last.finish_reason),
            cached_tokens=min(last.cached_tokens, len(self.request.token_ids)),
            replica_id=last.replica_id,
            engine=last.engine,
            load=last.load,
        )

    def ended(self) -> Generation | None:
        """Return the whole reply if the pieces so far are one: its generation alone was lost."""
        sampling, ids = self.request.sampling, self._sampled.token_ids
        num_own = len(ids) - self._first
        if num_own > sampling.min_tokens and ids[-1] in sampling.stop_token_ids:
            return self._joined(FinishReason.STOP)
        if num_own >= sampling.max_tokens:
            return self._joined(FinishReason.LENGTH)
        return None

    def cut_short(self) -> Generation | None:
        """Return what there is of a reply that its caller ended, or that failed; None if that is nothing."""
        return None if self.is_empty else self._joined(FinishReason.ABORT)

    def _stand_still(self, standstill_s: float) -> None:
        self.deadline.stood_still(max(standstill_s - self._standstill_s, 0.0))
        self._standstill_s = standstill_s

    def _joined(self, finish_reason: FinishReason) -> Generation:
        own = self._sampled.since(self._first)
        return Generation(
            self.request.request_id,
            own.token_ids,
            own.logprobs,
            own.weight_versions,
            finish_reason,
            replica_id=self._replica_id,
            engine=self._engine,
            top_logprobs=own.top_logprobs,
            raw_logprobs=own.raw_logprobs,
            logprobs_mode=own.logprobs_mode,
        )


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
