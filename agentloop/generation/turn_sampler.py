"""Samples one turn from an engine, whole or as a stream, for agent loops and for the chat endpoint.

Invariants: a stream's pieces concatenate to its reply, and the reply equals that of the whole turn under the same
seed. An engine's abort is continued and never shown. No engine request outlives the call that made it.

Stop strings apply to all text of the policy, also in tool calls, but not to the stop token, and to reasoning only
with `stop_in_reasoning`. The first complete stop string ends the text; of several that end at the same character,
the longest counts. The ids end with the token that completes it, and later tokens are dropped. The result does not
depend on the pieces in which the text arrives.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from agentloop.concurrency.clock import Stopwatch
from agentloop.errors import InvalidRequest, InvariantBroken
from agentloop.generation.deadline import Deadline
from agentloop.generation.leased_engine import AbortRule, AbortSwitch, LeasedEngine, TurnClock, TurnOptions
from agentloop.generation.stream_splitter import MarkSet, TurnSplitter
from agentloop.generation.turn_reader import MAX_BLANKS, Reading, TurnFinish, TurnPiece, TurnReader, finish_of
from agentloop.observability.metrics import MetricsTally
from agentloop.parsers.base import DecodedText, Delimiters
from agentloop.trajectory.node import Reply
from agentloop.types import (
    FinishReason,
    GenerateRequest,
    Generation,
    Message,
    ToolCall,
    ToolCallStatus,
    TopLogprobs,
)
from agentloop.values.aux_rows import packed
from agentloop.values.sampled_tokens import SampledTokens
from agentloop.values.sampling import long_constraint, turn_sampling

_MIN_LOOK_CHARS = 32  # characters of new text before the next search for the turn's first call


class _TurnPart(Enum):
    """The part of a turn's text that `AnswerText` is in."""

    START = "start"  # the turn may begin with reasoning
    REASONING = "reasoning"
    BLANKS = "blanks"  # after reasoning
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn to sample. Its `request` is complete: room, stop tokens, constraint and the choice's own seed.

    `request.timeout_s` bounds each engine request. At `deadline` the caller ends the turn by itself; without one
    the whole turn has `request.timeout_s`. Only whole turns without stop strings may have `request.keeps_late`.
    """

    request: GenerateRequest
    reading: Reading
    stop: tuple[str, ...] = ()
    stop_in_reasoning: bool = True
    is_parallel: bool = True  # false: the turn ends after its first complete call
    choice_index: int = 0
    deadline: Deadline | None = None
    stopwatch: Stopwatch | None = None  # the trajectory's; None: the reply has no times
    switch: AbortSwitch | None = None  # by which its caller may end it early


async def sample_turn(
    engine: LeasedEngine,
    reader: TurnReader,
    wanted: TurnRequest,
    continues_after_abort: AbortRule | None = None,
    show: Callable[[TurnPiece], None] | None = None,
) -> Reply:
    """Sample the whole turn; with `show`, stream it and pass it each piece. Raises the engine's errors.

    After an abort by the engine `continues_after_abort` gets the turn's tokens; if it returns False, the turn ends
    with FinishReason.ABORT. Tokens that cannot be continued are sampled again, because none of them was shown.
    """
    if show is not None:
        async with aclosing(stream_turn(engine, reader, wanted)) as shown:
            async for piece in shown:
                if isinstance(piece, Reply):
                    return piece
                show(piece)
        raise InvariantBroken("stream_turn ended before it yielded a Reply: report this bug of agentloop")
    turn, request = TurnText(reader, wanted, engine.tally), wanted.request
    options: TurnOptions = {"deadline": wanted.deadline, "clock": turn.clock, "switch": wanted.switch}
    options["continues_after_abort"] = continues_after_abort
    if not wanted.stop and wanted.is_parallel:
        return turn.finish(await engine.generate(request, turn.sampled, **options))
    async with aclosing(engine.stream(request, turn.sampled, is_shown=False, **options)) as items:
        async for item in items:
            if isinstance(item, Generation):
                return turn.finish(item)
            turn.read()
            if turn.is_stopped:
                break
    return turn.finish(None)


async def stream_turn(
    engine: LeasedEngine, reader: TurnReader, wanted: TurnRequest
) -> AsyncGenerator[TurnPiece | Reply, None]:
    """Sample the turn in pieces as they come; the last item is the reply. Close it to end the request.

    Raises as `sample_turn`, and EnginePaused if an abort cut a turn that `looks_back`: no engine can continue a
    grammar in its middle, and shown pieces cannot be taken back.
    """
    turn, last = TurnText(reader, wanted, engine.tally, is_streamed=True), None
    stream = engine.stream(
        wanted.request, turn.sampled, deadline=wanted.deadline, clock=turn.clock, switch=wanted.switch
    )
    async with aclosing(stream) as items:
        async for item in items:
            if isinstance(item, Generation):
                last = item
            elif (piece := turn.read()) is not None:
                yield piece
            if turn.is_stopped:
                break
    reply = turn.finish(last)
    yield turn.last_piece(reply)
    yield reply


class TurnText:
    """Reads a turn's tokens as they arrive: returns pieces, and the reply at the end.

    The turn's rounds (`leased_engine.py`) add tokens to `sampled`.
    """

    def __init__(
        self, reader: TurnReader, wanted: TurnRequest, tally: MetricsTally, *, is_streamed: bool = False
    ) -> None:
        """`is_streamed`: `read` returns pieces."""
        self.sampled = SampledTokens()
        self.clock = None if wanted.stopwatch is None else TurnClock(wanted.stopwatch)
        self._wanted = wanted
        self._reader = reader
        self._tally = tally
        self._sampling = wanted.request.sampling
        is_thinking = wanted.reading.reads_reasoning and reader.is_thinking(wanted.request.token_ids)
        self._reading = replace(wanted.reading, is_thinking=is_thinking)
        self._reads_one_call = wanted.reading.reads_calls and not wanted.is_parallel
        self._text = self._new_text()
        self._splitter = (
            TurnSplitter(reader, self._reading, wanted.choice_index, gives_calls=not self._reads_one_call)
            if is_streamed
            else None
        )
        self._held = ""  # text that may begin a stop string
        self._num_given = 0  # tokens in earlier pieces
        self._next_look = _MIN_LOOK_CHARS  # length of the text at the next search for its first call
        self._has_first_call = False  # there is text after it

    @property
    def is_stopped(self) -> bool:
        """True if a stop string, or the only call of a turn, is complete: no more tokens may be added."""
        return self._text.match is not None or self._has_first_call

    def _new_text(self) -> _GrowingText:
        wanted, reads_reasoning = self._wanted, self._reading.reads_reasoning
        skips_reasoning = bool(wanted.stop) and reads_reasoning and not wanted.stop_in_reasoning
        answer = (
            AnswerText(self._reader.delimiters, is_thinking=self._reading.is_thinking) if skips_reasoning else None
        )
        return _GrowingText(self._reader, wanted.stop, answer)

    def read(self) -> TurnPiece | None:
        """Read the new tokens. Returns the piece that is final for the client, if any."""
        if self.is_stopped:
            raise InvariantBroken("tokens after a stop string")
        # A stop token at the end is not text.
        ids = self.sampled.token_ids
        if len(ids) < self._text.num_read:  # the turn was cut and is sampled again
            self._text, self._next_look = self._new_text(), _MIN_LOOK_CHARS
        text = self._text.read(ids, len(ids) - 1 if ids and ids[-1] in self._sampling.stop_token_ids else len(ids))
        if self.is_stopped:
            self.sampled.cut(self._text.num_kept)
        if self._reads_one_call and self._text.num_chars >= self._next_look:
            # So that all searches take linear time.
            self._next_look = self._text.num_chars * 5 // 4 + _MIN_LOOK_CHARS
            self._has_first_call = self._reader.first_call(self._text.shown, self._reading) is not None
        if self._splitter is None or self.is_stopped:
            return None
        text = self._held + text
        num_free = len(text) - self._text.num_held
        self._held = text[num_free:]
        shown = self._splitter.add(text[:num_free])
        # The tokens from the mark of the only call on may be cut.
        is_uncertain = self._reads_one_call and self._splitter.is_waiting
        num_tokens = self._num_given if is_uncertain else self._text.num_certain
        return None if shown.is_empty else self._piece(shown, num_tokens)

    def finish(self, last: Generation | None) -> Reply:
        """Read the rest and return the reply.

        `last` is the engine's generation; None if a stop string ended the turn.
        """
        stopped_at = self._text.match
        reason = FinishReason.STOP if last is None else last.finish_reason
        has_stop_token = last is not None and stopped_at is None and reason is FinishReason.STOP
        if stopped_at is None:
            num_ids = len(self.sampled)
            self._text.finish(self.sampled.token_ids, num_ids - 1 if has_stop_token else num_ids)
            stopped_at = self._text.match  # the last characters may complete a stop string
            if stopped_at is not None:
                self.sampled.cut(self._text.num_kept)
        decoded, closing = self._text.shown, None
        if self._reads_one_call and (ended := self._reader.first_call(decoded, self._reading)) is not None:
            (decoded, closing), reason, stopped_at, has_stop_token = ended, FinishReason.STOP, None, False
            self.sampled.cut(len(decoded.ends))
        has_stop_token = has_stop_token and stopped_at is None
        message, num_reasoning_tokens = self._reader.read(decoded, self._reading)
        if num_malformed := sum(call.status is ToolCallStatus.MALFORMED for call in message.tool_calls):
            self._tally.count("malformed_calls_total", self._reader.parser_name, by=num_malformed)
        unread: tuple[ToolCall, ...] = ()
        if self._reading.shows_unread_calls:
            message, unread = with_unread_calls_as_content(message, self._reading.turn_index)
        raw_logprobs = self.sampled.raw_logprobs
        return Reply(
            message=message,
            token_ids=np.array(self.sampled.token_ids, np.int32),
            logprobs=np.array(self.sampled.logprobs, np.float32),
            weight_versions=self.sampled.weight_versions,
            finish_reason=reason if stopped_at is None else FinishReason.STOP,
            is_closed=has_stop_token and self._reader.ends_turn(self.sampled.token_ids[-1]),
            stop_text=stopped_at.text if stopped_at is not None else "",
            num_reasoning_tokens=num_reasoning_tokens,
            cached_tokens=last.cached_tokens if last is not None else 0,
            replica_id=last.replica_id if last is not None else "",
            engine=last.engine if last is not None else "",
            quantization=last.quantization if last is not None else "",
            top_logprobs=_rounded(self.sampled.top_logprobs),
            raw_logprobs=np.array(raw_logprobs, np.float32) if raw_logprobs else None,
            sampling=turn_sampling(self._sampling, self.sampled.logprobs_mode),
            seed=self._sampling.seed,
            unread_calls=unread,
            constraint=long_constraint(self._sampling),
            times=None if self.clock is None else self.clock.times(),
            closing=closing,
            aux=packed(self.sampled.aux),
        )

    def last_piece(self, reply: Reply) -> TurnPiece:
        """Return the last piece: the rest of the reply, with its finish reason."""
        if self._splitter is None:
            raise InvariantBroken("the last piece of a turn that is not streamed")
        return self._piece(self._splitter.finish(reply.message), len(self.sampled), finish_of(reply))

    def _piece(self, shown: TurnPiece, num_tokens: int, finish: TurnFinish | None = None) -> TurnPiece:
        """Return a piece with the next tokens up to `num_tokens`, which no stop string can cut.

        Logprobs are rounded to float32, as in the reply.
        """
        tokens, self._num_given = self.sampled.since(self._num_given, num_tokens), num_tokens
        return TurnPiece(
            shown.choice_index,
            shown.content,
            shown.reasoning,
            shown.calls,
            tokens.token_ids,
            tuple(np.asarray(tokens.logprobs, np.float32).tolist()),
            _rounded(tokens.top_logprobs),
            tokens.weight_versions,
            finish,
        )


def with_unread_calls_as_content(message: Message, turn_index: int) -> tuple[Message, tuple[ToolCall, ...]]:
    """Append the text of malformed calls to a message's content. Returns the message and these calls.

    A call that the end of the turn cut after its name stays a call, as in OpenAI's API. The remaining calls are
    renumbered, so that calls that a stream has released keep their ids.
    """
    unread = [call for call in message.tool_calls if _is_unread(call)]
    if not unread:
        return message, ()
    kept = (call for call in message.tool_calls if not _is_unread(call))
    calls = tuple(replace(call, id=f"call_{turn_index}_{place}") for place, call in enumerate(kept))
    content = "\n".join(text for text in (message.content, *(call.text for call in unread)) if text)
    return replace(message, content=content, tool_calls=calls), tuple(replace(call, text="") for call in unread)


def _is_unread(call: ToolCall) -> bool:
    return call.status is ToolCallStatus.MALFORMED and call.partial_arguments is None


class _GrowingText:
    """The text of a turn while its ids arrive, up to the first stop string."""

    def __init__(self, reader: TurnReader, stops: Sequence[str], answer: AnswerText | None = None) -> None:
        """`answer` finds the text in which stop strings count; None: all of it."""
        self.ends: list[int] = []  # as `DecodedText.ends`, for tokens whose text is certain
        self.match: StopMatch | None = None
        self.num_kept = 0  # tokens up to the end of the match
        self._reader = reader
        self._decoder = reader.decoder()
        self._stops = StopFinder(stops)
        self._answer = answer
        self._text: list[str] = []
        self.num_chars = 0
        self.num_read = 0  # tokens given to the decoder

    @property
    def num_held(self) -> int:
        """Characters at the end that may begin a stop string."""
        return self._stops.num_held + (0 if self._answer is None else self._answer.num_held)

    @property
    def num_certain(self) -> int:
        """The number of tokens that no stop string can cut."""
        num_held = 0 if self._answer is None else self._answer.num_held
        return bisect_right(self.ends, self.num_chars - num_held)

    @property
    def shown(self) -> DecodedText:
        """The text before the stop string, if one was found."""
        text = "".join(self._text)
        if self.match is None:
            return DecodedText(text, tuple(self.ends))
        num_chars = self.match.start
        return DecodedText(text[:num_chars], tuple(min(end, num_chars) for end in self.ends))

    def read(self, ids: Sequence[int], num_ids: int) -> str:
        """Decode the ids up to `num_ids` and return the new text. A stop string cuts `ends`."""
        decoded = self._decoder.add(ids[self.num_read : num_ids])
        self.num_read = num_ids
        return self._append(decoded)

    def finish(self, ids: Sequence[int], num_ids: int) -> None:
        """Decode the rest, also bytes that were held back."""
        if self.num_read == 0:  # nothing was read in pieces
            self._append(self._reader.decode(ids[:num_ids]), is_last=True)
            return
        self.read(ids, num_ids)
        if self.match is None:
            self._append(self._decoder.finish(), is_last=True)

    def _append(self, decoded: DecodedText, *, is_last: bool = False) -> str:
        self.ends.extend(self.num_chars + end for end in decoded.ends)
        self.num_chars += len(decoded.text)
        self._text.append(decoded.text)
        parts = [(0, decoded.text)] if self._answer is None else self._answer.add(decoded.text, is_last=is_last)
        for num_skipped, text in parts:
            self._stops.skip(num_skipped)
            if (match := self._stops.add(text)) is not None:
                self.match = match
                break
        if self.match is not None:
            self.num_kept = bisect_left(self.ends, self.match.end) + 1
            del self.ends[self.num_kept :]
        return decoded.text


class AnswerText:
    """Separates the answer from the reasoning while a turn's text arrives.

    Reasoning is at the start of the turn, as for `TurnReader`. In formats with message headers it may also be
    between other messages. Blanks after reasoning do not belong to the answer.
    """

    def __init__(self, marks: Delimiters, *, is_thinking: bool) -> None:
        self._open, self._close = marks.reasoning.open, MarkSet((marks.reasoning.close,))
        self._later = MarkSet((marks.reasoning.open,)) if marks.headers else None
        self._state = _TurnPart.REASONING if is_thinking else _TurnPart.START
        self._text = ""  # not yet assigned to a part

    @property
    def num_held(self) -> int:
        """Characters at the end of the answer that may begin reasoning."""
        return len(self._text) if self._state is _TurnPart.ANSWER else 0

    def add(self, text: str, *, is_last: bool = False) -> list[tuple[int, str]]:
        """Return the certain parts: a number of characters to skip, and the answer text after them."""
        parts: list[tuple[int, str]] = []
        self._text += text
        num_skipped, state = 0, None
        while state is not self._state:
            text, state = self._text, self._state
            match state:
                case _TurnPart.START:
                    bare = text.lstrip()
                    may_open = len(text) - len(bare) <= MAX_BLANKS and self._open.startswith(
                        bare[: len(self._open)]
                    )
                    if may_open and len(bare) >= len(self._open):
                        num_skipped += len(text) - len(bare) + len(self._open)
                        self._text, self._state = bare[len(self._open) :], _TurnPart.REASONING
                    elif not may_open or is_last:
                        self._state = _TurnPart.ANSWER
                case _TurnPart.REASONING:
                    _, mark, self._text = self._close.split(text)
                    num_skipped += len(text) - len(self._text)
                    if mark is not None:
                        self._state = _TurnPart.BLANKS
                case _TurnPart.BLANKS:
                    self._text = text.lstrip()
                    num_skipped += len(text) - len(self._text)
                    if self._text:
                        self._state = _TurnPart.ANSWER
                case _TurnPart.ANSWER:
                    before, mark, self._text = (text, None, "") if self._later is None else self._later.split(text)
                    if is_last and mark is None:
                        before, self._text = text, ""
                    parts.append((num_skipped, before))
                    num_skipped = 0
                    if mark is not None:
                        num_skipped, self._state = len(mark), _TurnPart.REASONING
        return [*parts, (num_skipped, "")]


def _rounded(tops: Sequence[tuple[tuple[int, float], ...]]) -> TopLogprobs:
    """Return alternatives with logprobs rounded to float32."""
    return tuple(tuple((token_id, float(np.float32(logprob))) for token_id, logprob in top) for top in tops)


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string's characters `[start, end)` in the whole text."""

    text: str
    start: int
    end: int


