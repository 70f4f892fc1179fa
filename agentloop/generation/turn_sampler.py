"""One turn sampled from an engine, whole or as a stream, by one and the same builder.

Ownership: a `ReplyBuilder` owns the ids, logprobs and spans of one turn while it grows. Invariants: a stream's
pieces concatenate exactly to its reply, and the reply is that of the unstreamed call under the same seed; nothing
unchecked leaves; an engine's abort is continued, never shown; no engine request outlives the call that made it.

Stop strings apply to all text that the policy writes, thoughts and tool calls included, but not to the stop token.
The ids end with the token that completes the first of them; what the engine sampled beyond is dropped.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from agentloop.chat import ChatPiece, finish_of
from agentloop.checks import check_generation
from agentloop.engine import Delta
from agentloop.errors import DeadlineExceeded, EnginePaused, InvariantBroken, MalformedEngineResponse
from agentloop.generation.stop_strings import StopFinder, StopMatch
from agentloop.generation.stream_splitter import Increment, TurnSplitter
from agentloop.generation.turn_reader import Reading, TurnReader
from agentloop.parsers import DecodedText
from agentloop.trajectory import Reply
from agentloop.types import (
    JSON,
    FinishReason,
    GenerateRequest,
    Generation,
    SamplingParams,
    TopLogprobs,
    WeightVersionSpan,
)

MAX_CONTINUATIONS = 32  # of one turn that engine-side aborts keep cutting


class SessionEngine(Protocol):
    """A session's way to an engine: leases, and retries elsewhere, are behind it."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """As `Engine.generate`."""

    def stream(self, request: GenerateRequest) -> AsyncIterator[Delta | Generation]:
        """As `Engine.stream`; an async generator, whose closing ends the request in the engine."""


