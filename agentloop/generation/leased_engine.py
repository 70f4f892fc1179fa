"""The way to an engine under a lease: retries, moves after a failure, and streams that go on from their ids.

Ownership: every call of `TokenEngine.generate`, `stream` and `image_tokens` under a lease, and every retry of
one. The policy, for whoever calls:

- an error that is `retryable`, or the DeadlineExceeded of one replica while the call itself has time left, is
  followed by another attempt after a random pause that grows up to 5 s; in the end the last error comes as it is;
- a turn that takes too long is no error where the caller `keeps_late` ones: its request is ended in the engine, and
  what was sampled is the reply. To sample it again would favour short turns. Only a request that has no token by
  then, or whose replica does not answer even that, is made again elsewhere; `num_resampled` counts what was lost;
- a paused engine (EnginePaused) is asked again until the call's deadline and never counts as a failed attempt;
  after any other failure the coordinator is told, and the next attempt runs under the lease that it gives;
- a failed call is made again with the same ids; a stream that has given out pieces goes on from their ids, so no
  token is sampled into an answer twice. Where that would not be the same reply (`_Call.can_go_on`), the error is
  raised.

A call has one deadline. A caller that makes it at its own edge passes `deadline_at`, in the event loop's time, and
ends the call then by itself; without one it is `request.timeout_s` from now, and enforced here. `request.timeout_s`
bounds each attempt. What leaves this module was checked (`check_generation`), each reply or piece once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol, TypeVar

import structlog

from agentloop.checks import check_generation, check_piece
from agentloop.engine import Delta, TokenEngine
from agentloop.errors import AgentLoopError, DeadlineExceeded, EngineLost, EnginePaused, MalformedEngineResponse
from agentloop.images import Image, ImageTokens
from agentloop.sampled_tokens import SampledTokens
from agentloop.types import FinishReason, GenerateRequest, Generation, Lease

T = TypeVar("T")

Connect = Callable[[str], TokenEngine]
"""The engine behind a replica's private URL."""

_FIRST_PAUSE_S = 0.1  # before the second attempt, at most; then doubled
_MAX_PAUSE_S = 5.0

LATE_GRACE_S = 5.0
"""How long a replica may take to end a request that is late."""

_log = structlog.stdlib.get_logger(__name__)