class StopFinder:
    """Searches a growing text for stop strings, up to the first match."""

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises InvalidRequest for an empty stop string: it would end every text at once."""
        if not all(stops):
            raise InvalidRequest("a stop string is empty", param="stop")
        self._stops = stops
        self._num_kept = max(map(len, stops), default=1) - 1  # characters that may begin a match
        self._tail = ""
        self._num_read = 0  # characters before the tail

    @property
    def num_held(self) -> int:
        """The number of characters at the end that may begin a stop string."""
        return max(
            (_num_begun(stop, self._tail[-len(stop) + 1 :]) for stop in self._stops if len(stop) > 1), default=0
        )

    def skip(self, num_chars: int) -> None:
        """Skip characters: no match may include or span them."""
        if num_chars:
            self._num_read += len(self._tail) + num_chars
            self._tail = ""

    def add(self, text: str) -> StopMatch | None:
        """Return the first match that `text` completes; no text may follow one."""
        text = self._tail + text
        ends = [(place + len(stop), -len(stop), stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if ends:
            end, _, stop = min(ends)
            return StopMatch(stop, self._num_read + end - len(stop), self._num_read + end)
        num_dropped = max(len(text) - self._num_kept, 0)
        self._tail = text[num_dropped:]
        self._num_read += num_dropped
        return None


def _num_begun(stop: str, tail: str) -> int:
    """Return the length of the longest end of `tail` that begins `stop`; `tail` is shorter than `stop`."""
    place = tail.find(stop[0])
    while place >= 0 and not stop.startswith(tail[place:]):
        place = tail.find(stop[0], place + 1)
    return len(tail) - place if place >= 0 else 0