@dataclass(frozen=True, slots=True)
class SampleOrder:
    """One choice to sample. `sampling` is complete: room, stop tokens, constraint and the choice's own seed."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    turn_index: int  # numbers the turn's tool calls
    choice_index: int = 0
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, JSON], ...] = ()
    reads_calls: bool = False
    reads_thoughts: bool = True  # false for a raw completion: all of its text is content
    timeout_s: float = 600.0
    trajectory_id: str | None = None
    kv_version: int | None = None


async def sample_reply(engine: SessionEngine, reader: TurnReader, order: SampleOrder) -> Reply:
    """The whole turn. Raises what the engine raises, and DeadlineExceeded.

    A turn that a pause cut, and that no engine can take up in the middle, is sampled again: nobody has seen it.
    """
    deadline_at = asyncio.get_running_loop().time() + order.timeout_s
    attempt, num_cut = order, 0
    while True:
        builder = ReplyBuilder(reader, attempt, is_streamed=False)
        try:
            async with aclosing(_deltas(engine, reader, attempt, builder, is_streamed=bool(order.stop))) as deltas:
                async for delta in deltas:
                    builder.add(delta)
                    if builder.is_stopped:
                        break
            return builder.finish()[1]
        except EnginePaused:
            num_cut += 1
            if not builder.token_ids or num_cut == MAX_CONTINUATIONS:
                raise
        left_s = max(deadline_at - asyncio.get_running_loop().time(), 0.001)
        attempt = replace(order, request_id=f"{order.request_id}~{num_cut}", timeout_s=left_s)


async def stream_reply(
    engine: SessionEngine, reader: TurnReader, order: SampleOrder
) -> AsyncGenerator[ChatPiece | Reply, None]:
    """The turn in pieces as it is sampled; the last item is the reply. Close it to end the request.

    Raises as `sample_reply`, and EnginePaused if an abort cut a constrained turn: no engine can take up a grammar
    in the middle, and what was given out cannot be taken back.
    """
    builder = ReplyBuilder(reader, order, is_streamed=True)
    async with aclosing(_deltas(engine, reader, order, builder, is_streamed=True)) as deltas:
        async for delta in deltas:
            piece = builder.add(delta)
            if builder.is_stopped:
                break
            if piece is not None:
                yield piece
    last, reply = builder.finish()
    yield last
    yield reply


class ReplyBuilder:
    """A turn in the making: deltas in, pieces out, a reply at the end."""

    def __init__(self, reader: TurnReader, order: SampleOrder, *, is_streamed: bool) -> None:
        """`is_streamed`: `add` returns pieces."""
        self._reader = reader
        self._reading = Reading(
            order.tools,
            order.turn_index,
            order.reads_calls,
            order.reads_thoughts,
            order.reads_thoughts and reader.is_thinking(order.prompt_ids),
        )
        self._choice_index = order.choice_index
        self._stop_ids = frozenset(order.sampling.stop_token_ids)
        self._sampled = _Sampled()
        self._decoder = reader.decoder()
        self._text: list[str] = []
        self._ends: list[int] = []  # of the tokens whose text is certain, as `DecodedText.ends`
        self._num_read = 0  # tokens that the decoder has
        self._num_chars = 0
        self._stops = StopFinder(order.stop)
        self._match: StopMatch | None = None
        self._splitter = TurnSplitter(reader, self._reading) if is_streamed else None
        self._held = ""  # text that may begin a stop string
        self._generations: list[Generation] = []

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._sampled.token_ids)

    @property
    def is_stopped(self) -> bool:
        """A stop string is complete: nothing may be added any more."""
        return self._match is not None

    def add(self, delta: Delta) -> ChatPiece | None:
        """Append sampled tokens. Returns what a client can be shown of them, if there is anything."""
        if self.is_stopped:
            raise InvariantBroken("tokens after a stop string")
        self._sampled.add(delta)
        # A stop token is the turn's end and no text, unless something follows it.
        ids = self._sampled.token_ids
        text = self._read(len(ids) - 1 if ids and ids[-1] in self._stop_ids else len(ids))
        if self._splitter is None or self.is_stopped:
            return None
        text = self._held + text
        num_free = len(text) - self._stops.num_held
        self._held = text[num_free:]
        increment = self._splitter.add(text[:num_free])
        return None if increment.is_empty else self._piece(increment, len(self._ends))

    def end(self, generation: Generation) -> None:
        """Note how an engine request ended; its tokens were added. After an abort another one follows."""
        self._generations.append(generation)

    def finish(self) -> tuple[ChatPiece, Reply]:
        """The last piece, and the reply."""
        last = self._generations[-1] if self._generations else None
        is_closed = last is not None and last.finish_reason is FinishReason.STOP
        if not self.is_stopped and not is_closed:
            self._read(len(self._sampled.token_ids))
        if not self.is_stopped:
            self._append(self._decoder.finish())
        is_closed = is_closed and not self.is_stopped
        num_tokens = len(self._sampled.token_ids)
        turn = self._reader.read(self._decoded(), self._reading)
        is_ended = is_closed or self.is_stopped
        token_ids, logprobs = self._sampled.arrays()
        reply = Reply(
            message=turn.message,
            token_ids=token_ids,
            logprobs=logprobs,
            weight_versions=tuple(self._sampled.spans),
            finish_reason=FinishReason.STOP if is_ended else FinishReason.LENGTH,
            is_closed=is_closed,
            stop_text=self._match.text if self._match is not None else "",
            num_reasoning_tokens=turn.num_reasoning_tokens,
            cached_tokens=self._generations[0].cached_tokens if self._generations else 0,
            replica_id=last.replica_id if last is not None else "",
            top_logprobs=tuple(self._sampled.top_logprobs),
        )
        increment = Increment() if self._splitter is None else self._splitter.finish(turn.message)
        return replace(self._piece(increment, num_tokens), finish=finish_of(reply)), reply

    def _read(self, num_ids: int) -> str:
        """Decode the ids up to there; returns the text that is new."""
        decoded = self._decoder.add(self._sampled.token_ids[self._num_read : num_ids])
        self._num_read = num_ids
        return self._append(decoded)

    def _append(self, decoded: DecodedText) -> str:
        """Append text, and look for stop strings: a found one cuts the tokens."""
        self._ends.extend(self._num_chars + end for end in decoded.ends)
        self._num_chars += len(decoded.text)
        self._text.append(decoded.text)
        self._match = self._stops.add(decoded.text)
        if self._match is not None:
            num_kept = bisect_left(self._ends, self._match.end) + 1
            self._sampled.cut(num_kept)
            del self._ends[num_kept:]
        return decoded.text

    def _decoded(self) -> DecodedText:
        """What the turn shows: nothing from a stop string on."""
        num_chars = self._num_chars if self._match is None else self._match.start
        return DecodedText("".join(self._text)[:num_chars], tuple(min(end, num_chars) for end in self._ends))

    def _piece(self, increment: Increment, num_tokens: int) -> ChatPiece:
        """A piece with the tokens up to there that no earlier one had: those that no stop string can cut."""
        token_ids, logprobs, top_logprobs, spans = self._sampled.take(num_tokens)
        return ChatPiece(
            self._choice_index,
            increment.content,
            increment.reasoning,
            increment.calls,
            token_ids,
            logprobs,
            top_logprobs,
            spans,
        )


class _Sampled:
    """A turn's tokens: aligned, and rounded as they are stored."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []  # each a float32
        self.top_logprobs: list[tuple[tuple[int, float], ...]] = []
        self.spans: list[WeightVersionSpan] = []
        self._num_taken = 0

    def add(self, delta: Delta) -> None:
        start = len(self.token_ids)
        self.token_ids += delta.token_ids
        self.logprobs += np.asarray(delta.logprobs, np.float32).tolist()
        self.top_logprobs += [
            tuple((token_id, float(np.float32(logprob))) for token_id, logprob in tops)
            for tops in delta.top_logprobs
        ]
        for span in delta.weight_versions:
            self._add_span(WeightVersionSpan(span.version, start + span.start, start + span.end))

    def cut(self, num_tokens: int) -> None:
        """Drop what comes after the first tokens."""
        del self.token_ids[num_tokens:], self.logprobs[num_tokens:], self.top_logprobs[num_tokens:]
        self.spans = _clipped(self.spans, 0, num_tokens)

    def take(
        self, end: int
    ) -> tuple[tuple[int, ...], tuple[float, ...], TopLogprobs, tuple[WeightVersionSpan, ...]]:
        """What was not taken yet up to `end`: ids, logprobs, alternatives, and spans with offsets within it."""
        start, self._num_taken = self._num_taken, end
        spans = [
            WeightVersionSpan(span.version, span.start - start, span.end - start)
            for span in _clipped(self.spans, start, end)
        ]
        ids, logprobs = self.token_ids[start:end], self.logprobs[start:end]
        return tuple(ids), tuple(logprobs), tuple(self.top_logprobs[start:end]), tuple(spans)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.token_ids, np.int32), np.array(self.logprobs, np.float32)

    def _add_span(self, span: WeightVersionSpan) -> None:
        if self.spans and self.spans[-1].version == span.version:
            self.spans[-1] = WeightVersionSpan(span.version, self.spans[-1].start, span.end)
        else:
            self.spans.append(span)