class LeaseSource(Protocol):
    """The lease that calls run under: an assignment's, or a session's."""

    async def lease(self, request: GenerateRequest) -> Lease:
        """Return the lease for the next attempt."""

    async def move(self, failed: Lease) -> None:
        """Tell the coordinator of a replica's failure, and hold the lease that it gives instead, if it has one."""


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
        """`max_attempts` are of one call, pauses not counted; `newest` learns from every generation."""
        self.connect = connect
        self._source = source
        self._vocab_size = vocab_size
        self._max_attempts = max_attempts
        self._newest = newest
        self.num_resampled = 0  # attempts that were lost under a lease, and made again from their first token

    async def image_tokens(self, request: GenerateRequest, images: Sequence[Image]) -> tuple[ImageTokens, ...]:
        """Ask as `TokenEngine.image_tokens` does, before `request` is made: under the lease that it will have."""
        call = _Call(request, SampledTokens(), None)

        async def asked() -> tuple[ImageTokens, ...]:
            while True:
                call.num_asked += 1
                lease = None
                try:
                    lease = await self._source.lease(request)
                    return await self.connect(lease.url).image_tokens(images)
                except AgentLoopError as error:
                    await self._retry(call, lease, error)

        try:
            return await call.in_time(asked())
        except TimeoutError as error:
            raise call.late() from error

    async def generate(
        self, request: GenerateRequest, *, deadline_at: float | None = None, keeps_late: bool = False
    ) -> Generation:
        """Generate, as `TokenEngine.generate` does. Raises the last attempt's error, or DeadlineExceeded.

        With `keeps_late` an attempt whose time is over is ended, and returned with FinishReason.DEADLINE. That
        takes up to `LATE_GRACE_S` more than `deadline_at`.
        """
        call = _Call(request, SampledTokens(), deadline_at)
        try:
            return await call.in_time(self._generate(call, keeps_late=keeps_late))
        except TimeoutError as error:
            raise call.late() from error

    async def stream(
        self, request: GenerateRequest, sampled: SampledTokens | None = None, *, deadline_at: float | None = None
    ) -> AsyncGenerator[Delta | Generation, None]:
        """Stream, as `TokenEngine.stream` does, over as many attempts as it takes. Close it to end the request.

        Tokens are appended to `sampled`, if given: what it has already is not this call's.
        """
        call = _Call(request, SampledTokens() if sampled is None else sampled, deadline_at)
        try:
            while (ended := call.ended()) is None:
                asked, lease = call.next_request(), None
                try:
                    lease = await call.in_time(self._source.lease(asked))
                    stream = self.connect(lease.url).stream(asked)
                    async with aclosing(stream) as pieces:  # type: ignore[type-var] # engines write generators
                        while True:
                            piece = await call.in_time(anext(pieces, None))
                            if piece is None:
                                raise EngineLost(f"{lease.replica_id} ended a stream without its generation")
                            if isinstance(piece, Generation):
                                self._check(asked, piece)
                                yield call.finish(piece)
                                return
                            call.add(piece, lease.replica_id, self._vocab_size)
                            yield piece
                except AgentLoopError as error:
                    await call.in_time(self._retry(call, lease, error))
            yield ended  # only the stream's last word was lost
        except TimeoutError as error:
            raise call.late() from error

    async def _generate(self, call: _Call, *, keeps_late: bool) -> Generation:
        while True:
            asked, lease = call.next_request(), None
            try:
                lease = await self._source.lease(asked)
                engine = self.connect(lease.url)
                generation = await (_in_time(engine, asked, call) if keeps_late else engine.generate(asked))
                self._check(asked, generation)
            except AgentLoopError as error:
                await self._retry(call, lease, error)
                self.num_resampled += lease is not None and not isinstance(error, EnginePaused)
                continue
            if asked is call.request:
                return generation
            return replace(generation, request_id=call.request.request_id)

    def _check(self, asked: GenerateRequest, generation: Generation) -> None:
        check_generation(asked, generation, self._vocab_size)
        if self._newest is not None:
            self._newest.see(generation)

    async def _retry(self, call: _Call, lease: Lease | None, error: AgentLoopError) -> None:
        """Get ready for the next attempt: move away from a replica that failed, and pause. Raises `error` if there
        is to be none."""
        can_help = error.retryable or (isinstance(error, DeadlineExceeded) and call.left_s > 0)
        if can_help and not isinstance(error, EnginePaused):
            call.num_failures += 1
            if lease is not None:
                _log.warning(
                    "call_failed", request=call.request.request_id, replica=lease.replica_id, error=str(error)
                )
                await self._source.move(lease)
        if not can_help or call.num_failures >= self._max_attempts or not call.can_go_on:
            raise error
        longest_s = _FIRST_PAUSE_S * 2.0 ** min(call.num_asked - 1, 10)
        await asyncio.sleep(random.uniform(0.0, min(longest_s, _MAX_PAUSE_S)))


async def _in_time(engine: TokenEngine, asked: GenerateRequest, call: _Call) -> Generation:
    """Generate; at the end of the attempt's time the request is ended, and returned as FinishReason.DEADLINE.

    Raises DeadlineExceeded if nothing was sampled by then and the call has time for another attempt.
    """
    loop = asyncio.get_running_loop()
    endings: list[asyncio.Task[None]] = []

    async def end() -> None:
        with contextlib.suppress(
            AgentLoopError
        ):  # a replica that is gone: its generation says so, or the grace ends
            await engine.abort(asked.request_id)

    late_s = max(min(asked.timeout_s, call.left_s), 0.0)
    timer = loop.call_later(late_s, lambda: endings.append(loop.create_task(end())))
    try:
        generation = await engine.generate(replace(asked, timeout_s=late_s + LATE_GRACE_S))
    finally:
        timer.cancel()
        for ending in endings:
            ending.cancel()
    if not endings or generation.finish_reason is not FinishReason.ABORT:
        return generation
    if not generation.token_ids and call.left_s > 0:
        raise DeadlineExceeded(f"request {asked.request_id} had no token after {late_s:g} s")
    return replace(generation, finish_reason=FinishReason.DEADLINE)