def _clipped(spans: list[WeightVersionSpan], start: int, end: int) -> list[WeightVersionSpan]:
    clipped = [WeightVersionSpan(s.version, max(s.start, start), min(s.end, end)) for s in spans]
    return [span for span in clipped if span.start < span.end]


async def _deltas(
    engine: SessionEngine, reader: TurnReader, order: SampleOrder, builder: ReplyBuilder, *, is_streamed: bool
) -> AsyncGenerator[Delta, None]:
    """A turn's tokens, over all engine requests that it takes; the consumer adds each to the builder."""
    deadline_at = asyncio.get_running_loop().time() + order.timeout_s
    for continuation in range(MAX_CONTINUATIONS):
        request = _request(order, builder.token_ids, continuation, deadline_at)
        exchange = (_stream if is_streamed else _generate)(engine, request, reader.vocab_size, deadline_at)
        async with aclosing(exchange) as items:
            async for item in items:
                if isinstance(item, Delta):
                    yield item
                else:
                    builder.end(item)
                    is_aborted = item.finish_reason is FinishReason.ABORT
        if not is_aborted or len(builder.token_ids) >= order.sampling.max_tokens:
            return
        if order.sampling.constraint is not None and builder.token_ids:
            raise EnginePaused("a pause cut a reply whose text is constrained: it must be sampled again")
    raise InvariantBroken(f"a turn was aborted {MAX_CONTINUATIONS} times")


def _request(
    order: SampleOrder, sampled_ids: tuple[int, ...], continuation: int, deadline_at: float
) -> GenerateRequest:
    num_sampled, sampling = len(sampled_ids), order.sampling
    if num_sampled:
        sampling = replace(
            sampling,
            max_tokens=sampling.max_tokens - num_sampled,
            min_tokens=max(sampling.min_tokens - num_sampled, 0),
        )
    return GenerateRequest(
        request_id=f"{order.request_id}.{continuation}",
        token_ids=order.prompt_ids + sampled_ids,
        sampling=sampling,
        timeout_s=max(deadline_at - asyncio.get_running_loop().time(), 0.001),
        trajectory_id=order.trajectory_id,
        kv_version=order.kv_version,
    )


async def _generate(
    engine: SessionEngine, request: GenerateRequest, vocab_size: int, deadline_at: float
) -> AsyncGenerator[Delta | Generation, None]:
    """An unstreamed request, as a stream of one delta."""
    try:
        async with asyncio.timeout_at(deadline_at):
            generation = await engine.generate(request)
    except TimeoutError as error:
        raise _too_late(request) from error
    check_generation(request, generation, vocab_size)
    ids, logprobs = generation.token_ids, generation.logprobs
    yield Delta(ids, logprobs, generation.weight_versions, generation.top_logprobs)
    yield generation


async def _stream(
    engine: SessionEngine, request: GenerateRequest, vocab_size: int, deadline_at: float
) -> AsyncGenerator[Delta | Generation, None]:
    """A streamed request: every delta is checked before it is passed on, and the whole at its end."""
    source = engine.stream(request)
    streamed: list[int] = []
    async with aclosing(source):  # type: ignore[type-var] # an async generator
        while True:
            try:
                async with asyncio.timeout_at(deadline_at):
                    item = await anext(source, None)
            except TimeoutError as error:
                raise _too_late(request) from error
            if item is None:
                raise MalformedEngineResponse(f"request {request.request_id}: its stream has no end")
            if isinstance(item, Generation):
                break
            _check_delta(request, item, vocab_size)
            streamed += item.token_ids
            yield item
    check_generation(request, item, vocab_size)
    if item.token_ids != tuple(streamed):
        raise MalformedEngineResponse(f"request {request.request_id}: its stream is not its generation")
    yield item


def _check_delta(request: GenerateRequest, delta: Delta, vocab_size: int) -> None:
    """A delta is checked as a generation that was aborted after it."""
    so_far = Generation(
        request.request_id, delta.token_ids, delta.logprobs, delta.weight_versions, FinishReason.ABORT
    )
    check_generation(request, replace(so_far, top_logprobs=delta.top_logprobs), vocab_size)


def _too_late(request: GenerateRequest) -> DeadlineExceeded:
    return DeadlineExceeded(f"request {request.request_id} was not answered in time")