class _Call:
    """One call over its attempts: what was given out, and what is still to be asked.

    Invariant: the pieces added so far, in their order, are a prefix of the joined `Generation`'s ids and logprobs.
    """

    def __init__(self, request: GenerateRequest, sampled: SampledTokens, deadline_at: float | None) -> None:
        own_deadline_at = asyncio.get_running_loop().time() + request.timeout_s
        self.request = request
        self.num_asked = 0
        self.num_failures = 0
        self._deadline_at = own_deadline_at if deadline_at is None else deadline_at
        self._ends_at = own_deadline_at if deadline_at is None else None  # None: the caller sees to it
        self._asked = request
        self._sampled = sampled
        self._first = self._attempt_first = len(sampled)  # tokens before these are not the call's, or the attempt's
        self._replica_id = ""

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline_at - asyncio.get_running_loop().time()

    @property
    def can_go_on(self) -> bool:
        """True if another attempt gives the same reply, or one of the same distribution.

        A new request takes what the reply already has for its prompt.
        """
        return not (self.request.sampling.looks_back and len(self._sampled) > self._first)

    async def in_time(self, work: Awaitable[T]) -> T:
        """Await a part of the call. Raises TimeoutError at a deadline that is enforced here."""
        if self._ends_at is None:
            return await work
        async with asyncio.timeout_at(self._ends_at):
            return await work

    def late(self) -> DeadlineExceeded:
        """Return the error of a call that met its deadline."""
        return DeadlineExceeded(f"no answer within {self.request.timeout_s:g} s", param="timeout_s")

    def next_request(self) -> GenerateRequest:
        """Return what is still to be asked: the prompt with the ids so far, under an id of its own."""
        self.num_asked += 1
        if self.num_asked > 1:
            given_ids = self._sampled.token_ids[self._first :]
            self._attempt_first = len(self._sampled)
            self._asked = replace(
                continued(self.request, given_ids),
                request_id=f"{self.request.request_id}~{self.num_asked - 1}",  # an engine may still know the others
                timeout_s=max(min(self.request.timeout_s, self.left_s), 0.001),
            )
        return self._asked

    def add(self, piece: Delta, replica_id: str, vocab_size: int) -> None:
        """Append a piece of the present attempt. Raises MalformedEngineResponse, and nothing is appended then."""
        check_piece(self._asked, piece, vocab_size)
        newest, spans = self._sampled.newest_version, piece.weight_versions
        if len(self._sampled) > self._first and spans and newest is not None and spans[0].version < newest:
            raise MalformedEngineResponse(
                f"request {self._asked.request_id}: weight version {spans[0].version} after {newest}"
            )
        self._sampled.add(piece)
        self._replica_id = replica_id

    def finish(self, last: Generation) -> Generation:
        """Return the whole reply, from the last attempt's generation. Raises MalformedEngineResponse if that is not
        what its pieces were."""
        if list(last.token_ids) != self._sampled.token_ids[self._attempt_first :]:
            raise MalformedEngineResponse(f"request {self._asked.request_id}: its pieces were other ids")
        if self._attempt_first == self._first:
            return last if self._asked is self.request else replace(last, request_id=self.request.request_id)
        return replace(
            self._joined(last.finish_reason),
            cached_tokens=min(last.cached_tokens, len(self.request.token_ids)),
            replica_id=last.replica_id,
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

    def _joined(self, finish_reason: FinishReason) -> Generation:
        own = self._sampled.since(self._first)
        return Generation(
            self.request.request_id,
            own.token_ids,
            own.logprobs,
            own.weight_versions,
            finish_reason,
            replica_id=self._replica_id,
            top_logprobs=own.top_logprobs,
            raw_logprobs=own.raw_logprobs,
            logprobs_mode=own.logprobs_mode,
        )


def continued(request: GenerateRequest, sampled_ids: Sequence[int]) -> GenerateRequest:
    """Return the request that goes on where `sampled_ids` end: they join its prompt, and leave its budget."""
    if not sampled_ids:
        return request
    sampling, num_sampled = request.sampling, len(sampled_ids)
    return replace(
        request,
        token_ids=(*request.token_ids, *sampled_ids),
        sampling=replace(
            sampling,
            max_tokens=sampling.max_tokens - num_sampled,
            min_tokens=max(0, sampling.min_tokens - num_sampled),
        ),
    )
